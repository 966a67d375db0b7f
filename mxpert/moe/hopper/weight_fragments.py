"""Register layouts of folded MXFP4 weights, and their decoding into FP8 and float16 fragments.

The memory order is HOPPER_FRAGMENT of `layout.py`: per row unit (64 rows) and depth unit (128
codes) 32 × 128 bytes of codes, two a byte, and 8 × 32 bytes of shifts, one for each MX block of a
row. Four warps hold a row unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.hopper_ptx import LO_SCALE, decode_float16_words, decode_words, from_lanes


@gluon.constexpr_function
def _row_column_bits(flat_bits: list[int], columns: int) -> list[list[int]]:
    """Map bits of a flat byte address to [row, column] of a tile with `columns` bytes a row."""
    return [[0, bit] if bit < columns else [bit // columns, 0] for bit in flat_bits]


@gluon.constexpr_function
def _powers(start: int, count: int) -> list[int]:
    """[start, 2 start, 4 start, …], one bit for each doubling up to `count` (a power of two)."""
    return [start << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def code_layout(STEPS):
    """Codes [STEPS * 32, 128] uint8: each thread's 16-byte loads are its own fragments."""
    registers = [1, 2, 4, 8, 2048, *_powers(4096, STEPS)]
    return gl.DistributedLinearLayout(
        _row_column_bits(registers, 128),
        _row_column_bits(_powers(16, 32), 128),
        _row_column_bits([512, 1024], 128),
        [],
        [STEPS * 32, 128],
    )


@gluon.constexpr_function
def shift_layout(STEPS):
    """Scale shifts [STEPS * 8, 32] uint8, in the threads that hold the codes."""
    registers = [1, *_powers(256, STEPS)]
    return gl.DistributedLinearLayout(
        _row_column_bits(registers, 32),
        _row_column_bits(_powers(2, 32), 32),
        _row_column_bits([64, 128], 32),
        [],
        [STEPS * 8, 32],
    )


@gluon.constexpr_function
def accumulator_layout(COLUMNS, DEPTH=32):
    """Wgmma accumulator [64, COLUMNS] float32 of a warpgroup: each warp holds 16 weight rows.

    DEPTH: codes of depth of one wgmma, 32 of e4m3 or 16 of 16 bits.
    """
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH])


