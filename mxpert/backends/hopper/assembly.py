"""What the kernels write in PTX: decoding of weights by table, conversions that Triton has no
operation for, or compiles wrongly.

A conversion to e4m3 and back in one expression of Triton is miscompiled, so rows are encoded here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
    """What `decode_words` looks codes up in: each lane holds the table of one shift, in two words
    (no tensor: the value differs by lane). A shuffle is cheaper than building tables anew."""
    return gl.inline_asm_elementwise(_TABLE_ASSEMBLY, "=&r,=&r,r", [0],
                                     dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def decode_words(codes, shifts, tables):
    """Packed words of codes, 16 bytes of a block at a time, and its shift → e4m3 codes: the first
    halves of four k32 steps, and the second."""
    return gl.inline_asm_elementwise(
        _DECODE_ASSEMBLY, _DECODE_CONSTRAINTS, [codes, shifts, tables[0], tables[1]],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=16)


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


_SPLIT_CODES = gl.constexpr("""{
.reg .b16 hi01, hi23, lo01, lo23;
.reg .b32 v01, v23, h01, h23, sixteen;
mov.b32 sixteen, 0x4C004C00;
cvt.rn.f16x2.f32 v01, $3, $2;
cvt.rn.f16x2.f32 v23, $5, $4;
cvt.rn.satfinite.e4m3x2.f32 hi01, $3, $2;
cvt.rn.satfinite.e4m3x2.f32 hi23, $5, $4;
cvt.rn.f16x2.e4m3x2 h01, hi01;
cvt.rn.f16x2.e4m3x2 h23, hi23;
cvt.rn.satfinite.e4m3x2.f16x2 hi01, v01;
cvt.rn.satfinite.e4m3x2.f16x2 hi23, v23;
mov.b32 $0, {hi01, hi23};
sub.rn.f16x2 v01, v01, h01;
sub.rn.f16x2 v23, v23, h23;
mul.rn.f16x2 v01, v01, sixteen;
mul.rn.f16x2 v23, v23, sixteen;
cvt.rn.satfinite.e4m3x2.f16x2 lo01, v01;
cvt.rn.satfinite.e4m3x2.f16x2 lo23, v23;
mov.b32 $1, {lo01, lo23};
}""")
"""hi is converted twice: codes that are packed and converted back are miscompiled (ptxas 12.8 takes
a register that was never written)."""


@gluon.jit
def split_codes(values):
    """e4m3 codes hi and lo with ``values = hi + lo / 16``, four values at a time.

    values: bfloat16 numbers of at most 448 in float32. float16 holds all of them that lo can tell.
    """
    hi, lo = gl.inline_asm_elementwise(_SPLIT_CODES, "=&r,=r,f,f,f,f", [values],
                                       (gl.int8, gl.int8), is_pure=True, pack=4)
    return hi.to(gl.float8e4nv, bitcast=True), lo.to(gl.float8e4nv, bitcast=True)


def _rescaling(power: str) -> str:
    """PTX that multiplies the e4m3 codes of low and high by `power` and packs them: $0."""
    return f"""cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
cvt.rn.f16x2.f32 power, {power}, {power};
mul.rn.f16x2 first, first, power;
mul.rn.f16x2 second, second, power;
cvt.rn.satfinite.e4m3x2.f16x2 low, first;
cvt.rn.satfinite.e4m3x2.f16x2 high, second;
mov.b32 $0, {{low, high}};"""


_SCALE_CODES = gl.constexpr(f"""{{
.reg .b16 low, high;
.reg .b32 first, second, power;
mov.b32 {{low, high}}, $1;
{_rescaling("$2")}
}}""")

_QUANTIZE_CODES = gl.constexpr(f"""{{
.reg .b16 low, high;
.reg .b32 first, second, power;
.reg .f32 a, b, c, d;
mul.f32 a, $1, $5;
mul.f32 b, $2, $5;
mul.f32 c, $3, $5;
mul.f32 d, $4, $5;
cvt.rn.satfinite.e4m3x2.f32 low, b, a;
cvt.rn.satfinite.e4m3x2.f32 high, d, c;
{_rescaling("$9")}
}}""")


@gluon.jit
def scaled_words(words, power):
    """Four e4m3 codes a word times a power of two of at most 1. Exact in float16: a code has four
    significant bits, and what a power below 2^-24 leaves of it is no e4m3 number."""
    return gl.inline_asm_elementwise(_SCALE_CODES, "=r,r,f", [words, power], gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def quantized_codes(values, inverse, power):
    """e4m3 codes of values by their block's inverse scale, then those times a power of two as in
    `scaled_words`: four values of a block at a time."""
    values, inverse = gl.broadcast(values, inverse)
    values, power = gl.broadcast(values, power)
    codes = gl.inline_asm_elementwise(_QUANTIZE_CODES, "=r,f,f,f,f,f,f,f,f,f,f,f,f",
                                      [values, inverse, power], gl.int8, is_pure=True, pack=4)
    return codes.to(gl.float8e4nv, bitcast=True)
