"""Check of a stage-1 output code by code: which codes may differ from the oracle's.

Relative L2 (`numerics`) needs many values. In a small batch one flipped e2m1 code can be half of a
value and dominate the norm. This module therefore checks every code. A correct kernel's value lies
within `slack` of the float64 value. Rounding to bfloat16, the block's scale and the code are
monotone, so scale and code must lie between those of ``value − slack`` and ``value + slack``. A
code may differ from the oracle's only if a rounding boundary lies in that interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxpert.core.problem import OwnFormat, activation_mx_format
from mxpert.errors import message
from mxpert.formats.codec import (
    block_scale,
    dequantize_blocks,
    encode,
    exact_power_of_two,
    quantize_blocks,
    unpack_codes,
)
from mxpert.formats.spec import E8M0_BIAS, MXFormat, ScaleRule
from mxpert.formats.tensor import MXTensor
from mxpert.formats.token import FP8_TOKEN, quantize_token_rows
from mxpert.moe.reference import activate
from mxpert.moe.weights import gate_up_rows
from mxpert.quantize.reference import WeightDecoder
from mxpert.testing.numerics import accumulation_error
from mxpert.testing.problems import MoEInputs

DEVIATIONS = 6.0
"""Allowed error of a value, in standard deviations of accumulator noise. One in 10⁹ Gaussian errors
is larger, and it shows only at a rounding boundary."""

_ULP = 2.0**-24


@dataclass(frozen=True)
class Rounded:
    """Stage-1 output before rounding.

    `values`: float64 [T·k, F] by (token, slot). `slack`: largest difference of a correct kernel's
    float32 values from them, same shape.
    """

    values: torch.Tensor
    slack: torch.Tensor

    def round(
        self, a_format: OwnFormat, rule: ScaleRule = ScaleRule.RCEIL
    ) -> torch.Tensor | MXTensor:
        """Round to bfloat16, then quantise if `a_format` is an MX format."""
        fmt = activation_mx_format(a_format)
        values = self.values.to(torch.bfloat16)
        return values if fmt is None else quantize_blocks(values, fmt, -1, rule)


def gate_up_oracle(
    inputs: MoEInputs,
    a_format: OwnFormat,
    *,
    apply_router_weight_on_input: bool = False,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
    accumulation: float | None = None,
) -> Rounded:
    """Stage 1 of every (token, slot) in float64, with the slack allowed for a float32 kernel.

    The rounding errors of a sum are proportional to its partial sums: ``√Σ (x_j w_j)²`` for
    independent products, or the sum itself if that is larger. `accumulation_error` is the relative
    standard deviation. `DEVIATIONS` of them are allowed, plus two roundings for routing weight and
    bias. This gives an interval each for gate and up. The slack is the largest change of the
    activation over the four corners, since gated activations are monotone over so small a range.
    The activation's own float32 arithmetic adds ``2 |α g| + 64`` half-units: ``2 |α g|`` for the
    argument of the exponential, which is rounded twice, and 64 for division, products and tanh.

    Args:
        inputs: the batch; all ids must be valid. Experts without rows are not dequantised.
        a_format, apply_router_weight_on_input, scale_rule: as in `mxpert.fused_moe`.
        accumulation: relative error of the kernel's accumulator; None: float32 over all of H.
    """
    weights, activation = inputs.weights, inputs.activation
    num_tokens, top_k = inputs.topk_ids.shape
    fmt, device = activation_mx_format(a_format), weights.device
    if fmt is not None:
        x = dequantize_blocks(quantize_blocks(inputs.x, fmt, -1, scale_rule), torch.float64)
    elif a_format == FP8_TOKEN:
        x = quantize_token_rows(inputs.x).dequantize(torch.float64)
    else:
        x = inputs.x.double()
    noise = DEVIATIONS * (
        accumulation_error(weights.hidden_size) if accumulation is None else accumulation
    )
    assert weights.gate_up_order is not None  # for the type checker; MoEWeights has refused None
    halves = gate_up_rows(weights.gate_up_order, weights.intermediate_size, device)
    slope = getattr(activation, "alpha", 1.0)
    decoder, ids = WeightDecoder(torch.float64, device), inputs.topk_ids.flatten().long()
    values = torch.empty(
        (num_tokens * top_k, weights.intermediate_size), dtype=torch.float64, device=device
    )
    slack = torch.empty_like(values)
    for expert in ids.unique().tolist():
        rows = (ids == expert).nonzero().squeeze(1)
        w, x_rows = decoder(weights.gate_up_proj[expert]), x[rows // top_k]
        product = x_rows @ w.T
        error = noise * torch.hypot(product, (x_rows.square() @ w.square_().T).sqrt())
        if apply_router_weight_on_input:
            factor = inputs.topk_weights.flatten()[rows, None].double()
            product, error = product * factor, error * factor.abs()
        if weights.gate_up_bias is not None:
            product += weights.gate_up_bias[expert]
        error += 2 * _ULP * product.abs()
        gate, up = (product[:, half] for half in halves)
        gate_error, up_error = (error[:, half] for half in halves)
        exact = activate(activation, gate, up)
        corners = [
            activate(activation, gate + i * gate_error, up + j * up_error) - exact
            for i in (-1, 1)
            for j in (-1, 1)
        ]
        values[rows] = exact
        slack[rows] = (
            torch.stack(corners).abs().amax(0) + (2 * slope * gate.abs() + 64) * _ULP * exact.abs()
        )
    return Rounded(values, slack)


def assert_rounded(
    actual: torch.Tensor | MXTensor,
    expected: Rounded,
    what: str,
    *,
    rule: ScaleRule = ScaleRule.RCEIL,
) -> None:
    """Raise unless every scale and code lies within the slack and few differ from the oracle's.

    A value whose interval contains n rounding boundaries flips with probability
    ``n E|e| / (2 slack)``. For an error e of one standard deviation, biased or not, that is at most
    ``min(1, n / (2 DEVIATIONS))``. The sum over all values and all block scales is the expected
    number of flips. The limit adds five deviations of a Poisson count, and one.

    Args:
        actual: [T·k, F] by (token, slot), bfloat16 or MXTensor along its last axis.
        expected: from `gate_up_oracle`. what: name of the comparison. rule: of an MXTensor.

    Raises:
        AssertionError: names the first wrong code, or the number of flips.

    Example:
        >>> exact = torch.tensor([[1.0, 1.0 + 2**-8]], dtype=torch.float64)
        >>> expected = Rounded(exact, torch.full_like(exact, 1e-6))
        >>> assert_rounded(torch.tensor([[1.0, 1 + 2**-7]]).bfloat16(), expected, "the tie flips")
    """
    points = [(expected.values + side * expected.slack).to(torch.bfloat16) for side in (-1, 0, 1)]
    spans: list[tuple[str, torch.Tensor, list[torch.Tensor]]]
    if isinstance(actual, MXTensor):
        fmt = actual.format
        packed = fmt.codes_per_byte == 2
        codes = unpack_codes(actual.qdata) if packed else actual.qdata
        spans = [
            ("scale", actual.scale.int(), _scale_span(points, actual.scale, fmt, rule)),
            (
                "code",
                _ordinal(codes.int(), fmt.element.bits),
                [_code_at(point, actual.scale, fmt) for point in points],
            ),
        ]
    else:
        spans = [("value", _bfloat16_ordinal(actual), [_bfloat16_ordinal(p) for p in points])]
    likely, flips = 0.0, 0
    for name, found, (low, middle, high) in spans:
        wrong = ((found < low) | (found > high)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise AssertionError(
                message(
                    what,
                    f"{name}{list(at)}",
                    f"{low[at].item()} to {high[at].item()} (ordinals) within the noise",
                    f"{found[at].item()}, the first of {len(wrong)} in {found.numel()}",
                )
            )
        likely += ((high - low) / (2 * DEVIATIONS)).clamp(max=1).sum().item()
        flips += int((found != middle).sum())
    if flips > likely + 5 * math.sqrt(likely) + 1:
        raise AssertionError(
            message(
                what,
                "codes",
                f"about {likely:.0f} that differ from the oracle's, as noise flips",
                f"{flips} of {expected.values.numel()}",
            )
        )


def _ordinal(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Map sign-magnitude codes to integers in the order of their values; both zeros give 0."""
    magnitude = codes & ((1 << (bits - 1)) - 1)
    return torch.where(codes >> (bits - 1) & 1 == 1, -magnitude, magnitude)


