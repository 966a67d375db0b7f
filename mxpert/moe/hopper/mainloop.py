"""Pipelines and main loops of the decode and the prefill GEMM.

A stage holds 256 codes of depth of the weights, and the same depth of the activation rows. A main
loop takes stages until a tile's sums are complete: it decodes weights to registers, multiplies them
by the rows with FP8 wgmma, and adds the sums of the stage to float32 sums. FP8 wgmma sums with
fewer bits than float32; the additions limit this error to the depth of a stage.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.compat import COPIES_REGISTER_OPERANDS, aggregate
from ...device.hopper import make_tile_tags
from ...device.hopper_ptx import LO_SCALE, decode_tables
from .weight_fragments import accumulator_layout, decode_weights, join_hi_lo

STAGE_CODES = gl.constexpr(256)
"""Codes of depth in a stage: two depth units of the weight layout."""

UNIT_CODES = gl.constexpr(128)
"""Codes of a depth unit, half a stage."""


@aggregate
class DecodePipeline:
    """Stages of the decode kernel, in shared memory.

    codes: uint8 [2 * STAGES, 1, 64, 128], two codes a byte, one matrix for each consumer. shifts:
    uint8 [2 * STAGES, 1, 16, 32]. x: e4m3 [STAGES, columns, 256]; with HI_LO the rows' high parts,
    then their low parts. ready, free: mbarriers [STAGES, 1]. tags: `make_tile_tags`. WEIGHTS: a
    `GroupWeights`, whose codes may have 128 rows, and whose scales [groups, 64] are the shifts;
    None for folded MXFP4.
    """

    codes: gl.shared_memory_descriptor
    shifts: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    tags: gl.shared_memory_descriptor
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr
    HI_LO: gl.constexpr
    WEIGHTS: gl.constexpr


@gluon.constexpr_function
def num_columns(ROWS, HI_LO):
    """Columns of wgmma for ROWS rows: with HI_LO their high parts, then their low parts."""
    return ROWS * 2 if HI_LO else ROWS


@gluon.constexpr_function
def _ring_shape(desc, COPIES):
    """Shape of a ring buffer that holds COPIES blocks of a descriptor."""
    return [COPIES, *desc.block_type.shape]


@gluon.constexpr_function
def _stage_rows(WEIGHTS):
    """Rows of 128 bytes of codes, and elements of scales, of a row unit in a stage."""
    return (64, 16 * 32) if WEIGHTS is None else (2 * WEIGHTS.code_rows, 2 * WEIGHTS.groups * 64)


@gluon.constexpr_function
def _hold_stage(code_desc, shift_desc, WEIGHTS, BLOCKS):
    """Whether BLOCKS blocks of both descriptors are what a row unit has in a stage."""
    rows, scales = _stage_rows(WEIGHTS)
    held = math.prod(code_desc.block_type.shape), math.prod(shift_desc.block_type.shape)
    return (BLOCKS * held[0], BLOCKS * held[1]) == (rows * 128, scales)


@gluon.jit
def make_decode_pipeline(
    code_desc,
    shift_desc,
    x_desc,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    HI_LO: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Allocate the stages and initialise their mbarriers."""
    COLUMNS: gl.constexpr = num_columns(BLOCK_M, HI_LO)
    gl.static_assert(_hold_stage(code_desc, shift_desc, WEIGHTS, 1), "a row unit's weights")
    CODES: gl.constexpr = _ring_shape(code_desc, 2 * STAGES)
    SHIFTS: gl.constexpr = _ring_shape(shift_desc, 2 * STAGES)
    codes = gl.allocate_shared_memory(gl.uint8, CODES, code_desc.layout)
    shifts = gl.allocate_shared_memory(shift_desc.dtype, SHIFTS, shift_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, STAGE_CODES], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return DecodePipeline(
        codes=codes,
        shifts=shifts,
        x=x,
        ready=ready,
        free=free,
        tags=make_tile_tags(STAGES),
        BLOCK_M=BLOCK_M,
        STAGES=STAGES,
        HI_LO=HI_LO,
        WEIGHTS=WEIGHTS,
    )


