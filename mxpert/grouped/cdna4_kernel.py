"""Grouped GEMM on scaled MFMA: MXFP8 operands with any scales, each applied exactly.

A persistent workgroup, one a compute unit, computes tiles of BLOCK_M x 256. The reduction axis is
contiguous in both operands, without TRANS_B in a alone.

Roles: eight waves, two groups of four that alternate between memory and compute phases
    (`lib.phases`). Every wave computes (BLOCK_M / 2) x 64 sums.

Barriers: a barrier after each phase: in two steps of 128 values 8, with BLOCK_M = 128 4. A memory
    phase waits for its own LDS reads, and for the direct copies that the next memory phase reads.

Pipeline: two steps of codes in LDS (three with BLOCK_M = 128), BLOCK_M + 256 rows of 128 bytes
    each, and two pairs of steps of scales: 136 KiB, or 152. Copies are direct (LDS-DMA) and start 4
    phases before their reads.

Timeline: for each tile: locate the next one → main loop (`lib.mx_gemm`) → start the next tile's
    copies → store the sums, while the copies run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ..device.cdna4 import COPY, NUM_WARPS, first_tile, in_band, row_offsets, scheduling_fence
from ..device.cdna4_gemm import (
    BLOCK_N,
    HIGH,
    LOW,
    MX_BLOCK,
    PART_ROWS,
    SCALE_COPY,
    STEP,
    WORD_ROWS,
    Operands,
    Sources,
    allocate,
    column_of,
    multiply_high,
    multiply_low,
    offsets_across,
    row_of,
    scale_offsets,
)
from ..device.compat import aggregate
from ..device.groups import load_offset

# ---- Tiles of the persistent grouped GEMM, located on the device.
#
# The kernel reads group bounds on the device and stops where no tile is left. Tiles are numbered
# group by group, within a group by `raster.in_band`.


@aggregate
class Tile:
    """Source and target of an output tile; all fields are int32 scalars.

    The tile multiplies rows a_row … a_row_end of a and b_row … b_row_end of b, `depth` values from
    column `start` on, of which the first `lead` are not the group's. Rows of b in a plane of scales
    begin at b_scale_row; in one of a they have the same number as in a. Without TRANS_B row b_row
    of b is the first of its matrix, and the tile has columns b_scale_row … b_row_end of it. The
    sums of row a_row go to row out_row of the output, and rows out_row_begin … out_row_end alone
    are written, columns column … (up to the width of the output). depth is 0 for rows without a
    group; out_row_end is 0 past the last tile.
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
    TRANS_B: gl.constexpr

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
        if self.TRANS_B:
            b_row = matrix * self.num_n + column
            b_row_end = (matrix + 1) * self.num_n
            b_scale_row = matrix * gl.cdiv(self.num_n, WORD_ROWS) * WORD_ROWS + column
        else:
            b_row, b_row_end, b_scale_row = matrix * self.num_k, self.num_n, column
        found = Cursor(group=group, start=start, end=end, first_tile=first_tile, end_tile=end_tile)
        return found, Tile(
            a_row=row,
            a_row_end=end,
            b_row=b_row,
            b_row_end=b_row_end,
            b_scale_row=b_scale_row,
            start=0,
            lead=0,
            depth=gl.where(grouped, self.num_k, 0),
            out_row=row,
            out_row_begin=start,
            out_row_end=gl.where(exists, end, 0),
            column=column,
        )


# ---- Stores of the sums of a tile.
#
# LDS rows of a and b are tile rows `row_of` and output columns `column_of`. Therefore each lane has
# 16 consecutive columns, and a row's stores are whole lines of 128 bytes (bfloat16).

_CHUNK = gl.constexpr(16)
"""Bytes that a lane copies."""

_BLOCK_ROWS = gl.constexpr(32)
"""Rows that are stored together: 16 of each row of four waves."""

_STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 16], [0, 32]],
        warp_bases=[[0, 64], [0, 128], [16, 0]],
        block_bases=[],
        shape=[_BLOCK_ROWS.value, BLOCK_N.value],
    )
)
"""Layout of a block of sums in output order: 16 consecutive columns a lane."""

_STORE_ACROSS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32], [16, 0]],
        block_bases=[],
        shape=[_BLOCK_ROWS.value, 64],
    )
)
"""Layout of 16 columns of each wave of a row of four: four consecutive columns a lane."""


@gluon.jit
def _halves(sums):
    """Upper and lower half of the rows."""
    ROWS: gl.constexpr = sums.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(sums, [2, ROWS, BLOCK_N]), [1, 2, 0]))


@gluon.jit
def _columns_across(sums):
    """Quarters of sums [32, 256] without TRANS_B: 16 of each wave's 64 columns, `_STORE_ACROSS`."""
    even, odd = gl.split(gl.permute(gl.reshape(sums, [_BLOCK_ROWS, 2, 2, 64]), [0, 1, 3, 2]))
    first, third = gl.split(gl.permute(even, [0, 2, 1]))
    second, fourth = gl.split(gl.permute(odd, [0, 2, 1]))
    return first, second, third, fourth


