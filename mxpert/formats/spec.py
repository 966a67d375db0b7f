"""Descriptors of the OCP microscaling formats: the single source of every format constant.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.3.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from ..errors import message

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Unquantised dtypes that kernels read and write."""
WIDE_DTYPES = (*FLOAT_DTYPES, torch.float64)
"""Unquantised dtypes of the reference, of checks by torch.autograd and of training without MX."""

MX_BLOCK_SIZE = 32
"""Elements that share one scale (OCP MX 1.0, table 1)."""

E8M0_BIAS = 127
"""A scale byte s means 2^(s - 127)."""
E8M0_NAN = 255
"""The scale byte that makes its whole block NaN."""
E8M0_MAX = 254
"""Largest finite scale byte: 2^127."""


class ValueEnum(enum.Enum):
    """Base of enums whose members arguments take by their value too, as ``"floor"``.

    Members are pickled as their class and value: Python 3.11.0 to 3.11.3 pickle them by `getattr`,
    which torch.load(weights_only=True) refuses.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self), (self.value,)

    @classmethod
    def parse(cls, value: object, op: str, argument: str, remedy: str = "") -> Self:
        """Return the member that `value` is, or whose value it is.

        Args:
            value: a member or its value.
            op: the function that reports a wrong one.
            argument: the name that the error gives to `value`.
            remedy: what the error advises.

        Raises:
            ValueError: an unknown name. TypeError: another type.

        Example:
            >>> ScaleRule.parse("floor", "quantize", "scale_rule")
            <ScaleRule.FLOOR: 'floor'>
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in cls._value2member_map_:
            return cls(value)
        raise not_a_value(cls, value, op, argument, remedy)


def not_a_value(
    kind: Any,  # an enum, or the class Layout
    value: object,
    op: str,
    argument: str,
    remedy: str,
) -> ValueError | TypeError:
    """The error for a value that is no member of `kind`, and the value of none."""
    *names, last = [repr(member.value) for member in kind]
    need = f"a {kind.__name__} ({', '.join(names)} or {last})"
    error = ValueError if isinstance(value, str) else TypeError
    return error(message(op, argument, need, repr(value), remedy))


class ScaleRule(ValueEnum):
    """How the shared power-of-two scale follows from a block's maximum magnitude (amax).

    With ``emax`` the exponent of the element format's largest power of two and ``max`` its largest
    value: FLOOR is the OCP rule ``floor(log2 amax) - emax`` (saturates up to half of a binade);
    RCEIL rounds ``amax / max`` up to a power of two (never saturates; the default); CEIL is
    ``ceil(log2 amax) - emax``; EVEN rounds amax to the element's mantissa width first, then FLOOR.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 6.3 (FLOOR); the names are torchao's.

    Example:
        >>> ScaleRule("rceil") is ScaleRule.RCEIL
        True
    """

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


ScaleRuleLike = ScaleRule | Literal["floor", "rceil", "ceil", "even"]
"""A ScaleRule or its name."""


class ScaleSpan(ValueEnum):
    """How many blocks of 32 along the quantised axis share a scale.

    BLOCK: each block has its own, as in the OCP format. SPAN128: four neighbouring blocks share
    one. ROW: all blocks of a row share one. Where groups divide the axis, no span crosses them. The
    scale follows from the span's maximum by the same ScaleRule. It is stored for every block, so
    that the tensor is a valid MX tensor. Where FP8 tensor cores have no block scales, ROW runs at
    full FP8 speed, SPAN128 almost, and BLOCK in bf16.

    AUTO: ROW where at most one block of 1024 loses accuracy by it (`count_wide_blocks`), otherwise
    BLOCK with scale bytes of at least 1. The choice is made on the device: kernels for both are
    launched, and one of them returns at once.

    SQUARE: the blocks of 32 neighbouring rows share one: a square of 32 × 32 values in the last two
    dimensions. Such a tensor and its transpose hold the same codes and the same scales, so that one
    quantisation serves the GEMMs that sum along either dimension. Of `quantize` alone. Kernels read
    a scale for each block, as with BLOCK.

    Cost of a longer span: a value more than 14 binades (e5m2: 30) below its span's maximum is
    rounded to fewer bits than in a block of its own.

    Example:
        >>> ScaleSpan("row") is ScaleSpan.ROW
        True
    """

    BLOCK = "block"
    SPAN128 = "span128"
    ROW = "row"
    AUTO = "auto"
    SQUARE = "square"


