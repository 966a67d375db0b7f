"""bf16 rows quantised for the FP8 GEMMs in one pass: per token, or MX blocks and their rebase.

The MX formats end in the bits that `quantize` followed by `_moe_rebase_rows_kernel` leaves: a value
is rounded to its block's code first, then to the row's. Rounding happens in float32 (adding and
subtracting a power of two), since a conversion to e4m3 and back in one expression is miscompiled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..dependent import wait_then_release
from ..triton.quantize_kernels import e8m0_scale, inverse_scale
from .claims import reset_claims
from .rows_kernels import (
    _kept_row, _largest_bits, _load_words, _maximum, _power_of_two, _step_offsets, _store_slots,
)

_SMALLEST_AMAX = gl.constexpr(0x04E00000)
"""Bits of 448 * 2^-126: a smaller maximum has the smallest scale that is a normal float32."""


@gluon.jit
def _token_scale(bits):
    """Scale of a row whose largest magnitude has these float32 bits, and the factor of its values;
    see `formats.token`."""
    amax = gl.maximum(bits, _SMALLEST_AMAX).to(gl.float32, bitcast=True)
    largest = gl.to_tensor(448.0)
    scale = gl.where(bits == 0, 1.0, gl.div_rn(amax, largest))
    return gl.where(bits >= 0x7F800000, float("nan"), scale), gl.div_rn(largest, amax)


@gluon.jit
def _block_bytes(values, EMAX: gl.constexpr, THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr):
    """E8M0 bytes of one step's blocks, [CHUNKS, 1, 4, 1], and those that count for the row: blocks
    of zeros do not, NaN does."""
    bits = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    bits = gl.reduce(gl.reduce(bits, 3, _maximum), 1, _maximum)
    bits = gl.expand_dims(gl.expand_dims(bits, 1), 3)
    scales = e8m0_scale(bits, EMAX, THRESHOLD, INF_BYTE)
    return scales, gl.where(bits == 0, 0, scales)


@gluon.jit
def _largest_byte(counts):
    """Largest byte of one step's blocks."""
    return gl.reduce(gl.reduce(gl.reduce(gl.reduce(counts, 3, _maximum), 2, _maximum), 1,
                               _maximum), 0, _maximum)


@gluon.jit
def _round_to_element(values, PACKED: gl.constexpr):
    """float32 values of the nearest e4m3 (PACKED: e2m1) numbers, ties to even, saturating."""
    LARGEST: gl.constexpr = 6.0 if PACKED else 448.0
    MANTISSA: gl.constexpr = 1 if PACKED else 3
    SMALLEST: gl.constexpr = (127 if PACKED else 121) << 23  # the first normal binade
    size = gl.minimum(gl.abs(values), LARGEST)
    binade = gl.maximum(size.to(gl.int32, bitcast=True) & 0x7F800000, SMALLEST)
    # A float32 of this size has just the element's mantissa bits for what is added to it.
    offset = (binade + ((23 - MANTISSA) << 23)).to(gl.float32, bitcast=True)
    bits = ((size + offset) - offset).to(gl.int32, bitcast=True)
    return (bits | (values.to(gl.int32, bitcast=True) & -0x80000000)).to(gl.float32, bitcast=True)


@gluon.jit
def _row_statistic(values, FORMAT: gl.constexpr, EMAX: gl.constexpr, THRESHOLD: gl.constexpr,
                   INF_BYTE: gl.constexpr):
    """What a step contributes to the row's scale: bits of its maximum, or its largest byte."""
    if FORMAT == "token":
        return _largest_bits(values)
    else:
        _, counts = _block_bytes(values, EMAX, THRESHOLD, INF_BYTE)
        return _largest_byte(counts)


@gluon.jit
def _row_scale(statistic, FORMAT: gl.constexpr, HEADROOM: gl.constexpr):
    """The row's scale, and what its values are encoded by: a factor, or a base for block bytes."""
    if FORMAT == "token":
        return _token_scale(statistic)
    else:
        base = gl.maximum(statistic, 1 + HEADROOM)
        scale = gl.where(statistic == 255, float("nan"), _power_of_two(base - HEADROOM))
        return scale, base


@gluon.jit
def _encode(values, encoding, FORMAT: gl.constexpr, HEADROOM: gl.constexpr, EMAX: gl.constexpr,
            THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr):
    """e4m3 codes of one step, `encoding` being the second result of `_row_scale`."""
    if FORMAT == "token":
        return (values * encoding).to(gl.float8e4nv)
    else:
        scales, _ = _block_bytes(values, EMAX, THRESHOLD, INF_BYTE)
        rounded = _round_to_element(values * inverse_scale(scales), FORMAT == "e2m1")
        # Clamped as in `_store_rebased`.
        exponent = gl.minimum(gl.maximum(127 + HEADROOM + scales - encoding, 1), 254)
        return (rounded * _power_of_two(exponent)).to(gl.float8e4nv)


