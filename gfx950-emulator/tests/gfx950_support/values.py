"""Typed values and functions of the pseudocode in AMD's manuals: plain Python on single numbers."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Value:
    """Bits with a type: kind "u", "i", "f", "bf", "fp" (of 8 or 4 bits), "b", or "n": a literal
    that takes the other operand's type."""

    kind: str
    width: int
    bits: int

    @property
    def number(self) -> Any:
        if self.kind == "f":
            return decode_float(self.bits, self.width)
        if self.kind == "bf" and self.width == 16:
            return decode_float(self.bits << 16, 32)
        if self.kind in ("i", "n"):
            return self.bits - ((self.bits >> (self.width - 1) & 1) << self.width)
        return self.bits

    @property
    def truth(self) -> bool:
        return bool(self.bits)


def decode_float(bits: int, width: int) -> float:
    code, integer = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}[width]
    return float(struct.unpack("<" + code, struct.pack("<" + integer, bits))[0])


def make(kind: str, width: int, number: Any) -> Value:
    """A value from a Python number, rounded to nearest even if it is a float."""
    if kind == "f":
        return Value(kind, width, encode_float(number, width))
    return Value(kind, width, int(number) & ((1 << width) - 1))


def encode_float(number: float, width: int) -> int:
    if math.isnan(number):
        return {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}[width]
    code, integer = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}[width]
    number = float(number)
    try:
        return int(struct.unpack("<" + integer, struct.pack("<" + code, number))[0])
    except OverflowError:
        sign = 1 << (width - 1) if math.copysign(1, number) < 0 else 0
        return sign | encode_float(math.inf, width)


def same(kind: str, got: int, want: int) -> bool:
    """Equal bits; NaN equals NaN in results of a float type."""
    if got == want:
        return True
    width, exponent = {
        "f64": (64, 0x7FF << 52),
        "f32": (32, 0x7F800000),
        "bf16": (16, 0x7F80),
        "f16": (16, 0x7C00),
    }.get(kind, (0, 0))
    if not width:
        return False
    for place in range(0, 64, width):
        x, y = (value >> place & ((1 << width) - 1) for value in (got, want))
        magnitude = (1 << (width - 1)) - 1
        if x != y and not (x & magnitude > exponent and y & magnitude > exponent):
            return False
    return True


DENORMAL = object()
"""What a value equals that is denormal (``S1.f32 == DENORM.f32``)."""


_FIELDS = {16: (5, 10), 32: (8, 23), 64: (11, 52)}
"""Bits of the exponent and of the fraction."""


def is_denormal(value: Value) -> bool:
    exponent, fraction = _FIELDS[value.width]
    return (
        value.bits >> fraction & ((1 << exponent) - 1) == 0
        and value.bits & ((1 << fraction) - 1) != 0
    )


# -- functions -------------------------------------------------------------------------------------


def _exponent(x: Value) -> Value:
    exponent, fraction = _FIELDS[x.width]
    return Value("i", 32, x.bits >> fraction & (1 << exponent) - 1)


