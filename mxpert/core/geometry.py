"""The geometry of arguments: shapes, strides, dtypes, devices and formats, everything but data.

On the host, ops look at the geometry only. Two calls of the same geometry therefore pass the same
checks and use the same kernel, so that the second call can take both from a cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import PLAIN_TENSORS
from ..formats.tensor import FACT_FIELDS, TENSOR_FIELDS, Aggregate
from .problem import Problem

_STRIDED = torch.strided
_MAX_GEOMETRIES = 8192
PARTS = "_parts"
"""Attribute of an aggregate that holds its `Parts`."""


class Geometry:
    """The geometry of an aggregate; equal geometries are the same object.

    `rebuild` makes such an aggregate from its tensors, once `rebuilder` was asked for it.
    """

    __slots__ = ("rebuild",)

    def __init__(self) -> None:
        self.rebuild: Callable[[Sequence[torch.Tensor]], Any] | None = None  # of any class


Parts = tuple[tuple[torch.Tensor, ...], Geometry]
"""An aggregate's tensors, in the order of its fields, and their geometry."""


Described = tuple[list[torch.Tensor], tuple[object, ...]]
"""The tensors in some arguments, in order, and the geometry of all arguments."""


class CachedCall:
    """Arguments of one op and geometry that have passed its checks.

    Args:
        problem: the descriptor of the call.
        options: the op's options. The cache key may hold an id of one, so they are kept alive.
        is_replayed: whether launches may be recorded and replayed.

    Dispatch stores its choice of kernel in `resolved`, replay the launches of each kernel in
    `recordings`. A call that makes another one may keep it in `inner`.
    """

    __slots__ = ("inner", "is_replayed", "options", "problem", "recordings", "resolved")

    def __init__(self, problem: Problem, options: object, is_replayed: bool) -> None:
        self.problem, self.options, self.is_replayed = problem, options, is_replayed
        self.inner: CachedCall | None = None
        self.resolved: tuple[Any, ...] | None = None  # of `dispatch`, which lies above
        self.recordings: dict[tuple[object, ...], Any] = {}  # of `replay`


_GEOMETRIES: dict[tuple[object, ...], Geometry] = {}


def describe(arguments: Iterable[object]) -> Described | None:
    """Return the tensors in `arguments`, and the geometry of all of them.

    Arguments may be tensors, aggregates of tensors, dtypes and None. The result is None for
    anything else: subclasses of tensors, layouts that are not strided, views that torch negates
    lazily, other objects.

    >>> tensors, key = describe([torch.zeros(2, 3), None])
    >>> len(tensors), key
    (1, (torch.Size([2, 3]), (3, 1), torch.float32, device(type='cpu'), None))
    """
    tensors: list[torch.Tensor] = []
    key: list[object] = []
    for value in arguments:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            tensor: Any = value  # mypy cannot see it from `kind`
            try:
                key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            except RuntimeError:  # nested and sparse tensors
                return None
            if tensor.layout is not _STRIDED or tensor.is_neg():
                return None
            tensors.append(tensor)
        elif value is None or kind is torch.dtype:
            key.append(value)
        elif kind in TENSOR_FIELDS:
            parts = parts_of(value)
            if parts is None:
                return None
            tensors += parts[0]
            key.append(parts[1])
        else:
            return None
    return tensors, tuple(key)


def tensors_of(arguments: Iterable[object]) -> Described | None:
    """Return the tensors of `describe`, without the geometry, for arguments that it describes.

    >>> tensors_of([torch.zeros(2), None])[0]
    [tensor([0., 0.])]
    """
    tensors: list[torch.Tensor] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif value is not None:
            parts = parts_of(value)
            if parts is None:
                return None
            tensors += parts[0]
    return tensors, ()


def parts_of(value: object) -> Parts | None:
    """Return tensors and geometry of an aggregate that ops take.

    They are cached in the object, because weights and plans are used by many calls.
    """
    parts: Parts | None = value.__dict__.get(PARTS)
    if parts is None:
        parts = _parts_of_aggregate(value)
        if parts is not None:
            value.__dict__[PARTS] = parts
    return parts


def own_parts(value: object) -> Parts | None:
    """Return `parts_of` of an aggregate that ops take, and None for anything else."""
    parts: Parts | None = getattr(value, PARTS, None)
    return parts_of(value) if parts is None and type(value) in TENSOR_FIELDS else parts


def taker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:  # any values
    """Return a function that takes the values at these indices out of a list, as a tuple."""
    if not indices:
        return lambda values: ()
    take = operator.itemgetter(*indices)
    return take if len(indices) > 1 else lambda values: (take(values),)


def rebuilder(made: object) -> Callable[[Sequence[torch.Tensor]], Any] | None:  # of its class
    """Return a function that builds objects like `made` from their tensors, without checks.

    The result is None for anything but an aggregate of plain tensors.
    """
    parts = own_parts(made)
    if parts is None:
        return None
    tensors, geometry = parts
    if geometry.rebuild is None:
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        geometry.rebuild = assembler(made, lambda tensor: places[id(tensor)])
    return geometry.rebuild


def assembler(
    made: object, order: Callable[[torch.Tensor], int]
) -> Callable[[Sequence[torch.Tensor]], object] | None:
    """Return a function that builds objects like `made` from a list of tensors, without checks.

    Args:
        made: an aggregate of plain tensors, such as an MXTensor or a RoutingPlan; for anything
            else the result is None.
        order: the position of each tensor of `made` in that list.
    """
    cls = type(made)
    held = {name: getattr(made, name) for name in TENSOR_FIELDS.get(cls, ())}
    nested = any(isinstance(value, Aggregate) for value in held.values())
    parts = parts_of(made) if held and not nested else None
    if parts is None:
        return None
    geometry = parts[1]
    names = [name for name, value in held.items() if value is not None]
    take = taker([order(held[name]) for name in names])
    facts = held | {name: getattr(made, name) for name in FACT_FIELDS[cls]}

    def assemble(tensors: Sequence[torch.Tensor]) -> object:
        instance, own = object.__new__(cls), take(tensors)
        fields = instance.__dict__
        fields.update(facts)
        fields.update(zip(names, own, strict=True))
        fields[PARTS] = own, geometry
        return instance

    for name in names:
        del facts[name]
    return assemble


def _parts_of_aggregate(value: object) -> Parts | None:
    kind = type(value)
    found = describe(getattr(value, name) for name in TENSOR_FIELDS[kind])
    if found is None:
        return None
    facts = tuple(getattr(value, name) for name in FACT_FIELDS[kind])
    try:
        key = (kind, found[1], facts, *map(type, facts))
        geometry = _GEOMETRIES.get(key)
    except TypeError:  # a field that cannot be hashed
        return None
    if geometry is None:
        if len(_GEOMETRIES) >= _MAX_GEOMETRIES:
            _GEOMETRIES.clear()
        geometry = _GEOMETRIES.setdefault(key, Geometry())
    return tuple(found[0]), geometry
