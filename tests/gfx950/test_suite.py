"""The rule by which ``--gfx950`` chooses cases and schedules, and what its plugin counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.gfx950_suite import MOST_CASES, NOT_GFX950, SCHEDULES, Executed, chosen, seed_of

CONFORMANCE = Path(__file__).resolve().parent.parent / "conformance"


@pytest.mark.parametrize("count", [1, 2, 3, MOST_CASES, MOST_CASES + 1, 216])
def test_every_function_runs_in_both_schedules(count: int) -> None:
    cases = chosen(count)
    assert len(cases) == min(count, MOST_CASES)
    assert set(cases) <= set(range(count))
    used = Counter(schedule for schedules in cases.values() for schedule in schedules)
    assert set(used) == set(SCHEDULES)
    assert max(used.values()) - min(used.values()) <= 1


def test_schedules_do_not_follow_a_parameter() -> None:
    """Of 16 cases, each value of an inner parameter of 2, 4 or 8 values gets both schedules."""
    cases = chosen(16)
    for values in (2, 4, 8):
        for value in range(values):
            assert len({cases[case] for case in range(value, 16, values)}) == 2


def test_files_that_are_left_out_exist() -> None:
    assert set(NOT_GFX950) <= {path.name for path in CONFORMANCE.glob("test_*.py")}


def test_a_kernel_of_one_schedule_is_found() -> None:
    executed, other = Executed(), Executed()
    executed.add("both", "lowest", 10)
    other.add("both", "random", 20)
    other.add("one", "random", 5)
    executed.merge(other.plain())
    assert executed.kernels == {"both", "one"}
    assert executed.one_sided == ["one"]
    assert executed.counts.total() == 35


def test_seeds_depend_on_the_name_alone() -> None:
    assert seed_of("a") == seed_of("a") != seed_of("b")
