"""Choices and limits of the portable routing kernels, and what they make of infinities."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import Scoring
from mxpert.core.describe import describe
from mxpert.core.problem import TopKOptions
from mxpert.routing.triton import MAX_EXPERTS, PLAN
from support.routing import topk_weight_tolerance, validate_routing_plan


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
