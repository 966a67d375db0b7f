"""Rowwise side of the dual quantiser: blocks of 1 × 32 values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.compat import aggregate
from ..device.hopper_ptx import encode_fp8_words
from .dual_hopper_layouts import (
    BLOCK_WORDS,
    MX_BLOCK,
    TILE,
    TILE_BLOCKS,
    row_codes_layout,
    row_words_layout,
)
from .dual_hopper_source import select
from .dual_hopper_values import inverse_scale, quarters


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
