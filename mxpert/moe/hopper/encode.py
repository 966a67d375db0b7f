"""Row encoding: activations become sorted rows for the GEMMs, for MXFP4 with K permuted.

There are three encodings as e4m3. Each row has one scale:

- bf16 as hi + lo / 16 in two e4m3 rows: exact for values within 14 binades of the row maximum.
- MX codes: each block of 32 is rebased from its own scale to the largest scale of the row, a power
  of two. This is exact if the code is still an e4m3 number; otherwise the absolute error is at most
  2^-10 of the row's scale. bf16 rows are quantised and rebased in one pass.
- fp8_token: bf16 rows are quantised to e4m3 with one float32 scale per row.

For bf16 tensor cores the same values become bfloat16, times the same scale: exact within 133
binades of the row maximum. For f16 tensor cores they become float16: exact within 25 binades, and
below to 2^-32 of the row maximum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEOptions
from ...device.compat import aggregate
from ...device.hopper import reset_tile_counter
from ...device.hopper_ptx import (
    other_lane,
    quantized_codes,
    rounded_pair,
    scaled_words,
    split_codes,
)
from ...device.mx_codec import e8m0_scale, inverse_scale, scale_rule_constants
from ...device.pdl import PDL_LAUNCH, launch_dependents, wait_and_launch_dependents
from ...formats.layouts import UNIT_CODES
from ...formats.spec import E2M1
from ...formats.tensor import MXTensor
from ...routing.plan import RoutingPlan

# ---- Layout, loads and stores of rows in steps of `chunks` * 128 values.
#
# A step holds `chunks` units of 128 values: a tensor [chunk, q h, t, j] of bfloat16, or a
# `CodedStep` of MX codes. In a unit, t is the MX block (0..3), q h the word of four values inside
# the block (0..7), j the value inside the word. The source has K in the order (t, q h, j), storage
# in (q h, t, j), the permutation of MXFP4 weights (`layout.py`). A thread stores 16 values (t, j)
# side by side and gathers them by four loads. Rows for other weights keep the order of K
# (`RowSteps.in_order`): q h is half of an MX block then, t a word in it. Of rows of 16 bits each 16
# are permuted. 4 t + j is stored at 8 (j // 2) + 2 t + j % 2, where a thread of such a wgmma has
# the codes that it loads as one word of the weights.


@dataclass(frozen=True)
class RowSteps:
    """How a program divides a row. Kernels take it as one constexpr.

    Args:
        chunks: depth units of 128 values in a step, a power of two.
        warps: warps of the program.
        held: steps that the program keeps in registers.
        whole: whether these are all steps of a row.
        in_order: whether stored rows keep the order of K.
    """

    chunks: int
    warps: int
    held: int = 1
    whole: bool = True
    in_order: bool = False


@aggregate
class CodedStep:
    """One step of an MX row: words of four codes [chunks, 8, 4] int32, and their scale bytes."""

    words: gl.tensor
    scales: gl.tensor


@aggregate
class RowsOut:
    """Where encoded rows go: pointers to e4m3 codes and float32 scales.

    padded_depth: codes of a row. num_rows: rows of hi codes; lo codes follow them.
    """

    codes: gl.tensor
    scale: gl.tensor
    padded_depth: gl.tensor
    num_rows: gl.tensor


@gluon.constexpr_function
def step_layout(STEPS):
    """Layout of a step [chunk, q h, t, j]: a thread holds the 16 values that it stores."""
    return gl.BlockedLayout([1, 1, 4, 4], [4, 8, 1, 1], [STEPS.warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def step_offsets(step, STEPS: gl.constexpr):
    """Offsets of one step.

    Returns source offsets of words [chunks, 8, 4], their block indices (same shape), and target
    offsets of each thread's 16 values [chunks, 8].
    """
    LAYOUT: gl.constexpr = step_layout(STEPS)
    NO_BYTE: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    NO_BLOCK: gl.constexpr = gl.SliceLayout(2, NO_BYTE)
    CHUNKS: gl.constexpr = STEPS.chunks
    chunk = step * CHUNKS + gl.arange(0, CHUNKS, gl.SliceLayout(1, NO_BLOCK))[:, None]
    word = gl.arange(0, 8, gl.SliceLayout(0, NO_BLOCK))[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, NO_BYTE)))[None, None, :]
    target = chunk * 128 + word * 16
    if STEPS.in_order:
        source = target[:, :, None] + block * 4
        return source, source // 32, target
    else:
        block = (chunk * 4 + word * 0)[:, :, None] + block  # word * 0 broadcasts to [chunks, 8]
        return block * 32 + (word * 4)[:, :, None], block, target


@gluon.jit
def _load_values(x, source, mask, STEPS: gl.constexpr):
    """Load four adjacent bfloat16 values per word, [chunks, 8, 4, 4]; 0 where masked."""
    LAYOUT: gl.constexpr = step_layout(STEPS)
    byte = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = source[:, :, :, None] + byte[None, None, None, :]
    return gl.load(x + offsets, mask=mask[:, :, :, None], other=0.0)


@gluon.jit
def _load_codes(x, x_scale, source, block, mask, PACKED: gl.constexpr):
    """Load MX codes and their scale bytes as a CodedStep; 0 where masked."""
    scales = gl.load(x_scale + block, mask=mask, other=0).to(gl.int32)
    if PACKED:  # four codes in two bytes, low nibble first
        pairs = (x + source // 2).cast(gl.pointer_type(gl.uint16))
        words = gl.load(pairs, mask=mask, other=0).to(gl.int32)
    else:
        words = gl.load((x + source).cast(gl.pointer_type(gl.int32)), mask=mask, other=0)
    return CodedStep(words, scales)


@gluon.jit
def load_step(x, x_scale, step, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Load one step of the row at `x`: bfloat16 values or a CodedStep; 0 past `depth`.

    FORMAT: a `RowFormat` (see `encode_step`).
    """
    source, block, _target = step_offsets(step, STEPS)
    mask = block * 32 < depth
    if FORMAT.coded:
        return _load_codes(x, x_scale, source, block, mask, PACKED=FORMAT.name == "e2m1")
    else:
        return _load_values(x, source, mask, STEPS)


