"""Grouped GEMM on scaled MFMA: MXFP8 operands with any scales, each applied exactly.

A persistent workgroup, one a compute unit, computes tiles of BLOCK_M x 256. The reduction axis is
contiguous in both operands.

Roles: eight waves, two groups of four that alternate between memory and compute phases
    (`lib.phases`). Every wave computes 2 x (BLOCK_M / 4) x 64 sums.

Barriers: a barrier after each phase, 8 in two steps of 128 values. A memory phase waits for its own
    LDS reads, and for the direct copies that the next memory phase reads.

Pipeline: two steps of codes in LDS, BLOCK_M + 256 rows of 128 bytes each, and two pairs of steps of
    scales: 136 KiB with BLOCK_M = 256. Copies are direct (LDS-DMA) and start 4 phases before their
    reads.

Timeline: for each tile: locate the next one → main loop (`lib.mx_gemm`) → start the next tile's
    copies → store the sums, while the copies run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ...common.compat import aggregate
from ..lib.gcn import scheduling_fence
from ..lib.lds import COPY, row_offsets
from ..lib.mx_gemm import (
    BLOCK_N,
    SCALE_COPY,
    SCALE_ROWS,
    Operands,
    Sources,
    allocate,
    multiply,
    scale_offsets,
)
from ..lib.phases import NUM_WARPS
from ..lib.raster import first_tile
from .epilogue import Output, column_of
from .scheduler import MX_BLOCK, Scheduler


@aggregate
class Matrices:
    """Shapes of both operands: codes [rows, pitch] and packed scales [pairs, rows, 4]."""

    a_rows: gl.tensor
    b_rows: gl.tensor
    pitch: gl.tensor
    BLOCK_M: gl.constexpr

    @gluon.jit
    def of_tile(self, tile):
        """The `Sources` of a tile. Rows past the end of a group or matrix repeat its last row."""
        HALF: gl.constexpr = self.BLOCK_M // 2
        half = gl.arange(0, HALF, gl.SliceLayout(1, COPY))
        column = column_of(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY)))
        scale_row = gl.arange(0, SCALE_ROWS, gl.SliceLayout(1, SCALE_COPY))
        a_last = gl.maximum(tile.a_row_end - tile.a_row, 1) - 1
        b_last = gl.maximum(tile.b_row_end - tile.b_row, 1) - 1
        pair = tile.pair.to(gl.int64)
        # Tell the compiler that copies of 16 bytes are aligned.
        start = tile.start // MX_BLOCK * MX_BLOCK
        depth = tile.depth // MX_BLOCK * MX_BLOCK
        return Sources(
            a_first=tile.a_row.to(gl.int64) * self.pitch + start,
            b_first=tile.b_row.to(gl.int64) * self.pitch + start,
            a_scale_first=(pair * self.a_rows + tile.a_row) * 4,
            b_scale_first=(pair * self.b_rows + tile.b_row) * 4,
            a_pitch=self.a_rows * 4,
            b_pitch=self.b_rows * 4,
            depth=depth,
            a_top=row_offsets(gl.minimum(half, a_last), self.pitch),
            a_bottom=row_offsets(gl.minimum(HALF + half, a_last), self.pitch),
            b_rows=row_offsets(gl.minimum(column, b_last), self.pitch),
            a_scale_rows=scale_offsets(gl.minimum(scale_row, a_last)),
            b_scale_rows=scale_offsets(gl.minimum(column_of(scale_row), b_last)),
        )


@gluon.jit(
    do_not_specialize=["num_groups", "num_rows", "num_outer", "a_rows", "b_rows", "pitch", "num_k"],
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
    a_rows,
    b_rows,
    pitch,
    A_FORMAT: gl.constexpr,
    B_FORMAT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[r] = a[r] b[g].T for rows r of group g, [num_rows, num_n]; zeros in rows without a group.

    WGRAD: out[g] = a_g b_g.T, [num_groups, num_outer, num_n], summed over the group's part of the
    reduction; offsets are multiples of 32. a [a_rows, pitch] and b [b_rows, pitch]: codes, pitch a
    multiple of 32. Scales are packed by `pack_scales`.
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
    )
    operands = Operands(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    matrices = Matrices(
        a_rows=a_rows, b_rows=b_rows, pitch=pitch // MX_BLOCK * MX_BLOCK, BLOCK_M=BLOCK_M
    )
    output = Output(base=out, num_n=num_n, ACCUMULATE=ACCUMULATE)
    buffers = allocate(BLOCK_M)
    number = first_tile()
    cursor, tile = scheduler.locate(number, scheduler.start())
    matrices.of_tile(tile).start(operands, buffers)
    while tile.out_row_end > 0:
        number += gl.num_programs(0)
        cursor, following = scheduler.locate(number, cursor)
        sources = matrices.of_tile(tile)
        top, bottom = multiply(operands, buffers, sources, BLOCK_M, A_FORMAT, B_FORMAT)
        matrices.of_tile(following).start(operands, buffers)
        scheduling_fence()
        output.store(top, tile.out_row, tile.out_row_end, tile.column)
        output.store(bottom, tile.out_row + BLOCK_M // 2, tile.out_row_end, tile.column)
        tile = following
    async_copy.wait_group(0)
