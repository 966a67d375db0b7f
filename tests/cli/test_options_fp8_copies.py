"""`--keep-fp8` of `mxpert bench` and `mxpert tune`: weights with FP8 copies, and their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mxpert.cli import bench, tune
from mxpert.cli.main import app
from mxpert.cli.measure import RunWeights, weights_name
from mxpert.cli.tune_cells import Cell, choose, invalid_row
from mxpert.core import tables
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper.config import HopperKernel
from mxpert.testing.problems import MoEShape
from support.devices import prepared_for
from support.outcomes import assert_one_line
from support.tables import H200, HEAD

runner = CliRunner()
COPY = Layout.HOPPER_FRAGMENT_FP8
SHAPE = MoEShape(256, 512, 8, 2)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of this machine's CPU, whatever it has besides."""
    for module in (bench, tune):
        monkeypatch.setattr(module, "best_device", lambda: torch.device("cpu"))


def run_bench(output: Path, *arguments: str) -> Any:
    sizes = ("--scale", "32", "--model", "qwen3-next", "--tokens", "3", "--output", str(output))
    return runner.invoke(app, ["bench", *sizes, *arguments])


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_bench_prepares_a_copy(
    keep_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = bench.bench_case, []

    def bench_case(model: Any, weights: RunWeights, *arguments: Any) -> Iterator[Any]:
        """Time the stored weights, which alone a CPU computes with."""
        seen.append(weights.prepared.layout)
        return original(model, RunWeights(weights.plain, weights.plain), *arguments)

    monkeypatch.setattr(bench, "bench_case", bench_case)
    with prepared_for("sm_90"):
        outcome = run_bench(tmp_path, "--format", "a8w4", *["--keep-fp8"] * keep_fp8)
    assert outcome.exit_code == 0, outcome.output
    assert seen == [COPY if keep_fp8 else Layout.HOPPER_FRAGMENT]


def test_bench_times_nothing_else_where_no_kernel_reads_the_copy(tmp_path: Path) -> None:
    """Prepared weights without one give way to the stored ones, which portable kernels read."""
    with prepared_for("sm_90"):
        weights = RunWeights.random(SHAPE, torch.device("cpu"), keep_fp8=True)
        outcome = run_bench(tmp_path, "--format", "a8w4", "--keep-fp8")
        assert_one_line(outcome, "HOPPER_FRAGMENT_FP8")
        assert run_bench(tmp_path, "--format", "a8w4").exit_code == 0
    assert [weights_name(each) for each in (weights.plain, weights.prepared)] == [
        "mxfp4",
        "mxfp4+fp8",
    ]
    assert not weights.plain.layout.has_fp8_codes


REFUSED = [
    ([], "--keep-fp8 — need activations in 8 or 4 bits"),
    (["--format", "a8w4,bf16"], "--keep-fp8 — need activations in 8 or 4 bits"),
    (
        ["--format", "a8w4", "--weight-format", "nvfp4"],
        "--keep-fp8 — need MXFP4 weights, got nvfp4",
    ),
    (["--format", "a8w4", "--backend", "triton"], "--keep-fp8 — need a backend that reads FP8"),
]


@pytest.mark.parametrize("arguments, said", REFUSED, ids=lambda value: str(value)[:40])
def test_what_has_no_copy_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert_one_line(run_bench(tmp_path, "--keep-fp8", *arguments), f"bench: {said}")
    outcome = runner.invoke(app, ["tune", "--dry-run", "--keep-fp8", *arguments])
    assert_one_line(outcome, f"tune: {said}")


def test_other_uses_of_the_option_are_refused(tmp_path: Path) -> None:
    narrow = ("--keep-fp8", "--format", "a8w4")
    said = "prepare: keep_fp8 — need weights and a device with such a layout, got ROW_MAJOR on cpu"
    assert_one_line(run_bench(tmp_path, *narrow), said)
    for option in (["--plan"], ["--expert-parallel", "2"]):
        said = f"bench: --keep-fp8 — need none with {option[0]}"
        assert_one_line(run_bench(tmp_path, *narrow, *option), said)
    outcome = runner.invoke(app, ["tune", "--dry-run", *narrow, "--target", "nvidia-b200"])
    assert_one_line(outcome, "tune: --keep-fp8 — need a device whose kernels read FP8 copies")


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_tune_tries_the_kernels_that_read_the_copy(keep_fp8: bool) -> None:
    call = ["tune", "--dry-run", "--target", "nvidia-h200", "--tokens", "8192", "--json", "-"]
    outcome = runner.invoke(app, [*call, "--format", "a8w4", *["--keep-fp8"] * keep_fp8])
    assert outcome.exit_code == 0, outcome.output
    (cell,) = json.loads(outcome.stdout)["cells"]
    assert cell["cell"] == f"gpt-oss-120b T=8192 {'mxfp8xmxfp4+fp8' if keep_fp8 else 'a8w4'}"
    assert cell["backend"] == "hopper"
    kernels = {config["gate_up"]["kernel"] for config in cell["candidates"]}
    assert (HopperKernel.PREFILL_FP8 in kernels) == keep_fp8


def test_a_trial_runs_on_the_copy() -> None:
    cell = Cell("x", SHAPE, 1024, "mxfp8", keep_fp8=True)
    with prepared_for("sm_90"):
        operands = cell.operands(torch.device("cpu"))
    assert operands.prepared.layout is COPY
    choice, _ = cell.trial(operands, H200, None)
    assert choice.problem.weight_layout is COPY


def test_a_row_of_copies_serves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(tmp_path / "cache"))
    cell = Cell("x", SHAPE, 1024, "mxfp8", keep_fp8=True)
    choice = choose(cell, H200, cell.layouts(H200), None)
    config = next(
        each
        for each in choice.configs()[1:]
        if getattr(each.gate_up, "kernel", None) is HopperKernel.PREFILL_FP8
    )
    measured: dict[str, Any] = dict(source="search", note="", commit="abc", date="2026-11-27")
    numbers = dict(us=1.0, heuristic_us=2.0, spread=0.0, rel_l2=0.0, tried=2, valid=2)
    sizes = (8, 2, 256, 512, 1024)
    row = tables.TunedRow("mxfp8xmxfp4+fp8", *sizes, "hopper", config, **measured, **numbers)
    path = tables.user_table(H200)
    assert path is not None
    path.parent.mkdir(parents=True)
    tables.add_rows(path, HEAD | {"device": H200.name}, [row])
    tables.reload_tables()
    (read,) = tables.read_rows(path, H200.name)
    assert (read.formats, read.config) == (row.formats, config)
    assert invalid_row(read, H200) is None
    found = explain_problem(choice.problem).resolution
    assert (found.source, found.config) == ("table", config)
    other = replace(choice.problem, weight_layout=Layout.HOPPER_FRAGMENT)
    assert explain_problem(other).resolution.source == "heuristic"
    monkeypatch.undo()
    tables.reload_tables()
