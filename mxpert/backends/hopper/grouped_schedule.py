"""Which output tile a persistent thread block of the grouped GEMM computes next.

Group boundaries are read on the device; the host knows an upper bound of the number of tiles. Tiles
are numbered group by group; within a group, bands of `BAND` row tiles share the operand of each
column tile while it is in L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _offset(offsets, index, limit):
    """Group offset `index`, whatever its integer type, in [0, limit]."""
    return gl.minimum(gl.maximum(gl.load(offsets + index), 0), limit).to(gl.int32)


@gluon.jit
def group_bounds(offsets, group, num_groups, num_rows):
    """First row and end of a group; group `num_groups` is the rows that belong to none."""
    start = _offset(offsets, group, num_rows)
    end = num_rows
    if group < num_groups:
        end = gl.maximum(_offset(offsets, group + 1, num_rows), start)
    return start, end


@gluon.jit
def _in_band(place, rows_of_tiles, columns_of_tiles, BAND: gl.constexpr):
    """Row tile and column tile at `place` of a group's raster."""
    band = place // (BAND * columns_of_tiles)
    inside = place - band * BAND * columns_of_tiles
    height = gl.maximum(gl.minimum(BAND, rows_of_tiles - band * BAND), 1)
    return band * BAND + inside % height, inside // height


@gluon.jit
def rows_tile(tile, group, first_tile, end_tile, offsets, sizes, BLOCK_M: gl.constexpr,
              BAND: gl.constexpr):
    """Place of `tile` where groups are groups of rows; the walk begins at group -1.

    Returns the group, its first and last tile (to go on from), the row, the rows' end (0 past the
    last tile) and the column tile.
    """
    num_groups, num_rows, column_tiles = sizes
    start, end = group_bounds(offsets, gl.maximum(group, 0), num_groups, num_rows)
    while (tile >= end_tile) & (group < num_groups):
        group += 1
        first_tile = end_tile
        start, end = group_bounds(offsets, group, num_groups, num_rows)
        end_tile += gl.cdiv(end - start, BLOCK_M) * column_tiles
    row_tile, column_tile = _in_band(tile - first_tile, gl.cdiv(end - start, BLOCK_M),
                                     column_tiles, BAND)
    return (group, first_tile, end_tile, start + row_tile * BLOCK_M,
            gl.where(tile < end_tile, end, 0), column_tile)


@gluon.jit
def weights_tile(tile, offsets, sizes, row_tiles, BAND: gl.constexpr):
    """Place of `tile` where groups are groups of the reduction and each has the whole output.

    Returns the group, the row tile, the column tile and the group's range of the reduction.
    """
    num_groups, num_rows, column_tiles = sizes
    group = tile // (row_tiles * column_tiles)
    row_tile, column_tile = _in_band(tile - group * row_tiles * column_tiles, row_tiles,
                                     column_tiles, BAND)
    start, end = group_bounds(offsets, group, num_groups, num_rows)
    return group, row_tile, column_tile, start // 32 * 32, end // 32 * 32
