"""Units of HOPPER_FRAGMENT on a GPU, in one pass over the weights; `layout` has their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.launch import Launch
from ...formats.layouts import UNIT_BLOCKS, UNIT_CODE_BYTES, UNIT_ROWS, UNIT_SCALE_BYTES
from ...formats.tensor import MXTensor

_ROWS = tl.constexpr(UNIT_ROWS)
_WORDS = tl.constexpr(UNIT_CODE_BYTES // UNIT_ROWS // 4)
"""32-bit words of eight codes in a unit's row."""
_BLOCKS = tl.constexpr(UNIT_BLOCKS)
_CODE_WORDS = tl.constexpr(UNIT_CODE_BYTES // 4)
_SHIFTS = tl.constexpr(UNIT_SCALE_BYTES)
_DEPTH = 4
"""Units side by side that a program packs: it reads 256 bytes of each row."""


@triton.jit
def _spread_signs(word):
    """Move the signs of eight codes to where `layout._sign_tables` has them."""
    moved = word & 0x77777777
    for code in tl.static_range(4):
        low, high = word >> (4 * code + 3) & 1, word >> (4 * code + 19) & 1
        moved |= low << (8 * code + 7) | high << (8 * code + 3)
    return moved


@triton.jit
def _pack_hopper_fragment_kernel(
    codes,
    scale,
    rows,
    reference,
    packed,
    shifts,
    num_rows,
    num_blocks,
    row_units,
    depth_units,
    DEPTH: tl.constexpr,
):
    """Pack 64 rows of one expert, DEPTH units of 128 codes; what lies outside is zero.

    Grid: (E · row_units, ⌈depth_units / DEPTH⌉).

    Args:
        codes: int32 [E, num_rows, 4 · num_blocks], eight e2m1 codes a word. scale: uint8 [E,
            num_rows, num_blocks].
        rows: int64 [num_rows], the row of the source for each row of the result; None keeps them.
        reference: uint8 [E, 64 · row_units], of the result's rows.
        packed: int32 [E, row_units, depth_units, 1024]. shifts: uint8 [E, row_units, depth_units,
            256].
    """
    unit = tl.program_id(0)
    expert = (unit // row_units).to(tl.int64)
    row = tl.arange(0, _ROWS)
    warp, lane_row, pair = row // 16, row // 2 % 8, row % 2
    target = unit % row_units * _ROWS + row
    exists = target < num_rows
    source = target if rows is None else tl.load(rows + target, mask=exists, other=0)
    source = expert * num_rows + source
    num_words = num_blocks * 4  # so the compiler knows that four words lie within a row
    first = unit.to(tl.int64) * depth_units  # the unit's place in `packed` and `shifts`

    column = tl.program_id(1) * (DEPTH * _WORDS) + tl.arange(0, DEPTH * _WORDS)
    inside = exists[:, None] & (column < num_words)[None, :]
    words = tl.load(codes + source[:, None] * num_words + column[None, :], mask=inside, other=0)
    place = (first + column // _WORDS) * _CODE_WORDS + column % _WORDS
    place = place[None, :] + (((pair * 4 + warp) * 8 + lane_row) * _WORDS)[:, None]
    held = (column < depth_units * _WORDS)[None, :]
    tl.store(packed + place, _spread_signs(words), mask=held)

    column = tl.program_id(1) * (DEPTH * _BLOCKS) + tl.arange(0, DEPTH * _BLOCKS)
    inside = exists[:, None] & (column < num_blocks)[None, :]
    found = tl.load(scale + source[:, None] * num_blocks + column[None, :], mask=inside, other=0)
    largest = tl.load(reference + expert * row_units * _ROWS + target)
    shift = tl.where(inside, largest[:, None].to(tl.int32) - found.to(tl.int32), 0)
    place = (first + column // _BLOCKS) * _SHIFTS + column % _BLOCKS * 2
    place = place[None, :] + ((warp * 8 + lane_row) * (_BLOCKS * 2) + pair)[:, None]
    held = (column < depth_units * _BLOCKS)[None, :]
    tl.store(shifts + place, shift.to(tl.uint8), mask=held)


def pack_units(t: MXTensor, rows: torch.Tensor | None, out: MXTensor) -> None:
    """Write codes and shifts of ROW_MAJOR weights [E, N, K] to `out`, which has its references."""
    experts, row_units, depth_units = out.qdata.shape[:3]
    codes = t.qdata.contiguous()
    if codes.data_ptr() % 4:
        codes = codes.clone()
    Launch(
        _pack_hopper_fragment_kernel,
        (experts * row_units, triton.cdiv(depth_units, _DEPTH)),
        num_rows=t.qdata.shape[1],
        num_blocks=t.scale.shape[2],
        row_units=row_units,
        depth_units=depth_units,
        DEPTH=_DEPTH,
    )(
        codes=codes.view(torch.int32),
        scale=t.scale.contiguous(),
        rows=None if rows is None else rows.contiguous(),
        reference=out.reference,
        packed=out.qdata.view(torch.int32),
        shifts=out.scale,
    )
