"""Split-K of stage 1 inside a layer: the parts of a row become the row that stage 2 multiplies.

The kernel of `finish` that sums and activates, and the row kernel after it, in one launch and
without the intermediate in memory. A program holds a row in registers, as the row kernels do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..dependent import EARLY, release_next, wait_for_previous
from ..triton.epilogue import gated_activation
from .claims import reset_claims
from .rows_kernels import (
    _kept_row, _largest_bits, _power_of_two, _split_exponent, _step_layout, _step_offsets,
    _store_slots, _store_split,
)
from .rows_quantize import _encode, _row_scale, _row_statistic


@gluon.constexpr_function
def _pair_layout(WARPS):
    """`_step_layout` with gate and up of four features, eight adjacent values."""
    return gl.BlockedLayout([1, 1, 4, 8], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _load_pairs(pointer, source, mask, WARPS: gl.constexpr):
    """Interleaved gates and ups, [CHUNKS, 8, 4, 8]; zero where masked."""
    LAYOUT: gl.constexpr = _pair_layout(WARPS)
    WORDS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    source = gl.convert_layout(source, WORDS, assert_trivial=True)
    mask = gl.convert_layout(mask, WORDS, assert_trivial=True)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = 2 * source[:, :, :, None] + place[None, None, None, :]
    return gl.load(pointer + offsets, mask=mask[:, :, :, None], other=0.0, cache_modifier=EARLY)


@gluon.jit
def _finished_row(parts, biases, weight, part_stride, splits, source, mask, p0, p1,
                  ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
                  CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Activated features [CHUNKS, 8, 4, 4] of one row, rounded to bfloat16; parts are added in
    order."""
    pairs = _load_pairs(parts, source, mask, WARPS)
    for split in range(1, splits):
        pairs += _load_pairs(parts + split * part_stride, source, mask, WARPS)
    if WEIGHTED:
        pairs *= weight
    if HAS_BIAS:
        pairs += biases
    gate, up = pairs.reshape([CHUNKS, 8, 4, 4, 2]).split()
    values = gated_activation(gate, up, p0, p1, ACTIVATION).to(gl.bfloat16).to(gl.float32)
    return gl.convert_layout(values, _step_layout(WARPS), assert_trivial=True)


@gluon.jit(do_not_specialize=["num_tokens", "depth", "routing_block_m", "splits", "num_rows"])
def _moe_finish_rows_kernel(codes, scale, claimed, parts, bias, sorted_weights, sorted_token_ids,
                            block_expert_ids, num_valid, p0, p1, num_tokens, depth, padded_depth,
                            parts_stride, routing_block_m, splits, num_rows, FORMAT: gl.constexpr,
                            EMAX: gl.constexpr, THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr,
                            ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
                            WEIGHTED: gl.constexpr, CHUNKS: gl.constexpr, num_warps: gl.constexpr):
    """Row of interleaved gate and up parts → e4m3 row with its scale, one program a sorted row.

    parts float32 [splits, num_rows, parts_stride = 2 depth]. FORMAT "split": hi and lo as in
    `_moe_split_rows_kernel`, else as in `_moe_quantize_rows_kernel`. Follows a GEMM: the plan and
    the bias are read before its sums are there.
    """
    release_next()
    row = gl.program_id(0)
    kept = _kept_row(row, sorted_token_ids, num_tokens)
    used = (kept >= 0) & (row < gl.load(num_valid, cache_modifier=EARLY))
    source, block, target = _step_offsets(0, CHUNKS, num_warps)
    mask = block * 32 < gl.where(used, depth, 0)
    weight = gl.load(sorted_weights + row, cache_modifier=EARLY)
    expert = gl.load(block_expert_ids + row // routing_block_m, mask=used, other=0,
                     cache_modifier=EARLY)
    biases = 0.0
    if HAS_BIAS:
        biases = _load_pairs(bias + expert.to(gl.int64) * parts_stride, source, mask, num_warps)
    wait_for_previous()
    reset_claims(claimed)
    if used:
        values = _finished_row(parts + row.to(gl.int64) * parts_stride, biases, weight,
                               num_rows.to(gl.int64) * parts_stride, splits, source, mask, p0, p1,
                               ACTIVATION, HAS_BIAS, WEIGHTED, CHUNKS, num_warps)
        if FORMAT == "split":
            bits = _largest_bits(values)
            exponent = _split_exponent(bits)
            factor = gl.where(bits >= 0x7F800000, float("nan"), _power_of_two(exponent))
            _store_split(codes, scale, factor, _power_of_two(254 - exponent), values, target,
                         codes, 0, 1, row, padded_depth, num_rows, False, CHUNKS)
        else:
            HEADROOM: gl.constexpr = 6 if FORMAT == "e2m1" else 0
            statistic = _row_statistic(values, FORMAT, EMAX, THRESHOLD, INF_BYTE)
            factor, encoding = _row_scale(statistic, FORMAT, HEADROOM)
            _store_slots(codes, scale, factor, _encode(values, encoding, FORMAT, HEADROOM, EMAX,
                                                       THRESHOLD, INF_BYTE),
                         target, codes, 0, 1, row, padded_depth, False, CHUNKS)
