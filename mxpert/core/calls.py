"""Warm calls of an op: a geometry that was seen before is not checked again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..errors import PLAIN_TENSORS
from .ambient import isolated
from .geometry import CachedCall, Described, own_parts, taker
from .kernel import Launchable
from .problem import Problem
from .target import current_device

_MAX_CACHED = 1024
"""Geometries of an op on a device, each with some ten kilobytes of recorded launches."""

_MAX_ALIKE = 4
"""Calls that `recall` knows of those whose first tensors have one shape."""

_DYNAMO = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_GUARDS: Any = getattr(_DYNAMO, "TensorGuards", None)  # torch does not type it

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


_PLAIN = object()
"""Stands for a plain tensor among the arguments of a `_Known`."""


def _first_key(value: Any) -> object:  # of the type of the first argument
    """What calls of one op differ in most: the shape of the first tensor, or its geometry."""
    if type(value) in PLAIN_TENSORS:
        return value.shape
    parts = own_parts(value)
    return None if parts is None else parts[1]


class _Known:
    """Options and arguments of a cached call, recognised without describing them.

    torch's guards compare types, dtypes, devices, sizes and strides of plain tensors in one call,
    which takes a fourth of the time of `describe`. They look at more, such as autocast and
    `requires_grad`: arguments that they do not recognise are described.

    Args:
        options: the op's; they are compared by identity.
        values: the arguments, as `describe` takes them.
        call: of these options and arguments.
    """

    __slots__ = ("_expected", "_fit", "_options", "_plain", "call")

    def __init__(self, options: object, values: Sequence[object], call: CachedCall) -> None:
        self._options, self.call = options, call
        plain = [place for place, value in enumerate(values) if type(value) in PLAIN_TENSORS]
        self._plain = taker(plain)
        tensors = self._plain(values)
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        guards = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._fit: Callable[..., bool] = guards.check
        self._expected = []
        for place, value in enumerate(values):
            parts = own_parts(value)
            expected = value if parts is None else parts[1]
            self._expected.append(_PLAIN if place in plain else expected)

    def tensors(self, options: object, values: Sequence[Any]) -> list[torch.Tensor] | None:
        """The tensors in `values`; None if options or arguments are not the known ones."""
        known = self._options
        if options is not known and not (
            isinstance(known, tuple)
            and isinstance(options, tuple)
            and all(map(operator.is_, options, known))
        ):
            return None
        if not self._fit(*self._plain(values)):
            return None
        tensors: list[torch.Tensor] = []
        for value, expected in zip(values, self._expected, strict=True):
            if expected is _PLAIN:
                tensors.append(value)
            elif value is not expected:  # no None
                parts = own_parts(value)
                if parts is None or parts[1] is not expected:
                    return None
                tensors += parts[0]
        return tensors


class CallCache(Generic[_OptionsT]):
    """The calls of one op that have passed its checks, by `Device`, options and geometry.

    Options that are a tuple are compared field by field, others as one.

    Args:
        by_identity: whether the cache compares the first option by identity.
    """

    def __init__(self, by_identity: bool) -> None:
        self._by_identity, self._known = by_identity, object()

    def recall(
        self, options: _OptionsT, values: Sequence[Any]
    ) -> tuple[CachedCall, list[torch.Tensor]] | None:
        """The cached call with these options and arguments, and their tensors.

        None if `learn` has not had them: `find` may know the call all the same.
        """
        try:
            kept = current_device().calls[self._known].get(_first_key(values[0]), ())
        except RuntimeError:  # nested tensors have no shape
            return None
        for known in kept:
            tensors = known.tensors(options, values)
            if tensors is not None:
                return known.call, tensors
        return None

    def learn(self, options: _OptionsT, values: Sequence[Any], call: CachedCall) -> None:
        """Let `recall` know a call that was found; the arguments are described ones."""
        known = current_device().calls[self._known]
        if len(known) >= _MAX_CACHED:
            known.clear()
        kept = known.setdefault(_first_key(values[0]), [])
        if _GUARDS is not None and len(kept) < _MAX_ALIKE:
            kept.append(_Known(options, values, call))

    def _key(self, options: _OptionsT, geometry: Described) -> tuple[object, ...]:
        """Types and values of the options (the identity of the first), and the geometry."""
        if not isinstance(options, tuple):
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
    with isolated("cpu" if problem.target.kind == "cpu" else "cuda"):
        return kernel.launch(problem, config, inputs)
