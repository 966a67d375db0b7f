"""Arithmetic of gfx950 on numpy arrays: roundings, division steps, conversions, element formats.

Pure functions, arrays in, arrays out. float32 arithmetic rounds to nearest even and keeps
denormals: the only MODE that the executor accepts. Bits of NaN results are numpy's.

Source: AMD Instinct CDNA4 ISA, chapter 6 (VALU: rounding, denormals), chapter 7 (small floats) and
the pseudocode of chapter 12; OCP MX 1.0 for the element formats.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

U32, I32, F32 = np.uint32, np.int32, np.float32
U64, I64, F64 = np.uint64, np.int64, np.float64
U16, I16, F16 = np.uint16, np.int16, np.float16
U8, I8 = np.uint8, np.int8

Array = npt.NDArray[Any]

_BITS = np.array([octet.bit_count() for octet in range(256)], U8)

QUIET: dict[Any, tuple[Any, Any]] = {
    F16: (U16, U16(1 << 9)),
    F32: (U32, U32(1 << 22)),
    F64: (U64, U64(1 << 51)),
}
"""Type of a float's bits, and the bit that makes a NaN quiet."""

SMALLEST_NORMAL = F32(2.0**-126)
QUIET_NAN = np.array(0xFFC00000, U32).view(F32)
"""NaN of 0/0 and inf/inf in `div_fixup`."""


def count_bits(x: Array) -> Array:
    """Set bits of uint32 or uint64 values, as uint32."""
    octets = np.ascontiguousarray(x)[..., None].view(U8)
    return np.asarray(_BITS[octets].sum(-1, dtype=U32))


# -- float32 ---------------------------------------------------------------------------------------


