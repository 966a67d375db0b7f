"""Encoding of activations for the FP8 GEMMs: a CTA holds a row, K permuted as the weights' is.

A step covers CHUNKS * 128 values as [chunk, q h, t, j]: source order is (t, q h, j), storage
order (q h, t, j), see `formats.layouts`. A thread owns 16 stored bytes, gathered by four loads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..dependent import EARLY, wait_then_release
from .claims import reset_claims

_TOKEN_MASK = gl.constexpr((1 << 24) - 1)


@gluon.constexpr_function
def _step_layout(WARPS):
    return gl.BlockedLayout([1, 1, 4, 4], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _step_offsets(step, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Offsets of one step: of each block's word [CHUNKS, 8, 4] in the source with the block itself,
    and of each thread's 16 bytes [CHUNKS, 8] in the target."""
    LAYOUT: gl.constexpr = _step_layout(WARPS)
    NO_BYTE: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    NO_BLOCK: gl.constexpr = gl.SliceLayout(2, NO_BYTE)
    chunk = step * CHUNKS + gl.arange(0, CHUNKS, gl.SliceLayout(1, NO_BLOCK))[:, None]
    word = gl.arange(0, 8, gl.SliceLayout(0, NO_BLOCK))[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, NO_BYTE)))[None, None, :]
    block = (chunk * 4 + word * 0)[:, :, None] + block
    return block * 32 + (word * 4)[:, :, None], block, chunk * 128 + word * 16


@gluon.jit
def _load_words(x, source, mask, WARPS: gl.constexpr):
    """Four adjacent values per word, [CHUNKS, 8, 4, 4]; zero where masked."""
    LAYOUT: gl.constexpr = _step_layout(WARPS)
    byte = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = source[:, :, :, None] + byte[None, None, None, :]
    return gl.load(x + offsets, mask=mask[:, :, :, None], other=0.0)


@gluon.jit
def _store_step(codes, values, target, padded_depth, CHUNKS: gl.constexpr):
    """e4m3 codes of one step, 16 bytes a thread."""
    flat = values.reshape([CHUNKS, 8, 16])
    offsets = gl.convert_layout(target, gl.SliceLayout(2, flat.type.layout), assert_trivial=True)
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, flat.type.layout)))
    gl.store(codes + offsets[:, :, None] + byte[None, None, :], flat,
             mask=(offsets < padded_depth)[:, :, None])


@gluon.jit
def _store_slots(codes, scale, factor, values, target, slot_rows, first_slot, num_slots, row,
                 padded_depth, SCATTER: gl.constexpr, CHUNKS: gl.constexpr):
    """e4m3 codes of one step into sorted row `row`, or the rows of all slots of a token."""
    for slot in range(num_slots):
        if SCATTER:
            row = gl.load(slot_rows + first_slot + slot)
        if row >= 0:
            gl.store(scale + row, factor)
            _store_step(codes + row.to(gl.int64) * padded_depth, values, target, padded_depth,
                        CHUNKS)


