"""Dual quantisation: rowwise and columnwise MXFP8 copies of a tensor from one read.

A CTA quantises a tile of 128 positions × 128 columns. A warp has 32 positions, so MX blocks of rows
(1 × 32) and of columns (32 × 1) lie inside a warp. TMA loads the whole tile at once as 32-bit
words. A stage is 128 positions × 32 words (64 columns of 16 bits, or 32 of float32). Its lines of
128 bytes are swizzled: 16-byte chunk c of line r lies at c ^ (r % 8). The rowwise and the
columnwise side read a stage in different layouts. In both, two neighbouring threads have 16 values
of a block each: one shuffle completes the maximum, and both threads compute the scale. A thread
stores its codes in 16 bytes; two neighbours fill a sector.

Rowwise side: a thread has 16 columns of some rows. In one access eight lanes read 16 bytes each: 4
chunks of 2 adjacent lines, or with float32 2 chunks of 4 lines. The chunks of a line are 2 (4)
apart. The swizzles of adjacent lines differ such that there are no bank conflicts.

Columnwise side: a thread has 16 rows × 2 words. In one access sixteen lanes read 8 bytes each: half
of line r and the same half of line r + 16, which has the same swizzle. To avoid bank conflicts,
lanes of the second half of a block read rows in the order r ^ 4. Their words of codes (4 rows each)
are then exchanged within pairs of words.

A block is 32 positions of the columnwise copy. Groups start at whole blocks there, so the rows of a
block are contiguous in the source; a table made on the device gives the first row of each block.
Rows outside the groups do not count: they quantise as zeros. Blocks without rows that count are
read past the end of the source, where TMA gives zeros. In other blocks, rows that do not count are
cleared in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.compat import async_load, barrier, reinterpret
from ..lib.ptx import encode_fp8_words, larger_halves, multiply_bfloat16_pairs
from .scales import (
    bytes_of_stages,
    column_codes_layout,
    in_matrix,
    inverse_scale,
    load_column_scales,
    load_row_scales,
    mark_groups,
    scale_byte,
    scales_of_columns,
    store_column_scales,
    store_row_scales,
    words_of_columns,
)

_NOWHERE = gl.constexpr(1 << 30)
"""Row index past the end of every source."""


# --- layouts: 32-bit words of a stage [128, 32], codes as words of four -------------------------


@gluon.constexpr_function
def _row_words_layout(BLOCKS):
    """Layout of a stage [128, 32] words, BLOCKS (1, 2) blocks a row; a thread has half blocks."""
    registers = [[0, 1], [0, 2], [0, 4], *([[8, 0]] if BLOCKS == 2 else [[0, 8]]), [16, 0]]
    lanes = [
        *([[0, 8], [0, 16]] if BLOCKS == 2 else [[0, 16]]),
        [1, 0],
        [2, 0],
        [4, 0],
        *([] if BLOCKS == 2 else [[8, 0]]),
    ]
    return gl.DistributedLinearLayout(registers, lanes, [[32, 0], [64, 0]], [], [128, 32])


@gluon.constexpr_function
def _row_codes_layout(BLOCKS):
    """Layout of words of codes [128, BLOCKS, 8], in the threads that have the values."""
    registers = [[0, 0, 1], [0, 0, 2], *([[8, 0, 0]] if BLOCKS == 2 else []), [16, 0, 0]]
    lanes = [
        [0, 0, 4],
        *([[0, 1, 0]] if BLOCKS == 2 else []),
        [1, 0, 0],
        [2, 0, 0],
        [4, 0, 0],
        *([] if BLOCKS == 2 else [[8, 0, 0]]),
    ]
    return gl.DistributedLinearLayout(
        registers, lanes, [[32, 0, 0], [64, 0, 0]], [], [128, BLOCKS, 8]
    )


@gluon.constexpr_function
def _column_words_layout():
    """Layout of a stage [128, 32] words: 16 rows × 2 words a thread, a block in two threads."""
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]],
        [[16, 0], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[32, 0], [64, 0]],
        [],
        [128, 32],
    )


@gluon.constexpr_function
def _exchanged_halves():
    """Shared-memory layout of a stage with rows 16 … 31 of each block in the order r ^ 4."""
    return gl.SharedLinearLayout(
        [
            [0, 1],
            [0, 2],
            [0, 4],
            [0, 8],
            [0, 16],
            [1, 4],
            [2, 8],
            [4, 16],
            [8, 0],
            [20, 0],
            [32, 0],
            [64, 0],
        ],
        [],
        1024,
    )


# --- values and scales --------------------------------------------------------------------------


@gluon.jit
def _magnitudes(words, DTYPE: gl.constexpr):
    return words & (0x7FFFFFFF if DTYPE == "fp32" else 0x7FFF7FFF)


@gluon.jit
def _larger(left, right, DTYPE: gl.constexpr):
    """The larger of two magnitudes; words of 16-bit pairs are compared per half. NaN is largest."""
    return gl.maximum(left, right) if DTYPE == "fp32" else larger_halves(left, right)


@gluon.jit
def _largest(words, AXIS: gl.constexpr, DTYPE: gl.constexpr):
    """Largest magnitude along an axis, per half for 16-bit pairs."""
    return gl.max(words, AXIS) if DTYPE == "fp32" else gl.reduce(words, AXIS, larger_halves)


@gluon.jit
def _largest_of(words, AXIS: gl.constexpr, DTYPE: gl.constexpr):
    """Largest magnitude of four tensors of words along an axis."""
    first, second, third, fourth = words
    left = _larger(_magnitudes(first, DTYPE), _magnitudes(second, DTYPE), DTYPE)
    right = _larger(_magnitudes(third, DTYPE), _magnitudes(fourth, DTYPE), DTYPE)
    return _largest(_larger(left, right, DTYPE), AXIS, DTYPE)


@gluon.jit
def _values(words, HALF: gl.constexpr, DTYPE: gl.constexpr):
    """The first or second value of each word as float32."""
    if DTYPE == "fp16":
        half = (words >> (16 * HALF)).to(gl.int16)
        return half.to(gl.float16, bitcast=True).to(gl.float32)
    elif DTYPE == "fp32":
        return words.to(gl.float32, bitcast=True)
    elif HALF == 0:
        return (words << 16).to(gl.float32, bitcast=True)
    else:
        return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _bits(words, HALF: gl.constexpr, DTYPE: gl.constexpr):
    return _values(words, HALF, DTYPE).to(gl.int32, bitcast=True)


# --- where blocks come from and go --------------------------------------------------------------


@gluon.jit
def _source(block, table, num_blocks):
    """First row of a block, number of its rows, and number of those that count."""
    in_copy = block < num_blocks
    if table is None:
        rows = gl.where(in_copy, 32, 0)
        return block * 32, rows, rows
    else:
        first = gl.load(table + 2 * block, mask=in_copy, other=0)
        sizes = gl.load(table + 2 * block + 1, mask=in_copy, other=0)
        return first, sizes & 255, sizes >> 8


@gluon.jit
def _of_block(index, values):
    """Select values[index] for each index (0 … 3)."""
    return gl.where(
        index < 2,
        gl.where(index == 0, values[0], values[1]),
        gl.where(index == 2, values[2], values[3]),
    )


@gluon.jit
def _tile_source(first_block, table, num_blocks):
    """`_source` of four blocks: tuples of first rows, numbers of rows, and of rows that count."""
    row0, size0, count0 = _source(first_block, table, num_blocks)
    row1, size1, count1 = _source(first_block + 1, table, num_blocks)
    row2, size2, count2 = _source(first_block + 2, table, num_blocks)
    row3, size3, count3 = _source(first_block + 3, table, num_blocks)
    return (
        (row0, row1, row2, row3),
        (size0, size1, size2, size3),
        (count0, count1, count2, count3),
    )


@gluon.jit
def _start_copies(x_desc, staged, ready, source, first_word, STAGES: gl.constexpr):
    """Start the TMA loads of the tile, one copy per stage and block of x_desc; 0 past the end."""
    first_rows, _, counts = source
    BLOCKS: gl.constexpr = x_desc.block_type.shape[0] // 32
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, STAGES * 128 * 128)
    for stage in gl.static_range(STAGES):
        for block in gl.static_range(0, 4, BLOCKS):
            row = gl.where(counts[block] > 0, first_rows[block], _NOWHERE)
            async_load(
                x_desc,
                [row, first_word + 32 * stage],
                ready,
                staged.index((4 * stage + block) // BLOCKS),
            )


@gluon.jit
def _is_ragged(source):
    """Whether a block of the tile has both rows that count and rows that do not."""
    counts = source[2]
    ragged = (counts[0] > 0) & (counts[0] < 32)
    for block in gl.static_range(1, 4):
        ragged = ragged | ((counts[block] > 0) & (counts[block] < 32))
    return ragged


@gluon.jit
def _clear_rows(tile, source, stages, LAYOUT: gl.constexpr):
    """Clear rows that do not count in shared memory, if the tile has ragged blocks."""
    if _is_ragged(source):
        row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
        keep = gl.expand_dims(row % 32 < _of_block(row // 32, source[2]), 1)
        for stage in range(stages):
            words = tile.index(stage).load(LAYOUT)
            tile.index(stage).store(gl.where(keep, words, 0))
        barrier()  # inside the branch: only tiles with ragged blocks need it


# --- both sides of a stage ----------------------------------------------------------------------


@gluon.jit
def _quarters(words, LAYOUT: gl.constexpr):
    """Split the last two dimensions [2, 2] into four tensors, converted to LAYOUT."""
    even, odd = words.split()
    first, third = even.split()
    second, fourth = odd.split()
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(third, LAYOUT, assert_trivial=True),
        gl.convert_layout(fourth, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def _scaled(words, low, high, DTYPE: gl.constexpr):
    """Multiply words of bfloat16 pairs by the inverse scales of both halves; others unchanged."""
    if DTYPE == "bf16":
        pair = (low.to(gl.int32, bitcast=True) >> 16) | high.to(gl.int32, bitcast=True)
        return multiply_bfloat16_pairs(words, pair)
    else:
        return words


@gluon.jit
def _product(words, inverse, HALF: gl.constexpr, DTYPE: gl.constexpr):
    """Scaled float32 values of one half of words from `_scaled`."""
    values = _values(words, HALF, DTYPE)
    return values if DTYPE == "bf16" else values * inverse


@gluon.jit
def _encode(words, inverse, HALF: gl.constexpr, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of one half of each of four words, packed into int32."""
    first, second, third, fourth = words
    return encode_fp8_words(
        _product(first, inverse, HALF, DTYPE),
        _product(second, inverse, HALF, DTYPE),
        _product(third, inverse, HALF, DTYPE),
        _product(fourth, inverse, HALF, DTYPE),
        FORMAT,
    )


