"""Stores of the sums of a tile.

LDS rows of a and b are tile rows `row_of` and output columns `column_of`. Therefore each lane has
16 consecutive columns, and a row's stores are whole lines of 128 bytes (bfloat16).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from ..device.cdna4_gcn import scheduling_fence
from ..device.cdna4_gemm import BLOCK_N, row_of
from ..device.compat import aggregate

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


@gluon.jit
def _halves(sums):
    """Upper and lower half of the rows."""
    ROWS: gl.constexpr = sums.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(sums, [2, ROWS, BLOCK_N]), [1, 2, 0]))


@aggregate
class Output:
    """The output: pointer to [rows, num_n]; whether sums are added to it."""

    base: gl.tensor
    num_n: gl.tensor
    ACCUMULATE: gl.constexpr

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
        # [32, block, wave, quarter, 4] to [32, wave, quarter, 4, block]
        parts = gl.permute(gl.reshape(sums, [_BLOCK_ROWS, 4, 4, 4, 4]), [0, 2, 3, 4, 1])
        value = gl.convert_layout(gl.reshape(parts, [_BLOCK_ROWS, BLOCK_N]), _STORE)
        m = row_of(gl.arange(0, _BLOCK_ROWS, gl.SliceLayout(1, _STORE)), 0)
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _STORE))
        row = tile.out_row + first
        base = self.base + row.to(gl.int64) * self.num_n + tile.column
        offsets = m[:, None] * self.num_n + n[None, :]
        rows = (m >= tile.out_row_begin - row) & (m < tile.out_row_end - row)
        mask = rows[:, None] & (n < self.num_n - tile.column)[None, :]
        if self.ACCUMULATE:
            value += cdna4.buffer_load(base, offsets, mask=mask, other=0.0)
        cdna4.buffer_store(value.to(self.base.dtype.element_ty), base, offsets, mask=mask)
        scheduling_fence()
