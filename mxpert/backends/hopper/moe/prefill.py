"""MoE GEMM for many tokens per expert: FP8 tensor cores at the power limit.

A persistent CTA (one per SM) has one producer warp (TMA) and two or three consumer warpgroups.
Each consumer computes its own 64 weight rows. The CTA tile is these rows × up to BLOCKS blocks of
BLOCK_M activation rows of one expert (with SPLIT: hi and lo parts). Its width depends on the number
of blocks in the tile. `claims` is the tile scheduler. A pipeline stage holds 256 codes of depth.
After each stage the sums are promoted to float32. Sums of low parts are not promoted: they are
multiplied by 1/16.

Without ordering, all consumers would decode weights at the same time and then multiply at the same
time, since they wait for the same stages. If a step is one run of wgmma (`_order`), a ping-pong
order barrier serialises their wgmma: one consumer multiplies while the others decode and promote.
Outputs are stored by TMA, so the next tile starts while the stores of the last one are in flight.

Blocks of 32 rows waste less padding if experts have about a hundred rows. Decoding takes most of
the time there. A third consumer hides more of it; registers suffice for that up to 96 rows.
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

from ...common.compat import async_load
from ...common.pdl import wait_and_launch_dependents
from ..lib.pipeline import next_slot
from ..lib.ptx import decode_tables
from ..lib.tile_scheduler import (
    LEAD,
    make_labels,
    next_tile,
    read_label,
    write_label,
    write_last_label,
)
from .epilogue import (
    copy_outputs,
    finish,
    one_each,
    output_layout,
    output_terms,
    spread,
    token_terms,
)
from .weight_fragments import accumulator_layout, decode_weights

_AT_WILL = gl.constexpr(0)
_WHEN_ISSUED = gl.constexpr(1)
_WHEN_DONE = gl.constexpr(2)
"""Ping-pong order: when a consumer lets the next one start its wgmma. _AT_WILL: no order barrier;
_WHEN_ISSUED: after it has issued its last wgmma of a step; _WHEN_DONE: after these have completed.
"""


@gluon.constexpr_function
def _order(CONSUMERS, CAPACITY, SPLIT):
    """Choose the ping-pong order. FP8 tiles of more than 128 columns would pass the order barrier
    twice per step, which made them 4 to 8 % slower on an H200."""
    if SPLIT or CONSUMERS > 2:
        return _WHEN_ISSUED
    return _WHEN_DONE if CAPACITY <= 128 else _AT_WILL


@gluon.constexpr_function
def _arrivals(code_desc):
    """Number of `ready` mbarriers per stage: 1, or 2 (one for each 128 codes).

    Two are used if few stages fit, so that consumers can start with the first half of a stage.
    """
    return 64 // code_desc.block_type.shape[0]


@gluon.constexpr_function
def _largest_power(number):
    """Largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


@gluon.jit
def _make_rows(x_desc, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """Allocate ROWS activation rows for each half of each stage.

    Tensor sizes are powers of two, so other numbers of rows take two tensors.
    """
    FIRST: gl.constexpr = _largest_power(ROWS)
    x = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, FIRST, 128], x_desc.layout)
    if ROWS == FIRST:
        return (x,)
    else:
        rest = gl.allocate_shared_memory(
            gl.float8e4nv, [2 * STAGES, ROWS - FIRST, 128], x_desc.layout
        )
        return (x, rest)


