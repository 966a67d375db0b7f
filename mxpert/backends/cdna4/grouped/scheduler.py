"""Tiles of the persistent grouped GEMM, located on the device.

The kernel reads group bounds on the device and stops where no tile is left. Tiles are numbered
group by group, within a group by `raster.in_band`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....formats.spec import MX_BLOCK_SIZE
from ...common.compat import aggregate
from ..lib.raster import in_band

PAIR = gl.constexpr(256)
"""Values of the reduction whose scales lie together: two steps of 128."""

MX_BLOCK = gl.constexpr(MX_BLOCK_SIZE)


@aggregate
class Tile:
    """Source and target of an output tile; all fields are int32 scalars.

    The tile multiplies rows a_row … a_row_end of a and b_row … b_row_end of b, `depth` values from
    column `start` on, whose scales begin at slot `pair` of the packed scales. The sums go to rows
    out_row … out_row_end of the output, columns column … (up to the width of the output). depth is
    0 for rows without a group; out_row_end is 0 past the last tile.
    """

    a_row: gl.tensor
    a_row_end: gl.tensor
    b_row: gl.tensor
    b_row_end: gl.tensor
    start: gl.tensor
    depth: gl.tensor
    pair: gl.tensor
    out_row: gl.tensor
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
def _load_offset(offsets, index, limit):
    """Load group offset `index` (int32 or int64), clamp it to [0, limit], return int32."""
    return gl.minimum(gl.maximum(gl.load(offsets + index), 0), limit).to(gl.int32)


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
        """The cursor before the first tile."""
        first = _load_offset(self.offsets, 0, self.num_rows)
        return Cursor(group=-1, start=0, end=first, first_tile=0, end_tile=0)

    @gluon.jit
    def locate(self, tile, cursor):
        """Return the cursor for the next call, and the `Tile` with number `tile`."""
        if self.WGRAD:
            return cursor, self._locate_in_weights(tile)
        else:
            return self._locate_in_rows(tile, cursor)

    @gluon.jit
    def _locate_in_weights(self, tile):
        """wgrad: groups divide the reduction, and each has its own output matrix."""
        row_tiles = gl.cdiv(self.num_outer, self.BLOCK_M)
        column_tiles = gl.cdiv(self.num_n, self.BLOCK_N)
        group = gl.minimum(tile // (row_tiles * column_tiles), self.num_groups)
        row_tile, column_tile = in_band(
            tile - group * row_tiles * column_tiles, row_tiles, column_tiles, self.BAND
        )
        exists = group < self.num_groups
        known = gl.minimum(group, self.num_groups - 1)
        start = _load_offset(self.offsets, known, self.num_rows) // MX_BLOCK * MX_BLOCK
        end = _load_offset(self.offsets, known + 1, self.num_rows) // MX_BLOCK * MX_BLOCK
        row = gl.where(exists, row_tile * self.BLOCK_M, 0)
        column = gl.where(exists, column_tile * self.BLOCK_N, 0)
        return Tile(
            a_row=row,
            a_row_end=self.num_outer,
            b_row=column,
            b_row_end=self.num_n,
            start=start,
            depth=gl.where(exists, gl.maximum(end - start, 0), 0),
            pair=start // PAIR + known,
            out_row=known * self.num_outer + row,
            out_row_end=gl.where(exists, (known + 1) * self.num_outer, 0),
            column=column,
        )

    @gluon.jit
    def _locate_in_rows(self, tile, cursor):
        """Groups of rows of a; each has its own matrix of b. Rows without a group become zeros."""
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
                end = gl.maximum(_load_offset(self.offsets, group + 1, self.num_rows), start)
            first_tile = end_tile
            end_tile += gl.cdiv(end - start, self.BLOCK_M) * column_tiles
        row_tile, column_tile = in_band(
            tile - first_tile, gl.cdiv(end - start, self.BLOCK_M), column_tiles, self.BAND
        )
        exists = tile < end_tile
        grouped = exists & (group < self.num_groups)
        row = gl.where(exists, start + row_tile * self.BLOCK_M, 0)
        column = gl.where(exists, column_tile * self.BLOCK_N, 0)
        matrix = gl.where(grouped, group, 0)
        found = Cursor(group=group, start=start, end=end, first_tile=first_tile, end_tile=end_tile)
        return found, Tile(
            a_row=row,
            a_row_end=end,
            b_row=matrix * self.num_n + column,
            b_row_end=(matrix + 1) * self.num_n,
            start=0,
            depth=gl.where(grouped, self.num_k, 0),
            pair=0,
            out_row=row,
            out_row_end=gl.where(exists, end, 0),
            column=column,
        )
