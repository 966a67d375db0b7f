"""Register layouts of folded MXFP4 weights, their decoding into FP8 fragments, and other assembly.

The memory order is `formats.layouts` (HOPPER_FRAGMENT). A tile is UNITS row units of 64 rows by
STEPS depth units of 128 codes; four warps own a row unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _split(flat_bits: list[int], columns: int) -> list[list[int]]:
    """Bits of a flat byte address as [row, column] of a tile with `columns` bytes a row."""
    return [[0, bit] if bit < columns else [bit // columns, 0] for bit in flat_bits]


@gluon.constexpr_function
def _powers(start: int, count: int) -> list[int]:
    """`start`, 2 `start`, … for an extent of `count` (a power of two)."""
    return [start << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def code_layout(UNITS, STEPS):
    """Codes [UNITS * STEPS * 32, 128]: a thread's 16-byte loads are its own fragments."""
    registers = [1, 2, 4, 8, 2048, *_powers(4096, STEPS)]
    warps = [512, 1024, *_powers(4096 * STEPS, UNITS)]
    return gl.DistributedLinearLayout(_split(registers, 128), _split(_powers(16, 32), 128),
                                      _split(warps, 128), [], [UNITS * STEPS * 32, 128])


@gluon.constexpr_function
def shift_layout(UNITS, STEPS):
    """Scale shifts [UNITS * STEPS * 8, 32]."""
    registers = [1, *_powers(256, STEPS)]
    warps = [64, 128, *_powers(256 * STEPS, UNITS)]
    return gl.DistributedLinearLayout(_split(registers, 32), _split(_powers(2, 32), 32),
                                      _split(warps, 32), [], [UNITS * STEPS * 8, 32])