@gluon.jit
def accumulate_decode(pipe, tables, state, steps, PARTITION: gl.constexpr, COLUMNS: gl.constexpr):
    """Sum up a row unit over `steps` stages: float32 [64, COLUMNS], and the next state."""
    ACCUMULATOR: gl.constexpr = accumulator_layout(COLUMNS)
    accumulator = gl.zeros((64, COLUMNS), gl.float32, ACCUMULATOR)
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        own = 2 * state.stage + PARTITION
        weights = decode_weights(  # [64, 256] e4m3
            pipe.codes.index(own).reshape([64, 128]),
            pipe.shifts.index(own).reshape([16, 32]),
            tables,
            ACCUMULATOR,
            STEPS=2,
        )
        partial = warpgroup_mma(
            weights,
            pipe.x.index(state.stage).slice(0, COLUMNS, 0).permute((1, 0)),  # [256, COLUMNS] e4m3
            gl.zeros((64, COLUMNS), gl.float32, ACCUMULATOR),
            use_acc=False,
            is_async=True,
        )
        partial = warpgroup_mma_wait(0, deps=(partial,))
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        accumulator += partial
        state = state.advance()
    return accumulator, state


ONE_GROUP = gl.constexpr("one group")
TWO_AT_ONCE = gl.constexpr("two groups at once")
TWO_IN_TURN = gl.constexpr("two groups in turn")
HI_THEN_LO = gl.constexpr("high parts, then low parts")
"""Column policies of the prefill main loop: how it multiplies a tile's columns in a stage.

ONE_GROUP: all columns in one wgmma. TWO_AT_ONCE: left and right columns in one run of wgmma; both
partial sums fit in registers. TWO_IN_TURN: the right columns after the left ones' sums are added,
since the registers hold only one group's partial sums. HI_THEN_LO: the right columns are the rows'
low parts; they are summed in the tensor core over all stages, since they count 1/16. With high and
low parts ONE_GROUP is 1 to 3 % slower, but reads the weights once (`COPIES_REGISTER_OPERANDS`).
"""


@gluon.constexpr_function
def joins_hi_lo(HI_LO, WEIGHTS):
    """Whether a prefill tile multiplies high and low parts of all rows in one wgmma."""
    return HI_LO and (WEIGHTS is not None or COPIES_REGISTER_OPERANDS.value)


@gluon.constexpr_function
def first_column(BLOCK, PART, BLOCKS, BLOCK_M, JOINED):
    """Column of the first row of a block of a tile, of its high (PART 0) or low parts (PART 1).

    JOINED: each block has both parts side by side, so that a tile's columns are without a gap where
    it has fewer than BLOCKS blocks.
    """
    return ((2 * BLOCK + PART) if JOINED else (PART * BLOCKS + BLOCK)) * BLOCK_M


UNORDERED = gl.constexpr("unordered")
AFTER_ISSUE = gl.constexpr("after issue")
AFTER_COMPLETION = gl.constexpr("after completion")
"""Ping-pong policies: when a consumer lets the next one start its wgmma of a stage. UNORDERED: no
order barriers. AFTER_ISSUE: when it has issued its last wgmma of the stage. AFTER_COMPLETION: when
these have completed."""


@gluon.constexpr_function
def ping_pong_policy(CONSUMERS, CAPACITY, WEIGHTS, UNITS):
    """Choose the ping-pong policy; UNITS: depth units of a stage.

    FP8 tiles of more than 128 columns would pass the order barrier twice per step, which made them
    4 to 8 % slower on an H200. Weights with groups would pass it for each group. With rows of 16
    bits an order made no difference.
    """
    if WEIGHTS is not None or UNITS == 1:
        return UNORDERED
    if CONSUMERS > 2:
        return AFTER_ISSUE
    return AFTER_COMPLETION if CAPACITY <= 128 else UNORDERED


