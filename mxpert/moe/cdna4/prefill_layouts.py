"""Register and LDS layouts of the prefill kernels.

A tile is BLOCK_M sorted rows × 256 weight rows, four units of 64. WARPS_M × WARPS_N waves share it.
A wave owns 64 or 32 consecutive sorted rows times one or two consecutive units:

    BLOCK_M    e2m1: waves    each        e4m3, e5m2: waves    each
    256        4 × 2          64 × 128    4 × 2                64 × 128
    128        4 × 2          32 × 128    2 × 4                64 × 64
    64         2 × 2          32 × 128    1 × 4                64 × 64

A fragment is 16 rows. An MFMA of e4m3 has one fragment of either side. An MFMA of e2m1 has two: of
sorted rows two neighbours, of weight rows fragment f of both units. The four bytes of a dword of
`CDNA4_FRAGMENT` scales are those of fragments 0 to 3, so its byte f is right for all lanes.

The tensors of Triton number rows in the order of `AMDMFMALayout`: MFMA, wave, row of the MFMA.
Memory has the rows of a wave one after the other. The layouts below map one to the other, so that
no data moves. The epilogue takes quadrants: up to 32 sorted rows of each wave times a unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def warps_n(BLOCK_M, FORMAT):
    """Waves along the weight rows."""
    return 2 if BLOCK_M == 256 or FORMAT == "e2m1" else 4


@gluon.constexpr_function
def warps_m(BLOCK_M, FORMAT):
    """Waves along the sorted rows."""
    return (4 if BLOCK_M == 64 else 8) // warps_n(BLOCK_M, FORMAT)


@gluon.constexpr_function
def wave_rows(BLOCK_M, FORMAT):
    """Sorted rows of a wave."""
    return BLOCK_M // warps_m(BLOCK_M, FORMAT)


@gluon.constexpr_function
def wave_units(BLOCK_M, FORMAT):
    """Units of 64 weight rows of a wave."""
    return 4 // warps_n(BLOCK_M, FORMAT)


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
        warps_per_cta=[warps_m(BLOCK_M, FORMAT), warps_n(BLOCK_M, FORMAT)],
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
def rows_in_lds(BLOCK_M, FORMAT):
    """[BLOCK_M, 128] bytes of the sorted rows, those of a wave one after the other.

    128 bytes are half of the 64 banks. Rows r and r + 2 share banks, so the 16-byte chunk c of row
    r is stored at chunk c ^ (r / 2 % 8): sixteen rows of one chunk fill the banks once.
    """
    chunks = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    swizzled = [[1, 0], [2, 16], [4, 32], [8, 64]]
    rows, waves = mfma_rows(FORMAT), warps_m(BLOCK_M, FORMAT)
    tiles = [rows * waves * bit for bit in _bits(wave_rows(BLOCK_M, FORMAT) // rows)]
    order = [bit for bit in _bits(rows) if bit == 16] + tiles + [rows * bit for bit in _bits(waves)]
    return gl.SharedLinearLayout(chunks + swizzled + _along(0, order))


@gluon.constexpr_function
def weights_in_lds(BLOCK_M, FORMAT):
    """[64 bytes, 256 weight rows]: units of fragments [block of 32 codes][row][16 bytes].

    That is their order in memory.
    """
    lane = _along(0, [1, 2, 4, 8]) + _along(1, [1, 2, 4, 8]) + _along(0, [16, 32])
    rows, waves = mfma_rows(FORMAT), warps_n(BLOCK_M, FORMAT)
    if rows == 32:  # MFMA (fragment), wave, unit, row
        fragments, units = [32 * waves * bit for bit in _bits(4)], [16]
    else:  # MFMA (unit, fragment), wave, row
        fragments = [16 * waves * bit for bit in _bits(4 * wave_units(BLOCK_M, FORMAT))]
        units = []
    own = [rows * bit for bit in _bits(waves)]
    return gl.SharedLinearLayout(lane + _along(1, fragments + units + own))


@gluon.constexpr_function
def row_scales_in_lds(UNITS, FORMAT):
    """[UNITS, rows of an MFMA, blocks] dwords of the rows' scales of two steps.

    A unit is 64 rows. With MFMA of 16 rows a dword has the scales of four fragments and a block is
    4 · step + block. With 32 rows it has [MFMA][block / 2] and a block is 2 · step + block % 2.
    """
    rows = mfma_rows(FORMAT)
    lane = [[0, bit, 0] for bit in _bits(rows)] + [[0, 0, bit] for bit in _bits(128 // rows)]
    return gl.SharedLinearLayout(lane + [[bit, 0, 0] for bit in _bits(UNITS)])


@gluon.constexpr_function
def row_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the rows' scales of a step, [units, 2, rows of an MFMA, blocks] dwords.

    Axis 1 is the half of a unit that a wave of 32 rows owns; both waves hold the same dwords. It
    is 1 where a wave owns 64 rows.
    """
    rows, waves = mfma_rows(FORMAT), warps_m(BLOCK_M, FORMAT)
    sharing = 64 // wave_rows(BLOCK_M, FORMAT)
    lane = [[0, 0, bit, 0] for bit in _bits(rows)] + [[0, 0, 0, b] for b in _bits(64 // rows)]
    half = [[0, bit, 0, 0] for bit in _bits(sharing)]
    own = [[bit, 0, 0, 0] for bit in _bits(waves // sharing)]
    others = [[0, 0, 0, 0] for _ in _bits(warps_n(BLOCK_M, FORMAT))]
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=lane,
        warp_bases=others + half + own,
        block_bases=[],
        shape=[waves // sharing, sharing, rows, 64 // rows],
    )


@gluon.constexpr_function
def weight_scales_in_lds(BLOCK_M, FORMAT):
    """[WARPS_N, units, 16, 8] dwords of the weights' scales of two steps: [step][block][row]."""
    rows = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    blocks = [[0, 0, 0, bit] for bit in (1, 2, 4)]
    units = [[0, bit, 0, 0] for bit in _bits(wave_units(BLOCK_M, FORMAT))]
    waves = [[bit, 0, 0, 0] for bit in _bits(warps_n(BLOCK_M, FORMAT))]
    return gl.SharedLinearLayout(rows + blocks + units + waves)


@gluon.constexpr_function
def weight_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the weights' scales of a step, [WARPS_N, units, 16, 4] dwords."""
    wide = mfma_rows(FORMAT) == 32
    rows = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    blocks = [[0, 0, 0, 1], [0, 0, 0, 2]]
    units = [[0, bit, 0, 0] for bit in _bits(wave_units(BLOCK_M, FORMAT))]
    own = [[bit, 0, 0, 0] for bit in _bits(warps_n(BLOCK_M, FORMAT))]
    others = [[0, 0, 0, 0] for _ in _bits(warps_m(BLOCK_M, FORMAT))]
    return gl.DistributedLinearLayout(
        reg_bases=blocks[1:] if wide else units,
        lane_bases=rows + (units + blocks[:1] if wide else blocks),
        warp_bases=own + others,
        block_bases=[],
        shape=[warps_n(BLOCK_M, FORMAT), wave_units(BLOCK_M, FORMAT), 16, 4],
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
