"""Routing on a GPU: all cases of the sorting contract, bit for bit, and graph capture."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import mxpert
from mxpert import Scoring
from mxpert.core.describe import describe
from mxpert.core.problem import TopKOptions
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.triton import PLAN
from support.routing import (
    CONTRACT_EXPERTS,
    random_topk_ids,
    topk_decision_gap,
    topk_weight_tolerance,
    validate_routing_plan,
)

MAX_TOKENS = 16384
TOKENS = (0, 1, 2, 3, 16, 17, 64, 128, 255, 256, 777, 1024, 4096, MAX_TOKENS)
FIELDS = ("sorted_token_ids", "sorted_weights", "block_expert_ids", "num_valid", "slot_rows")
DEEPSEEK = {
    "scoring": Scoring.SIGMOID,
    "num_groups": 8,
    "top_groups": 4,
    "routed_scaling_factor": 2.5,
}


@pytest.fixture(autouse=True)
def triton_only() -> Iterator[None]:
    """Only the Triton backend may serve calls."""
    with mxpert.override(backend="triton"):
        yield


@functools.cache
def routing(num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    ids = random_topk_ids(MAX_TOKENS, top_k, num_experts, generator=generator)
    return ids, torch.rand(ids.shape, generator=generator)


def poison(device: torch.device, num_bytes: int = 1 << 26) -> None:
    """Fill freed memory with one bits: NaN, and no valid row, expert or position."""
    torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)


def check_plan(
    ids: torch.Tensor, weights: torch.Tensor, device: torch.device, *, num_experts: int, unit: int
) -> None:
    poison(device)
    plan = mxpert.make_routing_plan(
        weights.to(device), ids.to(device), num_experts=num_experts, routing_block_m=unit
    )
    validate_routing_plan(plan, weights, ids, num_experts=num_experts)


@pytest.mark.parametrize("num_experts, top_k", CONTRACT_EXPERTS)
def test_sorting_contract(device, num_experts, top_k):
    for num_tokens in TOKENS:
        ids, weights = (tensor[:num_tokens] for tensor in routing(num_experts, top_k))
        for unit in (16, 128):
            check_plan(ids, weights, device, num_experts=num_experts, unit=unit)


@pytest.mark.parametrize("num_tokens", [1, 17, 300, 4096, MAX_TOKENS])
def test_every_geometry_gives_the_same_plan(device, num_tokens):
    ids, weights = (tensor[:num_tokens].to(device) for tensor in routing(257, 9))
    problem = describe(mxpert.make_routing_plan, weights, ids, num_experts=257, routing_block_m=48)
    for config in PLAN.configs(problem):
        poison(device)
        plan = PLAN.launch(problem, config, PlanInputs(topk_ids=ids, topk_weights=weights))
        validate_routing_plan(plan, weights, ids, num_experts=257)


@pytest.mark.parametrize("num_tokens", [64, MAX_TOKENS])
@pytest.mark.parametrize("unit", [1, 8, 256])
def test_all_tokens_to_one_expert(device, num_tokens, unit):
    ids = torch.full((num_tokens, 1), 77, dtype=torch.int32)
    check_plan(ids, torch.rand(num_tokens, 1), device, num_experts=100, unit=unit)


def test_more_rows_than_chunks_hold_in_one_tile(device):
    ids, weights = routing(513, 9)
    check_plan(ids.repeat(8, 1), weights.repeat(8, 1), device, num_experts=513, unit=64)


@pytest.mark.parametrize("num_tokens", [4, 128, 2048])
def test_graph_replay_with_changed_routing_equals_eager(device, num_tokens):
    """A graph is captured once and replayed with other logits, another map and fewer tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, 256, generator=generator).to(device)
    bias = torch.randn(256, generator=generator).to(device)
    expert_map = torch.arange(256, dtype=torch.int32, device=device)
    tokens = torch.tensor([num_tokens], dtype=torch.int32, device=device)

    def route() -> tuple[torch.Tensor, ...]:
        weights, ids = mxpert.route_topk(logits, 8, correction_bias=bias, **DEEPSEEK)
        plan = mxpert.make_routing_plan(
            weights,
            ids,
            num_experts=256,
            routing_block_m=16,
            expert_map=expert_map,
            num_local_tokens=tokens,
        )
        return (weights, ids, *(getattr(plan, field) for field in FIELDS))

    route()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route()
    for seed in range(3):
        generator.manual_seed(100 + seed)
        logits.copy_(torch.randn(num_tokens, 256, generator=generator))
        expert_map.copy_(torch.randint(-1, 256, (256,), generator=generator).int())
        tokens.fill_(num_tokens - seed)
        for tensor in captured:
            tensor.fill_(-7)
        graph.replay()
        for have, want in zip(captured, route(), strict=True):
            assert torch.equal(have, want)


