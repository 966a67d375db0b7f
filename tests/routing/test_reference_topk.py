"""route_topk on the reference backend: against transformers' routers, extremes and errors.

tests/conformance/test_routing.py compares every option with float64, and has ties and NaN.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import mxpert
from mxpert import GroupScore, Scoring
from mxpert.core.problem import TopKOptions
from support.routing import topk_decision_gap, topk_weight_tolerance

FLOAT32_HALF_ULP = 2.0**-24


def router_weights(router: torch.nn.Module, seed: int) -> torch.Tensor:
    """Random router parameters; returns hidden states for it."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    return torch.randn(64, router.hidden_dim)


def by_id(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ascending with their weights: transformers leaves the order of the chosen open."""
    order = ids.argsort(dim=1)
    return ids.gather(1, order).long(), weights.gather(1, order)


def assert_same_routing(have, want_weights, want_ids, *, terms: int) -> None:
    """The same experts; weights apart by the order of at most `terms` additions and a division."""
    weights, ids = have
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    (ids, weights), (want_ids, want_weights) = by_id(ids, weights), by_id(want_ids, want_weights)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(
        weights, want_weights, rtol=(2 * terms + 4) * FLOAT32_HALF_ULP, atol=0
    )


@torch.no_grad()
def test_gpt_oss_router():
    router = GptOssTopKRouter(
        GptOssConfig(hidden_size=32, num_local_experts=32, num_experts_per_tok=4)
    )
    logits, weights, ids = router(router_weights(router, 0))
    have = mxpert.route_topk(logits, 4)
    assert_same_routing(have, weights, ids, terms=4)
    assert torch.equal(have[1].long(), ids)  # best first in both


@torch.no_grad()
def test_mixtral_router():
    router = MixtralTopKRouter(
        MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2)
    )
    logits, weights, ids = router(router_weights(router, 1))
    # Its weights are p / sum(p) of rounded probabilities, ours exp / sum(exp) of the chosen:
    # the exponentials differ by their arguments' rounding, up to span half-ulps each.
    weights_here, ids_here = mxpert.route_topk(logits, 2)
    assert torch.equal(ids_here.long(), ids)
    span = float(logits.max() - logits.min())
    torch.testing.assert_close(weights_here, weights, rtol=topk_weight_tolerance(span, 8), atol=0)


@torch.no_grad()
@pytest.mark.parametrize("groups, top_groups", [(1, 1), (8, 4), (4, 1), (8, 8)])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
def test_deepseek_v3_router(groups, top_groups, normalize):
    config = DeepseekV3Config(
        hidden_size=32,
        num_local_experts=64,
        num_experts_per_tok=6,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    hidden = router_weights(router, 2) * 0.2
    router.e_score_correction_bias.normal_(std=0.1)
    logits, weights, ids = router(hidden)
    have = mxpert.route_topk(
        logits,
        6,
        scoring=Scoring.SIGMOID,
        num_groups=groups,
        top_groups=top_groups,
        correction_bias=router.e_score_correction_bias,
        normalize=normalize,
        routed_scaling_factor=2.5,
    )
    assert_same_routing(have, weights, ids, terms=6)


def plain_grouped_topk(
    logits: torch.Tensor, bias: torch.Tensor | None, groups: int, top_groups: int, best: int
) -> torch.Tensor:
    """The experts of vLLM's grouped_topk: `best` 1 without a bias, 2 with one."""
    scores = logits.double().sigmoid() + (0 if bias is None else bias.double())
    grouped = scores.view(len(scores), groups, -1)
    chosen = grouped.topk(best, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    mask = torch.ones(len(scores), groups, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(mask[:, :, None], -math.inf).flatten(1).topk(4, dim=-1).indices


@pytest.mark.parametrize("bias", [None, torch.linspace(-0.2, 0.2, 32)], ids=["no-bias", "bias"])
@pytest.mark.parametrize("score, best", [("max", 1), (GroupScore.TOP2, 2), (None, 2)], ids=str)
def test_group_scores_are_those_of_grouped_topk(score, best, bias):
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(6))
    options = dict(scoring=Scoring.SIGMOID, num_groups=8, top_groups=3, correction_bias=bias)
    if score is None and bias is None:
        with pytest.raises(ValueError, match="group_score — need 'max' or 'top2' for groups"):
            mxpert.route_topk(logits, 4, **options)
        return
    _, ids = mxpert.route_topk(logits, 4, group_score=score, **options)
    assert torch.equal(ids.long(), plain_grouped_topk(logits, bias, 8, 3, best))
    other = plain_grouped_topk(logits, bias, 8, 3, 3 - best)
    assert not torch.equal(ids.long(), other), "the two scores choose differently"


def test_the_group_score_is_required_only_where_it_matters():
    logits = torch.randn(4, 8)
    _, ids = mxpert.route_topk(logits, 2, num_groups=4, top_groups=4)
    assert torch.equal(ids, mxpert.route_topk(logits, 2)[1])


@torch.no_grad()
def test_deepseek_v2_router():
    """Groups by their best expert, softmax over all, not renormalised."""
    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
    )
    router = DeepseekV2TopkRouter(config)
    torch.manual_seed(7)
    router.weight.normal_()
    logits, weights, ids = router(torch.randn(64, 32))
    have = mxpert.route_topk(
        logits,
        4,
        num_groups=8,
        top_groups=3,
        group_score="max",
        normalize=False,
        routed_scaling_factor=16.0,
    )
    (ids_here, weights_here), (ids, weights) = by_id(have[1], have[0]), by_id(ids, weights)
    assert torch.equal(ids_here, ids)
    torch.testing.assert_close(weights_here, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48)], ids=["no-bias", "bias"])
