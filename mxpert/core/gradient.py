"""Results of inference ops in a graph of gradients: a backward pass through them is an error."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError, message
from .ambient import Context

TRAIN = "fused_moe is for inference; train with mxpert.training.MXMoE or mxpert.convert(recipe=…)"


def without_backward(
    op: str, result: torch.Tensor, *inputs: object, remedy: str = TRAIN
) -> torch.Tensor:
    """Return `result`; if one of `inputs` requires a gradient, a backward pass through it raises.

    A result that is cut from the graph would lose the gradient silently where it is added to
    another one, and end in torch's "element 0 of tensors does not require grad" elsewhere.

    Args:
        op: what the error starts with.
        result: of an op that has no backward pass.
        inputs: the op's inputs; what is no tensor has no gradient.
        remedy: what the error advises.
    """
    if not torch.is_grad_enabled():
        return result
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
                return result  # tracers and functorch's transforms take no such function
            guarded: torch.Tensor = _WithoutBackward.apply(result, each, op, remedy)
            return guarded
    return result


class _WithoutBackward(torch.autograd.Function):
    """Pass a result on; asking for its gradient is an error, not a silent zero."""

    @staticmethod
    def forward(
        ctx: Context, result: torch.Tensor, source: torch.Tensor, op: str, remedy: str
    ) -> torch.Tensor:
        ctx.op, ctx.remedy = op, remedy
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[None, ...]:
        raise UnsupportedError(
            message(ctx.op, "backward", "an inference pass", "a gradient", ctx.remedy)
        )
