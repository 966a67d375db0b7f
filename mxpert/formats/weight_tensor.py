"""WeightTensor: 4-bit weights whose scales are no powers of two, as NVFP4 and INT4 checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import Checks, message
from .codec import decode, unpack_codes
from .spec import E2M1, E4M3, MXFP4, MXFP8_E4M3, WIDE_DTYPES, MXFormat
from .tensor import Aggregate, Layout, LayoutLike, MXTensor

INT4_ZERO = 8
"""The code that stands for 0 where there are no zero points."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of INT4 scales."""


@dataclass(frozen=True)
class WeightFormat:
    """A 4-bit weight format with `group_size` weights to a scale.

    Source:
        NVFP4: the NVFP4 recipe of Transformer Engine and ModelOpt. INT4: compressed-tensors'
        ``pack-quantized``, AWQ and GPTQ.

    Example:
        >>> INT4_G128.group_size, NVFP4.is_integer
        (128, False)
    """

    name: str
    group_size: int

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers 0 to 15; else they are e2m1 numbers."""
        return self.name != "nvfp4"

    @property
    def codes_per_byte(self) -> int:
        """2, the low nibble first."""
        return 2

    def __repr__(self) -> str:
        return f"WeightFormat({self.name!r})"


NVFP4 = WeightFormat("nvfp4", 16)
"""e2m1 codes, an e4m3 scale for each 16, a float32 factor for each row."""
INT4_G32 = WeightFormat("int4_g32", 32)
"""Integers, a scale for each 32."""
INT4_G64 = WeightFormat("int4_g64", 64)
"""Integers, a scale for each 64."""
INT4_G128 = WeightFormat("int4_g128", 128)
"""Integers, a scale for each 128."""

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    each.name: each for each in (NVFP4, INT4_G32, INT4_G64, INT4_G128)
}
"""Every format of a WeightTensor by its name."""

_NEED = Checks("WeightTensor")


@dataclass(frozen=True, eq=False, repr=False)
class WeightTensor(
    Aggregate,
    tensors=("qdata", "scale", "zero_point", "row_scale"),
    facts=("format", "layout", "logical_shape"),
):
    """Weights [..., N, K] in NVFP4 or INT4, quantised along K.

    NVFP4: ``w[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * row_scale[n]``.
    INT4: ``w[n, k] = (code[n, k] - zero_point[n, k // g]) * scale[n, k // g]``.

    Args:
        qdata: uint8 [..., N, K/2], two codes a byte, the low nibble first.
        scale: [..., N, K/g]: e4m3 bytes (uint8) of NVFP4; float32, bfloat16 or float16 of INT4.
        format: NVFP4, INT4_G32, INT4_G64, INT4_G128, or the name.
        zero_point: INT4: uint8 [..., N, K/g], the code that stands for 0; None is 8.
        row_scale: NVFP4: float32 [..., N], a factor for each row, from the tensor's global scale
            (gate and up may have different ones); None is 1.
        layout: memory order; other layouts than ROW_MAJOR hold what `prepare` rearranged.
        logical_shape: [..., N, K], in layouts whose storage does not show it.

    Raises:
        TypeError: a part of the wrong type or dtype.
        ValueError: an unknown format, or shapes and devices that do not fit.

    Source:
        compressed-tensors 0.20 and ModelOpt for the meaning of each part.

    Example:
        >>> codes = torch.full((2, 16), 0x99, dtype=torch.uint8)  # two codes a byte: 9 - 8 = 1
        >>> t = WeightTensor(codes, torch.full((2, 1), 0.5), "int4_g32")
        >>> t.shape, t.dequantize()[0, 0].item()
        (torch.Size([2, 32]), 0.5)
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    format: WeightFormat
    zero_point: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    layout: Layout = Layout.ROW_MAJOR
    logical_shape: tuple[int, ...] | None = None

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self,
            qdata: torch.Tensor,
            scale: torch.Tensor,
            format: WeightFormat | str,
            zero_point: torch.Tensor | None = ...,
            row_scale: torch.Tensor | None = ...,
            layout: LayoutLike = ...,
            logical_shape: tuple[int, ...] | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.format, WeightFormat):
            object.__setattr__(self, "format", get_weight_format(self.format, _NEED.op, "format"))
        layout = Layout.parse(self.layout, _NEED.op, "layout")
        if layout is not self.layout:  # its name was given
            object.__setattr__(self, "layout", layout)
        _NEED.tensor(self.qdata, "qdata", dtype=torch.uint8)
        sizes, packed = self.logical_shape, layout is not Layout.ROW_MAJOR
        need = "a tuple of sizes" if packed else "None"
        remedy = f"the layout is {layout}; MoEWeights.prepare makes packed tensors"
        _NEED(isinstance(sizes, tuple) == packed, "logical_shape", need, repr(sizes), remedy)
        if packed:  # the layout checks the others
            plain = self.zero_point is None
            _NEED(
                plain, "zero_point", f"None in {layout}, which has it beside the scale", "a tensor"
            )
        else:
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Check the parts of a ROW_MAJOR tensor."""
        format, group = self.format, self.format.group_size
        _NEED(self.qdata.dim() > 1, "qdata.shape", "[..., N, K/2]", list(self.qdata.shape))
        *leading, packed = self.qdata.shape
        need = f"K = 2 * {packed} as a multiple of the group, {group}"
        _NEED(2 * packed % group == 0, "qdata.shape[-1]", need, packed)
        blocks, device = (*leading, 2 * packed // group), self.qdata.device
        dtypes = SCALE_DTYPES if format.is_integer else (torch.uint8,)
        _NEED.tensor(self.scale, "scale", dtype=dtypes, shape=blocks, device=device)
        if self.zero_point is not None:
            need, remedy = "None for NVFP4", "e2m1 codes have a zero"
            _NEED(format.is_integer, "zero_point", need, "a tensor", remedy)
            _NEED.tensor(
                self.zero_point, "zero_point", dtype=torch.uint8, shape=blocks, device=device
            )
        if self.row_scale is not None:
            need, remedy = "None for INT4", "multiply it into scale"
            _NEED(not format.is_integer, "row_scale", need, "a tensor", remedy)
            _NEED.tensor(
                self.row_scale,
                "row_scale",
                dtype=torch.float32,
                shape=tuple(leading),
                device=device,
                contiguous=True,
            )

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., N, K]."""
        if self.logical_shape is not None:
            return torch.Size(self.logical_shape)
        return torch.Size((*self.qdata.shape[:-1], 2 * self.qdata.shape[-1]))

    @property
    def axis(self) -> int:
        """-1, the quantised axis."""
        return -1

    @property
    def device(self) -> torch.device:
        """Device of all parts."""
        return self.qdata.device

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the codes: pairs of e2m1 values, or of integers."""
        return torch.uint8 if self.format.is_integer else torch.float4_e2m1fn_x2

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of weights."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, which a kernel reads."""
        parts = (self.qdata, self.scale, self.zero_point, self.row_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __repr__(self) -> str:
        layout = "" if self.logical_shape is None else f"layout={self.layout.name}, "
        shape = list(self.shape)
        return f"WeightTensor({self.format.name}, shape={shape}, {layout}device='{self.device}')"

    def _require_row_major(self) -> None:
        need, remedy = Layout.ROW_MAJOR, "call it before preparing, or unpack first"
        _NEED(self.layout is need, "layout", need, self.layout, remedy)

    def __getitem__(self, index: int | slice) -> WeightTensor:
        """Index or slice the leading dimension, for example one expert out of [E, N, K]."""
        if not isinstance(index, (int, slice)):
            raise TypeError(message("WeightTensor", "index", "an int or a slice", repr(index)))
        self._require_row_major()
        need = "a dimension before [N, K]"
        _NEED(self.ndim > 2 or isinstance(index, slice), "index", need, f"shape {self.shape}")
        return self._mapped(lambda part: part[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to a dense tensor.

        Args:
            dtype: float64 is exact. Others are the float64 value, rounded once.

        Returns:
            A contiguous tensor of the logical shape.

        Raises:
            TypeError: no float dtype.
            ValueError: a prepared layout.

        Example:
            >>> codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # 1.0, 1.0
            >>> scale = torch.full((1, 1), 0x40, dtype=torch.uint8)  # 2.0 in e4m3
            >>> t = WeightTensor(codes, scale, "nvfp4", row_scale=torch.tensor([0.5]))
            >>> t.dequantize()[0, 0]
            tensor(1.)
        """
        _NEED.dtype(dtype, WIDE_DTYPES)
        self._require_row_major()
        exact, group, codes = torch.float64, self.format.group_size, unpack_codes(self.qdata)
        if self.format.is_integer:
            zero: torch.Tensor | int = INT4_ZERO
            if self.zero_point is not None:
                zero = self.zero_point.to(exact).unsqueeze(-1)
            values = codes.to(exact).unflatten(-1, (-1, group)) - zero
            scale = self.scale.to(exact)
        else:
            values = decode(codes, E2M1, exact).unflatten(-1, (-1, group))
            scale = decode(self.scale, E4M3, exact)
        values = (values * scale.unsqueeze(-1)).flatten(-2)
        if self.row_scale is not None:
            values = values * self.row_scale.to(exact).unsqueeze(-1)
        result: torch.Tensor = values.to(dtype)
        return result


WeightLike = MXTensor | WeightTensor
"""One projection of a layer's experts."""
AnyWeightFormat = MXFormat | WeightFormat
"""The format of a projection."""


WeightFormatName = Literal[
    "mxfp4", "mxfp8", "mxfp8_e4m3", "nvfp4", "int4_g32", "int4_g64", "int4_g128"
]
"""Names of the formats that expert weights have; "mxfp8" means "mxfp8_e4m3"."""


def parse_weight_format(name: object, op: str, argument: str = "weight_format") -> AnyWeightFormat:
    """Return the format of expert weights that `name` is or names.

    Raises:
        ValueError: an unknown name. TypeError: neither a format nor a name.

    Example:
        >>> parse_weight_format("mxfp8", "quantize_weights")
        MXFormat('mxfp8_e4m3')
    """
    found = name.name if isinstance(name, AnyWeightFormat) else name
    found = MXFP8_E4M3.name if found == "mxfp8" else found
    formats: dict[str, AnyWeightFormat] = {MXFP4.name: MXFP4, MXFP8_E4M3.name: MXFP8_E4M3}
    formats |= WEIGHT_FORMATS
    if isinstance(found, str) and found in formats:
        return formats[found]
    error: type[Exception] = ValueError if isinstance(found, str) else TypeError
    raise error(message(op, argument, f"one of {['mxfp8', *formats]}", repr(name)))


def get_weight_format(name: object, op: str, argument: str) -> WeightFormat:
    """Return the format of a WeightTensor by its name.

    Raises:
        ValueError: an unknown name. TypeError: no name.
    """
    if isinstance(name, str) and name in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[name]
    error: type[Exception] = ValueError if isinstance(name, str) else TypeError
    raise error(message(op, argument, f"one of {sorted(WEIGHT_FORMATS)}", repr(name)))
