"""Every transport with an NCCL group, one process a GPU, against one GPU with all experts.

What the processes do is in expert_parallel_ranks.py.
"""

from __future__ import annotations

import pytest
import torch

from support.ranks import Outcomes, run_scenarios
from tests.distributed.multi_gpu.environment import gpu_environment

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

MOST_RANKS = 8
SCENARIOS = ("graphs_equal_eager_calls", "a_second_stream_is_refused")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with gpu_environment():
        return run_scenarios(
            "tests.distributed.multi_gpu.expert_parallel_ranks",
            SCENARIOS,
            min(torch.cuda.device_count(), MOST_RANKS),
            tmp_path_factory.mktemp("ranks"),
            limit_s=800,
            timeout_s=300,
            method="spawn",
        )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(outcomes: Outcomes, scenario: str) -> None:
    outcomes.check(scenario)
