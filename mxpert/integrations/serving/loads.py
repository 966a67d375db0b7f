"""Which of a layer's tensors an engine has loaded: what a checkpoint lacks is an error."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable

import torch

from ...errors import message

Part = tuple[int | None, str | None]
"""Global expert id and shard of one call of a loader; None for all experts, or all shards."""

FROM_CHECKPOINTS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "pt",
    "npcache",
    "mistral",
    "runai_streamer",
)
"""Values of ``--load-format`` under which a checkpoint fills every tensor through its loader."""

_SHARDS = {"w13": {"w1", "w3"}, "w2": {"w2"}}
"""Shards that the loaders of checkpoints with one tensor an expert name."""

_NAMED = 6
"""Tensors that an error names."""


class Loads:
    """Notes the calls of the parameters' loaders, from `watch` to `clear`."""

    def __init__(self) -> None:
        self._seen: dict[str, set[Part]] = {}

    def watch(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Wrap the ``weight_loader`` of each parameter that has one."""
        for name, parameter in parameters:
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None:
                parameter.weight_loader = self._noting(name, loader)  # type: ignore[attr-defined]

    def _noting(self, name: str, loader: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(loader)
        # The parameter must not keep its layer alive, as vLLM sees to for its own loaders.
        method = weakref.WeakMethod(loader) if inspect.ismethod(loader) else lambda: loader

        @functools.wraps(loader)
        def weight_loader(*args: object, **kwargs: object) -> object:
            given = signature.bind(*args, **kwargs).arguments
            parameter = next(iter(given.values()), None)
            called = method()
            assert called is not None  # for the type checker: its layer calls it
            answer = called(*args, **kwargs)
            # An engine may count what a loader copies on "meta", and some return what they did.
            if not getattr(parameter, "is_meta", False):
                part = given.get("expert_id"), given.get("shard_id")
                self._seen.setdefault(name, set()).add(part)
            return answer

        del weight_loader.__wrapped__
        weight_loader.__signature__ = signature  # type: ignore[attr-defined]
        return weight_loader

    @property
    def is_empty(self) -> bool:
        """Whether no loader was called: weights that came in another way, or none."""
        return not self._seen

    def saw(self, name: str) -> bool:
        """Whether the loader of a parameter was called."""
        return name in self._seen

    def clear(self) -> None:
        """Forget the calls."""
        self._seen.clear()

    def require_all(self, op: str, prefix: str, names: Iterable[str], experts: list[int]) -> None:
        """Raise a ValueError that names the tensors of the layer that were not loaded.

        Args:
            op: what the message starts with. prefix: the layer's name.
            names: parameters that a checkpoint fills.
            experts: global ids of the experts that live here.
        """
        missing = [f"{prefix}.{what}" for name in names for what in self._missing(name, experts)]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise ValueError(
                message(
                    op,
                    "the checkpoint",
                    f"all tensors of the experts of {prefix}",
                    f"none for {', '.join(missing[:_NAMED])}{more}",
                    "download it again, or write it with all of its tensors",
                )
            )

    def _missing(self, name: str, experts: list[int]) -> list[str]:
        seen = self._seen.get(name, set())
        if any(expert is None for expert, _ in seen):  # a tensor with all experts
            return []
        if not seen:
            return [name]
        by_expert: dict[int | None, set[str | None]] = {}
        for expert, shard in seen:
            by_expert.setdefault(expert, set()).add(shard)
        shards = _SHARDS[name.partition("_")[0]]
        lacking = {expert: by_expert.get(expert, set()) for expert in experts}
        return [
            f"{name}[{expert}]" + ("" if not found else f" ({', '.join(sorted(shards - found))})")
            for expert, found in lacking.items()
            if not (found >= shards or found - shards)  # one call may fill both shards
        ]
