"""Arguments of the ops as flat schemas of torch.library, which hold tensors and numbers only.

The schema of an op follows from the type hints of its check. `kind_of` returns, for one hint, the
schema types, and the functions that flatten a value to them and rebuild it without a second check.
Aggregates are flattened field by field, by the fields that they name.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from ..formats.spec import MXFormat, ScaleSpan, get_format
from ..formats.tensor import FACT_FIELDS, TENSOR_FIELDS, Layout, MXTensor, Operand
from ..formats.weight_tensor import WEIGHT_FORMATS, WeightLike, WeightTensor
from .problem import Activation, activation_from

FormatName = str | MXFormat
Spans = ScaleSpan | tuple[ScaleSpan, ScaleSpan]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Kind:
    """How values of one type appear in a schema.

    Args:
        types: name suffix and schema type of each flat argument.
        flatten: a value to its flat arguments.
        rebuild: flat arguments to the value.
    """

    types: tuple[tuple[str, str], ...]
    flatten: Callable[[Any], Sequence[object]]  # Any: a value of the kind's type
    rebuild: Callable[..., Any]


def rebuild(cls: type[_T], **values: object) -> _T:
    """Return an instance of a frozen dataclass without checking its fields again."""
    instance = object.__new__(cls)
    if torch.compiler.is_compiling():  # dynamo of torch 2.11 cannot trace the faster way
        for name, value in values.items():
            object.__setattr__(instance, name, value)
    else:
        instance.__dict__.update(values)
    return instance


def rebuild_mx(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    name: str,
    *,
    axis: int = -1,
    span: ScaleSpan = ScaleSpan.BLOCK,
    wide: torch.Tensor | None = None,
) -> MXTensor:
    """A ROW_MAJOR MXTensor from its validated parts."""
    return rebuild(
        MXTensor,
        qdata=qdata,
        scale=scale,
        format=get_format(name),
        axis=axis,
        layout=Layout.ROW_MAJOR,
        reference=None,
        logical_shape=None,
        scale_span=span,
        wide_blocks=wide,
        fp8_codes=None,
    )


def spans_of(scale_span: Spans) -> tuple[ScaleSpan, ScaleSpan]:
    """The spans of the rowwise and of the columnwise copy."""
    return (scale_span, scale_span) if isinstance(scale_span, ScaleSpan) else scale_span


def _one(schema: str, to: Callable[[Any], Any], back: Callable[[Any], Any]) -> Kind:
    return Kind((("", schema),), lambda value: (to(value),), back)


def _same(value: _T) -> _T:
    return value


def _flatten_mx(value: MXTensor) -> tuple[object, ...]:
    return (
        value.qdata,
        value.scale,
        value.reference,
        value.wide_blocks,
        f"{value.format.name} {value.layout.value} {value.scale_span.value}",
        value.axis,
        None if value.logical_shape is None else list(value.logical_shape),
        value.fp8_codes,
    )


def _rebuild_mx_tensor(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    reference: torch.Tensor | None,
    wide_blocks: torch.Tensor | None,
    facts: str,
    axis: int,
    shape: list[int] | None,
    fp8_codes: torch.Tensor | None,
) -> MXTensor:
    return rebuild(
        MXTensor,
        qdata=qdata,
        scale=scale,
        reference=reference,
        wide_blocks=wide_blocks,
        axis=axis,
        logical_shape=None if shape is None else tuple(shape),
        fp8_codes=fp8_codes,
        **_facts_from(facts),
    )


@functools.cache
def _facts_from(facts: str) -> dict[str, Any]:
    format, layout, span = facts.split()
    return dict(format=get_format(format), layout=Layout(layout), scale_span=ScaleSpan(span))


_MX_TENSOR = Kind(
    (
        ("_qdata", "Tensor"),
        ("_scale", "Tensor"),
        ("_reference", "Tensor?"),
        ("_wide_blocks", "Tensor?"),
        ("_facts", "str"),  # three names in one string: less work for the dispatcher
        ("_axis", "SymInt"),
        ("_logical_shape", "SymInt[]?"),
        ("_fp8_codes", "Tensor?"),
    ),
    _flatten_mx,
    _rebuild_mx_tensor,
)


def _flatten_weight(value: MXTensor | WeightTensor) -> tuple[object, ...]:
    if isinstance(value, MXTensor):
        return (*_flatten_mx(value), None, None)
    shape = None if value.logical_shape is None else list(value.logical_shape)
    facts = f"{value.format.name} {value.layout.value}", value.axis, shape
    return value.qdata, value.scale, None, None, *facts, None, value.zero_point, value.row_scale


def _rebuild_weight(*flat: Any) -> MXTensor | WeightTensor:  # Any: the flat arguments
    *of_mx, zero_point, row_scale = flat
    qdata, scale, _, _, facts, _, shape, _ = of_mx
    name, layout, *_ = facts.split()
    format = WEIGHT_FORMATS.get(name)
    if format is None:
        return _rebuild_mx_tensor(*of_mx)
    parts = dict(qdata=qdata, scale=scale, zero_point=zero_point, row_scale=row_scale)
    sizes = None if shape is None else tuple(shape)
    return rebuild(WeightTensor, format=format, layout=Layout(layout), logical_shape=sizes, **parts)


_WEIGHT = Kind(
    (*_MX_TENSOR.types, ("_zero_point", "Tensor?"), ("_row_scale", "Tensor?")),
    _flatten_weight,
    _rebuild_weight,
)
"""A projection: an MXTensor, or a WeightTensor, whose facts are format, layout and shape."""
_KINDS: dict[Any, Kind] = {
    torch.Tensor: _one("Tensor", _same, _same),
    bool: _one("bool", _same, _same),
    int: _one("SymInt", _same, _same),
    float: _one("float", _same, _same),
    str: _one("str", _same, _same),
    torch.dtype: _one("ScalarType", _same, _same),
    FormatName: _one("str", lambda value: get_format(value).name, get_format),
    Spans: _one(
        "str[]",
        lambda value: [span.value for span in spans_of(value)],
        lambda values: tuple([ScaleSpan(value) for value in values]),
    ),
    MXTensor: _MX_TENSOR,
    Activation: Kind(
        (("", "str"), ("_parameters", "float[]")),
        lambda value: (value.name, list(value.parameters)),
        activation_from,
    ),
}


class FlatLayout:
    """Several named values as one flat list of arguments.

    Args:
        kinds: name and kind of each value, in order.
    """

    def __init__(self, kinds: Iterable[tuple[str, Kind]]) -> None:
        self.types: list[tuple[str, str]] = []
        """Name and schema type of each flat argument."""
        self._parts: list[tuple[str, Kind, int, int]] = []
        for name, kind in kinds:
            start = len(self.types)
            self.types += [(name + suffix, schema) for suffix, schema in kind.types]
            self._parts.append((name, kind, start, len(self.types)))

    def flatten(self, values: Iterable[object]) -> list[object]:
        """The flat arguments of the values."""
        flat: list[object] = []
        for (_, kind, _, _), value in zip(self._parts, values, strict=True):
            flat += kind.flatten(value)
        return flat

    def rebuild(self, flat: Sequence[object]) -> dict[str, Any]:  # Any: of each field's type
        """The inverse of `flatten`: the values by name."""
        return {
            name: flat[start] if kind.rebuild is _same else kind.rebuild(*flat[start:end])
            for name, kind, start, end in self._parts
        }


@functools.cache
def kind_of(hint: Any) -> Kind:  # Any: Python 3.11 has no type for a type hint
    """The kind of a type hint of an op's check."""
    if hint in _KINDS:
        return _KINDS[hint]
    if hint == Operand:
        return _operand()
    if hint == WeightLike:
        return _WEIGHT
    if get_origin(hint) is Literal:  # names
        return kind_of(str)
    if get_origin(hint) is types.UnionType:
        (inner,) = (each for each in get_args(hint) if each is not types.NoneType)
        return _optional(kind_of(inner))
    if issubclass(hint, enum.Enum):
        return _one("str", lambda value: value.value, hint)
    return _aggregate(hint)