@gluon.constexpr_function
def _largest_power(number):
    """Largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


@gluon.constexpr_function
def left_columns(ROWS):
    """Columns of the left group of a tile of ROWS rows: a power of two, as sizes of tensors are."""
    return min(128, _largest_power(ROWS))


@gluon.constexpr_function
def right_columns(ROWS):
    """Columns of the right group; 0 if there is none."""
    return ROWS - left_columns(ROWS)


@gluon.constexpr_function
def _column_policy(ROWS, HI_LO):
    if HI_LO:
        return ONE_GROUP if joins_hi_lo(HI_LO, None) else HI_THEN_LO
    if right_columns(ROWS) == 0:
        return ONE_GROUP
    return TWO_AT_ONCE if ROWS < 128 else TWO_IN_TURN


@aggregate
class ActivationRows:
    """Rows of each depth unit of the ring, e4m3 [units, rows, 128]; of half a unit if of 16 bits.

    Sizes of tensors are powers of two, so other numbers of rows take two tensors. Otherwise `rest`
    is `first` and is not used.
    """

    first: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor

    @gluon.jit
    def view(self, half, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Rows [FIRST, FIRST + COUNT) of a depth unit, [COUNT, 128]."""
        FITTING: gl.constexpr = self.first.shape[1]
        if FIRST < FITTING:
            return self.first.index(half).slice(FIRST, COUNT, 0)
        else:
            return self.rest.index(half).slice(FIRST - FITTING, COUNT, 0)


@aggregate
class PrefillPipeline:
    """Stages of the prefill kernel, in shared memory.

    codes: uint8 [STAGES * CONSUMERS, 32 * UNITS, 128], two codes a byte. shifts: uint8
    [STAGES * CONSUMERS, 8 * UNITS, 32]. x: CAPACITY rows of each half stage; with HI_LO their high
    and their low parts, as `first_column` says. ready, free: mbarriers [STAGES, 1]. WEIGHTS: as in
    DecodePipeline; with one, codes and shifts have a matrix for each depth unit of a stage. UNITS:
    depth units of a stage, two, or one with rows of 16 bits.
    """

    codes: gl.shared_memory_descriptor
    shifts: gl.shared_memory_descriptor
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
        """What decodes the weights, in registers."""
        return decode_tables(FLOAT16=self.UNITS == 1)


@gluon.jit
def make_activation_rows(x_desc, UNITS: gl.constexpr, ROWS: gl.constexpr):
    """Allocate ROWS activation rows for each of UNITS depth units."""
    FIRST: gl.constexpr = _largest_power(ROWS)
    WIDTH: gl.constexpr = x_desc.block_type.shape[1]
    SHAPE: gl.constexpr = [UNITS, FIRST, WIDTH]
    first = gl.allocate_shared_memory(x_desc.dtype, SHAPE, x_desc.layout)
    rest = first
    if ROWS > FIRST:
        REST: gl.constexpr = [UNITS, ROWS - FIRST, WIDTH]
        rest = gl.allocate_shared_memory(x_desc.dtype, REST, x_desc.layout)
    return ActivationRows(first=first, rest=rest)


