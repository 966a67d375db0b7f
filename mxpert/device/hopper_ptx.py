"""Inline PTX: table-based decoding of weights, and conversions that Triton lacks or miscompiles.

Triton miscompiles a conversion to e4m3 and back in one expression, so rows are encoded in PTX.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate


def _magnitudes_by_lane(step: int, high: int, low: int) -> list[str]:
    """PTX that puts the bytes of eight magnitudes into $0 and $1; lane s subtracts s * step.

    high, low: the bytes of lane 0, lowest code first. The lowest magnitude, zero, stays zero.
    Declares the registers `lane` and `by`.
    """
    return [
        "{ .reg .b32 lane, by;",
        "mov.u32 lane, %laneid;",
        f"mul.lo.u32 by, lane, 0x{step * 0x01010101:08X};",
        f"sub.u32 $1, 0x{high:08X}, by;",
        "and.b32 by, by, 0xFFFFFF00;",
        f"sub.u32 $0, 0x{low:08X}, by;",
    ]


def _table_assembly() -> str:
    """PTX that puts the eight e4m3 magnitudes for shift s into lane s, lowest code first.

    A shift is subtracted from the exponent of every non-zero entry. Shifts 12 to 14 have subnormal
    entries. Larger shifts occur only in blocks of zeros.
    """
    return "\n".join(
        [
            *_magnitudes_by_lane(8, 0x7C787470, 0x6C686000),  # 6 4 3 2 and 1.5 1 0.5 0, times 2^6
            ".reg .b32 late; .reg .pred small, last, none;",
            "sub.u32 late, lane, 12;",
            "setp.lt.u32 small, late, 3;",
            "setp.eq.u32 last, lane, 14;",
            "setp.gt.u32 none, lane, 14;",
            "@small shr.u32 $0, 0x0C080400, late;",
            "@last mov.b32 $1, 0x0C080604;",
            "@none mov.b32 $0, 0;",
            "}",
        ]
    )


def _look_up(
    word: str, low: str, high: str, first: str, second: str, shifted: str = "a"
) -> list[str]:
    """PTX that looks up eight codes of a word: a byte for each, in 7 instructions.

    low, high: both words of the table. first, second: outputs, four codes each. shifted: a register
    other than `first`. Uses the registers `a` and `b`, which may be outputs.
    """
    return [
        f"and.b32 a, {word}, 0x77777777;",
        "shr.u32 b, a, 16;",
        f"prmt.b32 a, {low}, {high}, a;",
        f"prmt.b32 b, {low}, {high}, b;",
        f"lop3.b32 {first}, {word}, 0x80808080, a, 0xEA;",  # (word & signs) | magnitudes
        f"shl.b32 {shifted}, {word}, 4;",
        f"lop3.b32 {second}, {shifted}, 0x80808080, b, 0xEA;",
    ]


def _decode_assembly() -> str:
    """PTX that converts 32 codes of one row and MX block to e4m3, about 8 instructions per 8 codes.

    Outputs: $0..$3 are the first halves (k 0..15 of four k32 steps), $4..$7 the second halves.
    Inputs: $8..$11 are the packed words, $12 the block's shift, $28 and $44 the lane's two words of
    `decode_tables`. Broadcasting copies the last three; all copies are the same register.
    """
    lines = [
        "{ .reg .b32 lo, hi, a, b;",
        "shfl.sync.idx.b32 lo, $28, $12, 31, 0xFFFFFFFF;",
        "shfl.sync.idx.b32 hi, $44, $12, 31, 0xFFFFFFFF;",
    ]
    for step in range(4):
        lines += _look_up(f"${8 + step}", "lo", "hi", f"${step}", f"${4 + step}")
    return "\n".join(lines) + " }"


def _float16_table_assembly() -> str:
    """The same for float16: the upper bytes of its numbers, whose lower bytes are zero."""
    # 6 4 3 2 and 1.5 1 0.5 0, times 2^6
    return "\n".join([*_magnitudes_by_lane(4, 0x5E5C5A58, 0x56545000), "}"])


def _float16_decode_assembly() -> str:
    """PTX that converts eight codes of a word to float16 in 11 instructions.

    Outputs: $0 and $1 are the first half (codes 0 to 3), $2 and $3 the second. Inputs: $4 is the
    word, $5 and $9 the two words of the table for its block's shift; copies follow both.
    """
    lines = ["{ .reg .b32 a, b, c;", *_look_up("$4", "$5", "$9", "a", "b", shifted="c")]
    for first, half in ((0, "a"), (2, "b")):
        lines += [
            f"prmt.b32 ${first}, {half}, 0, 0x1404;",  # bytes 0 and 1, made wider
            f"prmt.b32 ${first + 1}, {half}, 0, 0x3424;",
        ]
    return "\n".join(lines) + " }"


_TABLE_ASSEMBLY = gl.constexpr(_table_assembly())
_FLOAT16_TABLE_ASSEMBLY = gl.constexpr(_float16_table_assembly())
_DECODE_ASSEMBLY = gl.constexpr(_decode_assembly())
_FLOAT16_DECODE_ASSEMBLY = gl.constexpr(_float16_decode_assembly())
_DECODE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 52))
_FLOAT16_DECODE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 9))


@aggregate
class DecodeTables:
    """Look-up tables of `decode_words`: lane s holds the magnitudes for shift s, a byte for each.

    low: int32, codes 0 to 3. high: int32, codes 4 to 7. The words differ between lanes although
    their type is a scalar. A shuffle from the lane that has the table is cheaper than building it
    for each block.
    """

    low: gl.tensor
    high: gl.tensor


@gluon.jit
def decode_tables(FLOAT16: gl.constexpr = False):
    """Build the look-up tables of `decode_words`, or of `decode_float16_words`."""
    ASSEMBLY: gl.constexpr = _FLOAT16_TABLE_ASSEMBLY if FLOAT16 else _TABLE_ASSEMBLY
    low, high = gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,r", [0], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return DecodeTables(low=low, high=high)


@gluon.jit
def decode_words(codes, shifts, tables):
    """Decode packed codes, 16 bytes of a block at a time, with the block's shift.

    Returns e4m3 codes of the first and of the second halves of four k32 steps.
    """
    return gl.inline_asm_elementwise(
        _DECODE_ASSEMBLY,
        _DECODE_CONSTRAINTS,
        [codes, shifts, tables.low, tables.high],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=16,
    )


@gluon.jit
def decode_float16_words(codes, low, high):
    """As `decode_words`, a word at a time, with float16 results.

    low, high: the words of the table for each shift, as `from_lanes` gives them.
    """
    return gl.inline_asm_elementwise(
        _FLOAT16_DECODE_ASSEMBLY,
        _FLOAT16_DECODE_CONSTRAINTS,
        [codes, low, high],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )


@gluon.constexpr_function
def _zigzag(target, word, half):
    """PTX: INT4 codes 2v or -2v - 1 to v / 256. 7 instructions per 8 codes.

    Bytes 0 to 16 are the e4m3 numbers 0 to 16 * 2^-9 in order, so 2v is v / 256 already. An odd
    code n becomes the byte n + 0x81: the sign, and -2v.
    """
    return [
        *([f"shr.u32 n, {word}, 4;"] if half else [f"mov.b32 n, {word};"]),
        "and.b32 s, n, 0x01010101;",
        "and.b32 n, n, 0x0F0F0F0F;",
        f"mad.lo.u32 {target}, s, 0x81, n;",
    ]


@gluon.constexpr_function
def _less_zero(target, word, half):
    """PTX: INT4 codes u less their zero point z to (u - z) / 512. 13 instructions per 8 codes.

    `zeros` has z in each byte. Bytes n = 0x80 + u - z have the top bit where u - z is not negative:
    the byte wanted is n - 0x80 there, and ~n + 1 elsewhere, whose top bit is the sign.
    """
    return [
        *([f"shr.u32 n, {word}, 4;"] if half else [f"mov.b32 n, {word};"]),
        "lop3.b32 n, n, 0x0F0F0F0F, 0x80808080, 0xEA;",  # (n & 0x0F…) | 0x80…
        "sub.u32 n, n, zeros;",
        "prmt.b32 s, n, n, 0xBA98;",  # 0xFF where the top bit is set
        "lop3.b32 n, n, s, 0x80808080, 0x4B;",  # n ^ (~s | 0x80…)
        "not.b32 s, s;",
        "and.b32 s, s, 0x01010101;",
        f"add.u32 {target}, n, s;",
    ]


@gluon.constexpr_function
def _e2m1(target, word, half):
    """PTX: e2m1 codes to their values / 64. 7 instructions per 8 codes.

    The bits of e2m1, at 7 and 4 to 2 of a byte, are an e4m3 number: the value times 2^-6.
    """
    return [
        *([f"mov.b32 n, {word};"] if half else [f"shl.b32 n, {word}, 4;"]),
        "shr.u32 s, n, 2;",
        "and.b32 s, s, 0x1C1C1C1C;",
        f"lop3.b32 {target}, n, 0x80808080, s, 0xEA;",  # (n & 0x80…) | s
    ]


@gluon.constexpr_function
def nibble_assembly(codes, words):
    """PTX that turns words of eight codes of a row to e4m3: first halves, then second halves.

    Outputs: $0 to ${words - 1} are the first halves, then the second ones; then inputs: packed
    words, and with zero points the zero point.
    """
    lines = ["{ .reg .b32 n, s, zeros;"]
    if codes == "int4_zero":
        lines.append(f"mul.lo.u32 zeros, ${3 * words}, 0x01010101;")
    for step in range(words):
        for half in range(2):
            target, word = f"${words * half + step}", f"${2 * words + step}"
            if codes == "int4":
                lines += _zigzag(target, word, half)
            elif codes == "int4_zero":
                lines += _less_zero(target, word, half)
            else:
                lines += _e2m1(target, word, half)
    return "\n".join(lines) + " }"


@gluon.constexpr_function
def _nibble_constraints(CODES, WORDS):
    """A zero point is broadcast to all bytes of the words: copies of one register."""
    copies = 4 * WORDS if CODES == "int4_zero" else 0
    return ",".join(["=&r"] * (2 * WORDS) + ["r"] * (WORDS + copies))


@gluon.jit
def decode_nibbles(codes, zeros, CODES: gl.constexpr, WORDS: gl.constexpr):
    """Decode bytes of two 4-bit codes, WORDS words of a row at a time, to e4m3.

    codes: the low nibble has a code of the first half of a k32 step. zeros: int32 zero points
    ("int4_zero"), or None. CODES: "int4", "int4_zero" or "e2m1". Returns the first and the second
    halves.
    """
    ASSEMBLY: gl.constexpr = nibble_assembly(CODES, WORDS)
    CONSTRAINTS: gl.constexpr = _nibble_constraints(CODES, WORDS)
    if zeros is None:
        return gl.inline_asm_elementwise(
            ASSEMBLY,
            CONSTRAINTS,
            [codes],
            dtype=(gl.float8e4nv, gl.float8e4nv),
            is_pure=True,
            pack=4 * WORDS,
        )
    else:
        return gl.inline_asm_elementwise(
            ASSEMBLY,
            CONSTRAINTS,
            [codes, zeros],
            dtype=(gl.float8e4nv, gl.float8e4nv),
            is_pure=True,
            pack=4 * WORDS,
        )


_FLOAT16_PAIRS_OF_E4M3 = gl.constexpr("""{
.reg .b16 low, high;
.reg .b32 first, second;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
prmt.b32 $0, first, first, 0x1010;
prmt.b32 $1, first, first, 0x3232;
prmt.b32 $2, second, second, 0x1010;
prmt.b32 $3, second, second, 0x3232;
}""")


@gluon.jit
def float16_pairs_of_e4m3(scales):
    """e4m3 bytes as int32 of two equal float16 numbers."""
    return gl.inline_asm_elementwise(
        _FLOAT16_PAIRS_OF_E4M3, "=&r,=&r,=&r,=&r,r", [scales], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def float16_pairs(scales, FACTOR: gl.constexpr):
    """Scales times a power of two as int32 of two equal float16 numbers."""
    bits = (scales.to(gl.float32) * FACTOR).to(gl.float16).to(gl.int16, bitcast=True)
    bits = bits.to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.constexpr_function
def _float16_assembly(codes):
    """PTX that multiplies eight codes of a word by scales: to e4m3, conversion, product.

    Outputs: $0, $1 the low nibbles; $2, $3 the high ones. Inputs: $4 the word; $5 and $9 the scales
    of low and high nibbles, of `float16_pairs`; copies follow each.
    """
    decode = _zigzag if codes == "int4" else _e2m1
    lines = ["{ .reg .b32 n, s, bytes, pair; .reg .b16 low, high;"]
    for half, scale in enumerate(("$5", "$9")):
        lines += [*decode("bytes", "$4", half), "mov.b32 {low, high}, bytes;"]
        for place, part in enumerate(("low", "high")):
            lines.append(f"cvt.rn.f16x2.e4m3x2 pair, {part};")
            lines.append(f"mul.rn.f16x2 ${2 * half + place}, pair, {scale};")
    return "\n".join([*lines, "}"])


@gluon.jit
def float16_nibbles(codes, low_scales, high_scales, CODES: gl.constexpr):
    """Decode bytes of two 4-bit codes to float16, times scales of `float16_pairs`.

    codes: uint8 [..., 4]; the low nibbles have the codes of `low_scales`. CODES: "int4", which are
    then 2^-8 of their values, or "e2m1", 2^-6. Returns the products of the low and of the high
    nibbles.
    """
    ASSEMBLY: gl.constexpr = _float16_assembly(CODES)
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [codes, low_scales, high_scales],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )


_BYTE_PAIRS = gl.constexpr("""{
.reg .b16 low, high, a, b, c, d;
.reg .b32 first, second;
.reg .f32 v, w;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
mov.b32 {a, b}, first;
mov.b32 {c, d}, second;
cvt.f32.f16 v, a;
cvt.f32.f16 w, b;
mul.f32 v, v, $3;
mul.f32 w, w, $3;
cvt.rn.bf16x2.f32 $0, w, v;
cvt.f32.f16 v, c;
cvt.f32.f16 w, d;
mul.f32 v, v, $3;
mul.f32 w, w, $3;
cvt.rn.bf16x2.f32 $1, w, v;
}""")


@gluon.jit
def bfloat16_bytes(codes, powers):
    """Decode e4m3 bytes, uint8 [..., 4], to bfloat16, times one float32 power of two for four."""
    return gl.inline_asm_elementwise(
        _BYTE_PAIRS, "=&r,=&r,r,f,f,f,f", [codes, powers], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.constexpr_function
def _fp8_conversion(FORMAT):
    return (
        "{ .reg .b16 low, high;"
        f" cvt.rn.satfinite.{FORMAT}x2.f32 low, $2, $1;"
        f" cvt.rn.satfinite.{FORMAT}x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )


@gluon.jit
def encode_fp8_words(first, second, third, fourth, FORMAT: gl.constexpr):
    """Pack the codes of four float32 values into an int32, the first in the lowest byte.

    Rounds to nearest even, saturates; NaN becomes 0x7F.
    """
    ASSEMBLY: gl.constexpr = _fp8_conversion(FORMAT)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _pair_conversion(FORMAT):
    name = {"bfloat16": "bf16", "float16": "f16"}[FORMAT]
    return f"cvt.rn.{name}x2.f32 $0, $2, $1;"


@gluon.jit
def rounded_pair(first, second, FORMAT: gl.constexpr):
    """Round two float32 values to "bfloat16" or "float16"; an int32 has the first one low."""
    ASSEMBLY: gl.constexpr = _pair_conversion(FORMAT)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def multiply_bfloat16_pairs(left, right):
    """Multiply the bfloat16 halves of int32 values pairwise; subnormals are kept."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def larger_halves(left, right):
    """Maximum of both unsigned 16-bit halves of int32 values."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


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
"""hi is converted twice: ptxas 12.8 miscompiles codes that are packed and converted back (it reads
a register that was never written)."""


LO_SCALE = gl.constexpr(1 / 16)
"""Weight of the low parts of `split_codes`."""


@gluon.jit
def split_codes(values):
    """Return e4m3 codes hi and lo with ``values = hi + lo / 16``, four values at a time.

    values: float32 tensor of bfloat16 numbers with magnitudes up to 448. Conversion through float16
    is exact for all values that lo can represent.
    """
    hi, lo = gl.inline_asm_elementwise(
        _SPLIT_CODES, "=&r,=r,f,f,f,f", [values], (gl.int8, gl.int8), is_pure=True, pack=4
    )
    return hi.to(gl.float8e4nv, bitcast=True), lo.to(gl.float8e4nv, bitcast=True)


def _rescaling(power: str) -> str:
    """PTX that multiplies the e4m3 codes in low and high by `power` and packs them into $0."""
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
    """Multiply words of four e4m3 codes by a power of two of at most 1.

    The product is exact in float16: a code has four significant bits, and products with powers
    below 2^-24 round to zero in e4m3 anyway.
    """
    return gl.inline_asm_elementwise(
        _SCALE_CODES, "=r,r,f", [words, power], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def quantized_codes(values, inverse, power):
    """Quantise values with their block's inverse scale to e4m3, then multiply by a power of two.

    The power is applied as in `scaled_words`. Four values of a block at a time.
    """
    values, inverse = gl.broadcast(values, inverse)
    values, power = gl.broadcast(values, power)
    codes = gl.inline_asm_elementwise(
        _QUANTIZE_CODES,
        "=r,f,f,f,f,f,f,f,f,f,f,f,f",
        [values, inverse, power],
        gl.int8,
        is_pure=True,
        pack=4,
    )
    return codes.to(gl.float8e4nv, bitcast=True)


_GROUP_LANES = gl.constexpr("""{
.reg .b32 peers, first, lead, lane, before, source;
.reg .pred leads, valid;
match.any.sync.b32 peers, $5, 0xFFFFFFFF;
brev.b32 first, peers;
clz.b32 first, first;
mov.u32 lane, %laneid;
setp.ge.s32 valid, $5, 0;
setp.eq.and.u32 leads, lane, first, valid;
vote.sync.ballot.b32 lead, leads, 0xFFFFFFFF;
mov.u32 before, 1;
shl.b32 before, before, first;
sub.u32 before, before, 1;
and.b32 before, lead, before;
popc.b32 $0, before;
popc.b32 $1, lead;
mov.b32 $2, peers;
add.u32 lane, lane, 1;
fns.b32 source, lead, 0, lane;
and.b32 source, source, 31;
shfl.sync.idx.b32 $3, $5, source, 31, 0xFFFFFFFF;
shfl.sync.idx.b32 $4, peers, source, 31, 0xFFFFFFFF;
}""")


@aggregate
class LaneGroups:
    """Lanes of a warp, grouped by a key; int32 [32] each, a value a lane.

    rank: of the lane's group; ranks follow the groups' first lanes. peers: lanes of the group, a
    bit each. count: number of groups. Of the group whose rank is the lane's number: key and
    members, its lanes. Negative keys belong to no group; their values are undefined.
    """

    rank: gl.tensor
    count: gl.tensor
    peers: gl.tensor
    key: gl.tensor
    members: gl.tensor


@gluon.jit
def group_lanes(keys):
    """Group the lanes of a warp by keys, int32 [32]; each warp that holds them does the same."""
    rank, count, peers, key, members = gl.inline_asm_elementwise(
        _GROUP_LANES,
        "=&r,=&r,=&r,=&r,=&r,r",
        [keys],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return LaneGroups(rank, count, peers, key, members)


@gluon.jit
def from_lanes(values, lanes):
    """values[lanes] of 32-bit values [32]."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xFFFFFFFF;",
        "=r,r,r",
        [values, lanes],
        dtype=values.dtype,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def other_lane(values):
    """The values of the lane whose number differs in its lowest bit, 32 bits each."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 31, 0xFFFFFFFF;",
        "=r,r",
        [values],
        dtype=values.dtype,
        is_pure=True,
        pack=1,
    )