def _bfloat16_ordinal(values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.bfloat16:
        raise AssertionError(
            message("assert_rounded", "actual.dtype", torch.bfloat16, values.dtype)
        )
    return _ordinal(values.contiguous().view(torch.int16).int(), 16)


def _code_at(values: torch.Tensor, scale: torch.Tensor, fmt: MXFormat) -> torch.Tensor:
    """Ordinals of the codes of `values` under the given block scales."""
    inverse = exact_power_of_two(E8M0_BIAS - scale.int(), torch.float64).unsqueeze(-1)
    blocks = values.double().unflatten(-1, (-1, fmt.block_size)) * inverse
    return _ordinal(encode(blocks.flatten(-2), fmt.element).int(), fmt.element.bits)


def _scale_span(
    points: list[torch.Tensor], scale: torch.Tensor, fmt: MXFormat, rule: ScaleRule
) -> list[torch.Tensor]:
    """Smallest, exact and largest allowed scale byte of each block.

    If a block may be all zeros, the scale byte of zero blocks is allowed, too.
    """
    low, middle, high = (point.unflatten(-1, (-1, fmt.block_size)) for point in points)
    least = torch.minimum(low.abs(), high.abs()).masked_fill(low * high <= 0, 0)
    amax = [part.amax(-1) for part in (least, middle.abs(), torch.maximum(low.abs(), high.abs()))]
    smallest, exact, largest = (block_scale(a, fmt, rule).int() for a in amax)
    zero = (amax[0] == 0) & (amax[2] > 0)
    as_zero = zero & (scale == E8M0_BIAS)
    return [smallest.masked_fill(zero, 0), exact, torch.where(as_zero, E8M0_BIAS, largest)]
