"""The layer for a few tokens from logits: the bits of `route_topk` followed by the layer from ids.

What the launch chooses is compared through the layer's results, which no other choice gives.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import Scoring, SiLU, TopKOptions, compares_scores
from mxpert.moe.hopper import few_tokens_limits, host
from mxpert.moe.weights import MoEWeights
from mxpert.routing.op import choose_experts
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.races import hunt
from tests.moe.hopper.test_few_tokens_gpu import few

pytestmark = pytest.mark.usefixtures("only_hopper")

HIDDEN, FEATURES = 704, 416

ROUTINGS = {
    "gpt-oss": TopKOptions(),
    "qwen2-moe": TopKOptions(normalize=False),
    "kimi-k2": TopKOptions("sigmoid", routed_scaling_factor=2.827),
    "llama4": TopKOptions("sigmoid", normalize=False),
    "deepseek-v4": TopKOptions("sqrtsoftplus", routed_scaling_factor=1.5),
    "ernie-4.5": TopKOptions(),
}
GROUPED = {
    "deepseek-v3": TopKOptions(
        "sigmoid", num_groups=8, top_groups=4, routed_scaling_factor=2.5, group_score="top2"
    ),
    "deepseek-v2": TopKOptions(
        normalize=False, num_groups=8, top_groups=3, routed_scaling_factor=16.0, group_score="max"
    ),
    "two best by softmax": TopKOptions(num_groups=8, top_groups=4, group_score="top2"),
    "the best by softmax, biased": TopKOptions(num_groups=8, top_groups=4, group_score="max"),
    "sqrtsoftplus": TopKOptions("sqrtsoftplus", num_groups=8, top_groups=4, group_score="top2"),
}
"""Of 8 groups; tests have others, too."""
BIASED = (
    "kimi-k2",
    "deepseek-v4",
    "ernie-4.5",
    "deepseek-v3",
    "the best by softmax, biased",
    "sqrtsoftplus",
)


def clamped_or_not(routings: dict[str, TopKOptions]) -> list[Any]:
    """Each without clamp_nan, and with it where the launch then chooses experts."""
    return [
        pytest.param(name, clamp_nan, id=f"{name}{'-clamped' * clamp_nan}")
        for name, routing in routings.items()
        for clamp_nan in (False, True)
        if not clamp_nan
        or routing.scoring is not Scoring.SOFTMAX
        or not compares_scores(routing, name in BIASED)
    ]


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((9, 3), (128, 4), (385, 8), (512, 10))
"""Experts, top_k: of a lane 1, 4, 13 and 16 experts."""
GROUP_SIZES = (
    (256, 8, 8, 4),
    (160, 6, 8, 3),
    (512, 10, 32, 5),
    (512, 16, 2, 1),
    (62, 7, 31, 4),
    (60, 5, 3, 2),
    (64, 8, 8, 1),
    (64, 8, 8, 8),
    (10, 2, 5, 1),
)
"""Experts, top_k, groups, groups that compete. A group has 4, 1, 16 or 8 lanes; 31, 3 and 5 groups
leave some lanes without experts. 64 and 10 experts: all of one group are chosen; all groups
compete."""


@functools.cache
def weights_of(num_experts: int, device: torch.device) -> MoEWeights:
    """Prepared weights, whose experts all differ."""
    shape = MoEShape(HIDDEN, FEATURES, num_experts, 1, activation=SiLU(), has_bias=True)
    return random_moe_problem(shape, 1, device=device).weights.prepare(device=device)


def tokens(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, HIDDEN, device=device).bfloat16()


def from_logits(
    x: torch.Tensor,
    weights: MoEWeights,
    logits: torch.Tensor,
    top_k: int,
    routing: TopKOptions,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    options = {"activation": "silu"} | options
    with mxpert.override(config=few(options.get("activation_format", "bf16")), backend="hopper"):
        return mxpert.fused_moe_from_logits(
            x, weights, logits, top_k, routing=routing, correction_bias=bias, **options
        )


def expected(
    x: torch.Tensor,
    weights: MoEWeights,
    logits: torch.Tensor,
    top_k: int,
    routing: TopKOptions,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The top-k kernel of its own, then the layer from ids."""
    options = {"activation": "silu"} | options
    with mxpert.override():  # a pinned backend is that of the layer
        routed = choose_experts(logits, top_k, routing, bias)
    with mxpert.override(config=few(options.get("activation_format", "bf16")), backend="hopper"):
        return mxpert.fused_moe(x, weights, *routed, **options)


