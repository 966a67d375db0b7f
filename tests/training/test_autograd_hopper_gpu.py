"""grouped_linear on the Hopper backend: noise, gradients, and the compiled function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import mxpert
from mxpert.testing.numerics import (
    assert_close_relative,
    is_exact,
    rounding_rms,
    sampling_margin,
    sqnr_db,
)
from mxpert.training import MXFP8Recipe, grouped_linear
from tests.grouped.hopper_problems import FLOAT64, adder_error, offsets_of

pytestmark = pytest.mark.usefixtures("hopper")


RECIPES = {"e4m3": (MXFP8Recipe(), 28.0), "hybrid": (MXFP8Recipe.hybrid(), 20.0)}
STEP_SIZES = [700, 0, 320, 1027]


def leaves(device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, weight, the output's gradient, offsets."""
    generator = torch.Generator(device).manual_seed(0)
    rows = sum(STEP_SIZES)
    x, weight, grad = (
        torch.randn(shape, generator=generator, device=device).bfloat16()
        for shape in ((rows, 2048), (len(STEP_SIZES), 1024, 2048), (rows, 1024))
    )
    return x.requires_grad_(), weight.requires_grad_(), grad, offsets_of(STEP_SIZES, device)


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    recipe: MXFP8Recipe,
    linear: Any = grouped_linear,
) -> tuple[torch.Tensor, ...]:
    """Output and both gradients."""
    y = linear(x, weight, offsets, recipe=recipe)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), grad))


@pytest.mark.parametrize("name", RECIPES)
def test_snr_against_unquantised_operands(name: str, device: torch.device) -> None:
    (x, weight, grad, offsets), (recipe, floor) = leaves(device), RECIPES[name]
    with mxpert.override(backend="hopper"):
        y, dx, dweight = step(x, weight, grad, offsets, recipe)
    with torch.no_grad():
        for group, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if start == end:
                assert not dweight[group].any()
                continue
            a, b, g = x[start:end].double(), weight[group].double(), grad[start:end].double()
            for what, found, wanted in (
                ("y", y[start:end], a @ b.T),
                ("dx", dx[start:end], g @ b),
                ("dweight", dweight[group], g.T @ a),
            ):
                assert floor <= sqnr_db(found, wanted) < 40, what  # 55 dB were it not quantised


@pytest.mark.parametrize("name", RECIPES)
def test_autograd_equals_the_reference(name: str, device: torch.device) -> None:
    """Both multiply the same codes; they differ by one rounding each, and by the adder."""
    (x, weight, grad, offsets), recipe = leaves(device), RECIPES[name][0]
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = step(x, weight, grad, offsets, recipe)
    with mxpert.override(backend="hopper"):
        actual = step(x, weight, grad, offsets, recipe)
    for what, depth, ours, theirs in zip(
        ("y", "dx", "dweight"), (2048, 1024, 1056), actual, expected, strict=True
    ):
        roundings = math.sqrt(2) * rounding_rms(8) * sampling_margin(ours.numel())
        assert_close_relative(ours, theirs, math.hypot(roundings, adder_error(depth)), what)


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_equals_eager(name: str, device: torch.device) -> None:
    (x, weight, grad, offsets), recipe = leaves(device), RECIPES[name][0]
    with mxpert.override(backend="hopper"):
        compiled = step(
            x, weight, grad, offsets, recipe, torch.compile(grouped_linear, fullgraph=True)
        )
        for index, (ours, theirs) in enumerate(
            zip(compiled, step(x, weight, grad, offsets, recipe), strict=True)
        ):
            assert is_exact(ours, theirs), index