def power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _fma(a: Value, b: Value, c: Value, power: Value | None = None) -> Value:
    """a * b + c, times 2**power, with one rounding."""
    x, y, z = a.number, b.number, c.number
    if math.isfinite(x) and math.isfinite(y) and math.isinf(z):
        return make("f", a.width, z)
    if not all(map(math.isfinite, (x, y, z))):
        return make("f", a.width, x * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return make("f", a.width, x * y + z)
    return make(
        "f", a.width, _round(exact * Fraction(2) ** (power.number if power else 0), a.width)
    )


def _round(exact: Fraction, width: int) -> float:
    """A fraction as a float of that width, nearest even."""
    exponent_bits, fraction_bits = _FIELDS[width]
    bias = (1 << exponent_bits - 1) - 1
    size = abs(exact)
    estimate = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(estimate if size >= Fraction(2) ** estimate else estimate - 1, 1 - bias)
    steps = round(size / Fraction(2) ** (exponent - fraction_bits))  # round() is half to even
    result = math.inf if exponent > bias else steps * 2.0 ** (exponent - fraction_bits)
    return math.copysign(result, 1 if exact > 0 else -1)


def _ldexp(x: Value, power: Value) -> Value:
    try:
        return make("f", x.width, math.ldexp(x.number, power.number))
    except OverflowError:
        return make("f", x.width, math.copysign(math.inf, x.number))


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.nan if x < 0 else math.log2(x)


def _rsqrt(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    return 1 / math.sqrt(x) if x > 0 else math.nan


def _frexp(x: Value) -> tuple[float, int]:
    return math.frexp(x.number) if math.isfinite(x.number) else (x.number, 0)


def _integer(low: int, high: int, kind: str) -> Any:
    def convert(x: Value) -> Value:
        number = x.number
        if math.isnan(number):
            return make(kind, 32, 0)
        return make(kind, 32, max(low, min(high, number if math.isinf(number) else int(number))))

    return convert


def _float8(kind: torch.dtype, code: int) -> float:
    return torch.tensor([code], dtype=torch.uint8).view(kind).double().item()


_DECODED = {
    "fp8": [_float8(torch.float8_e4m3fn, code) for code in range(256)],
    "bf8": [_float8(torch.float8_e5m2, code) for code in range(256)],
    "fp4": [sign * value for sign in (1.0, -1.0) for value in FP4],
}


def _nearest(name: str, x: float, saturate: bool) -> int:
    """The nearest code, ties to even; what is too large as FP16_OVFL says."""
    table = _DECODED[name]
    half = len(table) // 2
    finite = [code for code in range(half) if math.isfinite(table[code])]
    sign = half if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return (finite[-1] if name == "fp4" else half - 1) | sign
    top, step = table[finite[-1]], table[finite[-1]] - table[finite[-2]]
    if abs(x) >= top + step / 2 and not (saturate or name == "fp4"):
        return {"fp8": 0x7F, "bf8": 0x7C}[name] | sign
    distance = min(abs(table[code] - abs(x)) for code in finite) if abs(x) < top else None
    if distance is None:
        return finite[-1] | sign
    nearest = [code for code in finite if abs(table[code] - abs(x)) == distance]
    return min(nearest, key=lambda code: code & 1) | sign


def _scale(x: Value) -> float:
    return math.nan if x.bits & 255 == 255 else 2.0 ** ((x.bits & 255) - 127)


def _from_small(name: str, wide: str) -> Any:
    kind, width = {"f32": ("f", 32), "f16": ("f", 16), "bf16": ("bf", 16)}[wide]

    def convert(x: Value, scale: Value) -> Value:
        number = _DECODED[name][x.bits] * _scale(scale)
        if kind == "bf":
            return Value("bf", 16, bf16(number))
        return make(kind, width, number)

    return convert


def bf16(number: float) -> int:
    return int(torch.tensor([number], dtype=torch.bfloat16).view(torch.uint16).item())


def to_small(name: str, env: dict[str, Any]) -> Any:
    width = 4 if name == "fp4" else 8

    def convert(x: Value, scale: Value) -> Value:
        return Value("fp", width, _nearest(name, x.number / _scale(scale), env["FP16_OVFL"]))

    return convert


def _flush(x: Value) -> Value:
    return Value(x.kind, x.width, x.bits & 0x80000000) if is_denormal(x) else x


def _is_nan(x: Value) -> bool:
    return math.isnan(x.number)


def _quiet(x: Value) -> bool:
    return bool(x.bits >> 51 & 1)


def _unary(function: Any) -> Any:
    return lambda x: make(x.kind, x.width, function(x.number))


def _guarded(function: Any) -> Any:
    """A function of floats that keeps NaN and infinity."""
    return _unary(lambda x: function(x) if math.isfinite(x) else x)


FUNCTIONS: dict[str, Any] = {
    "abs": lambda x: Value(x.kind, x.width, x.bits & ~(1 << (x.width - 1))),
    "cvtToQuietNAN": lambda x: replace(x, bits=x.bits | 1 << 51),  # a float64
    "exponent": _exponent,
    "f32_to_bf16": lambda x: Value("bf", 16, bf16(x.number)),
    "f32_to_f16": lambda x: make("f", 16, x.number),
    "f16_to_f32": lambda x: make("f", 32, x.number),
    "f32_to_f64": lambda x: make("f", 64, x.number),
    "f64_to_f32": lambda x: make("f", 32, x.number),
    "i32_to_f64": lambda x: make("f", 64, x.number),
    "u32_to_f64": lambda x: make("f", 64, x.number),
    "f64_to_i32": _integer(-(1 << 31), (1 << 31) - 1, "i"),
    "f64_to_u32": _integer(0, (1 << 32) - 1, "u"),
    "frexp_exponent": lambda x: make("i", 32, _frexp(x)[1]),
    "f32_to_i32": _integer(-(1 << 31), (1 << 31) - 1, "i"),
    "f32_to_u32": _integer(0, (1 << 32) - 1, "u"),
    "ceil": _guarded(lambda x: math.copysign(math.ceil(x), x)),
    "floor": _guarded(lambda x: math.copysign(math.floor(x), x)),
    "trunc": _guarded(lambda x: math.copysign(math.trunc(x), x)),
    "mantissa": _unary(lambda x: math.frexp(x)[0]),
    "rsqrt": _unary(_rsqrt),
    "fract": _unary(lambda x: x - math.floor(x) if math.isfinite(x) else math.nan),
    "isEven": lambda x: make("u", 1, math.isfinite(x.number) and x.number % 2 == 0),
    "flush": _flush,
    "fma": _fma,
    "f16_to_i16": _integer(-(1 << 15), (1 << 15) - 1, "i"),
    "f16_to_u16": _integer(0, (1 << 16) - 1, "u"),
    "i16_to_f16": lambda x: make("f", 16, x.number),
    "u16_to_f16": lambda x: make("f", 16, x.number),
    "rint": _guarded(lambda x: math.copysign(round(x), x)),
    "i32_to_f32": lambda x: make("f", 32, x.number),
    "u32_to_f32": lambda x: make("f", 32, x.number),
    "isNAN": lambda x: make("u", 1, _is_nan(x)),
    "isQuietNAN": lambda x: make("u", 1, _is_nan(x) and _quiet(x)),
    "isSignalNAN": lambda x: make("u", 1, _is_nan(x) and not _quiet(x)),
    "fma_scaled": _fma,
    "ldexp": _ldexp,
    "log2": _unary(lambda x: _log(x) if not math.isinf(x) or x < 0 else x),
    "pow": lambda x, y: make("f", y.width, power(x.number, y.number)),
    "sign": lambda x: Value("u", 1, x.bits >> (x.width - 1)),
    "signext": lambda x: make("i", 64, replace(x, kind="i").number),
    "signext_from_bit": lambda x, n: make(
        x.kind, x.width, Value("i", n.bits, x.bits & ((1 << n.bits) - 1)).number if n.bits else 0
    ),
    "sqrt": _unary(lambda x: math.sqrt(x) if x >= 0 else -0.0 if x == 0 else math.nan),
    **{
        f"{name}_to_{wide}_scale": _from_small(name, wide)
        for name in _DECODED
        for wide in ("f32", "f16", "bf16")
    },
}
