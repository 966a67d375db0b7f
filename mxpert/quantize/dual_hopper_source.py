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
from ..formats.spec import MX_BLOCK_SIZE

# ---- Sizes and layouts of the dual quantiser.
#
# A tile is 128 positions × 128 columns: 4 × 4 MX blocks. A stage is a slice of it, [128, 32] words
# of 4 bytes: 64 columns of 16-bit values (2 blocks a row), or 32 of float32 (1 block a row). Its
# rows of 128 bytes are swizzled by TMA: 16-byte chunk c of row r lies at c ^ (r % 8).
#
# Codes are handled as words of four. The rowwise and the columnwise side read a stage in different
# layouts. In both, two neighbouring threads have 16 values of a block each: one shuffle completes
# the maximum, and both threads compute the scale. A thread stores its codes in 16 bytes; two
# neighbours fill a sector.

MX_BLOCK = gl.constexpr(MX_BLOCK_SIZE)
TILE_BLOCKS = gl.constexpr(4)
"""Blocks of a tile in each direction; as many as the scale bytes of a word."""

TILE = gl.constexpr(TILE_BLOCKS.value * MX_BLOCK_SIZE)
"""Positions and columns of a tile, 128. A warp has 32 positions."""

STAGE_WORDS = gl.constexpr(32)
"""Words of a stage's row: 128 bytes, the widest TMA swizzle."""

BLOCK_WORDS = gl.constexpr(MX_BLOCK_SIZE // 4)
"""Words of codes of a block."""


@gluon.constexpr_function
def row_words_layout(BLOCKS):
    """Rowwise layout of a stage [128, 32] words with BLOCKS (1, 2) blocks a row.

    A thread has 16 columns of some rows. In one access eight lanes read 16 bytes each: 4 chunks of
    2 adjacent rows, or with float32 2 chunks of 4 rows. The chunks of a row are 2 (4) apart, and
    the swizzles of adjacent rows differ such that there are no bank conflicts.
    """
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
def row_codes_layout(BLOCKS):
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
def column_words_layout():
    """Columnwise layout of a stage [128, 32] words: 16 rows × 2 words a thread.

    In one access sixteen lanes read 8 bytes each: half of row r and the same half of row r + 16,
    which has the same swizzle. `exchanged_halves` avoids the bank conflicts of these two rows.
    """
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]],
        [[16, 0], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[32, 0], [64, 0]],
        [],
        [128, 32],
    )


@gluon.constexpr_function
def exchanged_halves():
    """Shared-memory layout of a stage with rows 16 … 31 of each block in the order r ^ 4."""
    words = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    rows = [[1, 4], [2, 8], [4, 16], [8, 0], [20, 0], [32, 0], [64, 0]]
    return gl.SharedLinearLayout([*words, *rows], [], 1024)


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
def column_scales_layout():
    """Layout of scale bytes [4 steps × 32 words, 4 blocks]: all steps of its words in a thread."""
    return gl.DistributedLinearLayout(
        [[32, 0], [64, 0], [1, 0]],
        [[0, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 1], [0, 2]],
        [],
        [128, 4],
    )


@gluon.constexpr_function
def one_column_per_thread():
    """Layout of 128 columns."""
    return gl.BlockedLayout([1], [32], [4], [0])


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
