"""Many tokens per expert: FP8 tensor cores at the power limit.

A persistent CTA (one per SM) has one producer warp (TMA) and two consumer warpgroups, each with its
own 64 weight rows, so that they drift apart: one decodes while the other's wgmma runs. CTA tile:
128 weight rows × up to BLOCKS blocks of BLOCK_M activation rows of one expert, four in FP8, two as
hi and lo parts; the width follows the tile's own blocks. Every 256 codes of depth the sums are
promoted to float32; a low part weighs 1/16, so its accumulation needs no promotion.

Blocks of 32 rows waste less where an expert has about a hundred rows, and leave room for a ring
twice as deep, for there the weights' way from memory still counts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)

from ..dependent import wait_then_release
from .epilogue import (
    finish, output_layout, output_terms, store_outputs_through, token_terms,
)
from .tiles import accumulator_layout, decode_weights


@gluon.constexpr_function
def _coalesced(OUTPUTS):
    """Store layout: 16 bytes of adjacent outputs a thread."""
    return gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, 4], [0, 1])


@gluon.jit
def _place(schedule, tile, num_tiles, tiles_per_block):
    """First block, number of blocks and expert of a tile, asked for one tile ahead so that nobody
    waits for them."""
    first_block, blocks, expert = schedule
    group = tile // tiles_per_block
    known = tile < num_tiles
    return (gl.load(first_block + group, mask=known, other=0),
            gl.load(blocks + group, mask=known, other=0),
            gl.load(expert + group, mask=known, other=0))


@gluon.jit
def _produce(ring, code_desc, shift_desc, x_desc, schedule, num_tiles, tiles_per_block, row_units,
             depth_units, low_rows, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr,
             STAGES: gl.constexpr, SPLIT: gl.constexpr):
    codes, shifts, x, ready, free = ring
    WEIGHT_BYTES: gl.constexpr = 64 * 128 + 16 * 32
    ROW_BYTES: gl.constexpr = BLOCK_M * 128 * (2 if SPLIT else 1)
    slot = 0
    phase = 1
    following = _place(schedule, gl.program_id(0), num_tiles, tiles_per_block)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block, width, expert = following
        following = _place(schedule, tile + gl.num_programs(0), num_tiles, tiles_per_block)
        unit = 2 * (tile % tiles_per_block)
        base = expert * row_units
        first = (base + unit) * depth_units
        second = (base + gl.minimum(unit + 1, row_units - 1)) * depth_units
        for step in range(gl.cdiv(depth_units, 2) * 2):
            if step % 2 == 0:  # consumers free two stages at once
                mbarrier.wait(free.index(slot), phase)
            arrived = ready.index(slot)
            for q in gl.static_range(BLOCKS):
                mbarrier.expect(arrived, WEIGHT_BYTES + (q + 1) * ROW_BYTES, pred=width == q + 1)
                row = (block + q) * BLOCK_M
                rows = x.index(slot).slice(q * BLOCK_M, BLOCK_M, 0)
                tma.async_copy_global_to_shared(x_desc, [row, step * 128], arrived, rows,
                                                pred=width > q)
                if SPLIT:
                    rows = x.index(slot).slice((BLOCKS + q) * BLOCK_M, BLOCK_M, 0)
                    tma.async_copy_global_to_shared(x_desc, [low_rows + row, step * 128], arrived,
                                                    rows, pred=width > q)
            # An odd last step reads on into the next unit: finite weights that meet x = 0.
            tma.async_copy_global_to_shared(code_desc, [(first + step) * 32, 0], arrived,
                                            codes.index(slot).slice(0, 32, 0))
            tma.async_copy_global_to_shared(code_desc, [(second + step) * 32, 0], arrived,
                                            codes.index(slot).slice(32, 32, 0))
            tma.async_copy_global_to_shared(shift_desc, [(first + step) * 8, 0], arrived,
                                            shifts.index(slot).slice(0, 8, 0))
            tma.async_copy_global_to_shared(shift_desc, [(second + step) * 8, 0], arrived,
                                            shifts.index(slot).slice(8, 8, 0))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _multiply(weights, x, partial, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
              USE_ACC: gl.constexpr):
    """Start the products of decoded weights with columns [FIRST, FIRST + COLUMNS) of a stage."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(4, COLUMNS), 4)
    return warpgroup_mma(gl.convert_layout(weights, OPERAND, assert_trivial=True),
                         x.slice(FIRST, COLUMNS, 0).permute((1, 0)), partial, use_acc=USE_ACC,
                         is_async=True)


