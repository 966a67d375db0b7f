"""Grouped GEMM on wgmma: MXFP8 operands with few scales per row, or bf16.

A persistent CTA (one per SM) computes 128 × 256 tiles. It has a producer warp (TMA) and two
consumer warpgroups of 64 rows each; the epilogue of one overlaps the wgmma of the other. The
reduction axis is contiguous in both operands, except in a bf16 b of shape [G, K, N]. SPAN says how
the scales of the first operand are applied:

0: one scale per row (per row and group in wgrad). Sums stay in the tensor core accumulator. The
   epilogue multiplies them by the scales of both operands.
128: one scale per 128 values. Every 128 values the sums are scaled and promoted to float32. The
   second operand has one scale per row.
256: as 0, but sums are promoted to float32 every 256 values.

A pipeline stage is 128 bytes deep: 128 fp8 or 64 bf16 values. In wgrad the reduction of a group
ends at any multiple of 32, so the last stage of a group may be partly used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...common.compat import async_load
from ..lib.pipeline import next_slot
from .decode_if_wide import is_wide
from .epilogue import apply_scales, load_scales, store_tile
from .mainloop import accumulate, accumulate_promoted, accumulate_scaled, sums_layout
from .scheduler import rows_tile, weights_tile


@gluon.jit
def _locate(
    tile,
    group,
    first_tile,
    end_tile,
    offsets,
    sizes,
    shape,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
):
    """Tile scheduler: source and target of `tile`.

    Returns the state of the scheduler (group, its first tile and end tile) and a place (row of a,
    row of b, start and end of the reduction, output row, end of the output rows, output column).
    """
    num_n, num_k, row_tiles, num_outer = shape
    if WGRAD:
        group, row_tile, column_tile, start, end = weights_tile(
            tile, offsets, sizes, row_tiles, BAND
        )
        a_row = row_tile * BLOCK_M
        column = column_tile * BLOCK_N
        out_row = group * num_outer + a_row
        place = (a_row, column, start, end, out_row, (group + 1) * num_outer, column)
    else:
        group, first_tile, end_tile, row, row_end, column_tile = rows_tile(
            tile, group, first_tile, end_tile, offsets, sizes, BLOCK_M, BAND
        )
        column = column_tile * BLOCK_N
        depth = gl.where(group < sizes[0], num_k, 0)  # rows without a group are zeros
        depth = gl.where(row_end > 0, depth, 0)
        place = (row, group * num_n + column, 0, depth, row, row_end, column)
    return group, first_tile, end_tile, place


@gluon.jit
def _produce(
    ring,
    a_desc,
    b_desc,
    offsets,
    sizes,
    shape,
    num_tiles,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
):
    a_ring, b_ring, ready, free = ring
    slot = 0
    phase = 1
    group = -1
    first_tile = 0
    end_tile = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first_tile, end_tile, place = _locate(
            tile, group, first_tile, end_tile, offsets, sizes, shape, BLOCK_M, BLOCK_N, BAND, WGRAD
        )
        a_row, b_row, start, end, _, _, column = place
        for k in range(start, end, DEPTH):
            mbarrier.wait(free.index(slot), phase)
            arrived = ready.index(slot)
            mbarrier.expect(arrived, (BLOCK_M + BLOCK_N) * 128)
            async_load(a_desc, [a_row, k], arrived, a_ring.index(slot))
            if b_ring.rank == 3:
                async_load(b_desc, [b_row, k], arrived, b_ring.index(slot))
            else:
                async_load(b_desc, [group, k, column], arrived, b_ring.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _tile_scales(scales, place, num_n, PARTITION: gl.constexpr):
    """Pointers to the scales of this consumer's rows and of the columns, pitches, and counts.

    The count of rows may be negative: all rows then belong to the other consumer. If the reduction
    is empty there may be no scales; the pointers then address the first scale, which is not used.
    """
    a_scale, b_scale, a_pitch, b_pitch = scales
    a_row, b_row, start, end, out_row, row_end, column = place
    first = (a_row + PARTITION * 64).to(gl.int64) * a_pitch + start // 32
    a_bytes = a_scale + gl.where(end > start, first, 0)
    b_bytes = b_scale + gl.where(end > start, b_row.to(gl.int64) * b_pitch + start // 32, 0)
    num_rows = gl.where(end > start, row_end - out_row - PARTITION * 64, 1)
    num_columns = gl.where(end > start, num_n - column, 1)
    return a_bytes, b_bytes, a_pitch, b_pitch, num_rows, num_columns


@gluon.jit
def _accumulate_halves(
    ring,
    slot,
    phase,
    depth,
    scales,
    HALVES: gl.constexpr,
    DEPTH: gl.constexpr,
    PARTITION: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
    SPAN: gl.constexpr,
):
    """Sums of a tile as two halves [64, 128] float32; with HALVES = 1 both are the same."""
    HALF: gl.constexpr = sums_layout(128, DEPTH)
    if SPAN == 128:
        left, right, slot, phase = accumulate_scaled(
            ring, slot, phase, depth, scales, HALVES, PARTITION, STAGES, WGRAD
        )
    elif SPAN == 256:
        left, right, slot, phase = accumulate_promoted(
            ring, slot, phase, depth, HALVES, PARTITION, STAGES, WGRAD
        )
    elif HALVES == 2:
        total, slot, phase = accumulate(
            ring, slot, phase, depth, DEPTH, 256, PARTITION, STAGES, WGRAD
        )
        # Split into two halves; the registers stay the same.
        left, right = total.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
    else:
        left, slot, phase = accumulate(
            ring, slot, phase, depth, DEPTH, 128, PARTITION, STAGES, WGRAD
        )
        right = left
    return left, right, slot, phase


@gluon.jit
def _compute_halves(
    ring,
    slot,
    phase,
    place,
    scales,
    output,
    num_n,
    HALVES: gl.constexpr,
    PARTITION: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
    SPAN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Multiply, scale and store a tile of HALVES × 128 columns; return the next stage and phase."""
    _, _, start, end, out_row, row_end, column = place
    SCALED: gl.constexpr = DEPTH == 128
    HALF: gl.constexpr = sums_layout(128, DEPTH)
    row = out_row + PARTITION * 64
    if SCALED:
        scales = _tile_scales(scales, place, num_n, PARTITION)
        by_row, by_left, by_right = load_scales(scales, end > start, HALVES, HALF)
    left, right, slot, phase = _accumulate_halves(
        ring, slot, phase, end - start, scales, HALVES, DEPTH, PARTITION, STAGES, WGRAD, SPAN
    )
    if SCALED:
        left = apply_scales(left, by_row, by_left, HALF, SPAN != 128)
    store_tile(left, output, row, row_end, column, num_n, ACCUMULATE)
    if HALVES == 2:
        if SCALED:
            right = apply_scales(right, by_row, by_right, HALF, SPAN != 128)
        store_tile(right, output, row, row_end, column + 128, num_n, ACCUMULATE)
    return slot, phase


