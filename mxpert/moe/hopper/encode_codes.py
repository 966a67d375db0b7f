"""Encoding of a row as e4m3 codes with one scale, by `RowFormat.name`.

- "hi_lo": bfloat16 to hi and lo with ``x = scale * (hi + lo / 16)``; the largest hi is 448.
- "token": bfloat16 with ``scale = amax / 448``.
- "e4m3", "e2m1": MX blocks. The codes of a block are multiplied by the ratio of its scale to the
  row's largest scale, a power of two. If the source is bfloat16, its values are quantised first,
  bit-exact to `quantize`.

A NaN or an infinity in a row makes its scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.hopper_ptx import quantized_codes, scaled_words, split_codes
from ...device.mx_codec import e8m0_scale, inverse_scale
from .encode_steps import step_layout

_SMALLEST_AMAX = gl.constexpr(0x04E00000)
"""Bits of 448 * 2^-126. Smaller maxima are raised to it, so that the scale is a normal float32."""


@dataclass(frozen=True)
class RowFormat:
    """What a row is read from and encoded as. Kernels take it as one constexpr.

    Args:
        name: "hi_lo", "token", "e4m3" or "e2m1"; see above.
        coded: the source is MX codes with scales, and not bfloat16.
        emax, threshold: the scale rule of bfloat16 that becomes MX (see `e8m0_scale`).
    """

    name: str
    coded: bool = False
    emax: int = 0
    threshold: int = 0


@gluon.constexpr_function
def _headroom(FORMAT):
    """Exponent added to codes: the largest e2m1 value is 6, and 6 * 2^6 uses e4m3's range."""
    return 6 if FORMAT.name == "e2m1" else 0


