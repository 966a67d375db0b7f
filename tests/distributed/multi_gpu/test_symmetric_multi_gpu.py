"""SYMMETRIC on GPUs: 2 processes, and 4 processes on 2 GPUs.

What they do is in exchange_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import run_scenarios, scenario_tests
from tests.distributed.multi_gpu.environment import gpu_environment

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(1800)]

MODULE = "tests.distributed.multi_gpu.exchange_ranks"
ANY_SIZE = ("many_epochs_are_exact", "graphs_of_exact_problems")
TWO = (*ANY_SIZE, "two_objects_on_two_streams")
KILL = "a_killed_rank_is_named"


ON_GPUS = dict(limit_s=900, timeout_s=300, method="spawn")
test_two_ranks = scenario_tests(MODULE, TWO, 2, environment=gpu_environment, **ON_GPUS)
test_four_ranks = scenario_tests(MODULE, ANY_SIZE, 4, environment=gpu_environment, **ON_GPUS)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named(size: int, tmp_path: Path) -> None:
    check_a_killed_rank(size, tmp_path)


def check_a_killed_rank(size: int, folder: Path) -> None:
    with gpu_environment():
        outcomes = run_scenarios(MODULE, (KILL,), size, folder, **ON_GPUS)
    outcomes.check(KILL, ranks=range(size - 1))
    with pytest.raises(AssertionError, match="did not finish"):
        outcomes.check(KILL)
