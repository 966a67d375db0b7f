"""Which module of a Transformers model a tensor of a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def module_of(model: PreTrainedModel, name: str) -> str:
    """The module into which Transformers would load a tensor of the checkpoint."""
    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    for transform in transforms:
        if transform not in converters:
            name, _ = transform.rename_source_key(name)
    for converter in converters:
        name, matched = converter.rename_source_key(name)
        if matched is not None:
            break
    return name.rpartition(".")[0]


def fitting(names: Iterable[str], module: str) -> list[str]:
    """Those of `names` that are the path of `module`; one of both may lack the base's prefix.

    Example:
        >>> fitting(["model.layers.1.mlp.experts", "layers.11.mlp.experts"], "layers.1.mlp.experts")
        ['model.layers.1.mlp.experts']
    """
    return [
        name
        for name in names
        if f".{name}".endswith(f".{module}") or f".{module}".endswith(f".{name}")
    ]
