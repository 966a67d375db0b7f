"""The kernel that groups a plan's blocks into runs, against a list made in Python."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import mxpert
from mxpert.moe.hopper import tile_list
from mxpert.moe.hopper.tile_list import Schedules, tile_schedule

ROWS = [
    (1, 64, 65, 0, 128, 193, 256, 257, 320, 321, 385, 449, 512, 513, 0, 577),
    (0, 0, 5),
    (64 * 1100, 64 * 1025, 3),  # more blocks than the kernel scans at once
    tuple(range(0, 700, 30)),
]


@triton.jit
def _nothing_to_wait_for():
    tl.static_assert(True)


@pytest.fixture(autouse=True)
def _no_dependent_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not run its instructions."""
    if request.config.getoption("--gfx950"):
        pytest.skip("Hopper's: gfx950 has no dependent launch")
    monkeypatch.setattr(tile_list, "launch_dependents_and_wait", _nothing_to_wait_for)


def runs_of(blocks: int, width: int, even: bool) -> list[int]:
    """Lengths of the runs of an expert with so many blocks."""
    full, rest = divmod(blocks, width)
    lengths = [width] * full + ([rest] if rest else [])
    if even and rest == 1 and full and width > 2:
        lengths[-2:] = [width - 1, 2]
    return lengths


@pytest.mark.parametrize("even", [False, True], ids=["plain", "even"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("per_unit", [1, 2])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"E{len(rows)}")
def test_runs(rows: tuple[int, ...], per_unit: int, width: int, even: bool) -> None:
    """Every block is in one run, of one expert; even lists end without a lone block."""
    block_m = 64
    ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))[:, None].int()
    plan = mxpert.make_routing_plan(
        torch.ones(len(ids), 1), ids, num_experts=len(rows), routing_block_m=block_m * per_unit
    )
    found = tile_schedule(plan, block_m, width, None, even=even)
    expected, block = [], 0
    for expert, count in enumerate(rows):
        blocks = -(-count // plan.routing_block_m) * per_unit
        for length in runs_of(blocks, width, even):
            expected.append((block, length, expert))
            block += length
    count = int(found.count)
    lists = (found.first_block, found.blocks, found.expert)
    assert list(zip(*(each[:count].tolist() for each in lists), strict=True)) == expected


def test_a_layer_keeps_lists_of_both_kinds() -> None:
    ids = torch.zeros(300, 1, dtype=torch.int32)
    plan = mxpert.make_routing_plan(torch.ones(300, 1), ids, num_experts=1, routing_block_m=64)
    made: Schedules = {}
    kinds = list(itertools.product((3, 4), (False, True)))
    lists = [tile_schedule(plan, 64, width, made, even=even) for width, even in kinds]
    assert len(made) == 4
    again = [tile_schedule(replace(plan), 64, width, made, even=even) for width, even in kinds]
    assert all(one is other for one, other in zip(lists, again, strict=True))
    assert [each.blocks[: int(each.count)].tolist() for each in lists] == [
        [3, 2],
        [3, 2],
        [4, 1],
        [3, 2],
    ]
