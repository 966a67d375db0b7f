"""Register and LDS layouts of the prefill kernels.

A tile is BLOCK_M sorted rows × 256 weight rows. WARPS_M × WARPS_N waves share it. A wave owns 64
sorted rows × 256 / WARPS_N weight rows: four fragments of 16 sorted rows times eight or four of 16
weight rows. Two fragments of sorted rows make a half, four weight fragments a part. A quadrant is
one half times one part: eight MFMA.

The tensors of Triton number the rows of a half or a part in the order of `AMDMFMALayout`: fragment,
wave, row of the fragment. Memory has the fragments of a wave in a row: wave, fragment, row of the
fragment. The layouts below map one to the other, so that no data moves.
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
def mfma_layout(BLOCK_M):
    """Accumulators: a lane holds four neighbouring columns of one row in each fragment."""
    return gl.amd.AMDMFMALayout(
        version=4,
        instr_shape=[16, 16, 128],
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
def _fragments(count, waves, axis):
    """Bases from a fragment's place in memory to its first row in Triton's order."""
    inner = [16 * waves * bit for bit in _bits(count)]
    return _along(axis, inner + [16 * bit for bit in _bits(waves)])


@gluon.constexpr_function
def rows_in_lds(BLOCK_M):
    """[BLOCK_M / 2, 128] bytes of half of the sorted rows: two fragments of each wave.

    128 bytes are half of the 64 banks. Rows r and r + 2 share banks, so the 16-byte chunk c of row
    r is stored at chunk c ^ (r / 2 % 8): sixteen rows of one chunk fill the banks once.
    """
    chunks: Any = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    swizzled: Any = [[1, 0], [2, 16], [4, 32], [8, 64]]
    return gl.SharedLinearLayout(chunks + swizzled + _fragments(2, warps_m(BLOCK_M), 0))


@gluon.constexpr_function
def weights_in_lds(BLOCK_M):
    """[64 bytes, 256 / parts weight rows]: fragments [block of 32 codes][row][16 bytes].

    That is their order in memory. A part has four fragments of each wave.
    """
    lane: Any = _along(0, [1, 2, 4, 8]) + _along(1, [1, 2, 4, 8]) + _along(0, [16, 32])
    return gl.SharedLinearLayout(lane + _fragments(4, warps_n(BLOCK_M), 1))


@gluon.constexpr_function
def scales_in_lds(WAVES, FRAGMENTS):
    """[FRAGMENTS / 4 · WAVES · 16, 8] dwords of scales: 64-row units of [step][block][row].

    A dword has the scales of four fragments. Row 16 · (WAVES · h + wave) + r is row r of the
    fragments 4 h … 4 h + 3 of a wave; column 4 · step + block.
    """
    lane: Any = _along(0, [1, 2, 4, 8]) + _along(1, [1, 2, 4])
    high = [16 * WAVES * bit for bit in _bits(FRAGMENTS // 4)]
    return gl.SharedLinearLayout(lane + _along(0, high + [16 * bit for bit in _bits(WAVES)]))


@gluon.constexpr_function
def scale_dwords(WAVES, FRAGMENTS, OTHER_WAVES, INNER):
    """Registers of [FRAGMENTS / 4 · WAVES · 16, 4] dwords: the scales of a wave's own fragments.

    INNER: whether neighbouring waves differ along this operand, or along the other one, which has
    OTHER_WAVES.
    """
    high = [16 * WAVES * bit for bit in _bits(FRAGMENTS // 4)]
    own: Any = _along(0, [16 * bit for bit in _bits(WAVES)])
    other: Any = [[0, 0] for _ in _bits(OTHER_WAVES)]
    return gl.DistributedLinearLayout(
        reg_bases=_along(0, high),
        lane_bases=_along(0, [1, 2, 4, 8]) + _along(1, [1, 2]),
        warp_bases=own + other if INNER else other + own,
        block_bases=[],
        shape=[FRAGMENTS // 4 * WAVES * 16, 4],
    )


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
def row_of_half(row, BLOCK_M: gl.constexpr, HALF: gl.constexpr):
    """Row of the tile, from its number in Triton's order of a half."""
    WAVES: gl.constexpr = warps_m(BLOCK_M)
    return row // 16 % WAVES * 64 + HALF * 32 + row // (16 * WAVES) * 16 + row % 16


@gluon.jit
def column_of_part(column, BLOCK_M: gl.constexpr, PART: gl.constexpr):
    """Weight row of the tile, from its number in Triton's order of a part."""
    WAVES: gl.constexpr = warps_n(BLOCK_M)
    unit = column // 16 % WAVES * weight_parts(BLOCK_M) + PART
    return unit * 64 + column // (16 * WAVES) * 16 + column % 16
