"""Grouped GEMM on scaled MFMA: MXFP8 operands with any scales, each applied exactly.

A persistent workgroup, one a compute unit, computes tiles of BLOCK_M x 256. The reduction axis is
contiguous in both operands.

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
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ..device.cdna4_gcn import scheduling_fence
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
    row_of,
    scale_offsets,
)
from ..device.cdna4_lds import COPY, row_offsets
from ..device.cdna4_phases import NUM_WARPS
from ..device.cdna4_raster import first_tile
from ..device.compat import aggregate
from .cdna4_epilogue import Output
from .cdna4_scheduler import Scheduler


@aggregate
class Matrices:
    """Distances of rows of codes in bytes, and of planes of scales in words, in both operands."""

    a_pitch: gl.tensor
    b_pitch: gl.tensor
    a_scale_pitch: gl.tensor
    b_scale_pitch: gl.tensor

    @gluon.jit
    def of_tile(self, tile):
        """The `Sources` of a tile. Rows past the end of a group or matrix repeat its last row."""
        row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, COPY))
        column = column_of(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY)))
        word = gl.arange(0, BLOCK_N // WORD_ROWS, gl.SliceLayout(0, SCALE_COPY))
        a_last = gl.maximum(tile.a_row_end - tile.a_row, 1) - 1
        b_last = gl.maximum(tile.b_row_end - tile.b_row, 1) - 1
        # Tell the compiler that copies of 16 bytes are aligned.
        start = tile.start // STEP * STEP
        lead = tile.lead // MX_BLOCK * MX_BLOCK
        depth = tile.depth // MX_BLOCK * MX_BLOCK
        a_plane = (start // MX_BLOCK).to(gl.int64) * self.a_scale_pitch
        b_plane = (start // MX_BLOCK).to(gl.int64) * self.b_scale_pitch
        return Sources(
            a_first=tile.a_row.to(gl.int64) * self.a_pitch + start,
            b_first=tile.b_row.to(gl.int64) * self.b_pitch + start,
            a_scale_first=a_plane + tile.a_row // WORD_ROWS,
            b_scale_first=b_plane + tile.b_scale_row // WORD_ROWS,
            a_pitch=self.a_scale_pitch,
            b_pitch=self.b_scale_pitch,
            lead=lead,
            depth=depth,
            a_top=row_offsets(gl.minimum(row_of(row, 0), a_last), self.a_pitch),
            a_bottom=row_offsets(gl.minimum(row_of(row, 1), a_last), self.a_pitch),
            b_rows=row_offsets(gl.minimum(column, b_last), self.b_pitch),
            a_scale_words=scale_offsets(gl.minimum(word, a_last // WORD_ROWS), self.a_scale_pitch),
            b_scale_words=scale_offsets(gl.minimum(word, b_last // WORD_ROWS), self.b_scale_pitch),
        )


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
):
    """out[r] = a[r] b[g].T for rows r of group g, [num_rows, num_n]; zeros in rows without a group.

    WGRAD: out[g] = a_g b_g.T, [num_groups, num_outer, num_n], summed over the group's part of the
    reduction; offsets are multiples of 32. Codes: rows of a and b, a_pitch and b_pitch bytes apart,
    multiples of 32. Scales: planes of bytes for all rows, a_scale_pitch and b_scale_pitch words
    apart; each matrix of b has whole words. Both are aligned to a word.
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
    )
    output = Output(base=out, num_n=num_n, ACCUMULATE=ACCUMULATE)
    buffers = allocate(BLOCK_M)
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