def _optional(kind: Kind) -> Kind:
    ((suffix, schema),) = kind.types
    return Kind(
        ((suffix, f"{schema}?"),),
        lambda value: (None,) if value is None else kind.flatten(value),
        lambda value: None if value is None else kind.rebuild(value),
    )


def _operand() -> Kind:
    """A plain tensor (no scale), or an MXTensor."""
    kind = kind_of(MXTensor)
    (data, *others), absent = kind.types, (None,) * (len(kind.types) - 1)
    optional = ((suffix, f"{schema.removesuffix('?')}?") for suffix, schema in others)
    return Kind(
        (data, *optional),
        lambda value: kind.flatten(value) if isinstance(value, MXTensor) else (value, *absent),
        lambda data, scale, *rest: data if scale is None else kind.rebuild(data, scale, *rest),
    )


def _aggregate(cls: type) -> Kind:
    """A dataclass: field by field. Fields that ops do not read are None after a rebuild."""
    assert is_dataclass(cls)  # for the type checker: the other types are in _KINDS
    every = [field.name for field in fields(cls)]
    names = [*TENSOR_FIELDS[cls], *FACT_FIELDS[cls]] if cls in TENSOR_FIELDS else every
    hints = get_type_hints(cls)
    layout = FlatLayout((name, kind_of(hints[name])) for name in names)
    unread = dict.fromkeys(set(every) - set(names))

    def make(*flat: object) -> object:
        return rebuild(cls, **layout.rebuild(flat), **unread)

    @functools.lru_cache(1024, typed=True)
    def make_once(*flat: object) -> object:
        """Options: caches find them by identity, so equal ones have to be one object."""
        return cls(**layout.rebuild(flat))

    def make_options(*flat: object) -> object:
        return make_once(*[tuple(value) if type(value) is list else value for value in flat])

    return Kind(
        tuple((f"_{name}", schema) for name, schema in layout.types),
        lambda value: layout.flatten([getattr(value, name) for name in names]),
        make if cls in TENSOR_FIELDS else make_options,
    )
