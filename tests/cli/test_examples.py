"""Every example runs without arguments on a CPU, and its --help says what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRINTED = {"gpt_oss_layer": "layer 0: (16, 512) -> (16, 512)", "grouped_mm_drop_in": "w2.grad: ",
           "train_moe_lm": "mxfp8: final loss ", "train_transformers_moe": "wrote reports/"}


def run(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, text=True,
        timeout=300, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)})


@pytest.mark.timeout(320)
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_without_arguments(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert PRINTED[script.stem] in done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_examples_have_help(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run(script, tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python examples/{script.name}" in done.stdout
    assert not list(tmp_path.iterdir())