@gluon.jit
def _consume(
    ring,
    output,
    scales,
    offsets,
    sizes,
    shape,
    num_tiles,
    PARTITION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    SPAN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    slot = 0
    phase = 0
    group = -1
    first_tile = 0
    end_tile = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first_tile, end_tile, place = _locate(
            tile, group, first_tile, end_tile, offsets, sizes, shape, BLOCK_M, BLOCK_N, BAND, WGRAD
        )
        if place[5] > 0:
            if place[6] + 128 < shape[0]:
                slot, phase = _compute_halves(
                    ring,
                    slot,
                    phase,
                    place,
                    scales,
                    output,
                    shape[0],
                    2,
                    PARTITION,
                    DEPTH,
                    STAGES,
                    WGRAD,
                    SPAN,
                    ACCUMULATE,
                )
            else:
                slot, phase = _compute_halves(
                    ring,
                    slot,
                    phase,
                    place,
                    scales,
                    output,
                    shape[0],
                    1,
                    PARTITION,
                    DEPTH,
                    STAGES,
                    WGRAD,
                    SPAN,
                    ACCUMULATE,
                )
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_groups",
        "num_rows",
        "num_n",
        "num_k",
        "num_outer",
        "a_pitch",
        "b_pitch",
    ]
)
def _grouped_gemm_hopper_kernel(
    out,
    out_desc,
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    a_wide,
    b_wide,
    offsets,
    num_groups,
    num_rows,
    num_outer,
    num_n,
    num_k,
    a_pitch,
    b_pitch,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    SPAN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    IF_WIDE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[r] = a[r] b[g].T for rows r of group g, [num_rows, num_n]; zeros in rows without a group.

    WGRAD: out[g] = a_g b_g.T, [num_groups, num_outer, num_n], summed over the group's part of the
    reduction; group offsets are multiples of 32. a_pitch, b_pitch: bytes of scales per row.
    a_wide, b_wide [1]: counts of wide blocks, or None. If there is a count, the kernel computes
    only if one is above 0 (IF_WIDE), or only if none is (without IF_WIDE).
    """
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, DEPTH], a_desc.layout)
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout
    )
    PIECE: gl.constexpr = out_desc.block_type.shape[1]
    staging = gl.allocate_shared_memory(out_desc.dtype, [2, 64, PIECE], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    num_n = num_n // 8 * 8  # tells the compiler that 8 divides it: masked accesses of 16 bytes
    column_tiles = gl.cdiv(num_n, BLOCK_N)
    row_tiles = gl.cdiv(num_outer, BLOCK_M)
    if WGRAD:
        num_tiles = num_groups * row_tiles * column_tiles
    else:  # upper bound: each group, and the rows without one, may have a ragged tile
        num_tiles = (num_rows // BLOCK_M + num_groups + 1) * column_tiles
    if (a_wide is not None) | (b_wide is not None):
        num_tiles = gl.where(is_wide(a_wide, b_wide) == IF_WIDE, num_tiles, 0)
    ring = (a_ring, b_ring, ready, free)
    sizes = (num_groups, num_rows, column_tiles)
    shape = (num_n, num_k, row_tiles, num_outer)
    scales = (a_scale, b_scale, a_pitch, b_pitch)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ring,
                    (out, out_desc, staging.index(0)),
                    scales,
                    offsets,
                    sizes,
                    shape,
                    num_tiles,
                    0,
                    BLOCK_M,
                    BLOCK_N,
                    DEPTH,
                    STAGES,
                    BAND,
                    WGRAD,
                    SPAN,
                    ACCUMULATE,
                ),
            ),
            (
                _consume,
                (
                    ring,
                    (out, out_desc, staging.index(1)),
                    scales,
                    offsets,
                    sizes,
                    shape,
                    num_tiles,
                    1,
                    BLOCK_M,
                    BLOCK_N,
                    DEPTH,
                    STAGES,
                    BAND,
                    WGRAD,
                    SPAN,
                    ACCUMULATE,
                ),
            ),
            (
                _produce,
                (
                    ring,
                    a_desc,
                    b_desc,
                    offsets,
                    sizes,
                    shape,
                    num_tiles,
                    BLOCK_M,
                    BLOCK_N,
                    DEPTH,
                    STAGES,
                    BAND,
                    WGRAD,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
