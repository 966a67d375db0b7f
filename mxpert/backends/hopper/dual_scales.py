"""Scales of the dual quantiser: from maxima to bytes, and between threads and memory.

A thread keeps the scales of all stages of a tile as bytes of one word for each row, or for each
word of columns. In memory bytes that follow each other belong to the blocks of a row, or of a
column; those of a column lie in the four warps, and go through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import reinterpret


@gluon.constexpr_function
def column_codes_layout():
    """[4, 8, 32]: words of codes of 4 rows, 8 to each of 4 blocks, where the values are."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1]],
        [[0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 8, 32])


@gluon.constexpr_function
def _exchanged_layout():
    """[4 steps × 32 words, 4 blocks]: a thread has the 4 steps of its words and its block."""
    return gl.DistributedLinearLayout(
        [[32, 0], [64, 0], [1, 0]], [[0, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2]],
        [], [128, 4])


@gluon.constexpr_function
def _one_each():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def scale_byte(bits, RULE: gl.constexpr, MARK: gl.constexpr):
    """E8M0 byte of blocks with these bits of the maximum; see triton.quantize_kernels.e8m0_scale.

    RULE: (EMAX, THRESHOLD, INF_BYTE). With MARK blocks of zeros have byte 0 and no other block has.
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
    """``2^(127 - byte)``; NaN for 255, so that every value of the block becomes NaN."""
    bits = gl.where(byte == 254, 1 << 22, (254 - byte) << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def in_matrix(block, blocks_per_matrix, width):
    """Offset of column block `block` among the blocks of columnwise copies [width, blocks]."""
    matrix = (block // blocks_per_matrix).to(gl.int64)
    return matrix * width * blocks_per_matrix + (block - matrix * blocks_per_matrix)


@gluon.jit
def load_row_scales(pointers, mask, count, ALIGNMENT: gl.constexpr):
    """`count` bytes (at most 4) of each row as a word; both are multiples of ALIGNMENT."""
    TYPE: gl.constexpr = (None, gl.uint8, gl.uint16, None, gl.int32)[ALIGNMENT]
    LAYOUT: gl.constexpr = pointers.type.layout
    word = gl.zeros([128], gl.int32, LAYOUT)
    for index in gl.static_range(0, 4, ALIGNMENT):
        part = gl.load((pointers + index).to(gl.pointer_type(TYPE)), mask=mask & (index < count),
                       other=0)
        word = word | (part.to(gl.int32) << (8 * index))
    return word


@gluon.jit
def store_row_scales(pointers, word, mask, count, ALIGNMENT: gl.constexpr):
    """The `count` bytes (at most 4) of each row's word; both are multiples of ALIGNMENT."""
    TYPE: gl.constexpr = (None, gl.int8, gl.int16, None, gl.int32)[ALIGNMENT]
    for index in gl.static_range(0, 4, ALIGNMENT):
        gl.store((pointers + index).to(gl.pointer_type(TYPE)), (word >> (8 * index)).to(TYPE),
                 mask=mask & (index < count))


@gluon.jit
def scales_of_columns(column_scale, first, blocks_per_matrix, width, HALVES: gl.constexpr):
    """Where the scales of 128 columns begin, one a thread, and which columns there are.

    Their order is that in which they lie in shared memory, that of `words_of_columns`.
    """
    index = gl.arange(0, 128, _one_each())
    column = first * 32 + index // 32 // HALVES * (32 * HALVES)
    column += index % 32 * HALVES + index // 32 % HALVES
    return column_scale + column.to(gl.int64) * blocks_per_matrix, column < width


@gluon.jit
def load_column_scales(copy, WIDE: gl.constexpr):
    """Scales of 4 blocks as a word."""
    pointers, mask, first_block, num_blocks, blocks_per_matrix, width = copy
    if WIDE:
        offset = in_matrix(first_block, blocks_per_matrix, width)
        return gl.load((pointers + offset).to(gl.pointer_type(gl.int32)), mask=mask, other=0)
    else:
        word = gl.zeros([128], gl.int32, _one_each())
        for block in gl.static_range(4):
            offset = in_matrix(first_block + block, blocks_per_matrix, width)
            byte = gl.load(pointers + offset, mask=mask & (first_block + block < num_blocks),
                           other=0)
            word = word | (byte.to(gl.int32) << (8 * block))
        return word


@gluon.jit
def store_column_scales(copy, word, WIDE: gl.constexpr):
    """Scales of 4 blocks from a word."""
    pointers, mask, first_block, num_blocks, blocks_per_matrix, width = copy
    if WIDE:
        offset = in_matrix(first_block, blocks_per_matrix, width)
        gl.store((pointers + offset).to(gl.pointer_type(gl.int32)), word, mask=mask)
    else:
        for block in gl.static_range(4):
            offset = in_matrix(first_block + block, blocks_per_matrix, width)
            gl.store(pointers + offset, (word >> (8 * block)).to(gl.uint8),
                     mask=mask & (first_block + block < num_blocks))


@gluon.jit
def words_of_columns(exchanged, column_bytes):
    """From words of a column's scales in 4 steps, to the scales of 4 blocks, through shared memory.

    A step is one of the columns of a stage's words [4 blocks, 32 words]; out: [4 steps × 32].
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
    return gl.convert_layout(column_bytes, gl.SliceLayout(1, column_codes_layout()),
                             assert_trivial=True)


@gluon.jit
def _as_words(exchanged):
    return reinterpret(exchanged, gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def mark_groups(word, counts):
    """Byte 127 instead of 0 for blocks of no group: no span holds them."""
    for block in gl.static_range(4):
        lost = ((word >> (8 * block)) & 255) == 0
        word = gl.where(lost & (counts[block] == 0), word | (127 << (8 * block)), word)
    return word