@gluon.constexpr_function
def accumulator_layout(WARPS, COLUMNS):
    """wgmma accumulator [16 * WARPS, COLUMNS]: each warp owns 16 weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 32])


@gluon.constexpr_function
def row_pair_layout(WARPS, TOKENS):
    """Outputs [16 * WARPS, TOKENS] in weight-row order: a thread owns two adjacent rows."""
    registers = [[1, 0], [0, 1], *[[0, bit] for bit in _powers(8, TOKENS // 8)]]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    warps = [[bit, 0] for bit in _powers(16, WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * WARPS, TOKENS])


@gluon.constexpr_function
def feature_layout(WARPS, TOKENS):
    """Gated features [8 * WARPS, TOKENS]: a thread owns gate and up of one feature."""
    registers = [[0, 1], *[[0, bit] for bit in _powers(8, TOKENS // 8)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[bit, 0] for bit in _powers(8, WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8 * WARPS, TOKENS])


def _table_assembly() -> str:
    """PTX that gives lane s the eight e4m3 magnitudes of blocks with shift s, lowest code first.

    A shift subtracts from every exponent, zero stays zero. Shifts 12 to 14 have subnormal entries.
    Larger ones belong to blocks of zeros alone.
    """
    return "\n".join([
        "{ .reg .b32 lane, by, late; .reg .pred small, last, none;",
        "mov.u32 lane, %laneid;",
        "mul.lo.u32 by, lane, 0x08080808;",
        "sub.u32 $1, 0x7C787470, by;",  # 6 4 3 2, times 2^6
        "and.b32 by, by, 0xFFFFFF00;",
        "sub.u32 $0, 0x6C686000, by;",  # 1.5 1 0.5 0, times 2^6
        "sub.u32 late, lane, 12;",
        "setp.lt.u32 small, late, 3;",
        "setp.eq.u32 last, lane, 14;",
        "setp.gt.u32 none, lane, 14;",
        "@small shr.u32 $0, 0x0C080400, late;",
        "@last mov.b32 $1, 0x0C080604;",
        "@none mov.b32 $0, 0;",
        "}"])


def _decode_assembly() -> str:
    """PTX that turns 32 codes of one row and MX block into e4m3, about 8 instructions per 8 codes.

    $0..$3 take the first halves (k 0..15 of four k32 steps), $4..$7 the second halves; $8..$11 are
    the packed words, $12 the block's shift, $28 and $44 the lane's part of `decode_tables` (other
    copies of these three, from broadcasting, are the same registers).
    """
    lines = [
        "{ .reg .b32 lo, hi, a, b;",
        "shfl.sync.idx.b32 lo, $28, $12, 31, 0xFFFFFFFF;",
        "shfl.sync.idx.b32 hi, $44, $12, 31, 0xFFFFFFFF;",
    ]
    for step in range(4):
        first, second, word = f"${step}", f"${4 + step}", f"${8 + step}"
        lines += [
            f"and.b32 a, {word}, 0x77777777;",
            "shr.u32 b, a, 16;",
            "prmt.b32 a, lo, hi, a;",
            "prmt.b32 b, lo, hi, b;",
            f"lop3.b32 {first}, {word}, 0x80808080, a, 0xEA;",  # (word & signs) | magnitudes
            f"shl.b32 a, {word}, 4;",
            f"lop3.b32 {second}, a, 0x80808080, b, 0xEA;",
        ]
    return "\n".join(lines) + " }"


_TABLE_ASSEMBLY = gl.constexpr(_table_assembly())
_DECODE_ASSEMBLY = gl.constexpr(_decode_assembly())
_DECODE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 52))


@gluon.jit
def decode_tables():
    """What `decode_weights` looks codes up in: each lane holds the table of one shift, in two words
    (no tensor: the value differs by lane). A shuffle is cheaper than building tables anew."""
    return gl.inline_asm_elementwise(_TABLE_ASSEMBLY, "=&r,=&r,r", [0],
                                     dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def decode_weights(codes_smem, shifts_smem, tables, ACCUMULATOR: gl.constexpr,
                   UNITS: gl.constexpr, STEPS: gl.constexpr):
    """Shared codes and shifts → e4m3 register operand A [UNITS * 64, STEPS * 128]."""
    CODES: gl.constexpr = code_layout(UNITS, STEPS)
    SHIFTS: gl.constexpr = shift_layout(UNITS, STEPS)
    codes = codes_smem.load(CODES).reshape([UNITS, STEPS, 2, 4, 8, 4, 4, 4])  # u k r w g t q j
    NESTED: gl.constexpr = codes.type.layout
    shifts = shifts_smem.load(SHIFTS).to(gl.int32).reshape([UNITS, STEPS, 4, 8, 4, 2])
    shifts = shifts.permute((0, 1, 5, 2, 3, 4))  # u k r w g t
    shifts = gl.convert_layout(shifts, gl.SliceLayout(6, gl.SliceLayout(7, NESTED)),
                               assert_trivial=True)
    shifts = gl.expand_dims(gl.expand_dims(shifts, 6), 7)
    first, second = gl.inline_asm_elementwise(
        _DECODE_ASSEMBLY, _DECODE_CONSTRAINTS, [codes, shifts, tables[0], tables[1]],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=16)
    weights = gl.join(first, second)  # u k r w g t q j h
    weights = weights.permute((0, 3, 2, 4, 1, 6, 8, 5, 7))  # rows u w r g, depth k q h t j
    weights = weights.reshape([UNITS * 64, STEPS * 128])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, ACCUMULATOR, 4), assert_trivial=True)


@gluon.jit
def join_halves(accumulator, SPLIT: gl.constexpr):
    """hi + lo / 16 where the right half of the columns holds the low parts of the same tokens."""
    if SPLIT:
        ROWS: gl.constexpr = accumulator.shape[0]
        TOKENS: gl.constexpr = accumulator.shape[1] // 2
        hi, lo = accumulator.reshape([ROWS, 2, TOKENS]).permute((0, 2, 1)).split()
        return hi + lo * 0.0625
    else:
        return accumulator


@gluon.jit
def row_pairs(accumulator, LAYOUT: gl.constexpr):
    """Accumulator rows (fragment order) → weight-row order, without moving a value."""
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    rows = accumulator.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 1, 3))
    return gl.convert_layout(rows.reshape([ROWS, TOKENS]), LAYOUT, assert_trivial=True)


@gluon.jit
def gate_and_up(accumulator, LAYOUT: gl.constexpr):
    """Accumulator rows (gate 2j, up 2j + 1) → gate [ROWS / 2, TOKENS] and up, in one thread."""
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    pairs = accumulator.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1))
    gate, up = pairs.split()
    gate = gl.convert_layout(gate.reshape([ROWS // 2, TOKENS]), LAYOUT, assert_trivial=True)
    up = gl.convert_layout(up.reshape([ROWS // 2, TOKENS]), LAYOUT, assert_trivial=True)
    return gate, up


@gluon.constexpr_function
def _fp8_conversion(FORMAT):
    return ("{ .reg .b16 low, high;"
            f" cvt.rn.satfinite.{FORMAT}x2.f32 low, $2, $1;"
            f" cvt.rn.satfinite.{FORMAT}x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }")


@gluon.jit
def encode_fp8_words(first, second, third, fourth, FORMAT: gl.constexpr):
    """Codes of four float32 values in one int32, the first lowest.

    Nearest even, saturating; NaN becomes 0x7F.
    """
    ASSEMBLY: gl.constexpr = _fp8_conversion(FORMAT)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,f,f,f,f", [first, second, third, fourth],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def multiply_bfloat16_pairs(left, right):
    """Products of the bfloat16 halves of int32 values, subnormal ones included."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def larger_halves(left, right):
    """Maximum of both unsigned 16-bit halves of int32 values."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [left, right],
                                     dtype=gl.int32, is_pure=True, pack=1)
