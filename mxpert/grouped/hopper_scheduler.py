"""Tile scheduler of the persistent grouped GEMM.

The kernel reads group bounds on the device; the host computes only an upper bound of the number of
tiles. Tiles are numbered group by group. Within a group, bands of `BAND` row tiles of the same
column tile run together and share its operand in L2.

All warps of a CTA locate their tiles themselves, from the same numbers. Without WGRAD the search
for the tile's group starts at the group of the previous tile, which `TileCursor` holds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.compat import aggregate
from ..device.groups import load_offset
from ..formats.spec import MX_BLOCK_SIZE

MX_BLOCK = gl.constexpr(MX_BLOCK_SIZE)
"""Values that share an MX scale; groups of wgrad's reduction start at multiples of it."""


@aggregate
class TileCursor:
    """Group of the latest tile, number of the group's first tile and of the tile after its last."""

    group: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor


@aggregate
class Tile:
    """Source and target of an output tile; all fields are int32 scalars.

    The tile multiplies k_start … k_end of rows a_row … of a and rows b_row … of b (of matrix
    `group`, columns column …, if b is [G, K, N]). The sums go to rows out_row … out_row_end of the
    output, from `column` on. out_row_end is 0 past the last tile.
    """

    group: gl.tensor
    a_row: gl.tensor
    b_row: gl.tensor
    k_start: gl.tensor
    k_end: gl.tensor
    out_row: gl.tensor
    out_row_end: gl.tensor
    column: gl.tensor


@gluon.jit
def _in_band(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Row tile and column tile of tile number `tile` of a group of row_tiles × column_tiles."""
    band = tile // (BAND * column_tiles)
    inside = tile - band * BAND * column_tiles
    height = gl.maximum(gl.minimum(BAND, row_tiles - band * BAND), 1)
    return band * BAND + inside % height, inside // height


@aggregate
class TileScheduler:
    """Group offsets, sizes of the problem, and the tile's shape.

    offsets: pointer to int32 or int64 [num_groups + 1]. num_rows: rows of all groups (of the
    reduction in WGRAD). num_n, num_k: columns of the output, depth of the reduction. num_outer:
    rows of each output matrix (WGRAD). num_tiles: upper bound of the number of tiles.
    """

    offsets: gl.tensor
    num_groups: gl.tensor
    num_rows: gl.tensor
    column_tiles: gl.tensor
    num_n: gl.tensor
    num_k: gl.tensor
    row_tiles: gl.tensor
    num_outer: gl.tensor
    num_tiles: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BAND: gl.constexpr
    WGRAD: gl.constexpr

    @gluon.jit
    def start(self):
        """The cursor before the first tile, on the rows ahead of the first group."""
        if self.WGRAD:
            return TileCursor(group=-1, first_tile=0, end_tile=0)
        else:
            before = load_offset(self.offsets, 0, self.num_rows)
            tiles = gl.cdiv(before, self.BLOCK_M) * self.column_tiles
            return TileCursor(group=-1, first_tile=0, end_tile=tiles)

    @gluon.jit
    def locate(self, tile, cursor):
        """Return the cursor for the next call, and the `Tile` with number `tile`."""
        if self.WGRAD:
            return self._locate_in_weights(tile, cursor)
        else:
            return self._locate_in_rows(tile, cursor)

    @gluon.jit
    def _group_bounds(self, group):
        """First row and end row of a group; −1 and `num_groups` stand for rows without a group."""
        start = load_offset(self.offsets, gl.maximum(group, 0), self.num_rows)
        start = gl.where(group < 0, 0, start)
        end = self.num_rows
        if group < self.num_groups:
            end = gl.maximum(load_offset(self.offsets, group + 1, self.num_rows), start)
        return start, end

    @gluon.jit
    def _locate_in_weights(self, tile, cursor):
        """wgrad: groups divide the reduction, and each has its own output matrix."""
        group = tile // (self.row_tiles * self.column_tiles)
        row_tile, column_tile = _in_band(
            tile - group * self.row_tiles * self.column_tiles,
            self.row_tiles,
            self.column_tiles,
            self.BAND,
        )
        start, end = self._group_bounds(group)
        start = start // MX_BLOCK * MX_BLOCK
        end = end // MX_BLOCK * MX_BLOCK
        a_row = row_tile * self.BLOCK_M
        column = column_tile * self.BLOCK_N
        return cursor, Tile(
            group=group,
            a_row=a_row,
            b_row=column,
            k_start=start,
            k_end=end,
            out_row=group * self.num_outer + a_row,
            out_row_end=(group + 1) * self.num_outer,
            column=column,
        )

    @gluon.jit
    def _locate_in_rows(self, tile, cursor):
        """Groups of rows of a; each has its own matrix of b. Rows without a group become zeros."""
        group = cursor.group
        first_tile = cursor.first_tile
        end_tile = cursor.end_tile
        start, end = self._group_bounds(group)
        while (tile >= end_tile) & (group < self.num_groups):
            group += 1
            first_tile = end_tile
            start, end = self._group_bounds(group)
            end_tile += gl.cdiv(end - start, self.BLOCK_M) * self.column_tiles
        row_tile, column_tile = _in_band(
            tile - first_tile, gl.cdiv(end - start, self.BLOCK_M), self.column_tiles, self.BAND
        )
        row = start + row_tile * self.BLOCK_M
        row_end = gl.where(tile < end_tile, end, 0)
        column = column_tile * self.BLOCK_N
        is_grouped = (group >= 0) & (group < self.num_groups)  # other rows become zeros
        depth = gl.where(is_grouped & (row_end > 0), self.num_k, 0)
        return TileCursor(group=group, first_tile=first_tile, end_tile=end_tile), Tile(
            group=group,
            a_row=row,
            b_row=group * self.num_n + column,
            k_start=0,
            k_end=depth,
            out_row=row,
            out_row_end=row_end,
            column=column,
        )
