"""Register layouts of folded MXFP4 weights, and their decoding into FP8 fragments.

The memory order is HOPPER_FRAGMENT of `formats.layouts`. A tile is UNITS row units of 64 rows by
STEPS depth units of 128 codes. Four warps hold a row unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.ptx import decode_words


@gluon.constexpr_function
def _split(flat_bits: list[int], columns: int) -> list[list[int]]:
    """Map bits of a flat byte address to [row, column] of a tile with `columns` bytes a row."""
    return [[0, bit] if bit < columns else [bit // columns, 0] for bit in flat_bits]


@gluon.constexpr_function
def _powers(start: int, count: int) -> list[int]:
    """[start, 2 start, 4 start, …], one bit for each doubling up to `count` (a power of two)."""
    return [start << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def code_layout(UNITS, STEPS):
    """Codes [UNITS * STEPS * 32, 128] uint8: each thread's 16-byte loads are its own fragments."""
    registers = [1, 2, 4, 8, 2048, *_powers(4096, STEPS)]
    warps = [512, 1024, *_powers(4096 * STEPS, UNITS)]
    return gl.DistributedLinearLayout(
        _split(registers, 128),
        _split(_powers(16, 32), 128),
        _split(warps, 128),
        [],
        [UNITS * STEPS * 32, 128],
    )


@gluon.constexpr_function
def shift_layout(UNITS, STEPS):
    """Scale shifts [UNITS * STEPS * 8, 32] uint8, in the threads that hold the codes."""
    registers = [1, *_powers(256, STEPS)]
    warps = [64, 128, *_powers(256 * STEPS, UNITS)]
    return gl.DistributedLinearLayout(
        _split(registers, 32),
        _split(_powers(2, 32), 32),
        _split(warps, 32),
        [],
        [UNITS * STEPS * 8, 32],
    )


@gluon.constexpr_function
def accumulator_layout(WARPS, COLUMNS):
    """wgmma accumulator [16 * WARPS, COLUMNS] float32: each warp holds 16 weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 32])


@gluon.constexpr_function
def row_pair_layout(WARPS, TOKENS):
    """Outputs [16 * WARPS, TOKENS] in weight-row order: a thread holds two adjacent rows."""
    registers = [[1, 0], [0, 1], *[[0, bit] for bit in _powers(8, TOKENS // 8)]]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    warps = [[bit, 0] for bit in _powers(16, WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * WARPS, TOKENS])


@gluon.constexpr_function
def feature_layout(WARPS, TOKENS):
    """Gated features [8 * WARPS, TOKENS]: a thread holds gate and up of a feature."""
    registers = [[0, 1], *[[0, bit] for bit in _powers(8, TOKENS // 8)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[bit, 0] for bit in _powers(8, WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8 * WARPS, TOKENS])


@gluon.jit
def decode_weights(
    codes_smem,
    shifts_smem,
    tables,
    ACCUMULATOR: gl.constexpr,
    UNITS: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Decode codes and shifts in shared memory into wgmma's register operand A.

    Returns e4m3 [UNITS * 64, STEPS * 128]. No data moves between threads.
    """
    CODES: gl.constexpr = code_layout(UNITS, STEPS)
    SHIFTS: gl.constexpr = shift_layout(UNITS, STEPS)
    codes = codes_smem.load(CODES).reshape([UNITS, STEPS, 2, 4, 8, 4, 4, 4])  # u k r w g t q j
    NESTED: gl.constexpr = codes.type.layout
    shifts = shifts_smem.load(SHIFTS).to(gl.int32).reshape([UNITS, STEPS, 4, 8, 4, 2])
    shifts = shifts.permute((0, 1, 5, 2, 3, 4))  # u k r w g t
    shifts = gl.convert_layout(
        shifts, gl.SliceLayout(6, gl.SliceLayout(7, NESTED)), assert_trivial=True
    )
    shifts = gl.expand_dims(gl.expand_dims(shifts, 6), 7)
    first, second = decode_words(codes, shifts, tables)
    weights = gl.join(first, second)  # u k r w g t q j h
    weights = weights.permute((0, 3, 2, 4, 1, 6, 8, 5, 7))  # rows u w r g, depth k q h t j
    weights = weights.reshape([UNITS * 64, STEPS * 128])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, ACCUMULATOR, 4), assert_trivial=True)


@gluon.jit
def join_halves(accumulator, SPLIT: gl.constexpr):
    """With SPLIT return hi + lo / 16: the right half of the columns holds the tokens' low parts."""
    if SPLIT:
        ROWS: gl.constexpr = accumulator.shape[0]
        TOKENS: gl.constexpr = accumulator.shape[1] // 2
        hi, lo = accumulator.reshape([ROWS, 2, TOKENS]).permute((0, 2, 1)).split()
        return hi + lo * 0.0625
    else:
        return accumulator


@gluon.jit
def row_pairs(accumulator, LAYOUT: gl.constexpr):
    """Relabel accumulator rows from fragment order to weight-row order; no data moves."""
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    rows = accumulator.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 1, 3))
    return gl.convert_layout(rows.reshape([ROWS, TOKENS]), LAYOUT, assert_trivial=True)


@gluon.jit
def gate_and_up(accumulator, LAYOUT: gl.constexpr):
    """Split accumulator rows (gate 2j, up 2j + 1) into gate and up, [ROWS / 2, TOKENS] each.

    Gate and up of a feature are in the same thread; no data moves.
    """
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    pairs = accumulator.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1))
    gate, up = pairs.split()
    gate = gl.convert_layout(gate.reshape([ROWS // 2, TOKENS]), LAYOUT, assert_trivial=True)
    up = gl.convert_layout(up.reshape([ROWS // 2, TOKENS]), LAYOUT, assert_trivial=True)
    return gate, up
