"""Epilogue of the grouped GEMM: scales, rounding, stores of full and ragged tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..device.compat import aggregate, async_store, barrier
from .hopper_pipeline import CONSUMER_ROWS
from .hopper_scheduler import MX_BLOCK

HALF_COLUMNS = gl.constexpr(128)
"""Columns that a consumer scales and stores at once: half of a tile."""

_SCALE_ONE = gl.constexpr(127)
"""The E8M0 byte of 1.0."""


@gluon.jit
def scale_value(byte):
    """E8M0 bytes 1 to 254 as float32; operands with one scale per row have no other bytes."""
    return (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _one_column_per_thread():
    """Layout of 128 columns over a warpgroup."""
    return gl.BlockedLayout([1], [32], [4], [0])


@aggregate
class Scales:
    """Scales of both operands: pointers to E8M0 bytes (None for bf16), and bytes per row."""

    a: gl.tensor | gl.constexpr
    b: gl.tensor | gl.constexpr
    a_pitch: gl.tensor
    b_pitch: gl.tensor

    @gluon.jit
    def of_tile(self, tile, num_n, CONSUMER: gl.constexpr):
        """Return the `TileScales` of a consumer's rows and of the tile's columns."""
        first_block = tile.k_start // MX_BLOCK
        a_row = tile.a_row + CONSUMER * CONSUMER_ROWS
        a_first = a_row.to(gl.int64) * self.a_pitch + first_block
        is_multiplied = tile.k_end > tile.k_start
        a = self.a + gl.where(is_multiplied, a_first, 0)
        b_first = tile.b_row.to(gl.int64) * self.b_pitch + first_block
        b = self.b + gl.where(is_multiplied, b_first, 0)
        num_rows = tile.out_row_end - tile.out_row - CONSUMER * CONSUMER_ROWS
        return TileScales(
            a=a,
            b=b,
            a_pitch=self.a_pitch,
            b_pitch=self.b_pitch,
            num_rows=gl.where(is_multiplied, num_rows, 1),
            num_columns=gl.where(is_multiplied, num_n - tile.column, 1),
        )


@aggregate
class TileScales:
    """Scales of a consumer's rows of a tile, and of the tile's columns.

    a, b: pointers to the scales of the first row and of the first column. num_rows may be negative:
    all rows then belong to the other consumer. If the reduction is empty there may be no scales;
    the pointers then address the first scale, which is not used.
    """

    a: gl.tensor
    b: gl.tensor
    a_pitch: gl.tensor
    b_pitch: gl.tensor
    num_rows: gl.tensor
    num_columns: gl.tensor

    @gluon.jit
    def row_pointers(self, LAYOUT: gl.constexpr):
        """Pointers to the first scale of each row, [64]; rows past the end repeat the last."""
        rows = gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
        return self.a + gl.minimum(rows, self.num_rows - 1) * self.a_pitch

    @gluon.jit
    def _column_pointers(self, columns):
        """Pointers to the scales of columns; columns past the end repeat the last."""
        return self.b + gl.minimum(columns, self.num_columns - 1) * self.b_pitch

    @gluon.jit
    def load(self, is_multiplied, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
        """Load scale bytes of 64 rows and of each half of the columns, ahead of their use.

        If the reduction is empty, return 127: the loaded bytes are arbitrary then, NaN included.
        """
        rows = self.row_pointers(LAYOUT)
        columns = gl.arange(0, HALF_COLUMNS, _one_column_per_thread())
        by_row = gl.load(rows)
        left = gl.load(self._column_pointers(columns))
        right = left
        if HALVES == 2:
            right = gl.load(self._column_pointers(columns + HALF_COLUMNS))
        return (
            gl.where(is_multiplied, by_row, _SCALE_ONE),
            gl.where(is_multiplied, left, _SCALE_ONE),
            gl.where(is_multiplied, right, _SCALE_ONE),
        )


@gluon.jit
def apply_scales(total, by_row, by_column, LAYOUT: gl.constexpr, ROW_SCALED: gl.constexpr):
    """Multiply [64, 128] sums by the scale of each column and, if ROW_SCALED, of each row."""
    factors = gl.convert_layout(scale_value(by_column), gl.SliceLayout(0, LAYOUT))
    if ROW_SCALED:
        total = total * gl.expand_dims(scale_value(by_row), 1)
    return total * gl.expand_dims(factors, 0)


@gluon.constexpr_function
def _coalesced(COLUMNS, BITS):
    """Layout of [64, COLUMNS] values for coalesced accesses of 16 bytes a thread."""
    vector = 128 // BITS
    return gl.BlockedLayout(
        [1, vector], [32 * vector // COLUMNS, COLUMNS // vector], [4, 1], [1, 0]
    )


@aggregate
class Output:
    """Target of a consumer: pointer and TMA descriptor of [rows, num_n], and its staging memory.

    staging: [64, 128] values, or [64, 64] for float32. ACCUMULATE adds the sums to the output.
    """

    pointer: gl.tensor
    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    num_n: gl.tensor
    ACCUMULATE: gl.constexpr

    @gluon.jit
    def store(self, sums, row, row_end, column):
        """Store sums [64, 128] at (row, column), in subtiles of the staging memory's shape."""
        values = sums.to(self.pointer.dtype.element_ty)
        SUBTILE: gl.constexpr = self.staging.shape[1]
        if SUBTILE == HALF_COLUMNS:
            self._store_subtile(values, row, row_end, column)
        else:
            gl.static_assert(2 * SUBTILE == HALF_COLUMNS)
            left, right = values.reshape([64, 2, 64]).permute((0, 2, 1)).split()
            self._store_subtile(left, row, row_end, column)
            if column + SUBTILE < self.num_n:
                self._store_subtile(right, row, row_end, column + SUBTILE)

    @gluon.jit
    def _store_subtile(self, values, row, row_end, column):
        """Store values [64, columns] through shared memory.

        Full tiles use TMA, which clips the last columns. Ragged tiles and ACCUMULATE use masked
        accesses: TMA would overwrite the next group's rows.
        """
        COLUMNS: gl.constexpr = values.shape[1]
        LAYOUT: gl.constexpr = _coalesced(COLUMNS, self.pointer.dtype.element_ty.primitive_bitwidth)
        tma.store_wait(0)
        barrier()  # only the thread that starts the copies can wait for them
        self.staging.store(values)
        if (not self.ACCUMULATE) & (row + CONSUMER_ROWS <= row_end):
            fence_async_shared()
            async_store(self.desc, [row, column], self.staging)
        else:
            rows = row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
            columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            offsets = gl.expand_dims(rows.to(gl.int64) * self.num_n, 1) + gl.expand_dims(columns, 0)
            mask = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(columns < self.num_n, 0)
            result = self.staging.load(LAYOUT)
            if self.ACCUMULATE:
                result += gl.load(self.pointer + offsets, mask=mask, other=0.0)
            gl.store(self.pointer + offsets, result, mask=mask)