@gluon.jit
def _accumulate(ring, slot, phase, depth_units, PARTITION: gl.constexpr, STAGES: gl.constexpr,
                LEFT: gl.constexpr, RIGHT: gl.constexpr, RIGHT_AT: gl.constexpr,
                SPLIT: gl.constexpr):
    """Sums of one tile: columns [0, LEFT) and, if RIGHT > 0, [RIGHT_AT, RIGHT_AT + RIGHT).

    With SPLIT the right columns are the low parts of the left ones.
    """
    codes, shifts, x, ready, free = ring
    LAYOUT: gl.constexpr = accumulator_layout(4, LEFT)
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32
    RIGHT_LAYOUT: gl.constexpr = accumulator_layout(4, WIDTH)
    BOTH: gl.constexpr = RIGHT > 0 and not SPLIT and LEFT + RIGHT < 128  # partial sums at once
    left = gl.zeros((64, LEFT), gl.float32, LAYOUT)
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
    for _ in range(gl.cdiv(depth_units, 2)):
        mbarrier.wait(ready.index(slot), phase)
        a = decode_weights(codes.index(slot).slice(PARTITION * 32, 32, 0),
                           shifts.index(slot).slice(PARTITION * 8, 8, 0), LAYOUT, 1, 1)
        xa = x.index(slot)
        unused = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
        partial = _multiply(a, xa, gl.zeros((64, LEFT), gl.float32, LAYOUT), 0, LEFT, False)
        if BOTH:
            other = _multiply(a, xa, unused, RIGHT_AT, RIGHT, False)
        mbarrier.wait(ready.index(slot + 1), phase)
        b = decode_weights(codes.index(slot + 1).slice(PARTITION * 32, 32, 0),
                           shifts.index(slot + 1).slice(PARTITION * 8, 8, 0), LAYOUT, 1, 1)
        xb = x.index(slot + 1)
        partial = _multiply(b, xb, partial, 0, LEFT, True)
        if SPLIT:  # the adds of the high sum run under the wgmma of the low parts
            low = _multiply(a, xa, right, RIGHT_AT, RIGHT, True)
            low = _multiply(b, xb, low, RIGHT_AT, RIGHT, True)
            left += warpgroup_mma_wait(2, deps=(partial,))
            right = warpgroup_mma_wait(0, deps=(low,))
            mbarrier.arrive(free.index(slot), count=1)
        elif BOTH:
            other = _multiply(b, xb, other, RIGHT_AT, RIGHT, True)
            partial, other = warpgroup_mma_wait(0, deps=(partial, other))
            mbarrier.arrive(free.index(slot), count=1)
            left += partial
            right += other
        elif RIGHT > 0:
            left += warpgroup_mma_wait(0, deps=(partial,))
            other = _multiply(a, xa, unused, RIGHT_AT, RIGHT, False)
            other = _multiply(b, xb, other, RIGHT_AT, RIGHT, True)
            other = warpgroup_mma_wait(0, deps=(other,))
            mbarrier.arrive(free.index(slot), count=1)
            right += other
        else:
            partial = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(free.index(slot), count=1)
            left += partial
        slot += 2
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return left, right, slot, phase


@gluon.jit
def _outputs(unit, expert, factors, TOKENS: gl.constexpr, KIND: gl.constexpr,
             HAS_BIAS: gl.constexpr):
    """Row factors and biases of one row unit."""
    reference, bias, num_outputs, row_units = factors
    OUTPUTS: gl.constexpr = 64 if KIND == 0 else 32
    return output_terms(reference, bias, expert, unit * OUTPUTS, num_outputs, row_units * 64,
                        OUTPUTS, output_layout(4, TOKENS, KIND), KIND, HAS_BIAS)


@gluon.jit
def _tokens(first_row, rows, TOKENS: gl.constexpr, KIND: gl.constexpr, WEIGHTED: gl.constexpr):
    """Scales and routing weights of a tile's rows."""
    x_scale, routed_weights = rows
    return token_terms(x_scale, routed_weights, first_row, TOKENS, output_layout(4, TOKENS, KIND),
                       WEIGHTED)


@gluon.jit
def _store(total, outputs, tokens, first_row, unit, target, KIND: gl.constexpr,
           WEIGHTED: gl.constexpr):
    """Epilogue of one row unit and its columns, into rows from `first_row`."""
    out, sorted_token_ids, num_tokens, num_outputs, param_first, param_second = target
    OUTPUTS: gl.constexpr = 64 if KIND == 0 else 32
    LAYOUT: gl.constexpr = output_layout(4, total.shape[1], KIND)
    value = finish(total, outputs, tokens, param_first, param_second, LAYOUT, KIND, WEIGHTED)
    store_outputs_through(value, out, sorted_token_ids, first_row, unit * OUTPUTS, num_tokens,
                          num_outputs, _coalesced(OUTPUTS))


@gluon.constexpr_function
def _columns(ROWS, CAPACITY, SPLIT):
    """Columns of a tile of ROWS rows: left ones, right ones, and where these begin."""
    if SPLIT:
        return ROWS, ROWS, CAPACITY
    left = min(128, 1 << (ROWS.bit_length() - 1))  # a tensor's sizes are powers of two
    return left, ROWS - left, left


