"""NVFP4 tensors that are MXFP4 tensors in other words: recognised, made, and converted bit for bit.

NVFP4 has a scale in e4m3 for each 16 codes and one float32 for the whole matrix. ModelOpt writes
MXFP4 checkpoints in this form without loss (its casts of gpt-oss and DeepSeek-V4): the float32 is
2^m, and both scales of 32 codes are 2^(k - m). No config says so; the scales do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...formats.codec import ZERO_BLOCK_SCALE
from ...formats.spec import E8M0_BIAS, E8M0_NAN, MX_BLOCK_SIZE, MXFP4
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import NVFP4, WeightTensor

NVFP4_BLOCK_SIZE = 16
_HALVES = MX_BLOCK_SIZE // NVFP4_BLOCK_SIZE
_MAGNITUDES = 0x77
"""The bits of a byte of two codes that are no signs."""

_NONE, _ZERO = -1, 256
"""What stands in the place of a scale byte: no power of two that E8M0 holds, and zero."""

_EXPONENT, _E4M3_BIAS = 0x78, 7
"""The exponent's bits of an e4m3 byte, and its bias."""
_FLOAT32_MANTISSA = 0x7FFFFF
_LOWEST, _HIGHEST = -9, 8
"""Exponents of the powers of two in e4m3."""
_SMALLEST_NORMAL = -126
"""Of float32: the global scale and its reciprocal are exact then."""


@dataclass(frozen=True)
class NotACast:
    """An NVFP4 matrix that MXFP4 does not hold exactly.

    Args:
        casts: blocks of 32 that it would hold. blocks: blocks in all.
    """

    casts: int
    blocks: int


def mxfp4_of_cast(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, is_divisor: bool
) -> MXTensor | NotACast:
    """The MXFP4 matrix whose values an NVFP4 matrix has, with the same codes.

    A block of 32 is a cast if both of its scales, with the global one, are the same power of two
    and E8M0 holds it. A half with a zero scale and zero codes takes the scale of the other half.

    Args:
        codes: uint8 [N, K/2], two codes a byte. scale: float8_e4m3fn [N, K/16].
        global_scale: one float32; each value is ``code · scale · global_scale``, or
            ``code · scale / global_scale`` with `is_divisor`.

    Returns:
        The MXFP4 tensor [N, K], its codes those of the argument; NotACast if a block is none.

    Source:
        NVIDIA ModelOpt's cast of MXFP4 checkpoints to NVFP4; OCP MX 1.0, E8M0.

    Example:
        >>> codes = torch.full((1, 16), 0x42, dtype=torch.uint8)  # 1 and 2
        >>> scale = torch.tensor([[4.0, 4.0]]).to(torch.float8_e4m3fn)
        >>> cast = mxfp4_of_cast(codes, scale, torch.tensor(0.25), is_divisor=False)
        >>> cast.dequantize()[0, :2].tolist(), cast.scale.tolist()
        ([1.0, 2.0], [[127]])
    """
    usual = _usual_scales(scale, float(global_scale), is_divisor)
    if usual is not None:
        return MXTensor(codes, usual, MXFP4)
    found = _scale_table(global_scale, is_divisor)[scale.view(torch.uint8).to(torch.int32)]
    is_zero = found == _ZERO
    if bool(is_zero.any()):
        magnitudes = codes.unflatten(-1, (scale.shape[-1], -1))[is_zero] & _MAGNITUDES
        found[is_zero] = torch.where((magnitudes == 0).all(-1), _ZERO, _NONE).to(found.dtype)
    first, second = found.unflatten(-1, (-1, _HALVES)).unbind(-1)
    is_cast = (first == second) | (first == _ZERO) | (second == _ZERO)
    is_cast &= (first != _NONE) & (second != _NONE)
    if not bool(is_cast.all()):
        return NotACast(int(is_cast.sum()), is_cast.numel())
    chosen = torch.where(first == _ZERO, second, first)
    chosen = torch.where(chosen == _ZERO, ZERO_BLOCK_SCALE, chosen)
    return MXTensor(codes, chosen.to(torch.uint8), MXFP4)


def _usual_scales(
    scale: torch.Tensor, global_scale: float, is_divisor: bool
) -> torch.Tensor | None:
    """E8M0 bytes [N, K/32] of powers of two, equal in both halves; None for other scales.

    In a few passes over two bytes at a time: zeros are left to `_scale_table`.
    """
    mantissa, exponent = math.frexp(global_scale)
    if mantissa != 0.5:
        return None
    pairs = scale.view(torch.int16)  # e4m3: a sign, 4 bits of the exponent, 3 of the mantissa
    exponents, bias = pairs & _EXPONENT, _E4M3_BIAS
    if torch.equal(exponents * 0x101, pairs):
        exponents >>= 3
    elif torch.equal((pairs & 0xFF) * 0x101, pairs):  # subnormal powers of two among them
        bits = scale.unflatten(-1, (-1, _HALVES))[..., 0].float().view(torch.int32)
        if bool((bits & _FLOAT32_MANTISSA).any()):
            return None
        exponents, bias = bits >> 23, E8M0_BIAS  # that of float32; negative scales are below 0
    else:
        return None
    lowest, highest = (int(each) for each in exponents.aminmax())
    whole = (1 - exponent if is_divisor else exponent - 1) + E8M0_BIAS - bias
    if lowest <= 0 or lowest + whole < 0 or highest + whole >= E8M0_NAN:
        return None
    return (exponents + whole).to(torch.uint8)


def _scale_table(global_scale: torch.Tensor, is_divisor: bool) -> torch.Tensor:
    """int16 [256]: for each e4m3 scale its E8M0 byte together with the global one, or a mark."""
    # Exact in float64: e4m3 has 4 significant bits, float32 has 24. A quotient that is no power of
    # two differs from each by a factor of 1 ± 2^-24 at least, which float64 keeps.
    whole = global_scale.reshape(()).to(torch.float64)
    bits = torch.arange(256, dtype=torch.uint8, device=whole.device)
    scales = bits.view(torch.float8_e4m3fn).to(torch.float64)
    values = scales / whole if is_divisor else scales * whole
    mantissa, exponent = torch.frexp(values)  # a power of two is 0.5 · 2^exponent
    bytes_ = exponent.to(torch.int16) - 1 + E8M0_BIAS
    is_scale = (mantissa == 0.5) & (bytes_ >= 0) & (bytes_ < E8M0_NAN)
    table = torch.where(is_scale, bytes_, _NONE)
    return torch.where(values == 0, _ZERO, table).to(torch.int16)


def cast_of_mxfp4(matrices: Sequence[MXTensor]) -> list[WeightTensor] | None:
    """The NVFP4 matrices whose values MXFP4 matrices have, with the same codes and one factor.

    The inverse of `mxfp4_of_cast`. The factor is a power of two that brings the largest scale to
    2^8; e4m3 holds powers of two from 2^-9 to there.

    Args:
        matrices: MXFP4 [N, K] on the CPU.

    Returns:
        NVFP4 tensors, each with the common factor in all rows; None where scales of blocks that are
        not zero are NaN or more than 17 binades apart.

    Source:
        NVIDIA ModelOpt's cast of MXFP4 checkpoints to NVFP4.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> blocks = quantize_blocks(torch.tensor([1.0, 64.0]).repeat_interleave(32)[None], "mxfp4")
        >>> (cast,) = cast_of_mxfp4([blocks])
        >>> torch.equal(cast.dequantize(), blocks.dequantize())
        True
    """
    exponents = [each.scale.to(torch.int16) - E8M0_BIAS for each in matrices]
    live = [_is_live(each) for each in matrices]
    found = torch.cat([e[mask] for e, mask in zip(exponents, live, strict=True)])
    if any(bool((each.scale == E8M0_NAN).any()) for each in matrices):
        return None
    highest = int(found.max()) if found.numel() else 0
    whole = max(highest - _HIGHEST, _SMALLEST_NORMAL)
    if found.numel() and int(found.min()) - whole < _LOWEST:
        return None
    cast = []
    for matrix, exponent in zip(matrices, exponents, strict=True):
        relative = (exponent - whole).float()
        scale = torch.exp2(relative.clamp(_LOWEST, _HIGHEST))
        scale = scale.where((relative >= _LOWEST) & (relative <= _HIGHEST), 0.0)  # of zeros
        stored = scale.to(torch.float8_e4m3fn).view(torch.uint8).repeat_interleave(_HALVES, dim=-1)
        rows = torch.full(matrix.scale.shape[:1], 2.0**whole)
        cast.append(WeightTensor(matrix.qdata, stored, NVFP4, row_scale=rows))
    return cast


def _is_live(matrix: MXTensor) -> torch.Tensor:
    """Which blocks have a code that is not zero, [N, K/32]."""
    codes = matrix.qdata.unflatten(-1, (matrix.scale.shape[-1], -1)) & _MAGNITUDES
    live: torch.Tensor = (codes != 0).any(-1)
    return live