@gluon.jit
def _power_of_two(exponent_byte):
    """2^(byte - 127) as float32 for bytes 1 … 254."""
    return (exponent_byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _block_bytes(values, FORMAT: gl.constexpr):
    """E8M0 bytes of one step's blocks, [chunks, 1, 4, 1].

    Returns them twice: unchanged, and with 0 for blocks of zeros, for the row's maximum.
    """
    bits = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    bits = gl.reduce(gl.reduce(bits, 3, _maximum), 1, _maximum)
    bits = gl.expand_dims(gl.expand_dims(bits, 1), 3)
    scales = e8m0_scale(bits, FORMAT.emax, FORMAT.threshold)
    return scales, gl.where(bits == 0, 0, scales)


@gluon.jit
def statistic_of(step, FORMAT: gl.constexpr):
    """Integers of a step whose maximum over the row determines the row's scale.

    For "hi_lo" and "token" these are the bits of magnitudes, which order like the magnitudes, with
    infinity and NaN last. For MX formats they are the scale bytes of blocks.
    """
    if FORMAT.coded:
        # All bits of a word's codes but their signs: a block of zeros does not count, unless NaN.
        MAGNITUDES: gl.constexpr = 0x7777 if FORMAT.name == "e2m1" else 0x7F7F7F7F
        counts = ((step.words & MAGNITUDES) != 0) | (step.scales == 255)
        return gl.where(counts, step.scales, 0)
    elif FORMAT.name == "hi_lo" or FORMAT.name == "token":
        return step.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        _, counts = _block_bytes(step.to(gl.float32), FORMAT)
        return counts


@gluon.jit
def row_maximum(numbers):
    """Maximum of a 3-D or 4-D tensor, as a scalar."""
    if len(numbers.shape) == 4:
        numbers = gl.reduce(numbers, 3, _maximum)
    return gl.reduce(gl.reduce(gl.reduce(numbers, 2, _maximum), 1, _maximum), 0, _maximum)


@gluon.jit
def _hi_lo_scale(bits):
    """Scale of a row and its inverse, from the float32 bits of the row's largest magnitude.

    Both are powers of two. The scaled maximum is at most 448 = 1.75 * 2^8.
    """
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    scale = gl.where(bits >= 0x7F800000, float("nan"), _power_of_two(exponent))
    return scale, _power_of_two(254 - exponent)


@gluon.jit
def _token_scale(bits):
    """Scale of a row and the factor of its values; see `formats.token`.

    bits: float32 bits of the row's largest magnitude.
    """
    amax = gl.maximum(bits, _SMALLEST_AMAX).to(gl.float32, bitcast=True)
    largest = gl.to_tensor(448.0)
    scale = gl.where(bits == 0, 1.0, gl.div_rn(amax, largest))
    return gl.where(bits >= 0x7F800000, float("nan"), scale), gl.div_rn(largest, amax)


@gluon.jit
def row_scale(statistic, FORMAT: gl.constexpr):
    """The row's scale, and `encoding` of `encode_step`: a factor, or for MX the base scale byte."""
    HEADROOM: gl.constexpr = _headroom(FORMAT)
    if FORMAT.name == "hi_lo":
        return _hi_lo_scale(statistic)
    elif FORMAT.name == "token":
        return _token_scale(statistic)
    else:
        base = gl.maximum(statistic, 1 + HEADROOM)
        return gl.where(statistic == 255, float("nan"), _power_of_two(base - HEADROOM)), base


@gluon.jit
def _round_to_e2m1(values):
    """Round float32 values to the nearest e2m1 values, ties to even, saturating."""
    size = gl.minimum(gl.abs(values), 6.0)
    binade = gl.maximum(size.to(gl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    # Adding this offset leaves one mantissa bit of `size`, and subtracting it restores the value.
    offset = (binade + (22 << 23)).to(gl.float32, bitcast=True)
    bits = ((size + offset) - offset).to(gl.int32, bitcast=True)
    return (bits | (values.to(gl.int32, bitcast=True) & -0x80000000)).to(gl.float32, bitcast=True)


@gluon.jit
def _e2m1_values(words, STEPS: gl.constexpr):
    """Decode four e2m1 codes of each word to float32, [chunks, 8, 4, 4]."""
    LAYOUT: gl.constexpr = step_layout(STEPS)
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    code = words[:, :, :, None] >> (place * 4)[None, None, None, :]
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = gl.where(magnitude > 1, normal, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(gl.float32, bitcast=True)


@gluon.jit
def _block_power(scales, base, FORMAT: gl.constexpr):
    """Power of two that multiplies the codes of a block.

    It is clamped below if all codes become zero, and above for blocks of zeros, whose scale may be
    larger than the base.
    """
    HEADROOM: gl.constexpr = _headroom(FORMAT)
    return _power_of_two(gl.minimum(gl.maximum(127 + HEADROOM + scales - base, 1), 127 + HEADROOM))


@gluon.jit
def encode_step(step, encoding, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Encode one step: a tuple of e4m3 codes, (hi, lo) for "hi_lo".

    `encoding` is the second result of `row_scale`.
    """
    PACKED: gl.constexpr = FORMAT.name == "e2m1"
    if FORMAT.coded:
        power = _block_power(step.scales, encoding, FORMAT)
        if PACKED:
            values = _e2m1_values(step.words, STEPS) * power[:, :, :, None]
            return (values.to(gl.float8e4nv),)
        else:
            return (scaled_words(step.words, power),)
    elif FORMAT.name == "hi_lo":
        return split_codes(step.to(gl.float32) * encoding)
    elif FORMAT.name == "token":
        return ((step.to(gl.float32) * encoding).to(gl.float8e4nv),)
    else:
        values = step.to(gl.float32)
        scales, _ = _block_bytes(values, FORMAT)
        power, inverse = _block_power(scales, encoding, FORMAT), inverse_scale(scales)
        if PACKED:
            return ((_round_to_e2m1(values * inverse) * power).to(gl.float8e4nv),)
        else:
            return (quantized_codes(values, inverse, power),)
