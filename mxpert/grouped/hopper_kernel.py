"""Grouped GEMM on wgmma: MXFP8 operands with few scales per row, or bf16.

A persistent CTA, one per SM, computes tiles of 128 × 256. The reduction axis is contiguous in both
operands, except in a bf16 b of shape [G, K, N].

Roles:
    consumer 0, consumer 1: a warpgroup each (4 warps, 240 registers a thread), rows 0 … 63 and
        64 … 127 of the tile. They run wgmma, scale and store. The epilogue of one overlaps the
        wgmma of the other.
    producer: 1 warp, 24 registers. It starts the TMA loads of both operands.
    Each role finds its tiles itself (`TileScheduler`); nothing but operands passes between them.

Barriers: two mbarriers a stage, whose phases flip when the ring wraps.
    ready: 1 arrival, the producer's expect, and the bytes of both tiles; both consumers wait.
    free: 2 arrivals, one of each consumer; the producer waits. The first wait passes at once.

Pipeline:
    STAGES stages of 128 bytes a row: a [128, depth] and b [256, depth], with depth 128 fp8 or
    64 bf16 values; 48 KiB a stage. The ring runs on from tile to tile. A consumer has one staging
    buffer [64, 128] ([64, 64] for float32) for its stores.

Timeline:
    producer:  for each tile, each stage: wait free → expect ready → load a, load b
    consumer:  for each tile: load scales → for each stage: wait ready → wgmma → release
               → scale → staging → TMA store, which ends during the next tile

`SUMS` says where sums are kept, and how the scales of a are applied (see mainloop.py):

IN_TENSOR_CORE: one scale per row (per row and group in wgrad). The epilogue multiplies the sums by
    the scales of both operands. Also bf16, which has no scales.
PROMOTED: as IN_TENSOR_CORE, but sums are promoted to float32 every 256 values.
SCALED: a has one scale per 128 values; every 128 values the sums are scaled and promoted to
    float32. b has one scale per row.

In wgrad the reduction of a group ends at any multiple of 32, so the last stage of a group may be
partly used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..device.compat import aggregate
from ..device.hopper_pipeline import consumer_start, producer_start
from .hopper_decode_if_wide import is_wide
from .hopper_epilogue import HALF_COLUMNS, Output, Scales, apply_scales
from .hopper_mainloop import SCALED, MainLoop, accumulate, sums_layout
from .hopper_pipeline import CONSUMER_ROWS, CONSUMERS, Pipeline, allocate_pipeline
from .hopper_scheduler import TileScheduler

CONSUMER_WARPS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(1)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class PartitionArgs:
    """What the kernel passes to all of its roles."""

    pipe: Pipeline
    scales: Scales
    scheduler: TileScheduler
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    STAGES: gl.constexpr
    SUMS: gl.constexpr


@gluon.jit
def _produce(args):
    """Producer: load the operands of the CTA's tiles."""
    DEPTH: gl.constexpr = args.a_desc.block_type.shape[1]
    scheduler = args.scheduler
    state = producer_start(args.STAGES)
    cursor = scheduler.start()
    for number in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        cursor, tile = scheduler.locate(number, cursor)
        for k in range(tile.k_start, tile.k_end, DEPTH):
            args.pipe.load(state, tile, k, args.a_desc, args.b_desc)
            state = state.advance()


@gluon.jit
def _compute_tile(args, output, tile, state, CONSUMER: gl.constexpr, HALVES: gl.constexpr):
    """Multiply, scale and store HALVES × 128 columns of a tile; return the next pipeline state."""
    DEPTH: gl.constexpr = args.a_desc.block_type.shape[1]
    HAS_SCALES: gl.constexpr = args.scales.a is not None
    HALF: gl.constexpr = sums_layout(HALF_COLUMNS, DEPTH)
    ROW_SCALED: gl.constexpr = args.SUMS != SCALED  # else the main loop applies the rows' scales
    row = tile.out_row + CONSUMER * CONSUMER_ROWS
    scales = args.scales
    if HAS_SCALES:
        scales = scales.of_tile(tile, args.scheduler.num_n, CONSUMER)
        by_row, by_left, by_right = scales.load(tile.k_end > tile.k_start, HALVES, HALF)
    loop = MainLoop(
        SUMS=args.SUMS, WGRAD=args.scheduler.WGRAD, CONSUMER=CONSUMER, HALVES=HALVES, DEPTH=DEPTH
    )
    left, right, state = accumulate(args.pipe, state, tile.k_end - tile.k_start, scales, loop)
    if HAS_SCALES:
        left = apply_scales(left, by_row, by_left, HALF, ROW_SCALED)
    output.store(left, row, tile.out_row_end, tile.column)
    if HALVES == 2:
        if HAS_SCALES:
            right = apply_scales(right, by_row, by_right, HALF, ROW_SCALED)
        output.store(right, row, tile.out_row_end, tile.column + HALF_COLUMNS)
    return state


@gluon.jit
def _consume(args, output, CONSUMER: gl.constexpr):
    """Consumer: compute 64 rows of each of the CTA's tiles."""
    scheduler = args.scheduler
    state = consumer_start(args.STAGES)
    cursor = scheduler.start()
    for number in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        cursor, tile = scheduler.locate(number, cursor)
        if tile.out_row_end > 0:
            if tile.column + HALF_COLUMNS < scheduler.num_n:
                state = _compute_tile(args, output, tile, state, CONSUMER, HALVES=2)
            else:
                state = _compute_tile(args, output, tile, state, CONSUMER, HALVES=1)
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
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    SUMS: gl.constexpr,
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
    gl.static_assert(BLOCK_M == CONSUMERS * CONSUMER_ROWS)
    gl.static_assert(BLOCK_N == 2 * HALF_COLUMNS)
    gl.static_assert(num_warps == CONSUMER_WARPS)
    pipe = allocate_pipeline(a_desc, b_desc, STAGES)
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
    )
    num_n = num_n // 8 * 8  # tells the compiler that 8 divides it: masked accesses of 16 bytes
    column_tiles = gl.cdiv(num_n, BLOCK_N)
    row_tiles = gl.cdiv(num_outer, BLOCK_M)
    if WGRAD:
        num_tiles = num_groups * row_tiles * column_tiles
    else:  # upper bound: each group, and the rows before and after all, may have a ragged tile
        num_tiles = (num_rows // BLOCK_M + num_groups + 2) * column_tiles
    if (a_wide is not None) | (b_wide is not None):
        num_tiles = gl.where(is_wide(a_wide, b_wide) == IF_WIDE, num_tiles, 0)
    args = PartitionArgs(
        pipe=pipe,
        scales=Scales(a_scale, b_scale, a_pitch, b_pitch),
        scheduler=TileScheduler(
            offsets=offsets,
            num_groups=num_groups,
            num_rows=num_rows,
            column_tiles=column_tiles,
            num_n=num_n,
            num_k=num_k,
            row_tiles=row_tiles,
            num_outer=num_outer,
            num_tiles=num_tiles,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BAND=BAND,
            WGRAD=WGRAD,
        ),
        a_desc=a_desc,
        b_desc=b_desc,
        STAGES=STAGES,
        SUMS=SUMS,
    )
    output0 = Output(out, out_desc, staging.index(0), num_n, ACCUMULATE)
    output1 = Output(out, out_desc, staging.index(1), num_n, ACCUMULATE)
    gl.warp_specialize(
        [(_consume, (args, output0, 0)), (_consume, (args, output1, 1)), (_produce, (args,))],
        [CONSUMER_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