@gluon.jit
def load_row(x, x_scale, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Load the first `held` steps of a row into a tuple."""
    HELD: gl.constexpr = STEPS.held
    row = ()
    for step in gl.static_range(HELD):
        row += (load_step(x, x_scale, step, depth, FORMAT, STEPS),)  # type: ignore[assignment]
    return row


@gluon.jit
def _store_bytes(codes, values, target, padded_depth):
    """Store e4m3 codes of one step [chunks, 8, 4, 4], 16 bytes a thread."""
    flat = values.reshape([values.shape[0], 8, 16])
    offsets = gl.convert_layout(target, gl.SliceLayout(2, flat.type.layout), assert_trivial=True)
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, flat.type.layout)))
    gl.store(
        codes + offsets[:, :, None] + byte[None, None, :],
        flat,
        mask=(offsets < padded_depth)[:, :, None],
    )


@gluon.jit
def _side_by_side(pairs):
    """Bring pairs of 16-bit values of one step, [chunks, 8, 8] int32, into the order of storage.

    A thread has 32 bytes. It exchanges half of them with its neighbour, so that the 16 bytes that
    both store lie side by side: memory writes sectors of 32 bytes.
    """
    CHUNKS: gl.constexpr = pairs.shape[0]
    pairs = pairs.reshape([CHUNKS, 8, 4, 2]).permute((0, 1, 3, 2)).reshape([CHUNKS, 8, 8])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2, 4], [4, 4, 2], [gl.num_warps(), 1, 1], [2, 1, 0])
    return gl.convert_layout(pairs, LAYOUT)


@gluon.jit
def _store_words(row, words, offsets, padded_depth):
    """Store words [chunks, 8, n] int32 of a row, n side by side from each of offsets [chunks, 8].

    row: pointer to its values. offsets, padded_depth: in values, not in words.
    """
    LAYOUT: gl.constexpr = words.type.layout
    offsets = gl.convert_layout(offsets, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    place = gl.arange(0, words.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    first = (row + offsets).cast(gl.pointer_type(gl.int32))[:, :, None]
    pointers = first + place[None, None, :]
    gl.store(pointers, words, mask=(offsets < padded_depth)[:, :, None])


@gluon.jit
def store_step(out, row, scale, encoded, target):
    """Store the scale and one encoded step of sorted row `row`; `encoded` is (codes,) or (hi, lo).

    out: RowsOut. target: offsets in the row [chunks, 8], from `step_offsets`.
    """
    gl.store(out.scale + row, scale)
    for part in gl.static_range(len(encoded)):
        codes = out.codes + (row + part * out.num_rows).to(gl.int64) * out.padded_depth
        if out.codes.dtype.element_ty.primitive_bitwidth == 16:
            words = _side_by_side(encoded[part])
            offsets = gl.convert_layout(target, gl.SliceLayout(2, words.type.layout))
            _store_words(codes, words, offsets, out.padded_depth)
        elif len(encoded[part].shape) == 3:  # four e4m3 codes a word
            _store_words(codes, encoded[part], target, out.padded_depth)
        else:
            _store_bytes(codes, encoded[part], target, out.padded_depth)


# ---- Encoding of a row as e4m3 codes with one scale, by `RowFormat.name`.
#
# - "hi_lo": bfloat16 to hi and lo with ``x = scale * (hi + lo / 16)``; the largest hi is 448.
# - "token": bfloat16 with ``scale = amax / 448``.
# - "e4m3", "e2m1": MX blocks. The codes of a block are multiplied by the ratio of its scale
# to the
#   row's largest scale, a power of two. If the source is bfloat16, its values are quantised
#   first,
#   bit-exact to `quantize`.
#
# A NaN or an infinity in a row makes its scale NaN.

_SMALLEST_AMAX = gl.constexpr(0x04E00000)
"""Bits of 448 * 2^-126. Smaller maxima are raised to it, so that the scale is a normal float32."""


@dataclass(frozen=True)
class RowFormat:
    """What a row is read from and encoded as. Kernels take it as one constexpr.

    Args:
        name: "hi_lo", "token", "e4m3" or "e2m1"; see above.
        coded: the source is MX codes with scales, and not bfloat16.
        emax, threshold: the scale rule of bfloat16 that becomes MX (see `e8m0_scale`).
        stored: "e4m3", or for tensor cores of 16 bits "bfloat16" or "float16".
    """

    name: str
    coded: bool = False
    emax: int = 0
    threshold: int = 0
    stored: str = "e4m3"


@gluon.constexpr_function
def _headroom(FORMAT):
    """Exponent added to codes: the largest e2m1 value is 6, and 6 * 2^6 uses e4m3's range."""
    return 6 if FORMAT.name == "e2m1" else 0


@gluon.jit
def _power_of_two(exponent_byte):
    """2^(byte - 127) as float32 for bytes 1 … 254."""
    return (exponent_byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _block_bytes(values, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """E8M0 bytes of one step's blocks, [chunks, 1, 4, 1]; in order [chunks, 8, 1, 1], twice each.

    Returns them twice: unchanged, and with 0 for blocks of zeros, for the row's maximum.
    """
    bits = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    bits = gl.reduce(bits, 3, _maximum)
    if STEPS.in_order:
        bits = gl.reduce(bits, 2, _maximum)
        bits = gl.maximum(bits, other_lane(bits))  # the other half of the block is in it
        bits = gl.expand_dims(gl.expand_dims(bits, 2), 3)
    else:
        bits = gl.reduce(bits, 1, _maximum)
        bits = gl.expand_dims(gl.expand_dims(bits, 1), 3)
    scales = e8m0_scale(bits, FORMAT.emax, FORMAT.threshold)
    return scales, gl.where(bits == 0, 0, scales)


@gluon.jit
def statistic_of(step, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Integers of a step whose maximum over the row determines the row's scale.

    For "hi_lo" and "token" these are the bits of magnitudes, which order like the magnitudes, with
    infinity and NaN last. For MX formats they are the scale bytes of blocks.
    """
    if FORMAT.coded:
        # All bits of a word's codes but their signs: a block of zeros does not count, unless NaN.
        MAGNITUDES: gl.constexpr = 0x7777 if FORMAT.name == "e2m1" else 0x7F7F7F7F
        counts = ((step.words & MAGNITUDES) != 0) | (step.scales == 255)
        return gl.where(counts, step.scales, 0)
    elif FORMAT.name == "hi_lo" or FORMAT.name == "token":
        return step.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        _, counts = _block_bytes(step.to(gl.float32), FORMAT, STEPS)
        return counts


@gluon.jit
def row_maximum(numbers):
    """Maximum of a 3-D or 4-D tensor, as a scalar."""
    if len(numbers.shape) == 4:
        numbers = gl.reduce(numbers, 3, _maximum)
    return gl.reduce(gl.reduce(gl.reduce(numbers, 2, _maximum), 1, _maximum), 0, _maximum)


@gluon.jit
def _hi_lo_scale(bits):
    """Scale of a row and its inverse, from the float32 bits of the row's largest magnitude.

    Both are powers of two. The scaled maximum is at most 448 = 1.75 * 2^8.
    """
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    scale = gl.where(bits >= 0x7F800000, float("nan"), _power_of_two(exponent))
    return scale, _power_of_two(254 - exponent)


@gluon.jit
def _token_scale(bits):
    """Scale of a row and the factor of its values; see `formats.token`.

    bits: float32 bits of the row's largest magnitude.
    """
    amax = gl.maximum(bits, _SMALLEST_AMAX).to(gl.float32, bitcast=True)
    largest = gl.to_tensor(448.0)
    scale = gl.where(bits == 0, 1.0, gl.div_rn(amax, largest))
    return gl.where(bits >= 0x7F800000, float("nan"), scale), gl.div_rn(largest, amax)


@gluon.jit
def row_scale(statistic, FORMAT: gl.constexpr):
    """The row's scale, and `encoding` of `encode_step`: a factor, or for MX the base scale byte."""
    HEADROOM: gl.constexpr = _headroom(FORMAT)
    if FORMAT.name == "hi_lo":
        return _hi_lo_scale(statistic)
    elif FORMAT.name == "token":
        return _token_scale(statistic)
    else:
        base = gl.maximum(statistic, 1 + HEADROOM)
        return gl.where(statistic == 255, float("nan"), _power_of_two(base - HEADROOM)), base


@gluon.jit
def _round_to_e2m1(values):
    """Round float32 values to the nearest e2m1 values, ties to even, saturating."""
    size = gl.minimum(gl.abs(values), 6.0)
    binade = gl.maximum(size.to(gl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    # Adding this offset leaves one mantissa bit of `size`, and subtracting it restores the value.
    offset = (binade + (22 << 23)).to(gl.float32, bitcast=True)
    bits = ((size + offset) - offset).to(gl.int32, bitcast=True)
    return (bits | (values.to(gl.int32, bitcast=True) & -0x80000000)).to(gl.float32, bitcast=True)


@gluon.jit
def _e2m1_values(words, STEPS: gl.constexpr):
    """Decode four e2m1 codes of each word to float32, [chunks, 8, 4, 4]."""
    LAYOUT: gl.constexpr = step_layout(STEPS)
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    code = words[:, :, :, None] >> (place * 4)[None, None, None, :]
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = gl.where(magnitude > 1, normal, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(gl.float32, bitcast=True)


@gluon.jit
def _block_power(scales, base, FORMAT: gl.constexpr):
    """Power of two that multiplies the codes of a block.

    It is clamped below if all codes become zero, and above for blocks of zeros, whose scale may be
    larger than the base.
    """
    HEADROOM: gl.constexpr = _headroom(FORMAT)
    return _power_of_two(gl.minimum(gl.maximum(127 + HEADROOM + scales - base, 1), 127 + HEADROOM))


@gluon.jit
def _e4m3_values(words, STEPS: gl.constexpr):
    """Decode four e4m3 codes of each word to float32, [chunks, 8, 4, 4]."""
    LAYOUT: gl.constexpr = step_layout(STEPS)
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    codes = words[:, :, :, None] >> (place * 8)[None, None, None, :]
    return codes.to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float32)


@gluon.jit
def _ones_like(values):
    return gl.full(values.shape, 1.0, gl.float32, values.type.layout)


@gluon.jit
def _pairs_step(step, encoding, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Values of one step times the row's inverse scale, in pairs of 16 bits [chunks, 8, 8]."""
    PACKED: gl.constexpr = FORMAT.name == "e2m1"
    if FORMAT.coded:
        power = _block_power(step.scales, encoding, FORMAT)[:, :, :, None]
        decode: gl.constexpr = _e2m1_values if PACKED else _e4m3_values
        values = decode(step.words, STEPS) * power
    elif FORMAT.name == "hi_lo":
        values = step.to(gl.float32) * encoding
    elif FORMAT.name == "token":
        values = step.to(gl.float32) * encoding
        values = quantized_codes(values, _ones_like(values), _ones_like(values)).to(gl.float32)
    else:
        values = step.to(gl.float32)
        scales, _ = _block_bytes(values, FORMAT, STEPS)
        power, inverse = _block_power(scales, encoding, FORMAT), inverse_scale(scales)
        if PACKED:
            values = _round_to_e2m1(values * inverse) * power
        else:
            codes = quantized_codes(values, inverse, _ones_like(values))
            values = codes.to(gl.float32) * power
    first, second = values.reshape([values.shape[0], 8, 8, 2]).split()
    STORED: gl.constexpr = FORMAT.stored
    return rounded_pair(first, second, STORED)


@gluon.jit
def encode_step(step, encoding, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Encode one step: a tuple of e4m3 codes, (hi, lo) for "hi_lo", or of pairs of 16 bits.

    `encoding` is the second result of `row_scale`.
    """
    PACKED: gl.constexpr = FORMAT.name == "e2m1"
    if FORMAT.stored != "e4m3":
        return (_pairs_step(step, encoding, FORMAT, STEPS),)
    elif FORMAT.coded:
        power = _block_power(step.scales, encoding, FORMAT)
        if PACKED:
            values = _e2m1_values(step.words, STEPS) * power[:, :, :, None]
            return (values.to(gl.float8e4nv),)
        else:
            return (scaled_words(step.words, power),)
    elif FORMAT.name == "hi_lo":
        return split_codes(step.to(gl.float32) * encoding)
    elif FORMAT.name == "token":
        return ((step.to(gl.float32) * encoding).to(gl.float8e4nv),)
    else:
        values = step.to(gl.float32)
        scales, _ = _block_bytes(values, FORMAT, STEPS)
        power, inverse = _block_power(scales, encoding, FORMAT), inverse_scale(scales)
        if PACKED:
            return ((_round_to_e2m1(values * inverse) * power).to(gl.float8e4nv),)
        else:
            return (quantized_codes(values, inverse, power),)


_STORED = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MAX_CHUNKS = 64
"""Most depth units of 128 values per step: 8192 values, 32 a thread."""

_CHUNKS_PER_WARP = 4

_ROW_VALUES = 16384
"""Values that a program encodes if there are many rows; it prefetches its next row."""

_MANY_PROGRAMS = 4096
"""Programs that fill the GPU; with fewer rows than this, each row has its own program."""

_MOST_STEPS = 4
"""Most steps of a row in registers: 16 values a thread and step, and as many for the next row."""

_PARALLEL_TOKENS = 32
"""Up to this many tokens each slot has its own program: SMs are free, and latency is the limit."""


@aggregate
class Targets:
    """Sorted rows that get a row of the source.

    If num_slots is 0 it is `row`, nothing if `row` is −1. Otherwise these are the rows of num_slots
    slots from first_slot on; `slot_rows` points to the row of each slot, −1 for absent ones.
    """

    row: gl.tensor
    slot_rows: gl.tensor
    first_slot: gl.tensor
    num_slots: gl.tensor


@gluon.jit
def _store_slots(out, targets, scale, encoded, step, STEPS: gl.constexpr):
    """Store step number `step` of an encoded row to all its targets."""
    _source, _block, offsets = step_offsets(step, STEPS)
    row = targets.row
    for slot in range(gl.maximum(targets.num_slots, 1)):
        if targets.num_slots > 0:
            row = gl.load(targets.slot_rows + targets.first_slot + slot)
        if row >= 0:
            store_step(out, row, scale, encoded, offsets)


@gluon.jit
def _encode_row(out, targets, x, x_scale, held, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Encode and store the row at `x`. `held` has its first steps, all of them if STEPS.whole.

    Further steps are loaded twice: for the row's scale, and to be encoded.
    """
    HELD: gl.constexpr = STEPS.held
    steps = gl.cdiv(out.padded_depth, STEPS.chunks * 128)
    for index in gl.static_range(HELD):
        found = statistic_of(held[index], FORMAT, STEPS)
        if index == 0:
            numbers = found
        else:
            numbers = gl.maximum(numbers, found)
    largest = row_maximum(numbers)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            largest = gl.maximum(largest, row_maximum(statistic_of(step, FORMAT, STEPS)))
    scale, encoding = row_scale(largest, FORMAT)
    for index in gl.static_range(HELD):
        encoded = encode_step(held[index], encoding, FORMAT, STEPS)
        _store_slots(out, targets, scale, encoded, index, STEPS)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            encoded = encode_step(step, encoding, FORMAT, STEPS)
            _store_slots(out, targets, scale, encoded, index, STEPS)


@gluon.jit
def _load_source(
    x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT: gl.constexpr, STEPS: gl.constexpr
):
    """Load the held steps of row `row` of x; nothing is read if `row` is −1."""
    start = gl.maximum(row, 0).to(gl.int64)
    if FORMAT.coded:
        x_scale += start * x_scale_stride
    return load_row(x + start * x_stride, x_scale, gl.where(row >= 0, depth, 0), FORMAT, STEPS)


@gluon.jit(
    do_not_specialize=[
        "num_slots",
        "top_k",
        "slots",
        "depth",
        "num_rows",
        "x_scale_stride",
        "rows",
        "release_first",
    ]
)
def _moe_encode_rows_kernel(
    codes,
    scale,
    tile_counter,
    x,
    x_scale,
    slot_rows,
    num_slots,
    top_k,
    slots,
    depth,
    padded_depth,
    num_rows,
    x_stride,
    x_scale_stride,
    rows,
    release_first,
    FORMAT: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Encode rows x, bfloat16 or MX codes with x_scale, to rows of a GEMM (see `encode_step`).

    slots > 0: a program encodes one token and stores it for `slots` of its top_k slots. slots = 0:
    x is sorted; a program encodes the rows of `rows` of the num_slots slots, and prefetches the
    next row while it encodes the current one. Padding rows have no slot: they are neither read nor
    written.

    Grid: [num_slots / slots], or [num_slots / rows] rounded up if slots = 0.

    release_first: call launch_dependents at once (see `pdl`).
    """
    if release_first:
        launch_dependents()
    wait_and_launch_dependents()
    reset_tile_counter(tile_counter)
    out = RowsOut(codes, scale, padded_depth, num_rows)
    program = gl.program_id(0)
    first = program * rows
    first_slot = program * slots
    count = gl.where(slots > 0, 1, gl.minimum(num_slots - first, rows))
    row = gl.load(slot_rows + first, mask=slots == 0, other=first_slot // top_k)
    next_row = gl.load(slot_rows + first + 1, mask=count > 1, other=-1)
    following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
    for index in range(count):
        held = following
        source = row
        row = next_row
        next_row = gl.load(slot_rows + first + index + 2, mask=index + 2 < count, other=-1)
        # Loads of the next row are issued before this row is encoded, to hide their latency.
        following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
        start = gl.maximum(source, 0).to(gl.int64)
        own_scale = x_scale
        if FORMAT.coded:
            own_scale += start * x_scale_stride
        targets = Targets(source, slot_rows, first_slot, slots)
        _encode_row(out, targets, x + start * x_stride, own_scale, held, depth, FORMAT, STEPS)


@dataclass(frozen=True)
class SortedRows:
    """Encoded rows for a GEMM.

    codes: e4m3 [P, K padded to 128], or [2P, …] for P rows of hi and then P rows of lo (hi_lo); or
    bfloat16 or float16 [P, K padded to 128].
    scale: float32 [P], one per row. tile_counter: int32 [1], the tile counter of the GEMM that
    reads these rows.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tile_counter: torch.Tensor
    hi_lo: bool


def padded(depth: int) -> int:
    """Depth of a stored row: `depth` rounded up to a multiple of 128."""
    return -(-depth // UNIT_CODES) * UNIT_CODES


def fits_one_step(depth: int) -> bool:
    """Whether one step covers a whole row, so that a program can hold it in registers."""
    return padded(depth) <= _MAX_CHUNKS * UNIT_CODES


def one_step(depth: int, in_order: bool = False) -> RowSteps:
    """A step of as many chunks as cover a row, at most _MAX_CHUNKS: many threads, low latency."""
    units = padded(depth) // UNIT_CODES
    chunks = min(_MAX_CHUNKS, max(_CHUNKS_PER_WARP, 1 << (units - 1).bit_length()))
    warps, whole = min(8, chunks // _CHUNKS_PER_WARP), fits_one_step(depth)
    return RowSteps(chunks, warps, whole=whole, in_order=in_order)


def _several_steps(depth: int, in_order: bool) -> RowSteps:
    """Steps of a whole row with few threads, for many rows.

    This amortises the work per row over more values, and wastes less if the depth is no power of
    two.
    """
    units = padded(depth) // UNIT_CODES
    sizes = [chunks for chunks in (4, 8, 16) if -(-units // chunks) <= _MOST_STEPS]
    chunks = min(sizes, key=lambda size: (-(-units // size) * size, size))
    held = -(-units // chunks)
    return RowSteps(chunks, chunks // _CHUNKS_PER_WARP, held=held, in_order=in_order)


def empty_rows(
    plan: RoutingPlan,
    num_rows: int,
    depth: int,
    options: MoEOptions,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> SortedRows:
    """Allocate SortedRows without initialising them."""
    hi_lo = options.activation_format == "bf16" and dtype is torch.float8_e4m3fn
    scale = plan.sorted_weights.new_empty(num_rows)
    codes = scale.new_empty((num_rows * (2 if hi_lo else 1), padded(depth)), dtype=dtype)
    return SortedRows(codes, scale, plan.num_valid.new_empty(1), hi_lo)


def encode_rows(
    x: torch.Tensor | MXTensor,
    plan: RoutingPlan,
    num_rows: int,
    options: MoEOptions,
    *,
    scatter: bool,
    release_first: bool = False,
    in_order: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> SortedRows:
    """Encode the plan's rows for the GEMMs.

    Args:
        x: bfloat16 or MXTensor, [T, K] (scatter) or [P, K] in sorted order.
        plan: the routing plan. num_rows: rows to allocate, at least the rows in use.
        options: activation format and scale rule for bfloat16 rows.
        scatter: x holds tokens; each token is written to the rows of all its slots.
        release_first: call launch_dependents before x is complete, so that the GEMM of these rows
            starts early. The plan must be older than the GEMM that computes x (see `common.pdl`).
        in_order: keep the order of K, for other weights than MXFP4.
        dtype: in which they are stored; of rows of 16 bits each 16 are permuted.

    Returns:
        SortedRows; padding rows are uninitialised. The GEMM's outputs of these rows are not used.
    """
    rows = empty_rows(plan, num_rows, x.shape[1], options, dtype=dtype)
    work = _Work(
        plan.num_tokens, plan.top_k, num_rows, x.shape[1], scatter, release_first, in_order
    )
    if isinstance(x, MXTensor):
        element = x.format.element
        data = x.qdata if element is E2M1 else x.qdata.view(torch.float8_e4m3fn)
        x_scale, x_scale_stride, coded = x.scale, x.scale.stride(0), element.name
    else:
        data, x_scale, x_scale_stride, coded = x, None, 0, None
    found = RowFormat(coded, coded=True) if coded else row_format(options)
    found = replace(found, stored=_STORED[dtype])
    _encode_launch(work, data.stride(0), x_scale_stride, found)(
        x=data,
        x_scale=x_scale,
        codes=rows.codes,
        scale=rows.scale,
        tile_counter=rows.tile_counter,
        slot_rows=plan.slot_rows,
    )
    return rows


class _Work(NamedTuple):
    """Sizes and flags of a launch, and how programs share the work."""

    num_tokens: int
    top_k: int
    num_rows: int
    depth: int
    scatter: bool
    release_first: bool
    in_order: bool

    @property
    def num_slots(self) -> int:
        """Number of slots of all tokens."""
        return self.num_tokens * self.top_k

    @property
    def rows(self) -> int:
        """Slots per program if the rows are sorted already."""
        most = _ROW_VALUES // padded(self.depth)
        return max(1, min(most, self.num_slots // _MANY_PROGRAMS))

    @property
    def slots(self) -> int:
        """Slots of a token per program; 0 if the rows are sorted already."""
        if not self.scatter:
            return 0
        return 1 if self.num_tokens <= _PARALLEL_TOKENS else self.top_k

    @property
    def programs(self) -> int:
        """Number of programs."""
        if self.scatter:
            return self.num_tokens * (self.top_k // self.slots)
        return -(-self.num_slots // self.rows)

    @property
    def steps(self) -> RowSteps:
        """Several steps a row if one program per row fills the GPU, otherwise one."""
        many = (self.num_tokens if self.scatter else self.num_slots) >= _MANY_PROGRAMS
        steps = _several_steps if many and fits_one_step(self.depth) else one_step
        return steps(self.depth, self.in_order)


@functools.lru_cache(CACHED_LAUNCHES)
def _encode_launch(work: _Work, x_stride: int, x_scale_stride: int, found: RowFormat) -> Launch:
    """Launch of the row-encoding kernel."""
    steps = work.steps
    return Launch(
        _moe_encode_rows_kernel,
        (work.programs,),
        num_slots=work.num_slots,
        top_k=work.top_k,
        slots=work.slots,
        depth=work.depth,
        padded_depth=padded(work.depth),
        num_rows=work.num_rows,
        x_stride=x_stride,
        x_scale_stride=x_scale_stride,
        rows=work.rows,
        release_first=int(work.release_first),
        FORMAT=found,
        STEPS=steps,
        num_warps=steps.warps,
        **PDL_LAUNCH,
    )


def row_format(options: MoEOptions) -> RowFormat:
    """Format of the rows that bfloat16 becomes with these options."""
    format = options.mx_format
    if format is None:
        return RowFormat("hi_lo" if options.activation_format == "bf16" else "token")
    rule = scale_rule_constants(format, options.scale_rule)
    return RowFormat(format.element.name, emax=rule["EMAX"], threshold=rule["THRESHOLD"])
