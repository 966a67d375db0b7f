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
from ...device.hopper import (
    CLAIM_LEAD,
    claim_tile,
    consumer_start,
    producer_start,
    publish_end,
    publish_tile,
    read_tile,
)
from ...device.hopper_ptx import decode_tables
from ...device.pdl import wait_and_launch_dependents
from .epilogue import (
    ActivationParameters,
    Epilogue,
    Variant,
    finish,
    load_output_terms,
    load_row_terms,
    output_layout,
    outputs_per_unit,
    row_per_thread_layout,
    row_reference,
    store_subtiles,
)
from .group_weights import accumulate_prefill_groups
from .mainloop import (
    PingPong,
    PrefillPipeline,
    accumulate_prefill,
    first_column,
    joins_hi_lo,
    left_columns,
    make_order_barriers,
    make_prefill_pipeline,
    num_columns,
    ping_pong_policy,
    right_columns,
)
from .rows_of_16_bits import accumulate_16_bits

_UNIT_CODE_ROWS = gl.constexpr(32)
_UNIT_SHIFT_ROWS = gl.constexpr(8)
"""Rows of 128 bytes of codes, and of 32 bytes of shifts, of a row unit and depth unit."""

CONSUMER_WARPS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(1)
PRODUCER_REGISTERS = gl.constexpr(24)
REGISTERS_OF_TWO = gl.constexpr(240)
REGISTERS_OF_THREE = gl.constexpr(160)


@aggregate
class TileList:
    """Runs of blocks from `tile_list`; each run has tiles_per_run tiles of CONSUMERS row units.

    first_block, blocks, expert: int32 [num_runs]. depth_units: units of 128 codes.
    """

    first_block: gl.tensor
    blocks: gl.tensor
    expert: gl.tensor
    num_runs: gl.tensor
    tiles_per_run: gl.tensor
    depth_units: gl.tensor


@aggregate
class TileInfo:
    """A tile: the run's first block, its number of blocks and expert, and the tile in the run.

    No tile is left if it has 0 blocks.
    """

    first_block: gl.tensor
    blocks: gl.tensor
    expert: gl.tensor
    tile_in_run: gl.tensor

    @gluon.jit
    def numbers(self):
        """The four numbers of a stage's tag."""
        return self.first_block, self.blocks, self.expert, self.tile_in_run


@aggregate
class Operands:
    """TMA descriptors of the operands. low_rows: row of x where the low parts begin (HI_LO)."""

    code_desc: tma.tensor_descriptor
    shift_desc: tma.tensor_descriptor
    x_desc: tma.tensor_descriptor
    row_units: gl.tensor
    low_rows: gl.tensor


@aggregate
class ConsumerArgs:
    """Arguments of a consumer.

    order: order barriers of all consumers. staging: its output buffers [buffers, rows, outputs].
    ORDER: ping-pong policy.
    """

    pipe: PrefillPipeline
    order: gl.shared_memory_descriptor
    staging: gl.shared_memory_descriptor
    epilogue: Epilogue
    out_desc: tma.tensor_descriptor
    parameters: ActivationParameters
    tiles: TileList
    ORDER: gl.constexpr


@aggregate
class ProducerArgs:
    """Arguments of the producer."""

    pipe: PrefillPipeline
    tile_counter: gl.tensor
    operands: Operands
    tiles: TileList


@gluon.jit
def locate_tile(tile, tiles):
    """Load the TileInfo of a tile index."""
    run = tile // tiles.tiles_per_run
    used = run < tiles.num_runs
    return TileInfo(
        first_block=gl.load(tiles.first_block + run, mask=used, other=0),
        blocks=gl.load(tiles.blocks + run, mask=used, other=0),
        expert=gl.load(tiles.expert + run, mask=used, other=0),
        tile_in_run=tile % tiles.tiles_per_run,
    )


@gluon.jit
def load_rows(pipe, operands, half, ready, tile, depth):
    """Start the TMA loads of 128 bytes of a tile's activation rows into half a stage."""
    BLOCK_M: gl.constexpr = pipe.BLOCK_M
    BLOCKS: gl.constexpr = pipe.BLOCKS
    JOINED: gl.constexpr = joins_hi_lo(pipe.HI_LO, pipe.WEIGHTS)
    for q in gl.static_range(BLOCKS):
        row = tile.first_block * BLOCK_M + q * BLOCK_M
        used = tile.blocks > q
        rows = pipe.x.view(half, first_column(q, 0, BLOCKS, BLOCK_M, JOINED), BLOCK_M)
        async_load(operands.x_desc, [row, depth], ready, rows, pred=used)
        if pipe.HI_LO:
            rows = pipe.x.view(half, first_column(q, 1, BLOCKS, BLOCK_M, JOINED), BLOCK_M)
            async_load(operands.x_desc, [operands.low_rows + row, depth], ready, rows, pred=used)


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
def _produce(args):
    """The producer warp: claim tiles and load their operands; see the timeline above."""
    pipe = args.pipe
    tiles = args.tiles
    steps = gl.cdiv(tiles.depth_units, pipe.UNITS)
    claim_at = gl.maximum(steps - CLAIM_LEAD, 1)
    state = producer_start(pipe.STAGES)
    number = gl.program_id(0)
    following = locate_tile(number, tiles)
    while following.blocks > 0:
        tile = following
        for step in range(claim_at):
            state = _fill_stage(args, state, step, tile)
        number = claim_tile(number, args.tile_counter, tiles.num_runs * tiles.tiles_per_run)
        following = locate_tile(number, tiles)
        for step in range(claim_at, steps):
            state = _fill_stage(args, state, step, tile)
    publish_end(pipe.tags, state, following.numbers(), pipe.ready, pipe.free)


