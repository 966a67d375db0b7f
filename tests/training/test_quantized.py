"""Operands that were quantised before: the bits of a call that quantises, and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mxpert
from mxpert.testing.numerics import (
    accumulation_error,
    assert_close_relative,
    assert_exact,
    bf16_output_tolerance,
)
from mxpert.training import MXFP8Recipe, MXGroupedLinear, grouped_linear, grouped_mm
from tests.grouped import oracle

SIZES = [33, 0, 64, 7]
ROWS, IN, OUT = sum(SIZES) + 3, 64, 96
OFFSETS = torch.tensor([0, *SIZES]).cumsum(0).int()
RECIPES = {
    "e4m3": MXFP8Recipe(),
    "hybrid": MXFP8Recipe.hybrid(),
    "row": MXFP8Recipe(scale_span="row", scale_rule="floor"),
}


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    shapes = (ROWS, IN), (len(SIZES), OUT, IN), (len(SIZES), OUT), (ROWS, OUT)
    x, weight, bias, grad = (torch.randn(each, generator=generator) for each in shapes)
    return x.bfloat16(), weight, bias, grad.bfloat16()


def copies(recipe: MXFP8Recipe) -> tuple[Any, Any]:
    """Both copies of x and of the weight, by the options of the recipe."""
    x, weight, _, _ = operands()
    spans = recipe.spans(x.device)
    made: dict[str, Any] = {"scale_rule": recipe.scale_rule}
    return (
        mxpert.quantize_dual(x, group_offsets=OFFSETS, scale_span=spans.x, **made),
        mxpert.quantize_dual(weight, scale_span=spans.weight, **made),
    )


def step(x: Any, weight: Any, recipe: MXFP8Recipe) -> list[torch.Tensor]:
    """Result and gradients; of x and weight only where they are tensors."""
    _, _, bias, grad = operands()
    leaves = [each for each in (x, weight, bias) if isinstance(each, torch.Tensor)]
    for leaf in leaves:
        leaf.requires_grad_()
    y = grouped_linear(x, weight, OFFSETS, bias=bias, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("name", RECIPES)
def test_both_copies_give_the_bits_of_a_call_that_quantises(name: str) -> None:
    recipe = RECIPES[name]
    x, weight, _, _ = operands()
    y, dx, dweight, dbias = step(x, weight, recipe)
    given_x, given_weight = copies(recipe)
    for actual, expected in (
        (step(x.detach(), given_weight, recipe), [y, dx, dbias]),
        (step(given_x, weight.detach(), recipe), [y, dweight, dbias]),
        (step(given_x, given_weight, recipe), [y, dbias]),
    ):
        for one, other in zip(actual, expected, strict=True):
            assert_exact(one, other, name)


@pytest.mark.parametrize("name", RECIPES)
def test_one_copy_is_enough_without_gradients(name: str) -> None:
    recipe = RECIPES[name]
    x, weight, bias, _ = operands()
    (x_row, _), (weight_row, _) = copies(recipe)
    expected = grouped_linear(x, weight, OFFSETS, bias=bias, recipe=recipe)
    assert_exact(
        grouped_linear(x_row, weight_row, OFFSETS, bias=bias, recipe=recipe), expected, name
    )
    assert_exact(grouped_linear(x, weight_row, OFFSETS, bias=bias, recipe=recipe), expected, name)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_squares_against_float64(rule: Any) -> None:
    """Forward and dgrad from one quantisation of the weight; the judge multiplies its values."""
    x, weight, _, grad = operands()
    square = mxpert.quantize(weight, "mxfp8", scale_rule=rule, scale_span="square")
    x.requires_grad_()
    recipe = MXFP8Recipe(scale_span="block")
    y = grouped_linear(x, square, OFFSETS, recipe=recipe)
    (dx,) = torch.autograd.grad(y, x, grad)
    for actual, operand, trans_b in ((y.detach(), x.detach(), True), (dx, grad, False)):
        rows = mxpert.quantize(operand, "mxfp8")
        expected = oracle.forward(rows, square, oracle.Groups(tuple(SIZES), 3), trans_b=trans_b)
        used = expected[: int(OFFSETS[-1])].numel()
        bound = bf16_output_tolerance(used) + accumulation_error(rows.shape[1])
        assert_close_relative(actual, expected, bound, "y" if trans_b else "dx")
    transposed = mxpert.quantize(weight.mT, "mxfp8", scale_rule=rule, scale_span="square")
    grad_row = mxpert.quantize(grad, "mxfp8")
    assert_exact(dx, mxpert.grouped_gemm(grad_row, transposed, OFFSETS), "dgrad")


def test_a_pair_of_squares_is_not_turned_again() -> None:
    x, weight, _, grad = operands()
    square = mxpert.quantize(weight, "mxfp8", scale_span="square")
    x.requires_grad_()
    found = [
        torch.autograd.grad(grouped_linear(x, each, OFFSETS), x, grad)[0]
        for each in (square, (square, square.mT.with_axis(-1)))
    ]
    assert_exact(found[0], found[1], "dgrad")


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_mm(name: str) -> None:
    recipe = RECIPES[name]
    x, weight, _, grad = operands()
    ends = OFFSETS[1:]

    def run(a: Any, b: Any) -> list[torch.Tensor]:
        leaves = [each.requires_grad_() for each in (a, b) if isinstance(each, torch.Tensor)]
        out = grouped_mm(a, b, offs=ends, recipe=recipe)
        return [out.detach(), *(torch.autograd.grad(out, leaves, grad) if leaves else ())]

    b = weight.bfloat16().mT
    y, da, db = run(x.clone(), b.detach())
    spans = recipe.spans(x.device)
    made: dict[str, Any] = {"scale_rule": recipe.scale_rule}
    a_pair = mxpert.quantize_dual(x, group_offsets=OFFSETS, scale_span=spans.x, **made)
    b_pair = mxpert.quantize_dual(b.detach(), scale_span=spans.weight, **made)
    for actual, expected in (
        (run(x.clone(), b_pair), [y, da]),
        (run(a_pair, b.detach()), [y, db]),
        (run(a_pair, b_pair[1].mT), [y]),
    ):
        for one, other in zip(actual, expected, strict=True):
            assert_exact(one, other, name)
    if name != "row":  # a scale for each row of b, along K
        along = mxpert.quantize(b.detach(), "mxfp8", axis=-2, scale_rule=recipe.scale_rule)
        assert_exact(run(a_pair, along)[0], y, "axis -2")


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_quantises_its_weight_once_for_several_calls(name: str) -> None:
    x, _, _, grad = operands()
    layer = MXGroupedLinear(len(SIZES), IN, OUT, bias=True, recipe=RECIPES[name])
    found = []
    for weight in (None, layer.quantize_weight()):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, OFFSETS, weight=weight)
        y.backward(grad)
        found.append([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad])
    for one, other in zip(*found, strict=True):
        assert_exact(one, other, name)
    (x_pair, _) = copies(RECIPES[name])
    layer.zero_grad()
    layer(x_pair, OFFSETS).backward(grad)
    assert_exact(layer.weight.grad, found[0][2], name)


SQUARE = mxpert.quantize(operands()[1], "mxfp8", scale_span="square")


def grad_of_x(weight: Any, **options: Any) -> object:
    return grouped_linear(operands()[0].requires_grad_(), weight, OFFSETS, **options)


def grad_of_weight(x: Any, **options: Any) -> object:
    return grouped_linear(x, operands()[1].requires_grad_(), OFFSETS, **options)


ROW, PAIR = mxpert.quantize(operands()[1], "mxfp8"), copies(MXFP8Recipe())
OTHER = mxpert.quantize_dual(operands()[0], group_offsets=torch.tensor([0, ROWS]).int())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: grad_of_x(ROW),
            r"grouped_linear: weight — need squares or both copies, for the gradient of x, "
            r"got one copy with ScaleSpan.BLOCK; pass quantize",
        ),
        (lambda: grad_of_weight(PAIR[0][0]), r"x — need both copies, for the gradient of weight"),
        (
            lambda: grad_of_weight(PAIR[0], recipe=MXFP8Recipe(high_precision_wgrad=True)),
            "with high_precision_wgrad, got an MXTensor",
        ),
        (lambda: grad_of_weight(OTHER), r"x\[1\].shape — need \[64, "),
        (
            lambda: grad_of_x(SQUARE, recipe=MXFP8Recipe(enabled=False)),
            "weight — need a dense tensor with MXFP8Recipe",
        ),
        (lambda: grad_of_x(SQUARE.with_axis(-2)), "weight.axis — need -1, got -2"),
        (lambda: grad_of_x(SQUARE[0]), r"weight.shape — need \[G, N, K\]"),
        (lambda: grad_of_x(mxpert.quantize(operands()[1], "mxfp4")), "weight.format — need mxfp8"),
        (lambda: grad_of_x(SQUARE.to("meta")), "weight.device"),
        (lambda: grad_of_x((ROW, ROW)), r"weight\[1\].shape"),
        (
            lambda: grouped_mm(operands()[0], SQUARE, offs=OFFSETS[1:]),
            "grouped_mm: b.axis — need -2",
        ),
        (
            lambda: grouped_mm(PAIR[0][0], SQUARE[0], offs=OFFSETS[1:]),
            "2D × 2D operands are quantised by the call",
        ),
        (
            lambda: MXGroupedLinear(2, 32, 32, recipe=MXFP8Recipe(enabled=False)).quantize_weight(),
            "need MXFP8Recipe",
        ),
    ],
)
def test_bad_operands(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_no_weight_at_all() -> None:
    layer: Any = MXGroupedLinear(len(SIZES), IN, OUT)
    with pytest.raises(TypeError, match="MXGroupedLinear: weight — need an MXTensor"):
        layer(operands()[0], OFFSETS, weight=operands()[1])