def test_sqrtsoftplus_against_float64(bias):
    """DeepSeek-V4: sqrt(log(1 + exp(x))), the bias for the choice alone, normalised, scaled."""
    logits = 20 * torch.randn(100, 48, generator=torch.Generator().manual_seed(8))
    logits[0], logits[1, :3] = -90.0, torch.tensor([100.0, 20.0, -40.0])
    weights, ids = mxpert.route_topk(
        logits, 6, scoring=Scoring.SQRTSOFTPLUS, correction_bias=bias, routed_scaling_factor=1.5
    )
    scores = torch.nn.functional.softplus(logits.double(), threshold=60).sqrt()
    want = (scores if bias is None else scores + bias).topk(6, dim=-1).indices
    certain = (ids.long() == want).all(1)
    assert certain[2:].all()
    chosen = scores.gather(1, ids.long())
    exact = 1.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
def test_clamped_rows_have_weight_zero(scoring, normalize):
    """Padding rows of graphs: the first experts with weight 0; other rows keep their bits."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    clean = mxpert.route_topk(logits, 3, scoring=scoring, normalize=normalize)
    logits[1], logits[4] = math.nan, math.nan
    weights, ids = mxpert.route_topk(
        logits, 3, scoring=scoring, normalize=normalize, clamp_nan=True
    )
    assert ids[[1, 4]].tolist() == [[0, 1, 2]] * 2
    assert not weights[[1, 4]].any()
    others = [0, 2, 3, 5]
    assert torch.equal(ids[others], clean[1][others])
    assert torch.equal(weights[others], clean[0][others])


def test_a_factor_may_be_any_number_that_float32_holds():
    weights, _ = mxpert.route_topk(torch.zeros(1, 2), 1, routed_scaling_factor=1 << 64)
    assert weights.item() == float(1 << 64)


def test_decision_gap_sees_groups_and_experts():
    """The helper that lets float32 implementations be compared by ids."""
    sigmoid = TopKOptions(scoring=Scoring.SIGMOID)
    logits = torch.tensor([[0.0, 0.0, 1.0, 1.25], [3.0, 0.0, 2.0, 1.0]])
    scores = logits.double().sigmoid()
    gap = topk_decision_gap(logits, 1, sigmoid)
    assert gap[0] == (scores[0, 3] - scores[0, 2]) / scores[0, 3]
    assert gap[1] == (scores[1, 0] - scores[1, 2]) / scores[1, 0]
    assert topk_decision_gap(logits, 1, TopKOptions()).isinf().all()
    # The best expert of the chosen group leads clearly; the group itself wins by little.
    limited = TopKOptions(scoring=Scoring.SIGMOID, num_groups=2)
    row = torch.tensor([[2.0, 0.0, 2.0, 2.0**-10]])
    want = (row.double().sigmoid()[0, 3] - 0.5) / row.double().sigmoid()[0, 0]
    torch.testing.assert_close(topk_decision_gap(row, 1, limited)[0], want, rtol=1e-10, atol=0)


LOGITS = torch.zeros(3, 8)
BAD = {
    "logits-dtype": (LOGITS.long(), 2, {}, TypeError, r"logits.dtype — need float32 or bfloat16"),
    "logits-shape": (LOGITS[0], 2, {}, ValueError, r"logits.shape — need \[\*, \*\], got \[8\]"),
    "logits-type": ([0.0], 2, {}, TypeError, r"logits — need a torch.Tensor"),
    "top-k-zero": (LOGITS, 0, {}, ValueError, r"top_k — need 1 … 8"),
    "top-k-over-experts": (LOGITS, 9, {}, ValueError, r"top_k — need 1 … 8 .*got 9"),
    "top-k-over-127": (torch.zeros(1, 200), 128, {}, ValueError, r"top_k — need 1 … 127"),
    "top-k-type": (LOGITS, 2.0, {}, TypeError, r"top_k — need an int, got 2.0"),
    "clamp": (LOGITS, 2, {"clamp_nan": 1}, TypeError, r"clamp_nan — need a bool"),
    "group-score": (LOGITS, 2, {"group_score": "sum"}, ValueError, r"group_score — need a GroupSc"),
    "scoring": (LOGITS, 2, {"scoring": "tanh"}, ValueError, r"scoring — need a Scoring"),
    "normalize": (LOGITS, 2, {"normalize": 1}, TypeError, r"normalize — need a bool"),
    "factor": (LOGITS, 2, {"routed_scaling_factor": "2"}, TypeError, r"routed_scaling_factor —"),
    "groups-divide": (LOGITS, 2, {"num_groups": 3}, ValueError, r"num_groups — need a divisor of"),
    "groups-of-one": (LOGITS, 2, {"num_groups": 8}, ValueError, r"num_groups — need 1 … 4"),
    "top-groups": (
        LOGITS,
        2,
        {"num_groups": 2, "top_groups": 3},
        ValueError,
        r"top_groups — need 1 … 2",
    ),
    "too-few-in-groups": (
        LOGITS,
        3,
        {"num_groups": 4, "top_groups": 1},
        ValueError,
        r"top_groups — need groups that hold top_k = 3 .*they hold 2",
    ),
    "bias-shape": (
        LOGITS,
        2,
        {"correction_bias": torch.zeros(7)},
        ValueError,
        r"correction_bias.shape — need \[8\], got \[7\]",
    ),
    "bias-dtype": (
        LOGITS,
        2,
        {"correction_bias": torch.zeros(8).half()},
        TypeError,
        r"correction_bias.dtype — need float32",
    ),
    "bias-device": (
        LOGITS,
        2,
        {"correction_bias": torch.zeros(8, device="meta")},
        ValueError,
        r"correction_bias.device — need cpu",
    ),
}


@pytest.mark.parametrize("logits, top_k, options, error, match", BAD.values(), ids=BAD)
def test_bad_arguments_are_named(logits, top_k, options, error, match):
    with pytest.raises(error, match=r"^route_topk: .*" + match):
        mxpert.route_topk(logits, top_k, **options)