@gluon.jit
def _rows(x, half, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Shared-memory view of rows [FIRST, FIRST + COUNT) of half a stage."""
    FITTING: gl.constexpr = x[0].shape[1]
    if FIRST < FITTING:
        return x[0].index(half).slice(FIRST, COUNT, 0)
    else:
        return x[1].index(half).slice(FIRST - FITTING, COUNT, 0)


@gluon.jit
def _describe(schedule, tile, sizes):
    """Return (first block, number of blocks, expert, index among the group's tiles) of a tile.

    A group is an entry of the tile list (`schedule`). Returns 0 blocks when no tile is left.
    """
    first_block, blocks, expert = schedule
    num_groups, tiles_per_block, _ = sizes
    group = tile // tiles_per_block
    known = group < num_groups
    return (
        gl.load(first_block + group, mask=known, other=0),
        gl.load(blocks + group, mask=known, other=0),
        gl.load(expert + group, mask=known, other=0),
        tile % tiles_per_block,
    )


@gluon.jit
def _load_activations(
    x,
    half,
    x_desc,
    arrived,
    first_row,
    width,
    depth,
    low_rows,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Start the TMA loads of 128 codes of a tile's activation rows into half a stage."""
    for q in gl.static_range(BLOCKS):
        row = first_row + q * BLOCK_M
        async_load(
            x_desc, [row, depth], arrived, _rows(x, half, q * BLOCK_M, BLOCK_M), pred=width > q
        )
        if SPLIT:
            async_load(
                x_desc,
                [low_rows + row, depth],
                arrived,
                _rows(x, half, (BLOCKS + q) * BLOCK_M, BLOCK_M),
                pred=width > q,
            )


@gluon.jit
def _fill_stage(
    ring,
    descriptors,
    state,
    step,
    tile,
    row_units,
    depth_units,
    low_rows,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Wait for a free stage and start the TMA loads of one step; return the next state."""
    codes, shifts, x, ready, free, labels = ring
    code_desc, shift_desc, x_desc = descriptors
    slot, phase = state
    block, width, expert, inner = tile
    unit = CONSUMERS * inner
    ARRIVALS: gl.constexpr = _arrivals(code_desc)
    UNITS: gl.constexpr = 2 // ARRIVALS  # depth units of 128 codes that arrive together
    WEIGHT_BYTES: gl.constexpr = CONSUMERS * (32 * 128 + 8 * 32) * UNITS
    ROW_BYTES: gl.constexpr = BLOCK_M * 128 * (2 if SPLIT else 1) * UNITS
    mbarrier.wait(free.index(slot), phase)
    write_label(labels, slot, tile)
    for part in gl.static_range(ARRIVALS):
        arrived = ready.index(slot * ARRIVALS + part)
        for q in gl.static_range(BLOCKS):
            mbarrier.expect(arrived, WEIGHT_BYTES + (q + 1) * ROW_BYTES, pred=width == q + 1)
        for half in gl.static_range(part * UNITS, (part + 1) * UNITS):
            _load_activations(
                x,
                2 * slot + half,
                x_desc,
                arrived,
                block * BLOCK_M,
                width,
                step * 256 + half * 128,
                low_rows,
                BLOCK_M,
                BLOCKS,
                SPLIT,
            )
        # For an odd number of units, the last step also reads the next unit's weights. They are
        # finite and are multiplied by x = 0.
        for c in gl.static_range(CONSUMERS):
            row_unit = expert * row_units + gl.minimum(unit + c, row_units - 1)
            first = row_unit * depth_units + 2 * step + part
            own = slot * CONSUMERS + c
            async_load(
                code_desc,
                [first * 32, 0],
                arrived,
                codes.index(own).slice(part * 32, 32 * UNITS, 0),
            )
            async_load(
                shift_desc, [first * 8, 0], arrived, shifts.index(own).slice(part * 8, 8 * UNITS, 0)
            )
    return next_slot(slot, phase, STAGES)


@gluon.jit
def _produce(
    ring,
    tile_counter,
    descriptors,
    schedule,
    sizes,
    row_units,
    low_rows,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    _, _, _, ready, free, labels = ring
    num_groups, tiles_per_block, depth_units = sizes
    steps = gl.cdiv(depth_units, 2)
    claim_at = gl.maximum(steps - LEAD, 1)
    state = (0, 1)
    number = gl.program_id(0)
    following = _describe(schedule, number, sizes)
    while following[1] > 0:
        tile = following
        for step in range(claim_at):
            state = _fill_stage(
                ring,
                descriptors,
                state,
                step,
                tile,
                row_units,
                depth_units,
                low_rows,
                CONSUMERS,
                BLOCK_M,
                BLOCKS,
                STAGES,
                SPLIT,
            )
        number = next_tile(number, tile_counter, num_groups * tiles_per_block)
        following = _describe(schedule, number, sizes)
        for step in range(claim_at, steps):
            state = _fill_stage(
                ring,
                descriptors,
                state,
                step,
                tile,
                row_units,
                depth_units,
                low_rows,
                CONSUMERS,
                BLOCK_M,
                BLOCKS,
                STAGES,
                SPLIT,
            )
    write_last_label(labels, state[0], state[1], following, ready, free, _arrivals(descriptors[0]))


@gluon.jit
def _multiply(
    weights, x, half, partial, FIRST: gl.constexpr, COLUMNS: gl.constexpr, USE_ACC: gl.constexpr
):
    """Issue the wgmma of decoded weights with columns [FIRST, FIRST + COLUMNS) of half a stage."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(4, COLUMNS), 4)
    return warpgroup_mma(
        gl.convert_layout(weights, OPERAND, assert_trivial=True),
        _rows(x, half, FIRST, COLUMNS).permute((1, 0)),
        partial,
        use_acc=USE_ACC,
        is_async=True,
    )


@gluon.jit
def _make_turns(CONSUMERS: gl.constexpr):
    """Make the ping-pong order barriers, one for each consumer.

    They are allocated only if used. The compiler reuses shared memory of buffers without later
    uses, and an initialised mbarrier must not share memory with other data: results changed when
    several processes shared a GPU.
    """
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    return turns


@gluon.jit
def _take_turn(turns, turn, ORDER: gl.constexpr):
    """Wait at this consumer's order barrier; return the phase of the next wait."""
    if ORDER != _AT_WILL:
        mbarrier.wait(turns[0], turn)
        turn ^= 1
    return turn


@gluon.jit
def _pass_turn(turns, MOMENT: gl.constexpr, ORDER: gl.constexpr):
    if ORDER == MOMENT:
        mbarrier.arrive(turns[1], count=1)


@gluon.jit
def _decode(ring, place, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Decode one half (128 codes of depth) of a consumer's weights in a stage."""
    codes, shifts, _, _, _, _, tables = ring
    return decode_weights(
        codes.index(place).slice(32 * HALF, 32, 0),
        shifts.index(place).slice(8 * HALF, 8, 0),
        tables,
        LAYOUT,
        1,
        1,
    )


@gluon.jit
def _accumulate(
    ring,
    turns,
    state,
    depth_units,
    PARTITION: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    RIGHT_AT: gl.constexpr,
    SPLIT: gl.constexpr,
    ORDER: gl.constexpr,
):
    """Sums of one tile: columns [0, LEFT) and, if RIGHT > 0, [RIGHT_AT, RIGHT_AT + RIGHT).

    With SPLIT the right columns are the low parts of the left ones. state: stage, phase, and the
    phase of the order barrier. Returns both sums, float32 [64, columns], and the next state.
    """
    slot, phase, turn = state
    x = ring[2]
    ready = ring[3]
    free = ring[4]
    ARRIVALS: gl.constexpr = ready.shape[0] // STAGES
    LAYOUT: gl.constexpr = accumulator_layout(4, LEFT)
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32
    RIGHT_LAYOUT: gl.constexpr = accumulator_layout(4, WIDTH)
    BOTH: gl.constexpr = RIGHT > 0 and not SPLIT and LEFT + RIGHT < 128  # partial sums at once
    left = gl.zeros((64, LEFT), gl.float32, LAYOUT)
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
    for _ in range(gl.cdiv(depth_units, 2)):
        place = slot * CONSUMERS + PARTITION
        mbarrier.wait(ready.index(slot * ARRIVALS), phase)
        a = _decode(ring, place, 0, LAYOUT)
        if ARRIVALS == 2:
            mbarrier.wait(ready.index(slot * ARRIVALS + 1), phase)
        if ORDER != _AT_WILL:
            b = _decode(ring, place, 1, LAYOUT)
            turn = _take_turn(turns, turn, ORDER)
        first, second = 2 * slot, 2 * slot + 1
        unused = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
        partial = _multiply(a, x, first, gl.zeros((64, LEFT), gl.float32, LAYOUT), 0, LEFT, False)
        if BOTH:
            other = _multiply(a, x, first, unused, RIGHT_AT, RIGHT, False)
        if ORDER == _AT_WILL:
            b = _decode(ring, place, 1, LAYOUT)
        partial = _multiply(b, x, second, partial, 0, LEFT, True)
        if SPLIT:  # the additions of the high sums overlap the wgmma of the low parts
            low = _multiply(a, x, first, right, RIGHT_AT, RIGHT, True)
            low = _multiply(b, x, second, low, RIGHT_AT, RIGHT, True)
            _pass_turn(turns, _WHEN_ISSUED, ORDER)
            left += warpgroup_mma_wait(2, deps=(partial,))
            right = warpgroup_mma_wait(0, deps=(low,))
            _pass_turn(turns, _WHEN_DONE, ORDER)
            mbarrier.arrive(free.index(slot), count=1)
        elif BOTH:
            other = _multiply(b, x, second, other, RIGHT_AT, RIGHT, True)
            _pass_turn(turns, _WHEN_ISSUED, ORDER)
            partial, other = warpgroup_mma_wait(0, deps=(partial, other))
            _pass_turn(turns, _WHEN_DONE, ORDER)
            mbarrier.arrive(free.index(slot), count=1)
            left += partial
            right += other
        elif RIGHT > 0:
            gl.static_assert(ORDER == _AT_WILL, "two turns a step")
            left += warpgroup_mma_wait(0, deps=(partial,))
            other = _multiply(a, x, first, unused, RIGHT_AT, RIGHT, False)
            other = _multiply(b, x, second, other, RIGHT_AT, RIGHT, True)
            other = warpgroup_mma_wait(0, deps=(other,))
            mbarrier.arrive(free.index(slot), count=1)
            right += other
        else:
            _pass_turn(turns, _WHEN_ISSUED, ORDER)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            _pass_turn(turns, _WHEN_DONE, ORDER)
            mbarrier.arrive(free.index(slot), count=1)
            left += partial
        slot, phase = next_slot(slot, phase, STAGES)
    return left, right, (slot, phase, turn)


@gluon.jit
def _outputs(
    unit, expert, factors, TOKENS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr
):
    """Load row references and biases of one row unit."""
    reference, bias, num_outputs, row_units = factors
    OUTPUTS: gl.constexpr = 64 if KIND == "rows" else 32
    return output_terms(
        reference,
        bias,
        expert,
        unit * OUTPUTS,
        num_outputs,
        row_units * 64,
        OUTPUTS,
        output_layout(4, TOKENS, KIND),
        KIND,
        HAS_BIAS,
    )


@gluon.jit
def _store(
    total,
    outputs,
    tokens,
    first_row,
    unit,
    target,
    PIECE: gl.constexpr,
    KIND: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    """Run the epilogue for one row unit and store its outputs to rows from `first_row` on."""
    out_desc, staging, param_first, param_second = target
    OUTPUTS: gl.constexpr = 64 if KIND == "rows" else 32
    LAYOUT: gl.constexpr = output_layout(4, total.shape[1], KIND)
    value = finish(
        total, outputs, spread(tokens, LAYOUT), param_first, param_second, LAYOUT, KIND, WEIGHTED
    )
    copy_outputs(value, out_desc, staging, first_row, unit * OUTPUTS, PIECE)


@gluon.constexpr_function
def _columns(ROWS, CAPACITY, SPLIT):
    """Split a tile of ROWS rows by columns: (left columns, right columns, start of the right)."""
    if SPLIT:
        return ROWS, ROWS, CAPACITY
    left = min(128, _largest_power(ROWS))  # a tensor's sizes are powers of two
    return left, ROWS - left, left


@gluon.jit
def _tile(
    ring,
    turns,
    state,
    depth_units,
    first_row,
    unit,
    expert,
    staging,
    operands,
    PARTITION: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    ORDER: gl.constexpr,
):
    """Compute and store one tile of ROWS rows (at most CAPACITY); return the next state."""
    COLUMNS: gl.constexpr = _columns(ROWS, CAPACITY, SPLIT)
    LEFT: gl.constexpr = COLUMNS[0]
    RIGHT: gl.constexpr = COLUMNS[1]
    BOTH: gl.constexpr = RIGHT > 0 and not SPLIT
    factors, rows, out_desc, parameters = operands
    target = (out_desc, staging, parameters[0], parameters[1])
    x_scale, routed_weights = rows
    # Issue these loads before the main loop, which hides their latency.
    outputs = _outputs(unit, expert, factors, LEFT, KIND, HAS_BIAS)
    tokens = token_terms(x_scale, routed_weights, first_row, LEFT, one_each(), WEIGHTED)
    if BOTH:
        others = token_terms(x_scale, routed_weights, first_row + LEFT, RIGHT, one_each(), WEIGHTED)
    left, right, state = _accumulate(
        ring,
        turns,
        state,
        depth_units,
        PARTITION,
        CONSUMERS,
        STAGES,
        LEFT,
        RIGHT,
        COLUMNS[2],
        SPLIT,
        ORDER,
    )
    if SPLIT:
        left += right * 0.0625
    _store(left, outputs, tokens, first_row, unit, target, 0, KIND, WEIGHTED)
    if BOTH:
        outputs = _outputs(unit, expert, factors, RIGHT, KIND, HAS_BIAS)
        _store(
            right,
            outputs,
            others,
            first_row + LEFT,
            unit,
            target,
            LEFT // target[1].shape[1],
            KIND,
            WEIGHTED,
        )
    return state


@gluon.jit
def _consume(
    ring,
    turns,
    staging,
    operands,
    schedule,
    sizes,
    PARTITION: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    ORDER: gl.constexpr,
):
    turns = (turns.index(PARTITION), turns.index((PARTITION + 1) % CONSUMERS))
    ring += (decode_tables(),)
    state = (0, 0, 1 if PARTITION == 0 else 0)  # partition 0 passes its order barrier first
    ARRIVALS: gl.constexpr = ring[3].shape[0] // STAGES
    block, width, expert, inner = _describe(schedule, gl.program_id(0), sizes)
    while width > 0:
        unit = CONSUMERS * inner + PARTITION
        for q in gl.static_range(1, BLOCKS + 1):
            if width == q:
                state = _tile(
                    ring,
                    turns,
                    state,
                    sizes[2],
                    block * BLOCK_M,
                    unit,
                    expert,
                    staging,
                    operands,
                    PARTITION,
                    CONSUMERS,
                    STAGES,
                    q * BLOCK_M,
                    BLOCKS * BLOCK_M,
                    SPLIT,
                    KIND,
                    HAS_BIAS,
                    WEIGHTED,
                    ORDER,
                )
        slot = state[0]
        block, width, expert, inner = read_label(
            ring[5], slot, ring[3].index(slot * ARRIVALS), state[1]
        )
    tma.store_wait(0)


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
    num_groups,
    tile_counter,
    param_first,
    param_second,
    low_rows,
    num_outputs,
    tiles_per_block,
    row_units,
    depth_units,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out [P, num_outputs] for all tiles; the module docstring has the schedule.

    tile_first_block, tile_blocks, tile_expert [groups] and num_groups [1] come from `schedule`.
    KIND and low_rows are as in the decode kernel. CONSUMERS: 2 or 3. PIECES: output buffers per
    consumer, hence TMA stores in flight.
    """
    # Per stage: one row unit of weights per consumer (64 rows × 256 codes, two a byte) and its
    # shifts, and two halves of 128 codes of the activation rows.
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS, 64, 128], code_desc.layout)
    shifts = gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS, 16, 32], shift_desc.layout)
    x = _make_rows(x_desc, STAGES, BLOCKS * BLOCK_M * (2 if SPLIT else 1))
    PIECE: gl.constexpr = [PIECES, out_desc.block_type.shape[0], out_desc.block_type.shape[1]]
    staging = (
        gl.allocate_shared_memory(out_desc.dtype, PIECE, out_desc.layout),
        gl.allocate_shared_memory(out_desc.dtype, PIECE, out_desc.layout),
    )
    ARRIVALS: gl.constexpr = STAGES * _arrivals(code_desc)
    ready = gl.allocate_shared_memory(gl.int64, [ARRIVALS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for arrival in gl.static_range(ARRIVALS):
        mbarrier.init(ready.index(arrival), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=CONSUMERS)
    ORDER: gl.constexpr = _order(CONSUMERS, BLOCKS * BLOCK_M, SPLIT)
    turns = free  # a placeholder if there are no order barriers
    if ORDER != _AT_WILL:
        turns = _make_turns(CONSUMERS)
    wait_and_launch_dependents()
    ring = (codes, shifts, x, ready, free, make_labels(STAGES))
    descriptors = (code_desc, shift_desc, x_desc)
    schedule = (tile_first_block, tile_blocks, tile_expert)
    sizes = (gl.load(num_groups), tiles_per_block, depth_units)
    operands = (
        (reference, bias, num_outputs, row_units),
        (x_scale, routed_weights),
        out_desc,
        (param_first, param_second),
    )
    if CONSUMERS == 2:  # the last list has the registers per thread of consumer 1 and producer
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        ring,
                        turns,
                        staging[0],
                        operands,
                        schedule,
                        sizes,
                        0,
                        2,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                        KIND,
                        HAS_BIAS,
                        WEIGHTED,
                        ORDER,
                    ),
                ),
                (
                    _consume,
                    (
                        ring,
                        turns,
                        staging[1],
                        operands,
                        schedule,
                        sizes,
                        1,
                        2,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                        KIND,
                        HAS_BIAS,
                        WEIGHTED,
                        ORDER,
                    ),
                ),
                (
                    _produce,
                    (
                        ring,
                        tile_counter,
                        descriptors,
                        schedule,
                        sizes,
                        row_units,
                        low_rows,
                        2,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        last = gl.allocate_shared_memory(out_desc.dtype, PIECE, out_desc.layout)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        ring,
                        turns,
                        staging[0],
                        operands,
                        schedule,
                        sizes,
                        0,
                        3,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                        KIND,
                        HAS_BIAS,
                        WEIGHTED,
                        ORDER,
                    ),
                ),
                (
                    _consume,
                    (
                        ring,
                        turns,
                        staging[1],
                        operands,
                        schedule,
                        sizes,
                        1,
                        3,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                        KIND,
                        HAS_BIAS,
                        WEIGHTED,
                        ORDER,
                    ),
                ),
                (
                    _consume,
                    (
                        ring,
                        turns,
                        last,
                        operands,
                        schedule,
                        sizes,
                        2,
                        3,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                        KIND,
                        HAS_BIAS,
                        WEIGHTED,
                        ORDER,
                    ),
                ),
                (
                    _produce,
                    (
                        ring,
                        tile_counter,
                        descriptors,
                        schedule,
                        sizes,
                        row_units,
                        low_rows,
                        3,
                        BLOCK_M,
                        BLOCKS,
                        STAGES,
                        SPLIT,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
