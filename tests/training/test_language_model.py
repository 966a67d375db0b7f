"""A toy MoE language model on real text learns as well in MXFP8 as in bf16, on the CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mxpert.training.autograd

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_mxfp8.py"
SIZE = ["--steps=60", "--batch=4", "--length=32", "--hidden-size=64", "--num-layers=1",
        "--num-experts=4", "--device=cpu"]
TOLERANCE = 0.02
"""The contract's: the final loss in MXFP8 lies within 2 % of bf16's."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_mxfp8", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def baseline(example: ModuleType) -> float:
    """Final loss in bf16, well below where it began."""
    losses = example.train(example.RECIPES["bf16"], example.parse(SIZE))
    assert example.final_loss(losses) < 0.75 * losses[0]
    return example.final_loss(losses)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-hybrid"])
def test_final_loss_is_that_of_bf16(name: str, example: ModuleType, baseline: float) -> None:
    losses = example.train(example.RECIPES[name], example.parse(SIZE))
    assert example.final_loss(losses) == pytest.approx(baseline, rel=TOLERANCE)


def test_the_comparison_sees_a_wrong_gradient(
    example: ModuleType, baseline: float, monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = mxpert.training.autograd.grouped_wgrad

    def wrong(*operands: object, **options: object) -> torch.Tensor:
        return -right(*operands, **options)

    monkeypatch.setattr(mxpert.training.autograd, "grouped_wgrad", wrong)
    losses = example.train(example.RECIPES["mxfp8"], example.parse(SIZE))
    assert example.final_loss(losses) != pytest.approx(baseline, rel=TOLERANCE)


def test_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.png"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *SIZE, "--steps=2", "--plot", str(plot)], cwd=ROOT,
        capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bf16: final loss")
    assert plot.stat().st_size > 0
