"""Register and LDS layouts of the prefill kernels.

A tile is BLOCK_M sorted rows × 256 weight rows. WARPS_M × WARPS_N waves share it. A wave owns 64
sorted rows × 256 / WARPS_N weight rows: four fragments of 16 sorted rows times eight or four of 16
weight rows. Four weight fragments make a part. MFMA of e2m1 have two fragments of either side. The
epilogue takes quadrants: two fragments of sorted rows (a half) times a part.

The tensors of Triton number rows in the order of `AMDMFMALayout`: MFMA, wave, row of the MFMA.
Memory has the fragments of a wave in a row: wave, fragment, row of the fragment. The layouts below
map one to the other, so that no data moves.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def warps_m(BLOCK_M):
    """Waves along the sorted rows."""
    return BLOCK_M // 64


@gluon.constexpr_function
def warps_n(BLOCK_M):
    """Waves along the weight rows: 2, 4 or 4 for 256, 128 or 64 sorted rows."""
    return 2 if BLOCK_M == 256 else 4


@gluon.constexpr_function
def weight_parts(BLOCK_M):
    """Parts of four weight fragments a wave: 2 for 256 sorted rows, else 1."""
    return 2 if BLOCK_M == 256 else 1


@gluon.constexpr_function
def mfma_rows(FORMAT):
    """Rows of an MFMA: 32 × 32 × 64 for e2m1, else 16 × 16 × 128; both take 32 cycles.

    While an MFMA reads its operands, no other wave of the SIMD can issue an LDS access. 16 × 16 ×
    128 of e2m1 takes 16 cycles, which leaves the other wave too little.
    """
    return 32 if FORMAT == "e2m1" else 16


@gluon.constexpr_function
def mfma_layout(BLOCK_M, FORMAT):
    """Accumulators: a lane holds groups of four neighbouring columns of one row."""
    rows = mfma_rows(FORMAT)
    return gl.amd.AMDMFMALayout(
        version=4,
        instr_shape=[rows, rows, 128 * 16 // rows],
        transposed=True,
        warps_per_cta=[warps_m(BLOCK_M), warps_n(BLOCK_M)],
    )


@gluon.constexpr_function
def _bits(value):
    """Powers of two below `value`, a power of two."""
    return [1 << k for k in range(value.bit_length() - 1)]


@gluon.constexpr_function
def _along(axis, values):
    """Bases of a 2-D layout that step along one axis."""
    return [[value, 0] if axis == 0 else [0, value] for value in values]


@gluon.constexpr_function
def _fragments(count, waves, axis, rows):
    """Bases from a fragment's place in memory to its first row in Triton's order.

    A wave has `count` fragments of 16 rows; an MFMA has `rows`.
    """
    within = [16] if rows == 32 else []
    tiles = [rows * waves * bit for bit in _bits(count * 16 // rows)]
    return _along(axis, within + tiles + [rows * bit for bit in _bits(waves)])


@gluon.constexpr_function
def rows_in_lds(BLOCK_M, FORMAT):
    """[BLOCK_M, 128] bytes of the sorted rows: four fragments of each wave.

    128 bytes are half of the 64 banks. Rows r and r + 2 share banks, so the 16-byte chunk c of row
    r is stored at chunk c ^ (r / 2 % 8): sixteen rows of one chunk fill the banks once.
    """
    chunks: Any = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    swizzled: Any = [[1, 0], [2, 16], [4, 32], [8, 64]]
    fragments = _fragments(4, warps_m(BLOCK_M), 0, mfma_rows(FORMAT))
    return gl.SharedLinearLayout(chunks + swizzled + fragments)


@gluon.constexpr_function
def weights_in_lds(BLOCK_M, FORMAT):
    """[64 bytes, 256 / parts weight rows]: fragments [block of 32 codes][row][16 bytes].

    That is their order in memory. A part has four fragments of each wave.
    """
    lane: Any = _along(0, [1, 2, 4, 8]) + _along(1, [1, 2, 4, 8]) + _along(0, [16, 32])
    return gl.SharedLinearLayout(lane + _fragments(4, warps_n(BLOCK_M), 1, mfma_rows(FORMAT)))


@gluon.constexpr_function
def scales_in_lds(UNITS, ROWS):
    """[UNITS · ROWS, 128 / ROWS] dwords of scales of two steps: units [step][block][row].

    A unit is 64 rows. With 16 rows a dword has the scales of four fragments and a column is 4 ·
    step + block. With 32 rows it has those of two blocks in two fragments of 32 rows, and a column
    is 2 · step + block % 2.
    """
    lane: Any = _along(0, _bits(ROWS)) + _along(1, _bits(128 // ROWS))
    return gl.SharedLinearLayout(lane + _along(0, [ROWS * bit for bit in _bits(UNITS)]))


@gluon.constexpr_function
def row_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the rows' scales of a step, [WARPS_M · 16, 4] or [WARPS_M · 32, 2] dwords."""
    rows = mfma_rows(FORMAT)
    own: Any = _along(0, [rows * bit for bit in _bits(warps_m(BLOCK_M))])
    others: Any = [[0, 0] for _ in _bits(warps_n(BLOCK_M))]
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=_along(0, _bits(rows)) + _along(1, _bits(64 // rows)),
        warp_bases=others + own,
        block_bases=[],
        shape=[warps_m(BLOCK_M) * rows, 64 // rows],
    )


@gluon.constexpr_function
def weight_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the weights' scales of a step, [2, WARPS_N, parts, 16, 4] dwords.

    Axis 0 is the upper half of 32 rows: the lanes of both halves hold the same dwords. With MFMA of
    16 rows there is one.
    """
    parts, waves = weight_parts(BLOCK_M), warps_n(BLOCK_M)
    wide = mfma_rows(FORMAT) == 32
    rows: Any = [[0, 0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    half: Any = [[1, 0, 0, 0, 0]] if wide else []
    blocks: Any = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]]
    of_parts: Any = [[0, 0, bit, 0, 0] for bit in _bits(parts)]
    own: Any = [[0, bit, 0, 0, 0] for bit in _bits(waves)]
    others: Any = [[0, 0, 0, 0, 0] for _ in _bits(warps_m(BLOCK_M))]
    return gl.DistributedLinearLayout(
        reg_bases=(blocks[1:] if wide else []) + of_parts,
        lane_bases=rows + half + (blocks[:1] if wide else blocks),
        warp_bases=own + others,
        block_bases=[],
        shape=[2 if wide else 1, waves, parts, 16, 4],
    )


@gluon.constexpr_function
def weight_scales_in_lds(BLOCK_M):
    """[WARPS_N, parts, 16, 8] dwords of the weights' scales of two steps; see `scales_in_lds`."""
    parts, waves = weight_parts(BLOCK_M), warps_n(BLOCK_M)
    rows: Any = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    blocks: Any = [[0, 0, 0, bit] for bit in (1, 2, 4)]
    units: Any = [[0, bit, 0, 0] for bit in _bits(parts)] + [[bit, 0, 0, 0] for bit in _bits(waves)]
    return gl.SharedLinearLayout(rows + blocks + units)


@gluon.constexpr_function
def linear_in_lds():
    """Bytes in the order of a direct copy."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def row_copy_layout(WARPS):
    """Direct copies of sorted rows: eight lanes read the 128 bytes of a row, 16 bytes each."""
    return gl.BlockedLayout([1, 16], [8, 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def fragment_copy_layout(WARPS):
    """Direct copies of weights: a wave reads the 1024 bytes of a fragment."""
    return gl.BlockedLayout([1, 16], [1, 64], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def scale_copy_layout(WARPS):
    """Direct copies of scales: two waves read the 512 bytes of 64 rows, a dword a lane."""
    return gl.BlockedLayout([1, 4], [1, 64], [WARPS // 2, 2], [1, 0])


@gluon.jit
def row_of_half(row, BLOCK_M: gl.constexpr, FORMAT: gl.constexpr, HALF: gl.constexpr):
    """Row of the tile, from its number in Triton's order of a half."""
    WAVES: gl.constexpr = warps_m(BLOCK_M)
    TILE: gl.constexpr = mfma_rows(FORMAT)
    return row // TILE % WAVES * 64 + HALF * 32 + row // (TILE * WAVES) * TILE + row % TILE


@gluon.jit
def column_of_part(column, BLOCK_M: gl.constexpr, FORMAT: gl.constexpr, PART: gl.constexpr):
    """Weight row of the tile, from its number in Triton's order of a part."""
    WAVES: gl.constexpr = warps_n(BLOCK_M)
    TILE: gl.constexpr = mfma_rows(FORMAT)
    unit = column // TILE % WAVES * weight_parts(BLOCK_M) + PART
    return unit * 64 + column // (TILE * WAVES) * TILE + column % TILE
