"""Warm calls of an op: a geometry that was seen before is not checked again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .ambient import isolated
from .compilation import whole_call
from .geometry import CachedCall, Described
from .kernel import Launchable
from .known import KnownArguments
from .problem import Problem
from .target import current_device

_MAX_CACHED = 1024
"""Geometries of an op on a device, each with some ten kilobytes of recorded launches."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OptionsT = TypeVar("_OptionsT")
_ConfigT = TypeVar("_ConfigT")
_InputsT = TypeVar("_InputsT")


def without_grad(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return `function` with gradient recording off."""

    @functools.wraps(function)
    def run(*arguments: _P.args, **named: _P.kwargs) -> _T:
        if not torch.is_grad_enabled():
            return function(*arguments, **named)
        torch.set_grad_enabled(False)  # takes half the time of no_grad
        try:
            return function(*arguments, **named)
        finally:
            torch.set_grad_enabled(True)

    return run


class CallCache(KnownArguments[_OptionsT, CachedCall]):
    """The calls of one op that have passed its checks, by `Device`, options and geometry.

    Options that are a tuple are compared field by field, others as one.

    Args:
        by_identity: whether the cache compares the first option by identity.
    """

    def __init__(self, by_identity: bool) -> None:
        super().__init__()
        self._by_identity = by_identity

    def _key(self, options: _OptionsT, geometry: Described) -> tuple[object, ...]:
        """Types and values of the options (the identity of the first), and the geometry."""
        if not isinstance(options, tuple) or not options:  # a tuple without fields is wrong
            if self._by_identity:
                return (id(options), *geometry[1])
            return (options, type(options), *geometry[1])
        if self._by_identity:
            return (id(options[0]), *options[1:], *map(type, options), *geometry[1])
        return (*options, *map(type, options), *geometry[1])

    def find(self, options: _OptionsT, geometry: Described | None) -> CachedCall | None:
        """The cached call with these options and this geometry; None if there is none.

        geometry: None if the call cannot be cached.
        """
        if geometry is None:
            return None
        try:
            return current_device().calls[self].get(self._key(options, geometry))
        except TypeError:  # an option without a hash, which passes no check
            return None

    def add(self, options: _OptionsT, geometry: Described | None, problem: Problem) -> CachedCall:
        """Cache a call that has passed the op's checks, and return it."""
        device = current_device()
        cached = CachedCall(problem, options, device.executor is None)
        if geometry is not None:
            calls = device.calls[self]
            if len(calls) >= _MAX_CACHED:
                calls.clear()
                self.forget()  # it holds calls, too
            calls[self._key(options, geometry)] = cached
        return cached


def launch(
    kernel: Launchable[Any, _ConfigT, _InputsT, _T],  # Any: of the problem of `cached`
    config: _ConfigT,
    cached: CachedCall,
    tensors: list[torch.Tensor] | None,
    inputs: _InputsT,
) -> _T:
    """Replay a recorded call of the kernel, or launch it. The result has no gradient.

    tensors: of the inputs, in the order of `describe`; None if the call cannot be replayed.
    """
    replay = getattr(kernel, "replay", None)
    if replay is not None and tensors is not None:
        result: _T | None = replay(cached, config, tensors, inputs)
        if result is not None:
            return result
    return _launch(kernel, config, cached.problem, inputs)


@without_grad
def _launch(
    kernel: Launchable[Any, _ConfigT, _InputsT, _T],  # Any: of `problem`
    config: _ConfigT,
    problem: Problem,
    inputs: _InputsT,
) -> _T:
    launches = functools.partial(kernel.launch, problem, config, inputs)
    with isolated("cpu" if problem.target.kind == "cpu" else "cuda"), whole_call(launches):
        return launches()
