"""Host work of warm calls, as counts.

A warm call must not check, describe, resolve, build launches, go through Triton or encode TMA
descriptors again. It allocates its results and one block of scratch. Counts do not depend on the
machine, unlike times. A mock driver records the launches; no kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia

import mxpert
from mxpert.core import geometry, registry, replay
from mxpert.core import ops as library
from mxpert.core.launch import Launch
from mxpert.core.ops import OPS
from mxpert.core.problem import (
    MoEOptions,
    MoEProblem,
    QuantizeProblem,
    RoutingProblem,
    TopKOptions,
    TopKProblem,
)
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.frames import count_frames
from support.launches import H200, count_launches, without_device
from support.replays import Launches

SHAPE = MoEShape(
    hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, activation=mxpert.SwiGLU()
)
TOKENS = (16, 17, 15, 16, 13)
"""Token counts with the same tiles and splits: they must share binaries."""
MOST_LAUNCHES = {
    "route_topk": 1,
    "make_routing_plan": 1,
    "quantize": 1,
    "fused_moe": 6,
    "fused_moe_out": 6,
    "fused_moe_from_logits": 7,
    "fused_moe_from_logits_out": 7,
    "moe_gate_up": 3,
    "moe_down": 3,
}
MOST_ALLOCATIONS = {
    "route_topk": 2,
    "make_routing_plan": 5,
    "quantize": 2,
    "fused_moe": 2,
    "fused_moe_out": 1,
    "fused_moe_from_logits": 2,
    "fused_moe_from_logits_out": 1,
    "moe_gate_up": 3,
    "moe_down": 2,
}
"""Allocations per op: two outputs for codes and scales, five for a plan."""
MOST_FRAMES = {
    "route_topk": 14,
    "make_routing_plan": 15,
    "quantize": 15,
    "fused_moe": 16,
    "fused_moe_out": 15,
    "fused_moe_from_logits": 16,
    "fused_moe_from_logits_out": 15,
    "moe_gate_up": 16,
    "moe_down": 20,
    "experts": 20,
    "MoE": 27,
}
"""Python functions of this package that a warm call enters, as many as today."""
MOST_COPIES = 3
"""TMA descriptors of a decode GEMM's activation rows: one for each tile width."""