ScaleSpanLike = ScaleSpan | Literal["block", "span128", "row", "auto", "square"]
"""A ScaleSpan or its name."""
LINE_SPANS = tuple(span for span in ScaleSpan if span is not ScaleSpan.SQUARE)
"""Spans along the quantised axis alone."""


def refuse_squares(span: object, op: str, argument: str) -> None:
    """Raise ValueError for ScaleSpan.SQUARE where spans follow the quantised axis."""
    if span is ScaleSpan.SQUARE:
        names = ", ".join(each.name for each in LINE_SPANS)
        remedy = 'quantize(…, scale_span="square") makes squares, with_axis and mT their transpose'
        raise ValueError(message(op, argument, f"one of {names}", span, remedy))


@dataclass(frozen=True)
class ElementFormat:
    """A small float: sign, `exponent_bits`, `mantissa_bits`; bias and range follow the OCP text.

    Example:
        >>> E4M3.bits, E4M3.max_value, E4M3.has_inf
        (8, 448.0, False)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    emax: int
    has_inf: bool
    has_nan: bool

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits


E2M1 = ElementFormat("e2m1", 2, 1, 1, 6.0, 2, has_inf=False, has_nan=False)
"""FP4: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
E4M3 = ElementFormat("e4m3", 4, 3, 7, 448.0, 8, has_inf=False, has_nan=True)
"""FP8 with three mantissa bits, up to 448; one NaN code, no infinity."""
E5M2 = ElementFormat("e5m2", 5, 2, 15, 57344.0, 15, has_inf=True, has_nan=True)
"""FP8 with two mantissa bits, up to 57344; infinity and NaN as in IEEE 754."""


@dataclass(frozen=True)
class MXFormat:
    """One MX format: an element format and a block of 32 elements per E8M0 scale.

    Example:
        >>> MXFP4.element.name, MXFP4.block_size, MXFP4.codes_per_byte
        ('e2m1', 32, 2)
    """

    name: str
    element: ElementFormat = field(hash=False)
    block_size: int = MX_BLOCK_SIZE

    @property
    def codes_per_byte(self) -> int:
        """Two for MXFP4 (low nibble first, as gpt-oss checkpoints pack them), else one."""
        return 8 // self.element.bits

    def __repr__(self) -> str:
        return f"MXFormat({self.name!r})"


MXFP4 = MXFormat("mxfp4", E2M1)
"""e2m1 codes, two a byte."""
MXFP8_E4M3 = MXFormat("mxfp8_e4m3", E4M3)
"""e4m3 codes; also called "mxfp8"."""
MXFP8_E5M2 = MXFormat("mxfp8_e5m2", E5M2)
"""e5m2 codes, for gradients."""

FORMATS: dict[str, MXFormat] = {f.name: f for f in (MXFP4, MXFP8_E4M3, MXFP8_E5M2)}
"""Every MX format by its name."""
_ALIASES = {"mxfp8": "mxfp8_e4m3"}
MXFormatLike = MXFormat | Literal["mxfp4", "mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"]
"""An MXFormat or its name; "mxfp8" means "mxfp8_e4m3"."""
MXFP8FormatLike = MXFormat | Literal["mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"]
"""An MXFP8 format or its name."""


def get_format(name: str | MXFormat, op: str = "get_format", argument: str = "name") -> MXFormat:
    """Return the MX format of that name; an MXFormat passes through.

    Args:
        name: "mxfp4", "mxfp8_e4m3" or "mxfp8_e5m2"; "mxfp8" means "mxfp8_e4m3".
        op: the function that reports an unknown name.
        argument: the name that the error gives to the argument.

    Returns:
        The MXFormat, one object for each format.

    Raises:
        ValueError: an unknown name, or an MXFormat that is not one of OCP's.

    Source:
        OCP Microscaling Formats (MX) 1.0, table 1.

    Example:
        >>> get_format("mxfp4").codes_per_byte
        2
    """
    if isinstance(name, MXFormat):
        known: object = name.name
    else:
        known = _ALIASES.get(name, name) if isinstance(name, str) else None
    found = FORMATS.get(known) if isinstance(known, str) else None
    if found is None or (isinstance(name, MXFormat) and name != found):
        raise ValueError(
            message(op, argument, f"one of {sorted((*FORMATS, *_ALIASES))}", repr(name))
        )
    return found
