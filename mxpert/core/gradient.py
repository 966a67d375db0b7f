"""Passes that no op has, as errors: backward of inference ops, second derivatives of the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
            text = message(op, "backward", "an inference pass", "a gradient", remedy)
            guarded: torch.Tensor = _WithoutBackward.apply(text, result, each)
            return guarded
    return result


Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def apply(function: type[torch.autograd.Function], *arguments: object) -> Any:  # what it returns
    """Return ``function.apply(*arguments)``, without torch's preparations where it needs none.

    Those are for `setup_context`, which `function` must not have, and for the transforms of
    torch.func and the tensors that outlive them.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    unwrap = torch._C._functorch.unwrap_if_dead
    alive = [unwrap(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    return super(torch.autograd.Function, function).apply(*alive)  # type: ignore[misc]  # not typed


def keep_graph(ctx: Context, *inputs: torch.Tensor | None) -> None:
    """Let `differentiable_once` find the graph of these inputs of ``forward``, not their memory."""
    if any(ctx.needs_input_grad) and not torch.compiler.is_compiling():
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # takes a fifth of the time of enable_grad
        try:
            ctx.anchor = apply(_Anchor, *inputs)
        finally:
            torch._C._set_grad_enabled(enabled)


def differentiable_once(op: str) -> Callable[[Backward], Backward]:
    """Decorate ``backward`` of an autograd function: differentiating its results raises.

    With ``create_graph=True`` torch records what ``backward`` computes. Kernels are not recorded:
    the second derivative would lack their part, without a word. Unlike torch's
    ``once_differentiable`` this also holds where the incoming gradient is a constant, as that of
    ``y.sum()`` is, and for gradients of the inputs alone, as gradgradcheck asks for them.

    Args:
        op: what the error starts with. Its ``forward`` calls `keep_graph`.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            need, remedy = "a first derivative", "call backward without create_graph=True"
            text = message(op, "second derivative", need, "a gradient of a gradient", remedy)
            sources = ctx.anchor, *grads
            return tuple(
                each if each is None else _WithoutBackward.apply(text, each, *sources)
                for each in results
            )

        return run

    return decorate


class _Anchor(torch.autograd.Function):
    """An empty tensor in the graph of its inputs."""

    @staticmethod
    def forward(ctx: Context, *inputs: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[None, ...]:
        raise AssertionError("what stands between it and a gradient raises before")


class _WithoutBackward(torch.autograd.Function):
    """Pass a result on; asking for its gradient is an error, not a silent zero."""

    @staticmethod
    def forward(
        ctx: Context, text: str, result: torch.Tensor, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.text = text
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[None, ...]:
        raise UnsupportedError(ctx.text)
