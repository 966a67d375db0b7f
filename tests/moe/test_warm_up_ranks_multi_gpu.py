"""mxpert.warm_up over several GPUs; what the processes do is in warm_up_gpu_ranks.py."""

from __future__ import annotations

import pytest
import torch

from support.ranks import run_scenarios

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

MOST_RANKS = 8
SCENARIO = "no_kernel_compiles_after_warm_up"


def test_no_kernel_compiles_after_warm_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")  # no multicast objects
        outcomes = run_scenarios(
            "tests.distributed.warm_up_gpu_ranks",
            [SCENARIO],
            min(torch.cuda.device_count(), MOST_RANKS),
            tmp_path_factory.mktemp("ranks"),
            limit_s=800,
            timeout_s=300,
            method="spawn",
        )
    outcomes.check(SCENARIO)
