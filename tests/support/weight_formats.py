"""Expert weights in other formats than MXFP4: exact copies, or random ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from mxpert.formats import E2M1, E4M3, E8M0_BIAS, MXFP8_E4M3, MXTensor
from mxpert.formats.codec import decode, encode, unpack_codes
from mxpert.formats.weight_tensor import WEIGHT_FORMATS, WeightLike, WeightTensor
from mxpert.moe.weights import MoEWeights

EXACT = ("mxfp8_e4m3", "nvfp4")
"""Formats that hold MXFP4 weights exactly, if their scales span few binades."""

WITH_GROUPS = (
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_g32-zero_points",
    "int4_g64-zero_points",
    "int4_g128-zero_points",
    "nvfp4",
    "mxfp8_e4m3",
)
"""Formats of Hopper's layout HOPPER_GROUPS, INT4 without and with zero points."""


def in_format(
    weights: MoEWeights, name: str, *, exact: bool, seed: int = 0, zero_points: bool | None = None
) -> MoEWeights:
    """MXFP4 weights in another format: the same values, or (`exact` False) others of their size.

    zero_points: whether INT4 has them; None: groups of 128 have.
    """
    if name == "mxfp4":
        return weights
    draw = torch.Generator().manual_seed(seed)
    gate_up, down = (
        _same(each, name) if exact else _random(each, name, draw, zero_points)
        for each in weights.mx_projections
    )
    return replace(weights, gate_up_proj=gate_up, down_proj=down)


def _same(tensor: MXTensor, name: str) -> WeightLike:
    """The same values; NVFP4's scales are relative to a power of two that differs by row."""
    values = decode(unpack_codes(tensor.qdata), E2M1)
    if name == "mxfp8_e4m3":
        return MXTensor(encode(values, E4M3), tensor.scale, MXFP8_E4M3)
    assert name == "nvfp4"
    exponent = tensor.scale.int() - E8M0_BIAS
    row = torch.arange(tensor.shape[-2]) % 3 + exponent.amax(-1) - 5
    scale = encode(2.0 ** (exponent - row.unsqueeze(-1)), E4M3).repeat_interleave(2, -1)
    return WeightTensor(tensor.qdata, scale, name, row_scale=2.0**row)


def _random(
    tensor: MXTensor, name: str, draw: torch.Generator, zero_points: bool | None
) -> WeightLike:
    """Random codes, scales and zero points; the root mean square is about that of `tensor`."""
    rms = tensor.dequantize().square().mean().sqrt().item()
    *leading, depth = tensor.shape
    codes = torch.randint(0, 256, (*leading, depth // 2), generator=draw, dtype=torch.uint8)
    if name == "mxfp8_e4m3":
        wide = torch.randn(tensor.shape, generator=draw) * 64
        scale = torch.randint(0, 3, tensor.scale.shape, generator=draw, dtype=torch.uint8)
        return MXTensor(encode(wide, E4M3), scale + round_log2(rms / 128) + E8M0_BIAS, MXFP8_E4M3)
    format = WEIGHT_FORMATS[name]
    blocks = (*leading, depth // format.group_size)
    if name == "nvfp4":
        scale = torch.randint(0x30, 0x48, blocks, generator=draw, dtype=torch.uint8)
        row_scale = (0.5 + torch.rand(leading, generator=draw)) * rms / 5
        return WeightTensor(codes, scale, name, row_scale=row_scale)
    scale = ((0.5 + torch.rand(blocks, generator=draw)) * rms / 8).bfloat16()
    zero = torch.randint(0, 16, blocks, generator=draw, dtype=torch.uint8)
    has_zero = name == "int4_g128" if zero_points is None else zero_points
    return WeightTensor(codes, scale, name, zero if has_zero else None)


def round_log2(value: float) -> int:
    return round(torch.tensor(value).log2().item())
