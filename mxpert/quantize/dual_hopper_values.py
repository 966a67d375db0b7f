"""Values and scales of the dual quantiser: maxima, E8M0 bytes, codes.

Values stay in the words that TMA loaded: one float32, or a pair of 16-bit values, the first in the
lower half.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.compat import aggregate
from ..device.hopper_ptx import encode_fp8_words, larger_halves, multiply_bfloat16_pairs

_INFINITY = gl.constexpr(0x7F800000)
_NAN = gl.constexpr(0x7FC00000)
_EXPONENT_ONE = gl.constexpr(1 << 23)
"""Bits of float32."""

_BYTE_ONE, _BYTE_NAN = gl.constexpr(127), gl.constexpr(255)
"""E8M0 bytes of 1.0 and of NaN."""


@aggregate
class Quantizer:
    """What the kernel computes.

    DTYPE: of the values, "fp32", "fp16" or "bf16". FORMAT: of the codes. EMAX, THRESHOLD: the scale
    rule, as in `scale_rule_constants`. CHOOSE: find and store the scales of blocks. ENCODE: store
    codes.
    """

    DTYPE: gl.constexpr
    FORMAT: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr
    CHOOSE: gl.constexpr
    ENCODE: gl.constexpr

    @gluon.jit
    def scale_byte(self, bits, MARK: gl.constexpr):
        """E8M0 byte (int32) from the bits of a block's maximum, as `e8m0_scale` in mx_codec.py.

        Infinity and NaN give 255. MARK: blocks of zeros get byte 0, all others at least 1.
        """
        byte = gl.maximum(
            ((bits + (_EXPONENT_ONE - self.THRESHOLD)) >> 23) - self.EMAX, 1 if MARK else 0
        )
        byte = gl.where(bits == 0, 0 if MARK else _BYTE_ONE, byte)
        return gl.where(bits >= _INFINITY, _BYTE_NAN, byte)

    @gluon.jit
    def magnitudes(self, words):
        """Clear the signs."""
        return words & (0x7FFFFFFF if self.DTYPE == "fp32" else 0x7FFF7FFF)

    @gluon.jit
    def larger(self, left, right):
        """The larger of two magnitudes; 16-bit pairs are compared per half. NaN is largest."""
        return gl.maximum(left, right) if self.DTYPE == "fp32" else larger_halves(left, right)

    @gluon.jit
    def largest(self, words, AXIS: gl.constexpr):
        """Largest magnitude along an axis, per half for 16-bit pairs."""
        return (
            gl.max(words, AXIS) if self.DTYPE == "fp32" else gl.reduce(words, AXIS, larger_halves)
        )

    @gluon.jit
    def largest_of(self, words, AXIS: gl.constexpr):
        """Largest magnitude of four tensors of words along an axis."""
        first, second, third, fourth = words
        left = self.larger(self.magnitudes(first), self.magnitudes(second))
        right = self.larger(self.magnitudes(third), self.magnitudes(fourth))
        return self.largest(self.larger(left, right), AXIS)

    @gluon.jit
    def values(self, words, HALF: gl.constexpr):
        """The first or second value of each word as float32."""
        if self.DTYPE == "fp16":
            half = (words >> (16 * HALF)).to(gl.int16)
            return half.to(gl.float16, bitcast=True).to(gl.float32)
        elif self.DTYPE == "fp32":
            return words.to(gl.float32, bitcast=True)
        elif HALF == 0:
            return (words << 16).to(gl.float32, bitcast=True)
        else:
            return (words & -65536).to(gl.float32, bitcast=True)

    @gluon.jit
    def bits(self, words, HALF: gl.constexpr):
        """Bits of the first or second value of each word as float32, int32."""
        return self.values(words, HALF).to(gl.int32, bitcast=True)

    @gluon.jit
    def scaled(self, words, low, high):
        """Multiply words of bfloat16 pairs by the inverse scales of both halves; others unchanged.

        An instruction multiplies a pair. Products that underflow bfloat16 are too small for a code.
        """
        if self.DTYPE == "bf16":
            pair = (low.to(gl.int32, bitcast=True) >> 16) | high.to(gl.int32, bitcast=True)
            return multiply_bfloat16_pairs(words, pair)
        else:
            return words

    @gluon.jit
    def product(self, words, inverse, HALF: gl.constexpr):
        """Scaled float32 values of one half of words from `scaled`."""
        values = self.values(words, HALF)
        return values if self.DTYPE == "bf16" else values * inverse

    @gluon.jit
    def encode(self, words, inverse, HALF: gl.constexpr):
        """Codes of one half of each of four words from `scaled`, packed into int32."""
        first, second, third, fourth = words
        return encode_fp8_words(
            self.product(first, inverse, HALF),
            self.product(second, inverse, HALF),
            self.product(third, inverse, HALF),
            self.product(fourth, inverse, HALF),
            self.FORMAT,
        )


@gluon.jit
def inverse_scale(byte):
    """``2^(127 - byte)`` as float32; NaN for 255, which makes all values of the block NaN."""
    bits = gl.where(byte == 254, 1 << 22, (254 - byte) << 23)  # 2^-127 is subnormal
    return gl.where(byte == _BYTE_NAN, _NAN, bits).to(gl.float32, bitcast=True)


@gluon.jit
def quarters(words, LAYOUT: gl.constexpr):
    """Split the last two dimensions [2, 2] into four tensors, converted to LAYOUT."""
    even, odd = words.split()
    first, third = even.split()
    second, fourth = odd.split()
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(third, LAYOUT, assert_trivial=True),
        gl.convert_layout(fourth, LAYOUT, assert_trivial=True),
    )
