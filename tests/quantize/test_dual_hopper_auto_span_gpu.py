"""ScaleSpan.AUTO on Hopper: the device chooses FP8 or exact products, also in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import ScaleSpan
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe, grouped_linear

pytestmark = pytest.mark.usefixtures("hopper")

SIZES = (200, 0, 63, 257)
WIDTH, OUT = 416, 288
NARROW, WIDE = 2.0**-9, 2.0**-10
"""Size of a block next to blocks of size 1: under one scale per row NARROW is exact, WIDE not."""


def data(device: torch.device, small: float) -> tuple[torch.Tensor, ...]:
    """x with one small block in rows and in columns, weight, offsets, gradient."""
    generator = torch.Generator(device).manual_seed(3)
    rows = sum(SIZES) + 11
    x, weight, grad = (
        torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(1, 1.5, generator=generator)
        for size in ((rows, WIDTH), (len(SIZES), OUT, WIDTH), (rows, OUT))
    )
    x[200:232, 64:96] *= small  # a block of 32 rows, and one of each of 32 columns
    x[sum(SIZES) :] = torch.nan
    offsets = torch.tensor([0, *SIZES], device=device).cumsum(0).int()
    return x, weight, offsets, grad


@pytest.mark.parametrize("small", [NARROW, WIDE], ids=["narrow", "wide"])
def test_both_copies_equal_the_reference(small: float, device: torch.device) -> None:
    x, weight, offsets, _ = data(device, small)
    for tensor, groups in ((x, offsets), (weight, None)):
        actual = mxpert.quantize_dual(tensor, group_offsets=groups, scale_span=ScaleSpan.AUTO)
        with mxpert.override(backend="reference"):
            expected = mxpert.quantize_dual(tensor, group_offsets=groups, scale_span=ScaleSpan.AUTO)
        for have, want in zip(actual, expected, strict=True):
            assert_exact(have.qdata, want.qdata, "codes")
            assert_exact(have.scale, want.scale, "scales")
            assert_exact(have.wide_blocks, want.wide_blocks, "wide blocks")


def products(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    span: ScaleSpan,
) -> tuple[torch.Tensor, ...]:
    """Results of forward, dgrad, wgrad, and wgrad added to ones."""
    x_row, x_col = mxpert.quantize_dual(x, group_offsets=offsets, scale_span=span)
    w_row, w_col = mxpert.quantize_dual(weight, scale_span=span)
    g_row, g_col = mxpert.quantize_dual(grad, group_offsets=offsets, scale_span=span)
    total = torch.ones(weight.shape, device=x.device)
    return (
        mxpert.grouped_gemm(x_row, w_row, offsets),
        mxpert.grouped_gemm(g_row, w_col, offsets),
        mxpert.grouped_wgrad(g_col, x_col, offsets),
        mxpert.grouped_wgrad(g_col, x_col, offsets, accumulate_into=total),
    )


def test_narrow_data_run_as_rows(device: torch.device) -> None:
    tensors = data(device, NARROW)
    for have, want in zip(
        products(*tensors, ScaleSpan.AUTO), products(*tensors, ScaleSpan.ROW), strict=True
    ):
        assert_exact(have, want, "rows")


def test_wide_data_run_exactly(device: torch.device) -> None:
    """Products with x equal those of 1×32 scales; dgrad does not read x."""
    tensors = data(device, WIDE)
    auto = products(*tensors, ScaleSpan.AUTO)
    exact = products(*tensors, ScaleSpan.BLOCK)
    rows = products(*tensors, ScaleSpan.ROW)
    for index, like in enumerate((exact, rows, exact, exact)):
        assert_exact(auto[index], like[index], f"product {index}")


def test_one_graph_serves_both(device: torch.device) -> None:
    narrow, wide = data(device, NARROW), data(device, WIDE)
    inputs = [tensor.clone() for tensor in narrow]
    recipe = MXFP8Recipe(scale_span=ScaleSpan.AUTO)

    def step() -> torch.Tensor:
        return grouped_linear(inputs[0], inputs[1], inputs[2], recipe=recipe)

    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensors in (wide, narrow, wide):
        for old, new in zip(inputs, tensors, strict=True):
            old.copy_(new)
        graph.replay()
        assert_exact(captured, step(), "replay")


def test_training_on_the_default_recipe(device: torch.device) -> None:
    """Gradients on wide data, where ScaleSpan.ROW would lose small blocks of an operand."""
    generator = torch.Generator(device).manual_seed(5)
    rows, offsets = 256, torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    shift = torch.randint(-10, 11, (WIDTH // 32,), generator=generator, device=device)
    scale = torch.exp2(shift.float()).repeat_interleave(32)
    x = torch.randn(rows, WIDTH, generator=generator, device=device) * scale
    weight = torch.randn(2, OUT, WIDTH, generator=generator, device=device) / scale
    x, weight = x.bfloat16(), weight.bfloat16()
    expected = torch.cat(
        [x[a:b].double() @ weight[g].double().T for g, (a, b) in enumerate(((0, 100), (100, 256)))]
    )

    def snr(recipe: MXFP8Recipe) -> float:
        error = grouped_linear(x, weight, offsets, recipe=recipe).double() - expected
        return float(20 * torch.log10(expected.norm() / error.norm()))

    assert snr(MXFP8Recipe()) > 28
    assert snr(MXFP8Recipe(scale_span=ScaleSpan.ROW)) < 20
