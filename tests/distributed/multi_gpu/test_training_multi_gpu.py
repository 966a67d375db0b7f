"""MXMoE over two GPUs and NCCL against one with all experts, and the example under torchrun.

What the processes do is in training_ranks.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ranks import scenario_tests
from tests.distributed.multi_gpu.environment import ENVIRONMENT, gpu_environment

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
SCENARIOS = (
    "gather_equals_one_rank_in_float64",
    "all_to_all_equals_one_rank_in_float64",
    "one_rank_gets_every_token",
    "unused_slots_are_not_read",
    "float32_keeps_the_contract",
    "bf16_and_mxfp8_keep_their_floors",
    "mxfp8_wire_gives_the_same_results",
    "the_comparison_sees_planted_errors",
    "first_weights_are_a_slice",
    "repeats_checkpoints_and_main_grad_give_the_same_bits",
)


MODULE = "tests.distributed.multi_gpu.training_ranks"
ON_GPUS = dict(environment=gpu_environment, limit_s=800, timeout_s=300, method="spawn")
test_scenario = scenario_tests(MODULE, SCENARIOS, RANKS, **ON_GPUS)


def train(folder: Path, *command: str) -> dict[str, list[float]]:
    """Losses of each format of a run of the example."""
    text = ROOT / "tests/training/text.txt"
    done = subprocess.run(
        [sys.executable, *command, "--size=small", "--steps=30", "--device=cuda", f"--text={text}"]
        + [f"--output={folder}"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads((folder / "loss.json").read_text())["runs"]
    return {name: run["losses"] for name, run in runs.items()}


def test_the_example_learns_as_on_one_gpu(tmp_path: Path) -> None:
    """Within the 2 % that the example itself allows between two formats."""
    script = str(ROOT / "examples/train_moe_lm.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launcher.append(f"--nproc-per-node={RANKS}")
    ranks = train(tmp_path / "ranks", *launcher, script, f"--expert-parallel={RANKS}")
    one = train(tmp_path / "one", script, f"--micro-batches={RANKS}")
    for name, losses in one.items():
        assert losses[-1] < 0.8 * losses[0]
        assert ranks[name] == pytest.approx(losses, rel=0.02), name
