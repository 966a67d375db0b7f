"""Warm calls of an op: arguments of a geometry that was seen before are not checked again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..kernel_spec import KernelSpec
from ..problem import Problem
from ..runtime.geometry import CachedCall, Described
from .registry import resolve, resolve_cached

_MAX_CACHED = 1024
"""Geometries of an op, each with some ten kilobytes of recorded launches."""

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
    """The calls of one op: check and describe once for each geometry, then resolve and launch.

    Args:
        describe: checks the arguments of a call and returns its problem, or raises.
        by_identity: whether the cache compares the first option by identity.
    """

    def __init__(self, describe: Callable[..., Problem], by_identity: bool) -> None:
        self._describe, self._by_identity = describe, by_identity
        self._cached: dict[tuple[Any, ...], CachedCall] = {}

    def launch(
        self, options: Sequence[Any], inputs: dict[str, Any], geometry: Described | None
    ) -> Any:
        """Return the op's result, which has no gradient.

        Args:
            options: positional arguments of `describe`. The cache key holds their types and values
                (the identity of the first, if `by_identity`).
            inputs: keyword arguments of `describe` and of the kernel's `launch`. Their geometry
                and the options decide the problem.
            geometry: the inputs' tensors and geometry; None if the call cannot be cached.
        """
        if geometry is None:
            problem = self._describe(*options, **inputs)
            return _launch(*resolve(problem), problem, inputs)
        tensors, shapes = geometry
        if self._by_identity:
            first, *others = options
            key = (id(first), *others, *map(type, options), *shapes)
        else:
            key = (*options, *map(type, options), *shapes)
        cached = self._find(key, options, inputs)
        kernel, config = resolve_cached(cached)
        replay = getattr(kernel, "replay", None)
        if replay is not None:
            result = replay(cached, config, tensors, inputs)
            if result is not None:
                return result
        return _launch(kernel, config, cached.problem, inputs)

    def _find(
        self, key: tuple[Any, ...], options: Sequence[Any], inputs: dict[str, Any]
    ) -> CachedCall:
        try:
            cached = self._cached.get(key)
        except TypeError:  # an option without a hash, which passes no check
            return CachedCall(self._describe(*options, **inputs), options)
        if cached is None:
            cached = CachedCall(self._describe(*options, **inputs), options)
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[key] = cached
        return cached


@without_grad
def _launch(kernel: KernelSpec, config: Any, problem: Problem, inputs: dict[str, Any]) -> Any:
    return kernel.launch(problem, config, **inputs)