@pytest.fixture
def in_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where another launch chooses the experts."""

    def refuse(*_: object) -> None:
        raise AssertionError("the experts are chosen by another launch")

    monkeypatch.setattr(host, "routed", refuse)


@pytest.mark.usefixtures("in_the_launch")
@pytest.mark.parametrize("name, clamp_nan", clamped_or_not(ROUTINGS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_experts, top_k", SIZES)
def test_it_chooses_as_route_topk(
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    name: str,
    clamp_nan: bool,
    device: torch.device,
) -> None:
    weights, routing = weights_of(num_experts, device), replace(ROUTINGS[name], clamp_nan=clamp_nan)
    bias = torch.randn(num_experts, device=device) * 0.3 if name in BIASED else None
    torch.manual_seed(top_k)
    for count in (1, 2, 3, 4):
        if count * top_k > few_tokens_limits.SLOTS:
            continue
        # Logits of 16 bits and rounded ones have equal values: the lower id comes first.
        logits = (torch.randn(count, num_experts, device=device) * 2).to(dtype)
        logits[-1] = logits[-1].round()
        call = tokens(count, device), weights, logits, top_k, routing, bias
        assert_exact(from_logits(*call), expected(*call), f"{count} tokens")


@pytest.mark.usefixtures("in_the_launch")
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_experts, top_k, num_groups, top_groups", GROUP_SIZES)
def test_it_chooses_groups_as_route_topk(
    num_experts: int,
    top_k: int,
    num_groups: int,
    top_groups: int,
    dtype: torch.dtype,
    name: str,
    device: torch.device,
) -> None:
    """float32 outputs show each bit of a weight; tokens of equal groups get the first of them."""
    routing = replace(GROUPED[name], num_groups=num_groups, top_groups=top_groups)
    weights, size = weights_of(num_experts, device), num_experts // num_groups
    torch.manual_seed(num_groups)
    bias = torch.randn(num_experts, device=device) * 0.3 if name in BIASED else None
    same_bias = None if bias is None else bias[:size].repeat(num_groups)
    for count in (1, 2, 3, 4):
        if count * top_k > few_tokens_limits.SLOTS:
            continue
        logits = (torch.randn(count, num_experts, device=device) * 2).to(dtype)
        logits[-1] = logits[-1].round()
        x = tokens(count, device)
        same = logits[:, :size].repeat(1, num_groups)
        for case in ((logits, bias), (same, same_bias)):
            call = x, weights, case[0], top_k, routing, case[1]
            got = from_logits(*call, out_dtype=torch.float32)
            assert_exact(got, expected(*call, out_dtype=torch.float32), f"{count} tokens")
        with mxpert.override():
            _, ids = choose_experts(same, top_k, routing, same_bias)
        assert int(ids.max()) < top_groups * size


BAD = {
    "nan": lambda row: row.index_fill_(0, torch.tensor([3, 70], device=row.device), torch.nan),
    "all nan": lambda row: row.fill_(torch.nan),
    "inf": lambda row: row.index_fill_(0, torch.tensor([90], device=row.device), torch.inf),
    "all -inf": lambda row: row.fill_(-torch.inf),
    "zeros of both signs": lambda row: row.zero_()[::3].neg_(),
    "huge": lambda row: row.mul_(1e30),
    "32 equal ones": lambda row: row[1::4].fill_(50.0),
    "64 equal ones": lambda row: row[1::2].fill_(50.0),
    "groups of nan": lambda row: row[16:].fill_(torch.nan),
    "groups of -inf": lambda row: row[:100].fill_(-torch.inf),
    "one of each group": lambda row: row.view(8, 16)[:, 1:].fill_(-torch.inf),
}


@pytest.mark.usefixtures("in_the_launch")
@pytest.mark.parametrize("name, clamp_nan", clamped_or_not(ROUTINGS | GROUPED))
@pytest.mark.parametrize("bad", BAD)
def test_bad_logits_are_a_matter_of_their_token(
    bad: str, name: str, clamp_nan: bool, device: torch.device
) -> None:
    routing = replace((ROUTINGS | GROUPED)[name], clamp_nan=clamp_nan)
    weights = weights_of(128, device)
    bias = torch.randn(128, device=device) if name in BIASED else None
    logits = torch.randn(3, 128, device=device)
    BAD[bad](logits[1])
    call = tokens(3, device), weights, logits, 4, routing, bias
    got, wanted = from_logits(*call), expected(*call)
    assert_exact(got, wanted, bad)
    assert got[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("in_the_launch")
@pytest.mark.parametrize("a_format, most", [("bf16", 4), ("mxfp8", 8), ("mxfp4", 8)])
def test_formats_dtypes_and_maps(a_format: str, most: int, device: torch.device) -> None:
    weights, routing = weights_of(9, device), ROUTINGS["kimi-k2"]
    expert_map = torch.full((64,), -1, dtype=torch.int32, device=device)
    expert_map[5::7] = torch.arange(9, dtype=torch.int32, device=device)
    for count in range(1, most + 1):
        logits = torch.randn(count, 80, device=device)[:, :64]  # rows that are not adjacent
        call = tokens(count, device), weights, logits, 4, routing, torch.randn(64, device=device)
        options: dict[str, Any] = dict(activation_format=a_format, expert_map=expert_map)
        for out_dtype in (torch.bfloat16, torch.float32):
            options["out_dtype"] = out_dtype
            assert_exact(from_logits(*call, **options), expected(*call, **options), f"{count}")


@pytest.mark.usefixtures("in_the_launch")
def test_weights_on_the_input(device: torch.device) -> None:
    call = tokens(4, device), weights_of(9, device), torch.randn(4, 9, device=device), 1
    options: dict[str, Any] = dict(apply_router_weight_on_input=True)
    routed = (*call, ROUTINGS["llama4"])
    assert_exact(from_logits(*routed, **options), expected(*routed, **options), "on input")


OTHERS = {
    "many groups": (66, TopKOptions("sigmoid", num_groups=33, top_groups=4), True),
    "large groups": (408, TopKOptions("sigmoid", num_groups=12, top_groups=4), True),
    "many experts": (513, TopKOptions(), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_choose(name: str, device: torch.device) -> None:
    """A launch before it chooses; the layer is one launch all the same."""
    num_experts, routing, is_biased = OTHERS[name]
    bias = torch.randn(num_experts, device=device) if is_biased else None
    logits = torch.randn(2, num_experts, device=device)
    call = tokens(2, device), weights_of(num_experts, device), logits, 4, routing, bias
    assert_exact(from_logits(*call), expected(*call), name)


def test_graphs_follow_logits(device: torch.device) -> None:
    weights, routing = weights_of(128, device), ROUTINGS["gpt-oss"]
    x, logits = tokens(2, device), torch.randn(2, 128, device=device)
    call = x, weights, logits, 4, routing
    from_logits(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [from_logits(*call) for _ in range(3)]
    for seed in range(20):
        torch.manual_seed(seed)
        logits.normal_(), x.normal_()
        graph.replay()
        for result in results:
            assert_exact(result, expected(*call), "graph")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, num_experts", [("kimi-k2", 385), ("deepseek-v3", 256)])
@pytest.mark.parametrize("count", [1, 4])
def test_repeats_beside_other_work(
    count: int, name: str, num_experts: int, device: torch.device, pytestconfig: pytest.Config
) -> None:
    """Graphs of 50 layers give the same bits while other kernels compete for the SMs."""
    repeats, weights = pytestconfig.getoption("--race-repeats"), weights_of(num_experts, device)
    inputs = Layer(count, weights, (ROUTINGS | GROUPED)[name], device)
    found = hunt(inputs.bits, inputs.redraw, repeats, device, per_graph=50)
    assert found.mismatches == 0, f"{found.mismatches} values differed in {repeats} repeats"


class Layer:
    """A layer whose tokens and logits change between graphs."""

    def __init__(
        self, count: int, weights: MoEWeights, routing: TopKOptions, device: torch.device
    ) -> None:
        self.x, self.weights, self.routing = tokens(count, device), weights, routing
        self.logits = torch.randn(count, weights.num_experts, device=device)
        self.bias = torch.randn(weights.num_experts, device=device)

    def bits(self) -> tuple[torch.Tensor, ...]:
        call = self.x, self.weights, self.logits, 8, self.routing, self.bias
        return (from_logits(*call, out_dtype=torch.float32).view(torch.int32),)

    def redraw(self) -> None:
        self.x.normal_(), self.logits.normal_()
