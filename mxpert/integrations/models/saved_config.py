"""What a converted model's config says, so that its checkpoint can be read again."""

from __future__ import annotations

from typing import Any

import torch

from ...formats.spec import ScaleRule
from ...weights import GateUpOrder
from .experts import FoundExperts, unconverted_modules

GPT_OSS_UNCONVERTED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""``modules_to_not_convert`` of the published gpt-oss configs."""


def configured_models(model: torch.nn.Module) -> list[Any]:
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


def mark_quantized(model: Any, found: list[FoundExperts], scale_rule: ScaleRule | None) -> None:
    """Make every Transformers model that holds the experts `found` save a checkpoint that loads.

    Its ``config.quantization_config`` is written as `mxpert quantize` and gpt-oss do, and
    Transformers no longer splits the published tensors when it saves. Models without a config are
    left alone.
    """
    marked = set()
    parents = {parent for experts in found for parent, _ in experts.places}
    for holder in configured_models(model):
        if parents.isdisjoint(holder.modules()):
            continue
        if id(holder.config) not in marked:
            marked.add(id(holder.config))
            names = (
                [*GPT_OSS_UNCONVERTED]
                if getattr(holder.config, "model_type", "") == "gpt_oss"
                else unconverted_modules(holder)
            )
            holder.config.quantization_config = quantization_config(names, scale_rule)
        _hide_expert_conversions(holder)


def _hide_expert_conversions(model: Any) -> None:
    """Drop the weight conversions of experts, which Transformers undoes when it saves.

    They are made for dense ``gate_up_proj`` and would cut ``gate_up_proj_blocks`` into
    ``w1.weight_blocks`` and the like.
    """
    if not hasattr(model, "save_pretrained"):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    dense = getattr(model, "_weight_conversions", None)
    if dense is None:  # built, not loaded: the conversions that Transformers would choose itself
        dense = [
            entry
            for entry in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(entry, PrefixChange)
        ]
    model._dense_weight_conversions = dense
    model._weight_conversions = without_expert_conversions(dense)


def without_expert_conversions(conversions: list[Any]) -> list[Any]:
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


def unmark_quantized(model: Any) -> None:
    """Undo `mark_quantized`."""
    for holder in configured_models(model):
        if getattr(holder.config, "quantization_config", None) is not None:
            del holder.config.quantization_config
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
