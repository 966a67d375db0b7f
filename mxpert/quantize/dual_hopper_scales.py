"""Scales of the columnwise copy: loads, stores, and their transposition.

A thread keeps the scale bytes of all steps of a tile in one int32 per block and word of columns
(`ColumnSide`). In memory, the scales of the four blocks of a column are adjacent. They are spread
over the four warps, so they are exchanged through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.compat import aggregate, reinterpret
from .dual_hopper_columnwise import ColumnCopy
from .dual_hopper_layouts import (
    MX_BLOCK,
    TILE,
    TILE_BLOCKS,
    column_codes_layout,
    column_scales_layout,
    one_column_per_thread,
)


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
