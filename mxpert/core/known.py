"""Arguments that were seen before: recognised without a look at each of their properties."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ..errors import PLAIN_TENSORS
from .geometry import PARTS, own_parts, taker
from .target import current_device

_MAX_KNOWN = 1024
"""Shapes of first tensors."""
_MAX_ALIKE = 8
"""Arguments that are recognised of those whose first tensors have one shape."""

_DYNAMO = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_GUARDS: Any = getattr(_DYNAMO, "TensorGuards", None)  # torch does not type it

_T = TypeVar("_T")
_OptionsT = TypeVar("_OptionsT")

_PLAIN = object()
"""Stands for a plain tensor among the arguments of a `_Known`."""


def _first_key(value: Any) -> object:  # of the type of the first argument
    """What calls of one op differ in most: the shape of the first tensor, or its geometry."""
    if type(value) in PLAIN_TENSORS:
        return value.shape
    parts = own_parts(value)
    return None if parts is None else parts[1]


_is_nested = operator.attrgetter("is_nested")


def _guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Torch's guard of these tensors: whether others are like them."""
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    guards = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    fit: Callable[..., bool] = guards.check
    return fit


@functools.cache
def _has_guards() -> bool:
    """Whether torch has guards that are made as those of torch 2.11; they are not public."""
    sample = torch.empty(1, device="cpu")
    try:
        return _guard_of((sample,))(sample)
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return False


class _Known(Generic[_T]):
    """Options and arguments that were seen before, recognised without describing them.

    torch's guards compare types, dtypes, devices, sizes and strides of plain tensors in one call,
    which takes a fourth of the time of `describe`. They look at more, such as autocast and
    `requires_grad`: arguments that they do not recognise are described.

    Args:
        options: the op's; they are compared by identity.
        values: the arguments, as `describe` takes them.
        result: of these options and arguments.
    """

    __slots__ = ("_expected", "_fit", "_options", "_plain", "result")

    def __init__(self, options: object, values: Sequence[object], result: _T) -> None:
        self._options, self.result = options, result
        plain = [place for place, value in enumerate(values) if type(value) in PLAIN_TENSORS]
        only = slice(plain[0], plain[0] + 1) if len(plain) == 1 else None
        self._plain = taker(plain) if only is None else operator.itemgetter(only)
        self._fit = _guard_of(self._plain(values))
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
        plain = self._plain(values)
        try:  # torch's guard ends the process at a nested tensor whose layout is torch.strided
            if True in map(_is_nested, plain) or not self._fit(*plain):
                return None
        except AttributeError:  # no tensor
            return None
        tensors: list[torch.Tensor] = []
        for value, expected in zip(values, self._expected, strict=True):
            if expected is _PLAIN:
                tensors.append(value)
            elif value is not expected:  # no None
                parts = getattr(value, PARTS, None) or own_parts(value)
                if parts is None or parts[1] is not expected:
                    return None
                tensors += parts[0]
        return tensors


class KnownArguments(Generic[_OptionsT, _T]):
    """Results by options and arguments, for each `Device`."""

    def __init__(self) -> None:
        self._known = object()

    def recall(
        self, options: _OptionsT, values: Sequence[Any]
    ) -> tuple[_T, list[torch.Tensor]] | None:
        """What `learn` got with these options and arguments, and their tensors, or None."""
        first = values[0]
        try:
            key = first.shape if type(first) in PLAIN_TENSORS else _first_key(first)
        except RuntimeError:  # nested tensors have no shape
            return None
        kept: list[_Known[_T]] | None = current_device().calls[self._known].get(key)
        if kept is not None:
            for known in kept:
                tensors = known.tensors(options, values)
                if tensors is not None:
                    return known.result, tensors
        return None

    def learn(self, options: _OptionsT, values: Sequence[Any], result: _T) -> None:
        """Let `recall` return `result` for these options and arguments, which `describe` takes."""
        known = current_device().calls[self._known]
        if len(known) >= _MAX_KNOWN:
            known.clear()
        kept = known.setdefault(_first_key(values[0]), [])
        if len(kept) < _MAX_ALIKE and _has_guards():
            kept.append(_Known(options, values, result))

    def forget(self) -> None:
        """Drop all results on this device."""
        current_device().calls[self._known].clear()
