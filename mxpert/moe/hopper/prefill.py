"""MoE GEMM for many tokens per expert: tensor cores at the power limit.

The grid is persistent, one CTA per SM. A CTA tile is CONSUMERS row units of 64 weight rows × a run
of up to BLOCKS blocks of BLOCK_M activation rows of one expert (with HI_LO: high and low parts);
`tile_list` makes the runs. Its width depends on the number of blocks in the run. Blocks of 32 rows
waste less padding if experts have about a hundred rows. Decoding takes most of the time there. A
third consumer hides more of it; registers suffice for that up to 96 rows.

Roles: one consumer warpgroup per row unit, and a producer. No maxnreg.
    consumers: 4 warps each, 240 registers if there are two, 160 if there are three (168 in consumer
        0, the default partition). Each computes its own row unit, [64, rows].
    producer: 1 warp, 24 registers. It claims tiles and starts all TMA loads. Three idle warps fill
        its warpgroup.

Barriers: two or three mbarriers a stage, and one order barrier a consumer.
    ready: 1 arrival, by the producer with the number of bytes. It completes when the TMA loads have
        written them. All consumers wait.
    free: CONSUMERS arrivals a stage, one by each consumer when its wgmma have read the stage. The
        producer waits before it fills the stage again.
    order: 1 arrival, by the previous consumer of the ring. The consumer waits before its wgmma of a
        stage, so that one consumer multiplies while the others decode and promote (ping-pong).
        Consumer 0 passes first. Policies without an order have no such barrier.

Pipeline: STAGES stages of 256 codes of depth, as many as fit (2 to 5 in the tiles of `config`).
    A stage holds CONSUMERS × (64 × 128 + 16 × 32) bytes of weight codes and shifts, 256 bytes of
    each of BLOCKS × BLOCK_M activation rows (with HI_LO twice as many) and the tag of its tile:
    82,944 bytes with 2 consumers and 4 blocks of 64 rows. With rows of 16 bits it has 128 codes,
    half the bytes of weights and as many of rows; 2 to 7 stages fit.

Timeline:
    producer: grid dependency wait → per step: wait free, publish tile, load rows, load weights →
        two steps before a tile's end: claim the next tile and load its description → ... → publish
        end.
    consumer: grid dependency wait → per tile: load epilogue terms; per stage: wait ready, decode,
        wait order, wgmma, signal the next consumer, arrive at free, promote; epilogue, start the
        TMA stores → read the next tile from the next stage's tag. The next tile runs while the
        stores are in flight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.compat import aggregate, async_load
from ...device.hopper import CLAIM_LEAD, publish_tile
from ...device.pdl import wait_and_launch_dependents
from .epilogue import ActivationParameters, Epilogue, Variant, row_reference
from .group_weights import accumulate_prefill_groups
from .mainloop import (
    accumulate_prefill,
    left_columns,
    make_order_barriers,
    make_prefill_pipeline,
    num_columns,
    ping_pong_policy,
    right_columns,
)
from .prefill_roles import (
    CONSUMER_WARPS,
    ConsumerArgs,
    ProducerArgs,
    TileList,
    load_rows,
    make_staging,
    start_roles,
)
from .rows_of_16_bits import accumulate_16_bits

_UNIT_CODE_ROWS = gl.constexpr(32)
_UNIT_SHIFT_ROWS = gl.constexpr(8)
"""Rows of 128 bytes of codes, and of 32 bytes of shifts, of a row unit and depth unit."""


@aggregate
class Operands:
    """TMA descriptors of the operands. low_rows: row of x where the low parts begin (HI_LO)."""

    code_desc: tma.tensor_descriptor
    shift_desc: tma.tensor_descriptor
    x_desc: tma.tensor_descriptor
    row_units: gl.tensor
    low_rows: gl.tensor


@gluon.jit
def _load_groups(pipe, operands, own, ready, row_unit, step):
    """Start the TMA loads of a step's weights of one row unit, for weights with groups."""
    CODE_ROWS: gl.constexpr = operands.code_desc.block_type.shape[1]
    SCALE_ROWS: gl.constexpr = operands.shift_desc.block_type.shape[1]
    UNITS: gl.constexpr = pipe.UNITS
    for half in gl.static_range(UNITS):
        unit, place = UNITS * step + half, UNITS * own + half
        codes, scales = pipe.codes.index(place), pipe.shifts.index(place)
        async_load(operands.code_desc, [row_unit, unit * CODE_ROWS, 0], ready, codes)
        async_load(operands.shift_desc, [row_unit, unit * SCALE_ROWS, 0], ready, scales)


