"""Routing kernels in the interpreter: every output bit against the contract and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxpert
from mxpert import Scoring
from mxpert.core.describe import describe
from mxpert.core.problem import TopKOptions
from mxpert.routing.inputs import PlanInputs, TopKInputs
from mxpert.routing.triton import MAX_EXPERTS, PLAN, TOPK, PlanConfig, TopKConfig
from support.routing import (
    random_topk_ids,
    topk_decision_gap,
    topk_weight_tolerance,
    validate_routing_plan,
)

CONFIGS = {
    "one-launch": PlanConfig(num_chunks=0, tile=64),
    "one-chunk": PlanConfig(num_chunks=1, tile=64),
    "many-chunks": PlanConfig(num_chunks=11, tile=32),
    "many-tiles-per-chunk": PlanConfig(num_chunks=3, tile=32),
}


def check_plan(
    config: PlanConfig,
    ids: torch.Tensor,
    *,
    num_experts: int,
    unit: int,
    weights_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(ids.shape, generator=generator).to(weights_dtype)
    problem = describe(
        mxpert.make_routing_plan,
        weights,
        ids,
        num_experts=num_experts,
        routing_block_m=unit,
        **options,
    )
    plan = PLAN.launch(
        problem,
        config,
        PlanInputs(
            topk_ids=ids,
            topk_weights=weights,
            expert_map=options.get("expert_map"),
            num_local_tokens=options.get("num_local_tokens"),
        ),
    )
    tokens = options.get("num_local_tokens")
    validate_routing_plan(
        plan,
        weights.float(),
        ids,
        num_experts=num_experts,
        expert_map=options.get("expert_map"),
        num_local_tokens=None if tokens is None else int(tokens),
    )


def distinct_ids(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    return random_topk_ids(
        num_tokens, top_k, num_experts, generator=torch.Generator().manual_seed(num_tokens)
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, unit",
    [(1, 1, 1, 16), (3, 4, 33, 16), (43, 8, 20, 64), (100, 3, 7, 1), (17, 9, 70, 24), (0, 2, 5, 8)],
)
def test_plan_is_exact(config, num_tokens, top_k, num_experts, unit):
    check_plan(
        config, distinct_ids(num_tokens, top_k, num_experts), num_experts=num_experts, unit=unit
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_plan_ignores_foreign_ids_and_tokens_beyond_the_local_ones(config):
    """Ids far outside the map, repeated ids, a map to −1 and beyond the local experts."""
    ids = torch.randint(-3, 27, (30, 5), generator=torch.Generator().manual_seed(2)).int()
    ids[3, 1], ids[4, 0], ids[5] = (1 << 31) - 1, -(1 << 31), 7
    expert_map = torch.arange(24, dtype=torch.int32) - 8
    expert_map[20] = 1 << 30
    for tokens in (21, -5, 99):
        check_plan(
            config,
            ids,
            num_experts=24,
            unit=8,
            expert_map=expert_map,
            num_local_experts=10,
            num_local_tokens=torch.tensor([tokens], dtype=torch.int32),
        )


@pytest.mark.parametrize("has_map", [False, True], ids=["all-experts", "expert-map"])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_plan_of_int64_ids_and_narrow_weights(config, weights_dtype, has_map):
    """No id wraps: some have the low 32 bits of a valid one."""
    ids = torch.randint(-3, 27, (30, 5), generator=torch.Generator().manual_seed(3))
    ids[3, 1], ids[4, 0] = (1 << 63) - 1, -(1 << 63)
    ids[6], ids[7] = (1 << 32) + torch.arange(5), torch.arange(5) - (1 << 32)
    options: dict[str, Any] = {"weights_dtype": weights_dtype}
    if has_map:
        options["expert_map"] = torch.arange(24, dtype=torch.int32) - 8
        options["num_local_experts"] = 10
    check_plan(config, ids, num_experts=24, unit=8, **options)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_plan_with_all_tokens_to_one_expert(config):
    check_plan(config, torch.full((150, 1), 3, dtype=torch.int32), num_experts=5, unit=16)


@pytest.mark.parametrize("num_experts", [257, 513, MAX_EXPERTS])
def test_plan_with_many_experts(num_experts):
    check_plan(
        PlanConfig(num_chunks=2, tile=64),
        distinct_ids(13, 9, num_experts),
        num_experts=num_experts,
        unit=16,
    )


@pytest.mark.parametrize("num_experts, most_tokens", [(128, 256), (384, 128), (1000, 128)])
def test_heuristic_covers_all_rows_with_bounded_chunks(num_experts, most_tokens):
    """One launch for few rows; its limit is lower with more experts, since each program reads all
    rows."""
    for tokens in (1, 128, 129, 256, 257, 16384, 32768, (1 << 24) // 8 - 1):
        problem = describe(
            mxpert.make_routing_plan,
            torch.empty(1, 8).expand(tokens, 8),
            torch.empty(1, 8, dtype=torch.int32).expand(tokens, 8),
            num_experts=num_experts,
            routing_block_m=64,
        )
        config = PLAN.heuristic(problem)
        assert (config.num_chunks == 0) == (tokens <= most_tokens)
        assert config.num_chunks <= 128
        assert config in PLAN.configs(problem)


TOPK_CASES = {
    "softmax-chosen": {},
    "softmax-all": {"normalize": False},
    "softmax-bias": {"correction_bias": True},
    "softmax-groups": {"num_groups": 4, "top_groups": 2, "group_score": "max"},
    "softmax-pairs": {"num_groups": 4, "top_groups": 2, "group_score": "top2"},
    "sqrtsoftplus": {"scoring": Scoring.SQRTSOFTPLUS},
    "sqrtsoftplus-raw": {"scoring": Scoring.SQRTSOFTPLUS, "normalize": False, "clamp_nan": True},
    "deepseek-v4": {
        "scoring": Scoring.SQRTSOFTPLUS,
        "correction_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "sigmoid": {"scoring": Scoring.SIGMOID},
    "sigmoid-raw": {"scoring": Scoring.SIGMOID, "normalize": False},
    "deepseek-v3": {
        "scoring": Scoring.SIGMOID,
        "num_groups": 4,
        "top_groups": 2,
        "correction_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "best-of-biased-groups": {
        "scoring": Scoring.SIGMOID,
        "num_groups": 4,
        "top_groups": 2,
        "group_score": "max",
        "correction_bias": True,
    },
}


def check_topk(
    logits: torch.Tensor, top_k: int, options: dict[str, Any], config: TopKConfig | None = None
) -> None:
    options = dict(options)
    if options.get("correction_bias"):
        options["correction_bias"] = 0.1 * torch.randn(
            logits.shape[1], generator=torch.Generator().manual_seed(5)
        )
    bias = options.get("correction_bias")
    problem = describe(mxpert.route_topk, logits, top_k, **options)
    weights, ids = TOPK.launch(
        problem, config or TOPK.heuristic(problem), TopKInputs(logits=logits, correction_bias=bias)
    )
    want_weights, want_ids = mxpert.route_topk(logits, top_k, **options)
    finite = logits.float()
    tolerance = topk_weight_tolerance(float(finite.max() - finite.min()), logits.shape[1])
    gap = topk_decision_gap(finite, top_k, problem.options, bias)
    decided = gap > 4 * tolerance
    assert decided.float().mean() >= 0.8, "the case decides too little to be a test"
    assert torch.equal(ids[decided], want_ids[decided])
    torch.testing.assert_close(weights[decided], want_weights[decided], rtol=tolerance, atol=0)


@pytest.mark.parametrize("options", TOPK_CASES.values(), ids=TOPK_CASES)
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(9, 100, 4), (5, 256, 8), (3, 8, 3)])
def test_topk_matches_the_reference(options, num_tokens, num_experts, top_k):
    generator = torch.Generator().manual_seed(num_experts)
    check_topk(torch.randn(num_tokens, num_experts, generator=generator), top_k, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_topk_reads_half_precision(dtype):
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(6)).to(dtype)
    check_topk(logits, 4, {})


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_topk_rows_per_program(rows):
    logits = torch.randn(7, 33, generator=torch.Generator().manual_seed(7))
    check_topk(logits, 33, {}, TopKConfig(rows))


def test_topk_of_many_slots_and_the_most_experts():
    logits = torch.randn(2, MAX_EXPERTS, generator=torch.Generator().manual_seed(8))
    check_topk(logits, 30, {})


@pytest.mark.parametrize("clamp", [False, True], ids=["as-it-is", "clamped"])
@pytest.mark.parametrize("scoring", Scoring)
def test_topk_ties_nan_and_infinity(scoring, clamp):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 2.0, 2.0],
            [0.0, -0.0, 0.0, -1.0, -0.0, -2.0],
            [nan, 1.0, nan, 2.0, nan, 0.0],
            [nan] * 6,
            [-inf, 0.0, -inf, 1.0, -inf, -inf],
            [0.0, inf, 1.0, -inf, inf, 2.0],
            [-inf] * 6,
            [19.9, 20.1, 88.0, -20.0, -87.0, -88.5],
        ]
    )
    with mxpert.override(backend="triton"):
        weights, ids = mxpert.route_topk(logits, 4, scoring=scoring, clamp_nan=clamp)
    want_weights, want_ids = mxpert.route_topk(logits, 4, scoring=scoring, clamp_nan=clamp)
    assert not clamp or weights.isfinite().all()
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(
        weights, want_weights, equal_nan=True, atol=0, rtol=topk_weight_tolerance(200.0, 6)
    )


def test_topk_excluded_groups_never_win():
    bias = torch.full((6,), float("-inf"))
    for values in (bias, torch.tensor([0.0, 0.0, 9.0, float("-inf"), 8.0, 8.0])):
        arguments = {"scoring": Scoring.SIGMOID, "num_groups": 3, "correction_bias": values}
        with mxpert.override(backend="triton"):
            _, ids = mxpert.route_topk(torch.zeros(1, 6), 2, **arguments)
        assert torch.equal(ids, mxpert.route_topk(torch.zeros(1, 6), 2, **arguments)[1])


def test_topk_reads_rows_with_a_stride():
    wide = torch.randn(5, 40, generator=torch.Generator().manual_seed(9))
    check_topk(wide[:, 3:35], 4, {})
    check_topk(wide.T[:32].contiguous().T, 4, {})


def test_public_ops_reach_the_kernels():
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(10))
    with mxpert.override(backend="triton"):
        assert "triton" in str(mxpert.explain(mxpert.route_topk, logits, 3))
        weights, ids = mxpert.route_topk(logits, 3)
        plan = mxpert.make_routing_plan(weights, ids, num_experts=12, routing_block_m=4)
    validate_routing_plan(plan, weights, ids, num_experts=12)


def test_more_experts_than_the_kernels_hold_are_refused():
    with (
        mxpert.override(backend="triton"),
        pytest.raises(mxpert.UnsupportedError, match=r"at most 1024 experts, not 1025"),
    ):
        mxpert.route_topk(torch.zeros(1, MAX_EXPERTS + 1), 2)


def test_topk_options_default_to_a_plain_softmax():
    assert describe(mxpert.route_topk, torch.zeros(1, 4), 2).options == TopKOptions()
