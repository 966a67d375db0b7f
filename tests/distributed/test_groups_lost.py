"""Ranks that die or are late: a bounded wait, an error that names them, and a group that goes on.

What the ranks do is in lost_scenarios.py. Four start; each of the last two scenarios loses one.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support import ranks
from support.ranks import Outcomes, run_once, run_scenarios

SURVIVORS = {
    "a_rank_is_late": (0, 1, 2, 3),
    "a_rank_dies_before_it_sends": (0, 1, 2),
    "a_rank_dies_between_dispatch_and_combine": (0, 2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    module = "tests.distributed.lost_scenarios"
    return run_once(tmp_path_factory, module, list(SURVIVORS), 4, timeout_s=20)


@pytest.mark.parametrize("scenario", SURVIVORS)
def test_the_others_go_on(outcomes: Outcomes, scenario: str) -> None:
    outcomes.check(scenario, SURVIVORS[scenario])


def test_a_rank_that_died_has_no_outcome(outcomes: Outcomes) -> None:
    with pytest.raises(AssertionError, match="rank 3 of 4: did not finish"):
        outcomes.check("a_rank_dies_before_it_sends")


def test_ranks_end_soon_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "AFTER_FAILURE_S", 0.5)
    started = time.monotonic()
    outcomes = run_scenarios("tests.distributed.lost_scenarios", ["rank_1_fails"], 2, tmp_path)
    assert time.monotonic() - started < 50
    with pytest.raises(AssertionError, match=r"did not finish\n(.|\n)*ValueError: the cause"):
        outcomes.check("rank_1_fails")
