"""Tiles of the persistent grouped GEMM, located on the device.

The kernel reads group bounds on the device and stops where no tile is left. Tiles are numbered
group by group, within a group by `raster.in_band`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.cdna4_gemm import MX_BLOCK, STEP, WORD_ROWS
from ..device.cdna4_raster import in_band
from ..device.compat import aggregate
from ..device.groups import load_offset


@aggregate
class Tile:
    """Source and target of an output tile; all fields are int32 scalars.

    The tile multiplies rows a_row … a_row_end of a and b_row … b_row_end of b, `depth` values from
    column `start` on, of which the first `lead` are not the group's. Rows of b in a plane of scales
    begin at b_scale_row; in one of a they have the same number as in a. The sums of row a_row go to
    row out_row of the output, and rows out_row_begin … out_row_end alone are written, columns
    column … (up to the width of the output). depth is 0 for rows without a group; out_row_end is 0
    past the last tile.
    """

    a_row: gl.tensor
    a_row_end: gl.tensor
    b_row: gl.tensor
    b_row_end: gl.tensor
    b_scale_row: gl.tensor
    start: gl.tensor
    lead: gl.tensor
    depth: gl.tensor
    out_row: gl.tensor
    out_row_begin: gl.tensor
    out_row_end: gl.tensor
    column: gl.tensor


@aggregate
class Cursor:
    """Group of the latest tile, its bounds, number of its first tile and of the one after it."""

    group: gl.tensor
    start: gl.tensor
    end: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor


@gluon.jit
def _round_down(value, UNIT: gl.constexpr):
    """The largest multiple of UNIT that is at most `value`."""
    return value // UNIT * UNIT


@aggregate
class Scheduler:
    """Group offsets, sizes of the problem, and the tile's shape.

    offsets: pointer to int32 or int64 [num_groups + 1]. num_rows: rows of all groups (WGRAD: length
    of the reduction). num_n: columns of the output. num_k: depth of the reduction (WGRAD: unused).
    num_outer: rows of each output matrix (WGRAD alone).
    """

    offsets: gl.tensor
    num_groups: gl.tensor
    num_rows: gl.tensor
    num_n: gl.tensor
    num_k: gl.tensor
    num_outer: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BAND: gl.constexpr
    WGRAD: gl.constexpr

    @gluon.jit
    def start(self):
        """The cursor before the first tile, on the rows ahead of the first group."""
        first = load_offset(self.offsets, 0, self.num_rows)
        tiles = 0
        if not self.WGRAD:
            tiles = self._row_tiles(0, first) * gl.cdiv(self.num_n, self.BLOCK_N)
        return Cursor(group=-1, start=0, end=first, first_tile=0, end_tile=tiles)

    @gluon.jit
    def locate(self, tile, cursor):
        """Return the cursor for the next call, and the `Tile` with number `tile`."""
        if self.WGRAD:
            return cursor, self._locate_in_weights(tile)
        else:
            return self._locate_in_rows(tile, cursor)

    @gluon.jit
    def _locate_in_weights(self, tile):
        """wgrad: groups divide the reduction, and each has its own output matrix.

        Steps begin at multiples of 128, so that they read whole lines.
        """
        row_tiles = gl.cdiv(self.num_outer, self.BLOCK_M)
        column_tiles = gl.cdiv(self.num_n, self.BLOCK_N)
        group = gl.minimum(tile // (row_tiles * column_tiles), self.num_groups)
        row_tile, column_tile = in_band(
            tile - group * row_tiles * column_tiles, row_tiles, column_tiles, self.BAND
        )
        exists = group < self.num_groups
        known = gl.minimum(group, self.num_groups - 1)
        start = _round_down(load_offset(self.offsets, known, self.num_rows), MX_BLOCK)
        end = _round_down(load_offset(self.offsets, known + 1, self.num_rows), MX_BLOCK)
        first = _round_down(start, STEP)
        row = gl.where(exists, row_tile * self.BLOCK_M, 0)
        column = gl.where(exists, column_tile * self.BLOCK_N, 0)
        return Tile(
            a_row=row,
            a_row_end=self.num_outer,
            b_row=column,
            b_row_end=self.num_n,
            b_scale_row=column,
            start=first,
            lead=start - first,
            depth=gl.where(exists & (end > start), end - first, 0),
            out_row=known * self.num_outer + row,
            out_row_begin=known * self.num_outer,
            out_row_end=gl.where(exists, (known + 1) * self.num_outer, 0),
            column=column,
        )

    @gluon.jit
    def _row_tiles(self, start, end):
        """Row tiles of the group of rows start … end."""
        tiles = gl.cdiv(end - _round_down(start, WORD_ROWS), self.BLOCK_M)
        return gl.where(end > start, tiles, 0)

    @gluon.jit
    def _locate_in_rows(self, tile, cursor):
        """Groups of rows of a; each has its own matrix of b. Rows without a group become zeros.

        Tiles begin at whole words of scales. A group's first tile can have rows of earlier groups.
        """
        column_tiles = gl.cdiv(self.num_n, self.BLOCK_N)
        group = cursor.group
        start = cursor.start
        end = cursor.end
        first_tile = cursor.first_tile
        end_tile = cursor.end_tile
        while (tile >= end_tile) & (group < self.num_groups):
            group += 1
            start = end  # where the group before ends; offsets do not decrease
            end = self.num_rows
            if group < self.num_groups:
                end = gl.maximum(load_offset(self.offsets, group + 1, self.num_rows), start)
            first_tile = end_tile
            end_tile += self._row_tiles(start, end) * column_tiles
        row_tile, column_tile = in_band(
            tile - first_tile, self._row_tiles(start, end), column_tiles, self.BAND
        )
        exists = tile < end_tile
        grouped = exists & (group >= 0) & (group < self.num_groups)
        row = gl.where(exists, _round_down(start, WORD_ROWS) + row_tile * self.BLOCK_M, 0)
        column = gl.where(exists, column_tile * self.BLOCK_N, 0)
        matrix = gl.where(grouped, group, 0)
        found = Cursor(group=group, start=start, end=end, first_tile=first_tile, end_tile=end_tile)
        return found, Tile(
            a_row=row,
            a_row_end=end,
            b_row=matrix * self.num_n + column,
            b_row_end=(matrix + 1) * self.num_n,
            b_scale_row=matrix * gl.cdiv(self.num_n, WORD_ROWS) * WORD_ROWS + column,
            start=0,
            lead=0,
            depth=gl.where(grouped, self.num_k, 0),
            out_row=row,
            out_row_begin=start,
            out_row_end=gl.where(exists, end, 0),
            column=column,
        )
