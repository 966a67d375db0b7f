"""Compiling ahead of a comparison: what is launched, by how many processes."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.run import Run
from benchmarks.moe import cells, ours, warm_up
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.moe.weights import MoEWeights
from support.launches import H200

NAMES = ("gpt-oss-20b", "dsv3-ep8")
CPU = torch.device("cpu")


def form_of(weights: MoEWeights) -> tuple[Any, ...]:
    """All that kernels are chosen and compiled by."""
    parts: list[tuple[Any, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        parts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16))
        return tensor

    for each in (weights.gate_up_proj, weights.down_proj):
        each._mapped(note)
        parts.append((each.shape, each.layout, each.format))
    return (*parts, weights.gate_up_order)


@pytest.mark.parametrize(
    "name, keep_fp8", [*((name, False) for name in warm_up.WEIGHTS), ("mxfp4", True)]
)
def test_unwritten_weights_have_the_form_of_written_ones(name: str, keep_fp8: bool) -> None:
    width = 128 if name in ("int4_g64", "int4_g128") else 160  # units of rows and depth are padded
    model = cells.Model("odd", E=3, k=2, H=2 * width, F=width)
    with on_device(H200):
        written = ours.random_weights(model, CPU, name)
        prepared = written.plain.prepare(device=CPU, keep_fp8=True) if keep_fp8 else None
        unwritten = warm_up.unwritten_weights(model, name, keep_fp8=keep_fp8)
    assert form_of(unwritten) == form_of(prepared or written.prepared)
    assert unwritten.layout is not Layout.ROW_MAJOR
    assert unwritten.nbytes == (prepared or written.prepared).nbytes


def test_warming_up_takes_every_model_and_weights_of_every_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        warm_up, "compile_cells", lambda *each, keep_fp8: asked.append((*each, keep_fp8))
    )
    model = ["--models", "kimi-k2-tp8", "--tokens", "1", "--activation", "bf16"]
    for name in warm_up.WEIGHTS:
        assert warm_up.main([*model, "--weights", name]) == 0
    cell = cells.Cell(cells.named("kimi-k2-tp8")["kimi-k2-tp8"], 1)
    assert asked == [([cell], "bf16", name, False) for name in warm_up.WEIGHTS]


def test_warming_up_takes_a_process_for_each_format_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(warm_up.subprocess, "Popen", lambda command, **_: commands.append(command))
    some = [cells.Cell(cells.MODELS[NAMES[0]], count) for count in (1, 1024)]
    warm_up.start(some, ("bf16", "mxfp8"), ("nvfp4", "int4_g32"))
    found = [(command[6], command[8], command[10]) for command in commands]
    formats = itertools.product(("nvfp4", "int4_g32"), ("bf16", "mxfp8"))
    assert sorted(found) == sorted(
        (count, activation, weights) for weights, activation in formats for count in ("1", "1024")
    )


@pytest.mark.parametrize("skips", [False, True])
def test_a_filled_cache_needs_no_compilers(
    skips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ceilings are measured in both cases."""
    done: list[str] = []

    def compilers() -> list[Any]:
        done.append("compilers")
        return []

    monkeypatch.setattr(Run, "dry", False)
    monkeypatch.setattr(warm_up, "measure_ceilings", lambda device: {"read_tbs": 1.0})
    parser = argparse.ArgumentParser()
    warm_up.add_option(parser)
    options = parser.parse_args(["--no-warm-up"] if skips else [])
    options.began, options.deadline = 0.0, 10.0
    run = Run(tmp_path / "a.json", {}, ("model",), device=CPU, deadline=10.0)
    warm_up.measure_compiled(run, options, lambda: done.append("cells"), compilers)
    assert done == (["cells"] if skips else ["compilers", "cells"])
    assert run.meta["ceilings"] == {"read_tbs": 1.0}


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


@pytest.mark.parametrize(
    "words, refused",
    [
        (("--peers", ".", "--keep-fp8"), "--keep-fp8 needs --activation"),
        (("--peers", ".", "--weights", "nvfp4"), "--weights needs --activation"),
        (
            ("--activation", "mxfp8", "--weights", "nvfp4", "--keep-fp8"),
            "--keep-fp8 needs --weights mxfp4",
        ),
    ],
)
def test_weights_that_there_are_not_are_refused(
    words: tuple[str, ...], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        warm_up.main(["--tokens", "1", *words])
    assert refused in capsys.readouterr().err


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