def test_no_host_synchronisation(device):
    ids, weights = (tensor[:3000].to(device) for tensor in routing(128, 4))
    logits = torch.randn(3000, 128, device=device)
    mxpert.route_topk(logits, 4)
    mxpert.make_routing_plan(weights, ids, num_experts=128, routing_block_m=16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mxpert.route_topk(logits, 4)
        mxpert.make_routing_plan(weights, ids, num_experts=128, routing_block_m=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_tokens", [300, 4096])
def test_plans_repeat_bit_for_bit(device, num_tokens):
    ids, weights = (tensor[:num_tokens].to(device) for tensor in routing(256, 8))
    first = mxpert.make_routing_plan(weights, ids, num_experts=256, routing_block_m=32)
    for _ in range(200):
        again = mxpert.make_routing_plan(weights, ids, num_experts=256, routing_block_m=32)
        assert all(torch.equal(getattr(again, field), getattr(first, field)) for field in FIELDS)


TOPK_OPTIONS = {
    "softmax-chosen": {},
    "softmax-all": {"normalize": False},
    "sigmoid": {"scoring": Scoring.SIGMOID},
    "softmax-groups": {"num_groups": 4, "top_groups": 2, "group_score": "max"},
    "softmax-pairs": {"num_groups": 4, "top_groups": 2, "group_score": "top2"},
    "sqrtsoftplus": {"scoring": Scoring.SQRTSOFTPLUS},
    "sqrtsoftplus-clamped": {"scoring": Scoring.SQRTSOFTPLUS, "clamp_nan": True},
    "deepseek-v3": DEEPSEEK
    | {"correction_bias": 0.1 * torch.randn(256, generator=torch.Generator().manual_seed(1))},
}


@pytest.mark.parametrize("options", TOPK_OPTIONS.values(), ids=TOPK_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_topk_matches_the_reference(device, dtype, options):
    for num_tokens in (1, 5, 256, 4096):
        check_topk(device, num_tokens, dtype, options)


def check_topk(device, num_tokens, dtype, options):
    """Ids are equal unless float32 rounding decides; weights are within the derived bound."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, 256, generator=generator).to(dtype)
    bias = options.get("correction_bias")
    on_device = options | ({} if bias is None else {"correction_bias": bias.to(device)})
    weights, ids = mxpert.route_topk(logits.to(device), 8, **on_device)
    with mxpert.override(backend="reference"):
        want_weights, want_ids = mxpert.route_topk(logits, 8, **options)
    fields = {name: value for name, value in options.items() if name != "correction_bias"}
    wide = logits.float()
    tolerance = topk_weight_tolerance(float(wide.max() - wide.min()), 256)
    decided = topk_decision_gap(wide, 8, TopKOptions(**fields), bias) > 4 * tolerance
    assert num_tokens < 100 or decided.float().mean() > 0.5
    assert torch.equal(ids.cpu()[decided], want_ids[decided])
    torch.testing.assert_close(
        weights.cpu()[decided], want_weights[decided], rtol=tolerance, atol=0
    )


@pytest.mark.parametrize("num_experts, top_k", CONTRACT_EXPERTS)
def test_topk_of_ties_is_exact(device, num_experts, top_k):
    """Few distinct logits with NaN and −inf: the chosen ids depend only on value and id."""
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randint(-3, 3, (500, num_experts), generator=generator).float()
    logits[::7, ::3], logits[::5, 1::4] = float("nan"), float("-inf")
    _, ids = mxpert.route_topk(logits.to(device), top_k)
    with mxpert.override(backend="reference"):
        assert torch.equal(ids.cpu(), mxpert.route_topk(logits, top_k)[1])


def test_topk_and_plan_with_1024_experts(device):
    logits = torch.randn(2000, 1024, generator=torch.Generator().manual_seed(3))
    weights, ids = mxpert.route_topk(logits.to(device), 16)
    order = logits.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(ids.cpu().long(), order[:, :16])
    check_plan(ids.cpu(), weights.cpu(), device, num_experts=1024, unit=16)
