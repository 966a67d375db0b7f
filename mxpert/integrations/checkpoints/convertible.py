"""Whether `convert` will take a checkpoint's model, checked before anything is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsupportedError, message
from ...moe.weights import GateUpOrder
from ..models.experts import FoundExperts, find_experts
from .safetensors_files import CONFIG_FILE


def converter_experts(directory: Path, config: dict[str, Any], op: str) -> list[FoundExperts]:
    """The experts modules that `mxpert.convert` finds in a checkpoint's model; reads no weights.

    The model is built on the meta device.

    Args:
        directory: the checkpoint.
        config: its ``config.json``.
        op: the function that reports an error.

    Returns:
        FoundExperts in the model's order; none where Transformers is absent or has no class for
        the model, because nothing can be asked there.

    Raises:
        UnsupportedError: a model that the converter refuses, and with it the loader.
    """
    model = _model_on_meta(directory, config)
    if model is None:
        return []
    try:
        return find_experts(model, op)
    except (UnsupportedError, TypeError, ValueError) as error:
        need, _, got = str(error).partition(" — need ")[2].partition(", got ")
        raise UnsupportedError(
            message(
                op,
                str(directory / CONFIG_FILE),
                f"a model that mxpert can load ({need})",
                f"{type(model).__name__} with {got.partition(';')[0]}",
                "nothing was written; see docs/supported-models.md",
            )
        ) from error


def stacked_order(found: list[FoundExperts]) -> GateUpOrder | None:
    """The gate/up order of a model's stacked experts; None if nobody knows it."""
    orders = {experts.order for experts in found}
    return orders.pop() if len(orders) == 1 else None


def _model_on_meta(directory: Path, config: dict[str, Any]) -> Any:
    """The checkpoint's model without weights; None where Transformers cannot build it."""
    if importlib.util.find_spec("transformers") is None or not config.get("model_type"):
        return None
    import transformers

    names = config.get("architectures") or []
    classes = [getattr(transformers, str(name), None) for name in names]
    try:
        parsed = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            for found in classes:
                if found is not None:
                    return found(parsed)
            return transformers.AutoModelForCausalLM.from_config(parsed)
    except Exception:  # its own code for any of a hundred models: then names alone decide
        return None