@gluon.jit
def _row_words(tile, DTYPE: gl.constexpr):
    """Load the words of a stage, grouped such that each group's codes fill one output word.

    Returns two tensors [128, 2 blocks, 8] for 16-bit values, or four [128, 1, 8] for float32.
    """
    if DTYPE == "fp32":
        LAYOUT: gl.constexpr = _row_codes_layout(1)
        words = tile.load(_row_words_layout(1)).reshape([128, 1, 8, 2, 2])
        return _quarters(words, LAYOUT)
    else:
        PAIRS: gl.constexpr = _row_codes_layout(2)
        left, right = tile.load(_row_words_layout(2)).reshape([128, 2, 8, 2]).split()
        return (
            gl.convert_layout(left, PAIRS, assert_trivial=True),
            gl.convert_layout(right, PAIRS, assert_trivial=True),
        )


@gluon.jit
def _row_maxima(words, DTYPE: gl.constexpr):
    """float32 bits of the largest magnitude of each block, [128, BLOCKS]."""
    if DTYPE == "fp32":
        return _largest_of(words, 2, DTYPE)
    else:
        left, right = words
        larger = _larger(_magnitudes(left, DTYPE), _magnitudes(right, DTYPE), DTYPE)
        both = _largest(larger, 2, DTYPE)
        return _bits(gl.maximum(both & 0xFFFF, both >> 16), 0, DTYPE)


