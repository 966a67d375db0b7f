"""What a warm call may not do again: resolve, build launches, go through Triton, encode maps.

Times depend on the machine; these counts do not. Kernels are launched into nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mxpert
from mxpert.backends import launch
from mxpert.backends.launch import Launch
from mxpert.dispatch import registry
from mxpert.formats.tensor import Layout
from mxpert.testing.launches import as_if_on_h200, count_launches, without_device
from mxpert.testing.problems import MoEShape, random_moe_problem

SHAPE = MoEShape(hidden_size=256, intermediate_size=256, num_experts=8, top_k=2,
                 activation=mxpert.SwiGLU())
TOKENS = (16, 17, 15, 16, 13)
"""The same tiles and splits serve them all: a binary more would be one for a token count."""
MOST_LAUNCHES = {"route_topk": 1, "make_routing_plan": 1, "quantize": 1, "fused_moe": 6}


@pytest.fixture(autouse=True)
def no_device() -> Iterator[None]:
    with without_device(record=False), as_if_on_h200():
        yield


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of what warm calls leave out, from here on."""
    counts = {"learn": 0, "build": 0, "encode": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)
        return run

    monkeypatch.setattr(Launch, "_learn", counted("learn", Launch._learn))
    monkeypatch.setattr(Launch, "__init__", counted("build", Launch.__init__))
    monkeypatch.setattr(launch.nvidia, "make_tensordesc_arg",
                        counted("encode", launch.nvidia.make_tensordesc_arg))
    return counts


def calls(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Single-kernel ops and a layer, on fixed tensors."""
    problem = random_moe_problem(SHAPE, num_tokens, device=torch.device("cpu"))
    weights = problem.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    logits = torch.randn(num_tokens, SHAPE.num_experts)
    ids, routing = problem.topk_ids, problem.topk_weights
    return {
        "route_topk": lambda: mxpert.route_topk(logits, SHAPE.top_k),
        "make_routing_plan": lambda: mxpert.make_routing_plan(
            ids, routing, num_experts=SHAPE.num_experts, routing_block_m=16),
        "quantize": lambda: mxpert.quantize(problem.x, "mxfp8"),
        "fused_moe": lambda: mxpert.fused_moe(problem.x, weights, ids, routing,
                                              activation=problem.activation,
                                              activation_format="mxfp8")}


@pytest.mark.parametrize("op", MOST_LAUNCHES)
def test_a_warm_call_only_launches(op: str, work: dict[str, int]) -> None:
    call = calls(16)[op]
    kept = [call() for _ in range(2)]  # the second call's tensors lie elsewhere
    misses = registry._resolve.cache_info().misses
    work.update(learn=0, build=0, encode=0)
    for _ in range(3):
        kept.append(call())
    assert (work["learn"], work["build"]) == (0, 0)
    assert registry._resolve.cache_info().misses == misses
    assert count_launches(call) <= MOST_LAUNCHES[op]


def test_weights_are_described_to_tma_once(work: dict[str, int]) -> None:
    call = calls(16)["fused_moe"]
    call(), call()
    work.update(encode=0)
    call()
    assert work["encode"] <= 2, "rows of both stages may lie elsewhere, weights do not"


def test_token_counts_share_binaries(work: dict[str, int]) -> None:
    for op in calls(TOKENS[0]):
        calls(TOKENS[0])[op]()
    work.update(learn=0)
    for num_tokens in TOKENS:
        for call in calls(num_tokens).values():
            call()
    assert work["learn"] == 0
