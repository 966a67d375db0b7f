"""The gate of peers that hold our weights, in float64 on what they multiply.

A peer that fuses its steps is compared with our own truth of its activations, as a whole layer. One
that shows its steps is compared step by step, each on what the step before gave: then no tolerance
has to allow for codes that flip on the way. e4m3 activations have a float32 scale for each token or
for each span of values. Peers round both products to bfloat16, and quantise the activation's
float32 output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import mxpert
from benchmarks.moe.cells import Cell, Inputs
from benchmarks.moe.ours import ACTIVATION, Call, Truth
from mxpert.cli.measure import GateError, error_gate, intermediate_sizes
from mxpert.formats.codec import decode, encode
from mxpert.formats.spec import E4M3
from mxpert.formats.token import FP8_TOKEN, quantize_token_rows
from mxpert.moe.reference import activate
from mxpert.moe.weights import MoEWeights
from mxpert.quantize.reference import WeightDecoder
from mxpert.testing.numerics import STAGE_GATE, UNPROMOTED_ERROR, relative_l2, requantisation_error

SPANS: dict[str, int | None] = {FP8_TOKEN: None, "fp8_group": 128}
"""e4m3 activations of peers → values that share a scale; None is a whole row."""

MULTIPLIER_ERROR = 2.0**-22
"""Of a value before it becomes a code: the rounded scale, its inverse and the product."""

SLICE = 128
"""Fewest values of the depth that a CTA of a peer sums alone. The sums of a tile's CTAs are rounded
to bfloat16 and added in bfloat16."""

FAST_EXPONENTIAL = 2.0**-20
"""Relative error of the activation: CUDA's __expf of up to 16, and four roundings."""


def as_encoded(rows: torch.Tensor, activation: str) -> torch.Tensor:
    """Rows [M, K] as a peer with such activations multiplies them, float64; the last span of a row
    may be short."""
    if activation not in SPANS:
        return rows.bfloat16().double()
    count, width = rows.shape
    groups = quantize_token_rows(_spans(rows, activation))
    return groups.dequantize(torch.float64).view(count, -1)[:, :width]


def _spans(rows: torch.Tensor, activation: str) -> torch.Tensor:
    """Rows [M, K] in float32, a line for each span; zeros fill up the last of a row."""
    span = SPANS[activation] or rows.shape[1]
    return torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % span)).view(-1, span)


def encoding_error(found: torch.Tensor, rows: torch.Tensor, activation: str) -> float:
    """Relative L2 between what a peer multiplies and the nearest right encodings of bfloat16 rows.

    A bfloat16 value often lies exactly between two codes. The peer's rounded scale then decides for
    one of them, and both are right: a value changed by `MULTIPLIER_ERROR` may become either.

    Args:
        found: float64 [M, K]. rows: bfloat16 [M, K].
    """
    if activation not in SPANS:
        return relative_l2(found, rows.double())
    spans, (count, width) = _spans(rows, activation), rows.shape
    scale = quantize_token_rows(spans).scale.double().unsqueeze(-1)
    exact = spans.double() / scale
    ends = [
        decode(encode((exact * stretch).float(), E4M3), E4M3, torch.float64) * scale
        for stretch in (1 - MULTIPLIER_ERROR, 1 + MULTIPLIER_ERROR)
    ]
    low, high = (
        each.view(count, -1)[:, :width] for each in (torch.minimum(*ends), torch.maximum(*ends))
    )
    return relative_l2(found, found.clamp(low, high))