@gluon.jit
def _row_codes(words, byte, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of a stage's rows, four columns a word: int32 [128, BLOCKS, 8]."""
    inverse = gl.expand_dims(inverse_scale(byte), 2)
    if DTYPE == "fp32":
        return _encode(words, inverse, 0, DTYPE, FORMAT)
    else:
        left = _scaled(words[0], inverse, inverse, DTYPE)
        right = _scaled(words[1], inverse, inverse, DTYPE)
        return encode_fp8_words(
            _product(left, inverse, 0, DTYPE),
            _product(left, inverse, 1, DTYPE),
            _product(right, inverse, 0, DTYPE),
            _product(right, inverse, 1, DTYPE),
            FORMAT,
        )


@gluon.jit
def _row_stage(
    tile,
    stage,
    scales,
    codes,
    mask,
    DTYPE: gl.constexpr,
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    CHOOSE: gl.constexpr,
    ENCODE: gl.constexpr,
    MARK: gl.constexpr,
):
    """Rowwise side of a stage: find scales (CHOOSE), store codes (ENCODE).

    Returns `scales`, whose words hold the scale bytes of all stages.
    """
    BLOCKS: gl.constexpr = 1 if DTYPE == "fp32" else 2
    words = _row_words(tile, DTYPE)
    if CHOOSE:
        byte = scale_byte(_row_maxima(words, DTYPE), RULE, MARK)
        scales = scales | (byte << (8 * BLOCKS * stage))
    else:
        byte = (scales >> (8 * BLOCKS * stage)) & 255
    if ENCODE:
        gl.store(codes + 8 * BLOCKS * stage, _row_codes(words, byte, DTYPE, FORMAT), mask=mask)
    return scales


@gluon.jit
def _in_place(codes):
    """Reorder words of codes of the second halves of blocks from row order r ^ 4 to r."""
    even, odd = codes.reshape([4, 2, 2, 2, 32]).permute((0, 1, 2, 4, 3)).split()
    LAYOUT: gl.constexpr = even.type.layout
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    second = gl.expand_dims(gl.expand_dims(gl.expand_dims(half == 1, 0), 2), 3)
    both = gl.join(gl.where(second, odd, even), gl.where(second, even, odd))
    return gl.convert_layout(
        both.permute((0, 1, 2, 4, 3)).reshape([4, 8, 32]),
        column_codes_layout(),
        assert_trivial=True,
    )


@gluon.jit
def _column_byte(
    largest,
    scales,
    index,
    HALF: gl.constexpr,
    DTYPE: gl.constexpr,
    RULE: gl.constexpr,
    CHOOSE: gl.constexpr,
    MARK: gl.constexpr,
):
    """Scale byte of the first or second columns of words; `scales` with byte `index` set."""
    if CHOOSE:
        byte = scale_byte(_bits(largest, HALF, DTYPE), RULE, MARK)
        scales = scales | (byte << (8 * index))
    else:
        byte = (scales >> (8 * index)) & 255
    return byte, scales


@gluon.jit
def _column_stage(
    tile,
    stage,
    scales,
    codes,
    pitch,
    columns,
    width,
    in_copy,
    DTYPE: gl.constexpr,
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    CHOOSE: gl.constexpr,
    ENCODE: gl.constexpr,
    MARK: gl.constexpr,
):
    """Columnwise side of a stage: find scales (CHOOSE), store codes (ENCODE).

    codes, columns: pointers and indices of the tile's first stage. pitch: words of codes per
    column. Returns `scales`, whose words hold the scale bytes of all stages.
    """
    HALVES: gl.constexpr = 1 if DTYPE == "fp32" else 2
    view = reinterpret(tile, gl.int32, [128, 32], _exchanged_halves())
    rows = view.load(_column_words_layout()).reshape([4, 8, 2, 2, 32]).permute((0, 1, 4, 2, 3))
    rows = _quarters(rows, column_codes_layout())
    largest = rows[0]
    if CHOOSE:
        largest = _largest_of(rows, 1, DTYPE)
    first = HALVES * stage
    low, scales = _column_byte(largest, scales, first, 0, DTYPE, RULE, CHOOSE, MARK)
    high = low
    if HALVES == 2:
        high, scales = _column_byte(largest, scales, first + 1, 1, DTYPE, RULE, CHOOSE, MARK)
    if ENCODE:
        step = 32 * first
        low = gl.expand_dims(inverse_scale(low), 1)
        high = gl.expand_dims(inverse_scale(high), 1)
        rows = (
            _scaled(rows[0], low, high, DTYPE),
            _scaled(rows[1], low, high, DTYPE),
            _scaled(rows[2], low, high, DTYPE),
            _scaled(rows[3], low, high, DTYPE),
        )
        gl.store(
            codes + step * pitch,
            _in_place(_encode(rows, low, 0, DTYPE, FORMAT)),
            mask=in_copy & (columns + step < width),
        )
        if HALVES == 2:
            gl.store(
                codes + (step + 1) * pitch,
                _in_place(_encode(rows, high, 1, DTYPE, FORMAT)),
                mask=in_copy & (columns + step < width),
            )
    return scales


@gluon.jit
def _present(present, blocks):
    """Combine masks of rows [128] and of blocks [1, BLOCKS] to [128, BLOCKS, 1]."""
    return gl.expand_dims(gl.expand_dims(present, 1) & blocks, 2)


@gluon.jit
def _row_side(row, row_scale, source, first, num_k_blocks, BLOCKS: gl.constexpr):
    """Rowwise targets of a tile: pointers to codes and to scales, mask of rows, block indices."""
    LAYOUT: gl.constexpr = _row_codes_layout(BLOCKS)
    first_rows, sizes, _ = source
    place = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    present = place % 32 < _of_block(place // 32, sizes)
    scales = (_of_block(place // 32, first_rows) + place % 32).to(gl.int64) * num_k_blocks + first
    block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    offsets = gl.expand_dims(gl.expand_dims(scales * 8, 1) + block * 8, 2) + gl.expand_dims(
        gl.expand_dims(word, 0), 0
    )
    return row.to(gl.pointer_type(gl.int32)) + offsets, row_scale + scales, present, block


@gluon.jit
def _column_side(
    column, first_block, first, num_blocks, blocks_per_matrix, width, HALVES: gl.constexpr
):
    """Columnwise targets of a stage: pointers to codes, column indices, mask of blocks."""
    LAYOUT: gl.constexpr = column_codes_layout()
    block = first_block + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    columns = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))) * HALVES + first * 32
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 1)
    places = in_matrix(block, blocks_per_matrix, width) * 8
    offsets = gl.expand_dims(gl.expand_dims(places, 1) + gl.expand_dims(word, 0), 2) + columns.to(
        gl.int64
    ) * (blocks_per_matrix * 8)
    in_copy = gl.expand_dims(gl.expand_dims(block < num_blocks, 1), 2)
    return column.to(gl.pointer_type(gl.int32)) + offsets, columns, in_copy


