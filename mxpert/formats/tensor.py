"""MXTensor: codes, scales and what they mean, as a plain dataclass."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import Checks, message, require
from .aggregate import FACT_FIELDS as FACT_FIELDS
from .aggregate import TENSOR_FIELDS as TENSOR_FIELDS
from .aggregate import Aggregate as Aggregate
from .spec import (
    MXFormat,
    MXFormatLike,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
    not_a_value,
)


class _Layouts(ABCMeta):
    """Registered layouts, in order: `Layout.ROW_MAJOR`, `Layout["ROW_MAJOR"]`, `list(Layout)`."""

    def __iter__(cls) -> Iterator[Layout]:
        return iter(_LAYOUTS.values())

    def __reversed__(cls) -> Iterator[Layout]:
        return reversed(_LAYOUTS.values())

    def __len__(cls) -> int:
        return len(_LAYOUTS)

    def __getitem__(cls, name: str) -> Layout:
        return {layout.name: layout for layout in cls}[name]

    if TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Layout: ...


_LAYOUTS: dict[str, Layout] = {}


class Layout(metaclass=_Layouts):
    """How codes and scales lie in memory.

    ROW_MAJOR is the logical order (checkpoints' order). Other layouts hold prepared weights; the
    backend that reads one defines and registers it (`formats.layouts.WeightLayout`). There is one
    object of each, so that `is` compares them, as members of an enum.

    Example:
        >>> Layout("row_major") is Layout.ROW_MAJOR
        True
    """

    name: ClassVar[str]
    value: ClassVar[str]
    is_folded: ClassVar[bool] = False
    """Whether scales are stored relative to a reference exponent of each row."""
    has_fp8_codes: ClassVar[bool] = False
    """Whether an e4m3 copy of the weights lies beside the codes."""

    def __new__(cls, value: str | None = None) -> Layout:
        """The layout of this name; an instance of a subclass is made without one."""
        if cls is not Layout:
            return object.__new__(cls)
        if value not in _LAYOUTS:
            raise ValueError(f"{value!r} is not a valid Layout")
        return _LAYOUTS[value]

    def __repr__(self) -> str:
        return f"<{self}: {self.value!r}>"

    def __str__(self) -> str:
        return f"Layout.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.value,)

    @staticmethod
    def register(layout: Layout) -> None:
        """Let `Layout` find this layout by its name and its value."""
        _LAYOUTS[layout.value] = layout
        setattr(Layout, layout.name, layout)

    @staticmethod
    def parse(value: object, op: str, argument: str, remedy: str = "") -> Layout:
        """Return the layout that `value` is or names; see `ScaleRule.parse`."""
        if isinstance(value, Layout):
            return value
        found = _LAYOUTS.get(value) if isinstance(value, str) else None
        if found is None:
            raise not_a_value(Layout, value, op, argument, remedy)
        return found


class _RowMajor(Layout):
    name, value = "ROW_MAJOR", "row_major"


Layout.register(_RowMajor())

LayoutLike = Layout | str
"""A Layout or its name."""


TORCH_DTYPES = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
"""Torch's dtype for the bytes of each element format."""


_NEED = Checks("MXTensor")


@dataclass(frozen=True, eq=False, repr=False)
class MXTensor(
    Aggregate,
    tensors=("qdata", "scale", "reference", "wide_blocks", "fp8_codes"),
    facts=("format", "axis", "layout", "logical_shape", "scale_span"),
):
    """A tensor in an MX format.

    ``value[..., i] = decode(qdata)[..., i] * 2^(scale[..., i // 32] - 127)``.

    Args:
        qdata: uint8 codes. Same shape as the logical tensor, except that MXFP4 holds two codes a
            byte along `axis` (low nibble first), so that dimension is half as long.
        scale: uint8 E8M0 bytes; the logical shape with `axis` divided by 32. 255 means NaN.
        format: the MX format of the codes.
        axis: the quantised axis, always negative (-1 is the last), so that leading batch
            dimensions may be added or indexed away.
        layout: memory order; kernels refuse a layout that is not theirs.
        reference: uint8 [..., N], the reference exponent of each row, in folded layouts only.
        logical_shape: the logical shape, in layouts whose storage does not show it.
        scale_span: the caller guarantees that all blocks of a span have the same scale, 1 to 254,
            or 255 over a span of NaN codes; see ScaleSpan.
        wide_blocks: int32 [1], with AUTO only: the number of wide blocks beyond what AUTO
            tolerates. Above 0 each block has its own scale, otherwise each row.
        fp8_codes: uint8, the values as e4m3 numbers times the row's reference, in layouts that keep
            such a copy; `prepare(keep_fp8=True)` makes them.

    `qdata` and `scale` may be strided views into larger storage; kernels need the innermost
    quantised dimension of a ROW_MAJOR tensor to be dense.

    Raises:
        TypeError: a part of the wrong type or dtype.
        ValueError: an axis, a scale shape or a device that does not fit the codes.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 5.1.

    Example:
        >>> from mxpert.formats import MXFP4
        >>> codes = torch.full((2, 16), 0x22, dtype=torch.uint8)  # two codes a byte: 1.0, 1.0
        >>> t = MXTensor(codes, torch.full((2, 1), 128, dtype=torch.uint8), MXFP4)
        >>> t.shape, t[0].nbytes
        (torch.Size([2, 32]), 17)
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    format: MXFormat
    axis: int = -1
    layout: Layout = Layout.ROW_MAJOR
    reference: torch.Tensor | None = None
    logical_shape: tuple[int, ...] | None = None
    scale_span: ScaleSpan = ScaleSpan.BLOCK
    wide_blocks: torch.Tensor | None = None
    fp8_codes: torch.Tensor | None = None

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self,
            qdata: torch.Tensor,
            scale: torch.Tensor,
            format: MXFormatLike,
            axis: int = ...,
            layout: LayoutLike = ...,
            reference: torch.Tensor | None = ...,
            logical_shape: tuple[int, ...] | None = ...,
            scale_span: ScaleSpanLike = ...,
            wide_blocks: torch.Tensor | None = ...,
            fp8_codes: torch.Tensor | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        op = _NEED.op
        if not isinstance(self.format, (MXFormat, str)):
            got = type(self.format).__name__
            raise _NEED.type_error("format", "an MXFormat or its name", got)
        for name, value in (
            ("format", get_format(self.format, op, "format")),
            ("layout", Layout.parse(self.layout, op, "layout")),
            ("scale_span", ScaleSpan.parse(self.scale_span, op, "scale_span")),
        ):
            if getattr(self, name) is not value:  # its name was given
                object.__setattr__(self, name, value)
        _NEED.tensor(self.qdata, "qdata", dtype=torch.uint8)
        _NEED.tensor(self.scale, "scale", dtype=torch.uint8, device=self.qdata.device)
        if type(self.axis) is not int:
            raise _NEED.type_error("axis", "a negative int", repr(self.axis))
        fits = (self.wide_blocks is not None) == (self.scale_span is ScaleSpan.AUTO)
        wanted = "a tensor with ScaleSpan.AUTO and None otherwise"
        remedy = "quantize_dual makes such tensors"
        _NEED(fits, "wide_blocks", wanted, self.scale_span, remedy)
        wanted = f"a negative axis of a {self.qdata.dim()}-dimensional tensor"
        _NEED(-self.qdata.dim() <= self.axis < 0, "axis", wanted, self.axis)
        if self.scale_span is ScaleSpan.SQUARE:
            wanted = "one of the last two of a matrix, with ScaleSpan.SQUARE"
            _NEED(self.qdata.dim() > 1 and self.axis >= -2, "axis", wanted, self.axis)
        self._check_layout()
        if self.layout is Layout.ROW_MAJOR:
            self._check_sizes()

    def _check_layout(self) -> None:
        """Check the parts that some layouts have."""
        packed = self.layout is not Layout.ROW_MAJOR
        for name, wanted in (
            ("reference", self.layout.is_folded),
            ("logical_shape", packed),
            ("fp8_codes", self.layout.has_fp8_codes),
        ):
            if (getattr(self, name) is not None) != wanted:
                need, got = "a value" if wanted else "None", repr(getattr(self, name))
                remedy = f"the layout is {self.layout}; MoEWeights.prepare makes packed tensors"
                raise _NEED.value_error(name, need, got, remedy)
        for name in ("reference", "fp8_codes"):
            part = getattr(self, name)
            if part is not None:
                _NEED.tensor(part, name, dtype=torch.uint8, device=self.qdata.device)
        sizes = self.logical_shape
        if packed and not (
            isinstance(sizes, tuple) and all(isinstance(size, int) and size >= 0 for size in sizes)
        ):
            raise _NEED.value_error("logical_shape", "a tuple of sizes", repr(sizes))

    def _check_sizes(self) -> None:
        """Check the blocks of a ROW_MAJOR tensor, and that each has a scale."""
        size = self.qdata.shape[self.axis] * self.format.codes_per_byte
        block = self.format.block_size
        wanted, got = f"whole blocks of {block} codes", f"{size} codes"
        _NEED(size % block == 0, f"qdata.shape[{self.axis}]", wanted, got)
        expected, scale = list(self.qdata.shape), list(self.scale.shape)
        expected[self.axis] = size // block
        _NEED(scale == expected, "scale", expected, scale, f"quantise along axis {self.axis}")

    @classmethod
    def unchecked(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        format: MXFormat,
        axis: int = -1,
        scale_span: ScaleSpan = ScaleSpan.BLOCK,
        wide_blocks: torch.Tensor | None = None,
    ) -> MXTensor:
        """Return a ROW_MAJOR tensor of parts that a kernel has just made, without checks."""
        tensor = object.__new__(cls)
        tensor.__dict__.update(
            qdata=qdata,
            scale=scale,
            format=format,
            axis=axis,
            scale_span=scale_span,
            wide_blocks=wide_blocks,
        )
        return tensor

    @property
    def shape(self) -> torch.Size:
        """Logical shape (codes, not bytes)."""
        if self.logical_shape is not None:
            return torch.Size(self.logical_shape)
        if self.format.codes_per_byte == 1:
            return self.qdata.shape
        sizes = list(self.qdata.shape)
        sizes[self.axis] *= self.format.codes_per_byte
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the codes: ``qdata.view(dtype)`` shows them (MXFP4: pairs of values)."""
        return TORCH_DTYPES[self.format.element.name]

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.qdata.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.qdata.dim() if self.logical_shape is None else len(self.logical_shape)

    def numel(self) -> int:
        """Number of values (codes, not bytes)."""
        return self.shape.numel()

    def __repr__(self) -> str:
        span = "" if self.scale_span is ScaleSpan.BLOCK else f", scale_span={self.scale_span.name}"
        return (
            f"MXTensor({self.format.name}, shape={list(self.shape)}, axis={self.axis}, "
            f"layout={self.layout.name}{span}, device='{self.device}')"
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to a dense tensor: ``decode(code) * 2^(scale - 127)``; scale byte 255 gives NaN.

        Computed in torch operations on any device; `mxpert.dequantize` gives the same values with
        one kernel.

        Args:
            dtype: float32, bfloat16, float16 or float64.

        Returns:
            A contiguous tensor of the logical shape.

        Raises:
            TypeError: another dtype.
            ValueError: a prepared layout.

        Example:
            >>> import mxpert
            >>> mxpert.quantize(torch.full((1, 32), 3.0), "mxfp4").dequantize()[0, 0].item()
            3.0
        """
        from .codec import dequantize_blocks  # the codecs import this module

        return dequantize_blocks(self, dtype)

    @property
    def mT(self) -> MXTensor:  # noqa: N802  # torch's name
        """The same codes and scales, a view with the last two dimensions exchanged.

        ``x.mT.with_axis(-1)`` is for the GEMM that sums along the other dimension.

        Raises:
            ValueError: fewer than two dimensions, or a prepared layout.

        Example:
            >>> import mxpert
            >>> x = mxpert.quantize(torch.randn(3, 64), "mxfp8")
            >>> x.mT
            MXTensor(mxfp8_e4m3, shape=[64, 3], axis=-2, layout=ROW_MAJOR, device='cpu')
        """
        self._require_row_major()
        _NEED(self.qdata.dim() > 1, "mT", "two dimensions at least", self.qdata.dim())
        axis = -3 - self.axis if self.axis >= -2 else self.axis
        return replace(self, qdata=self.qdata.mT, scale=self.scale.mT, axis=axis)

    def with_axis(self, axis: int, *, scale_rule: ScaleRuleLike = ScaleRule.RCEIL) -> MXTensor:
        """The same tensor with its blocks along another axis.

        With `ScaleSpan.SQUARE` every value stays as it is: codes are copied (MXFP4: packed along
        the other axis), and each square keeps its scale. Any other tensor is decoded exactly and
        quantised a second time, with a scale for each block; a block with a NaN becomes NaN.

        Args:
            axis: of the logical shape; its size is a multiple of 32.
            scale_rule: of a second quantisation.

        Returns:
            An MXTensor of this axis; this one where it has the axis already.

        Raises:
            TypeError, ValueError: `axis` is no int, not there, or without squares (SQUARE); its
                size is no multiple of 32; a prepared layout.

        Example:
            >>> import mxpert
            >>> x = torch.randn(64, 96)
            >>> square = mxpert.quantize(x, "mxfp8", scale_span="square")
            >>> other = mxpert.quantize(x.mT, "mxfp8", scale_span="square")
            >>> torch.equal(square.mT.with_axis(-1).qdata, other.qdata)
            True
        """
        from .spans import with_axis  # it imports this module

        self._require_row_major()
        return with_axis(self, axis, ScaleRule.parse(scale_rule, _NEED.op, "scale_rule"))

    def _require_row_major(self, remedy: str = "call it before preparing, or unpack first") -> None:
        _NEED(self.layout is Layout.ROW_MAJOR, "layout", Layout.ROW_MAJOR, self.layout, remedy)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, of references and of the FP8 copy where there are any."""
        parts = (self.qdata, self.scale, self.reference, self.fp8_codes)
        return sum(part.numel() for part in parts if part is not None)

    def __getitem__(self, index: int | slice) -> MXTensor:
        """Index or slice the leading dimension, for example one expert out of [E, N, K]."""
        if not isinstance(index, (int, slice)):
            raise TypeError(message("MXTensor", "index", "an int or a slice", repr(index)))
        self._require_row_major("index before preparing, or unpack first")
        require(
            self.qdata.dim() > 1 and self.axis != -self.qdata.dim(),
            "MXTensor",
            "index",
            need="a leading dimension that is not the quantised one",
            got=f"axis {self.axis}",
        )
        size = self.qdata.shape[0]
        require(
            isinstance(index, slice) or -size <= index < size,
            "MXTensor",
            "index",
            need=f"{-size} … {size - 1}",
            got=index,
            error=IndexError,
        )
        cut = self.qdata.dim() == 2 and self.scale_span is ScaleSpan.SQUARE
        span = ScaleSpan.BLOCK if cut else self.scale_span  # a slice begins inside of squares
        return replace(self, qdata=self.qdata[index], scale=self.scale[index], scale_span=span)


Operand = torch.Tensor | MXTensor
"""A dense tensor or an MXTensor: what GEMMs multiply."""