def decoded(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What a peer's rows [M, K] stand for, float64.

    Args:
        rows: bfloat16, or e4m3 with `scale` float32 [M, spans].
    """
    values = rows.double()
    if scale is None:
        return values
    width, spans = rows.shape[1], scale.shape[1]
    span = width if spans == 1 else SPANS["fp8_group"]
    return values * scale.double().repeat_interleave(span or width, 1)[:, :width]


@dataclass(frozen=True)
class Steps:
    """A peer's way through a layer; row t · k + slot is of token t.

    Args:
        x: float64 [T, H], the rows that it multiplies. gate_up: bfloat16 [T · k, 2F], interleaved.
        h: float64 [T · k, F], the activations that it multiplies. y: bfloat16 [T, H].
    """

    x: torch.Tensor
    gate_up: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class PeerGate:
    """What a peer's layer of a cell has to be.

    Args:
        activation: the peer's. weights: those that it holds, as stored, with interleaved gate and
            up. inputs: the first batch.
    """

    cell: Cell
    activation: str
    weights: MoEWeights
    inputs: Inputs

    def checked(self, exact: Truth, variants: Sequence[dict[str, list[Call]]]) -> float:
        """The largest relative L2 of a peer's variants, of whole layers or of any step.

        Args:
            exact: of the peer's activations, or of bfloat16 ones if it shows its steps.
            variants: stage → calls, with "steps" where a peer shows them.

        Raises:
            GateError: a variant is wrong.
        """
        model, worst = self.cell.model, 0.0
        for calls in variants:
            if "steps" not in calls:
                errors = {"layer": exact.layer_error(calls["layer"][0]())}
                sizes = intermediate_sizes(exact.tokens.numel(), model.k, model.F)
                limits = {"layer": error_gate("layer", self.activation, sizes)}
            else:
                errors = self.step_errors(calls["steps"][0](), exact.tokens)
                limits = self.step_gates(exact.tokens.numel())
            for step, error in errors.items():
                if not error <= limits[step]:
                    raise GateError(
                        f"compare: {self.cell} {self.activation} {step} — need relative L2 to "
                        f"float64 of at most {limits[step]:.1e}, got {error:.3e}; nothing is "
                        "timed on a wrong result"
                    )
                worst = max(worst, error)
        return worst

    def step_errors(self, steps: Steps, tokens: torch.Tensor) -> dict[str, float]:
        """Relative L2 of each step of some tokens, on what the step before gave."""
        top_k, decoder = self.cell.model.k, WeightDecoder(torch.float64, tokens.device)
        slots = torch.arange(top_k, device=tokens.device)
        rows = (tokens[:, None] * top_k + slots).flatten()
        x, gate_up, h = steps.x[tokens], steps.gate_up[rows].double(), steps.h[rows]
        weights, ids = (
            each[tokens].flatten() for each in mxpert.route_topk(self.inputs.logits, top_k)
        )
        first, second = torch.empty_like(gate_up), h.new_empty(len(rows), x.shape[1])
        source = x.repeat_interleave(top_k, 0)
        for expert in ids.unique().tolist():
            hit = ids == expert
            first[hit] = source[hit] @ decoder(self.weights.gate_up_proj[expert]).T
            second[hit] = h[hit] @ decoder(self.weights.down_proj[expert]).T
        activated = activate(ACTIVATION, gate_up[:, ::2], gate_up[:, 1::2])
        y = (second * weights[:, None]).view(len(tokens), top_k, -1).sum(1)
        return {
            "x": encoding_error(x, self.inputs.x[tokens], self.activation),
            "gate_up_gemm": relative_l2(gate_up, first),
            "activation": relative_l2(h, as_encoded(activated, self.activation)),
            "down": relative_l2(steps.y[tokens], y),
        }

    def step_gates(self, num_tokens: int) -> dict[str, float]:
        """Largest errors of the steps of so many tokens.

        A product is rounded to bfloat16 once or, if several CTAs share its depth, with each of
        n parts and each sum of them. The sum of i of n equal parts has i / n of the product's
        square, so that the squared errors add up to 1 + (n + 1) / 2 times that of one rounding.
        The tensor cores drop bits of an e4m3 sum until it is promoted, after a span or never.
        "down" is rounded once more after the sum of the slots.
        """
        model = self.cell.model
        rows, encoded = num_tokens * model.k, self.activation in SPANS
        span = SPANS.get(self.activation) or max(model.H, model.F)

        def product(depth: int) -> float:
            parts = -(-depth // SLICE)
            rounded = STAGE_GATE * math.sqrt(1 + (parts + 1) / 2 if parts > 1 else 1)
            dropped = UNPROMOTED_ERROR * math.sqrt(min(span, depth)) if encoded else 0.0
            return math.hypot(rounded, dropped)

        form, row = FP8_TOKEN if encoded else None, min(span, model.F)
        return {
            "x": MULTIPLIER_ERROR if encoded else 0.0,
            "gate_up_gemm": product(model.H),
            "activation": requantisation_error(form, FAST_EXPONENTIAL, rows * model.F, row=row),
            "down": math.hypot(STAGE_GATE, product(model.F)),
        }
