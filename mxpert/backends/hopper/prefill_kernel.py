"""Many tokens per expert: FP8 tensor cores at the power limit.

A persistent CTA (one per SM) has one producer warp (TMA) and two consumer warpgroups, each with its
own 64 weight rows, so that they drift apart: one decodes while the other's wgmma runs. CTA tile:
128 weight rows × up to 256 columns of activations, which is 256 tokens in FP8, or 128 tokens as hi
and lo parts. The width follows the tile's own blocks of 64 rows. Every 256 codes of depth the sums
are promoted to float32; a low part weighs 1/16, so its accumulation needs no promotion.
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
def _produce(ring, code_desc, shift_desc, x_desc, tile_first_block, tile_blocks, block_expert_ids,
             blocks_per_unit, num_tiles, tiles_per_block, row_units, depth_units, low_rows,
             STAGES: gl.constexpr, SPLIT: gl.constexpr):
    codes, shifts, x, ready, free = ring
    WEIGHT_BYTES: gl.constexpr = 64 * 128 + 16 * 32
    ROW_BYTES: gl.constexpr = 64 * 128 * (2 if SPLIT else 1)
    BLOCKS: gl.constexpr = 2 if SPLIT else 4
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group = tile // tiles_per_block
        unit = 2 * (tile % tiles_per_block)
        block = gl.load(tile_first_block + group)
        width = gl.load(tile_blocks + group)
        base = gl.load(block_expert_ids + block // blocks_per_unit) * row_units
        first = (base + unit) * depth_units
        second = (base + gl.minimum(unit + 1, row_units - 1)) * depth_units
        for step in range(gl.cdiv(depth_units, 2) * 2):
            if step % 2 == 0:  # consumers free two stages at once
                mbarrier.wait(free.index(slot), phase)
            arrived = ready.index(slot)
            for q in gl.static_range(BLOCKS):
                mbarrier.expect(arrived, WEIGHT_BYTES + (q + 1) * ROW_BYTES, pred=width == q + 1)
                row = (block + q) * 64
                tma.async_copy_global_to_shared(x_desc, [row, step * 128], arrived,
                                                x.index(slot).slice(q * 64, 64, 0), pred=width > q)
                if SPLIT:
                    tma.async_copy_global_to_shared(
                        x_desc, [low_rows + row, step * 128], arrived,
                        x.index(slot).slice(128 + q * 64, 64, 0), pred=width > q)
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
def _accumulate(ring, slot, phase, depth_units, PARTITION: gl.constexpr, STAGES: gl.constexpr,
                FIRST: gl.constexpr, SECOND: gl.constexpr, SPLIT: gl.constexpr):
    """Sums of one tile: columns [0, FIRST) and, if SECOND > 0, [128, 128 + SECOND).

    With SPLIT the second columns are the low parts of the first.
    """
    codes, shifts, x, ready, free = ring
    LEFT: gl.constexpr = accumulator_layout(4, FIRST)
    WIDTH: gl.constexpr = SECOND if SECOND > 0 else 64
    RIGHT: gl.constexpr = accumulator_layout(4, WIDTH)
    left = gl.zeros((64, FIRST), gl.float32, LEFT)
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT)
    for _ in range(gl.cdiv(depth_units, 2)):
        mbarrier.wait(ready.index(slot), phase)
        a = decode_weights(codes.index(slot).slice(PARTITION * 32, 32, 0),
                           shifts.index(slot).slice(PARTITION * 8, 8, 0), LEFT, 1, 1)
        xa = x.index(slot)
        partial = warpgroup_mma(a, xa.slice(0, FIRST, 0).permute((1, 0)),
                                gl.zeros((64, FIRST), gl.float32, LEFT), use_acc=False,
                                is_async=True)
        mbarrier.wait(ready.index(slot + 1), phase)
        b = decode_weights(codes.index(slot + 1).slice(PARTITION * 32, 32, 0),
                           shifts.index(slot + 1).slice(PARTITION * 8, 8, 0), LEFT, 1, 1)
        xb = x.index(slot + 1)
        partial = warpgroup_mma(b, xb.slice(0, FIRST, 0).permute((1, 0)), partial, is_async=True)
        if SECOND == 0:
            partial = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(free.index(slot), count=1)
            left += partial
        else:
            a2 = gl.convert_layout(a, gl.DotOperandLayout(0, RIGHT, 4), assert_trivial=True)
            b2 = gl.convert_layout(b, gl.DotOperandLayout(0, RIGHT, 4), assert_trivial=True)
            xa2 = xa.slice(128, SECOND, 0).permute((1, 0))
            xb2 = xb.slice(128, SECOND, 0).permute((1, 0))
            if SPLIT:  # the adds of the high sum run under the wgmma of the low parts
                low = warpgroup_mma(a2, xa2, right, is_async=True)
                low = warpgroup_mma(b2, xb2, low, is_async=True)
                left += warpgroup_mma_wait(2, deps=(partial,))
                right = warpgroup_mma_wait(0, deps=(low,))
                mbarrier.arrive(free.index(slot), count=1)
            else:
                left += warpgroup_mma_wait(0, deps=(partial,))
                other = warpgroup_mma(a2, xa2, gl.zeros((64, SECOND), gl.float32, RIGHT),
                                      use_acc=False, is_async=True)
                other = warpgroup_mma(b2, xb2, other, is_async=True)
                other = warpgroup_mma_wait(0, deps=(other,))
                mbarrier.arrive(free.index(slot), count=1)
                right += other
        slot += 2
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return left, right, slot, phase


@gluon.jit
def _store(total, first_row, unit, expert, operands, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
           WEIGHTED: gl.constexpr):
    """Epilogue of one row unit and its columns, into rows from `first_row`."""
    (out, reference, bias, x_scale, routed_weights, sorted_token_ids, num_tokens, num_outputs,
     row_units, param_first, param_second) = operands
    TOKENS: gl.constexpr = total.shape[1]
    OUTPUTS: gl.constexpr = 64 if KIND == 0 else 32
    LAYOUT: gl.constexpr = output_layout(4, TOKENS, KIND)
    outputs = output_terms(reference, bias, expert, unit * OUTPUTS, num_outputs, row_units * 64,
                           OUTPUTS, LAYOUT, KIND, HAS_BIAS)
    tokens = token_terms(x_scale, routed_weights, first_row, TOKENS, LAYOUT, WEIGHTED)
    value = finish(total, outputs, tokens, param_first, param_second, LAYOUT, KIND, WEIGHTED)
    store_outputs_through(value, out, sorted_token_ids, first_row, unit * OUTPUTS, num_tokens,
                          num_outputs, _coalesced(OUTPUTS))


@gluon.jit
def _tile(ring, slot, phase, depth_units, block, unit, expert, operands, PARTITION: gl.constexpr,
          STAGES: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, SPLIT: gl.constexpr,
          KIND: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr):
    """One tile of a given width; returns the ring position after it."""
    left, right, slot, phase = _accumulate(ring, slot, phase, depth_units, PARTITION, STAGES,
                                           FIRST, SECOND, SPLIT)
    if SPLIT:
        left += right * 0.0625
    _store(left, block * 64, unit, expert, operands, KIND, HAS_BIAS, WEIGHTED)
    if SECOND > 0 and not SPLIT:
        _store(right, block * 64 + 128, unit, expert, operands, KIND, HAS_BIAS, WEIGHTED)
    return slot, phase


@gluon.jit
def _consume(ring, operands, tile_first_block, tile_blocks, block_expert_ids, blocks_per_unit,
             num_tiles, tiles_per_block, depth_units, PARTITION: gl.constexpr, STAGES: gl.constexpr,
             SPLIT: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
             WEIGHTED: gl.constexpr):
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group = tile // tiles_per_block
        unit = 2 * (tile % tiles_per_block) + PARTITION
        block = gl.load(tile_first_block + group)
        width = gl.load(tile_blocks + group)
        expert = gl.load(block_expert_ids + block // blocks_per_unit)
        if SPLIT:
            if width == 2:
                slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                    PARTITION, STAGES, 128, 128, True, KIND, HAS_BIAS, WEIGHTED)
            else:
                slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                    PARTITION, STAGES, 64, 64, True, KIND, HAS_BIAS, WEIGHTED)
        elif width == 4:
            slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                PARTITION, STAGES, 128, 128, False, KIND, HAS_BIAS, WEIGHTED)
        elif width == 3:
            slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                PARTITION, STAGES, 128, 64, False, KIND, HAS_BIAS, WEIGHTED)
        elif width == 2:
            slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                PARTITION, STAGES, 128, 0, False, KIND, HAS_BIAS, WEIGHTED)
        else:
            slot, phase = _tile(ring, slot, phase, depth_units, block, unit, expert, operands,
                                PARTITION, STAGES, 64, 0, False, KIND, HAS_BIAS, WEIGHTED)


@gluon.jit(do_not_specialize=["tiles_per_block", "row_units", "depth_units", "num_tokens",
                              "low_rows", "blocks_per_unit"])
def _moe_gemm_prefill_kernel(
        out, code_desc, shift_desc, x_desc, reference, bias, x_scale, routed_weights,
        sorted_token_ids, block_expert_ids, tile_first_block, tile_blocks, num_groups, param_first,
        param_second, num_tokens, low_rows, num_outputs, tiles_per_block, row_units, depth_units,
        blocks_per_unit, STAGES: gl.constexpr, SPLIT: gl.constexpr, KIND: gl.constexpr,
        HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, num_warps: gl.constexpr):
    """out [P, num_outputs] for every tile; see the module docstring for the schedule.

    tile_first_block, tile_blocks [groups] and num_groups [1] come from `schedule`; KIND and
    low_rows as in the decode kernel.
    """
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 128], code_desc.layout)
    shifts = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 32], shift_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    wait_then_release()
    num_tiles = gl.load(num_groups) * tiles_per_block
    ring = (codes, shifts, x, ready, free)
    operands = (out, reference, bias, x_scale, routed_weights, sorted_token_ids, num_tokens,
                num_outputs, row_units, param_first, param_second)
    gl.warp_specialize(
        [(_consume, (ring, operands, tile_first_block, tile_blocks, block_expert_ids,
                     blocks_per_unit, num_tiles, tiles_per_block, depth_units, 0, STAGES,
                     SPLIT, KIND, HAS_BIAS, WEIGHTED)),
         (_consume, (ring, operands, tile_first_block, tile_blocks, block_expert_ids,
                     blocks_per_unit, num_tiles, tiles_per_block, depth_units, 1, STAGES,
                     SPLIT, KIND, HAS_BIAS, WEIGHTED)),
         (_produce, (ring, code_desc, shift_desc, x_desc, tile_first_block, tile_blocks,
                     block_expert_ids, blocks_per_unit, num_tiles, tiles_per_block, row_units,
                     depth_units, low_rows, STAGES, SPLIT))], [4, 1], [240, 24])