def _fma_odd(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c as float64 rounded to odd: rounding it again to float32 is exact."""
    product = a.astype(F64) * b.astype(F64)  # exact: 24 + 24 bits
    addend = c.astype(F64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(I64)
    inexact_even = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact_even, bits + step, bits).view(F64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c with one rounding, float32."""
    return _fma_odd(a, b, c).astype(F32)


def fma_half(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c with one rounding, float16."""
    return _fma_odd(a, b, c).astype(F16)


def _fma_one(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return a * b + c  # the sign of zero
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


_FMA: Any = np.frompyfunc(_fma_one, 3, 1)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c with one rounding, float64."""
    return np.asarray(_FMA(a, b, c), F64)


def exponent_of(x: Array) -> Array:
    """v_frexp_exp: e of m * 2**e with m in 0.5…1, int32; 0 of zero, infinity and NaN."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def mantissa_of(x: Array) -> Array:
    """v_frexp_mant: m of m * 2**e with m in 0.5…1; zero, infinity and NaN stay."""
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def half(function: Any) -> Any:
    """A float16 function, correctly rounded. Hardware errs by up to 1 ulp; denormals count."""
    return lambda x: np.asarray(function(x.astype(F64))).astype(F16)


def leading_zeros(x: Array) -> Array:
    """Zeros above the highest set bit of uint32 values; all ones where no bit is set."""
    length = np.frexp(x.astype(F64))[1]  # bits of the number
    return np.where(x == 0, U32(0xFFFFFFFF), (32 - length).astype(U32))


def exponent(x: Array) -> Array:
    """Biased exponent of float32 values, int32 of 0…255."""
    return ((x.view(U32) >> U32(23)) & U32(255)).view(I32)


def ldexp(x: Array, power: Array | int) -> Array:
    """Multiply by 2**power with one rounding, float32."""
    return np.asarray(np.ldexp(x.astype(F64), power).astype(F32))


def is_denormal(x: Array) -> Array:
    """Whether float32 values are denormal; zero is not."""
    return np.asarray((x != 0) & (np.abs(x) < SMALLEST_NORMAL))


def flush(x: Array) -> Array:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(F32(0), x), x)


def transcendental(function: Any) -> Any:
    """A float32 function of the transcendental unit: correctly rounded, denormals flushed.

    Hardware errs by up to 1 ulp. Denormal sources and results are zeros whatever MODE says, which
    is why LLVM scales around ``v_exp_f32``, ``v_log_f32``, ``v_rcp_f32``.
    """

    def compute(x: Array) -> Array:
        return flush(np.asarray(function(flush(x).astype(F64))).astype(F32))

    return compute


def minimum(a: Array, b: Array) -> Array:
    """v_min_f16, _f32, _f64: the operand that is no NaN; -0 is below +0."""
    both_zero = (a == 0) & (b == 0)
    lower = np.where(both_zero, np.where(np.signbit(a), a, b), np.fmin(a, b))
    return _signalled(a, b, lower)


def maximum(a: Array, b: Array) -> Array:
    """v_max_f16, _f32, _f64: the operand that is no NaN; +0 is above -0."""
    both_zero = (a == 0) & (b == 0)
    upper = np.where(both_zero, np.where(np.signbit(a), b, a), np.fmax(a, b))
    return _signalled(a, b, upper)


def _signalled(a: Array, b: Array, result: Array) -> Array:
    """The result, but a signalling NaN becomes a quiet one: MODE has IEEE set."""
    if not (np.isnan(a).any() or np.isnan(b).any()):
        return result
    words, bit = QUIET[a.dtype.type]
    for x in (b, a):
        bits = x.view(words)
        quiet = bits | bit
        result = np.where(np.isnan(x) & (bits != quiet), quiet.view(a.dtype), result)
    return result


def median(a: Array, b: Array, c: Array) -> Array:
    """v_med3_f32: the middle value; the minimum of the others if one is NaN."""
    lowest = minimum(minimum(a, b), c)
    top = maximum(maximum(a, b), c)
    middle = np.where(top == a, maximum(b, c), np.where(top == b, maximum(a, c), maximum(a, b)))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), lowest, middle)


def to_integer(x: Array, low: int, high: int) -> Array:
    """Floats truncated to an int64 within [low, high]; NaN is 0."""
    return np.clip(np.trunc(np.where(np.isnan(x), 0, x).astype(F64)), low, high).astype(I64)


# -- division: v_div_scale_f32, v_div_fmas_f32, v_div_fixup_f32 ------------------------------------


def div_scale(scaled: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Scale an operand of a division so that Newton's steps neither overflow nor go denormal.

    Args:
        scaled: the numerator or the denominator, float32, whichever is to be scaled.

    Returns:
        The operand times 2**64, 2**-64 or 1, and bool: the quotient needs `div_fmas` to scale.
        Two corrections of the manual's pseudocode, without which quotients come out wrong. "1/d is
        denormal" means denormal as float32 (not float64, which no reciprocal of a float32 is). If
        the quotient is denormal too, the denominator is scaled down (up, it would overflow).
    """
    quotient = (numerator.astype(F64) / denominator.astype(F64)).astype(F32)
    inverse = 1.0 / denominator.astype(F64)
    tiny_inverse = (inverse != 0) & (np.abs(inverse) < 2.0**-126)
    tiny_quotient = is_denormal(quotient)
    is_denominator, is_numerator = scaled == denominator, scaled == numerator
    up, down = ldexp(scaled, 64), ldexp(scaled, -64)
    # The first case that holds counts: (condition, result, flag).
    cases = (
        ((numerator == 0) | (denominator == 0), F32(np.nan), False),
        (
            exponent(numerator) - exponent(denominator) >= 96,
            np.where(is_denominator, up, scaled),
            True,
        ),
        (is_denormal(denominator), up, False),
        (tiny_inverse & tiny_quotient, np.where(is_denominator, down, scaled), True),
        (tiny_inverse, down, False),
        (tiny_quotient, np.where(is_numerator, up, scaled), True),
        (exponent(numerator) <= 23, up, False),
    )
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], scaled)
    flag = np.select(conditions, [np.full(scaled.shape, case[2]) for case in cases], False)
    return value.astype(F32), flag.astype(np.bool_)


def div_fmas(a: Array, b: Array, c: Array, scale: Array) -> Array:
    """fma(a, b, c), times 2**64 or 2**-64 where `scale`, with one rounding.

    The CDNA manual multiplies by 2**32, with which no division comes out right; the RDNA manuals
    have 2**64 for an addend of exponent above 127 and 2**-64 otherwise.
    """
    power = np.where(scale, np.where(exponent(c) > 127, 64, -64), 0)
    return np.asarray(np.ldexp(_fma_odd(a, b, c), power).astype(F32))


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient with its sign, and the special cases of a division.

    A quotient beyond 2**128 is infinite. The manual's pseudocode tests the denominator's exponent
    for 255 instead, which leaves NaN from Newton's steps.
    """
    powers = exponent(numerator) - exponent(denominator)
    within = np.select([powers < -150, powers > 128], [F32(0), F32(np.inf)], np.abs(quotient))
    return _special_quotients(within, denominator, numerator, QUIET_NAN)


def div_fixup_half(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The same for float16, whose quotients need no steps that leave the range."""
    nan = np.array(0xFE00, U16).view(F16)
    return _special_quotients(np.abs(quotient), denominator, numerator, nan)


