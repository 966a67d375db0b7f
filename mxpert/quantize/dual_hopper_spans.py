"""Kernels around dual quantisation: block table of groups, scales of spans of several blocks."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.groups import group_extents, pick

TABLE_BLOCKS = 8
"""Blocks of 32 positions per program of the table kernel."""

SPREAD_ROWS = 8
MAX_SPREAD_BLOCKS = 256
"""Rows per program, and largest number of blocks per step, of the kernels over scales."""

_SIZES = ("row_programs", "row_rows", "row_pitch", "column_rows", "column_pitch", "num_segments")
_POINTERS = ("row_scale_ptr", "row_wide_ptr", "column_scale_ptr", "column_wide_ptr", "starts_ptr")
"""Arguments of the kernels over scales that do not select a binary."""


@triton.jit
def start_counts(row_wide_ptr, column_wide_ptr, row_few, column_few):
    """Initialise the counts of wide blocks [1] of AUTO copies to minus the tolerated number."""
    if row_wide_ptr is not None:
        tl.store(row_wide_ptr, -row_few)
    if column_wide_ptr is not None:
        tl.store(column_wide_ptr, -column_few)


@triton.jit(
    do_not_specialize=("row_few", "column_few"),
    do_not_specialize_on_alignment=("row_wide_ptr", "column_wide_ptr"),
)
def _start_counts_kernel(row_wide_ptr, column_wide_ptr, row_few, column_few):
    """`start_counts` as a kernel, for calls without a block table. Grid: one program."""
    start_counts(row_wide_ptr, column_wide_ptr, row_few, column_few)


@triton.jit(
    do_not_specialize=("num_rows", "num_groups", "num_blocks", "row_few", "column_few"),
    do_not_specialize_on_alignment=("group_offsets_ptr", "row_wide_ptr", "column_wide_ptr"),
)
def _block_table_kernel(
    table_ptr,
    starts_ptr,
    row_wide_ptr,
    column_wide_ptr,
    group_offsets_ptr,
    num_rows,
    num_groups,
    num_blocks,
    row_few,
    column_few,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the block table of the padded columnwise copy; also run `start_counts`.

    Grid: one program per BLOCKS blocks. The first program also writes `starts`.

    table [num_blocks, 2]: first row of the block, and rows + 256 × (rows that count). Rows after
    the last group do not count. starts [num_groups + 1]: first position of each group, and the end.
    """
    if tl.program_id(0) == 0:
        start_counts(row_wide_ptr, column_wide_ptr, row_few, column_few)
    starts, stops, sizes = group_extents(group_offsets_ptr, num_groups, num_rows, 32, BLOCK_G)
    ends = tl.cumsum(sizes, axis=0)
    begins = ends - sizes
    index = tl.arange(0, BLOCK_G)
    tl.store(starts_ptr + index, begins * 32, mask=(index <= num_groups) & (tl.program_id(0) == 0))
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
    """Largest scale of each span of BLOCKS_OF_SPAN blocks, [rows, blocks]; 127 if all are 0."""
    ROWS: tl.constexpr = scale.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    spans = tl.reshape(scale, (ROWS, BLOCKS // BLOCKS_OF_SPAN, BLOCKS_OF_SPAN))
    top = tl.max(spans, axis=2)[:, :, None]
    top = tl.where(top == 0, 127, top)
    return tl.reshape(tl.broadcast_to(top, spans.shape), (ROWS, BLOCKS))


class Scales(NamedTuple):
    """Scales uint8 [num_rows, pitch] of a copy, and the count of its wide blocks [1], or None.

    Segment s of a row is its blocks starts[s] / 32 … starts[s + 1] / 32; without starts it is all.
    """

    ptr: tl.tensor
    wide_ptr: tl.tensor | None
    starts_ptr: tl.tensor | None
    num_rows: tl.tensor | tl.constexpr
    pitch: tl.tensor | tl.constexpr
    num_segments: tl.tensor | tl.constexpr


@triton.jit
def _segment(program, scales, ROWS: tl.constexpr):
    """Rows of a program, and first and end block of its segment in each row."""
    segment = program % scales.num_segments
    rows = program // scales.num_segments * ROWS + tl.arange(0, ROWS)
    first, end = 0, scales.pitch
    if scales.starts_ptr is not None:
        first = tl.load(scales.starts_ptr + segment) // 32
        end = tl.load(scales.starts_ptr + segment + 1) // 32
    return rows, first, end


@triton.jit
def _load_scales(row_ptrs, rows, block, end, num_rows, BLOCKS: tl.constexpr):
    """Load scales [rows, BLOCKS] from `block` on as int32; return them, pointers and mask."""
    step = block + tl.arange(0, BLOCKS)
    ptrs = row_ptrs[:, None] + step[None, :]
    mask = (rows < num_rows)[:, None] & (step < end)[None, :]
    return tl.load(ptrs, mask=mask, other=0).to(tl.int32), ptrs, mask


@triton.jit
def _largest_of_segment(row_ptrs, rows, first, end, num_rows, BLOCKS: tl.constexpr):
    top = tl.zeros((rows.shape[0],), tl.int32)
    for block in range(first, end, BLOCKS):
        scale, _, _ = _load_scales(row_ptrs, rows, block, end, num_rows, BLOCKS)
        top = tl.maximum(top, tl.max(scale, axis=1))
    return top


@triton.jit
def _count_segment(program, scales, FREE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Add the number of a segment's wide blocks to the count.

    A block is wide if its scale is more than FREE binades below the largest of its segment. Rows
    with a NaN (scale 255) are not counted.
    """
    rows, first, end = _segment(program, scales, ROWS)
    row_ptrs = scales.ptr + rows.to(tl.int64) * scales.pitch
    num_rows = scales.num_rows
    top = _largest_of_segment(row_ptrs, rows, first, end, num_rows, BLOCKS)
    count = 0
    for block in range(first, end, BLOCKS):
        scale, _, _ = _load_scales(row_ptrs, rows, block, end, num_rows, BLOCKS)
        wide = (scale > 0) & (top[:, None] - scale > FREE) & (top < 255)[:, None]
        count += tl.sum(tl.sum(wide.to(tl.int32), axis=1), axis=0)
    if count > 0:
        tl.atomic_add(scales.wide_ptr, count)


@triton.jit
def _spread_segment(program, scales, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Give all blocks of a span the largest of their scales, in place; byte 0 marks zero blocks.

    A program handles one segment of ROWS rows. WHOLE: a span is a segment; otherwise four blocks,
    counted from the segment's start. If the count is above 0, blocks keep their own scales.
    """
    rows, first, end = _segment(program, scales, ROWS)
    row_ptrs = scales.ptr + rows.to(tl.int64) * scales.pitch
    num_rows = scales.num_rows
    top = tl.zeros((ROWS,), tl.int32)
    if WHOLE:
        top = _largest_of_segment(row_ptrs, rows, first, end, num_rows, BLOCKS)
        top = tl.where(top == 0, 127, top)
    own = False
    if scales.wide_ptr is not None:
        own = tl.load(scales.wide_ptr) > 0
    for block in range(first, end, BLOCKS):
        scale, ptrs, mask = _load_scales(row_ptrs, rows, block, end, num_rows, BLOCKS)
        if WHOLE:
            spread = tl.broadcast_to(top[:, None], (ROWS, BLOCKS))
        else:
            spread = _largest(scale, 4)
        spread = tl.where(own, tl.where(scale == 0, 127, scale), spread)
        tl.store(ptrs, spread.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _count_wide_blocks_kernel(
    row_scale_ptr,
    row_wide_ptr,
    column_scale_ptr,
    column_wide_ptr,
    starts_ptr,
    row_programs,
    row_rows,
    row_pitch,
    column_rows,
    column_pitch,
    num_segments,
    FREE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`_count_segment` for each copy with a count; pointers of the other copy are None.

    Grid: one program per segment of ROWS rows of scales, row_programs for the rowwise copy first.
    A row of the rowwise copy is one segment; `starts` divides those of the columnwise copy.
    """
    program = tl.program_id(0)
    if row_scale_ptr is not None and program < row_programs:
        row = Scales(row_scale_ptr, row_wide_ptr, None, row_rows, row_pitch, 1)
        _count_segment(program, row, FREE, ROWS, BLOCKS)
    if column_scale_ptr is not None and program >= row_programs:
        column = Scales(
            column_scale_ptr, column_wide_ptr, starts_ptr, column_rows, column_pitch, num_segments
        )
        _count_segment(program - row_programs, column, FREE, ROWS, BLOCKS)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _spread_scales_kernel(
    row_scale_ptr,
    row_wide_ptr,
    column_scale_ptr,
    column_wide_ptr,
    starts_ptr,
    row_programs,
    row_rows,
    row_pitch,
    column_rows,
    column_pitch,
    num_segments,
    ROW_WHOLE: tl.constexpr,
    COLUMN_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`_spread_segment` for each copy whose spans are longer than a block.

    Grid: as `_count_wide_blocks_kernel`, and so are the arguments.
    """
    program = tl.program_id(0)
    if row_scale_ptr is not None and program < row_programs:
        row = Scales(row_scale_ptr, row_wide_ptr, None, row_rows, row_pitch, 1)
        _spread_segment(program, row, ROW_WHOLE, ROWS, BLOCKS)
    if column_scale_ptr is not None and program >= row_programs:
        column = Scales(
            column_scale_ptr, column_wide_ptr, starts_ptr, column_rows, column_pitch, num_segments
        )
        _spread_segment(program - row_programs, column, COLUMN_WHOLE, ROWS, BLOCKS)
