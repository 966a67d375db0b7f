"""Which layers one launch serves for a few tokens, how CTAs share them, the memory they take."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

import torch

from mxpert.core import cuda_compiler
from mxpert.core.problem import Combine, MoEProblem, SwiGLU, Target, TopKOptions
from mxpert.moe.hopper import few_tokens_limits as few
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS
from mxpert.moe.inputs import LogitsInputs
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.devices import HOPPER_CARDS
from support.hopper_launches import H200, describe
from support.without_data import packed, rows_of, weights_of

SHAPES = {
    **{name: shape for name, shape in MODEL_SHAPES.items() if shape.top_k <= 8},
    "small": MoEShape(704, 416, 9, 3),
    "one_unit": MoEShape(128, 64, 4, 1),
    "deep": MoEShape(256, 4096, 8, 4),
}
CARDS = H200, HOPPER_CARDS["H100 PCIe"], HOPPER_CARDS["H20"]


def share(which: int, of: int, count: int) -> int:
    """`share` of the kernel: the first of `count` things that one of `of` takes."""
    product = which * count
    assert product < 1 << 32  # the kernel multiplies 32-bit words
    return product // of


@pytest.mark.parametrize("target", CARDS, ids=["132", "114", "78"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_teams_have_room_for_their_items(name: str, num_tokens: int, target: Target) -> None:
    """However many experts the tokens hit, no team has more items than the kernel's arrays."""
    problem = replace(describe(SHAPES[name], num_tokens, "bf16"), target=target)
    reason = few.unsupported(problem)
    assert reason is None, reason
    units, sizes, teams = few.units_of(problem), few.sizes_of(problem), few.num_teams(problem)
    ctas = few.num_ctas(problem)
    for hit in range(1, min(problem.num_experts, num_tokens * problem.top_k) + 1):
        items = hit * units["depth_2"]
        ends = [share(team, teams, items) for team in range(teams + 1)]
        assert max(last - first for first, last in itertools.pairwise(ends)) <= sizes.items
        assert share(ctas, ctas, hit * units["units_1"]) == hit * units["units_1"]
    most = few.most_stages(problem)
    assert most >= 2
    assert few.shared_bytes(problem, most) <= target.shared_memory
    assert few.shared_bytes(problem, most + 1) > target.shared_memory


