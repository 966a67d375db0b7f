"""Sizes and layouts of the dual quantiser.

A tile is 128 positions × 128 columns: 4 × 4 MX blocks. A stage is a slice of it, [128, 32] words of
4 bytes: 64 columns of 16-bit values (2 blocks a row), or 32 of float32 (1 block a row). Its rows of
128 bytes are swizzled by TMA: 16-byte chunk c of row r lies at c ^ (r % 8).

Codes are handled as words of four. The rowwise and the columnwise side read a stage in different
layouts. In both, two neighbouring threads have 16 values of a block each: one shuffle completes the
maximum, and both threads compute the scale. A thread stores its codes in 16 bytes; two neighbours
fill a sector.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats.spec import MX_BLOCK_SIZE

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
