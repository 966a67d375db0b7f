"""What a converted model's config says, so that its checkpoint can be read again."""

from __future__ import annotations

from typing import Any

from ..formats.spec import ScaleRule
from ..weights import GateUpOrder
from .experts import FoundExperts, unconverted_modules

GPT_OSS_UNCONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                       "model.embed_tokens", "lm_head"]
"""``modules_to_not_convert`` of the published gpt-oss configs."""


def mark_quantized(model: Any, found: list[FoundExperts], scale_rule: ScaleRule | None) -> None:
    """Write ``config.quantization_config`` as `mxpert quantize` and gpt-oss do, and keep
    Transformers from splitting the published tensors when it saves; a model without a config is
    left alone."""
    config = getattr(model, "config", None)
    if config is not None:
        names = ([*GPT_OSS_UNCONVERTED] if getattr(config, "model_type", None) == "gpt_oss" else
                 unconverted_modules(model, [experts.name for experts in found]))
        config.quantization_config = quantization_config(names, scale_rule)
        _hide_expert_conversions(model)


def _hide_expert_conversions(model: Any) -> None:
    """Saving undoes what loading did to each name; it would cut ``gate_up_proj_blocks`` into
    ``w1.weight_blocks`` and the like, by the rule for dense ``gate_up_proj``."""
    if not hasattr(model, "save_pretrained"):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    dense = getattr(model, "_weight_conversions", None)
    if dense is None:  # not loaded but built: what Transformers itself would then undo
        dense = [entry for entry in get_model_conversion_mapping(model, add_legacy=False)
                 if not isinstance(entry, PrefixChange)]
    model._dense_weight_conversions = dense
    model._weight_conversions = [
        entry for entry in dense if not (isinstance(entry, WeightConverter) and any(
            "experts" in pattern for pattern in entry.target_patterns))]


def unmark_quantized(model: Any) -> None:
    """Take the entry away again."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        del model.config.quantization_config
    if hasattr(model, "_dense_weight_conversions"):
        model._weight_conversions = model._dense_weight_conversions
        del model._dense_weight_conversions


def quantization_config(unconverted: list[str], scale_rule: ScaleRule | None) -> dict[str, Any]:
    """The entry itself; without a scale rule where the codes are another's.

    Example:
        >>> quantization_config(["lm_head"], None)["quant_method"]
        'mxfp4'
    """
    from .. import __version__  # mxpert's own __init__ imports this module before it states one

    rule = {} if scale_rule is None else {"scale_rule": scale_rule.value}
    return {"quant_method": "mxfp4", "modules_to_not_convert": unconverted,
            "mxpert": {"gate_up_order": GateUpOrder.INTERLEAVED.value, **rule,
                       "version": __version__}}
