"""HOPPER_GROUPS: INT4, NVFP4 and MXFP8 weights in the order in which a warpgroup reads fragments.

As in HOPPER_FRAGMENT (`layout.py`) a unit is 64 rows × 128 codes, stored [E, rows / 64, K / 128,
unit], and fragment rows g and g + 8 of a warp hold weight rows 2g and 2g + 1. K keeps its order, so
that a k32 step of wgmma lies in one group of 32 or more, and its halves in two groups of 16. Inside
a unit (w warp, g and t lane // 4 and lane % 4, r row of a fragment's pair, q k32 step, h half of a
step, j code of four):

    4-bit codes   [r][w][g][t][q][j] bytes: half 0 in the low nibble, half 1 in the high one
    MXFP8 codes   [q // 2][r][w][g][t][q % 2][h][j] bytes
    scales        [group of the unit][row of the unit], in the weights' own dtype

An INT4 code without zero points is 2v for an integer v from 0, and -2v - 1 below (`group_weights`
decodes it so). With zero points codes stay as they are, and a scale is an int32 word: the bits of
the scale as float32, whose last 13 are zeros for float16 and bfloat16, with the zero point in the
last 8, and 256 for a scale that was float16. NVFP4 has row_scale [E, N padded], times 2^6.

HOPPER_GROUPS_FLOAT16 is the same memory, of INT4 weights that float16 holds: with bfloat16
activations f16 tensor cores multiply them by many tokens (`rows_of_16_bits.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...core.problem import MoEProblem
from ...errors import require, require_tensor
from ...formats.codec import pack_codes, unpack_codes
from ...formats.folding import FoldCertificate
from ...formats.gate_up import GateUpOrder
from ...formats.layouts import UNIT_CODES, UNIT_ROWS, WeightLayout, pad, units
from ...formats.spec import E8M0_NAN, MXFP8_E4M3
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import (
    INT4_ZERO,
    SCALE_DTYPES,
    WEIGHT_FORMATS,
    WeightLike,
    WeightTensor,
)

_INTEGERS = tuple(each.name for each in WEIGHT_FORMATS.values() if each.is_integer)
_ROW_AXES = 4, 8, 2
"""w g r: rows of a unit."""
_LARGEST_ZERO = 16
"""Integers of -16 to 16 are e4m3 numbers of the same exponent."""
_FLOAT16 = 256
"""Marks words whose scale was float16; see the module."""
FLOAT16_EXPONENT = 7
"""Kernels decode INT4 to float16 times this power of two."""
_FLOAT16_RANGE = 2.0**-24, 2.0
"""Magnitudes of bfloat16 scales whose products with -8 to 7 are then float16 numbers: from the
first on, below the second. Scales times 2^15, which the kernels hold, are float16 numbers, too."""
_FLOAT16_ROW = 2.0**-10
"""With smaller scales a weight's error is at most 2^-31. Beside a scale from this on in its row
that is no more than float32 sums have."""


@dataclass(frozen=True)
class GroupWeights:
    """Weights with a scale for each group, as kernels take them: one constexpr.

    Args:
        codes: "int4", "int4_zero" (with zero points), "e2m1" (NVFP4) or "e4m3" (MXFP8).
        group: codes of a row that share a scale, 16 to 128.
        row_factors: whether each row has a float32 factor.
    """

    codes: str
    group: int
    row_factors: bool = False

    @property
    def groups(self) -> int:
        """Groups of a row in a depth unit."""
        return UNIT_CODES // self.group

    @property
    def code_rows(self) -> int:
        """Rows of 128 bytes of codes, of a row unit and depth unit."""
        return 64 if self.codes == "e4m3" else 32

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit's codes and scales; of INT4 with the largest scales, of four bytes."""
        scale_bytes = 4 if self.codes.startswith("int4") else 1
        return self.code_rows * UNIT_CODES + self.groups * UNIT_ROWS * scale_bytes

    @property
    def exponent(self) -> int:
        """e: the kernels decode a code to its value times 2^-e."""
        return {"int4": 8, "int4_zero": 9, "e2m1": 6, "e4m3": 0}[self.codes]

    @property
    def reference(self) -> int:
        """Reference exponent of all rows for the epilogue; 0 if each has a factor of its own."""
        return 0 if self.row_factors else 127 + 6 + self.exponent


