"""Every example runs without arguments on a CPU, and its --help says what it does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRINTED = {
    "gpt_oss_layer": "layer 0: (16, 512) -> (16, 512)",
    "grouped_mm_drop_in": "w2.grad: ",
    "train_moe_lm": "mxfp8: final loss ",
    "train_transformers_moe": "wrote reports/",
}
LEAST_DB = 21.0
"""Four times the noise of one quantised product, which keeps 28 dB; see layer_floor_db."""

every_example = pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)


class Runner:
    """Runs scripts as the main program of this process, which has imported torch already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, script: Path | str, *arguments: str) -> str:
        """Standard output of a script, which must succeed."""
        path = str(ROOT / "examples" / script)
        self.monkeypatch.setattr(sys, "argv", [path, *arguments])
        with torch.random.fork_rng(devices=[]):
            code = None
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                code = end.code
        assert not code, code
        output: str = self.capsys.readouterr().out
        return output


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Runner:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Runner(monkeypatch, capsys)


@pytest.mark.timeout(320)
@every_example
def test_examples_run_without_arguments(script: Path, run: Runner) -> None:
    printed = run(script)
    assert PRINTED[script.stem] in printed
    if script.stem == "grouped_mm_drop_in":  # torch's op and ours agree as far as MXFP8 allows
        found = dict(line.split(": ") for line in printed.splitlines())
        assert set(found) == {"y", "x.grad", "w1.grad", "w2.grad", "w3.grad"}
        for name, value in found.items():
            assert LEAST_DB < float(value.removesuffix(" dB")) < 40, name


@every_example
def test_examples_have_help(script: Path, tmp_path: Path, run: Runner) -> None:
    assert f"python examples/{script.name}" in run(script, "--help")
    assert not list(tmp_path.iterdir())


def test_the_layer_example_reads_a_checkpoint(tmp_path: Path, run: Runner) -> None:
    from support.gpt_oss import tiny_gpt_oss

    tiny_gpt_oss(tmp_path / "tiny", intermediate_size=64, num_layers=1)
    printed = run("gpt_oss_layer.py", str(tmp_path / "tiny"))
    assert printed.startswith("layer 0: (16, 64) -> (16, 64)")
