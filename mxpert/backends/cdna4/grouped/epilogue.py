"""Stores of the sums of a tile.

Row r of b's tile in LDS is output column `column_of(r)`. The permutation gives each lane 16
consecutive columns, so a row's stores are whole lines of 128 bytes (bfloat16).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from ...common.compat import aggregate
from ..lib.gcn import scheduling_fence
from ..lib.mx_gemm import BLOCK_N


@gluon.jit
def column_of(row):
    """Output column of a tile, for a row of b's tile in LDS.

    MFMA gives quarter q of a wave's lanes columns 4 q … 4 q + 3 of each 16-column block, and wave w
    of a row of four waves the blocks w, w + 4, w + 8, w + 12.
    """
    block, wave, quarter = row // 64, row // 16 % 4, row // 4 % 4
    return wave * 64 + quarter * 16 + block * 4 + row % 4


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
    def store(self, sums, row, row_end, column):
        """Store float32 sums [64 or 128, 256] at `row` and `column`, rows below row_end."""
        upper, lower = _halves(sums)
        if sums.shape[0] == 2 * _BLOCK_ROWS:
            self._store_block(upper, row, row_end, column)
            self._store_block(lower, row + _BLOCK_ROWS, row_end, column)
        else:
            gl.static_assert(sums.shape[0] == 4 * _BLOCK_ROWS, "half a tile has 64 or 128 rows")
            first, second = _halves(upper)
            third, fourth = _halves(lower)
            self._store_block(first, row, row_end, column)
            self._store_block(second, row + _BLOCK_ROWS, row_end, column)
            self._store_block(third, row + 2 * _BLOCK_ROWS, row_end, column)
            self._store_block(fourth, row + 3 * _BLOCK_ROWS, row_end, column)

    @gluon.jit
    def _store_block(self, sums, row, row_end, column):
        """Store [32, 256]. The fence keeps the registers of a block's addresses short-lived."""
        # [32, block, wave, quarter, 4] to [32, wave, quarter, block, 4]
        parts = gl.permute(gl.reshape(sums, [_BLOCK_ROWS, 4, 4, 4, 4]), [0, 2, 3, 1, 4])
        value = gl.convert_layout(gl.reshape(parts, [_BLOCK_ROWS, BLOCK_N]), _STORE)
        m = gl.arange(0, _BLOCK_ROWS, gl.SliceLayout(1, _STORE))
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _STORE))
        base = self.base + row.to(gl.int64) * self.num_n + column
        offsets = m[:, None] * self.num_n + n[None, :]
        mask = (m < row_end - row)[:, None] & (n < self.num_n - column)[None, :]
        if self.ACCUMULATE:
            value += cdna4.buffer_load(base, offsets, mask=mask, other=0.0)
        cdna4.buffer_store(value.to(self.base.dtype.element_ty), base, offsets, mask=mask)
        scheduling_fence()
