"""How CTAs share the layer for a few tokens: every item once, sums that find their place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.core.problem import Combine, Target
from mxpert.moe.hopper import few_tokens_split as few
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.devices import HOPPER_CARDS
from support.hopper_launches import H200, describe

SHAPES = {
    **{name: shape for name, shape in MODEL_SHAPES.items() if shape.top_k <= 8},
    "small": MoEShape(704, 416, 9, 3),
    "one_unit": MoEShape(128, 64, 4, 1),
    "deep": MoEShape(256, 4096, 8, 4),
}
CARDS = H200, HOPPER_CARDS["H100 PCIe"], HOPPER_CARDS["H20"]


class Shares:
    """The arithmetic of `few_tokens_shares`, in Python."""

    def __init__(self, split: few.Split, units: dict[str, int], workers: int, hit: int) -> None:
        self.split, self.units, self.workers, self.hit = split, units, workers, hit

    def unit(self, part: int) -> int:
        return part * self.units["depth1"] // self.split.ranges

    def worker(self, part: int) -> int:
        return self.workers * self.unit(part) // self.units["depth1"]

    def length1(self, part: int) -> int:
        units, team = (
            self.unit(part + 1) - self.unit(part),
            self.worker(part + 1) - self.worker(part),
        )
        return max(-(-self.hit * self.units["rows1"] * units // team), units - 1)

    @property
    def groups(self) -> int:
        return -(-self.units["depth2"] // self.split.depth)

    @property
    def items2(self) -> int:
        return self.hit * self.groups * self.units["rows2"] * self.split.depth

    @property
    def length2(self) -> int:
        return max(-(-self.items2 // self.workers), self.split.depth)


@pytest.mark.parametrize("target", CARDS, ids=["132", "114", "78"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_shares_cover_all_items(name: str, num_tokens: int, target: Target) -> None:
    """Teams hold their range; a row unit's range and a group have two CTAs at most."""
    problem = replace(describe(SHAPES[name], num_tokens, "bf16"), target=target)
    if few.unsupported(problem) is not None:
        pytest.skip(f"two stages: {few.unsupported(problem)}")
    split, units, workers = few.split_of(problem), few.units_of(problem), few.num_ctas(problem)
    most = min(problem.num_experts, num_tokens * problem.top_k)
    for hit in {1, problem.top_k, most}:
        shares = Shares(split, units, workers, hit)
        for part in range(split.ranges):
            own = shares.unit(part + 1) - shares.unit(part)
            team = shares.worker(part + 1) - shares.worker(part)
            assert own >= 1
            length, items = shares.length1(part), hit * units["rows1"] * own
            assert length * team >= items
            ends = [(at // length, (at + own - 1) // length) for at in range(0, items, own)]
            assert all(last - first <= 1 for first, last in ends)
        assert shares.worker(split.ranges) == workers
        length = shares.length2
        assert length * workers >= shares.items2
        starts = range(0, shares.items2, split.depth)
        assert all((at + split.depth - 1) // length - at // length <= 1 for at in starts)
    assert split.width * workers >= num_tokens * problem.hidden_size
    assert few.most_stages(problem) >= 3


@pytest.mark.parametrize("name", ["gpt-oss-120b", "kimi-k2-tp4", "qwen3-235b", "dsv3-ep8"])
def test_shares_are_even(name: str) -> None:
    """At T = 1 no CTA has more than 1.13 times the mean of a stage's items."""
    problem = describe(SHAPES[name], 1, "bf16")
    split, units, workers = few.split_of(problem), few.units_of(problem), few.num_ctas(problem)
    shares = Shares(split, units, workers, problem.top_k)
    mean = problem.top_k * units["rows1"] * units["depth1"] / workers
    assert max(shares.length1(part) for part in range(split.ranges)) <= 1.13 * mean
    if split.depth == 1:
        assert shares.length2 <= 1.13 * shares.items2 / workers + 1


def test_what_needs_two_stages() -> None:
    shape = MODEL_SHAPES["gpt-oss-120b"]

    def why(shape: MoEShape, num_tokens: int, a_format: str, **options: object) -> str | None:
        return few.unsupported(describe(shape, num_tokens, a_format, **options))

    assert why(shape, 2, "bf16") is None
    assert "no room" in str(why(shape, 4, "bf16"))
    assert "1 to 4 tokens" in str(why(shape, 5, "bf16"))
    assert "1 to 8 tokens" in str(why(shape, 9, "mxfp8"))
    assert "1 to 4 tokens" in str(why(shape, 0, "bf16"))
    assert "32 slots" in str(why(replace(shape, top_k=16), 4, "bf16"))
    assert "whole row" in str(why(shape, 1, "fp8_token"))
    assert "rows of a token" in str(why(shape, 1, "bf16", combine=Combine.FLAT))
    on_input = {"apply_router_weight_on_input": True}
    assert "equal ids" in str(why(shape, 1, "bf16", **on_input))
    assert why(replace(shape, top_k=1), 1, "bf16", **on_input) is None
    assert "no room" in str(why(MoEShape(20480, 2048, 16, 4), 1, "bf16"))


def test_units_have_their_sizes() -> None:
    units = few.units_of(describe(MODEL_SHAPES["gpt-oss-120b"], 1, "bf16"))
    assert Counter(units) == Counter(rows1=90, depth1=23, rows2=45, depth2=23)
