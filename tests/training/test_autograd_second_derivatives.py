"""A second derivative through any differentiable op is an error that names the op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mxpert
from mxpert.core.ambient import Context
from mxpert.core.gradient import differentiable_once, keep_graph
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation
from mxpert.training.permute import CombineRows, PermuteRows, sort_by_expert
from tests.integrations.families import build

OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)
PLAIN = MXFP8Recipe(enabled=False)
WEIGHT = torch.randn(2, 64, 32)
PAIRS = sort_by_expert(torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), 3)
LAYER = MXGroupedLinear(2, 32, 64)
MOE = MXMoE(32, 32, 4, 2)
ALONE = torch.nn.Linear(2, 2)
Op = Callable[[torch.Tensor], torch.Tensor]


def experts() -> torch.nn.Module:
    """The trainable experts of a converted model of Transformers."""
    model = mxpert.convert(build("mixtral"), recipe=MXFP8Recipe())
    return next(each for each in model.modules() if type(each).__name__ == "TrainableExperts")


def combine(rows: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = CombineRows.apply(rows, torch.full((4, 2), 0.5), *PAIRS[:2])
    return y


def permute(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = PermuteRows.apply(x, *PAIRS[:2], 2)
    return y


OPS: dict[str, tuple[str, tuple[int, ...], Op]] = {
    "grouped_linear": ("grouped_linear", (8, 32), lambda x: grouped_linear(x, WEIGHT, OFFSETS)),
    "grouped_linear, plain": (
        "grouped_linear",
        (8, 32),
        lambda x: grouped_linear(x, WEIGHT, OFFSETS, recipe=PLAIN),
    ),
    "grouped_linear, quantised": (
        "grouped_linear",
        (8, 32),
        lambda x: grouped_linear(x, mxpert.quantize(WEIGHT, "mxfp8", scale_span="square"), OFFSETS),
    ),
    "MXGroupedLinear": ("grouped_linear", (8, 32), lambda x: LAYER(x, OFFSETS)),
    "grouped_mm": (
        "grouped_linear",
        (8, 32),
        lambda x: grouped_mm(x, WEIGHT.mT.to(x.dtype), offs=OFFSETS[1:]),
    ),
    "grouped_mm 2D": (
        "grouped_mm",
        (8, 32),
        lambda x: grouped_mm(x.T, x.detach(), offs=OFFSETS[1:]),
    ),
    "MXMoE": (r"(MXMoE|permute_rows|combine_rows)", (4, 32), MOE),
    "gated_activation": ("gated_activation", (4, 64), lambda x: gated_activation(x, mxpert.SiLU())),
}


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_raises_by_name(name: str) -> None:
    op, shape, function = OPS[name]
    x = torch.randn(shape, requires_grad=True)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    assert_exact(first.detach(), plain, "the first derivative")
    assert first.requires_grad  # or a penalty on it would silently count as nothing
    with pytest.raises(mxpert.UnsupportedError, match=rf"^{op}: second derivative — need a first"):
        first.square().sum().backward()


@pytest.mark.parametrize("name", ["grouped_linear, plain", "gated_activation"])
def test_gradgradcheck_raises(name: str) -> None:
    op, shape, function = OPS[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with pytest.raises(mxpert.UnsupportedError, match=f"^{op}: second derivative"):
        torch.autograd.gradgradcheck(function, (x,))


def test_weights_and_converted_models_raise_too() -> None:
    weight = WEIGHT.clone().requires_grad_()
    y = grouped_linear(torch.randn(8, 32), weight, OFFSETS)
    (first,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
    with pytest.raises(mxpert.UnsupportedError, match=r"^grouped_linear: second derivative"):
        first.sum().backward()
    module = experts()
    x = torch.randn(4, module.source.hidden_size, requires_grad=True)
    ids, weights = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    (first,) = torch.autograd.grad(module(x, ids, weights).sum(), x, create_graph=True)
    with pytest.raises(mxpert.UnsupportedError, match="second derivative"):
        first.sum().backward()


def test_a_gradient_beyond_the_op_raises_too() -> None:
    """x is no leaf: without an error the term 2 z · d²y/dx² would be missing."""
    z = torch.randn(8, 32, requires_grad=True)
    y = grouped_linear(z * z, WEIGHT, OFFSETS)
    (first,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    for options in ({}, {"allow_unused": True}):
        with pytest.raises(mxpert.UnsupportedError, match=r"^grouped_linear: second derivative"):
            torch.autograd.grad(first.sum(), z, retain_graph=True, **options)


class Doubled(torch.autograd.Function):
    """2 x, with a backward that torch would not differentiate by itself."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        keep_graph(ctx, x)
        return 2 * x

    @staticmethod
    @differentiable_once("doubled")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (2 * grad,)


def test_the_decorator_leaves_first_derivatives_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert not first.requires_grad
    (first,) = torch.autograd.grad(Doubled.apply(x).sum(), x, create_graph=True)
    assert first.tolist() == [2.0] * 3
    with pytest.raises(mxpert.UnsupportedError, match=r"^doubled: second derivative"):
        first.sum().backward()
