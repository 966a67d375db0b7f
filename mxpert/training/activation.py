"""Gated activations for training: only gate and up are kept for backward, in their own dtype.

Plain autograd would keep every intermediate, in float32: six times as much for SiLU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..problem import Activation, ClampedSiLU, SiLU, SiTUv2, SwiGLU

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``act(gate, up)`` of CONCATENATED rows, computed in float32 (float64 for float64).

    Args:
        gate_up: [R, 2 F], gate in the first F columns, up in the others.
        activation: SiLU(), SwiGLU(), ClampedSiLU() or SiTUv2().

    Returns:
        [R, F] in the dtype of `gate_up`.

    Example:
        >>> import mxpert
        >>> gated_activation(torch.tensor([[0.0, 20.0, 3.0, 3.0]]), mxpert.SiLU())
        tensor([[ 0., 60.]])
    """
    result: torch.Tensor = _GatedActivation.apply(gate_up, activation)
    return result


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up)
        return _with_derivatives(activation, *_halves(gate_up))[0].to(gate_up.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate_up, = ctx.saved_tensors
        _, by_gate, by_up = _with_derivatives(ctx.activation, *_halves(gate_up))
        return torch.cat((grad * by_gate, grad * by_up), dim=-1).to(gate_up.dtype), None


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return gate, up


def _with_derivatives(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """Value, derivative by gate, derivative by up."""
    match activation:
        case SiLU():
            return _swish(gate, up, 1.0)
        case SwiGLU(alpha=alpha, limit=limit):
            value, by_gate, by_up = _swish(gate.clamp(max=limit), up.clamp(-limit, limit) + 1,
                                           alpha)
            return value, by_gate * (gate <= limit), by_up * (up.abs() <= limit)
        case ClampedSiLU(limit=limit):
            value, by_gate, by_up = _swish(gate.clamp(max=limit), up.clamp(-limit, limit), 1.0)
            return value, by_gate * (gate <= limit), by_up * (up.abs() <= limit)
        case SiTUv2(beta=beta, beta_up=beta_up):
            t, s = torch.tanh(gate / beta), torch.sigmoid(gate)
            gated, u = beta * t * s, torch.tanh(up / beta_up)
            by_gate = (1 - t * t) * s + gated * (1 - s)
            return gated * beta_up * u, by_gate * beta_up * u, gated * (1 - u * u)


def _swish(gate: torch.Tensor, factor: torch.Tensor, alpha: float) -> Triple:
    """``g σ(αg) · factor``, its derivatives by g and by factor."""
    s = torch.sigmoid(alpha * gate)
    return gate * s * factor, s * (1 + alpha * gate * (1 - s)) * factor, gate * s
