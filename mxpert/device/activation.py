"""Activations on the device.

Every GEMM epilogue and every kernel that finishes a split-K GEMM calls `gated_activation`. Tiles
and the number of splits therefore do not change the activation's arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """``1 / (1 + e^-x)`` in float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Tanh in float32, relative error at most 2^-20; every device kernel uses this form.

    Below 1/4 it is the Taylor series up to x^9; the other terms are 9e-9 of the result. Above it is
    ``(1 - d) / (1 + d)`` with ``d = e^(-2|x|)``. In units of 2^-22, the exponential and the
    division have errors of at most 1 each, and rounding the exponential's argument adds |x|. The
    error is largest at 1/4: 3.9 units of the result.
    """
    square = x * x
    series = x * (
        1.0
        + square
        * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    )
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    below_a_quarter = square < 0.0625
    return tl.where(below_a_quarter, series, tl.where(x < 0.0, -size, size))


@triton.jit
def clamp_above(x, limit):
    """``min(x, limit)``; NaN stays NaN, as in the reference."""
    return tl.where(x > limit, limit, x)


@triton.jit
def clamp_both(x, limit):
    """``clamp(x, -limit, limit)``; NaN stays NaN."""
    return tl.where(x < -limit, -limit, clamp_above(x, limit))


@triton.jit
def erf_gelu(x):
    """``x (1 + erf(x / √2)) / 2`` in float32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def approximate_gelu(x):
    """``x (1 + tanh(√(2 / π) (x + 0.044715 x³))) / 2`` in float32, as x times a sigmoid."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def relu_squared(x):
    """``max(x, 0)²``; NaN stays NaN."""
    x = tl.where(x < 0.0, 0.0, x)
    return x * x


@triton.jit
def gated_activation(gate, up, p0, p1, p2, ACTIVATION: tl.constexpr):
    """Apply a gated activation of `mxpert.core.problem`; p0, p1 and p2 are its parameters.

    p2: None where the activation has two.
    """
    if ACTIVATION == "silu":
        return gate * sigmoid(gate) * up
    elif ACTIVATION == "swiglu":  # p0 alpha, p1 limit, p2 beta or None for 1
        gate = clamp_above(gate, p1)
        if p2 is None:
            return gate * sigmoid(p0 * gate) * (clamp_both(up, p1) + 1.0)
        else:
            return gate * sigmoid(p0 * gate) * (clamp_both(up, p1) + p2)
    elif ACTIVATION == "gelu":
        return erf_gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        return approximate_gelu(gate) * up
    elif ACTIVATION == "clamped_silu":  # p0 limit
        gate = clamp_above(gate, p0)
        return gate * sigmoid(gate) * clamp_both(up, p0)
    else:
        tl.static_assert(ACTIVATION == "situ_v2", "an activation that this backend knows")
        # p0 beta, p1 beta_up
        return p0 * tanh(gate / p0) * sigmoid(gate) * (p1 * tanh(up / p1))
