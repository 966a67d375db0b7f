"""The config of a converted model, with which its checkpoint loads again."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ...formats.spec import ScaleRule
from ...moe.weights import GateUpOrder
from .experts import FoundExperts, is_experts, starred, unconverted_modules
from .implementations import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

GPT_OSS = "gpt_oss"
GPT_OSS_UNCONVERTED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""``modules_to_not_convert`` of the published gpt-oss configs."""


def configured_models(model: torch.nn.Module) -> list[PreTrainedModel]:
    """The models with a config in `model`, itself included, outermost first.

    A wrapper without a config (a trainer's module, torch.compile's) is not one of them, the
    Transformers model inside of it is. Of models that share one config, all are listed.
    """
    found = [
        module
        for module in model.modules()
        if hasattr(type(module), "save_pretrained") and hasattr(module, "config")
    ]
    return found if found or not hasattr(model, "config") else [model]


def mark_quantized(
    model: torch.nn.Module, found: list[FoundExperts], scale_rule: ScaleRule | None
) -> None:
    """Make every Transformers model that holds the experts `found` save a checkpoint that loads.

    Its ``config.quantization_config`` is written as `mxpert quantize` and gpt-oss do, and
    Transformers no longer splits the published tensors when it saves. The config becomes the
    model's own: another model that was made from the same object keeps it as it was. Models
    without a config are left alone.
    """
    marked = set()
    parents = {parent for experts in found for parent, _ in experts.places}
    holders = [
        holder for holder in configured_models(model) if not parents.isdisjoint(holder.modules())
    ]
    _own_configs(holders, found)
    for holder in holders:
        if id(holder.config) not in marked:
            marked.add(id(holder.config))
            _write_config(holder, scale_rule)
        _hide_expert_conversions(holder)


def _own_configs(holders: list[PreTrainedModel], found: list[FoundExperts]) -> None:
    """Give these models copies of their configs, and all of their modules the same copies."""
    copies: dict[int, object] = {}
    for holder in holders:
        copy.deepcopy(holder.config, copies)  # also finds the configs inside of a config
    configs = {id(holder.config) for holder in holders}
    modules = {module for holder in holders for module in holder.modules()}
    modules |= {module for experts in found for module in experts.module.modules()}
    for module in modules:
        for name, value in vars(module).items():
            if id(value) in copies and (id(value) in configs or hasattr(value, "to_dict")):
                vars(module)[name] = copies[id(value)]


def _write_config(holder: PreTrainedModel, scale_rule: ScaleRule | None) -> None:
    config, model_type = holder.config, getattr(holder.config, "model_type", "")
    names = [*GPT_OSS_UNCONVERTED] if model_type == GPT_OSS else unconverted_modules(holder)
    dense = [name for name, module in holder.named_modules() if is_experts(module)]
    names = [name for name in names if name not in map(starred, dense)] + dense
    entry = quantization_config(names, scale_rule)
    if hasattr(holder, "save_pretrained"):
        from .mxfp4_config import Mxfp4Config

        config.quantization_config = Mxfp4Config(names, mxpert=entry["mxpert"])
    else:
        config.quantization_config = entry
    for name, value in implementation_entry(model_type).items():
        setattr(config, name, value)


def implementation_entry(model_type: object) -> dict[str, str]:
    """The part of a config.json beside its quantisation: the experts implementation.

    With mxpert imported the folder then loads without the option; without mxpert Transformers says
    that it does not know "mxpert". It reads gpt-oss's own checkpoints by itself.
    """
    return {} if model_type == GPT_OSS else {"experts_implementation": NAME}


def _hide_expert_conversions(model: PreTrainedModel) -> None:
    """Drop the weight conversions of experts, which Transformers undoes when it saves.

    They are made for dense ``gate_up_proj`` and would cut ``gate_up_proj_blocks`` into
    ``w1.weight_blocks`` and the like.
    """
    if not hasattr(model, "save_pretrained"):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    if hasattr(model, "_dense_weight_conversions"):
        return
    dense = getattr(model, "_weight_conversions", None)
    if dense is None:  # built, not loaded: the conversions that Transformers would choose itself
        dense = [
            entry
            for entry in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(entry, PrefixChange)
        ]
    model._dense_weight_conversions = dense
    model._weight_conversions = without_expert_conversions(dense)


def without_expert_conversions(conversions: list[WeightTransform]) -> list[WeightTransform]:
    """Weight conversions of Transformers, less those that compute dense experts."""
    from transformers.core_model_loading import WeightConverter

    return [
        entry
        for entry in conversions
        if not (
            isinstance(entry, WeightConverter)
            and any("experts" in pattern for pattern in entry.target_patterns)
        )
    ]


def unmark_quantized(model: torch.nn.Module) -> None:
    """Undo `mark_quantized`, and what Transformers keeps of a quantised checkpoint."""
    for holder in configured_models(model):
        for owner, name in (
            (holder.config, "quantization_config"),
            (holder.config, "experts_implementation"),
            (holder.config, "_is_quantized"),
            (holder, "hf_quantizer"),
            (holder, "quantization_method"),
            (holder, "is_quantized"),
            (holder, "save_pretrained"),  # of `forbid_saving`
        ):
            vars(owner).pop(name, None)
        if hasattr(holder, "_dense_weight_conversions"):
            holder._weight_conversions = holder._dense_weight_conversions
            del holder._dense_weight_conversions


def quantization_config(unconverted: list[str], scale_rule: ScaleRule | None) -> dict[str, Any]:
    """The entry; without a scale rule for codes that mxpert did not make.

    Example:
        >>> quantization_config(["lm_head"], None)["quant_method"]
        'mxfp4'
    """
    from ... import __version__  # mxpert's own __init__ imports this module before it states one

    rule = {} if scale_rule is None else {"scale_rule": scale_rule.value}
    return {
        "quant_method": "mxfp4",
        "modules_to_not_convert": unconverted,
        "mxpert": {"gate_up_order": GateUpOrder.INTERLEAVED.value, **rule, "version": __version__},
    }
