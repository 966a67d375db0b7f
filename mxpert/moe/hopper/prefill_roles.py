"""Roles of the prefill kernels: the producer's loop, a consumer's loop, and how they start.

`prefill` and `prefill_fp8` differ in what a stage holds. Each gives these loops two functions: FILL
loads one stage, ACCUMULATE multiplies the stages of a tile. Roles, barriers and the timeline are in
the docstrings of both kernels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import base_value

from ...device.compat import aggregate, async_load
from ...device.hopper import claim_tile, consumer_start, producer_start, publish_end, read_tile
from .epilogue import (
    ActivationParameters,
    Epilogue,
    finish,
    load_output_terms,
    load_row_terms,
    output_layout,
    outputs_per_unit,
    row_per_thread_layout,
    store_subtiles,
)
from .mainloop import PingPong, first_column, joins_hi_lo, left_columns, right_columns

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


@gluon.jit
def make_staging(out_desc, STAGING_BUFFERS: gl.constexpr):
    """Allocate a consumer's output buffers."""
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = out_desc.block_type.shape[1]
    STAGING_SHAPE: gl.constexpr = [STAGING_BUFFERS, ROWS, OUTPUTS]
    return gl.allocate_shared_memory(out_desc.dtype, STAGING_SHAPE, out_desc.layout)


@aggregate
class ConsumerArgs:
    """Arguments of a consumer.

    pipe: the kernel's stages; `tables()` gives what decodes their weights. order: order barriers of
    all consumers. staging: its output buffers [buffers, rows, outputs]. ORDER: ping-pong policy.
    SKEW: stages that a consumer's first tile starts after that of the one before.
    """

    pipe: base_value
    order: gl.shared_memory_descriptor
    staging: gl.shared_memory_descriptor
    epilogue: Epilogue
    out_desc: tma.tensor_descriptor
    parameters: ActivationParameters
    tiles: TileList
    ORDER: gl.constexpr
    SKEW: gl.constexpr

    @gluon.jit
    def of_another(self):
        """Arguments of another consumer: output buffers of its own."""
        return ConsumerArgs(
            self.pipe,
            self.order,
            make_staging(self.out_desc, self.staging.shape[0]),
            self.epilogue,
            self.out_desc,
            self.parameters,
            self.tiles,
            ORDER=self.ORDER,
            SKEW=self.SKEW,
        )


@aggregate
class ProducerArgs:
    """Arguments of the producer.

    pipe: the kernel's stages; a step fills UNITS depth units. operands: its TMA descriptors.
    """

    pipe: base_value
    tile_counter: gl.tensor
    operands: base_value
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
def _produce(args, FILL: gl.constexpr, CLAIM_LEAD: gl.constexpr):
    """The producer warp: claim tiles and load their operands.

    FILL(args, state, step, tile): wait for a stage, fill it with one step of a tile, return the
    next state. CLAIM_LEAD: steps before a tile's end at which the next tile is claimed.
    """
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
            state = FILL(args, state, step, tile)
        number = claim_tile(number, args.tile_counter, tiles.num_runs * tiles.tiles_per_run)
        following = locate_tile(number, tiles)
        for step in range(claim_at, steps):
            state = FILL(args, state, step, tile)
    publish_end(pipe.tags, state, following.numbers(), pipe.ready, pipe.free)


@gluon.jit
def _load_outputs(epilogue, expert, unit, COLUMNS: gl.constexpr):
    """Load the terms of one row unit's outputs for a group of COLUMNS rows."""
    return load_output_terms(
        epilogue,
        expert,
        first_output=unit * outputs_per_unit(epilogue.variant.EPILOGUE),
        LAYOUT=output_layout(COLUMNS, epilogue.variant.EPILOGUE),
    )


@gluon.jit
def _store_tile(args, sums, outputs, rows, first_row, unit, SUBTILE: gl.constexpr):
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
    ACCUMULATE: gl.constexpr,
    PARTITION: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Compute and store one row unit of a tile of ROWS rows; return the next state and turn."""
    epilogue = args.epilogue
    LEFT: gl.constexpr = left_columns(ROWS)
    RIGHT: gl.constexpr = right_columns(ROWS)
    ROW_LAYOUT: gl.constexpr = row_per_thread_layout()
    # Issue these loads before the main loop, which hides their latency.
    outputs = _load_outputs(epilogue, tile.expert, unit, LEFT)
    rows = load_row_terms(epilogue, first_row, LEFT, ROW_LAYOUT)
    if RIGHT > 0:
        right_rows = load_row_terms(epilogue, first_row + LEFT, RIGHT, ROW_LAYOUT)
    left, right, state, turn = ACCUMULATE(
        args, tables, ping_pong, state, turn, PARTITION=PARTITION, ROWS=ROWS
    )
    _store_tile(args, left, outputs, rows, first_row, unit, SUBTILE=0)
    if RIGHT > 0:
        outputs = _load_outputs(epilogue, tile.expert, unit, RIGHT)
        SUBTILE: gl.constexpr = LEFT // args.staging.shape[1]
        _store_tile(args, right, outputs, right_rows, first_row + LEFT, unit, SUBTILE)
    return state, turn


@gluon.jit
def _consume(args, ACCUMULATE: gl.constexpr, PARTITION: gl.constexpr):
    """A consumer warpgroup: compute row unit PARTITION of each tile.

    ACCUMULATE(args, tables, ping_pong, state, turn, PARTITION, ROWS): sum up a row unit of a tile
    of ROWS rows; return the left and the right sums, the next state and turn.
    """
    pipe = args.pipe
    ping_pong = PingPong(
        mine=args.order.index(PARTITION),
        next=args.order.index((PARTITION + 1) % pipe.CONSUMERS),
        POLICY=args.ORDER,
    )
    tables = pipe.tables()
    state = consumer_start(pipe.STAGES)
    turn = 1 if PARTITION == 0 else 0  # consumer 0 passes its order barrier first
    tile = locate_tile(gl.program_id(0), args.tiles)
    LAG: gl.constexpr = PARTITION * args.SKEW
    # Without a first tile, or with a short one, that stage may never be filled.
    if LAG > 0 and (tile.blocks > 0) & (args.tiles.depth_units > LAG):
        mbarrier.wait(pipe.ready.index(LAG), 0)
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
                    ACCUMULATE=ACCUMULATE,
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
def start_roles(
    consumer_0, producer, ACCUMULATE: gl.constexpr, FILL: gl.constexpr, CLAIM_LEAD: gl.constexpr
):
    """Start all consumers and the producer; `_consume` and `_produce` say what they call."""
    CONSUMERS: gl.constexpr = consumer_0.pipe.CONSUMERS
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3, "registers suffice for two or three")
    consumer_1 = consumer_0.of_another()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (consumer_0, ACCUMULATE, 0)),
                (_consume, (consumer_1, ACCUMULATE, 1)),
                (_produce, (producer, FILL, CLAIM_LEAD)),
            ],
            [CONSUMER_WARPS, PRODUCER_WARPS],
            [REGISTERS_OF_TWO, PRODUCER_REGISTERS],
        )
    else:
        consumer_2 = consumer_0.of_another()
        gl.warp_specialize(
            [
                (_consume, (consumer_0, ACCUMULATE, 0)),
                (_consume, (consumer_1, ACCUMULATE, 1)),
                (_consume, (consumer_2, ACCUMULATE, 2)),
                (_produce, (producer, FILL, CLAIM_LEAD)),
            ],
            [CONSUMER_WARPS, CONSUMER_WARPS, PRODUCER_WARPS],
            [REGISTERS_OF_THREE, REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )
