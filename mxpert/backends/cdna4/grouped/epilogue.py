"""Stores of the sums of a tile.

Row r of b's tile in LDS is output column `column_of(r)`. The permutation gives each lane 16
consecutive columns, so a row's stores are whole lines of 128 bytes (bfloat16).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from ...common.compat import aggregate
from ..lib.mx_gemm import BLOCK_N


@gluon.jit
def column_of(row):
    """Output column of a tile, for a row of b's tile in LDS.

    MFMA gives quarter q of a wave's lanes columns 4 q … 4 q + 3 of each 16-column block, and wave w
    of a row of four waves the blocks w, w + 4, w + 8, w + 12.
    """
    block, wave, quarter = row // 64, row // 16 % 4, row // 4 % 4
    return wave * 64 + quarter * 16 + block * 4 + row % 4


@gluon.constexpr_function
def _store_layout(rows):
    """Layout of half a tile's sums in output order: 16 consecutive columns a lane."""
    row_bits = [[32 << bit, 0] for bit in range((rows // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *row_bits],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 16], [0, 32]],
        warp_bases=[[0, 64], [0, 128], [16, 0]],
        block_bases=[],
        shape=[rows, BLOCK_N.value],
    )


@aggregate
class Output:
    """The output: pointer to [rows, num_n]; whether sums are added to it."""

    base: gl.tensor
    num_n: gl.tensor
    ACCUMULATE: gl.constexpr

    @gluon.jit
    def store(self, sums, row, row_end, column):
        """Store float32 sums [ROWS, 256] at row `row` and column `column`, rows below row_end."""
        ROWS: gl.constexpr = sums.shape[0]
        LAYOUT: gl.constexpr = _store_layout(ROWS)
        # [ROWS, block, wave, quarter, 4] to [ROWS, wave, quarter, block, 4]
        parts = gl.permute(gl.reshape(sums, [ROWS, 4, 4, 4, 4]), [0, 2, 3, 1, 4])
        value = gl.convert_layout(gl.reshape(parts, [ROWS, BLOCK_N]), LAYOUT)
        m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        base = self.base + row.to(gl.int64) * self.num_n + column
        offsets = m[:, None] * self.num_n + n[None, :]
        mask = (m < row_end - row)[:, None] & (n < self.num_n - column)[None, :]
        if self.ACCUMULATE:
            value += cdna4.buffer_load(base, offsets, mask=mask, other=0.0)
        cdna4.buffer_store(value.to(self.base.dtype.element_ty), base, offsets, mask=mask)