@gluon.jit
def _fill_stage(args, state, step, tile):
    """Wait for a free stage and start the TMA loads of one step; return the next state."""
    pipe = args.pipe
    operands = args.operands
    unit = pipe.CONSUMERS * tile.tile_in_run
    UNITS: gl.constexpr = pipe.UNITS
    COPIES: gl.constexpr = pipe.CONSUMERS * (1 if pipe.WEIGHTS is None else UNITS)
    WEIGHT_BYTES: gl.constexpr = COPIES * (
        operands.code_desc.block_type.nbytes + operands.shift_desc.block_type.nbytes
    )
    BLOCK_BYTES: gl.constexpr = num_columns(2, pipe.HI_LO) * operands.x_desc.block_type.nbytes
    HALF: gl.constexpr = operands.x_desc.block_type.shape[1]
    ready = pipe.ready.index(state.stage)
    mbarrier.wait(pipe.free.index(state.stage), state.phase)
    publish_tile(pipe.tags, state.stage, tile.numbers())
    for q in gl.static_range(pipe.BLOCKS):
        mbarrier.expect(ready, WEIGHT_BYTES + (q + 1) * BLOCK_BYTES, pred=tile.blocks == q + 1)
    for half in gl.static_range(2):
        load_rows(
            pipe,
            operands,
            half=2 * state.stage + half,
            depth=step * (2 * HALF) + half * HALF,
            ready=ready,
            tile=tile,
        )
    # For an odd number of depth units, the last step also reads the next unit's weights. They are
    # finite and are multiplied by x = 0.
    for c in gl.static_range(pipe.CONSUMERS):
        row_unit = tile.expert * operands.row_units + gl.minimum(unit + c, operands.row_units - 1)
        own = state.stage * pipe.CONSUMERS + c
        if pipe.WEIGHTS is None:
            first = row_unit * args.tiles.depth_units + UNITS * step
            codes, shifts = pipe.codes.index(own), pipe.shifts.index(own)
            async_load(operands.code_desc, [first * _UNIT_CODE_ROWS, 0], ready, codes)
            async_load(operands.shift_desc, [first * _UNIT_SHIFT_ROWS, 0], ready, shifts)
        else:  # past the depth these copies give zeros: scales of the next unit may be NaN
            _load_groups(pipe, operands, own, ready, row_unit, step)
    return state.advance()


@gluon.jit
def _accumulate(args, tables, ping_pong, state, turn, PARTITION: gl.constexpr, ROWS: gl.constexpr):
    """Sum up a row unit of a tile of ROWS rows by the loop of the weights and rows."""
    LEFT: gl.constexpr = left_columns(ROWS)
    RIGHT: gl.constexpr = right_columns(ROWS)
    if args.pipe.UNITS == 1:
        left, right, state = accumulate_16_bits(
            args.pipe,
            tables,
            state,
            steps=args.tiles.depth_units,
            PARTITION=PARTITION,
            LEFT=LEFT,
            RIGHT=RIGHT,
        )
    elif args.pipe.WEIGHTS is None:
        left, right, state, turn = accumulate_prefill(
            args.pipe,
            tables,
            ping_pong,
            state,
            turn,
            steps=gl.cdiv(args.tiles.depth_units, 2),
            PARTITION=PARTITION,
            ROWS=ROWS,
        )
    else:
        left, right, state = accumulate_prefill_groups(
            args.pipe,
            state,
            steps=gl.cdiv(args.tiles.depth_units, args.pipe.UNITS),
            PARTITION=PARTITION,
            LEFT=LEFT,
            RIGHT=RIGHT,
        )
    return left, right, state, turn


@gluon.jit(do_not_specialize=["tiles_per_block", "row_units", "depth_units", "low_rows"])
def _moe_gemm_prefill_kernel(
    out_desc,
    code_desc,
    shift_desc,
    x_desc,
    reference,
    bias,
    x_scale,
    routed_weights,
    tile_first_block,
    tile_blocks,
    tile_expert,
    num_runs,
    tile_counter,
    p0,
    p1,
    p2,
    low_rows,
    num_outputs,
    tiles_per_block,
    row_units,
    depth_units,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    STAGING_BUFFERS: gl.constexpr,
    HI_LO: gl.constexpr,
    EPILOGUE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    num_warps: gl.constexpr,
    WEIGHTS: gl.constexpr = None,
):
    """Compute out [P, num_outputs] for all tiles; see the contract and the structures above.

    num_runs: int32 [1]. tiles_per_block: tiles of a run. STAGING_BUFFERS: TMA stores in flight.
    WEIGHTS: a `GroupWeights`, which has no `reference`; None for MXFP4.
    """
    gl.static_assert(num_warps == CONSUMER_WARPS, "consumer 0 is the default partition")
    gl.static_assert(x_desc.block_type.shape[0] == BLOCK_M, "a block's rows")
    pipe = make_prefill_pipeline(
        code_desc, shift_desc, x_desc, CONSUMERS, BLOCKS, STAGES, HI_LO, WEIGHTS
    )
    ORDER: gl.constexpr = ping_pong_policy(CONSUMERS, BLOCKS * BLOCK_M, WEIGHTS, pipe.UNITS)
    order = make_order_barriers(CONSUMERS, ORDER, unused=pipe.free)
    wait_and_launch_dependents()
    tiles = TileList(
        first_block=tile_first_block,
        blocks=tile_blocks,
        expert=tile_expert,
        num_runs=gl.load(num_runs),
        tiles_per_run=tiles_per_block,
        depth_units=depth_units,
    )
    variant = Variant(EPILOGUE, HAS_BIAS, WEIGHTED, row_reference(WEIGHTS))
    epilogue = Epilogue(reference, bias, num_outputs, row_units, x_scale, routed_weights, variant)
    parameters = ActivationParameters(p0, p1, p2)
    operands = Operands(code_desc, shift_desc, x_desc, row_units, low_rows)
    producer = ProducerArgs(pipe, tile_counter, operands, tiles)
    staging = make_staging(out_desc, STAGING_BUFFERS)
    consumer = ConsumerArgs(
        pipe, order, staging, epilogue, out_desc, parameters, tiles, ORDER=ORDER, SKEW=0
    )
    start_roles(consumer, producer, _accumulate, _fill_stage, CLAIM_LEAD)