@gluon.jit
def make_prefill_pipeline(
    code_desc,
    shift_desc,
    x_desc,
    CONSUMERS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    HI_LO: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Allocate the stages and initialise their mbarriers."""
    UNITS: gl.constexpr = 1 if x_desc.dtype.primitive_bitwidth == 16 else 2
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCKS_PER_UNIT: gl.constexpr = 1 if WEIGHTS is None else UNITS
    COPIES: gl.constexpr = STAGES * CONSUMERS * BLOCKS_PER_UNIT
    HELD: gl.constexpr = _hold_stage(code_desc, shift_desc, WEIGHTS, 2 * BLOCKS_PER_UNIT // UNITS)
    gl.static_assert(HELD, "a row unit's weights")
    CODES: gl.constexpr = _ring_shape(code_desc, COPIES)
    SHIFTS: gl.constexpr = _ring_shape(shift_desc, COPIES)
    codes = gl.allocate_shared_memory(gl.uint8, CODES, code_desc.layout)
    shifts = gl.allocate_shared_memory(shift_desc.dtype, SHIFTS, shift_desc.layout)
    x = make_activation_rows(x_desc, 2 * STAGES, num_columns(BLOCKS * BLOCK_M, HI_LO))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return PrefillPipeline(
        codes=codes,
        shifts=shifts,
        x=x,
        ready=ready,
        free=free,
        tags=make_tile_tags(STAGES),
        CONSUMERS=CONSUMERS,
        BLOCK_M=BLOCK_M,
        BLOCKS=BLOCKS,
        STAGES=STAGES,
        HI_LO=HI_LO,
        WEIGHTS=WEIGHTS,
        UNITS=UNITS,
    )


@aggregate
class PingPong:
    """Order barriers of a consumer: it waits at `mine` and arrives at `next`.

    Without an order, all consumers would decode weights at the same time and then multiply at the
    same time, since they wait for the same stages.
    """

    mine: gl.shared_memory_descriptor
    next: gl.shared_memory_descriptor
    POLICY: gl.constexpr

    @gluon.jit
    def wait(self, phase):
        """Wait until this consumer may start its wgmma; return the phase of the next wait."""
        if self.POLICY != UNORDERED:
            mbarrier.wait(self.mine, phase)
            phase ^= 1
        return phase

    @gluon.jit
    def signal(self, MOMENT: gl.constexpr):
        """Let the next consumer start, if the policy has it at this moment."""
        if self.POLICY == MOMENT:
            mbarrier.arrive(self.next, count=1)


@gluon.jit
def make_order_barriers(CONSUMERS: gl.constexpr, POLICY: gl.constexpr, unused):
    """Make the ping-pong order barriers, one for each consumer; UNORDERED returns `unused`.

    They are allocated only if used. The compiler reuses shared memory of buffers without later
    uses, and an initialised mbarrier must not share memory with other data: results changed when
    several processes shared a GPU.
    """
    barriers = unused
    if POLICY != UNORDERED:
        barriers = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.init(barriers.index(consumer), count=1)
    return barriers


@gluon.jit
def _decode_half(pipe, own, tables, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Decode half a stage of a consumer's weights: e4m3 [64, 128]."""
    return decode_weights(
        pipe.codes.index(own).slice(32 * HALF, 32, 0),
        pipe.shifts.index(own).slice(8 * HALF, 8, 0),
        tables,
        LAYOUT,
        STEPS=1,
    )


@gluon.jit
def _multiply(
    weights, x, half, sums, FIRST: gl.constexpr, COLUMNS: gl.constexpr, USE_ACC: gl.constexpr
):
    """Issue the wgmma of decoded weights with columns [FIRST, FIRST + COLUMNS) of half a stage."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(COLUMNS), 4)
    return warpgroup_mma(
        gl.convert_layout(weights, OPERAND, assert_trivial=True),
        x.view(half, FIRST, COLUMNS).permute((1, 0)),  # [128, COLUMNS] e4m3
        sums,
        use_acc=USE_ACC,
        is_async=True,
    )


@gluon.jit
def accumulate_prefill(
    pipe, tables, ping_pong, state, turn, steps, PARTITION: gl.constexpr, ROWS: gl.constexpr
):
    """Sum up a row unit of a tile of ROWS rows over `steps` stages.

    turn: phase of the next wait at the order barrier. Returns the sums of the left and of the right
    columns, float32 [64, columns], and the next state and turn. Each stage: decode its first half,
    decode its second half, multiply, promote. With an order barrier both halves are decoded before
    this consumer's turn; without one the first wgmma runs while the second half is decoded.
    """
    HI_LO: gl.constexpr = pipe.HI_LO
    POLICY: gl.constexpr = _column_policy(ROWS, HI_LO)
    ORDERED: gl.constexpr = ping_pong.POLICY != UNORDERED
    gl.static_assert(not ORDERED or POLICY != TWO_IN_TURN, "two turns a stage")
    LOW_APART: gl.constexpr = POLICY == HI_THEN_LO
    LEFT: gl.constexpr = left_columns(ROWS)
    COLUMNS: gl.constexpr = num_columns(LEFT, HI_LO and not LOW_APART)
    RIGHT: gl.constexpr = ROWS if LOW_APART else right_columns(ROWS)
    RIGHT_AT: gl.constexpr = pipe.BLOCKS * pipe.BLOCK_M if LOW_APART else LEFT
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32  # ONE_GROUP does not use the right sums
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    RIGHT_LAYOUT: gl.constexpr = accumulator_layout(WIDTH)
    left = gl.zeros((64, LEFT), gl.float32, accumulator_layout(LEFT))
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
    for _ in range(steps):
        own = state.stage * pipe.CONSUMERS + PARTITION
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        a = _decode_half(pipe, own, tables, 0, LAYOUT)
        if ORDERED:
            b = _decode_half(pipe, own, tables, 1, LAYOUT)
            turn = ping_pong.wait(turn)
        # Multiply.
        first_half, second_half = 2 * state.stage, 2 * state.stage + 1
        no_right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
        no_left = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
        left_part = _multiply(a, pipe.x, first_half, no_left, 0, COLUMNS, False)
        if POLICY == TWO_AT_ONCE:
            right_part = _multiply(a, pipe.x, first_half, no_right, RIGHT_AT, RIGHT, False)
        if not ORDERED:
            b = _decode_half(pipe, own, tables, 1, LAYOUT)
        left_part = _multiply(b, pipe.x, second_half, left_part, 0, COLUMNS, True)
        if POLICY == TWO_AT_ONCE:
            right_part = _multiply(b, pipe.x, second_half, right_part, RIGHT_AT, RIGHT, True)
        elif LOW_APART:
            low = _multiply(a, pipe.x, first_half, right, RIGHT_AT, RIGHT, True)
            low = _multiply(b, pipe.x, second_half, low, RIGHT_AT, RIGHT, True)
        ping_pong.signal(AFTER_ISSUE)
        # Wait for the sums of the stage.
        if POLICY == ONE_GROUP:
            left_part = warpgroup_mma_wait(0, deps=(left_part,))
        elif POLICY == TWO_AT_ONCE:
            left_part, right_part = warpgroup_mma_wait(0, deps=(left_part, right_part))
        elif LOW_APART:  # the additions of the high sums overlap the two wgmma of the low parts
            left += warpgroup_mma_wait(2, deps=(left_part,))
            right = warpgroup_mma_wait(0, deps=(low,))
        else:
            left += warpgroup_mma_wait(0, deps=(left_part,))
            right_part = _multiply(a, pipe.x, first_half, no_right, RIGHT_AT, RIGHT, False)
            right_part = _multiply(b, pipe.x, second_half, right_part, RIGHT_AT, RIGHT, True)
            right_part = warpgroup_mma_wait(0, deps=(right_part,))
        ping_pong.signal(AFTER_COMPLETION)
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        # Promote what has not been added yet.
        if POLICY == ONE_GROUP:
            left += join_hi_lo(left_part, pipe.BLOCK_M) if HI_LO else left_part
        elif POLICY == TWO_AT_ONCE:
            left += left_part
            right += right_part
        elif POLICY == TWO_IN_TURN:
            right += right_part
        state = state.advance()
    if LOW_APART:
        left += right * LO_SCALE
    return left, right, state, turn