@gluon.jit
def load_outputs(epilogue, expert, unit, COLUMNS: gl.constexpr):
    """Load the terms of one row unit's outputs for a group of COLUMNS rows."""
    return load_output_terms(
        epilogue,
        expert,
        first_output=unit * outputs_per_unit(epilogue.variant.EPILOGUE),
        LAYOUT=output_layout(COLUMNS, epilogue.variant.EPILOGUE),
    )


@gluon.jit
def store_tile(args, sums, outputs, rows, first_row, unit, SUBTILE: gl.constexpr):
    """Run the epilogue for sums [64, rows] of one row unit; store rows from `first_row` on."""
    EPILOGUE: gl.constexpr = args.epilogue.variant.EPILOGUE
    LAYOUT: gl.constexpr = output_layout(sums.shape[1], EPILOGUE)
    value = finish(sums, outputs, rows.to_columns(LAYOUT), args.parameters, args.epilogue, LAYOUT)
    first_output = unit * outputs_per_unit(EPILOGUE)
    store_subtiles(value, args.out_desc, args.staging, first_row, first_output, SUBTILE)


@gluon.jit
def _compute_tile(
    args,
    tables,
    ping_pong,
    state,
    turn,
    tile,
    first_row,
    unit,
    PARTITION: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Compute and store one row unit of a tile of ROWS rows; return the next state and turn."""
    epilogue = args.epilogue
    LEFT: gl.constexpr = left_columns(ROWS)
    RIGHT: gl.constexpr = right_columns(ROWS)
    ROW_LAYOUT: gl.constexpr = row_per_thread_layout()
    # Issue these loads before the main loop, which hides their latency.
    outputs = load_outputs(epilogue, tile.expert, unit, LEFT)
    rows = load_row_terms(epilogue, first_row, LEFT, ROW_LAYOUT)
    if RIGHT > 0:
        right_rows = load_row_terms(epilogue, first_row + LEFT, RIGHT, ROW_LAYOUT)
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
    store_tile(args, left, outputs, rows, first_row, unit, SUBTILE=0)
    if RIGHT > 0:
        outputs = load_outputs(epilogue, tile.expert, unit, RIGHT)
        SUBTILE: gl.constexpr = LEFT // args.staging.shape[1]
        store_tile(args, right, outputs, right_rows, first_row + LEFT, unit, SUBTILE)
    return state, turn


@gluon.jit
def _consume(args, PARTITION: gl.constexpr):
    """A consumer warpgroup: compute row unit PARTITION of each tile; see the timeline above."""
    pipe = args.pipe
    ping_pong = PingPong(
        mine=args.order.index(PARTITION),
        next=args.order.index((PARTITION + 1) % pipe.CONSUMERS),
        POLICY=args.ORDER,
    )
    tables = decode_tables(FLOAT16=pipe.UNITS == 1)
    state = consumer_start(pipe.STAGES)
    turn = 1 if PARTITION == 0 else 0  # consumer 0 passes its order barrier first
    tile = locate_tile(gl.program_id(0), args.tiles)
    while tile.blocks > 0:
        unit = pipe.CONSUMERS * tile.tile_in_run + PARTITION
        for q in gl.static_range(1, pipe.BLOCKS + 1):
            if tile.blocks == q:
                state, turn = _compute_tile(
                    args,
                    tables,
                    ping_pong,
                    state,
                    turn,
                    tile,
                    first_row=tile.first_block * pipe.BLOCK_M,
                    unit=unit,
                    PARTITION=PARTITION,
                    ROWS=q * pipe.BLOCK_M,
                )
        ready = pipe.ready.index(state.stage)
        first_block, blocks, expert, tile_in_run = read_tile(
            pipe.tags, state.stage, ready, state.phase
        )
        tile = TileInfo(
            first_block=first_block, blocks=blocks, expert=expert, tile_in_run=tile_in_run
        )
    tma.store_wait(0)


@gluon.jit
def make_staging(out_desc, STAGING_BUFFERS: gl.constexpr):
    """Allocate a consumer's output buffers."""
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = out_desc.block_type.shape[1]
    STAGING_SHAPE: gl.constexpr = [STAGING_BUFFERS, ROWS, OUTPUTS]
    return gl.allocate_shared_memory(out_desc.dtype, STAGING_SHAPE, out_desc.layout)


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
    staging_0 = make_staging(out_desc, STAGING_BUFFERS)
    staging_1 = make_staging(out_desc, STAGING_BUFFERS)
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
    consumer_0 = ConsumerArgs(pipe, order, staging_0, epilogue, out_desc, parameters, tiles, ORDER)
    consumer_1 = ConsumerArgs(pipe, order, staging_1, epilogue, out_desc, parameters, tiles, ORDER)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (consumer_0, 0)), (_consume, (consumer_1, 1)), (_produce, (producer,))],
            [CONSUMER_WARPS, PRODUCER_WARPS],
            [REGISTERS_OF_TWO, PRODUCER_REGISTERS],
        )
    else:
        last = make_staging(out_desc, STAGING_BUFFERS)
        consumer_2 = ConsumerArgs(pipe, order, last, epilogue, out_desc, parameters, tiles, ORDER)
        gl.warp_specialize(
            [
                (_consume, (consumer_0, 0)),
                (_consume, (consumer_1, 1)),
                (_consume, (consumer_2, 2)),
                (_produce, (producer,)),
            ],
            [CONSUMER_WARPS, CONSUMER_WARPS, PRODUCER_WARPS],
            [REGISTERS_OF_THREE, REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )
