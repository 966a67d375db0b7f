"""Random weights in every format, drawn as codes and scales, without a dense copy."""

from __future__ import annotations

import math

import torch

from ..errors import require
from ..formats.spec import E8M0_BIAS, E8M0_MAX, MX_BLOCK_SIZE, MXFP4, MXFP8_E4M3, MXFormat
from ..formats.tensor import MXTensor
from ..formats.weight_tensor import AnyWeightFormat, WeightLike, WeightTensor, parse_weight_format

_CODE_RMS = {"mxfp4": math.sqrt(68.5 / 8), "nvfp4": math.sqrt(68.5 / 8), "mxfp8_e4m3": 1.2}
"""Root mean square of the drawn codes. e2m1: mean square (0 + .25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8
of the 16 codes. e4m3: numbers of magnitude 2^-3 to 2 in equal shares of their codes."""
_INT4_RMS = math.sqrt(21.5)
"""Of the integers -8 to 7."""
_E4M3_LOWEST, _E4M3_HIGHEST = 0x20, 0x40
"""Codes of 2^-3 and 2."""


def random_weight(
    shape: tuple[int, ...],
    format: AnyWeightFormat | str,
    *,
    rms: float,
    scale_spread: float,
    generator: torch.Generator,
) -> WeightLike:
    """Weights of uniformly random codes, quantised along the last axis.

    Args:
        shape: logical shape.
        format: MXFP4, MXFP8 (e4m3), NVFP4 or INT4, or the name.
        rms: root mean square of the values, accurate to a factor of √2 (scales are powers of two).
        scale_spread: standard deviation of log2 of the block scales; about 1 in trained weights.
        generator: source of the random numbers; its device is used.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> random_weight((2, 64), "int4_g32", rms=1.0, scale_spread=1.0, generator=draw)
        WeightTensor(int4_g32, shape=[2, 64], device='cpu')
    """
    format = parse_weight_format(format, "random_weight", "format")
    *leading, size = shape
    group = MX_BLOCK_SIZE if isinstance(format, MXFormat) else format.group_size
    need = f"a multiple of {group}"
    require(size % group == 0, "random_weight", "shape[-1]", need=need, got=size)
    codes = _bytes((*leading, size // format.codes_per_byte), generator)
    if format == MXFP8_E4M3:
        span = _E4M3_HIGHEST - _E4M3_LOWEST
        codes = (codes & 0x80) | (codes & 0x7F) % span + _E4M3_LOWEST
    # If log2 of the scales has standard deviation s, their mean square grows by 2^(2 s² ln 2).
    center = math.log2(rms / _CODE_RMS.get(format.name, _INT4_RMS)) - scale_spread**2 * math.log(2)
    blocks = (*leading, size // group)
    noise = torch.randn(blocks, generator=generator, device=generator.device)
    if isinstance(format, MXFormat):
        byte = (E8M0_BIAS + center + scale_spread * noise).round().clamp(1, E8M0_MAX)
        return MXTensor(codes, byte.to(torch.uint8), format)
    exponent = center + scale_spread * noise
    if format.name != "nvfp4":
        return WeightTensor(codes, torch.exp2(exponent).bfloat16(), format)
    # Scales around 1 are e4m3 numbers of 4 bits; the rest is each row's factor.
    scale = torch.exp2(exponent - center).clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
    uniform = torch.rand(leading, generator=generator, device=generator.device)
    factor = torch.exp2(center + uniform - 0.5)
    return WeightTensor(codes, scale.view(torch.uint8), format, row_scale=factor)


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)


def random_mxfp4(
    shape: tuple[int, ...], *, rms: float, scale_spread: float, generator: torch.Generator
) -> MXTensor:
    """`random_weight` in MXFP4."""
    weight = random_weight(shape, MXFP4, rms=rms, scale_spread=scale_spread, generator=generator)
    assert isinstance(weight, MXTensor)  # for the type checker: the format is one of MX
    return weight
