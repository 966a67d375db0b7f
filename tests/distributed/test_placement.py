"""Placement: who holds which experts, and to which copy each rank sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxpert.distributed import Placement


def maps(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    "num_experts, num_ranks, counts",
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (5, 5, (1,) * 5), (7, 1, (7,)), (7, 2, (4, 3))],
)
def test_contiguous_sizes_differ_by_at_most_one(
    num_experts: int, num_ranks: int, counts: tuple[int, ...]
) -> None:
    placement = Placement.contiguous(num_experts, num_ranks)
    assert (placement.num_experts, placement.num_ranks) == (num_experts, num_ranks)
    assert placement.num_local_experts == counts
    everyone = [expert for rank in range(num_ranks) for expert in placement.local_experts(rank)]
    assert everyone == list(range(num_experts))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any number of copies of each expert, local ids in any order."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    held = torch.zeros(ranks, experts, dtype=torch.bool)
    for expert in range(experts):
        held[draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)), expert] = True
    for rank in range(ranks):
        held[rank, draw(st.integers(0, experts - 1))] = True
    result = torch.full((ranks, experts), -1, dtype=torch.int32)
    for rank in range(ranks):
        own = held[rank].nonzero().flatten().tolist()
        order = draw(st.permutations(range(len(own))))
        result[rank, own] = torch.tensor(order, dtype=torch.int32)
    return Placement(result)


@settings(deadline=None, max_examples=60)
@given(placements())
def test_each_source_sends_to_exactly_one_copy(placement: Placement) -> None:
    ranks, experts = placement.num_ranks, placement.num_experts
    for source in range(ranks):
        for expert in range(experts):
            owner = int(placement.owners[source, expert])
            local = int(placement.local_ids[source, expert])
            assert placement.expert_maps[owner, expert] == local >= 0
            assert placement.local_experts(owner)[local] == expert
            copies = (placement.expert_maps[:, expert] >= 0).nonzero().flatten().tolist()
            assert owner == (source if source in copies else copies[source % len(copies)])
            received = [
                int(placement.received_ids(rank)[source, expert + 1]) for rank in range(ranks)
            ]
            assert received == [local if rank == owner else -1 for rank in range(ranks)]
    assert sum(placement.share(rank) for rank in range(ranks)) == pytest.approx(1)


def test_a_share_counts_the_experts_that_each_source_sends() -> None:
    assert Placement.contiguous(5, 2).share(0) == pytest.approx(3 / 5)
    copied = Placement(maps([0, 1, -1], [-1, 0, 1]))  # both compute the second of their own tokens
    assert (copied.share(0), copied.share(1)) == pytest.approx((1 / 2, 1 / 2))


@given(placements())
@settings(deadline=None, max_examples=20)
def test_foreign_columns_are_no_expert(placement: Placement) -> None:
    for rank in range(placement.num_ranks):
        table = placement.received_ids(rank)
        assert table.shape == (placement.num_ranks, placement.num_experts + 2)
        assert table.dtype == torch.int32
        assert (table[:, [0, -1]] == -1).all()


def test_copies_are_taken_in_turn() -> None:
    placement = Placement(maps([0, -1], [1, 0], [-1, 0], [-1, 0]))
    assert placement.owners[:, 0].tolist() == [0, 1, 0, 1]
    assert placement.owners[:, 1].tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize(
    "expert_maps, error, text",
    [
        ([[0]], TypeError, "expert_maps — need a torch.Tensor"),
        (torch.zeros(1, 1), TypeError, "expert_maps.dtype"),
        (torch.zeros(2, dtype=torch.int32), ValueError, "expert_maps.shape"),
        (torch.zeros(0, 3, dtype=torch.int32), ValueError, "expert_maps.shape"),
        (maps([0, 2, -1]), ValueError, r"expert_maps\[0\] — need the local ids 0 … L − 1"),
        (maps([0, 0, 1]), ValueError, r"expert_maps\[0\]"),
        (maps([0, 1], [-2, -1]), ValueError, r"expert_maps\[1\]"),
        (maps([0, 1], [-1, -1]), ValueError, r"expert_maps\[1\]"),
        (
            maps([0, 1, -1], [0, -1, -1]),
            ValueError,
            r"need each expert on a rank, got \[2\] on none",
        ),
        (maps([0]).to("meta"), ValueError, "expert_maps.device — need cpu"),
    ],
)
def test_maps_that_do_not_fit_are_refused(expert_maps: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Placement(expert_maps)


@pytest.mark.parametrize(
    "arguments, text",
    [((3, 4), "num_experts — need at least 4, got 3"), ((4, 0), "num_ranks"), ((0, 1), "num_ex")],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Placement.contiguous(*arguments)


@pytest.mark.parametrize("method", ["expert_map", "local_experts", "received_ids"])
def test_ranks_out_of_range_are_refused(method: str) -> None:
    placement = Placement.contiguous(4, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank — need"):
            getattr(placement, method)(rank)


def test_digest_tells_placements_apart() -> None:
    one = Placement.contiguous(4, 2)
    assert one.digest == Placement(one.expert_maps.clone()).digest
    others = [
        Placement.contiguous(4, 1),
        Placement.contiguous(5, 2),
        Placement(one.expert_maps.flip(0)),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4
    assert repr(one) == "Placement(4 experts on 2 ranks: 2, 2)"
