"""HOPPER_GROUPS: INT4 and MXFP8 weights in the order in which a warpgroup reads its fragments.

As in HOPPER_FRAGMENT (`layout.py`) a unit is 64 rows × 128 codes, stored [E, rows / 64, K / 128,
unit], and fragment rows g and g + 8 of a warp hold weight rows 2g and 2g + 1. K keeps its order, so
that a k32 step of wgmma lies in one group of 32 or more. Inside a unit (w warp, g and t lane // 4
and lane % 4, r row of a fragment's pair, q k32 step, h half of a step, j code of four):

    INT4 codes    [r][w][g][t][q][j] bytes: half 0 in the low nibble, half 1 in the high one
    MXFP8 codes   [q // 2][r][w][g][t][q % 2][h][j] bytes
    scales        [group of the unit][row of the unit], in the weights' own dtype

An INT4 code is 2v for an integer v from 0, and -2v - 1 below (see `group_weights`).
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
from ...formats.spec import MXFP8_E4M3
from ...formats.tensor import Layout
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


@dataclass(frozen=True)
class GroupWeights:
    """Weights with a scale for each group, as kernels take them: one constexpr.

    Args:
        is_integer: INT4 codes; otherwise e4m3 codes and E8M0 scales.
        group: codes of a row that share a scale, 32, 64 or 128.
    """

    is_integer: bool
    group: int

    @property
    def groups(self) -> int:
        """Groups of a row in a depth unit."""
        return UNIT_CODES // self.group

    @property
    def code_rows(self) -> int:
        """Rows of 128 bytes of codes, of a row unit and depth unit."""
        return 32 if self.is_integer else 64

    @property
    def reference(self) -> int:
        """Reference exponent of all rows for the epilogue: 2^8 undoes the v / 256 of integers."""
        return 127 + 6 + (8 if self.is_integer else 0)


def group_weights(weight_format: str) -> GroupWeights | None:
    """What kernels must know of a format; None for MXFP4, which has folded scales."""
    found = WEIGHT_FORMATS.get(weight_format)
    if found is not None and found.is_integer:
        return GroupWeights(True, found.group_size)
    return GroupWeights(False, 32) if weight_format == MXFP8_E4M3.name else None


class _HopperGroups(WeightLayout):
    """See the module."""

    name, value = "HOPPER_GROUPS", "hopper_groups"
    gate_up_order = GateUpOrder.INTERLEAVED  # adjacent accumulators
    formats = (*_INTEGERS, MXFP8_E4M3.name)
    holds = "INT4 without zero points, or MXFP8 with scales of 2^-126 to 2^127"

    def can_hold(self, t: WeightLike) -> bool:
        """Whether there are no zero points, and no E8M0 scale is 0 or NaN. Reads the scales."""
        if isinstance(t, WeightTensor):
            return t.format.is_integer and t.zero_point is None
        scale = t.scale
        return t.format is MXFP8_E4M3 and not bool(((scale == 0) | (scale == 255)).any())

    def check(self, t: WeightLike, op: str) -> None:
        found = units(tuple(t.shape), op, "logical_shape")
        weights = _described(t)
        scale_dtypes = SCALE_DTYPES if weights.is_integer else torch.uint8
        shape = (*found, weights.code_rows * 128)
        require_tensor(t.qdata, op, "qdata", dtype=torch.uint8, shape=shape, device=t.device)
        shape = (*found, weights.groups * UNIT_ROWS)
        require_tensor(t.scale, op, "scale", dtype=scale_dtypes, shape=shape, device=t.device)

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
            and scale [E, N/64, K/128, 64 * groups], of the dtype of `t.scale`.
        """
        got = f"{t.format.name} that it cannot hold"
        require(self.can_hold(t), "pack_groups", "t", need=self.holds, got=got, remedy="keep it")
        weights = _described(t)
        out = self._empty(t, weights) if out is None else out
        order = slice(None) if rows is None else rows
        for expert in range(t.shape[0]):  # temporaries stay small beside the weights
            codes, scale = t.qdata[expert][order], t.scale[expert][order]
            out.qdata[expert] = (_pack_integers if weights.is_integer else _pack_bytes)(codes)
            out.scale[expert] = _pack_scales(scale, weights.groups)
        return out

    def _empty(self, t: WeightLike, weights: GroupWeights) -> WeightLike:
        """A packed tensor for [E, N, K] without values."""
        found = units(tuple(t.shape), "pack_groups", "t.shape")
        codes = t.qdata.new_empty((*found, weights.code_rows * 128))
        scale = t.scale.new_empty((*found, weights.groups * UNIT_ROWS))
        shape = tuple(t.shape)
        return replace(t, qdata=codes, scale=scale, layout=self, logical_shape=shape)

    def unpack(self, t: WeightLike, rows: torch.Tensor | None = None) -> WeightLike:
        self.require_own(t, "unpack_groups")
        weights = _described(t)
        experts, num_rows, depth = t.shape
        width = depth // 2 if weights.is_integer else depth
        qdata = t.qdata.new_empty((experts, num_rows, width))
        scale = t.scale.new_empty((experts, num_rows, depth // weights.group))
        order = slice(None) if rows is None else rows
        for expert in range(experts):
            codes = (_unpack_integers if weights.is_integer else _unpack_bytes)(t.qdata[expert])
            qdata[expert, order] = codes[:num_rows, :width]
            found = _unpack_scales(t.scale[expert], weights.groups)
            scale[expert, order] = found[:num_rows, : scale.shape[-1]]
        return replace(t, qdata=qdata, scale=scale, layout=Layout.ROW_MAJOR, logical_shape=None)


HOPPER_GROUPS = _HopperGroups()


def refuse_groups(problem: MoEProblem) -> str | None:
    """Why the kernels cannot serve weights of other formats than MXFP4, or None."""
    if problem.weight_format not in HOPPER_GROUPS.formats:
        return f"multiplies MXFP4, MXFP8 and INT4; {problem.weight_format} runs on portable kernels"
    if problem.weight_layout is not HOPPER_GROUPS:
        return (
            "needs weights in HOPPER_GROUPS layout: call weights.prepare(device=...), which keeps "
            "ROW_MAJOR with zero points and with E8M0 scales of 0 or NaN"
        )
    return None


def _described(t: WeightLike) -> GroupWeights:
    found = group_weights(t.format.name)
    assert found is not None  # checked by the callers
    return found


def _pack_integers(qdata: torch.Tensor) -> torch.Tensor:
    """uint8 packed codes [N, K/2] → uint8 [N/64, K/128, 4096]."""
    value = unpack_codes(qdata).to(torch.int16) - INT4_ZERO
    codes = torch.where(value < 0, -2 * value - 1, 2 * value).to(torch.uint8)
    codes = pad(codes, UNIT_ROWS, UNIT_CODES)
    split = codes.view(
        -1, *_ROW_AXES, codes.shape[1] // UNIT_CODES, 4, 2, 4, 4
    )  # n w g r u q h t j
    low, high = split.unbind(6)
    packed = (low | high << 4).permute(0, 4, 3, 1, 2, 6, 5, 7)  # n u r w g t q j
    return packed.reshape(packed.shape[0], packed.shape[1], -1)


def _unpack_integers(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_integers`, of the padded rows and codes."""
    row_units, depth_units = packed.shape[:2]
    split = packed.view(row_units, depth_units, 2, 4, 8, 4, 4, 4)  # n u r w g t q j
    split = split.permute(0, 3, 4, 2, 1, 6, 5, 7)  # n w g r u q t j
    codes = torch.stack((split & 15, split >> 4), 6).to(torch.int16)
    half = codes >> 1
    values = torch.where(codes & 1 == 1, INT4_ZERO - 1 - half, INT4_ZERO + half)
    flat = values.to(torch.uint8).reshape(row_units * UNIT_ROWS, depth_units * UNIT_CODES)
    result: torch.Tensor = pack_codes(flat)
    return result


def _pack_bytes(qdata: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, K] → uint8 [N/64, K/128, 8192]."""
    codes = pad(qdata, UNIT_ROWS, UNIT_CODES)
    split = codes.view(-1, *_ROW_AXES, codes.shape[1] // UNIT_CODES, 2, 2, 2, 4, 4)
    packed = split.permute(0, 4, 5, 3, 1, 2, 8, 6, 7, 9)  # n u p r w g t q h j
    return packed.reshape(packed.shape[0], packed.shape[1], -1)


def _unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
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
