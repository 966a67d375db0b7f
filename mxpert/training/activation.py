"""Gated activations for training, which keep only gate and up for backward, in their own dtype.

Plain autograd would keep every intermediate, in float32: six times as much for SiLU. Forward and
backward are one pass over memory each.
"""

from __future__ import annotations

import torch

from ..core.ambient import Context, refuse_transforms
from ..core.gradient import apply, differentiable_once, keep_graph
from ..core.problem import Activation, ActivationLike, parse_gated_activation
from .rows.op import activate_rows, activate_rows_backward


def gated_activation(gate_up: torch.Tensor, activation: ActivationLike) -> torch.Tensor:
    """``act(gate, up)`` of CONCATENATED rows, computed in float32 (float64 for float64).

    Args:
        gate_up: [R, 2 F], gate in the first F columns, up in the others.
        activation: SiLU(), SwiGLU(), ClampedSiLU(), SiTUv2() or GELU(), or a name as `fused_moe`
            takes it. ReLU2() is refused.

    Returns:
        [R, F] in the dtype of `gate_up`.

    Example:
        >>> import mxpert
        >>> gated_activation(torch.tensor([[0.0, 20.0, 3.0, 3.0]]), mxpert.SiLU())
        tensor([[ 0., 60.]])
    """
    refuse_transforms("gated_activation", (gate_up,))
    activation = parse_gated_activation(activation, "gated_activation")
    result: torch.Tensor = apply(_GatedActivation, gate_up, activation)
    return result


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        keep_graph(ctx, gate_up)
        ctx.activation = activation
        ctx.save_for_backward(gate_up)
        return activate_rows(gate_up, activation)

    @staticmethod
    @differentiable_once("gated_activation")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return activate_rows_backward(grad, gate_up, ctx.activation), None
