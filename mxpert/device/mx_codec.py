"""Device code that quantises and dequantises MX blocks, bit-exact to `mxpert.formats.codec`.

For the epilogues of other kernels:

    quantize_tile(values, FORMAT, EMAX, THRESHOLD, AXIS=1) -> codes, scale

takes a float32 tile [M, N] whose blocks of 32 lie along AXIS (0 or 1). It returns uint8 codes
(FORMAT "e4m3", "e5m2", or "e2m1", packed two a byte along AXIS, low nibble first) and uint8 E8M0
scales (AXIS divided by 32). On the host ``scale_rule_constants(format, rule)`` returns EMAX and
THRESHOLD of a scale rule.

Scales are computed from the bits of the block maximum, e2m1 codes by one exact float32 addition.
Codes of 8 bits use the chip's conversion (round to nearest even). Values are clamped first, because
not every chip's conversion saturates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.spec import E8M0_BIAS, E8M0_NAN, MXFormat, ScaleRule
from .fp8 import decode_fp8, encode_fp8, has_fp8_instructions

_MANTISSA = 1 << 23  # largest mantissa field of a float32, plus one
_ONE = tl.constexpr(E8M0_BIAS)  # the E8M0 byte of 2^0
_NAN = tl.constexpr(E8M0_NAN)
_FLOAT_INFINITY = tl.constexpr(0x7F800000)  # bits of float32 values
_FLOAT_NAN = tl.constexpr(0x7FC00000)
_SMALLEST = tl.constexpr(1 << 22)  # 2^-127, a subnormal


def scale_rule_constants(fmt: MXFormat, rule: ScaleRule) -> dict[str, int]:
    """EMAX and THRESHOLD of a scale rule (see `e8m0_scale`), as kernel arguments."""
    element = fmt.element
    threshold = {
        ScaleRule.FLOOR: _MANTISSA,  # never reached
        ScaleRule.CEIL: 1,
        # Halfway between the element's largest mantissa, which is odd, and 2: ties round up to 2.
        ScaleRule.EVEN: _MANTISSA - (_MANTISSA >> (element.mantissa_bits + 1)),
        ScaleRule.RCEIL: int((element.max_value / 2**element.emax - 1) * _MANTISSA) + 1,
    }[rule]
    return {"EMAX": element.emax, "THRESHOLD": threshold}


@triton.jit
def magnitude_bits(values):
    """Bits of ``|values|`` as int32; they order like the floats, with NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e8m0_scale(amax_bits, EMAX: tl.constexpr, THRESHOLD: tl.constexpr):
    """E8M0 byte (int32) of a block: exponent of its maximum minus EMAX.

    A mantissa of THRESHOLD or more increments the exponent. A maximum of zero gives 127, infinity
    and NaN 255. Only the lower end is clamped: the largest finite result is 255 - EMAX.
    """
    byte = tl.maximum(((amax_bits + (0x800000 - THRESHOLD)) >> 23) - EMAX, 0)
    byte = tl.where(amax_bits == 0, _ONE, byte)
    return tl.where(amax_bits >= _FLOAT_INFINITY, _NAN, byte)


