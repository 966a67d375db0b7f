"""Tiles of codes in LDS: copied straight from global memory, read as MFMA fragments.

A row of a tile holds 128 bytes of the contracted dimension in eight chunks of 16 bytes. Chunk c of
row r lies at place ``c ^ (r / 2 % 8)``, so that the 16 rows of a fragment touch all 64 banks. A
direct copy writes LDS in the order of lanes; therefore each lane reads the chunk that belongs at
its place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from .cdna4_phases import NUM_WARPS
from .compat import reinterpret

ROW_BYTES = gl.constexpr(128)

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Rows one after the other, as a direct copy writes them."""

SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 8, [1, 0]))
"""The order in which fragments are read."""

COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 8], [NUM_WARPS.value, 1], [1, 0]))
"""Layout of a copy: 16 bytes a lane, 8 rows a wave, 64 rows an instruction of all waves."""


@gluon.jit
def chunk_columns(ROWS: gl.constexpr):
    """Column that each byte of LDS holds, int32 [ROWS, 128] in `COPY`."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, ROW_BYTES, gl.SliceLayout(0, COPY))
    columns = column[None, :] ^ (row // 2 % 8 * 16)[:, None]
    return gl.max_contiguous(gl.multiple_of(columns, [1, 16]), [1, 16])


@gluon.jit
def row_offsets(rows, pitch):
    """Byte offsets [ROWS, 128] of the columns `chunk_columns` of `rows`, int32 [ROWS]."""
    offsets = rows[:, None] * pitch + chunk_columns(rows.shape[0])
    return gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])


@gluon.jit
def copy_rows(memory, slot, base, offsets, lead, depth):
    """Start copying a tile to ``memory[slot]``, [ROWS, 128] bytes; columns lead … depth, others 0.

    base: pointer to column 0. offsets: of `row_offsets`. lead, depth: multiples of 16, as the
    compiler can see: chunks are copied whole or not at all.
    """
    ROWS: gl.constexpr = offsets.shape[0]
    columns = chunk_columns(ROWS)
    target = reinterpret(memory.index(slot), gl.uint8, [ROWS, ROW_BYTES], PLAIN)
    inside = (columns >= lead) & (columns < depth)
    async_copy.buffer_load_to_shared(target, base, offsets, mask=inside)
