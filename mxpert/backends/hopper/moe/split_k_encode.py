"""Split-K of stage 1 inside a layer: sum the splits, activate, and encode the rows for stage 2.

One kernel does the work of `finish`'s kernel and of the row-encoding kernel, without storing the
bf16 intermediate. A program holds a row in registers, as the row-encoding kernel does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.activation import gated_activation
from ...common.pdl import BEFORE_WAIT, grid_dependency_wait, launch_dependents
from ..lib.tile_scheduler import reset_tile_counter
from .encode_codes import encode, row_maximum, row_scale, statistic_of
from .encode_steps import step_layout, step_offsets, store_step
from .epilogue import is_real


@gluon.constexpr_function
def _pair_layout(WARPS):
    """As `step_layout`, but a thread has gate and up of four features: eight adjacent values."""
    return gl.BlockedLayout([1, 1, 4, 8], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _load_pairs(pointer, source, mask, WARPS: gl.constexpr):
    """Load interleaved gates and ups, [CHUNKS, 8, 4, 8] float32; 0 where masked."""
    LAYOUT: gl.constexpr = _pair_layout(WARPS)
    WORDS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    source = gl.convert_layout(source, WORDS, assert_trivial=True)
    mask = gl.convert_layout(mask, WORDS, assert_trivial=True)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = 2 * source[:, :, :, None] + place[None, None, None, :]
    return gl.load(
        pointer + offsets, mask=mask[:, :, :, None], other=0.0, cache_modifier=BEFORE_WAIT
    )


@gluon.jit
def _finished_row(
    parts,
    biases,
    weight,
    part_stride,
    splits,
    source,
    mask,
    p0,
    p1,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    CHUNKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Sum the splits of one row in order; return activated features [CHUNKS, 8, 4, 4].

    The features are rounded to bfloat16 and returned as float32.
    """
    pairs = _load_pairs(parts, source, mask, WARPS)
    for split in range(1, splits):
        pairs += _load_pairs(parts + split * part_stride, source, mask, WARPS)
    if WEIGHTED:
        pairs *= weight
    if HAS_BIAS:
        pairs += biases
    gate, up = pairs.reshape([CHUNKS, 8, 4, 4, 2]).split()
    values = gated_activation(gate, up, p0, p1, ACTIVATION).to(gl.bfloat16).to(gl.float32)
    return gl.convert_layout(values, step_layout(WARPS), assert_trivial=True)


@gluon.jit(do_not_specialize=["num_tokens", "depth", "routing_block_m", "splits", "num_rows"])
def _moe_finish_rows_kernel(
    codes,
    scale,
    tile_counter,
    parts,
    bias,
    sorted_weights,
    sorted_token_ids,
    block_expert_ids,
    num_valid,
    p0,
    p1,
    num_tokens,
    depth,
    padded_depth,
    parts_stride,
    routing_block_m,
    splits,
    num_rows,
    FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    INF_BYTE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    CHUNKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One sorted row per program: interleaved gate and up partial sums to an e4m3 row with a scale.

    parts: float32 [splits, num_rows, parts_stride = 2 depth]. FORMAT as in `rows_codes`. The kernel
    is launched after a GEMM. It reads plan and bias before grid_dependency_wait.
    """
    launch_dependents()
    row = gl.program_id(0)
    real = is_real(gl.load(sorted_token_ids + row, cache_modifier=BEFORE_WAIT), num_tokens)
    used = real & (row < gl.load(num_valid, cache_modifier=BEFORE_WAIT))
    source, block, target = step_offsets(0, CHUNKS, num_warps)
    mask = block * 32 < gl.where(used, depth, 0)
    weight = gl.load(sorted_weights + row, cache_modifier=BEFORE_WAIT)
    expert = gl.load(
        block_expert_ids + row // routing_block_m, mask=used, other=0, cache_modifier=BEFORE_WAIT
    )
    biases = 0.0
    if HAS_BIAS:
        biases = _load_pairs(bias + expert.to(gl.int64) * parts_stride, source, mask, num_warps)
    grid_dependency_wait()
    reset_tile_counter(tile_counter)
    if used:
        values = _finished_row(
            parts + row.to(gl.int64) * parts_stride,
            biases,
            weight,
            num_rows.to(gl.int64) * parts_stride,
            splits,
            source,
            mask,
            p0,
            p1,
            ACTIVATION,
            HAS_BIAS,
            WEIGHTED,
            CHUNKS,
            num_warps,
        )
        numbers = statistic_of((values,), FORMAT, False, EMAX, THRESHOLD, INF_BYTE)
        factor, encoding = row_scale(row_maximum(numbers), FORMAT)
        encoded = encode((values,), encoding, FORMAT, False, EMAX, THRESHOLD, INF_BYTE, num_warps)
        store_step(codes, scale, factor, encoded, target, row, padded_depth, num_rows, CHUNKS)