@gluon.jit(
    do_not_specialize=["num_blocks", "blocks_per_matrix", "num_k_blocks"],
    do_not_specialize_on_alignment=["table"],
)
def _quantize_dual_hopper_kernel(
    row,
    row_scale,
    column,
    column_scale,
    x_desc,
    table,
    num_blocks,
    blocks_per_matrix,
    num_k_blocks,
    FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    INF_BYTE: gl.constexpr,
    DTYPE: gl.constexpr,
    CHOOSE: gl.constexpr,
    ENCODE: gl.constexpr,
    MARK_ROWS: gl.constexpr,
    MARK_COLUMNS: gl.constexpr,
    ROW_ALIGNMENT: gl.constexpr,
    WIDE_COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Quantise x [rows, K] to codes [rows, K] and, transposed, [matrices, K, 32 blocks_per_matrix].

    x is passed as int32 words of values of DTYPE. CHOOSE: find and store the scale of each block.
    ENCODE: store codes, with the scales just found, or without CHOOSE with the scales in memory.
    MARK_ROWS, MARK_COLUMNS: store scale byte 0 for blocks of zeros and for no others, as the
    kernels that choose the scales of spans expect. ROW_ALIGNMENT (1, 2, 4) divides the number of
    scales per row. WIDE_COLUMNS: 4 divides the number of scales per column.
    """
    HALVES: gl.constexpr = 1 if DTYPE == "fp32" else 2  # values a word, and blocks a stage's row
    STAGES: gl.constexpr = 4 // HALVES
    RULE: gl.constexpr = (EMAX, THRESHOLD, INF_BYTE)
    tiles_k = gl.cdiv(num_k_blocks, 4)
    first_block = gl.program_id(0) // tiles_k * 4
    first = gl.program_id(0) % tiles_k * 4
    blocks = gl.minimum(num_k_blocks - first, 4)
    stages = gl.cdiv(blocks, HALVES)
    gl.assume(stages > 0)
    width = num_k_blocks * 32
    COPY: gl.constexpr = x_desc.block_type.shape[0]
    staged = gl.allocate_shared_memory(gl.int32, [STAGES * 128 // COPY, COPY, 32], x_desc.layout)
    tile = reinterpret(staged, gl.int32, [STAGES, 128, 32], x_desc.layout)
    exchanged = gl.allocate_shared_memory(
        gl.uint8, [128, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    source = _tile_source(first_block, table, num_blocks)
    _start_copies(x_desc, staged, ready, source, first * (32 // HALVES), STAGES)
    row_codes, row_ptrs, present, block = _row_side(
        row, row_scale, source, first, num_k_blocks, HALVES
    )
    column_codes, columns, in_copy = _column_side(
        column, first_block, first, num_blocks, blocks_per_matrix, width, HALVES
    )
    column_ptrs, in_width = scales_of_columns(column_scale, first, blocks_per_matrix, width, HALVES)
    copy = (column_ptrs, in_width, first_block, num_blocks, blocks_per_matrix, width)
    if CHOOSE:
        row_scales = gl.zeros([128, HALVES], gl.int32, gl.SliceLayout(2, _row_codes_layout(HALVES)))
        column_scales = gl.zeros([4, 32], gl.int32, gl.SliceLayout(1, column_codes_layout()))
    else:
        row_scales = gl.expand_dims(
            load_row_scales(row_ptrs, present, blocks, ROW_ALIGNMENT), 1
        ) >> (8 * block)
        column_scales = bytes_of_stages(exchanged, load_column_scales(copy, WIDE_COLUMNS))
    mbarrier.wait(ready, 0)
    if table is not None:
        _clear_rows(tile, source, stages, _row_words_layout(HALVES))
    for stage in range(stages):
        mask = _present(present, block + first + HALVES * stage < num_k_blocks)
        row_scales = _row_stage(
            tile.index(stage),
            stage,
            row_scales,
            row_codes,
            mask,
            DTYPE,
            FORMAT,
            RULE,
            CHOOSE,
            ENCODE,
            MARK_ROWS,
        )
        column_scales = _column_stage(
            tile.index(stage),
            stage,
            column_scales,
            column_codes,
            (blocks_per_matrix * 8).to(gl.int64),
            columns,
            width,
            in_copy,
            DTYPE,
            FORMAT,
            RULE,
            CHOOSE,
            ENCODE,
            MARK_COLUMNS,
        )
    if CHOOSE:
        store_row_scales(
            row_ptrs, gl.sum(row_scales << (8 * block), 1), present, blocks, ROW_ALIGNMENT
        )
        words = words_of_columns(exchanged, column_scales)
        if MARK_COLUMNS and table is not None:
            words = mark_groups(words, source[2])
        store_column_scales(copy, words, WIDE_COLUMNS)
