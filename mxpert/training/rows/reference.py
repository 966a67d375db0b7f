"""Reference activation and combine of training, forward and backward.

They compute in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import math

import torch

from ...core.kernel import ReferenceKernel
from ...core.problem import (
    GELU,
    Activation,
    ClampedSiLU,
    Config,
    Op,
    RowsProblem,
    SiLU,
    SiTUv2,
    SwiGLU,
)
from .inputs import ActivateBackwardInputs, ActivateInputs, CombineBackwardInputs, CombineInputs

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ActivateRows(ReferenceKernel):
    """``act(gate, up)`` of rows [R, 2F] that hold gate, then up."""

    op = Op.ACTIVATE_ROWS

    def launch(self, problem: RowsProblem, config: Config, inputs: ActivateInputs) -> torch.Tensor:
        gate_up = inputs.gate_up
        return with_derivatives(problem.activation, *_halves(gate_up))[0].to(gate_up.dtype)


class ActivateRowsBackward(ReferenceKernel):
    """Gradients of gate and up, as rows [R, 2F]."""

    op = Op.ACTIVATE_ROWS_BACKWARD

    def launch(
        self, problem: RowsProblem, config: Config, inputs: ActivateBackwardInputs
    ) -> torch.Tensor:
        grad, gate_up = inputs.grad, inputs.gate_up
        _, by_gate, by_up = with_derivatives(problem.activation, *_halves(gate_up))
        return torch.cat((grad * by_gate, grad * by_up), dim=-1).to(gate_up.dtype)


class CombineRows(ReferenceKernel):
    """Weighted sum of the rows of each token, in slot order; ids beyond the rows add nothing."""

    op = Op.COMBINE_ROWS

    def launch(self, problem: RowsProblem, config: Config, inputs: CombineInputs) -> torch.Tensor:
        rows, row_ids, weights = inputs.rows, inputs.row_ids, inputs.weights
        slots = _wide(_slots(rows, row_ids))  # [T, k, H]
        if weights is not None:
            slots = slots * weights[..., None]
        return slots.sum(dim=1).to(inputs.out_dtype)


class CombineRowsBackward(ReferenceKernel):
    """Gradients of the rows and of the routing weights."""

    op = Op.COMBINE_ROWS_BACKWARD

    def launch(
        self, problem: RowsProblem, config: Config, inputs: CombineBackwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, row_ids, weights = inputs.rows, inputs.row_ids, inputs.weights
        grad = _wide(inputs.grad)[:, None]  # [T, 1, H]
        by_slot = (weights[..., None] * grad).to(rows.dtype)  # [T, k, H]
        present = row_ids < rows.shape[0]
        by_row = torch.empty_like(rows)
        by_row[row_ids[present]] = by_slot[present]
        by_weight = (grad * _wide(_slots(rows, row_ids))).sum(dim=-1)
        return by_row, by_weight.masked_fill(~present, 0)


def _slots(rows: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """The row of each (token, slot) pair, zeros for ids beyond the rows: [T, k, H]."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return padded[row_ids.clamp(max=rows.shape[0])]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return gate, up


def with_derivatives(activation: Activation | None, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """Value of the activation, its derivative by gate, its derivative by up."""
    match activation:
        case SiLU():
            return _swish(gate, up, 1.0)
        case SwiGLU(alpha=alpha, limit=limit, beta=beta):
            value, by_gate, by_up = _swish(
                gate.clamp(max=limit), up.clamp(-limit, limit) + beta, alpha
            )
            return value, by_gate * (gate <= limit), by_up * (up.abs() <= limit)
        case ClampedSiLU(limit=limit):
            value, by_gate, by_up = _swish(gate.clamp(max=limit), up.clamp(-limit, limit), 1.0)
            return value, by_gate * (gate <= limit), by_up * (up.abs() <= limit)
        case SiTUv2(beta=beta, beta_up=beta_up):
            t, s = torch.tanh(gate / beta), torch.sigmoid(gate)
            gated, u = beta * t * s, torch.tanh(up / beta_up)
            by_gate = (1 - t * t) * s + gated * (1 - s)
            return gated * beta_up * u, by_gate * beta_up * u, gated * (1 - u * u)
        case GELU():
            value, slope = _gelu(gate, activation.approximate)
            return value * up, slope * up, value
    raise ValueError(f"with_derivatives: activation — need one of mxpert's, got {activation!r}")


def _gelu(gate: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``gelu(g)`` and its derivative."""
    value = torch.nn.functional.gelu(gate, approximate=approximate)
    if approximate == "none":
        density = torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
        return value, 0.5 * (1 + torch.erf(gate / math.sqrt(2))) + gate * density
    x = gate.clamp(-32, 32)  # beyond it the slope is 0 or 1, and squares may overflow
    factor = math.sqrt(8 / math.pi)
    s = torch.sigmoid(factor * (x + 0.044715 * x**3))
    return value, s + x * s * (1 - s) * factor * (1 + 3 * 0.044715 * x * x)


def _swish(gate: torch.Tensor, factor: torch.Tensor, alpha: float) -> Triple:
    """``g σ(αg) · factor`` and its derivatives by g and by factor."""
    s = torch.sigmoid(alpha * gate)
    return gate * s * factor, s * (1 + alpha * gate * (1 - s)) * factor, gate * s


ACTIVATE_ROWS = ActivateRows()
ACTIVATE_ROWS_BACKWARD = ActivateRowsBackward()
COMBINE_ROWS = CombineRows()
COMBINE_ROWS_BACKWARD = CombineRowsBackward()
