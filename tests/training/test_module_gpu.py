"""A whole training block on a GPU: no synchronisation, CUDA graphs, activation and combine."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import mxpert
from mxpert.core.problem import Activation
from mxpert.testing.numerics import assert_close_relative, is_exact, sqnr_db
from mxpert.training import MXFP8Recipe, MXMoE, grouped_linear
from mxpert.training.rows.op import (
    activate_rows,
    activate_rows_backward,
    combine_rows,
    combine_rows_backward,
)

ACTIVATIONS = (mxpert.SiLU(), mxpert.SwiGLU(limit=1.0), mxpert.ClampedSiLU(1.0), mxpert.SiTUv2())
RECIPES = {
    "mxfp8": MXFP8Recipe(),
    "hybrid": MXFP8Recipe.hybrid(),
    "high-precision": MXFP8Recipe(high_precision_wgrad=True),
    "bf16": MXFP8Recipe(enabled=False),
}
ROUNDING = 2.0**-8 + 32 * 2.0**-24
"""Half a unit of bfloat16, plus the float32 roundings before it."""

recipes = pytest.mark.parametrize("name", RECIPES)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("width", [2048, 2880, 733])
def test_activation_rows(activation: Activation, width: int, device: torch.device) -> None:
    gate_up = 2 * torch.randn(1003, 2 * width, device=device, dtype=torch.bfloat16)
    grad = torch.randn(1003, width, device=device, dtype=torch.bfloat16)
    for found, wanted in (
        (
            activate_rows(gate_up, activation),
            _reference(activate_rows, gate_up.double(), activation),
        ),
        (
            activate_rows_backward(grad, gate_up, activation),
            _reference(activate_rows_backward, grad.double(), gate_up.double(), activation),
        ),
    ):
        assert_close_relative(found, wanted, ROUNDING, activation.name)


@pytest.mark.parametrize("tokens, top_k, width", [(777, 8, 7168), (1000, 4, 2880), (65, 1, 733)])
def test_combined_rows(tokens: int, top_k: int, width: int, device: torch.device) -> None:
    rows = torch.randn(tokens * top_k, width, device=device, dtype=torch.bfloat16)
    grad = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    ids = torch.randperm(len(rows), device=device).view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    wanted = _reference(combine_rows, rows.double(), ids, weights.double())
    assert_close_relative(combine_rows(rows, ids, weights), wanted, ROUNDING, "combine")
    found = combine_rows_backward(grad, rows, ids, weights)
    wanted = _reference(combine_rows_backward, grad.double(), rows.double(), ids, weights.double())
    assert_close_relative(found[0], wanted[0], ROUNDING, "rows")
    # a dot product of `width` terms in float32
    assert_close_relative(found[1], wanted[1], math.sqrt(width) * 2.0**-20, "weights")


def _reference(op: object, *arguments: object) -> object:
    with mxpert.override(backend="reference"):
        return op(*arguments)


def block(name: str, device: torch.device) -> MXMoE:
    torch.manual_seed(0)
    return MXMoE(512, 256, 16, 4, recipe=RECIPES[name], bias=True, device=device)


def step(moe: MXMoE, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = moe(x)
    return (
        y,
        *torch.autograd.grad(
            (y, moe.aux_loss), (x, *moe.parameters()), (grad, torch.ones_like(moe.aux_loss))
        ),
    )


def operands(device: torch.device, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    x, grad = torch.randn(2, tokens, 512, device=device).bfloat16()
    return x.requires_grad_(), grad


@recipes
def test_a_step_never_waits_for_the_device(name: str, device: torch.device) -> None:
    moe, (x, grad) = block(name, device), operands(device)
    step(moe, x, grad)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(moe, x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@recipes
def test_a_captured_step_follows_the_routing(name: str, device: torch.device) -> None:
    """One graph of forward and backward is replayed on tokens with other experts."""
    moe, (x, grad) = block(name, device), operands(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(moe, x, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(moe, x, grad)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.normal_().add_(2 * torch.randn(512, device=device))  # a common part skews the routing
            grad.normal_()
        graph.replay()
        found = [value.clone() for value in captured]
        for index, (replayed, eager) in enumerate(zip(found, step(moe, x, grad), strict=True)):
            assert is_exact(replayed, eager), index


@recipes
def test_a_step_repeats_bit_for_bit(name: str, device: torch.device) -> None:
    moe, (x, grad) = block(name, device), operands(device)
    first = step(moe, x, grad)
    for _ in range(10):
        assert all(map(is_exact, step(moe, x, grad), first))


@pytest.mark.parametrize("name, floor", [("mxfp8", 28.0), ("hybrid", 20.0)])
def test_snr_of_the_three_gemms(name: str, floor: float, device: torch.device) -> None:
    """The contract's SQNR floors, against unquantised operands in float64."""
    torch.manual_seed(1)
    sizes = [700, 0, 320, 1027]
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
    x = torch.randn(sum(sizes), 2048, device=device).bfloat16().requires_grad_()
    weight = torch.randn(4, 1024, 2048, device=device).bfloat16().requires_grad_()
    grad = torch.randn(sum(sizes), 1024, device=device).bfloat16()
    y = grouped_linear(x, weight, offsets, recipe=RECIPES[name])
    dx, dweight = torch.autograd.grad(y, (x, weight), grad)
    ends = offsets.tolist()
    with torch.no_grad():
        for group, (start, end) in enumerate(itertools.pairwise(ends)):
            if start == end:
                assert not dweight[group].any()
                continue
            a, b, g = x[start:end].double(), weight[group].double(), grad[start:end].double()
            assert sqnr_db(y[start:end], a @ b.T) >= floor
            assert sqnr_db(dx[start:end], g @ b) >= floor
            assert sqnr_db(dweight[group], g.T @ a) >= floor
