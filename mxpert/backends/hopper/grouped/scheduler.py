"""Tile scheduler of the persistent grouped GEMM.

The kernel reads group bounds on the device; the host computes only an upper bound of the number of
tiles. Tiles are numbered group by group. Within a group, bands of `BAND` row tiles of the same
column tile run together and share its operand in L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _offset(offsets, index, limit):
    """Load group offset `index` (int32 or int64), clamp it to [0, limit], return int32."""
    return gl.minimum(gl.maximum(gl.load(offsets + index), 0), limit).to(gl.int32)


@gluon.jit
def group_bounds(offsets, group, num_groups, num_rows):
    """First row and end row of a group; group `num_groups` stands for rows without a group."""
    start = _offset(offsets, group, num_rows)
    end = num_rows
    if group < num_groups:
        end = gl.maximum(_offset(offsets, group + 1, num_rows), start)
    return start, end


@gluon.jit
def _in_band(place, rows_of_tiles, columns_of_tiles, BAND: gl.constexpr):
    """Row tile and column tile of tile number `place` within a group."""
    band = place // (BAND * columns_of_tiles)
    inside = place - band * BAND * columns_of_tiles
    height = gl.maximum(gl.minimum(BAND, rows_of_tiles - band * BAND), 1)
    return band * BAND + inside % height, inside // height


@gluon.jit
def rows_tile(
    tile, group, first_tile, end_tile, offsets, sizes, BLOCK_M: gl.constexpr, BAND: gl.constexpr
):
    """Locate `tile` for groups of rows; pass the returned state to the next call (group −1 first).

    Returns the state (group, its first tile and end tile), the first row, the end row (0 past the
    last tile) and the column tile.
    """
    num_groups, num_rows, column_tiles = sizes
    start, end = group_bounds(offsets, gl.maximum(group, 0), num_groups, num_rows)
    while (tile >= end_tile) & (group < num_groups):
        group += 1
        first_tile = end_tile
        start, end = group_bounds(offsets, group, num_groups, num_rows)
        end_tile += gl.cdiv(end - start, BLOCK_M) * column_tiles
    row_tile, column_tile = _in_band(
        tile - first_tile, gl.cdiv(end - start, BLOCK_M), column_tiles, BAND
    )
    return (
        group,
        first_tile,
        end_tile,
        start + row_tile * BLOCK_M,
        gl.where(tile < end_tile, end, 0),
        column_tile,
    )


@gluon.jit
def weights_tile(tile, offsets, sizes, row_tiles, BAND: gl.constexpr):
    """Locate `tile` for wgrad, where groups divide the reduction and each has its own output.

    Returns the group, the row tile, the column tile, and start and end of the group's reduction.
    """
    num_groups, num_rows, column_tiles = sizes
    group = tile // (row_tiles * column_tiles)
    row_tile, column_tile = _in_band(
        tile - group * row_tiles * column_tiles, row_tiles, column_tiles, BAND
    )
    start, end = group_bounds(offsets, group, num_groups, num_rows)
    return group, row_tile, column_tile, start // 32 * 32, end // 32 * 32
