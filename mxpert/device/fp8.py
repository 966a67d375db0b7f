"""Conversions between float32 and FP8 by bits, for chips before sm_90.

sm_80 to sm_87 have no such instructions, and Triton does not compile ``float8e4nv`` there. sm_89
has them, but Triton converts float32 through float16 there, which rounds twice. These functions
give the same codes and values as the instructions of later chips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

if TYPE_CHECKING:
    from triton.language.semantic import TritonSemantic

_SIGN = tl.constexpr(0x80)
_MAGNITUDE = tl.constexpr(0x7F)
_FLOAT_INFINITY = tl.constexpr(0x7F800000)  # bits of a float32


def has_fp8_instructions(_semantic: TritonSemantic | None = None) -> tl.constexpr:
    """Whether the target of this compilation converts float32 to FP8 in one rounding; constexpr.

    The interpreter passes no semantic.
    """
    builder = interpreter_builder if _semantic is None else _semantic.builder
    options = builder.options
    supported = "fp8e4nv" in options.supported_fp8_dtypes
    return tl.constexpr(supported and options.arch != "sm89")


has_fp8_instructions.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def encode_fp8(values, FORMAT: tl.constexpr):
    """Codes (int32) of float32 values within the format's range, rounded to nearest even."""
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    SMALLEST: tl.constexpr = 2.0**-6 if FORMAT == "e4m3" else 2.0**-14  # normal value
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding 2^SHIFT times the value's power of two rounds to MANTISSA bits. The exponent of the sum
    # gives the binade, its last bits count steps of it. Their sum is the code.
    size = tl.abs(values)
    power = tl.maximum(size, SMALLEST).to(tl.int32, bitcast=True) & _FLOAT_INFINITY
    total = (power.to(tl.float32, bitcast=True) * 2.0**SHIFT + size).to(tl.int32, bitcast=True)
    BINADES: tl.constexpr = 127 + SHIFT - (6 if FORMAT == "e4m3" else 14)
    code = (total >> SHIFT) + (total & 31) - (BINADES << MANTISSA)
    return code | ((values.to(tl.int32, bitcast=True) >> 24) & _SIGN)


@triton.jit
def decode_fp8(codes, FORMAT: tl.constexpr):
    """bfloat16 values of codes (uint8): every FP8 value is one."""
    if FORMAT == "e4m3":
        # Shifted to bfloat16's place, the magnitude bits give the value times 2^-120.
        wide = codes.to(tl.int16)
        bits = ((wide & _MAGNITUDE) << 4) | ((wide & _SIGN) << 8)
        value = bits.to(tl.bfloat16, bitcast=True) * 2.0**120
        return tl.where((wide & _MAGNITUDE) == _MAGNITUDE, float("nan"), value)
    else:
        tl.static_assert(FORMAT == "e5m2", "an FP8 format")
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.bfloat16)