@aggregate
class Output:
    """The output: pointer to [rows, num_n]; whether sums are added to it."""

    base: gl.tensor
    num_n: gl.tensor
    ACCUMULATE: gl.constexpr
    TRANS_B: gl.constexpr

    @gluon.jit
    def store(self, sums, tile, PART: gl.constexpr):
        """Store float32 sums [128, 256] of a part of a tile, rows of its group alone."""
        upper, lower = _halves(sums)
        first, second = _halves(upper)
        third, fourth = _halves(lower)
        self._store_block(first, tile, row_of(0, PART))
        self._store_block(second, tile, row_of(_BLOCK_ROWS, PART))
        self._store_block(third, tile, row_of(2 * _BLOCK_ROWS, PART))
        self._store_block(fourth, tile, row_of(3 * _BLOCK_ROWS, PART))

    @gluon.jit
    def _store_block(self, sums, tile, first):
        """Store [32, 256], whose first row is row `first` of the tile.

        The fence keeps the registers of a block's addresses short-lived.
        """
        if self.TRANS_B:
            # [32, block, wave, quarter, 4] to [32, wave, quarter, 4, block]
            parts = gl.permute(gl.reshape(sums, [_BLOCK_ROWS, 4, 4, 4, 4]), [0, 2, 3, 4, 1])
            value = gl.convert_layout(gl.reshape(parts, [_BLOCK_ROWS, BLOCK_N]), _STORE)
            m = row_of(gl.arange(0, _BLOCK_ROWS, gl.SliceLayout(1, _STORE)), 0)
            n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _STORE))
            self._store(value, tile, first, m, n, 0)
        else:
            parts = _columns_across(sums)
            m = row_of(gl.arange(0, _BLOCK_ROWS, gl.SliceLayout(1, _STORE_ACROSS)), 0)
            n = gl.arange(0, 64, gl.SliceLayout(0, _STORE_ACROSS))
            n = n // 16 * 64 + n % 16
            for part in gl.static_range(4):
                value = gl.convert_layout(parts[part], _STORE_ACROSS, assert_trivial=True)
                self._store(value, tile, first, m, n, part * 16)
        scheduling_fence()

    @gluon.jit
    def _store(self, value, tile, first, m, n, SHIFT: gl.constexpr):
        """Store rows m, columns n + SHIFT of the tile's rows from `first` on."""
        row = tile.out_row + first
        base = self.base + row.to(gl.int64) * self.num_n + tile.column
        offsets = m[:, None] * self.num_n + n[None, :]
        rows = (m >= tile.out_row_begin - row) & (m < tile.out_row_end - row)
        width = self.num_n - tile.column
        if SHIFT:
            offsets += SHIFT
            width -= SHIFT
        mask = rows[:, None] & (n < width)[None, :]
        if self.ACCUMULATE:
            value += cdna4.buffer_load(base, offsets, mask=mask, other=0.0)
        cdna4.buffer_store(value.to(self.base.dtype.element_ty), base, offsets, mask=mask)