@triton.jit
def inverse_scale(byte):
    """``2^(127 - byte)`` as float32; byte 254 gives the subnormal 2^-127. Undefined for 255."""
    return tl.where(byte >= 254, _SMALLEST, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """``2^(byte - 127)`` as float32; byte 0 gives the subnormal 2^-127, byte 255 NaN."""
    bits = tl.where(byte == 0, _SMALLEST, byte << 23)
    return tl.where(byte == _NAN, _FLOAT_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(values, is_nan, FORMAT: tl.constexpr):
    """Codes (int32) of scaled float32 values, rounded to nearest even, saturating.

    Elements with `is_nan`, of a block that holds NaN or infinity, get the NaN code (e2m1: 7).
    """
    if FORMAT == "e2m1":
        # Adding 2^22 times the value's power of two rounds to one mantissa bit. The exponent of the
        # sum gives the binade, its last bits count half binades. Their sum is the code.
        size = tl.minimum(tl.abs(values), 6.0)
        power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & _FLOAT_INFINITY
        total = (power.to(tl.float32, bitcast=True) * 4194304.0 + size).to(tl.int32, bitcast=True)
        code = (total >> 22) + (total & 15) - 2 * (127 + 22)
        code += (values.to(tl.int32, bitcast=True) >> 28) & 8
        return tl.where(is_nan, 7, code)
    else:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
        TYPE: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
        tl.static_assert(FORMAT == "e4m3" or FORMAT == "e5m2", "an MX element format")
        clamped = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        if has_fp8_instructions():
            code = clamped.to(TYPE).to(tl.uint8, bitcast=True)
        else:
            code = encode_fp8(clamped, FORMAT)
        return tl.where(is_nan, 0x7F, code).to(tl.int32)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """Float32 values of codes (uint8, one a byte), without their scale."""
    if FORMAT == "e2m1":
        # Shifted to float32's place, the magnitude bits give the value times 2^-126.
        magnitude = ((codes & 7).to(tl.int32) << 22).to(tl.float32, bitcast=True)
        sign = tl.where((codes & 8) != 0, -1.0, 1.0)
        return magnitude * 8.507059173023462e37 * sign  # 2^126
    elif not has_fp8_instructions():
        return decode_fp8(codes, FORMAT).to(tl.float32)
    elif FORMAT == "e4m3":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(FORMAT == "e5m2", "an MX element format")
        return codes.to(tl.float8e5, bitcast=True).to(tl.float32)


@triton.jit
def random_bits(seed_ptr, index):
    """Random uint32 of elements by their int64 index; see `mxpert.formats.stochastic`."""
    r0, r1, r2, r3 = tl.randint4x(tl.load(seed_ptr), index >> 2)
    low = tl.where((index & 1) == 0, r0, r1)
    high = tl.where((index & 1) == 0, r2, r3)
    return tl.where((index & 2) == 0, low, high).to(tl.uint32)


@triton.jit
def random_row_bits(seed_ptr, first, COLUMNS: tl.constexpr):
    """`random_bits` [M, COLUMNS] of rows from element first [M], a multiple of 4, on."""
    M: tl.constexpr = first.shape[0]
    counter = (first >> 2)[:, None] + tl.arange(0, COLUMNS // 4)[None, :]
    r0, r1, r2, r3 = tl.randint4x(tl.load(seed_ptr), counter)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # [M, COLUMNS / 4, 2, 2]
    return tl.reshape(words, (M, COLUMNS)).to(tl.uint32)


@triton.jit
def encode_stochastic(values, random, is_nan, FORMAT: tl.constexpr):
    """Codes (int32) of scaled float32 values, rounded by random uint32; see `encode`."""
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else (2 if FORMAT == "e5m2" else 1)
    SMALLEST: tl.constexpr = -6 if FORMAT == "e4m3" else (-14 if FORMAT == "e5m2" else 0)
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else (57344.0 if FORMAT == "e5m2" else 6.0)
    SIGN: tl.constexpr = 8 if FORMAT == "e2m1" else 0x80
    NAN_CODE: tl.constexpr = SIGN - 1
    DROPPED: tl.constexpr = 23 - MANTISSA
    POWER: tl.constexpr = 2.0**SMALLEST
    STEPS: tl.constexpr = 2.0 ** (24 + MANTISSA - SMALLEST)
    size = tl.minimum(tl.abs(values), LARGEST)
    # The bits of a float count its steps, across binades too.
    added = (random >> (32 - DROPPED)).to(tl.int32)
    code = ((size.to(tl.int32, bitcast=True) + added) >> DROPPED) - ((126 + SMALLEST) << MANTISSA)
    # Below the smallest normal number steps have one width; 24 bits of fraction.
    steps = (tl.minimum(size, POWER) * STEPS).to(tl.int32)
    code = tl.where(size < POWER, (steps + (random >> 8).to(tl.int32)) >> 24, code)
    code += (values.to(tl.int32, bitcast=True) >> 31) & SIGN
    return tl.where(is_nan, NAN_CODE, code)


@triton.jit
def quantize_tile(
    values,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    AXIS: tl.constexpr = 1,
    random=None,
):
    """Codes and scales of a float32 tile [M, N]; see the module docstring.

    random: uint32 [M, N] for stochastic rounding, or None.
    """
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    tl.static_assert(values.shape[AXIS] % 32 == 0, "a tile holds whole blocks of 32 values")
    if AXIS == 1:
        blocks = tl.reshape(values, (M, N // 32, 32))
        byte = e8m0_scale(tl.max(magnitude_bits(blocks), axis=2), EMAX, THRESHOLD)
        wide = byte[:, :, None]  # [M, N/32, 1]
    else:
        tl.static_assert(AXIS == 0, "blocks lie along axis 0 or 1")
        blocks = tl.reshape(values, (M // 32, 32, N))
        byte = e8m0_scale(tl.max(magnitude_bits(blocks), axis=1), EMAX, THRESHOLD)
        wide = byte[:, None, :]  # [M/32, 1, N]
    if random is None:
        codes = encode(blocks * inverse_scale(wide), wide == _NAN, FORMAT)
    else:
        own = tl.reshape(random, blocks.shape)
        codes = encode_stochastic(blocks * inverse_scale(wide), own, wide == _NAN, FORMAT)
    if FORMAT == "e2m1":
        if AXIS == 1:
            low, high = tl.split(tl.reshape(codes, (M, N // 2, 2)))
        else:
            low, high = tl.split(tl.permute(tl.reshape(codes, (M // 2, 2, N)), (0, 2, 1)))
        codes = low + (high << 4)  # shift and add compile to one instruction, shift and or do not
    else:
        codes = tl.reshape(codes, (M, N))
    return codes.to(tl.uint8), byte.to(tl.uint8)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _quantize_rows_kernel(
    qdata_ptr,
    scale_ptr,
    x_ptr,
    seed_ptr,
    num_rows,
    num_blocks,
    row_stride,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Quantise x [num_rows, 32 · num_blocks] along its dense rows; outputs are contiguous.

    Grid: (tiles,), one [BLOCK_ROWS, BLOCK_COLUMNS] tile per program, tiles of a row in turn.
    """
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    tiles = tl.cdiv(num_blocks, BLOCK_COLUMNS // 32)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < num_rows)[:, None]
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    columns = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    values = tl.load(
        x_ptr + rows[:, None] * row_stride + columns,
        mask=row_mask & (columns < num_blocks * 32),
        other=0.0,
    ).to(tl.float32)
    # codes [BLOCK_ROWS, BLOCK_COLUMNS/PACK] uint8, scale [BLOCK_ROWS, BLOCK_COLUMNS/32] uint8 E8M0
    random = None
    if seed_ptr is not None:
        random = random_row_bits(seed_ptr, rows * (num_blocks * 32) + first, BLOCK_COLUMNS)
    codes, scale = quantize_tile(values, FORMAT, EMAX, THRESHOLD, random=random)
    columns = first // PACK + tl.arange(0, BLOCK_COLUMNS // PACK)[None, :]
    width = num_blocks * (32 // PACK)  # bytes of codes a row
    tl.store(qdata_ptr + rows[:, None] * width + columns, codes, mask=row_mask & (columns < width))
    columns = first // 32 + tl.arange(0, BLOCK_COLUMNS // 32)[None, :]
    tl.store(
        scale_ptr + rows[:, None] * num_blocks + columns,
        scale,
        mask=row_mask & (columns < num_blocks),
    )


@triton.jit
def _quantize_columns_kernel(
    qdata_ptr,
    scale_ptr,
    x_ptr,
    seed_ptr,
    num_columns,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Quantise contiguous x [32 · blocks, num_columns] with blocks along columns.

    Grid: (blocks · column tiles,), 32 rows and BLOCK_COLUMNS columns per program. With e2m1 it
    loads even and odd rows separately, so that both codes of a byte are in the same thread.
    """
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (columns < num_columns)[None, :]
    rows = tl.arange(0, 32 // PACK)[:, None].to(tl.int64)
    x_ptrs = x_ptr + (block * 32 + rows * PACK) * num_columns + columns[None, :]
    # low (and high, the odd rows) [32/PACK, BLOCK_COLUMNS] float32
    low = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(magnitude_bits(low), axis=0)
    if PACK == 2:
        high = tl.load(x_ptrs + num_columns, mask=mask, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(magnitude_bits(high), axis=0))
    byte = e8m0_scale(amax, EMAX, THRESHOLD)  # [BLOCK_COLUMNS]
    inverse = inverse_scale(byte)[None, :]
    is_nan = (byte == _NAN)[None, :]
    if seed_ptr is None:
        codes = encode(low * inverse, is_nan, FORMAT)
        if PACK == 2:
            codes += encode(high * inverse, is_nan, FORMAT) << 4
    else:
        index = (block * 32 + rows * PACK) * num_columns + columns[None, :]
        codes = encode_stochastic(low * inverse, random_bits(seed_ptr, index), is_nan, FORMAT)
        if PACK == 2:
            random = random_bits(seed_ptr, index + num_columns)
            codes += encode_stochastic(high * inverse, random, is_nan, FORMAT) << 4
    code_rows = block * (32 // PACK) + rows
    tl.store(qdata_ptr + code_rows * num_columns + columns[None, :], codes.to(tl.uint8), mask=mask)
    tl.store(
        scale_ptr + block * num_columns + columns, byte.to(tl.uint8), mask=columns < num_columns
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _dequantize_rows_kernel(
    out_ptr, qdata_ptr, scale_ptr, num_blocks, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    """Dequantise contiguous blocks of 32 along the last axis.

    Grid: (tiles,), BLOCK blocks per program.
    """
    BYTES: tl.constexpr = 16 if FORMAT == "e2m1" else 32
    blocks = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = blocks < num_blocks
    offsets = blocks[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    codes = tl.load(qdata_ptr + offsets, mask=mask[:, None], other=0)  # [BLOCK, BYTES] uint8
    scale = scale_value(tl.load(scale_ptr + blocks, mask=mask, other=0).to(tl.int32))[:, None]
    values = decode(codes, FORMAT) * scale  # [BLOCK, BYTES]
    if FORMAT == "e2m1":
        values = tl.reshape(tl.join(values, decode(codes >> 4, FORMAT) * scale), (BLOCK, 32))
    offsets = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _dequantize_columns_kernel(
    out_ptr, qdata_ptr, scale_ptr, num_columns, FORMAT: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Dequantise blocks along columns, the inverse of `_quantize_columns_kernel`.

    Grid: (blocks · column tiles,), as there.
    """
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = columns < num_columns
    rows = tl.arange(0, 32 // PACK)[:, None].to(tl.int64)
    code_rows = block * (32 // PACK) + rows
    # codes [32/PACK, BLOCK_COLUMNS] uint8, scale [1, BLOCK_COLUMNS] float32
    codes = tl.load(
        qdata_ptr + code_rows * num_columns + columns[None, :], mask=mask[None, :], other=0
    )
    byte = tl.load(scale_ptr + block * num_columns + columns, mask=mask, other=0)
    scale = scale_value(byte.to(tl.int32))[None, :]
    out_ptrs = out_ptr + (block * 32 + rows * PACK) * num_columns + columns[None, :]
    values = decode(codes, FORMAT) * scale
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask[None, :])
    if PACK == 2:
        values = decode(codes >> 4, FORMAT) * scale
        tl.store(out_ptrs + num_columns, values.to(out_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_squares_kernel(
    qdata_ptr,
    scale_ptr,
    x_ptr,
    seed_ptr,
    num_rows,
    num_units,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    AXIS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Quantise contiguous matrices, a scale for each 32 × 32 values.

    Grid: (matrices · row tiles · column tiles,), 32 rows and BLOCK_COLUMNS columns per program.
    Blocks lie along AXIS: a matrix is [num_rows, 32 · num_units], or [num_rows, num_units] for
    AXIS 0. Values beyond the matrix count as zeros, so that edges are cut squares.
    """
    SQUARES: tl.constexpr = BLOCK_COLUMNS // 32
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    num_columns = num_units * 32 if AXIS == 1 else num_units
    column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    tiles = column_tiles * tl.cdiv(num_rows, 32)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row, column = tile // column_tiles * 32, tile % column_tiles * BLOCK_COLUMNS
    rows = (row + tl.arange(0, 32))[:, None]
    columns = (column + tl.arange(0, BLOCK_COLUMNS))[None, :]
    values = tl.load(
        x_ptr + (matrix * num_rows + rows) * num_columns + columns,
        mask=(rows < num_rows) & (columns < num_columns),
        other=0.0,
    ).to(tl.float32)
    blocks = tl.reshape(values, (32, SQUARES, 32))
    amax = tl.max(tl.max(magnitude_bits(blocks), axis=2), axis=0)
    byte = e8m0_scale(amax, EMAX, THRESHOLD)[None, :, None]  # [1, SQUARES, 1]
    if seed_ptr is None:
        codes = encode(blocks * inverse_scale(byte), byte == _NAN, FORMAT)
    else:
        random = random_bits(seed_ptr, (matrix * num_rows + rows) * num_columns + columns)
        random = tl.reshape(random, (32, SQUARES, 32))
        codes = encode_stochastic(blocks * inverse_scale(byte), random, byte == _NAN, FORMAT)
    # codes [32, BLOCK_COLUMNS] of a byte each, or half of them along AXIS; scales likewise, by 32
    if AXIS == 1:
        if PACK == 2:
            low, high = tl.split(tl.reshape(codes, (32, BLOCK_COLUMNS // 2, 2)))
            codes = low + (high << 4)
        codes = tl.reshape(codes, (32, BLOCK_COLUMNS // PACK))
        width = num_units * (32 // PACK)
        places = (column // PACK + tl.arange(0, BLOCK_COLUMNS // PACK))[None, :]
        code_mask = (rows < num_rows) & (places < width)
        code_places = (matrix * num_rows + rows) * width + places
        squares = (column // 32 + tl.arange(0, SQUARES))[None, :]
        scale = tl.broadcast_to(tl.reshape(byte, (1, SQUARES)), (32, SQUARES))
        scale_mask = (rows < num_rows) & (squares < num_units)
        scale_places = (matrix * num_rows + rows) * num_units + squares
    else:
        tl.static_assert(AXIS == 0, "blocks lie along axis 0 or 1")
        codes = tl.reshape(codes, (32, BLOCK_COLUMNS))
        if PACK == 2:
            pairs = tl.permute(tl.reshape(codes, (16, 2, BLOCK_COLUMNS)), (0, 2, 1))
            low, high = tl.split(pairs)
            codes = low + (high << 4)
        code_rows = (row // PACK + tl.arange(0, 32 // PACK))[:, None]
        code_mask = (code_rows < num_rows // PACK) & (columns < num_columns)
        code_places = (matrix * (num_rows // PACK) + code_rows) * num_columns + columns
        scale = tl.reshape(tl.broadcast_to(byte, (1, SQUARES, 32)), (1, BLOCK_COLUMNS))
        scale_mask = columns < num_columns
        scale_places = (matrix * (num_rows // 32) + row // 32) * num_columns + columns
    tl.store(qdata_ptr + code_places, codes.to(tl.uint8), mask=code_mask)
    tl.store(scale_ptr + scale_places, scale.to(tl.uint8), mask=scale_mask)
