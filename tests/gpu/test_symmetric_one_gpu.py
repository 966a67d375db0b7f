"""SYMMETRIC with two processes that share one GPU: torch's symmetric memory, flags, graphs.

The GPU runs the processes in turn. What they do is in multi_gpu/exchange_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from multi_gpu.test_symmetric_gpu import ANY_SIZE, KILL, started

from support.ranks import Outcomes

pytestmark = pytest.mark.timeout(900)

SCENARIOS = (*ANY_SIZE, "quantised_rows_give_the_same_bits")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return started(SCENARIOS, 2, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(outcomes: Outcomes, scenario: str) -> None:
    outcomes.check(scenario)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    outcomes = started((KILL,), 2, tmp_path)
    outcomes.check(KILL, ranks=[0])
    with pytest.raises(AssertionError, match="did not finish"):
        outcomes.check(KILL)
