"""Activations that train, and what a quantised MoE block may differ from float64 by."""

from __future__ import annotations

import math

import mxpert
from mxpert.formats.spec import ScaleRule
from mxpert.testing.noise import gaussian_magnitudes, quantisation_noise
from mxpert.testing.numerics import rounding_rms, sampling_margin

ACTIVATIONS = (
    mxpert.SiLU(),
    mxpert.SwiGLU(limit=1.0),
    mxpert.ClampedSiLU(1.0),
    mxpert.SiTUv2(),
    mxpert.GELU(),
    mxpert.GELU("tanh"),
    mxpert.SwiGLU(limit=None, beta=0.25),
)
"""Limits of 1 change many of normal values."""


def layer_floor_db(numel: int, *, exchanged: bool = False, mxfp8_wire: bool = False) -> float:
    """Least SNR of any output or gradient of the quantised block, compared with float64.

    With n the noise over signal of one product of quantised operands (twice that of an operand):
    the output has ``G n`` through the gated activation and n of the down product; a gradient has n
    of the down product's dgrad, ``G n`` through derivatives at noisy gate and up, n of its own
    GEMM. G = 2.2 as in `noise.sqnr_floor_db`; up to six roundings to bfloat16. An exchange rounds
    twice more: results and the gradients of tokens return as bfloat16 partial sums. An MXFP8 wire
    quantises x once more for wgrad. `numel` values of the smallest operand are what the noise is
    sampled from.
    """
    operand = quantisation_noise("mxfp8_e4m3", ScaleRule.RCEIL, gaussian_magnitudes())
    total = (2 + 2.2) * 2 * operand + (8 if exchanged else 6) * rounding_rms(8) ** 2
    total += operand if mxfp8_wire else 0.0
    return -10 * math.log10(total * sampling_margin(numel) ** 2)


def bf16_floor_db(numel: int, *, exchanged: bool = False) -> float:
    """The same without quantisation: roundings to bfloat16 alone, of the weights too.

    Each of the three products rounds its weights and its result; gate and up pass on ``G`` times
    what they have. An exchange adds two roundings.
    """
    products = 2 * (2 + 2.2) + 6 + (2 if exchanged else 0)
    return -10 * math.log10(products * rounding_rms(8) ** 2 * sampling_margin(numel) ** 2)
