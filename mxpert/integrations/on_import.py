"""Registers mxpert with Transformers once its models are imported, at no cost before.

``import mxpert`` calls `watch`. Where ``transformers.modeling_utils`` is loaded, mxpert is
registered at once; else when some code imports it. What is registered is small: the modules that
load checkpoints are imported by the first call that loads one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError, message
from .models.implementations import IMPLEMENTATIONS, NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODELS = "transformers.modeling_utils"
"""Every model class imports this module."""


def watch() -> None:
    """Register now or when `MODELS` is imported; a second call changes nothing."""
    models = sys.modules.get(MODELS)
    if models is not None:
        register(models)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register(models: ModuleType) -> None:
    """Add the experts functions, and wrap two methods of PreTrainedModel; once.

    Args:
        models: the module `MODELS`, imported.
    """
    model_class: type[PreTrainedModel] | None = getattr(models, "PreTrainedModel", None)
    if model_class is None or hasattr(model_class.from_pretrained, "passes_to_mxpert"):
        return
    model_class.from_pretrained = classmethod(_loading(model_class.from_pretrained.__func__))
    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ImportError:  # a release without experts functions; the wrapper names those that have
        return
    for name in IMPLEMENTATIONS:
        moe.ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    model_class.set_experts_implementation = _setting(model_class.set_experts_implementation)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """The entry in the table of experts functions, which only unconverted experts call.

    Experts that were left dense on purpose run what Transformers would choose.

    Raises:
        UnsupportedError: other experts; it says how to convert them.
    """
    dense = getattr(self, "dense_implementation", None)
    if dense is None:
        raise UnsupportedError(
            message(
                "experts_implementation",
                type(self).__name__,
                "converted experts",
                "dense weights",
                f'load with from_pretrained(…, experts_implementation="{NAME}"), or call '
                "mxpert.convert(model) once the weights are there",
            )
        )
    eager = type(self).forward.__wrapped__  # type: ignore[attr-defined]
    functions = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    run = functions.get_interface(dense, eager)
    result: torch.Tensor = run(self, hidden_states, topk_ids, topk_weights)
    return result


def _loading(original: Callable[..., object]) -> Callable[..., object]:
    """`from_pretrained`, which passes calls that do not ask for mxpert to the original."""

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: object, **kwargs: object) -> object:
        try:
            integration = importlib.import_module("mxpert.integrations.transformers")
        except UnsupportedError:  # this release of Transformers does not fit
            config = getattr(kwargs.get("config"), "_experts_implementation", "")
            if str(kwargs.get("experts_implementation", config)).startswith(NAME):
                raise
            return original(cls, *args, **kwargs)
        return integration.load_pretrained(original, cls, args, kwargs)

    from_pretrained.passes_to_mxpert = True  # type: ignore[attr-defined]
    return from_pretrained


def _setting(original: Callable[..., object]) -> Callable[..., object]:
    """`set_experts_implementation`, which converts the model where it names mxpert."""

    @functools.wraps(original)
    def set_experts_implementation(
        self: PreTrainedModel, *args: object, **kwargs: object
    ) -> object:
        integration = importlib.import_module("mxpert.integrations.transformers")
        return integration.set_implementation(original, self, args, kwargs)

    return set_experts_implementation


class _Finder(MetaPathFinder):
    """Finds `MODELS` as the other finders do, with a loader that registers mxpert afterwards."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODELS or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Another loader, and a registration once the module is complete."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # what inspect and linecache ask
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register(module)