@gluon.jit
def _tile(ring, slot, phase, depth_units, first_row, unit, expert, operands,
          PARTITION: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
          CAPACITY: gl.constexpr, SPLIT: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
          WEIGHTED: gl.constexpr):
    """One tile of ROWS of at most CAPACITY rows; returns the ring position after it."""
    COLUMNS: gl.constexpr = _columns(ROWS, CAPACITY, SPLIT)
    LEFT: gl.constexpr = COLUMNS[0]
    RIGHT: gl.constexpr = COLUMNS[1]
    # What has room in registers through the loop is loaded before it.
    OUTPUTS_FIRST: gl.constexpr = LEFT + RIGHT <= 128
    TOKENS_FIRST: gl.constexpr = LEFT + RIGHT < 128
    factors, rows, target = operands
    if OUTPUTS_FIRST:
        outputs = _outputs(unit, expert, factors, LEFT, KIND, HAS_BIAS)
    if TOKENS_FIRST:
        tokens = _tokens(first_row, rows, LEFT, KIND, WEIGHTED)
    left, right, slot, phase = _accumulate(ring, slot, phase, depth_units, PARTITION, STAGES, LEFT,
                                           RIGHT, COLUMNS[2], SPLIT)
    if SPLIT:
        left += right * 0.0625
    if not OUTPUTS_FIRST:
        outputs = _outputs(unit, expert, factors, LEFT, KIND, HAS_BIAS)
    if not TOKENS_FIRST:
        tokens = _tokens(first_row, rows, LEFT, KIND, WEIGHTED)
    _store(left, outputs, tokens, first_row, unit, target, KIND, WEIGHTED)
    if RIGHT > 0 and not SPLIT:
        first_row += COLUMNS[2]
        outputs = _outputs(unit, expert, factors, RIGHT, KIND, HAS_BIAS)
        tokens = _tokens(first_row, rows, RIGHT, KIND, WEIGHTED)
        _store(right, outputs, tokens, first_row, unit, target, KIND, WEIGHTED)
    return slot, phase


@gluon.jit
def _consume(ring, operands, schedule, num_tiles, tiles_per_block, depth_units,
             PARTITION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr,
             STAGES: gl.constexpr, SPLIT: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
             WEIGHTED: gl.constexpr):
    slot = 0
    phase = 0
    following = _place(schedule, gl.program_id(0), num_tiles, tiles_per_block)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block, width, expert = following
        following = _place(schedule, tile + gl.num_programs(0), num_tiles, tiles_per_block)
        unit = 2 * (tile % tiles_per_block) + PARTITION
        for q in gl.static_range(1, BLOCKS + 1):
            if width == q:
                slot, phase = _tile(ring, slot, phase, depth_units, block * BLOCK_M, unit, expert,
                                    operands, PARTITION, STAGES, q * BLOCK_M, BLOCKS * BLOCK_M,
                                    SPLIT, KIND, HAS_BIAS, WEIGHTED)


@gluon.jit(do_not_specialize=["tiles_per_block", "row_units", "depth_units", "num_tokens",
                              "low_rows"])
def _moe_gemm_prefill_kernel(
        out, code_desc, shift_desc, x_desc, reference, bias, x_scale, routed_weights,
        sorted_token_ids, tile_first_block, tile_blocks, tile_expert, num_groups, param_first,
        param_second, num_tokens, low_rows, num_outputs, tiles_per_block, row_units, depth_units,
        BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
        KIND: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
        num_warps: gl.constexpr):
    """out [P, num_outputs] for every tile; see the module docstring for the schedule.

    tile_first_block, tile_blocks, tile_expert [groups] and num_groups [1] come from `schedule`;
    KIND and low_rows as in the decode kernel.
    """
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 128], code_desc.layout)
    shifts = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 32], shift_desc.layout)
    ROWS: gl.constexpr = BLOCKS * BLOCK_M * (2 if SPLIT else 1)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    wait_then_release()
    num_tiles = gl.load(num_groups) * tiles_per_block
    ring = (codes, shifts, x, ready, free)
    factors = (reference, bias, num_outputs, row_units)
    target = (out, sorted_token_ids, num_tokens, num_outputs, param_first, param_second)
    operands = (factors, (x_scale, routed_weights), target)
    schedule = (tile_first_block, tile_blocks, tile_expert)
    gl.warp_specialize(
        [(_consume, (ring, operands, schedule, num_tiles, tiles_per_block, depth_units, 0, BLOCK_M,
                     BLOCKS, STAGES, SPLIT, KIND, HAS_BIAS, WEIGHTED)),
         (_consume, (ring, operands, schedule, num_tiles, tiles_per_block, depth_units, 1, BLOCK_M,
                     BLOCKS, STAGES, SPLIT, KIND, HAS_BIAS, WEIGHTED)),
         (_produce, (ring, code_desc, shift_desc, x_desc, schedule, num_tiles, tiles_per_block,
                     row_units, depth_units, low_rows, BLOCK_M, BLOCKS, STAGES, SPLIT))],
        [4, 1], [240, 24])
