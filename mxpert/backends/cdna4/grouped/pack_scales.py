"""Scales in the order in which the grouped GEMM copies them to LDS.

The GEMM reads scales of two steps of 128 values at a time: for each row 8 bytes, at [pair, row].
Entry g of a row's four uint16 holds the scales of values 32 g … 32 g + 31 of both steps. In wgrad
pairs are counted from the start of each group. Group g that starts at value s has pairs from slot
``s / 256 + g`` on: each group begins at least as many slots after the previous one as that has
pairs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ....formats.spec import E8M0_BIAS
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ...common.groups import clamp_rows, group_block, pick

PAIR_BLOCKS = 8
"""Scales of a row in a pair of steps."""

_ROWS = 256
_ONE = tl.constexpr(E8M0_BIAS)


@triton.jit(
    do_not_specialize=("num_rows", "num_blocks", "num_groups"),
    do_not_specialize_on_alignment=("scale_ptr", "offsets_ptr"),
)
def _pack_scales_kernel(
    packed_ptr,
    scale_ptr,
    offsets_ptr,
    num_rows,
    num_blocks,
    num_groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write packed [slots, num_rows, 8] from scale [num_rows, num_blocks]; scale 1 past the end.

    With offsets (wgrad) each group has slots of its own, else slot p holds pair p.
    Grid: (slots · row tiles,), BLOCK_ROWS rows of a slot per program.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    slot = tl.program_id(0) // row_tiles
    rows = tl.program_id(0) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first, last = slot * 8, num_blocks
    if offsets_ptr is not None:
        index = tl.arange(0, BLOCK_G)
        exists = index < num_groups
        starts = tl.load(offsets_ptr + index, mask=exists, other=0)
        stops = tl.load(offsets_ptr + index + 1, mask=exists, other=0)
        starts = clamp_rows(starts, num_blocks * 32) // 32
        stops = clamp_rows(stops, num_blocks * 32) // 32
        slots = starts // 8 + index
        group = tl.sum((exists & (slots <= slot)).to(tl.int32), axis=0) - 1
        chosen = index == group
        first = pick(chosen, starts + (slot - slots) * 8)
        last = pick(chosen, stops)
    byte = tl.arange(0, 8)
    block = first + byte % 2 * 4 + byte // 2  # the steps' scales alternate
    mask = (rows < num_rows)[:, None] & (block < last)[None, :]
    scale = tl.load(
        scale_ptr + rows.to(tl.int64)[:, None] * num_blocks + block[None, :], mask=mask, other=_ONE
    )  # [BLOCK_ROWS, 8] uint8
    target = (slot.to(tl.int64) * num_rows + rows) * 8
    tl.store(packed_ptr + target[:, None] + byte[None, :], scale, mask=(rows < num_rows)[:, None])


def pack_scales(scale: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """Return int16 [slots, rows, 4], the packed scales of an operand.

    Args:
        scale: E8M0 bytes [..., rows, blocks]; leading dimensions count as rows.
        offsets: for wgrad, int32 [G + 1]: where groups start in the reduction, multiples of 32.
    """
    num_blocks = scale.shape[-1]
    num_rows = scale.numel() // num_blocks
    num_groups = 0 if offsets is None else offsets.shape[0] - 1
    num_slots = triton.cdiv(num_blocks, PAIR_BLOCKS) + num_groups
    packed = scale.new_empty((num_slots, num_rows, 4), dtype=torch.int16)
    _pack_launch(num_rows, num_blocks, num_groups, num_slots)(
        packed_ptr=packed.view(torch.uint8), scale_ptr=scale.contiguous(), offsets_ptr=offsets
    )
    return packed


@functools.lru_cache(CACHED_LAUNCHES)
def _pack_launch(num_rows: int, num_blocks: int, num_groups: int, num_slots: int) -> Launch:
    return Launch(
        _pack_scales_kernel,
        (num_slots * triton.cdiv(num_rows, _ROWS),),
        num_rows=num_rows,
        num_blocks=num_blocks,
        num_groups=num_groups,
        BLOCK_ROWS=_ROWS,
        BLOCK_G=group_block(num_groups),
        num_warps=4,
    )
