"""Order of tiles on gfx950's eight dies (XCDs), each with an L2 of its own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_XCDS = gl.constexpr(8)
"""Workgroup p runs on die p % 8."""


@gluon.jit
def first_tile():
    """First tile of this workgroup; the number of workgroups is a multiple of 8.

    Each die gets consecutive tiles, which share operands in its L2. The workgroup's further tiles
    are `num_programs` apart.
    """
    program = gl.program_id(0)
    return program % NUM_XCDS * (gl.num_programs(0) // NUM_XCDS) + program // NUM_XCDS


@gluon.jit
def in_band(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Row tile and column tile of tile number `tile` in a matrix of row_tiles x column_tiles.

    BAND row tiles of the same column tile follow each other.
    """
    band = tile // (BAND * column_tiles)
    inside = tile - band * BAND * column_tiles
    height = gl.maximum(gl.minimum(BAND, row_tiles - band * BAND), 1)
    column = inside // height
    return band * BAND + inside - column * height, column
