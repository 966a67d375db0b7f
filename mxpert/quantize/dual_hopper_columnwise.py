"""Columnwise side of the dual quantiser: blocks of 32 × 1 values, codes transposed.

A stage has one set of 32 columns (float32), or two: the first and the second values of its words.
A step is such a set; a tile has four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.compat import aggregate, reinterpret
from .dual_hopper_layouts import (
    BLOCK_WORDS,
    MX_BLOCK,
    STAGE_WORDS,
    TILE_BLOCKS,
    column_codes_layout,
    column_words_layout,
    exchanged_halves,
)
from .dual_hopper_values import inverse_scale, quarters


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
