"""Offsets that lead outside of the rows, or decrease: grouped_linear clamps them, bias included."""

from __future__ import annotations

import pytest
import torch

from mxpert.routing.plan import group_bounds
from mxpert.training import MXFP8Recipe, grouped_linear, grouped_mm

ROWS, GROUPS, IN, OUT = 8, 3, 32, 64
OFFSETS = {
    "beyond": [0, 3, 6, 50],
    "far_beyond": [0, 3, 1 << 30, 1 << 31],
    "all_beyond": [0, 20, 30, 40],
    "negative": [0, -5, 4, 8],
    "decreasing": [0, 7, 3, 8],
    "late_start": [2, 4, 6, 8],
}
RECIPES = {"mxfp8": MXFP8Recipe(), "plain": MXFP8Recipe(enabled=False)}

every_offset = pytest.mark.parametrize("name", OFFSETS)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def results(offsets: torch.Tensor, recipe: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of x, weight and bias."""
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, dtype=dtype, requires_grad=True)
        for size in ((ROWS, IN), (GROUPS, OUT, IN), (GROUPS, OUT))
    )
    y = grouped_linear(x, weight, offsets, bias=bias, recipe=RECIPES[recipe])
    y.backward(torch.randn(ROWS, OUT, dtype=dtype))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_recipe
@every_offset
def test_bad_offsets_are_those_of_group_bounds(name: str, recipe: str, dtype: torch.dtype) -> None:
    offsets = torch.tensor(OFFSETS[name])
    found = results(offsets, recipe, dtype)
    for have, want in zip(found, results(group_bounds(offsets, ROWS), recipe, dtype), strict=True):
        assert torch.equal(have, want)


@every_recipe
@every_offset
def test_the_bias_gradient_sums_each_groups_rows(name: str, recipe: str) -> None:
    offsets = torch.tensor(OFFSETS[name])
    y, _, _, dbias = results(offsets, recipe, torch.float32)
    torch.manual_seed(0)
    for size in ((ROWS, IN), (GROUPS, OUT, IN), (GROUPS, OUT)):
        torch.randn(*size)
    grad = torch.randn(ROWS, OUT)
    bounds = group_bounds(offsets, ROWS).tolist()
    for group in range(GROUPS):
        part = grad[bounds[group] : bounds[group + 1]]
        torch.testing.assert_close(dbias[group], part.sum(0))
    assert not y[: bounds[0]].any()
    assert not y[bounds[-1] :].any()


def test_decreasing_offsets_make_empty_groups() -> None:
    y, _, dweight, dbias = results(torch.tensor([0, 7, 3, 8]), "mxfp8", torch.float32)
    assert not dweight[1].any()
    assert not dbias[1].any()
    assert y[7].any(), "the last row is the third group's"


@every_recipe
def test_grouped_mm_clamps_its_ends(recipe: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, ROWS), torch.randn(ROWS, IN)
    found = grouped_mm(
        a, b, offs=torch.tensor([7, 3, 50], dtype=torch.int32), recipe=RECIPES[recipe]
    )
    want = grouped_mm(a, b, offs=torch.tensor([7, 7, 8], dtype=torch.int32), recipe=RECIPES[recipe])
    assert torch.equal(found, want)
    assert not found[1].any()
