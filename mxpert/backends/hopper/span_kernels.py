"""Around dual quantisation: where the blocks of groups begin, and one scale for several blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.grouped_kernels import group_extents, pick

TABLE_BLOCKS = 8
"""Blocks of 32 places that a program of the table kernel describes."""

SPREAD_ROWS = 8
MAX_SPREAD_BLOCKS = 256
"""Rows and blocks a step of the kernel that spreads scales."""


@triton.jit(do_not_specialize=("num_rows", "num_groups", "num_blocks"),
            do_not_specialize_on_alignment=("group_offsets_ptr",))
def _block_table_kernel(table_ptr, starts_ptr, group_offsets_ptr, num_rows, num_groups, num_blocks,
                        BLOCKS: tl.constexpr, BLOCK_G: tl.constexpr):
    """For each block of the padded columnwise copy: its first row, and how many rows it has.

    table [num_blocks, 2]: the row, and rows + 256 × (rows that count), where rows behind the last
    group do not count. starts [num_groups + 1]: the first place of each group, and the end.
    """
    starts, stops, sizes = group_extents(group_offsets_ptr, num_groups, num_rows, 32, BLOCK_G)
    ends = tl.cumsum(sizes, axis=0)
    begins = ends - sizes
    index = tl.arange(0, BLOCK_G)
    tl.store(starts_ptr + index, begins * 32,
             mask=(index <= num_groups) & (tl.program_id(0) == 0))
    for step in range(BLOCKS):
        block = tl.program_id(0) * BLOCKS + step
        chosen = (begins <= block) & (block < ends)
        row = pick(chosen, starts + (block - begins) * 32)
        rows = tl.minimum(tl.maximum(pick(chosen, stops) - row, 0), 32)
        counts = tl.where(pick(chosen, index) < num_groups, rows, 0)
        tl.store(table_ptr + 2 * block, row, mask=block < num_blocks)
        tl.store(table_ptr + 2 * block + 1, rows + 256 * counts, mask=block < num_blocks)


@triton.jit
def _largest(scale, BLOCKS_OF_SPAN: tl.constexpr):
    """Scale [rows, blocks] of the spans of BLOCKS_OF_SPAN blocks; where all are 0, 127."""
    ROWS: tl.constexpr = scale.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    spans = tl.reshape(scale, (ROWS, BLOCKS // BLOCKS_OF_SPAN, BLOCKS_OF_SPAN))
    top = tl.max(spans, axis=2)[:, :, None]
    top = tl.where(top == 0, 127, top)
    return tl.reshape(tl.broadcast_to(top, spans.shape), (ROWS, BLOCKS))


@triton.jit(do_not_specialize=("num_rows", "pitch", "num_segments"),
            do_not_specialize_on_alignment=("scale_ptr", "starts_ptr"))
def _spread_scales_kernel(scale_ptr, starts_ptr, num_rows, pitch, num_segments,
                          WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Give the blocks of each span the largest of their scales, in place; see `_scale_byte`'s mark.

    scale [num_rows, pitch] bytes. A program has ROWS rows of one segment: segment s is the blocks
    starts[s] / 32 … starts[s + 1] / 32 of each row, or all of them. WHOLE: a span is a segment,
    else four blocks from the segment's start on.
    """
    segment = tl.program_id(0) % num_segments
    rows = tl.program_id(0) // num_segments * ROWS + tl.arange(0, ROWS)
    first, end = 0, pitch
    if starts_ptr is not None:
        first = tl.load(starts_ptr + segment) // 32
        end = tl.load(starts_ptr + segment + 1) // 32
    row_ptrs = scale_ptr + (rows.to(tl.int64) * pitch)[:, None]
    step = tl.arange(0, BLOCKS)
    if WHOLE:
        top = tl.zeros((ROWS,), tl.int32)
        for block in range(first, end, BLOCKS):
            mask = (rows < num_rows)[:, None] & (block + step < end)[None, :]
            scale = tl.load(row_ptrs + (block + step)[None, :], mask=mask, other=0).to(tl.int32)
            top = tl.maximum(top, tl.max(scale, axis=1))
        spread = tl.broadcast_to(tl.where(top == 0, 127, top)[:, None], (ROWS, BLOCKS))
        for block in range(first, end, BLOCKS):
            mask = (rows < num_rows)[:, None] & (block + step < end)[None, :]
            tl.store(row_ptrs + (block + step)[None, :], spread.to(tl.uint8), mask=mask)
    else:
        for block in range(first, end, BLOCKS):
            mask = (rows < num_rows)[:, None] & (block + step < end)[None, :]
            scale = tl.load(row_ptrs + (block + step)[None, :], mask=mask, other=0).to(tl.int32)
            tl.store(row_ptrs + (block + step)[None, :], _largest(scale, 4).to(tl.uint8), mask=mask)
