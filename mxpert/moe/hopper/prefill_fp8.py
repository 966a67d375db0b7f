"""MoE GEMM for many tokens per expert that reads an e4m3 copy of MXFP4 weights.

As in `prefill`, the grid is persistent, a tile is CONSUMERS row units of 64 weight rows × a run of
up to BLOCKS blocks of BLOCK_M activation rows of one expert, and the epilogue is the same. The list
of runs is even (`tile_list`): narrow tiles load the most bytes for each product. Both operands of
wgmma lie in shared memory: nothing is decoded. The copy has the rows and the depth in the order in
which `weight_fragments.decode_weights` gives them, so that products are summed in the same order as
there.

Roles: one consumer warpgroup per row unit, and a producer, with the registers of `prefill`.

Barriers: two mbarriers a stage, and one order barrier a consumer.
    ready: 1 arrival, by the producer with the number of bytes. All consumers wait.
    free: CONSUMERS arrivals, one by each consumer when its wgmma have read the stage. The producer
        waits before it fills the stage again.
    order: as in `prefill`; UNORDERED has no such barrier.

Pipeline: STAGES stages of 128 codes of depth, as many as fit (4 to 6 in the tiles of `config`). A
    stage holds CONSUMERS × 64 × 128 bytes of weights, BLOCKS × BLOCK_M × 128 bytes of activation
    rows and the tag of its tile: 48 KiB with 2 consumers and 4 blocks of 64 rows.

Timeline:
    producer: grid dependency wait → per stage: wait free, publish tile, load rows, load weights →
        some stages before a tile's end: claim the next tile and load its description → ... →
        publish end.
    consumer: grid dependency wait → per tile: load epilogue terms; per two stages: wait ready,
        wgmma, arrive at free, promote; epilogue, start the TMA stores → read the next tile from the
        next stage's tag. The next tile runs while the stores are in flight.

FP8 wgmma sums with fewer bits than float32; sums are promoted every two stages, as in `mainloop`.
Where registers do not hold the partial sums of all columns, the right ones follow the left ones.
The first of the two stages is then released as soon as the right columns have read it.

Consumers that reach their epilogues together leave the tensor cores idle. So each starts its first
tile SKEW stages after the one before. They share the tensor cores evenly, which keeps the distance:
one consumer multiplies during the other's epilogue.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.compat import aggregate, async_load
from ...device.hopper import CLAIM_LEAD, make_tile_tags, publish_tile
from ...device.pdl import wait_and_launch_dependents
from .epilogue import ActivationParameters, Epilogue, Variant
from .mainloop import (
    AFTER_COMPLETION,
    AFTER_ISSUE,
    ONE_GROUP,
    TWO_AT_ONCE,
    TWO_IN_TURN,
    UNIT_CODES,
    ActivationRows,
    left_columns,
    make_activation_rows,
    make_order_barriers,
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
from .weight_fragments import accumulator_layout

_UNIT_ROWS = gl.constexpr(64)
"""Rows of 128 bytes of a row unit and depth unit."""

_CLAIM_STAGES = gl.constexpr(2 * CLAIM_LEAD.value)
"""The producer claims the next tile so many stages before the end of the current one."""


@aggregate
class Fp8Pipeline:
    """Stages in shared memory.

    weights: e4m3 [STAGES * CONSUMERS, 64, 128]. x: BLOCKS * BLOCK_M rows of each stage. ready and
    free: mbarriers [STAGES, 1]. tags: `make_tile_tags`. HI_LO, WEIGHTS: False and None, as
    `load_rows` reads them. UNITS: 1, depth units of a stage.
    """

    weights: gl.shared_memory_descriptor
    x: ActivationRows
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    tags: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCKS: gl.constexpr
    STAGES: gl.constexpr
    HI_LO: gl.constexpr
    WEIGHTS: gl.constexpr
    UNITS: gl.constexpr

    @gluon.jit
    def tables(self):
        """None: weights are not decoded."""


@aggregate
class Fp8Operands:
    """TMA descriptors of both operands.

    row_units: of an expert. low_rows: 0; `load_rows` reads it.
    """

    weight_desc: tma.tensor_descriptor
    x_desc: tma.tensor_descriptor
    row_units: gl.tensor
    low_rows: gl.constexpr


@aggregate
class Sums:
    """Float32 sums of the left and of the right columns of a tile, [64, columns]."""

    left: gl.tensor
    right: gl.tensor


@gluon.constexpr_function
def _column_policy(ROWS, CONSUMERS):
    """As in `mainloop`; without decoded weights, registers hold more partial sums at once."""
    if right_columns(ROWS) == 0:
        return ONE_GROUP
    return TWO_AT_ONCE if ROWS * CONSUMERS <= 384 else TWO_IN_TURN


@gluon.jit
def _make_pipeline(
    weight_desc, x_desc, CONSUMERS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """Allocate the stages and initialise their mbarriers."""
    gl.static_assert(STAGES >= 2, "a consumer holds two stages at once")
    gl.static_assert(weight_desc.block_type.nbytes == _UNIT_ROWS * UNIT_CODES, "a unit's weights")
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    SHAPE: gl.constexpr = [STAGES * CONSUMERS, _UNIT_ROWS, UNIT_CODES]
    weights = gl.allocate_shared_memory(gl.float8e4nv, SHAPE, weight_desc.layout)
    x = make_activation_rows(x_desc, STAGES, BLOCKS * BLOCK_M)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Fp8Pipeline(
        weights=weights,
        x=x,
        ready=ready,
        free=free,
        tags=make_tile_tags(STAGES),
        CONSUMERS=CONSUMERS,
        BLOCK_M=BLOCK_M,
        BLOCKS=BLOCKS,
        STAGES=STAGES,
        HI_LO=False,
        WEIGHTS=None,
        UNITS=1,
    )


@gluon.jit
def _fill_stage(args, state, unit, tile):
    """Wait for a free stage and start the TMA loads of depth unit `unit`; return the next state."""
    pipe = args.pipe
    operands = args.operands
    WEIGHT_BYTES: gl.constexpr = pipe.CONSUMERS * operands.weight_desc.block_type.nbytes
    BLOCK_BYTES: gl.constexpr = operands.x_desc.block_type.nbytes
    mbarrier.wait(pipe.free.index(state.stage), state.phase)
    publish_tile(pipe.tags, state.stage, tile.numbers())
    ready = pipe.ready.index(state.stage)
    for q in gl.static_range(pipe.BLOCKS):
        mbarrier.expect(ready, WEIGHT_BYTES + (q + 1) * BLOCK_BYTES, pred=tile.blocks == q + 1)
    load_rows(pipe, operands, state.stage, ready, tile, unit * UNIT_CODES)
    for c in gl.static_range(pipe.CONSUMERS):
        own = gl.minimum(pipe.CONSUMERS * tile.tile_in_run + c, operands.row_units - 1)
        first = (tile.expert * operands.row_units + own) * args.tiles.depth_units + unit
        weights = pipe.weights.index(state.stage * pipe.CONSUMERS + c)
        async_load(operands.weight_desc, [first * _UNIT_ROWS, 0], ready, weights)
    return state.advance()


@gluon.jit
def _multiply(
    pipe,
    stage,
    sums,
    PARTITION: gl.constexpr,
    FIRST: gl.constexpr,
    COLUMNS: gl.constexpr,
    USE_ACC: gl.constexpr,
):
    """Issue the wgmma of a consumer's weights with columns [FIRST, FIRST + COLUMNS) of a stage."""
    return warpgroup_mma(
        pipe.weights.index(stage * pipe.CONSUMERS + PARTITION),
        pipe.x.view(stage, FIRST, COLUMNS).permute((1, 0)),  # [128, COLUMNS] e4m3
        sums,
        use_acc=USE_ACC,
        is_async=True,
    )