@gluon.jit
def _quantize_row(codes, scale, x, first, slot_rows, first_slot, num_slots, row, depth,
                  padded_depth, SCATTER: gl.constexpr, SINGLE: gl.constexpr, FORMAT: gl.constexpr,
                  EMAX: gl.constexpr, THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr,
                  CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """One bf16 row, whose `first` step is loaded; SINGLE: it is all there is, and stays in
    registers."""
    HEADROOM: gl.constexpr = 6 if FORMAT == "e2m1" else 0  # as in `_encode_rebased`
    source, block, target = _step_offsets(0, CHUNKS, WARPS)
    values = first.to(gl.float32)
    statistic = _row_statistic(values, FORMAT, EMAX, THRESHOLD, INF_BYTE)
    steps = gl.cdiv(padded_depth, CHUNKS * 128)
    if not SINGLE:
        for step in range(1, steps):
            source, block, _ = _step_offsets(step, CHUNKS, WARPS)
            more = _load_words(x, source, block * 32 < depth, WARPS).to(gl.float32)
            statistic = gl.maximum(statistic, _row_statistic(more, FORMAT, EMAX, THRESHOLD,
                                                             INF_BYTE))
    factor, encoding = _row_scale(statistic, FORMAT, HEADROOM)
    _store_slots(codes, scale, factor, _encode(values, encoding, FORMAT, HEADROOM, EMAX, THRESHOLD,
                                               INF_BYTE),
                 target, slot_rows, first_slot, num_slots, row, padded_depth, SCATTER, CHUNKS)
    if not SINGLE:
        for step in range(1, steps):
            source, block, target = _step_offsets(step, CHUNKS, WARPS)
            values = _load_words(x, source, block * 32 < depth, WARPS).to(gl.float32)
            _store_slots(codes, scale, factor, _encode(values, encoding, FORMAT, HEADROOM, EMAX,
                                                       THRESHOLD, INF_BYTE),
                         target, slot_rows, first_slot, num_slots, row, padded_depth, SCATTER,
                         CHUNKS)


@gluon.jit(do_not_specialize=["num_tokens", "top_k", "slots", "depth", "rows"])
def _moe_quantize_rows_kernel(codes, scale, claimed, x, slot_rows, sorted_token_ids, num_valid,
                              num_tokens, top_k, slots, depth, padded_depth, x_stride, rows,
                              SCATTER: gl.constexpr, SINGLE: gl.constexpr, FORMAT: gl.constexpr,
                              EMAX: gl.constexpr, THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr,
                              CHUNKS: gl.constexpr, num_warps: gl.constexpr):
    """bf16 row → e4m3 row with one scale.

    FORMAT "token": ``scale = amax / 448``. "e4m3", "e2m1": MX blocks by a scale rule, whose codes
    shift by their block's scale deficit; a power of two. SCATTER as in `_moe_split_rows_kernel`;
    without it a program encodes `rows` sorted rows, and asks for each while it encodes the one
    before.
    """
    wait_then_release()
    reset_claims(claimed)
    program = gl.program_id(0)
    source, block, _target = _step_offsets(0, CHUNKS, num_warps)
    mask = block * 32 < depth
    if SCATTER:
        x += (program * slots // top_k).to(gl.int64) * x_stride
        _quantize_row(codes, scale, x, _load_words(x, source, mask, num_warps), slot_rows,
                      program * slots, slots, program, depth, padded_depth, True, SINGLE, FORMAT,
                      EMAX, THRESHOLD, INF_BYTE, CHUNKS, num_warps)
    else:
        first = program * rows
        count = gl.minimum(gl.load(num_valid) - first, rows)
        x += first.to(gl.int64) * x_stride
        following = _load_words(x, source, mask & (count > 0), num_warps)
        for index in range(count):
            row = _kept_row(first + index, sorted_token_ids, num_tokens)
            values = following
            following = _load_words(x + x_stride, source, mask & (index + 1 < count), num_warps)
            _quantize_row(codes, scale, x, values, slot_rows, 0, 1, row, depth, padded_depth,
                          False, SINGLE, FORMAT, EMAX, THRESHOLD, INF_BYTE, CHUNKS, num_warps)
            x += x_stride
