"""Dual quantisation: rowwise and columnwise MXFP8 copies of a tensor from one read.

A CTA quantises a tile of 128 positions × 128 columns. A warp has 32 positions, so MX blocks of rows
(1 × 32) and of columns (32 × 1) lie inside a warp. TMA loads the whole tile at once as 32-bit
words (dual_hopper_source.py). Then the CTA quantises stage by stage, first rowwise, then
columnwise, from the same shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..device.compat import aggregate, reinterpret
from ..device.hopper_ptx import encode_fp8_words, larger_halves, multiply_bfloat16_pairs
from .dual_hopper_source import (
    BLOCK_WORDS,
    MX_BLOCK,
    STAGE_WORDS,
    TILE,
    TILE_BLOCKS,
    allocate_tile,
    column_codes_layout,
    column_scales_layout,
    column_words_layout,
    exchanged_halves,
    one_column_per_thread,
    row_codes_layout,
    row_words_layout,
    select,
    tile_source,
)

# ---- Values and scales of the dual quantiser: maxima, E8M0 bytes, codes.
#
# Values stay in the words that TMA loaded: one float32, or a pair of 16-bit values, the first in
# the lower half.

_INFINITY = gl.constexpr(0x7F800000)
_NAN = gl.constexpr(0x7FC00000)
_EXPONENT_ONE = gl.constexpr(1 << 23)
"""Bits of float32."""

_BYTE_ONE, _BYTE_NAN = gl.constexpr(127), gl.constexpr(255)
"""E8M0 bytes of 1.0 and of NaN."""


@aggregate
class Quantizer:
    """What the kernel computes.

    DTYPE: of the values, "fp32", "fp16" or "bf16". FORMAT: of the codes. EMAX, THRESHOLD: the scale
    rule, as in `scale_rule_constants`. CHOOSE: find and store the scales of blocks. ENCODE: store
    codes.
    """

    DTYPE: gl.constexpr
    FORMAT: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr
    CHOOSE: gl.constexpr
    ENCODE: gl.constexpr

    @gluon.jit
    def scale_byte(self, bits, MARK: gl.constexpr):
        """E8M0 byte (int32) from the bits of a block's maximum, as `e8m0_scale` in mx_codec.py.

        Infinity and NaN give 255. MARK: blocks of zeros get byte 0, all others at least 1.
        """
        byte = gl.maximum(
            ((bits + (_EXPONENT_ONE - self.THRESHOLD)) >> 23) - self.EMAX, 1 if MARK else 0
        )
        byte = gl.where(bits == 0, 0 if MARK else _BYTE_ONE, byte)
        return gl.where(bits >= _INFINITY, _BYTE_NAN, byte)

    @gluon.jit
    def magnitudes(self, words):
        """Clear the signs."""
        return words & (0x7FFFFFFF if self.DTYPE == "fp32" else 0x7FFF7FFF)

    @gluon.jit
    def larger(self, left, right):
        """The larger of two magnitudes; 16-bit pairs are compared per half. NaN is largest."""
        return gl.maximum(left, right) if self.DTYPE == "fp32" else larger_halves(left, right)

    @gluon.jit
    def largest(self, words, AXIS: gl.constexpr):
        """Largest magnitude along an axis, per half for 16-bit pairs."""
        return (
            gl.max(words, AXIS) if self.DTYPE == "fp32" else gl.reduce(words, AXIS, larger_halves)
        )

    @gluon.jit
    def largest_of(self, words, AXIS: gl.constexpr):
        """Largest magnitude of four tensors of words along an axis."""
        first, second, third, fourth = words
        left = self.larger(self.magnitudes(first), self.magnitudes(second))
        right = self.larger(self.magnitudes(third), self.magnitudes(fourth))
        return self.largest(self.larger(left, right), AXIS)

    @gluon.jit
    def values(self, words, HALF: gl.constexpr):
        """The first or second value of each word as float32."""
        if self.DTYPE == "fp16":
            half = (words >> (16 * HALF)).to(gl.int16)
            return half.to(gl.float16, bitcast=True).to(gl.float32)
        elif self.DTYPE == "fp32":
            return words.to(gl.float32, bitcast=True)
        elif HALF == 0:
            return (words << 16).to(gl.float32, bitcast=True)
        else:
            return (words & -65536).to(gl.float32, bitcast=True)

    @gluon.jit
    def bits(self, words, HALF: gl.constexpr):
        """Bits of the first or second value of each word as float32, int32."""
        return self.values(words, HALF).to(gl.int32, bitcast=True)

    @gluon.jit
    def scaled(self, words, low, high):
        """Multiply words of bfloat16 pairs by the inverse scales of both halves; others unchanged.

        An instruction multiplies a pair. Products that underflow bfloat16 are too small for a code.
        """
        if self.DTYPE == "bf16":
            pair = (low.to(gl.int32, bitcast=True) >> 16) | high.to(gl.int32, bitcast=True)
            return multiply_bfloat16_pairs(words, pair)
        else:
            return words

    @gluon.jit
    def product(self, words, inverse, HALF: gl.constexpr):
        """Scaled float32 values of one half of words from `scaled`."""
        values = self.values(words, HALF)
        return values if self.DTYPE == "bf16" else values * inverse

    @gluon.jit
    def encode(self, words, inverse, HALF: gl.constexpr):
        """Codes of one half of each of four words from `scaled`, packed into int32."""
        first, second, third, fourth = words
        return encode_fp8_words(
            self.product(first, inverse, HALF),
            self.product(second, inverse, HALF),
            self.product(third, inverse, HALF),
            self.product(fourth, inverse, HALF),
            self.FORMAT,
        )


@gluon.jit
def inverse_scale(byte):
    """``2^(127 - byte)`` as float32; NaN for 255, which makes all values of the block NaN."""
    bits = gl.where(byte == 254, 1 << 22, (254 - byte) << 23)  # 2^-127 is subnormal
    return gl.where(byte == _BYTE_NAN, _NAN, bits).to(gl.float32, bitcast=True)


@gluon.jit
def quarters(words, LAYOUT: gl.constexpr):
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


# ---- Rowwise side of the dual quantiser: blocks of 1 × 32 values.


@aggregate
class RowSide:
    """Rowwise target of a tile, with BLOCKS (1, 2) blocks a row in a stage.

    codes: [128, BLOCKS, 8] pointers to words of codes, for the first stage. scales: [128] pointers
    to the scale of the tile's first block. is_row: [128], rows that exist. block: [1, BLOCKS], 0 …
    first_k_block, num_k_blocks: first block of the tile in a row, and blocks of a row. ALIGNMENT
    (1, 2, 4) divides num_k_blocks. MARK: as in `Quantizer.scale_byte`.
    """

    codes: gl.tensor
    scales: gl.tensor
    is_row: gl.tensor
    block: gl.tensor
    first_k_block: gl.tensor
    num_k_blocks: gl.tensor
    BLOCKS: gl.constexpr
    ALIGNMENT: gl.constexpr
    MARK: gl.constexpr

    @gluon.jit
    def no_scales(self):
        """Scale bytes [128, BLOCKS] int32 of all stages, none of them set."""
        LAYOUT: gl.constexpr = gl.SliceLayout(2, row_codes_layout(self.BLOCKS))
        return gl.zeros([TILE, self.BLOCKS], gl.int32, LAYOUT)

    @gluon.jit
    def load_scales(self, num_blocks):
        """Load the scale bytes of all stages, [128, BLOCKS] int32; num_blocks is at most 4."""
        TYPE: gl.constexpr = (None, gl.uint8, gl.uint16, None, gl.int32)[self.ALIGNMENT]
        LAYOUT: gl.constexpr = self.scales.type.layout
        word = gl.zeros([TILE], gl.int32, LAYOUT)
        for index in gl.static_range(0, TILE_BLOCKS, self.ALIGNMENT):
            part = gl.load(
                (self.scales + index).to(gl.pointer_type(TYPE)),
                mask=self.is_row & (index < num_blocks),
                other=0,
            )
            word = word | (part.to(gl.int32) << (8 * index))
        return gl.expand_dims(word, 1) >> (8 * self.block)

    @gluon.jit
    def store_scales(self, scales, num_blocks):
        """Store the scale bytes of all stages."""
        TYPE: gl.constexpr = (None, gl.int8, gl.int16, None, gl.int32)[self.ALIGNMENT]
        word = gl.sum(scales << (8 * self.block), 1)  # [128] int32, a row's four bytes
        for index in gl.static_range(0, TILE_BLOCKS, self.ALIGNMENT):
            gl.store(
                (self.scales + index).to(gl.pointer_type(TYPE)),
                (word >> (8 * index)).to(TYPE),
                mask=self.is_row & (index < num_blocks),
            )

    @gluon.jit
    def quantize(self, stages, stage, scales, quantizer):
        """Find the scales (CHOOSE) and store the codes (ENCODE) of a stage.

        stages: [STAGES, 128, 32] int32 words in shared memory.

        Returns `scales`; byte BLOCKS × stage of its words belongs to the stage.
        """
        block = self.block + self.first_k_block + self.BLOCKS * stage
        is_block = gl.expand_dims(self.is_row, 1) & (block < self.num_k_blocks)
        mask = gl.expand_dims(is_block, 2)
        words = _load_words(stages.index(stage), quantizer)
        shift = 8 * self.BLOCKS * stage
        if quantizer.CHOOSE:
            byte = quantizer.scale_byte(_maxima(words, quantizer), self.MARK)
            scales = scales | (byte << shift)
        else:
            byte = (scales >> shift) & 255
        if quantizer.ENCODE:
            gl.store(
                self.codes + BLOCK_WORDS * self.BLOCKS * stage,
                _codes(words, byte, quantizer),
                mask=mask,
            )
        return scales


@gluon.jit
def row_side(
    codes,
    scales,
    source,
    first_k_block,
    num_k_blocks,
    BLOCKS: gl.constexpr,
    ALIGNMENT: gl.constexpr,
    MARK: gl.constexpr,
):
    """`RowSide` of a tile in copies [rows, K] of codes and [rows, K / 32] of scales."""
    LAYOUT: gl.constexpr = row_codes_layout(BLOCKS)
    position = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    is_row = position % MX_BLOCK < select(position // MX_BLOCK, source.sizes)
    row = select(position // MX_BLOCK, source.first_rows) + position % MX_BLOCK
    first_scale = row.to(gl.int64) * num_k_blocks + first_k_block
    block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    word = gl.arange(0, BLOCK_WORDS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    block_words = gl.expand_dims(first_scale * BLOCK_WORDS, 1) + block * BLOCK_WORDS
    words = gl.expand_dims(block_words, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    return RowSide(
        codes=codes.to(gl.pointer_type(gl.int32)) + words,
        scales=scales + first_scale,
        is_row=is_row,
        block=block,
        first_k_block=first_k_block,
        num_k_blocks=num_k_blocks,
        BLOCKS=BLOCKS,
        ALIGNMENT=ALIGNMENT,
        MARK=MARK,
    )


@gluon.jit
def _load_words(tile, quantizer):
    """Load the words of a stage, grouped such that each group's codes fill one output word.

    Returns two tensors [128, 2 blocks, 8] for 16-bit values, or four [128, 1, 8] for float32.
    """
    if quantizer.DTYPE == "fp32":
        words = tile.load(row_words_layout(1)).reshape([128, 1, 8, 2, 2])
        return quarters(words, row_codes_layout(1))
    else:
        PAIRS: gl.constexpr = row_codes_layout(2)
        left, right = tile.load(row_words_layout(2)).reshape([128, 2, 8, 2]).split()
        return (
            gl.convert_layout(left, PAIRS, assert_trivial=True),
            gl.convert_layout(right, PAIRS, assert_trivial=True),
        )


@gluon.jit
def _maxima(words, quantizer):
    """float32 bits of the largest magnitude of each block, [128, BLOCKS]."""
    if quantizer.DTYPE == "fp32":
        return quantizer.largest_of(words, 2)
    else:
        left, right = words
        larger = quantizer.larger(quantizer.magnitudes(left), quantizer.magnitudes(right))
        both = quantizer.largest(larger, 2)
        return quantizer.bits(gl.maximum(both & 0xFFFF, both >> 16), 0)


@gluon.jit
def _codes(words, byte, quantizer):
    """Codes of a stage's rows, four columns a word: int32 [128, BLOCKS, 8]."""
    inverse = gl.expand_dims(inverse_scale(byte), 2)
    if quantizer.DTYPE == "fp32":
        return quantizer.encode(words, inverse, 0)
    else:
        left, right = words
        left = quantizer.scaled(left, inverse, inverse)
        right = quantizer.scaled(right, inverse, inverse)
        return encode_fp8_words(
            quantizer.product(left, inverse, 0),
            quantizer.product(left, inverse, 1),
            quantizer.product(right, inverse, 0),
            quantizer.product(right, inverse, 1),
            quantizer.FORMAT,
        )