@aggregate
class Matrices:
    """Distances of rows of codes in bytes, and of planes of scales in words, in both operands."""

    a_pitch: gl.tensor
    b_pitch: gl.tensor
    a_scale_pitch: gl.tensor
    b_scale_pitch: gl.tensor
    TRANS_B: gl.constexpr

    @gluon.jit
    def of_tile(self, tile):
        """The `Sources` of a tile. Rows past the end of a group or matrix repeat its last row."""
        row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, COPY))
        column = column_of(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY)))
        word = gl.arange(0, BLOCK_N // WORD_ROWS, gl.SliceLayout(0, SCALE_COPY))
        a_last = gl.maximum(tile.a_row_end - tile.a_row, 1) - 1
        b_last = gl.maximum(tile.b_row_end - self._b_start(tile), 1) - 1
        # Tell the compiler that copies of 16 bytes are aligned.
        start = tile.start // STEP * STEP
        lead = tile.lead // MX_BLOCK * MX_BLOCK
        depth = tile.depth // MX_BLOCK * MX_BLOCK
        a_plane = (start // MX_BLOCK).to(gl.int64) * self.a_scale_pitch
        b_plane = (self._b_value(tile, start) // MX_BLOCK).to(gl.int64) * self.b_scale_pitch
        return Sources(
            a_first=tile.a_row.to(gl.int64) * self.a_pitch + start,
            b_first=tile.b_row.to(gl.int64) * self.b_pitch + self._b_byte(tile, start),
            a_scale_first=a_plane + tile.a_row // WORD_ROWS,
            b_scale_first=b_plane + tile.b_scale_row // WORD_ROWS,
            a_pitch=self.a_scale_pitch,
            b_pitch=self.b_scale_pitch,
            lead=lead,
            depth=depth,
            a_top=row_offsets(gl.minimum(row_of(row, 0), a_last), self.a_pitch),
            a_bottom=row_offsets(gl.minimum(row_of(row, 1), a_last), self.a_pitch),
            b_rows=self._b_rows(column, b_last),
            a_scale_words=scale_offsets(gl.minimum(word, a_last // WORD_ROWS), self.a_scale_pitch),
            b_scale_words=scale_offsets(gl.minimum(word, b_last // WORD_ROWS), self.b_scale_pitch),
            b_step=self.b_pitch * STEP,
            TRANS_B=self.TRANS_B,
        )

    @gluon.jit
    def _b_start(self, tile):
        """What b_row_end of a tile counts from: its first row, or without TRANS_B its column."""
        return tile.b_row if self.TRANS_B else tile.b_scale_row

    @gluon.jit
    def _b_byte(self, tile, start):
        """First byte of a tile in row b_row."""
        return start if self.TRANS_B else tile.b_scale_row

    @gluon.jit
    def _b_value(self, tile, start):
        """First value of a tile that the planes of b's scales count."""
        return start if self.TRANS_B else tile.b_row

    @gluon.jit
    def _b_rows(self, column, last):
        """Offsets of the copies of b. last: the tile's last column."""
        if self.TRANS_B:
            return row_offsets(gl.minimum(column, last), self.b_pitch)
        else:
            return offsets_across(gl.cdiv(last + 1, _CHUNK) * _CHUNK, self.b_pitch)


@gluon.jit(
    do_not_specialize=[
        *("num_groups", "num_rows", "num_outer", "num_k"),
        *("a_pitch", "b_pitch", "a_scale_pitch", "b_scale_pitch"),
    ],
    do_not_specialize_on_alignment=["offsets"],
)
def _grouped_gemm_cdna4_kernel(
    out,
    a,
    a_scale,
    b,
    b_scale,
    offsets,
    num_groups,
    num_rows,
    num_outer,
    num_n,
    num_k,
    a_pitch,
    b_pitch,
    a_scale_pitch,
    b_scale_pitch,
    A_FORMAT: gl.constexpr,
    B_FORMAT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
    TRANS_B: gl.constexpr = True,
):
    """out[r] = a[r] b[g].T for rows r of group g, [num_rows, num_n]; zeros in rows without a group.

    WGRAD: out[g] = a_g b_g.T, [num_groups, num_outer, num_n], summed over the group's part of the
    reduction; offsets are multiples of 32. Codes: rows of a and b, a_pitch and b_pitch bytes apart,
    multiples of 32. Scales: planes of bytes for all rows, a_scale_pitch and b_scale_pitch words
    apart; each matrix of b has whole words. Both are aligned to a word.
    TRANS_B: without it b is [G, num_k, num_n], and the planes of a matrix follow each other.
    Grid: (workgroups,), a multiple of 8 and at most one a compute unit.
    """
    gl.static_assert(num_warps == NUM_WARPS)
    scheduler = Scheduler(
        offsets=offsets,
        num_groups=num_groups,
        num_rows=num_rows,
        num_n=num_n,
        num_k=num_k,
        num_outer=num_outer,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BAND=BAND,
        WGRAD=WGRAD,
        TRANS_B=TRANS_B,
    )
    operands = Operands(
        a=a,
        a_scale=a_scale.to(gl.pointer_type(gl.int32), bitcast=True),
        b=b,
        b_scale=b_scale.to(gl.pointer_type(gl.int32), bitcast=True),
    )
    matrices = Matrices(
        a_pitch=a_pitch // MX_BLOCK * MX_BLOCK,
        b_pitch=b_pitch // MX_BLOCK * MX_BLOCK,
        a_scale_pitch=a_scale_pitch,
        b_scale_pitch=b_scale_pitch,
        TRANS_B=TRANS_B,
    )
    output = Output(base=out, num_n=num_n, ACCUMULATE=ACCUMULATE, TRANS_B=TRANS_B)
    buffers = allocate(BLOCK_M, TRANS_B)
    number = first_tile()
    cursor, tile = scheduler.locate(number, scheduler.start())
    matrices.of_tile(tile).start(operands, buffers, BLOCK_M)
    while tile.out_row_end > 0:
        number += gl.num_programs(0)
        cursor, following = scheduler.locate(number, cursor)
        sources = matrices.of_tile(tile)
        if BLOCK_M == HIGH:
            top, bottom = multiply_high(operands, buffers, sources, A_FORMAT, B_FORMAT)
            matrices.of_tile(following).start(operands, buffers, BLOCK_M)
            scheduling_fence()
            output.store(top, tile, 0)
            output.store(bottom, tile, 1)
        else:
            gl.static_assert(BLOCK_M == LOW, "a tile has 128 or 256 rows")
            sums = multiply_low(operands, buffers, sources, A_FORMAT, B_FORMAT)
            matrices.of_tile(following).start(operands, buffers, BLOCK_M)
            scheduling_fence()
            output.store(sums, tile, 0)
        tile = following
    async_copy.wait_group(0)
