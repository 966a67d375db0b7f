"""save_quantized: the quantised checkpoint of a model that trains in MXFP8."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import Checks, UnsupportedError, message
from ...formats.spec import ScaleRule, ScaleRuleLike
from ...formats.weight_tensor import WeightFormatName, parse_weight_format
from ..models.expert_modules import MXExperts, TrainableExperts
from ..models.saved_config import configured_models
from .quantize import QuantizeReport, quantize_checkpoint

_OP = "save_quantized"


def save_quantized(
    model: torch.nn.Module,
    folder: Path | str,
    *,
    weight_format: WeightFormatName = "mxfp4",
    scale_rule: ScaleRuleLike | None = None,
    device: torch.device | str = "cpu",
) -> QuantizeReport:
    """Write a model that trains in MXFP8 as a checkpoint with quantised experts.

    The experts have the bits of ``mxpert.restore(model).save_pretrained(…)`` followed by
    ``mxpert quantize``; the model stays as it is, and training may go on. Transformers (with
    ``experts_implementation="mxpert"``), vLLM and SGLang load the folder. The dense checkpoint is
    written beside it for the time of the call, and takes its space there. Tokenizers are saved by
    their own ``save_pretrained``.

    Args:
        model: what ``mxpert.convert(model, recipe=…)`` returned, or a module that contains it.
        folder: where to write; it must not exist. It appears when it is complete.
        weight_format: as of `quantize_checkpoint`, which says how each is stored.
        scale_rule: how a block's scale follows from its maximum, in MXFP4 and MXFP8; a ScaleRule or
            its name. None is RCEIL.
        device: device that quantises.

    Returns:
        Sizes and errors of each projection, verified.

    Raises:
        TypeError: `model` is no Module, or another wrong type.
        ValueError: a model without experts that train in MXFP8, weights that are not finite, or a
            folder that exists. No folder is left behind.
        UnsupportedError: a rank's part of a model, or one that `mxpert quantize` does not know.

    Example:
        >>> import mxpert
        >>> mxpert.save_quantized(torch.nn.Linear(2, 2), "/tmp/out")
        Traceback (most recent call last):
        ValueError: save_quantized: Linear — need experts that train in MXFP8, got none; \
call mxpert.convert(model, recipe=MXFP8Recipe()) first
    """
    need, folder = Checks(_OP), Path(folder)
    rule = None if scale_rule is None else ScaleRule.parse(scale_rule, _OP, "scale_rule")
    parse_weight_format(weight_format, _OP)
    if not isinstance(model, torch.nn.Module):
        raise need.type_error("model", "a Module, a model in memory", type(model).__name__)
    _check_experts(model, need)
    need(
        not folder.exists() and not folder.is_symlink(),
        str(folder),
        "a folder that does not exist",
        "one that does",
        "name another one, or remove it yourself",
    )
    holder = configured_models(model)[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        dense, quantized = Path(work) / "dense", Path(work) / "quantized"
        holder.save_pretrained(dense)
        report = quantize_checkpoint(
            dense, quantized, weight_format=weight_format, scale_rule=rule, device=device
        )
        failure = "; ".join(report.failures[:1])
        need(report.verified, str(folder), "the bits that were quantised", failure, "try again")
        quantized.rename(folder)
    return replace(report, source=type(holder).__name__, destination=str(folder))


def _check_experts(model: torch.nn.Module, need: Checks) -> None:
    """Check that the model has trained experts, all of them here, and a config."""
    trained = [module for module in model.modules() if isinstance(module, TrainableExperts)]
    name = type(model).__name__
    need(
        not any(isinstance(module, MXExperts) for module in model.modules()),
        name,
        "experts that train in MXFP8",
        "experts in MXFP4",
        "model.save_pretrained(folder) writes them",
    )
    need(
        bool(trained),
        name,
        "experts that train in MXFP8",
        "none",
        "call mxpert.convert(model, recipe=MXFP8Recipe()) first",
    )
    holders = configured_models(model)
    held = set(holders[0].modules()) if holders else set()
    need(held.issuperset(trained), name, "one Transformers model with all experts", len(holders))
    is_split = any(hasattr(each, "device_mesh") for each in model.parameters())
    if is_split or any(module.expert_parallel is not None for module in trained):
        remedy = "save the state of mxpert.training.full_state_dict(model) in a whole model"
        got = "a part on each rank"
        raise UnsupportedError(message(_OP, name, "all parameters in this process", got, remedy))