def _special_quotients(magnitude: Array, denominator: Array, numerator: Array, nan: Array) -> Array:
    """The quotient's sign, and what zeros, infinities and NaN make of it."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    size_d, size_n = np.abs(denominator), np.abs(numerator)
    no_number = ((size_d == 0) & (size_n == 0)) | (np.isinf(size_d) & np.isinf(size_n))
    infinite, zero = (size_d == 0) | np.isinf(size_n), np.isinf(size_d) | (size_n == 0)
    result = np.select([infinite, zero], [magnitude.dtype.type(np.inf), 0], magnitude)
    signed = np.where(negative, -result, result)
    special = np.select(
        [np.isnan(numerator), np.isnan(denominator), no_number],
        [numerator, denominator, nan],
        signed,
    )
    return special.astype(magnitude.dtype)


# -- element formats -------------------------------------------------------------------------------


def to_bf16(x: Array) -> Array:
    """Codes of float32 values in bfloat16, nearest even, as uint32."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded).astype(U32)


def from_bf16(codes: Array) -> Array:
    """float32 values of bfloat16 codes in the low half of a uint32."""
    return (codes << U32(16)).view(F32)


def to_f16(x: Array) -> Array:
    """Codes of float32 values in float16, nearest even, as uint32."""
    return np.asarray(x, F32).astype(np.float16).view(np.uint16).astype(U32)


def from_f16(codes: Array) -> Array:
    """float32 values of float16 codes in the low half of a uint32."""
    return (codes & U32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)


@dataclass(frozen=True)
class SmallFloat:
    """An element format of eight bits or fewer.

    Args:
        exponent_bits, mantissa_bits, bias: the format. largest: largest finite value.
        infinity: code of infinity, first_nan: lowest code of NaN, if the format has them.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    infinity: int | None = None
    first_nan: int | None = None

    @property
    def sign(self) -> int:
        """The sign bit, which is the highest of the code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @functools.cached_property
    def values(self) -> Array:
        """float64 value of each code."""
        codes = np.arange(2 * self.sign)
        plain = codes & (self.sign - 1)
        power = plain >> self.mantissa_bits
        fraction = plain - (np.maximum(power, 1) - 1 << self.mantissa_bits)
        magnitude = fraction * 2.0 ** (np.maximum(power, 1) - self.bias - self.mantissa_bits)
        if self.infinity is not None:
            magnitude[plain == self.infinity] = np.inf
        if self.first_nan is not None:
            magnitude[plain >= self.first_nan] = np.nan
        return np.where(codes & self.sign, -magnitude, magnitude)

    def encode(self, x: Array, saturate: Array | bool) -> Array:
        """Codes of float64 values, nearest even, as uint32.

        Args:
            saturate: whether values beyond the largest, infinity included, become the largest
                (FP16_OVFL of MODE). Otherwise they become infinity, or NaN if there is no infinity.
                A format without either saturates always. NaN becomes NaN if there is one.
        """
        magnitude = np.abs(x)
        lowest = 1 - self.bias  # exponent of denormals and zero
        power = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))[1] - 1
        power = np.where(magnitude == 0, lowest, np.maximum(power, lowest))
        steps = np.rint(np.ldexp(magnitude, self.mantissa_bits - power))
        finite = np.isfinite(steps)
        codes = np.where(finite, steps, 0).astype(I64)
        codes += (power + self.bias - 1).astype(I64) << self.mantissa_bits
        top = int(np.flatnonzero(self.values == self.largest)[0])
        nan = top if self.first_nan is None else self.sign - 1
        beyond = nan if self.infinity is None else self.infinity
        codes = np.where(finite & (codes <= top), codes, np.where(saturate, top, beyond))
        codes = np.where(np.isnan(x), nan, codes)
        return np.where(np.signbit(x), codes | self.sign, codes).astype(U32)


E4M3 = SmallFloat(4, 3, 7, 448.0, first_nan=0x7F)
E5M2 = SmallFloat(5, 2, 15, 57344.0, infinity=0x7C, first_nan=0x7D)
E2M1 = SmallFloat(2, 1, 1, 6.0)

SCALES = np.where(np.arange(256) == 255, np.nan, np.ldexp(1.0, np.arange(256) - 127))
"""float64 value of each E8M0 code."""
