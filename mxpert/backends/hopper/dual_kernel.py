"""Both MXFP8 copies of a tensor from one read.

A CTA quantises 128 places × 128 columns in steps of 32 columns; a warp owns 32 places, so that MX
blocks of rows (1 × 32) and of columns (32 × 1) lie inside a warp. A thread owns 4 rows × 8 columns:
16-byte loads, and in the columnwise copy, where its 4 rows are adjacent, 4-byte stores; eight lanes
fill a sector. Maxima of bfloat16 values are taken two at a time (u16x2), and each thread derives
one scale of each kind, which the others then read.

A block is 32 places of the columnwise copy. Groups begin at whole blocks there, so that the rows of
a block follow each other in the source; a table made on the device says where they begin.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import encode_fp8, larger_halves


@gluon.constexpr_function
def _values_layout(FIRST_ROWS):
    """[128, 32]: a thread's values in the order of columns, or of rows: the same values."""
    rows, columns = [[1, 0], [2, 0]], [[0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(
        rows + columns if FIRST_ROWS else columns + rows,
        [[0, 8], [0, 16], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [128, 32])


@gluon.constexpr_function
def _pairs_layout():
    """[128, 16] pairs of adjacent columns, where `_values_layout` has the values."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]], [[0, 4], [0, 8], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0]], [], [128, 16])


@gluon.constexpr_function
def _one_row_each():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def _one_block_each():
    """[4, 32] blocks of columns: a warp has those of its own places."""
    return gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])


@gluon.jit
def _row_maxima(data, PAIRS: gl.constexpr):
    """Bits of the largest magnitude of each of 128 rows, one a thread; NaN is the largest."""
    if PAIRS:
        both = gl.reduce(data & 0x7FFF7FFF, 1, larger_halves)
        both = gl.convert_layout(both, _one_row_each())
        return gl.maximum(both & 0xFFFF, both >> 16) << 16
    else:
        bits = gl.max(data.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        return gl.convert_layout(bits, _one_row_each())


@gluon.jit
def _column_maxima(data, PAIRS: gl.constexpr):
    """Bits of the largest magnitude of each [4, 32] blocks of columns, one a thread."""
    if PAIRS:
        both = gl.reduce((data & 0x7FFF7FFF).reshape([4, 32, 16]), 1, larger_halves)
        both = gl.convert_layout(both, gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
        bits = gl.join(both << 16, both & 0x7FFF0000).reshape([4, 32])
    else:
        bits = gl.max((data.to(gl.int32, bitcast=True) & 0x7FFFFFFF).reshape([4, 32, 32]), 1)
    return gl.convert_layout(bits, _one_block_each())


@gluon.jit
def _values(data, PAIRS: gl.constexpr):
    """float32 [128, 32]."""
    if PAIRS:
        low = (data << 16).to(gl.float32, bitcast=True)
        high = (data & -65536).to(gl.float32, bitcast=True)
        data = gl.join(low, high).reshape([128, 32])
    return gl.convert_layout(data, _values_layout(False), assert_trivial=True)


@gluon.jit
def _scale_byte(bits, EMAX: gl.constexpr, THRESHOLD: gl.constexpr, INF_BYTE: gl.constexpr,
                MARK: gl.constexpr):
    """E8M0 byte of blocks with these bits of the maximum; see triton.quantize_kernels.e8m0_scale.

    With MARK blocks of zeros have byte 0 and no other block has.
    """
    byte = gl.maximum(((bits + (0x800000 - THRESHOLD)) >> 23) - EMAX, 1 if MARK else 0)
    byte = gl.where(bits == 0x7F800000, INF_BYTE, byte)
    byte = gl.where(bits == 0, 0 if MARK else 127, byte)
    return gl.where(bits > 0x7F800000, 255, byte)


@gluon.jit
def _inverse_scale(byte):
    """``2^(127 - byte)``; NaN for 255, so that every value of the block becomes NaN."""
    bits = gl.where(byte == 254, 1 << 22, (254 - byte) << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _source(places, table, num_blocks):
    """For each place its row, whether it has one, and whether that counts."""
    block = places // 32
    in_copy = block < num_blocks
    if table is None:
        rows = places
        present = in_copy
        counts = in_copy
    else:
        step = places % 32
        rows = gl.load(table + 2 * block, mask=in_copy, other=0) + step
        sizes = gl.load(table + 2 * block + 1, mask=in_copy, other=0)
        present = step < (sizes & 255)
        counts = step < (sizes >> 8)
    return rows, present, counts


@gluon.jit
def _in_matrix(block, blocks_per_matrix, width):
    """Offset of column block `block` among the blocks of columnwise copies [width, blocks]."""
    matrix = (block // blocks_per_matrix).to(gl.int64)
    return matrix * width * blocks_per_matrix + (block - matrix * blocks_per_matrix)


@gluon.jit
def _load(x, rows, counts, k, num_k_blocks, x_stride_row, PAIRS: gl.constexpr):
    """The step of 32 columns from `k` on, in pairs if PAIRS."""
    LAYOUT: gl.constexpr = _pairs_layout() if PAIRS else _values_layout(False)
    PER: gl.constexpr = 2 if PAIRS else 1
    columns = gl.arange(0, 32 // PER, gl.SliceLayout(0, LAYOUT))
    ptrs = x + k // PER + rows.to(gl.int64) * x_stride_row
    data = gl.load(gl.expand_dims(ptrs, 1) + gl.expand_dims(columns, 0),
                   mask=gl.expand_dims(counts & (k // 32 < num_k_blocks), 1), other=0)
    return data if PAIRS else data.to(gl.float32)


@gluon.jit
def _store_row_codes(values, inverse, row_ptrs, present, FORMAT: gl.constexpr):
    LAYOUT: gl.constexpr = _values_layout(False)
    by_row = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT)), 1)
    columns = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    gl.store(gl.expand_dims(row_ptrs, 1) + gl.expand_dims(columns, 0),
             encode_fp8(values * by_row, FORMAT), mask=gl.expand_dims(present, 1))


@gluon.jit
def _store_column_codes(values, inverse, place_ptrs, present, length, FORMAT: gl.constexpr):
    LAYOUT: gl.constexpr = _values_layout(True)
    by_block = values.reshape([4, 32, 32])
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, by_block.type.layout))
    scaled = (by_block * gl.expand_dims(inverse, 1)).reshape([128, 32])
    codes = encode_fp8(gl.convert_layout(scaled, LAYOUT, assert_trivial=True), FORMAT)
    columns = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT)) * length
    gl.store(gl.expand_dims(place_ptrs, 1) + gl.expand_dims(columns, 0), codes,
             mask=gl.expand_dims(present, 1))


@gluon.jit
def _store_row_scales(pointers, word, mask, count, ALIGNMENT: gl.constexpr):
    """The `count` bytes of each row's word; both are multiples of ALIGNMENT (1, 2 or 4)."""
    TYPE: gl.constexpr = (None, gl.int8, gl.int16, None, gl.int32)[ALIGNMENT]
    for index in range(0, count, ALIGNMENT):
        gl.store((pointers + index).to(gl.pointer_type(TYPE)), (word >> (8 * index)).to(TYPE),
                 mask=mask)


@gluon.jit
def _row_side(row, row_scale, table, first_place, first, num_blocks, num_k_blocks,
              SOURCE: gl.constexpr):
    """Of the rows of a tile: where they come from, which count, where codes and scales go.

    SOURCE: the layout in which rows are loaded; scales are one a thread.
    """
    OUT: gl.constexpr = gl.SliceLayout(1, _values_layout(False))
    EACH: gl.constexpr = _one_row_each()
    rows, present, counts = _source(first_place + gl.arange(0, 128, SOURCE), table, num_blocks)
    codes = row + (rows.to(gl.int64) * num_k_blocks + first) * 32
    each, scaled, _ = _source(first_place + gl.arange(0, 128, EACH), table, num_blocks)
    scales = row_scale + each.to(gl.int64) * num_k_blocks + first
    return (rows, counts, gl.convert_layout(codes, OUT), gl.convert_layout(present, OUT), scales,
            scaled)


@gluon.jit
def _block_side(column, column_scale, table, first_place, first, num_blocks, blocks_per_matrix,
                width):
    """Of the places of a tile: where codes, scales and words of four scales go, and masks.

    The last says which blocks belong to a group.
    """
    PLACES: gl.constexpr = gl.SliceLayout(1, _values_layout(True))
    EACH: gl.constexpr = _one_block_each()
    places = first_place + gl.arange(0, 128, PLACES)
    first_column = (first * 32).to(gl.int64) * blocks_per_matrix
    codes = column + first_column * 32 + (
        _in_matrix(places // 32, blocks_per_matrix, width) * 32 + places % 32)
    block = first_place // 32 + gl.arange(0, 4, gl.SliceLayout(1, EACH))
    columns = gl.arange(0, 32, gl.SliceLayout(0, EACH)) * blocks_per_matrix
    first_scale = column_scale + first_column
    scales = (gl.expand_dims(first_scale + _in_matrix(block, blocks_per_matrix, width), 1)
              + gl.expand_dims(columns, 0))
    words = first_scale + _in_matrix(first_place // 32, blocks_per_matrix, width) + columns
    counts = gl.full((4,), 1, gl.int32, gl.SliceLayout(1, EACH))
    if table is not None:
        counts = gl.load(table + 2 * block + 1, mask=block < num_blocks, other=0) >> 8
    return (codes, places // 32 < num_blocks, scales, gl.expand_dims(block < num_blocks, 1), words,
            gl.expand_dims(counts > 0, 1))


@gluon.jit
def _store_words(words, byte, EACH: gl.constexpr):
    """The scales of the four blocks of each column as one word."""
    shift = 8 * gl.arange(0, 4, gl.SliceLayout(1, EACH))
    word = gl.sum(byte << gl.expand_dims(shift, 1), 0)
    gl.store(words.to(gl.pointer_type(gl.int32)), word)


@gluon.jit(do_not_specialize=["num_blocks", "blocks_per_matrix", "num_k_blocks"],
           do_not_specialize_on_alignment=["table"])
def _quantize_dual_hopper_kernel(
        row, row_scale, column, column_scale, x, table, num_blocks, blocks_per_matrix, num_k_blocks,
        x_stride_row, FORMAT: gl.constexpr, EMAX: gl.constexpr, THRESHOLD: gl.constexpr,
        INF_BYTE: gl.constexpr, PAIRS: gl.constexpr, CHOOSE: gl.constexpr, ENCODE: gl.constexpr,
        MARK_ROWS: gl.constexpr, MARK_COLUMNS: gl.constexpr, ROW_ALIGNMENT: gl.constexpr,
        WIDE_COLUMNS: gl.constexpr, num_warps: gl.constexpr):
    """x [rows, K] to codes [rows, K] and, transposed, [matrices, K, 32 blocks_per_matrix].

    PAIRS: x is bfloat16, passed as int32. CHOOSE: find and store each block's scale. ENCODE: store
    codes, with the scales found, or, with CHOOSE off, with the scales that are in memory.
    MARK_ROWS, MARK_COLUMNS: blocks of zeros have byte 0, and no other block has, for what chooses
    the scales of spans. ROW_ALIGNMENT (1, 2, 4) divides a row's number of scales; WIDE_COLUMNS: 4
    divides a column's.
    """
    SOURCE: gl.constexpr = gl.SliceLayout(1, _pairs_layout() if PAIRS else _values_layout(False))
    tiles_k = gl.cdiv(num_k_blocks, 4)
    first_place = gl.program_id(0) // tiles_k * 128
    first = gl.program_id(0) % tiles_k * 4
    rows, counts, row_codes, present, row_scales, scaled = _row_side(
        row, row_scale, table, first_place, first, num_blocks, num_k_blocks, SOURCE)
    column_codes, in_copy, block_scales, block_mask, words, grouped = _block_side(
        column, column_scale, table, first_place, first, num_blocks, blocks_per_matrix,
        num_k_blocks * 32)
    row_word = gl.zeros((128,), gl.int32, _one_row_each())
    steps = gl.minimum(num_k_blocks - first, 4)
    data = _load(x, rows, counts, first * 32, num_k_blocks, x_stride_row, PAIRS)
    if not CHOOSE:
        row_ahead = gl.load(row_scales, mask=scaled, other=127)
        block_ahead = gl.load(block_scales, mask=block_mask, other=127)
    for step in range(steps):
        more = step + 1 < steps
        following = _load(x, rows, counts & more, (first + step + 1) * 32, num_k_blocks,
                          x_stride_row, PAIRS)
        if CHOOSE:
            row_byte = _scale_byte(_row_maxima(data, PAIRS), EMAX, THRESHOLD, INF_BYTE, MARK_ROWS)
            block_byte = _scale_byte(_column_maxima(data, PAIRS), EMAX, THRESHOLD, INF_BYTE,
                                     MARK_COLUMNS)
            if MARK_COLUMNS:  # no span holds the blocks behind the last group
                block_byte = gl.where((block_byte == 0) & (grouped == 0), 127, block_byte)
            row_word = row_word | (row_byte << (8 * step))
            if WIDE_COLUMNS:
                _store_words(words, block_byte, _one_block_each())
            else:
                gl.store(block_scales, block_byte.to(gl.uint8), mask=block_mask)
        else:
            row_byte = row_ahead.to(gl.int32)
            block_byte = block_ahead.to(gl.int32)
            row_ahead = gl.load(row_scales + step + 1, mask=scaled & more, other=127)
            block_ahead = gl.load(block_scales + 32 * blocks_per_matrix, mask=block_mask & more,
                                  other=127)
        if ENCODE:
            values = _values(data, PAIRS)
            _store_row_codes(values, _inverse_scale(row_byte), row_codes, present, FORMAT)
            _store_column_codes(values, _inverse_scale(block_byte), column_codes, in_copy,
                                blocks_per_matrix * 32, FORMAT)
        row_codes += 32
        column_codes += 1024 * blocks_per_matrix
        words += 32 * blocks_per_matrix
        block_scales += 32 * blocks_per_matrix
        data = following
    if CHOOSE:
        _store_row_scales(row_scales, row_word, scaled, steps, ROW_ALIGNMENT)