@gluon.constexpr_function
def row_pair_layout(ROWS):
    """Outputs [64, ROWS] in weight-row order: a thread holds two adjacent weight rows."""
    registers = [[1, 0], [0, 1], *[[0, bit] for bit in _powers(8, ROWS // 8)]]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, ROWS])


@gluon.constexpr_function
def feature_layout(ROWS):
    """Gated features [32, ROWS]: a thread holds gate and up of a feature."""
    registers = [[0, 1], *[[0, bit] for bit in _powers(8, ROWS // 8)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [32, ROWS])


@gluon.jit
def _load_weights(codes_smem, shifts_smem, STEPS: gl.constexpr):
    """Codes [STEPS, 2, 4, 8, 4, 4, 4] uint8 and their shifts [STEPS, 2, 4, 8, 4, 1, 1] int32.

    Axes: k depth unit, r row half of a warp, w warp, g row of eight, t thread of a row, q word of a
    thread, j byte of a word.
    """
    CODES: gl.constexpr = code_layout(STEPS)
    SHIFTS: gl.constexpr = shift_layout(STEPS)
    codes = codes_smem.load(CODES).reshape([STEPS, 2, 4, 8, 4, 4, 4])  # k r w g t q j
    NESTED: gl.constexpr = codes.type.layout
    shifts = shifts_smem.load(SHIFTS).to(gl.int32).reshape([STEPS, 4, 8, 4, 2])  # k w g t r
    shifts = shifts.permute((0, 4, 1, 2, 3))  # k r w g t
    shifts = gl.convert_layout(
        shifts, gl.SliceLayout(5, gl.SliceLayout(6, NESTED)), assert_trivial=True
    )
    return codes, gl.expand_dims(gl.expand_dims(shifts, 5), 6)


@gluon.jit
def decode_weights(codes_smem, shifts_smem, tables, ACCUMULATOR: gl.constexpr, STEPS: gl.constexpr):
    """Decode one row unit × STEPS depth units in shared memory into wgmma's register operand A.

    codes_smem: [STEPS * 32, 128] uint8. shifts_smem: [STEPS * 8, 32] uint8. Returns e4m3
    [64, STEPS * 128]. No data moves between threads. A word of a thread is its codes of a k32 step,
    h the half of the step.
    """
    codes, shifts = _load_weights(codes_smem, shifts_smem, STEPS)
    first, second = decode_words(codes, shifts, tables)
    weights = gl.join(first, second)  # k r w g t q j h
    weights = weights.permute((2, 1, 3, 0, 5, 7, 4, 6))  # rows w r g, depth k q h t j
    weights = weights.reshape([64, STEPS * 128])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, ACCUMULATOR, 4), assert_trivial=True)


@gluon.jit
def decode_float16_weights(codes_smem, shifts_smem, tables, ACCUMULATOR: gl.constexpr):
    """As `decode_weights` for one depth unit, as two operands float16 [64, 64].

    wgmma with 16 codes of depth has codes 0 and 1 of a thread (p = 0) beside those of the other
    threads t of the row, then codes 2 and 3. Rows are stored in the same order (`encode`).
    """
    codes, shifts = _load_weights(codes_smem, shifts_smem, 1)
    codes = codes.reshape([2, 4, 8, 4, 2, 2, 4]).permute((0, 1, 2, 3, 5, 6, 4))
    left, right = codes.split()  # r w g t q j
    SHIFTS: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, left.type.layout))
    shifts = gl.convert_layout(shifts.reshape([2, 4, 8, 4]), SHIFTS, assert_trivial=True)
    low = _beside_words(from_lanes(tables.low, shifts))
    high = _beside_words(from_lanes(tables.high, shifts))
    return (
        _float16_operand(left, low, high, ACCUMULATOR),
        _float16_operand(right, low, high, ACCUMULATOR),
    )


@gluon.jit
def _beside_words(values):
    return gl.expand_dims(gl.expand_dims(values, 4), 5)


@gluon.jit
def _float16_operand(codes, low, high, ACCUMULATOR: gl.constexpr):
    """Codes [r w g t q j] of half a unit as an operand [64, 64]."""
    first, second = decode_float16_words(codes, low, high)
    weights = gl.join(first, second).reshape([2, 4, 8, 4, 2, 2, 2, 2])  # r w g t q p i h
    weights = weights.permute((1, 0, 2, 4, 7, 5, 3, 6)).reshape([64, 64])  # w r g, q h p t i
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACCUMULATOR, 2)
    return gl.convert_layout(weights, OPERAND, assert_trivial=True)


@gluon.jit
def join_hi_lo(accumulator, BLOCK: gl.constexpr):
    """Return hi + lo / 16, [64, ROWS] float32, of sums [64, 2 * ROWS]; no data moves.

    Each 2 * BLOCK columns are the high parts of BLOCK rows, then the low parts of the same rows.
    """
    ROWS: gl.constexpr = accumulator.shape[1] // 2
    parts = accumulator.reshape([64, ROWS // BLOCK, 2, BLOCK]).permute((0, 1, 3, 2))
    hi, lo = parts.reshape([64, ROWS, 2]).split()
    return gl.convert_layout(hi + lo * LO_SCALE, accumulator_layout(ROWS), assert_trivial=True)


@gluon.jit
def row_pairs(accumulator, LAYOUT: gl.constexpr):
    """Relabel accumulator rows from fragment order to weight-row order; no data moves."""
    ROWS: gl.constexpr = accumulator.shape[1]
    pairs = accumulator.reshape([4, 2, 8, ROWS]).permute((0, 2, 1, 3))  # warp, pair, row of two
    return gl.convert_layout(pairs.reshape([64, ROWS]), LAYOUT, assert_trivial=True)


@gluon.jit
def gate_and_up(accumulator, LAYOUT: gl.constexpr):
    """Split accumulator [64, ROWS] (gate 2j, up 2j + 1) into gate and up, [32, ROWS] each.

    Gate and up of a feature are in the same thread; no data moves.
    """
    ROWS: gl.constexpr = accumulator.shape[1]
    pairs = accumulator.reshape([4, 2, 8, ROWS]).permute((0, 2, 3, 1))
    gate, up = pairs.split()
    gate = gl.convert_layout(gate.reshape([32, ROWS]), LAYOUT, assert_trivial=True)
    up = gl.convert_layout(up.reshape([32, ROWS]), LAYOUT, assert_trivial=True)
    return gate, up
