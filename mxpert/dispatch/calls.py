"""Warm calls of an op: a geometry that was seen before is not checked again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..kernel_spec import Launchable
from ..problem import Problem
from ..runtime.geometry import CachedCall, Described
from ..target import current_device
from .ambient import isolated

_MAX_CACHED = 1024
"""Geometries of an op on a device, each with some ten kilobytes of recorded launches."""

_T = TypeVar("_T")


def without_grad(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return `function` with gradient recording off."""

    @functools.wraps(function)
    def run(*arguments: Any) -> _T:
        if not torch.is_grad_enabled():
            return function(*arguments)
        torch.set_grad_enabled(False)  # takes half the time of no_grad
        try:
            return function(*arguments)
        finally:
            torch.set_grad_enabled(True)

    return run


class CallCache:
    """The calls of one op that have passed its checks, by `Device`, options and geometry.

    Args:
        by_identity: whether the cache compares the first option by identity.
    """

    def __init__(self, by_identity: bool) -> None:
        self._by_identity = by_identity

    def _key(self, options: Sequence[Any], geometry: Described) -> tuple[Any, ...]:
        """Types and values of the options (the identity of the first), and the geometry."""
        if self._by_identity:
            first, *others = options
            return (id(first), *others, *map(type, options), *geometry[1])
        return (*options, *map(type, options), *geometry[1])

    def find(self, options: Sequence[Any], geometry: Described | None) -> CachedCall | None:
        """The cached call with these options and this geometry; None if there is none.

        geometry: None if the call cannot be cached.
        """
        if geometry is None:
            return None
        try:
            return current_device().calls[self].get(self._key(options, geometry))
        except TypeError:  # an option without a hash, which passes no check
            return None

    def add(
        self, options: Sequence[Any], geometry: Described | None, problem: Problem
    ) -> CachedCall:
        """Cache a call that has passed the op's checks, and return it."""
        device = current_device()
        cached = CachedCall(problem, options, device.executor is None)
        if geometry is not None:
            calls = device.calls[self]
            if len(calls) >= _MAX_CACHED:
                calls.clear()
            calls[self._key(options, geometry)] = cached
        return cached


def launch(
    kernel: Launchable,
    config: Any,
    cached: CachedCall,
    geometry: Described | None,
    inputs: dict[str, Any],
) -> Any:
    """Replay a recorded call of the kernel, or launch it. The result has no gradient."""
    replay = getattr(kernel, "replay", None)
    if replay is not None and geometry is not None:
        result = replay(cached, config, geometry[0], inputs)
        if result is not None:
            return result
    return _launch(kernel, config, cached.problem, inputs)


@without_grad
def _launch(kernel: Launchable, config: Any, problem: Problem, inputs: dict[str, Any]) -> Any:
    with isolated("cpu" if problem.target.kind == "cpu" else "cuda"):
        return kernel.launch(problem, config, **inputs)