# ---- Columnwise side of the dual quantiser: blocks of 32 × 1 values, codes transposed.
#
# The tile's 128 columns are quantised in four steps of 32 columns. A stage holds one step
# (float32), or two where a 32-bit word has two values: the first values, then the second ones.


@aggregate
class ColumnCopy:
    """Sizes of the columnwise copy [matrices, width, 32 blocks_per_matrix].

    num_blocks: blocks of all matrices.
    """

    num_blocks: gl.tensor
    blocks_per_matrix: gl.tensor
    width: gl.tensor

    @gluon.jit
    def scale_offset(self, block):
        """Offset of the scale of block `block`, counted over all matrices, in column 0."""
        matrix = (block // self.blocks_per_matrix).to(gl.int64)
        return matrix * self.width * self.blocks_per_matrix + (
            block - matrix * self.blocks_per_matrix
        )


@aggregate
class ColumnSide:
    """Columnwise target of a tile, with STEPS (1, 2) steps a stage.

    codes: [4 blocks, 8, 32] pointers to words of codes, for the first stage. columns: [1, 1, 32],
    its columns. is_block: [4, 1, 1], blocks that exist. pitch: words of codes per column. MARK: as
    in `Quantizer.scale_byte`.
    """

    codes: gl.tensor
    columns: gl.tensor
    is_block: gl.tensor
    pitch: gl.tensor
    width: gl.tensor
    STEPS: gl.constexpr
    MARK: gl.constexpr

    @gluon.jit
    def no_scales(self):
        """Scale bytes [4 blocks, 32 words of columns] int32 of all steps, none of them set."""
        LAYOUT: gl.constexpr = gl.SliceLayout(1, column_codes_layout())
        return gl.zeros([TILE_BLOCKS, STAGE_WORDS], gl.int32, LAYOUT)

    @gluon.jit
    def _scale_byte(self, largest, scales, step, quantizer, HALF: gl.constexpr):
        """Scale byte of a step's columns; `scales` with byte `step` set."""
        if quantizer.CHOOSE:
            byte = quantizer.scale_byte(quantizer.bits(largest, HALF), self.MARK)
            scales = scales | (byte << (8 * step))
        else:
            byte = (scales >> (8 * step)) & 255
        return byte, scales

    @gluon.jit
    def _store_codes(self, rows, inverse, column, quantizer, HALF: gl.constexpr):
        """Store the codes of the first or second columns of a stage's words.

        column: offset of the stage's first column in the tile.
        """
        gl.store(
            self.codes + (column + HALF) * self.pitch,
            _in_place(quantizer.encode(rows, inverse, HALF)),
            mask=self.is_block & (self.columns + column < self.width),
        )

    @gluon.jit
    def quantize(self, stages, stage, scales, quantizer):
        """Find the scales (CHOOSE) and store the codes (ENCODE) of a stage.

        stages: [STAGES, 128, 32] int32 words in shared memory.

        Returns `scales`; byte STEPS × stage of its words belongs to the stage's first step.
        """
        view = reinterpret(stages.index(stage), gl.int32, [128, 32], exchanged_halves())
        rows = view.load(column_words_layout()).reshape([4, 8, 2, 2, 32]).permute((0, 1, 4, 2, 3))
        rows = quarters(rows, column_codes_layout())  # four times [4 blocks, 8, 32 words]
        largest = None
        if quantizer.CHOOSE:
            largest = quantizer.largest_of(rows, 1)  # [4 blocks, 32 words]
        step = self.STEPS * stage
        low, scales = self._scale_byte(largest, scales, step, quantizer, HALF=0)
        high = low
        if self.STEPS == 2:
            high, scales = self._scale_byte(largest, scales, step + 1, quantizer, HALF=1)
        if quantizer.ENCODE:
            column = MX_BLOCK * step
            low = gl.expand_dims(inverse_scale(low), 1)
            high = gl.expand_dims(inverse_scale(high), 1)
            first, second, third, fourth = rows
            rows = (
                quantizer.scaled(first, low, high),
                quantizer.scaled(second, low, high),
                quantizer.scaled(third, low, high),
                quantizer.scaled(fourth, low, high),
            )
            self._store_codes(rows, low, column, quantizer, HALF=0)
            if self.STEPS == 2:
                self._store_codes(rows, high, column, quantizer, HALF=1)
        return scales


@gluon.jit
def column_side(codes, copy, first_block, first_k_block, STEPS: gl.constexpr, MARK: gl.constexpr):
    """`ColumnSide` of a tile; `copy` is its `ColumnCopy`."""
    LAYOUT: gl.constexpr = column_codes_layout()
    block = first_block + gl.arange(0, TILE_BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, BLOCK_WORDS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    columns = gl.arange(0, STAGE_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    columns = columns * STEPS + first_k_block * MX_BLOCK
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 1)
    block_words = gl.expand_dims(copy.scale_offset(block) * BLOCK_WORDS, 1)
    words = gl.expand_dims(block_words + gl.expand_dims(word, 0), 2)
    offsets = words + columns.to(gl.int64) * (copy.blocks_per_matrix * BLOCK_WORDS)
    is_block = gl.expand_dims(gl.expand_dims(block < copy.num_blocks, 1), 2)
    return ColumnSide(
        codes=codes.to(gl.pointer_type(gl.int32)) + offsets,
        columns=columns,
        is_block=is_block,
        pitch=(copy.blocks_per_matrix * BLOCK_WORDS).to(gl.int64),
        width=copy.width,
        STEPS=STEPS,
        MARK=MARK,
    )


@gluon.jit
def _in_place(codes):
    """Reorder words of codes of the second halves of blocks from row order r ^ 4 to r."""
    even, odd = codes.reshape([4, 2, 2, 2, 32]).permute((0, 1, 2, 4, 3)).split()
    LAYOUT: gl.constexpr = even.type.layout
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    second = gl.expand_dims(gl.expand_dims(gl.expand_dims(half == 1, 0), 2), 3)
    both = gl.join(gl.where(second, odd, even), gl.where(second, even, odd))
    words = both.permute((0, 1, 2, 4, 3)).reshape([4, 8, 32])
    return gl.convert_layout(words, column_codes_layout(), assert_trivial=True)


# ---- Scales of the columnwise copy: loads, stores, and their transposition.
#
# A thread keeps the scale bytes of all steps of a tile in one int32 per block and word of columns
# (`ColumnSide`). In memory, the scales of the four blocks of a column are adjacent. They are spread
# over the four warps, so they are exchanged through shared memory.


@aggregate
class ColumnScales:
    """Scales of a tile in the columnwise copy.

    pointers: [128] to block 0 of each column, in the order of `exchanged`. is_column: [128], which
    columns exist. exchanged: shared memory [4 steps × 32 words, 4 blocks] uint8. WIDE: 4 divides
    the blocks of a column, so four scales are one access.
    """

    pointers: gl.tensor
    is_column: gl.tensor
    first_block: gl.tensor
    copy: ColumnCopy
    exchanged: gl.shared_memory_descriptor
    WIDE: gl.constexpr

    @gluon.jit
    def load(self):
        """Load scale bytes in the form of `ColumnSide`, [4 blocks, 32 words] int32."""
        if self.WIDE:
            pointers = self.pointers + self.copy.scale_offset(self.first_block)
            word = gl.load(pointers.to(gl.pointer_type(gl.int32)), mask=self.is_column, other=0)
        else:
            word = gl.zeros([TILE], gl.int32, one_column_per_thread())
            for index in gl.static_range(TILE_BLOCKS):
                block = self.first_block + index
                offset = self.copy.scale_offset(block)
                mask = self.is_column & (block < self.copy.num_blocks)
                byte = gl.load(self.pointers + offset, mask=mask, other=0)
                word = word | (byte.to(gl.int32) << (8 * index))
        return self._bytes_of_steps(word)

    @gluon.jit
    def store(self, column_bytes, counts, MARK_GROUPS: gl.constexpr):
        """Store scale bytes in the form of `ColumnSide`.

        MARK_GROUPS: replace byte 0 by 127 for blocks outside the groups, which belong to no span;
        `counts` are the numbers of their rows that count.
        """
        word = self._words_of_columns(column_bytes)
        if MARK_GROUPS:
            for index in gl.static_range(TILE_BLOCKS):
                is_zero = ((word >> (8 * index)) & 255) == 0
                is_outside = counts[index] == 0
                word = gl.where(is_zero & is_outside, word | (127 << (8 * index)), word)
        if self.WIDE:
            pointers = self.pointers + self.copy.scale_offset(self.first_block)
            gl.store(pointers.to(gl.pointer_type(gl.int32)), word, mask=self.is_column)
        else:
            for index in gl.static_range(TILE_BLOCKS):
                block = self.first_block + index
                offset = self.copy.scale_offset(block)
                mask = self.is_column & (block < self.copy.num_blocks)
                gl.store(self.pointers + offset, (word >> (8 * index)).to(gl.uint8), mask=mask)

    @gluon.jit
    def _words(self):
        """`exchanged` as [128] int32: the scales of a column's four blocks are a word."""
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return reinterpret(self.exchanged, gl.int32, [TILE], WORDS)

    @gluon.jit
    def _words_of_columns(self, column_bytes):
        """From [4 blocks, 32 words] with 4 steps a word to [4 steps × 32] with 4 blocks a word."""
        even = gl.join(column_bytes, column_bytes >> 16)
        odd = gl.join(column_bytes >> 8, column_bytes >> 24)
        steps = gl.join(even, odd).to(gl.uint8)  # [4 blocks, 32 words, 2, 2]
        self.exchanged.store(steps.permute((2, 3, 1, 0)).reshape([128, 4]))
        return self._words().load(one_column_per_thread())

    @gluon.jit
    def _bytes_of_steps(self, column_word):
        """The inverse of `_words_of_columns`."""
        self._words().store(column_word)
        scales = self.exchanged.load(column_scales_layout()).to(gl.int32).reshape([2, 2, 32, 4])
        even, odd = scales.permute((3, 2, 0, 1)).split()
        first, third = even.split()
        second, fourth = odd.split()
        column_bytes = first | (second << 8) | (third << 16) | (fourth << 24)
        return gl.convert_layout(
            column_bytes, gl.SliceLayout(1, column_codes_layout()), assert_trivial=True
        )


@gluon.jit
def allocate_exchanged():
    """Allocate the shared memory of `ColumnScales`."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.uint8, [TILE, TILE_BLOCKS], LAYOUT)


@gluon.jit
def scales_of_tile(
    scales, copy, first_block, first_k_block, exchanged, STEPS: gl.constexpr, WIDE: gl.constexpr
):
    """`ColumnScales` of a tile with STEPS steps a stage; each thread has one column."""
    index = gl.arange(0, TILE, one_column_per_thread())
    column = first_k_block * MX_BLOCK + index // 32 // STEPS * (32 * STEPS)
    column += index % 32 * STEPS + index // 32 % STEPS
    return ColumnScales(
        pointers=scales + column.to(gl.int64) * copy.blocks_per_matrix,
        is_column=column < copy.width,
        first_block=first_block,
        copy=copy,
        exchanged=exchanged,
        WIDE=WIDE,
    )


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

    Grid: one CTA per tile, ⌈num_blocks / 4⌉ × ⌈num_k_blocks / 4⌉; tiles of a row are adjacent.

    x is passed as int32 words of values of DTYPE. CHOOSE: find and store the scale of each block.
    ENCODE: store codes, with the scales just found, or without CHOOSE with the scales in memory.
    MARK_ROWS, MARK_COLUMNS: store scale byte 0 for blocks of zeros and for no others, as the
    kernels that choose the scales of spans expect. ROW_ALIGNMENT (1, 2, 4) divides the number of
    scales per row. WIDE_COLUMNS: 4 divides the number of scales per column.
    """
    gl.static_assert(num_warps == TILE_BLOCKS, "a warp has one block of positions")
    HALVES: gl.constexpr = 1 if DTYPE == "fp32" else 2  # values a word, and blocks a stage's row
    STAGES: gl.constexpr = TILE_BLOCKS // HALVES
    quantizer = Quantizer(DTYPE, FORMAT, EMAX, THRESHOLD, CHOOSE, ENCODE)
    tiles_k = gl.cdiv(num_k_blocks, TILE_BLOCKS)
    first_block = gl.program_id(0) // tiles_k * TILE_BLOCKS
    first_k_block = gl.program_id(0) % tiles_k * TILE_BLOCKS
    k_blocks = gl.minimum(num_k_blocks - first_k_block, TILE_BLOCKS)
    stages = gl.cdiv(k_blocks, HALVES)
    gl.assume(stages > 0)
    copy = ColumnCopy(num_blocks, blocks_per_matrix, num_k_blocks * MX_BLOCK)
    loads, tile = allocate_tile(x_desc, STAGES)
    exchanged = allocate_exchanged()
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    source = tile_source(first_block, table, num_blocks)
    source.start_loads(x_desc, loads, ready, first_k_block * (MX_BLOCK // HALVES), STAGES)
    rowwise = row_side(
        row,
        row_scale,
        source,
        first_k_block,
        num_k_blocks,
        BLOCKS=HALVES,
        ALIGNMENT=ROW_ALIGNMENT,
        MARK=MARK_ROWS,
    )
    columnwise = column_side(
        column, copy, first_block, first_k_block, STEPS=HALVES, MARK=MARK_COLUMNS
    )
    column_scales = scales_of_tile(
        column_scale, copy, first_block, first_k_block, exchanged, STEPS=HALVES, WIDE=WIDE_COLUMNS
    )
    if CHOOSE:
        row_bytes = rowwise.no_scales()
        column_bytes = columnwise.no_scales()
    else:
        row_bytes = rowwise.load_scales(k_blocks)
        column_bytes = column_scales.load()
    mbarrier.wait(ready, 0)
    if table is not None:
        source.clear_rows(tile, stages, row_words_layout(HALVES))
    for stage in range(stages):
        row_bytes = rowwise.quantize(tile, stage, row_bytes, quantizer)
        column_bytes = columnwise.quantize(tile, stage, column_bytes, quantizer)
    if CHOOSE:
        rowwise.store_scales(row_bytes, k_blocks)
        column_scales.store(column_bytes, source.counts, MARK_COLUMNS and table is not None)