def group_weights(weight_format: str) -> GroupWeights | None:
    """What kernels must know of a format; None for MXFP4, which has folded scales."""
    found = WEIGHT_FORMATS.get(weight_format)
    if found is not None:
        return GroupWeights("int4" if found.is_integer else "e2m1", found.group_size)
    return GroupWeights("e4m3", 32) if weight_format == MXFP8_E4M3.name else None


def described(t: WeightLike) -> GroupWeights | None:
    """`group_weights` of a packed tensor, with its own zero points and factors of rows."""
    found = group_weights(t.format.name)
    if found is None or isinstance(t, MXTensor):
        return found
    codes = "int4_zero" if t.scale.dtype == torch.int32 else found.codes
    return replace(found, codes=codes, row_factors=t.row_scale is not None)


class _HopperGroups(WeightLayout):
    """See the module."""

    name, value = "HOPPER_GROUPS", "hopper_groups"
    gate_up_order = GateUpOrder.INTERLEAVED  # adjacent accumulators
    formats = (*WEIGHT_FORMATS, MXFP8_E4M3.name)
    holds = (
        "INT4, NVFP4 or MXFP8, with E8M0 scales of 2^-126 to 2^127, and with zero points up to 16 "
        "and scales of 16 bits"
    )
    otherwise = "keep ROW_MAJOR"

    def can_hold(self, t: WeightLike) -> bool:
        """Whether no E8M0 scale is 0 or NaN, and zero points fit (see the module). Reads them."""
        if t.format.name not in self.formats:
            return False
        if isinstance(t, MXTensor):
            return not bool(((t.scale == 0) | (t.scale == E8M0_NAN)).any())
        if t.zero_point is None:
            return True
        return t.scale.dtype != torch.float32 and not bool((t.zero_point > _LARGEST_ZERO).any())

    def check(self, t: WeightLike, op: str) -> None:
        found = units(tuple(t.shape), op, "logical_shape")
        weights, device = _described(t), t.device
        dtypes = (*SCALE_DTYPES, torch.int32) if t.format.name in _INTEGERS else torch.uint8
        shape = (*found, weights.code_rows * 128)
        require_tensor(t.qdata, op, "qdata", dtype=torch.uint8, shape=shape, device=device)
        shape = (*found, weights.groups * UNIT_ROWS)
        require_tensor(t.scale, op, "scale", dtype=dtypes, shape=shape, device=device)
        if isinstance(t, WeightTensor) and t.row_scale is not None:
            rows, dtype = (found[0], found[1] * UNIT_ROWS), torch.float32
            require_tensor(t.row_scale, op, "row_scale", dtype=dtype, shape=rows, device=device)

    def pack(
        self,
        t: WeightLike,
        certificate: FoldCertificate | None = None,
        rows: torch.Tensor | None = None,
        *,
        out: WeightLike | None = None,
    ) -> WeightLike:
        """See `WeightLayout.pack`; N is padded to 64 rows and K to 128 codes, with zeros.

        Returns:
            The kind of tensor that `t` is, with qdata uint8 [E, N/64, K/128, 4096 (MXFP8: 8192)]
            and scale [E, N/64, K/128, 64 * groups], of the dtype of `t.scale` or int32.
        """
        got = t.format.name
        require(
            self.can_hold(t), "pack_groups", "t", need=self.holds, got=got, remedy=self.otherwise
        )
        weights, zeros = _described(t), getattr(t, "zero_point", None)
        out = self._empty(t, weights) if out is None else out
        order = slice(None) if rows is None else rows
        for expert in range(t.shape[0]):  # temporaries stay small beside the weights
            codes, scale = t.qdata[expert][order], t.scale[expert][order]
            if zeros is not None:
                scale = _words(scale, zeros[expert][order])
            pack = _pack_bytes if weights.codes == "e4m3" else _pack_nibbles
            out.qdata[expert] = pack(codes, recode=weights.codes == "int4" and zeros is None)
            out.scale[expert] = _pack_scales(scale, weights.groups)
        if isinstance(t, WeightTensor) and t.row_scale is not None:
            assert isinstance(out, WeightTensor)  # for the type checker
            assert out.row_scale is not None  # for the type checker
            factors = t.row_scale[:, order] * 2.0**weights.exponent
            out.row_scale.zero_()[:, : t.shape[1]] = factors
        return out

    def unpack(self, t: WeightLike, rows: torch.Tensor | None = None) -> WeightLike:
        self.require_own(t, "unpack_groups")
        weights, (experts, num_rows, depth) = _described(t), t.shape
        order = slice(None) if rows is None else rows
        width = depth // t.format.codes_per_byte
        qdata = t.qdata.new_empty((experts, num_rows, width))
        scale = t.scale.new_empty((experts, num_rows, depth // weights.group))
        for expert in range(experts):
            unpack = _unpack_bytes if weights.codes == "e4m3" else _unpack_nibbles
            codes = unpack(t.qdata[expert], recode=weights.codes == "int4")
            qdata[expert, order] = codes[:num_rows, :width]
            found = _unpack_scales(t.scale[expert], weights.groups)
            scale[expert, order] = found[:num_rows, : scale.shape[-1]]
        if isinstance(t, MXTensor):
            return MXTensor(qdata, scale, t.format)
        zeros, factors = None, None
        if weights.codes == "int4_zero":
            scale, zeros = _from_words(scale)
        if t.row_scale is not None:
            factors = t.row_scale.new_empty((experts, num_rows))
            factors[:, order] = t.row_scale[:, :num_rows] * 2.0**-weights.exponent
        return WeightTensor(qdata, scale, t.format, zeros, factors)

    def _empty(self, t: WeightLike, weights: GroupWeights) -> WeightLike:
        """A packed tensor for [E, N, K] without values."""
        shape = tuple(t.shape)
        found = units(shape, "pack_groups", "t.shape")
        codes = t.qdata.new_empty((*found, weights.code_rows * 128))
        scale = t.scale.new_empty((*found, weights.groups * UNIT_ROWS))
        if isinstance(t, MXTensor):
            return MXTensor(codes, scale, t.format, -1, self, None, shape)
        scale = scale if t.zero_point is None else scale.to(torch.int32)
        factors = t.row_scale
        if factors is not None:
            factors = factors.new_empty((found[0], found[1] * UNIT_ROWS))
        return WeightTensor(codes, scale, t.format, None, factors, self, shape)


class _HopperGroupsFloat16(_HopperGroups):
    """See the module."""

    name, value = "HOPPER_GROUPS_FLOAT16", "hopper_groups_float16"
    formats = _INTEGERS
    holds = (
        "INT4 without zero points, with bfloat16 scales below 2 that are 0, from 2^-24 on, or in a "
        "row with a scale from 2^-10 on"
    )
    otherwise = "keep HOPPER_GROUPS"

    def can_hold(self, t: WeightLike) -> bool:
        """Whether float16 holds the weights (see above). Reads their scales."""
        if t.format.name not in self.formats or isinstance(t, MXTensor):
            return False
        if t.zero_point is not None or t.scale.dtype != torch.bfloat16:
            return False
        size, (first, end) = t.scale.abs(), _FLOAT16_RANGE
        rows = size.amax(-1, keepdim=True) >= _FLOAT16_ROW
        return bool(((size < end) & ((size >= first) | (size == 0) | rows)).all())


HOPPER_GROUPS = _HopperGroups()
HOPPER_GROUPS_FLOAT16 = _HopperGroupsFloat16()


def refuse_groups(problem: MoEProblem) -> str | None:
    """Why the kernels cannot serve weights of other formats than MXFP4, or None."""
    if isinstance(problem.weight_layout, _HopperGroups):
        return None
    return (
        "needs weights in HOPPER_GROUPS layout: call weights.prepare(device=...); it holds "
        f"{HOPPER_GROUPS.holds}"
    )


def _described(t: WeightLike) -> GroupWeights:
    found = described(t)
    assert found is not None  # checked by the callers
    return found


def _words(scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """Scales of 16 bits and zero points as int32 words."""
    bits = scale.to(torch.float32).view(torch.int32)
    mark = _FLOAT16 if scale.dtype == torch.float16 else 0
    return bits | zero_point.to(torch.int32) | mark


def _from_words(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_words`. All words of a tensor have the same mark."""
    is_half = words.device.type != "meta" and bool((words & _FLOAT16).any())
    scale = (words & ~0x1FFF).view(torch.float32)
    return scale.to(torch.float16 if is_half else torch.bfloat16), (words & 0xFF).to(torch.uint8)


def _pack_nibbles(qdata: torch.Tensor, recode: bool) -> torch.Tensor:
    """uint8 packed codes [N, K/2] → uint8 [N/64, K/128, 4096]. recode: as INT4 without zeros."""
    codes = unpack_codes(qdata)
    if recode:
        value = codes.to(torch.int16) - INT4_ZERO
        codes = torch.where(value < 0, -2 * value - 1, 2 * value).to(torch.uint8)
    codes = pad(codes, UNIT_ROWS, UNIT_CODES)
    depth_units = codes.shape[1] // UNIT_CODES
    low, high = codes.view(-1, *_ROW_AXES, depth_units, 4, 2, 4, 4).unbind(6)  # n w g r u q h t j
    packed = (low | high << 4).permute(0, 4, 3, 1, 2, 6, 5, 7)  # n u r w g t q j
    return packed.reshape(packed.shape[0], packed.shape[1], -1)


def _unpack_nibbles(packed: torch.Tensor, recode: bool) -> torch.Tensor:
    """The inverse of `_pack_nibbles`, of the padded rows and codes."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, 2, 4, 8, 4, 4, 4)  # n u r w g t q j
    split = split.permute(0, 3, 4, 2, 1, 6, 5, 7)  # n w g r u q t j
    codes = torch.stack((split & 15, split >> 4), 6)
    if recode:
        half = codes >> 1
        codes = torch.where(codes & 1 == 1, INT4_ZERO - 1 - half, INT4_ZERO + half)
    flat = codes.reshape(row_units * UNIT_ROWS, depth_units * UNIT_CODES)
    result: torch.Tensor = pack_codes(flat)
    return result


def _pack_bytes(qdata: torch.Tensor, recode: bool) -> torch.Tensor:
    """uint8 codes [N, K] → uint8 [N/64, K/128, 8192]; they are never recoded."""
    codes = pad(qdata, UNIT_ROWS, UNIT_CODES)
    split = codes.view(-1, *_ROW_AXES, codes.shape[1] // UNIT_CODES, 2, 2, 2, 4, 4)
    packed = split.permute(0, 4, 5, 3, 1, 2, 8, 6, 7, 9)  # n u p r w g t q h j
    return packed.reshape(packed.shape[0], packed.shape[1], -1)


def _unpack_bytes(packed: torch.Tensor, recode: bool) -> torch.Tensor:
    """The inverse of `_pack_bytes`, of the padded rows and codes."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, 2, 2, 4, 8, 4, 2, 2, 4)  # n u p r w g t q h j
    split = split.permute(0, 4, 5, 3, 1, 2, 7, 8, 6, 9)  # n w g r u p q h t j
    return split.reshape(row_units * UNIT_ROWS, depth_units * UNIT_CODES)


def _pack_scales(scale: torch.Tensor, groups: int) -> torch.Tensor:
    """Scales [N, K/g] → [N/64, K/128, 64 * groups]."""
    scale = pad(scale, UNIT_ROWS, groups)
    split = scale.view(-1, UNIT_ROWS, scale.shape[1] // groups, groups)  # n row u group
    return split.permute(0, 2, 3, 1).reshape(split.shape[0], split.shape[2], -1)


def _unpack_scales(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of `_pack_scales`, of the padded rows and groups."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, groups, UNIT_ROWS).permute(0, 3, 1, 2)
    return split.reshape(row_units * UNIT_ROWS, depth_units * groups)