@gluon.jit
def _power_of_two(exponent_byte):
    """2^(byte - 127) for bytes 1..254."""
    return (exponent_byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _round_to_e4m3(values):
    """float32 with e4m3's precision: 4 significant bits, or multiples of 2^-9 below 2^-6."""
    bits = values.to(gl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # 1.5 * 2^14: adding it leaves float32 just the multiples of 2^-9.
    subnormal = (values + 24576.0) - 24576.0
    return gl.where(gl.abs(values) < 0.015625, subnormal, normal.to(gl.float32, bitcast=True))


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _split_exponent(bits):
    """Scale exponent byte for a row whose largest magnitude has these float32 bits.

    The scaled maximum is at most 448 = 1.75 * 2^8.
    """
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    return gl.minimum(gl.maximum(exponent, 1), 253)


@gluon.jit
def _largest_bits(values):
    """float32 bits of the largest magnitude of one step."""
    bits = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.reduce(gl.reduce(gl.reduce(gl.reduce(bits, 3, _maximum), 2, _maximum), 1, _maximum),
                     0, _maximum)


@gluon.jit
def _store_split(codes, scale, factor, inverse, values, target, slot_rows, first_slot, num_slots,
                 row, padded_depth, num_rows, SCATTER: gl.constexpr, CHUNKS: gl.constexpr):
    """hi and lo of one step, into sorted row `row` or the rows of all slots of a token."""
    values = values * inverse
    hi = _round_to_e4m3(values)
    lo = ((values - hi) * 16.0).to(gl.float8e4nv)
    hi = hi.to(gl.float8e4nv)
    for slot in range(num_slots):
        if SCATTER:
            row = gl.load(slot_rows + first_slot + slot)
        if row >= 0:
            hi_row = codes + row.to(gl.int64) * padded_depth
            gl.store(scale + row, factor)
            _store_step(hi_row, hi, target, padded_depth, CHUNKS)
            _store_step(hi_row + num_rows.to(gl.int64) * padded_depth, lo, target, padded_depth,
                        CHUNKS)


@gluon.jit
def _encode_split(codes, scale, x, first, slot_rows, first_slot, num_slots, row, depth,
                  padded_depth, num_rows, SCATTER: gl.constexpr, SINGLE: gl.constexpr,
                  CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """One bf16 row, whose `first` step is loaded; SINGLE: it is all there is, and stays in
    registers."""
    source, block, target = _step_offsets(0, CHUNKS, WARPS)
    values = first.to(gl.float32)
    bits = _largest_bits(values)
    steps = gl.cdiv(padded_depth, CHUNKS * 128)
    if not SINGLE:
        for step in range(1, steps):
            source, block, _ = _step_offsets(step, CHUNKS, WARPS)
            more = _load_words(x, source, block * 32 < depth, WARPS).to(gl.float32)
            bits = gl.maximum(bits, _largest_bits(more))
    exponent = _split_exponent(bits)
    factor = gl.where(bits >= 0x7F800000, float("nan"), _power_of_two(exponent))
    inverse = _power_of_two(254 - exponent)
    _store_split(codes, scale, factor, inverse, values, target, slot_rows, first_slot, num_slots,
                 row, padded_depth, num_rows, SCATTER, CHUNKS)
    if not SINGLE:
        for step in range(1, steps):
            source, block, target = _step_offsets(step, CHUNKS, WARPS)
            values = _load_words(x, source, block * 32 < depth, WARPS).to(gl.float32)
            _store_split(codes, scale, factor, inverse, values, target, slot_rows, first_slot,
                         num_slots, row, padded_depth, num_rows, SCATTER, CHUNKS)


@gluon.jit
def _kept_row(program, sorted_token_ids, num_tokens):
    """The program's own sorted row, or -1 where it is padding."""
    token = gl.load(sorted_token_ids + program, cache_modifier=EARLY) & _TOKEN_MASK
    return gl.where(token < num_tokens, program, -1)


@gluon.jit(do_not_specialize=["num_tokens", "top_k", "slots", "depth", "num_rows", "rows"])
def _moe_split_rows_kernel(codes, scale, claimed, x, slot_rows, sorted_token_ids, num_valid,
                           num_tokens, top_k, slots, depth, padded_depth, num_rows, x_stride, rows,
                           SCATTER: gl.constexpr, SINGLE: gl.constexpr, CHUNKS: gl.constexpr,
                           num_warps: gl.constexpr):
    """bf16 row → hi and lo e4m3 rows with ``x = scale * (hi + lo / 16)``, 448 the largest hi.

    SCATTER: a program encodes one token for `slots` of its top_k slots, else `rows` sorted rows,
    and asks for each while it encodes the one before. NaN and infinity give a NaN scale.
    """
    wait_then_release()
    reset_claims(claimed)
    program = gl.program_id(0)
    source, block, _target = _step_offsets(0, CHUNKS, num_warps)
    mask = block * 32 < depth
    if SCATTER:
        x += (program * slots // top_k).to(gl.int64) * x_stride
        _encode_split(codes, scale, x, _load_words(x, source, mask, num_warps), slot_rows,
                      program * slots, slots, program, depth, padded_depth, num_rows, True, SINGLE,
                      CHUNKS, num_warps)
    else:
        first_row = program * rows
        count = gl.minimum(gl.load(num_valid) - first_row, rows)
        x += first_row.to(gl.int64) * x_stride
        following = _load_words(x, source, mask & (count > 0), num_warps)
        for index in range(count):
            row = _kept_row(first_row + index, sorted_token_ids, num_tokens)
            values = following
            following = _load_words(x + x_stride, source, mask & (index + 1 < count), num_warps)
            _encode_split(codes, scale, x, values, slot_rows, 0, 1, row, depth, padded_depth,
                          num_rows, False, SINGLE, CHUNKS, num_warps)
            x += x_stride


@gluon.jit
def _load_codes(x, x_scale, step, mask, PACKED: gl.constexpr, CHUNKS: gl.constexpr,
                WARPS: gl.constexpr):
    """One step of MX codes and their scale bytes, as they are loaded."""
    source, block, _ = _step_offsets(step, CHUNKS, WARPS)
    scales = gl.load(x_scale + block, mask=mask, other=0)
    if PACKED:  # four codes in two bytes, low nibble first
        pairs = (x + source // 2).cast(gl.pointer_type(gl.uint16))
        return gl.load(pairs, mask=mask, other=0), scales
    else:
        return _load_words(x, source, mask, WARPS), scales


@gluon.jit
def _values_of(codes, PACKED: gl.constexpr, WARPS: gl.constexpr):
    """Loaded codes [CHUNKS, 8, 4, 4] as float32, without their scales."""
    if PACKED:
        LAYOUT: gl.constexpr = _step_layout(WARPS)
        place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
        code = codes.to(gl.int32)[:, :, :, None] >> (place * 4)[None, None, None, :]
        magnitude = code & 7
        normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
        bits = gl.where(magnitude > 1, normal, magnitude * 0x3F000000)
        return (bits | ((code & 8) << 28)).to(gl.float32, bitcast=True)
    else:
        return codes.to(gl.float32)


@gluon.jit
def _largest_scale(values, scales):
    """Largest scale byte of one step's blocks; blocks of zeros have no say, NaN scales do."""
    counts = gl.where((values != 0.0) | (scales == 255), scales, 0)
    return gl.reduce(gl.reduce(gl.reduce(gl.reduce(counts, 3, _maximum), 2, _maximum), 1,
                               _maximum), 0, _maximum)


@gluon.jit
def _store_rebased(codes, scale, factor, base, values, scales, target, slot_rows, first_slot,
                   num_slots, row, padded_depth, SCATTER: gl.constexpr, HEADROOM: gl.constexpr,
                   CHUNKS: gl.constexpr):
    """One step with its blocks' scale deficits applied."""
    # Clamped where every code vanishes, and in blocks of zeros with a scale above the base.
    exponent = gl.minimum(gl.maximum(127 + HEADROOM + scales - base, 1), 254)
    _store_slots(codes, scale, factor, (values * _power_of_two(exponent)).to(gl.float8e4nv), target,
                 slot_rows, first_slot, num_slots, row, padded_depth, SCATTER, CHUNKS)


@gluon.jit
def _encode_rebased(codes, scale, x, x_scale, first, slot_rows, first_slot, num_slots, row, depth,
                    padded_depth, SCATTER: gl.constexpr, SINGLE: gl.constexpr,
                    PACKED: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """One MX row, whose `first` step is loaded; SINGLE as in `_encode_split`."""
    HEADROOM: gl.constexpr = 6 if PACKED else 0  # e2m1 reaches 6: 6 * 2^6 uses e4m3's range
    _source, block, target = _step_offsets(0, CHUNKS, WARPS)
    values = _values_of(first[0], PACKED, WARPS)
    scales = first[1].to(gl.int32)[:, :, :, None]
    reference = _largest_scale(values, scales)
    steps = gl.cdiv(padded_depth, CHUNKS * 128)
    if not SINGLE:
        for step in range(1, steps):
            _source, block, _target = _step_offsets(step, CHUNKS, WARPS)
            more, more_scales = _load_codes(x, x_scale, step, block * 32 < depth, PACKED, CHUNKS,
                                            WARPS)
            reference = gl.maximum(reference, _largest_scale(
                _values_of(more, PACKED, WARPS), more_scales.to(gl.int32)[:, :, :, None]))
    base = gl.maximum(reference, 1 + HEADROOM)
    factor = gl.where(reference == 255, float("nan"), _power_of_two(base - HEADROOM))
    _store_rebased(codes, scale, factor, base, values, scales, target, slot_rows, first_slot,
                   num_slots, row, padded_depth, SCATTER, HEADROOM, CHUNKS)
    if not SINGLE:
        for step in range(1, steps):
            _source, block, target = _step_offsets(step, CHUNKS, WARPS)
            more, more_scales = _load_codes(x, x_scale, step, block * 32 < depth, PACKED, CHUNKS,
                                            WARPS)
            _store_rebased(codes, scale, factor, base, _values_of(more, PACKED, WARPS),
                           more_scales.to(gl.int32)[:, :, :, None], target, slot_rows, first_slot,
                           num_slots, row, padded_depth, SCATTER, HEADROOM, CHUNKS)


@gluon.jit(do_not_specialize=["num_tokens", "top_k", "slots", "depth", "x_scale_stride", "rows"])
def _moe_rebase_rows_kernel(codes, scale, claimed, x, x_scale, slot_rows, sorted_token_ids,
                            num_valid, num_tokens, top_k, slots, depth, padded_depth, x_stride,
                            x_scale_stride, rows, SCATTER: gl.constexpr, SINGLE: gl.constexpr,
                            PACKED: gl.constexpr, CHUNKS: gl.constexpr,
                            num_warps: gl.constexpr):
    """MX row → e4m3 row with one power of two: codes shift by their block's scale deficit.

    SCATTER and `rows` as in `_moe_split_rows_kernel`.
    """
    wait_then_release()
    reset_claims(claimed)
    program = gl.program_id(0)
    _, block, _ = _step_offsets(0, CHUNKS, num_warps)
    mask = block * 32 < depth
    if SCATTER:
        token = (program * slots // top_k).to(gl.int64)
        x += token * x_stride
        x_scale += token * x_scale_stride
        _encode_rebased(codes, scale, x, x_scale,
                        _load_codes(x, x_scale, 0, mask, PACKED, CHUNKS, num_warps), slot_rows,
                        program * slots, slots, program, depth, padded_depth, True, SINGLE, PACKED,
                        CHUNKS, num_warps)
    else:
        first = program * rows
        count = gl.minimum(gl.load(num_valid) - first, rows)
        x += first.to(gl.int64) * x_stride
        x_scale += first.to(gl.int64) * x_scale_stride
        following = _load_codes(x, x_scale, 0, mask & (count > 0), PACKED, CHUNKS, num_warps)
        for index in range(count):
            row = _kept_row(first + index, sorted_token_ids, num_tokens)
            values, scales = following
            following = _load_codes(x + x_stride, x_scale + x_scale_stride, 0,
                                    mask & (index + 1 < count), PACKED, CHUNKS, num_warps)
            _encode_rebased(codes, scale, x, x_scale, (values, scales), slot_rows, 0, 1, row, depth,
                            padded_depth, False, SINGLE, PACKED, CHUNKS, num_warps)
            x += x_stride
            x_scale += x_scale_stride
