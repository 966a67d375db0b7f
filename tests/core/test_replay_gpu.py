"""Replayed calls on a GPU return the same bits as ordinary calls, at any tensor addresses.

Free memory is filled with NaN before each call. Scratch that is read before it is written, or that
overlaps other buffers, then changes results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.layers import run_layer
from support.replays import tensors_of, without_replay

SHAPE = MoEShape(
    hidden_size=768,
    intermediate_size=512,
    num_experts=16,
    top_k=4,
    activation=mxpert.SwiGLU(),
    has_bias=True,
)
TOKENS = (1, 5, 64, 300)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
tokens = pytest.mark.parametrize("num_tokens", TOKENS)


def make(
    num_tokens: int, device: torch.device, seed: int = 0, *, is_prepared: bool = True
) -> MoEInputs:
    inputs = random_moe_problem(SHAPE, num_tokens, device=device, seed=seed)
    return replace(inputs, weights=inputs.weights.prepare(device=device)) if is_prepared else inputs


def fused(inputs: MoEInputs, a_format: str) -> torch.Tensor:
    return run_layer(inputs, activation_format=a_format)


def routed(inputs: MoEInputs) -> Any:
    weights, ids = mxpert.route_topk(inputs.x[:, : SHAPE.num_experts].float(), SHAPE.top_k)
    return (
        weights,
        ids,
        mxpert.make_routing_plan(weights, ids, num_experts=SHAPE.num_experts, routing_block_m=16),
    )


def staged(inputs: MoEInputs, a_format: str) -> torch.Tensor:
    plan = routed(inputs)[2]
    h = mxpert.moe_gate_up(
        inputs.x, inputs.weights, plan, activation=inputs.activation, activation_format=a_format
    )
    return mxpert.moe_down(h, inputs.weights, plan, activation_format=a_format)


def quantised(inputs: MoEInputs) -> Any:
    codes = mxpert.quantize(inputs.x, "mxfp8")
    return codes, mxpert.dequantize(codes)


def poison(device: torch.device) -> None:
    """Fill memory that the allocator returns next with NaN, and shift its addresses."""
    held = [
        torch.full((1 << size,), -1, dtype=torch.int32, device=device)
        for size in (6, 10, 14, 18, 20, 21, 22, 23, 24)
    ]
    del held


def check(call: Callable[[MoEInputs], Any], *inputs: MoEInputs) -> None:
    """Compare replayed calls on each of `inputs` in turn with calls that are not replayed."""
    with without_replay():
        expected = [call(one) for one in inputs]
    for _ in range(4):
        for one, want in zip(inputs, expected, strict=True):
            poison(one.x.device)
            for have, value in zip(tensors_of(call(one)), tensors_of(want), strict=True):
                assert_exact(have, value, "replay")


@formats
@tokens
@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "row-major"])
def test_layers(
    num_tokens: int, a_format: str, is_prepared: bool, device: torch.device, replays: list[object]
) -> None:
    pair = [make(num_tokens, device, seed, is_prepared=is_prepared) for seed in (0, 1)]
    check(lambda inputs: fused(inputs, a_format), *pair)
    assert replays
    replays.clear()
    check(lambda inputs: staged(inputs, a_format), *pair)
    assert replays


@tokens
def test_routing_and_quantisation(
    num_tokens: int, device: torch.device, replays: list[object]
) -> None:
    pair = [make(num_tokens, device, seed) for seed in (0, 1)]
    for call in (routed, quantised):
        replays.clear()
        check(call, *pair)
        assert replays


@formats
def test_replays_are_captured(a_format: str, device: torch.device, replays: list[object]) -> None:
    inputs, other = make(5, device), make(5, device, seed=1)
    expected = fused(replace(inputs, x=other.x), a_format)
    for _ in range(3):
        fused(inputs, a_format)
    graph = torch.cuda.CUDAGraph()
    replays.clear()
    with torch.cuda.graph(graph):
        y = fused(inputs, a_format)
    assert replays
    inputs.x.copy_(other.x)
    poison(device)
    graph.replay()
    assert_exact(y, expected, "captured")


def test_replays_follow_the_current_stream(device: torch.device, replays: list[object]) -> None:
    inputs = make(5, device)
    expected = fused(inputs, "bf16")
    for _ in range(3):
        fused(inputs, "bf16")
    source, stream = inputs.x.clone(), torch.cuda.Stream(device)
    replays.clear()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        inputs.x.zero_()
        torch.cuda._sleep(20_000_000)
        inputs.x.copy_(source)  # a launch on another stream would not wait for it
        y = fused(inputs, "bf16")
    stream.synchronize()
    assert replays
    assert_exact(y, expected, "on a side stream")


@pytest.mark.multi_gpu
def test_tensors_of_another_device_than_the_current_one(replays: list[object]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = (make(5, torch.device("cuda", index)) for index in (0, 1))
    expected = fused(first, "bf16").cpu()
    with torch.cuda.device(0):
        for _ in range(4):
            y = fused(second, "bf16")
    assert replays
    assert y.device.index == 1
    assert_exact(y.cpu(), expected, "on the second GPU")