@pytest.mark.parametrize("name", ["gpt-oss-120b", "kimi-k2-tp4", "qwen3-235b", "dsv3-ep8"])
def test_shares_are_even(name: str) -> None:
    """At T = 1 no CTA has more than 1.13 times the mean of a stage's units and items."""
    problem = describe(SHAPES[name], 1, "bf16")
    units, ctas = few.units_of(problem), few.num_ctas(problem)
    mean = problem.top_k * units["units_1"] / ctas
    assert -(-problem.top_k * units["units_1"] // ctas) <= max(1.13 * mean, 1)
    teams = few.num_teams(problem)
    mean = problem.top_k * units["depth_2"] / teams
    assert few.sizes_of(problem).items <= max(1.13 * mean, 1)


def test_what_needs_two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = MODEL_SHAPES["gpt-oss-120b"]

    def why(shape: MoEShape, num_tokens: int, a_format: str, **options: object) -> str | None:
        return few.unsupported(describe(shape, num_tokens, a_format, **options))

    assert why(shape, 4, "bf16") is None
    assert why(shape, 8, "mxfp8") is None
    assert "1 to 4 tokens" in str(why(shape, 5, "bf16"))
    assert "1 to 8 tokens" in str(why(shape, 9, "mxfp8"))
    assert "1 to 4 tokens" in str(why(shape, 0, "bf16"))
    assert "32 slots" in str(why(replace(shape, top_k=16), 4, "bf16"))
    assert "whole row" in str(why(shape, 1, "fp8_token"))
    assert "rows of a token" in str(why(shape, 1, "bf16", combine=Combine.FLAT))
    on_input = {"apply_router_weight_on_input": True}
    assert "equal ids" in str(why(shape, 1, "bf16", **on_input))
    assert why(replace(shape, top_k=1), 1, "bf16", **on_input) is None
    assert "no room" in str(why(MoEShape(40960, 2048, 16, 4), 1, "bf16"))
    few_sms = replace(describe(shape, 1, "bf16"), target=replace(H200, num_sms=3))
    assert "4 to 256 SMs" in str(few.unsupported(few_sms))
    monkeypatch.setattr(few, "ACTIVATIONS", ("silu",))
    assert "activations silu" in str(why(replace(shape, activation=SwiGLU()), 1, "bf16"))
    monkeypatch.undo()
    monkeypatch.setattr(few, "missing_compiler", lambda: "needs cuda-core (pip install cuda-core)")
    assert "pip install cuda-core" in str(why(shape, 1, "bf16"))


def test_groups_of_16_take_two_launches_of_two_tokens() -> None:
    def nvfp4(num_tokens: int, shape: MoEShape = MODEL_SHAPES["gpt-oss-120b"]) -> MoEProblem:
        made = describe(shape, num_tokens, "bf16")
        return replace(made, weight_format="nvfp4", weight_layout=HOPPER_GROUPS)

    assert all(few.unsupported(nvfp4(num_tokens)) is None for num_tokens in (1, 2, 3, 4))
    assert "1 to 4 tokens" in str(few.unsupported(nvfp4(5)))
    assert few.tokens_of_launch(nvfp4(4)) == 2
    assert few.sizes_of(nvfp4(4)) == few.sizes_of(nvfp4(2)) != few.sizes_of(nvfp4(1))
    wide = replace(MODEL_SHAPES["gpt-oss-120b"], top_k=16)
    assert few.unsupported(nvfp4(4, wide)) is None
    assert "32 slots" in str(few.unsupported(nvfp4(2, replace(wide, top_k=17))))


def chooses(
    num_experts: int, top_k: int, routing: TopKOptions | None, *, step: int = 1, biased: bool = True
) -> bool:
    """Whether the launch chooses `top_k` experts from logits that are `step` elements apart."""
    shape = replace(MODEL_SHAPES["gpt-oss-120b"], num_experts=num_experts, top_k=top_k)
    problem = replace(describe(shape, 1, "bf16"), routing=routing, num_routed=num_experts)
    inputs = LogitsInputs(
        rows_of(1, problem.hidden_size, None),
        weights_of(problem, packed, has_bias=True),
        torch.empty(1, num_experts * step, device="meta")[:, ::step],
        torch.empty(num_experts, device="meta") if biased else None,
    )
    return few.chooses_experts(problem, inputs)


def in_groups(num_groups: int, top_groups: int = 1) -> TopKOptions:
    return TopKOptions("sigmoid", num_groups=num_groups, top_groups=top_groups)


def test_which_experts_it_chooses() -> None:
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for biased in (False, True):
            assert chooses(128, 4, TopKOptions(scoring), biased=biased)
            routing = TopKOptions(scoring, num_groups=8, top_groups=3, group_score="max")
            assert chooses(160, 6, routing, biased=biased)
            softmax = scoring == "softmax"
            clamped = TopKOptions(scoring, clamp_nan=True)
            assert chooses(128, 4, clamped, biased=biased) == (not softmax or not biased)
            assert chooses(160, 6, replace(routing, clamp_nan=True)) == (not softmax)
    assert not chooses(128, 4, None)
    assert not chooses(128, 4, TopKOptions(), step=2)
    assert chooses(512, 16, TopKOptions())
    assert not chooses(513, 16, TopKOptions())
    assert not chooses(512, 17, TopKOptions())


def test_which_groups_it_chooses() -> None:
    assert chooses(256, 8, in_groups(8, 4))  # DeepSeek-V3
    assert chooses(160, 6, in_groups(8, 3))  # DeepSeek-V2
    assert chooses(512, 16, in_groups(2))
    assert chooses(512, 16, in_groups(32))
    assert chooses(62, 2, in_groups(31))
    assert not chooses(66, 2, in_groups(33))
    assert not chooses(520, 8, in_groups(8))
    assert chooses(12 * 32, 8, in_groups(12))  # as many lanes as 16 groups have
    assert not chooses(12 * 33, 8, in_groups(12))


@pytest.mark.parametrize("num_groups", range(1, few.LANES + 1))
def test_each_expert_has_a_lane(num_groups: int) -> None:
    """Lanes hold the experts that the kernel gives them, each of them once."""
    lanes = few.group_lanes(num_groups)
    assert num_groups * lanes <= few.LANES
    assert lanes & (lanes - 1) == 0
    for size in range(2, few.LANES * 16 // num_groups + 1):
        held = few.lane_experts(num_groups * size, num_groups)
        experts = Counter(
            group * size + expert
            for group, lane in itertools.product(range(num_groups), range(lanes))
            for expert in range(lane, size, lanes)[:held]
        )
        assert experts == Counter(range(num_groups * size))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_compiler.missing_compiler() is None
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        monkeypatch.setattr(
            cuda_compiler.importlib.util,
            "find_spec",
            lambda name, absent=module: None if name == absent else find_spec(name),
        )
        cuda_compiler.missing_compiler.cache_clear()
        assert f"pip install {package}" in str(cuda_compiler.missing_compiler())
        monkeypatch.undo()
    cuda_compiler.missing_compiler.cache_clear()


def test_units_have_their_sizes() -> None:
    units = few.units_of(describe(MODEL_SHAPES["gpt-oss-120b"], 1, "bf16"))
    assert Counter(units) == Counter(units_1=90, depth_1=23, units_2=45, depth_2=23)
