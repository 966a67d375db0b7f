"""Scales of quantised weights, counted by their exponent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...formats.codec import decode, unpack_codes
from ...formats.spec import E4M3, E8M0_BIAS, E8M0_NAN, MXFP4
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import INT4_ZERO, WeightTensor
from .expert_matrices import Exact

_OFFSET = 512
"""Where exponent 0 is counted; those of a product of two scales lie within -300 and 300."""


@dataclass(frozen=True)
class ScaleCounts:
    """What the scales of a matrix are.

    Args:
        blocks: number of scales. zero_blocks: of blocks that are zero.
        nan_scales: scales that are no finite number.
        counts: int64 [1024], the other blocks by exponent, which `exponent_of` gives.
    """

    blocks: int
    zero_blocks: int
    nan_scales: int
    counts: torch.Tensor


def exponent_of(index: torch.Tensor | int) -> int:
    """The exponent that an entry of `ScaleCounts.counts` counts."""
    return int(index) - _OFFSET


def scale_counts(quantized: Exact) -> ScaleCounts:
    """Count the scales of a matrix by ``floor(log2(scale))``.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> found = scale_counts(quantize_blocks(torch.ones(2, 64), "mxfp4"))
        >>> found.blocks, [exponent_of(each) for each in found.counts.nonzero()]
        (4, [-2])
    """
    zero, nan, exponents = (
        _mx(quantized) if isinstance(quantized, MXTensor) else _weight_tensor(quantized)
    )
    counted = exponents[~zero & ~nan].to(torch.int64) + _OFFSET
    counts = torch.bincount(counted, minlength=2 * _OFFSET)
    return ScaleCounts(zero.numel(), int(zero.sum()), int(nan.sum()), counts)


_Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _mx(quantized: MXTensor) -> _Found:
    """Which blocks are zero, which scales are NaN, and the exponents of scales; all [N, K/32]."""
    scale = quantized.scale
    signless = 0x77 if quantized.format == MXFP4 else 0x7F
    codes = quantized.qdata.view(torch.uint8).unflatten(-1, (scale.shape[-1], -1))
    zero = ((codes & signless) == 0).all(-1)
    return zero, scale == E8M0_NAN, scale.to(torch.int16) - E8M0_BIAS


def _weight_tensor(quantized: WeightTensor) -> _Found:
    """As `_mx`, [N, K/g]; a scale of zero makes a block of zeros."""
    codes = unpack_codes(quantized.qdata).unflatten(-1, (-1, quantized.format.group_size))
    if quantized.format.is_integer:
        point, scale = quantized.zero_point, quantized.scale.to(torch.float64)
        zero = (codes == (INT4_ZERO if point is None else point.unsqueeze(-1))).all(-1)
    else:
        zero = ((codes & 7) == 0).all(-1)
        scale = decode(quantized.scale, E4M3, torch.float64)
    if quantized.row_scale is not None:
        scale = scale * quantized.row_scale.to(torch.float64).unsqueeze(-1)
    exponents = torch.frexp(scale).exponent - 1
    return zero | (scale == 0), ~scale.isfinite(), exponents