@pytest.fixture(autouse=True)
def launches() -> Iterator[Launches]:
    with without_device() as made, on_device(H200):
        yield made


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counters of the steps that warm calls must skip."""
    counts = {"learn": 0, "build": 0, "encode": 0, "check": 0, "take apart": 0, "problem": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return run

    monkeypatch.setattr(Launch, "_learn", counted("learn", Launch._learn))
    monkeypatch.setattr(Launch, "__init__", counted("build", Launch.__init__))
    monkeypatch.setattr(
        nvidia, "make_tensordesc_arg", counted("encode", nvidia.make_tensordesc_arg)
    )
    for spec in OPS.values():
        monkeypatch.setattr(spec, "_check", counted("check", spec._check))
    monkeypatch.setattr(
        geometry, "_parts_of_aggregate", counted("take apart", geometry._parts_of_aggregate)
    )
    for cls in (MoEProblem, TopKProblem, RoutingProblem, QuantizeProblem, MoEOptions, TopKOptions):
        monkeypatch.setattr(cls, "__init__", counted("problem", cls.__init__))
    return counts


class Operators(TorchDispatchMode):
    """Records the names of the torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def calls(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Calls of single-kernel ops and of a layer on fixed tensors."""
    problem = random_moe_problem(SHAPE, num_tokens, device=torch.device("cpu"))
    weights = problem.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    logits = torch.randn(num_tokens, SHAPE.num_experts)
    ids, routing = problem.topk_ids, problem.topk_weights
    options = {"activation": problem.activation, "activation_format": "mxfp8"}
    plan = mxpert.make_routing_plan(routing, ids, num_experts=SHAPE.num_experts, routing_block_m=16)
    h = mxpert.moe_gate_up(problem.x, weights, plan, **options)
    out, wide_ids, narrow = torch.empty_like(problem.x), ids.long(), routing.bfloat16()
    return {
        "moe_gate_up": lambda: mxpert.moe_gate_up(problem.x, weights, plan, **options),
        "moe_down": lambda: mxpert.moe_down(h, weights, plan),
        "route_topk": lambda: mxpert.route_topk(logits, SHAPE.top_k),
        "make_routing_plan": lambda: mxpert.make_routing_plan(
            routing, ids, num_experts=SHAPE.num_experts, routing_block_m=16
        ),
        "quantize": lambda: mxpert.quantize(problem.x, "mxfp8"),
        "fused_moe": lambda: mxpert.fused_moe(problem.x, weights, routing, ids, **options),
        "fused_moe_out": lambda: mxpert.fused_moe(
            problem.x, weights, narrow, wide_ids, out=out, **options
        ),
        "fused_moe_from_logits": lambda: mxpert.fused_moe_from_logits(
            problem.x, weights, logits, SHAPE.top_k, **options
        ),
        "fused_moe_from_logits_out": lambda: mxpert.fused_moe_from_logits(
            problem.x, weights, logits, SHAPE.top_k, out=out, **options
        ),
    }


def modules(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Calls of the inference modules."""
    problem = random_moe_problem(SHAPE, num_tokens, device=torch.device("cpu"))
    weights = problem.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    router = torch.randn(SHAPE.num_experts, SHAPE.hidden_size, dtype=torch.bfloat16)
    moe = mxpert.MoE(weights, router, top_k=SHAPE.top_k, activation=problem.activation).eval()
    routing = problem.topk_weights, problem.topk_ids
    return {"MoE": lambda: moe(problem.x), "experts": lambda: moe.experts(problem.x, *routing)}


@pytest.mark.parametrize("op", MOST_LAUNCHES)
def test_a_warm_call_only_launches(op: str, work: dict[str, int], launches: Launches) -> None:
    call = calls(16)[op]
    kept = [call() for _ in range(2)]  # the second call's tensors have other addresses
    misses = registry._resolve.cache_info().misses
    for name in work:
        work[name] = 0
    launches.clear()
    for _ in range(3):
        kept.append(call())
    done, num_launches = work.copy(), len(launches)
    assert 0 < num_launches <= 3 * MOST_LAUNCHES[op]
    assert done.pop("encode") <= 3 * 2 * MOST_COPIES, (
        "rows of both stages may lie elsewhere, weights do not"
    )
    assert set(done.values()) == {0}, done
    assert registry._resolve.cache_info().misses == misses
    assert count_launches(call) * 3 == num_launches, "as many as a call that is not replayed"


@pytest.mark.parametrize("op", MOST_ALLOCATIONS)
@pytest.mark.parametrize("own", [True, False], ids=["torch-empty", "as-compiled-code"])
def test_a_warm_call_allocates_results_and_one_scratch(
    op: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = calls(16)[op]
    for _ in range(3):
        call()
    made: list[object] = []
    allocate = torch.empty_strided if own else replay._ALLOCATORS["cpu"]

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(allocate(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(replay, "_ALLOCATORS", {} if own else {"cpu": counted})
    monkeypatch.setattr(torch, "empty_strided", counted)
    call()
    assert 0 < len(made) <= MOST_ALLOCATIONS[op]


@pytest.mark.parametrize("op", MOST_ALLOCATIONS)
def test_a_warm_call_runs_no_other_operator(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls(16)[op]
    for _ in range(3):
        call()
    monkeypatch.setattr(library, "runs_eagerly", lambda: True)
    monkeypatch.setattr(replay, "_ALLOCATORS", {})
    with Operators() as seen:
        call()
    assert set(seen.names) == {"aten::empty_strided"}


@pytest.mark.parametrize("op", MOST_FRAMES)
def test_a_warm_call_enters_few_functions(op: str) -> None:
    call = {**calls(16), **modules(16)}[op]
    for _ in range(4):
        call()
    assert 0 < count_frames(call) <= MOST_FRAMES[op]


@pytest.mark.parametrize("op", MOST_ALLOCATIONS)
def test_a_warm_call_does_not_describe_its_arguments(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = calls(16)[op]
    for _ in range(3):
        call()
    monkeypatch.setattr(library, "describe", None)
    call()


def test_token_counts_share_binaries(work: dict[str, int]) -> None:
    for op in calls(TOKENS[0]):
        calls(TOKENS[0])[op]()
    work.update(learn=0)
    for num_tokens in TOKENS:
        for call in calls(num_tokens).values():
            call()
    assert work["learn"] == 0
