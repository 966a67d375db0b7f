"""fused_moe on a GPU with a router's own dtypes and into a given output: same bits, one graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.layers import run_layer

pytestmark = pytest.mark.usefixtures("nan_scratch")

SHAPE = MoEShape(
    hidden_size=768,
    intermediate_size=512,
    num_experts=16,
    top_k=4,
    activation=mxpert.SwiGLU(),
    has_bias=True,
)
TOKENS = pytest.mark.parametrize("num_tokens", [1, 8, 64, 700])
FORMATS = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
LAYOUTS = pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "row-major"])
"""On a Hopper GPU, prepared weights go to its own kernels and the others to the portable ones."""


def routed(num_tokens: int, device: torch.device, is_prepared: bool, seed: int = 0) -> MoEInputs:
    """A problem whose routing weights are exact in bfloat16."""
    inputs = random_moe_problem(SHAPE, num_tokens, device=device, seed=seed)
    weights = inputs.weights.prepare(device=device) if is_prepared else inputs.weights
    return replace(
        inputs, weights=weights, topk_weights=inputs.topk_weights.bfloat16().float().contiguous()
    )


def as_router(inputs: MoEInputs) -> MoEInputs:
    """The same routing as a torch router has it: int64 ids, bfloat16 weights."""
    return replace(
        inputs, topk_weights=inputs.topk_weights.bfloat16(), topk_ids=inputs.topk_ids.long()
    )


def run(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    return run_layer(inputs, activation_format=a_format, **options)


@LAYOUTS
@FORMATS
@TOKENS
def test_the_routers_dtypes_change_no_bit(
    num_tokens: int, a_format: str, is_prepared: bool, device: torch.device
) -> None:
    inputs = routed(num_tokens, device, is_prepared)
    want = run(inputs, a_format)
    for _ in range(4):  # from the third call on, a recording is replayed
        assert_exact(run(as_router(inputs), a_format), want, "int64 ids, bfloat16 weights")


@LAYOUTS
@FORMATS
@TOKENS
def test_out_gets_the_same_bits(
    num_tokens: int, a_format: str, is_prepared: bool, device: torch.device
) -> None:
    inputs = routed(num_tokens, device, is_prepared)
    want = run(inputs, a_format)
    for _ in range(4):  # ever another output, so that a replay has to follow the argument
        out = torch.full_like(want, torch.nan)
        assert run(inputs, a_format, out=out) is out
        assert_exact(out, want, "out")
    x = inputs.x.clone()
    run(replace(inputs, x=x), a_format, out=x)
    assert_exact(x, want, "x as out")


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@LAYOUTS
def test_out_in_other_dtypes(
    is_prepared: bool, out_dtype: torch.dtype, device: torch.device
) -> None:
    inputs = routed(33, device, is_prepared)
    out = torch.full(inputs.x.shape, torch.nan, dtype=out_dtype, device=device)
    run(inputs, "bf16", out_dtype=out_dtype, out=out)
    assert_exact(out, run(inputs, "bf16", out_dtype=out_dtype), "out")


@LAYOUTS
@FORMATS
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_graph_writes_into_out(
    num_tokens: int, a_format: str, is_prepared: bool, device: torch.device
) -> None:
    """A graph is captured once, with int64 ids and a given output, and replayed with others."""
    first, second = (routed(num_tokens, device, is_prepared, seed) for seed in (0, 1))
    second = replace(second, weights=first.weights)
    static = as_router(first)
    static = replace(static, x=first.x.clone())
    out = torch.full_like(first.x, torch.nan)
    run(static, a_format, out=out)  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static, a_format, out=out)
    for inputs in (second, first):
        for name in ("x", "topk_ids", "topk_weights"):
            getattr(static, name).copy_(getattr(inputs, name))
        out.fill_(torch.nan)
        graph.replay()
        assert_exact(out, run(inputs, a_format), "replayed graph")
