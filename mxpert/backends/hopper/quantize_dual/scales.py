"""Scales of the dual quantiser: computation from maxima, loads and stores.

A thread keeps the scale bytes of all stages of a tile in one int32 per row, or per word of columns.
In memory, scales of adjacent blocks of a row or of a column are adjacent. The scales of a column
are spread over the four warps, so they are exchanged through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.compat import reinterpret


@gluon.constexpr_function
def column_codes_layout():
    """Layout of columnwise words of codes [4 blocks, 8 words of 4 rows, 32 columns]."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1]],
        [[0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 8, 32],
    )


@gluon.constexpr_function
def _exchanged_layout():
    """Layout [4 steps × 32 words, 4 blocks]: a thread has all 4 steps of its words and block."""
    return gl.DistributedLinearLayout(
        [[32, 0], [64, 0], [1, 0]],
        [[0, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 1], [0, 2]],
        [],
        [128, 4],
    )


@gluon.constexpr_function
def _one_each():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def scale_byte(bits, RULE: gl.constexpr, MARK: gl.constexpr):
    """E8M0 byte (int32) from the bits of a block's maximum, as `e8m0_scale` of the Triton backend.

    RULE: (EMAX, THRESHOLD, INF_BYTE). MARK: blocks of zeros get byte 0, all others at least 1.
    """
    EMAX: gl.constexpr = RULE[0]
    THRESHOLD: gl.constexpr = RULE[1]
    INF_BYTE: gl.constexpr = RULE[2]
    byte = gl.maximum(((bits + (0x800000 - THRESHOLD)) >> 23) - EMAX, 1 if MARK else 0)
    byte = gl.where(bits == 0x7F800000, INF_BYTE, byte)
    byte = gl.where(bits == 0, 0 if MARK else 127, byte)
    return gl.where(bits > 0x7F800000, 255, byte)


@gluon.jit
def inverse_scale(byte):
    """``2^(127 - byte)`` as float32; NaN for 255, which makes all values of the block NaN."""
    bits = gl.where(byte == 254, 1 << 22, (254 - byte) << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def in_matrix(block, blocks_per_matrix, width):
    """Offset of the scale of block `block` in columnwise copies [matrices, width, blocks]."""
    matrix = (block // blocks_per_matrix).to(gl.int64)
    return matrix * width * blocks_per_matrix + (block - matrix * blocks_per_matrix)


@gluon.jit
def load_row_scales(pointers, mask, count, ALIGNMENT: gl.constexpr):
    """Load `count` bytes (at most 4) per row into a word; ALIGNMENT divides count and addresses."""
    TYPE: gl.constexpr = (None, gl.uint8, gl.uint16, None, gl.int32)[ALIGNMENT]
    LAYOUT: gl.constexpr = pointers.type.layout
    word = gl.zeros([128], gl.int32, LAYOUT)
    for index in gl.static_range(0, 4, ALIGNMENT):
        part = gl.load(
            (pointers + index).to(gl.pointer_type(TYPE)), mask=mask & (index < count), other=0
        )
        word = word | (part.to(gl.int32) << (8 * index))
    return word


@gluon.jit
def store_row_scales(pointers, word, mask, count, ALIGNMENT: gl.constexpr):
    """Store `count` bytes (at most 4) of each row's word; ALIGNMENT divides count and addresses."""
    TYPE: gl.constexpr = (None, gl.int8, gl.int16, None, gl.int32)[ALIGNMENT]
    for index in gl.static_range(0, 4, ALIGNMENT):
        gl.store(
            (pointers + index).to(gl.pointer_type(TYPE)),
            (word >> (8 * index)).to(TYPE),
            mask=mask & (index < count),
        )


@gluon.jit
def scales_of_columns(column_scale, first, blocks_per_matrix, width, HALVES: gl.constexpr):
    """Pointers to the scales of 128 columns, one column a thread, and a mask of existing columns.

    The columns are in the order of `words_of_columns` in shared memory.
    """
    index = gl.arange(0, 128, _one_each())
    column = first * 32 + index // 32 // HALVES * (32 * HALVES)
    column += index % 32 * HALVES + index // 32 % HALVES
    return column_scale + column.to(gl.int64) * blocks_per_matrix, column < width


@gluon.jit
def load_column_scales(copy, WIDE: gl.constexpr):
    """Load the scales of 4 blocks of each column as a word; `copy` as in the dual kernel."""
    pointers, mask, first_block, num_blocks, blocks_per_matrix, width = copy
    if WIDE:
        offset = in_matrix(first_block, blocks_per_matrix, width)
        return gl.load((pointers + offset).to(gl.pointer_type(gl.int32)), mask=mask, other=0)
    else:
        word = gl.zeros([128], gl.int32, _one_each())
        for block in gl.static_range(4):
            offset = in_matrix(first_block + block, blocks_per_matrix, width)
            byte = gl.load(
                pointers + offset, mask=mask & (first_block + block < num_blocks), other=0
            )
            word = word | (byte.to(gl.int32) << (8 * block))
        return word


@gluon.jit
def store_column_scales(copy, word, WIDE: gl.constexpr):
    """Store a word of the scales of 4 blocks of each column."""
    pointers, mask, first_block, num_blocks, blocks_per_matrix, width = copy
    if WIDE:
        offset = in_matrix(first_block, blocks_per_matrix, width)
        gl.store((pointers + offset).to(gl.pointer_type(gl.int32)), word, mask=mask)
    else:
        for block in gl.static_range(4):
            offset = in_matrix(first_block + block, blocks_per_matrix, width)
            gl.store(
                pointers + offset,
                (word >> (8 * block)).to(gl.uint8),
                mask=mask & (first_block + block < num_blocks),
            )


@gluon.jit
def words_of_columns(exchanged, column_bytes):
    """Transpose scales through shared memory: from 4 steps per word to 4 blocks per word.

    Input [4 blocks, 32 words]: byte i of a word is the scale in step i, one of the column sets of
    the stages. Output [4 steps × 32]: the word of a column has the scales of its 4 blocks.
    """
    even = gl.join(column_bytes, column_bytes >> 16)
    odd = gl.join(column_bytes >> 8, column_bytes >> 24)
    steps = gl.join(even, odd).to(gl.uint8)  # [4 blocks, 32 words, 2, 2]
    exchanged.store(steps.permute((2, 3, 1, 0)).reshape([128, 4]))
    return _as_words(exchanged).load(_one_each())


@gluon.jit
def bytes_of_stages(exchanged, column_word):
    """The inverse of `words_of_columns`."""
    _as_words(exchanged).store(column_word)
    scales = exchanged.load(_exchanged_layout()).to(gl.int32).reshape([2, 2, 32, 4])
    even, odd = scales.permute((3, 2, 0, 1)).split()
    first, third = even.split()
    second, fourth = odd.split()
    column_bytes = first | (second << 8) | (third << 16) | (fourth << 24)
    return gl.convert_layout(
        column_bytes, gl.SliceLayout(1, column_codes_layout()), assert_trivial=True
    )


@gluon.jit
def _as_words(exchanged):
    return reinterpret(exchanged, gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def mark_groups(word, counts):
    """Replace byte 0 by 127 for blocks outside the groups, which belong to no span."""
    for block in gl.static_range(4):
        lost = ((word >> (8 * block)) & 255) == 0
        word = gl.where(lost & (counts[block] == 0), word | (127 << (8 * block)), word)
    return word
