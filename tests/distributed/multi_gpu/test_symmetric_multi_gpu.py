"""SYMMETRIC on GPUs: 2 processes, and 4 processes on 2 GPUs.

What they do is in exchange_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import Outcomes, run_scenarios
from tests.distributed.multi_gpu.environment import gpu_environment

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(1800)]

MODULE = "tests.distributed.multi_gpu.exchange_ranks"
ANY_SIZE = ("many_epochs_are_exact", "graphs_of_exact_problems")
TWO = (*ANY_SIZE, "two_objects_on_two_streams")
KILL = "a_killed_rank_is_named"


def started(scenarios: tuple[str, ...], size: int, folder: Path) -> Outcomes:
    with gpu_environment():
        return run_scenarios(
            MODULE, scenarios, size, folder, limit_s=900, timeout_s=300, method="spawn"
        )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return started(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return started(ANY_SIZE, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("scenario", TWO)
def test_two_ranks(two_ranks: Outcomes, scenario: str) -> None:
    two_ranks.check(scenario)


@pytest.mark.parametrize("scenario", ANY_SIZE)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named(size: int, tmp_path: Path) -> None:
    outcomes = started((KILL,), size, tmp_path)
    outcomes.check(KILL, ranks=range(size - 1))
    with pytest.raises(AssertionError, match="did not finish"):
        outcomes.check(KILL)
