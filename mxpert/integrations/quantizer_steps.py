"""What the quantisers for Transformers share, which take experts out of a model while it loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import require
from .checkpoints.safetensors_files import CheckpointReader
from .models.expert_modules import StoredExperts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def reader_of(checkpoint_files: Sequence[str] | None, op: str) -> CheckpointReader:
    """The reader of the checkpoint that Transformers loads.

    Raises:
        ValueError: files of another kind, or names that are not a checkpoint's usual ones.
    """
    files = [Path(file) for file in checkpoint_files or ()]
    kinds = sorted({file.suffix for file in files})
    require(kinds == [".safetensors"], op, "checkpoint", need="safetensors files", got=kinds)
    return CheckpointReader(files[0].parent, op)


def skip_on_load(model: PreTrainedModel, pattern: str) -> None:
    """Let the loader skip tensors of these names (a regular expression) without a word."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    ignored = [] if ignored is None else ignored  # a set in newer releases
    model._keys_to_ignore_on_load_unexpected = type(ignored)([*ignored, pattern])


def stored_experts(model: PreTrainedModel) -> list[StoredExperts]:
    """The experts that have been taken out of a model, each once."""
    return [module for module in model.modules() if isinstance(module, StoredExperts)]
