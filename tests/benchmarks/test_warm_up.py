"""Compiling ahead of a comparison: what is launched, by how many processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe import cells, ours, warm_up
from mxpert.formats.tensor import Layout

NAMES = ("gpt-oss-20b", "dsv3-ep8")


def test_warming_up_launches_every_stage_of_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    called, call = [], ours.Ours._call

    def record(self: Any, stage: str, weights: Any, batch: Any) -> Any:
        called.append((self.model.name, batch.inputs.x.shape[0], stage))
        return call(self, stage, weights, batch)

    monkeypatch.setattr(ours.Ours, "_call", record)
    cell = ["--models", ",".join(NAMES), "--tokens", "1,16", "--activation", "bf16"]
    assert warm_up.main(cell) == 0
    assert called == list(itertools.product(NAMES, (1, 16), warm_up.STAGES))


def test_warming_up_takes_a_process_for_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(warm_up.subprocess, "Popen", lambda command, **_: commands.append(command))
    every = cells.ordered_cells(list(cells.MODELS.values()))
    warm_up.start(every, cells.FORMATS)
    counts = "1,4,16,64,128,256", "1024,4096,8192,16384"
    found = {(command[6], command[8]) for command in commands}
    assert found == set(itertools.product(counts, cells.FORMATS))
    assert {command[4] for command in commands} == {",".join(cells.MODELS)}


def test_warming_up_for_fp8_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag reaches the process, and its weights have the copy."""
    commands: list[list[str]] = []
    layouts, call = [], ours.Ours._call

    def record(self: Any, stage: str, weights: Any, batch: Any) -> Any:
        layouts.append(weights.layout)
        return call(self, stage, weights, batch)

    with monkeypatch.context() as patch:  # compilers start processes, too
        patch.setattr(warm_up.subprocess, "Popen", lambda command, **_: commands.append(command))
        warm_up.start([cells.Cell(cells.MODELS[NAMES[0]], 2048)], ["mxfp8"], keep_fp8=True)
    monkeypatch.setattr(ours.Ours, "_call", record)
    assert warm_up.main(commands[0][3:]) == 0
    assert set(layouts) == {Layout.HOPPER_FRAGMENT_FP8}


def test_peers_have_no_fp8_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        warm_up.main(["--tokens", "1", "--peers", str(tmp_path), "--keep-fp8"])
    assert "--keep-fp8 needs --activation" in capsys.readouterr().err


def test_warming_up_a_peer_takes_a_process_for_each_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = []
    monkeypatch.setattr(warm_up.subprocess, "Popen", lambda command, **_: commands.append(command))
    some = [cells.Cell(cells.MODELS[name], tokens) for tokens in (1, 64) for name in NAMES]
    warm_up.start_peer(some, tmp_path)
    assert [command[3:] for command in commands] == [
        ["--models", name, "--tokens", "1,64", "--peers", str(tmp_path)] for name in NAMES
    ]


def test_warming_up_a_peer_calls_every_stage_and_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[str, int, str]] = []

    class Peer:
        def __init__(self, model: Any, weights: Any) -> None:
            self.model = model

        def prepare(self, cell: Any, batches: Any) -> dict[str, dict[str, list[Any]]]:
            if cell.tokens == 1:
                raise RuntimeError("no such kernel")
            assert len(batches) == 1
            places = {stage: (self.model.name, cell.tokens, stage) for stage in cells.STAGES}
            return {"": {stage: [partial(called.append, places[stage])] for stage in places}}

    monkeypatch.setattr(warm_up, "TritonKernels", Peer)
    models = [cells.tiny(cells.MODELS[name]) for name in NAMES]
    some = [cells.Cell(model, tokens) for tokens in (1, 4) for model in models]
    warm_up.compile_peer(some, torch.device("cpu"))
    assert called == [(model.name, 4, stage) for model in models for stage in cells.STAGES]
    assert capsys.readouterr().out.count("no such kernel") == 2


def test_a_warm_up_that_fails_or_is_late_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    pipes: Any = dict(text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    processes = [
        subprocess.Popen([sys.executable, "-c", code], **pipes)
        for code in ("raise ValueError('no such kernel')", "import time; time.sleep(60)")
    ]
    warm_up.wait(processes, seconds=2.0)
    text = capsys.readouterr().out
    assert "no such kernel" in text
    assert "a process is late" in text
    assert all(process.poll() is not None for process in processes)