@gluon.jit
def _step(
    pipe,
    ping_pong,
    sums,
    state,
    turn,
    PARTITION: gl.constexpr,
    POLICY: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply one or two stages and promote their sums; return sums, next state and turn."""
    LEFT: gl.constexpr = sums.left.shape[1]
    RIGHT: gl.constexpr = sums.right.shape[1]
    first = state
    last = state
    if STAGES == 2:
        last = state.advance()
    left = sums.left
    right = sums.right
    no_left = gl.zeros((64, LEFT), gl.float32, accumulator_layout(LEFT))
    no_right = gl.zeros((64, RIGHT), gl.float32, accumulator_layout(RIGHT))
    mbarrier.wait(pipe.ready.index(first.stage), first.phase)
    turn = ping_pong.wait(turn)
    left_part = _multiply(pipe, first.stage, no_left, PARTITION, 0, LEFT, False)
    if POLICY == TWO_AT_ONCE:
        right_part = _multiply(pipe, first.stage, no_right, PARTITION, LEFT, RIGHT, False)
    if STAGES == 2:
        mbarrier.wait(pipe.ready.index(last.stage), last.phase)
        left_part = _multiply(pipe, last.stage, left_part, PARTITION, 0, LEFT, True)
        if POLICY == TWO_AT_ONCE:
            right_part = _multiply(pipe, last.stage, right_part, PARTITION, LEFT, RIGHT, True)
    ping_pong.signal(AFTER_ISSUE)
    if POLICY == TWO_IN_TURN:
        left_part = warpgroup_mma_wait(0, deps=(left_part,))
        ping_pong.signal(AFTER_COMPLETION)
        left += left_part
        turn = ping_pong.wait(turn)
        right_part = _multiply(pipe, first.stage, no_right, PARTITION, LEFT, RIGHT, False)
        if STAGES == 2:
            right_part = _multiply(pipe, last.stage, right_part, PARTITION, LEFT, RIGHT, True)
            right_part = warpgroup_mma_wait(1, deps=(right_part,))
            mbarrier.arrive(pipe.free.index(first.stage), count=1)
        ping_pong.signal(AFTER_ISSUE)
        right_part = warpgroup_mma_wait(0, deps=(right_part,))
    elif POLICY == TWO_AT_ONCE:
        left_part, right_part = warpgroup_mma_wait(0, deps=(left_part, right_part))
    else:
        left_part = warpgroup_mma_wait(0, deps=(left_part,))
    ping_pong.signal(AFTER_COMPLETION)
    if STAGES == 2 and POLICY != TWO_IN_TURN:
        mbarrier.arrive(pipe.free.index(first.stage), count=1)
    mbarrier.arrive(pipe.free.index(last.stage), count=1)
    if POLICY != TWO_IN_TURN:
        left += left_part
    if POLICY != ONE_GROUP:
        right += right_part
    return Sums(left, right), last.advance(), turn


@gluon.jit
def _accumulate(args, tables, ping_pong, state, turn, PARTITION: gl.constexpr, ROWS: gl.constexpr):
    """Sum up a row unit of a tile of ROWS rows, as `accumulate_prefill`; there are no tables."""
    pipe = args.pipe
    stages = args.tiles.depth_units
    POLICY: gl.constexpr = _column_policy(ROWS, pipe.CONSUMERS)
    LEFT: gl.constexpr = left_columns(ROWS)
    RIGHT: gl.constexpr = right_columns(ROWS)
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32  # ONE_GROUP does not use the right sums
    sums = Sums(
        gl.zeros((64, LEFT), gl.float32, accumulator_layout(LEFT)),
        gl.zeros((64, WIDTH), gl.float32, accumulator_layout(WIDTH)),
    )
    for _ in range(stages // 2):
        sums, state, turn = _step(pipe, ping_pong, sums, state, turn, PARTITION, POLICY, STAGES=2)
    if stages % 2 == 1:
        sums, state, turn = _step(pipe, ping_pong, sums, state, turn, PARTITION, POLICY, STAGES=1)
    return sums.left, sums.right, state, turn


@gluon.jit(do_not_specialize=["tiles_per_block", "row_units", "depth_units"])
def _moe_gemm_prefill_fp8_kernel(
    out_desc,
    weight_desc,
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
    num_outputs,
    tiles_per_block,
    row_units,
    depth_units,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    STAGING_BUFFERS: gl.constexpr,
    ORDER: gl.constexpr,
    SKEW: gl.constexpr,
    EPILOGUE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out [P, num_outputs] for all tiles; see the contract above.

    weight_desc: e4m3 [E * row_units * depth_units * 64, 128]. ORDER: a ping-pong policy of
    `mainloop`. SKEW: see above. The other arguments are those of `prefill`.
    """
    gl.static_assert(num_warps == CONSUMER_WARPS, "consumer 0 is the default partition")
    gl.static_assert(SKEW * (CONSUMERS - 1) < STAGES, "the producer fills no more than STAGES")
    gl.static_assert(x_desc.block_type.shape[0] == BLOCK_M, "a block's rows")
    pipe = _make_pipeline(weight_desc, x_desc, CONSUMERS, BLOCKS, STAGES)
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
    variant = Variant(EPILOGUE, HAS_BIAS, WEIGHTED, 0)
    epilogue = Epilogue(reference, bias, num_outputs, row_units, x_scale, routed_weights, variant)
    parameters = ActivationParameters(p0, p1, p2)
    operands = Fp8Operands(weight_desc, x_desc, row_units, 0)
    producer = ProducerArgs(pipe, tile_counter, operands, tiles)
    staging = make_staging(out_desc, STAGING_BUFFERS)
    consumer = ConsumerArgs(
        pipe, order, staging, epilogue, out_desc, parameters, tiles, ORDER=ORDER, SKEW=SKEW
    )
    start_roles(consumer, producer, _accumulate, _fill_stage, _CLAIM_STAGES)
