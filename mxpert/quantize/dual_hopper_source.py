"""Source of the dual quantiser: the rows of a tile's blocks, and their TMA loads.

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

from ..device.compat import aggregate, async_load, barrier, reinterpret
from .dual_hopper_layouts import MX_BLOCK, STAGE_WORDS, TILE, TILE_BLOCKS

_PAST_THE_END = gl.constexpr(1 << 30)
"""A row past the end of every source."""

_WORD_BYTES = gl.constexpr(4)


@gluon.jit
def allocate_tile(x_desc, STAGES: gl.constexpr):
    """Allocate a tile; return it as the targets of TMA loads and as stages [STAGES, 128, 32]."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    loads = gl.allocate_shared_memory(
        gl.int32, [STAGES * TILE // ROWS, ROWS, STAGE_WORDS], x_desc.layout
    )
    return loads, reinterpret(loads, gl.int32, [STAGES, TILE, STAGE_WORDS], x_desc.layout)


@gluon.jit
def select(index, values):
    """Select values[index] for each index (0 … 3)."""
    first, second, third, fourth = values
    return gl.where(
        index < 2, gl.where(index == 0, first, second), gl.where(index == 2, third, fourth)
    )


@aggregate
class TileSource:
    """Source rows of a tile's four blocks, each field a tuple of four int32 scalars.

    first_rows: first row of each block. sizes: number of its rows. counts: how many of them count.
    """

    first_rows: gl.tuple
    sizes: gl.tuple
    counts: gl.tuple

    @gluon.jit
    def start_loads(self, x_desc, loads, ready, first_word, STAGES: gl.constexpr):
        """Start the TMA loads of the tile; zeros past the end.

        loads: the targets from `allocate_tile`, of 1 block each with groups, else of 4 blocks.
        """
        BLOCKS: gl.constexpr = x_desc.block_type.shape[0] // MX_BLOCK
        mbarrier.init(ready, count=1)
        mbarrier.expect(ready, STAGES * TILE * STAGE_WORDS * _WORD_BYTES)
        for stage in gl.static_range(STAGES):
            for block in gl.static_range(0, TILE_BLOCKS, BLOCKS):
                row = gl.where(self.counts[block] > 0, self.first_rows[block], _PAST_THE_END)
                async_load(
                    x_desc,
                    [row, first_word + STAGE_WORDS * stage],
                    ready,
                    loads.index((TILE_BLOCKS * stage + block) // BLOCKS),
                )

    @gluon.jit
    def _is_ragged(self):
        """Whether a block of the tile has both rows that count and rows that do not."""
        first, second, third, fourth = self.counts
        ragged = (first > 0) & (first < MX_BLOCK)
        ragged = ragged | ((second > 0) & (second < MX_BLOCK))
        ragged = ragged | ((third > 0) & (third < MX_BLOCK))
        return ragged | ((fourth > 0) & (fourth < MX_BLOCK))

    @gluon.jit
    def clear_rows(self, tile, num_stages, LAYOUT: gl.constexpr):
        """Clear rows that do not count in shared memory, if the tile has ragged blocks."""
        if self._is_ragged():
            row = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
            keep = gl.expand_dims(row % MX_BLOCK < select(row // MX_BLOCK, self.counts), 1)
            for stage in range(num_stages):
                words = tile.index(stage).load(LAYOUT)  # [128, 32] int32
                tile.index(stage).store(gl.where(keep, words, 0))
            barrier()  # inside the branch: only tiles with ragged blocks need it


@gluon.jit
def _source_of_block(block, table, num_blocks):
    """First row of a block, number of its rows, and number of those that count."""
    in_copy = block < num_blocks
    if table is None:
        rows = gl.where(in_copy, MX_BLOCK, 0)
        return block * MX_BLOCK, rows, rows
    else:
        first = gl.load(table + 2 * block, mask=in_copy, other=0)
        sizes = gl.load(table + 2 * block + 1, mask=in_copy, other=0)
        return first, sizes & 255, sizes >> 8


@gluon.jit
def tile_source(first_block, table, num_blocks):
    """`TileSource` of four blocks. table [num_blocks, 2] int32 as `_block_table_kernel` writes it.

    Without groups there is no table (None), and block b has the rows 32 b … 32 b + 31.
    """
    row0, size0, count0 = _source_of_block(first_block, table, num_blocks)
    row1, size1, count1 = _source_of_block(first_block + 1, table, num_blocks)
    row2, size2, count2 = _source_of_block(first_block + 2, table, num_blocks)
    row3, size3, count3 = _source_of_block(first_block + 3, table, num_blocks)
    return TileSource(
        first_rows=(row0, row1, row2, row3),
        sizes=(size0, size1, size2, size3),
        counts=(count0, count1, count2, count3),
    )
