"""`mxpert tune --weight-format`: rows are of their format, and serve no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from mxpert.cli import tune_cells
from mxpert.cli.main import app
from mxpert.cli.tune_cells import Cell, invalid_row
from mxpert.core import tables
from mxpert.core.backend import layouts_for
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from mxpert.formats.weight_tensor import WeightFormatName, parse_weight_format
from mxpert.testing.numerics import relative_l2
from mxpert.testing.problems import random_moe_problem
from tests.cli.test_tune import (
    FIRST,
    H200,
    SHAPE,
    FakeKernel,
    Trial,
    invoke,
    machine,  # noqa: F401  a fixture
    without_gpu,  # noqa: F401  a fixture
)

runner = CliRunner()
WEIGHTS = get_args(WeightFormatName)
NAMES = {each: parse_weight_format(each, "test").name for each in WEIGHTS}


def dry(*arguments: str, weight_format: str, shape: str = "8,2,256,512") -> Any:
    call = ["tune", "--dry-run", "--shape", shape, "--tokens", "1,64", "--json", "-"]
    return runner.invoke(app, [*call, "--weight-format", weight_format, *arguments])


@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-b200"])
@pytest.mark.parametrize("weight_format", WEIGHTS)
def test_a_dry_run_lists_candidates_of_every_format(weight_format: str, target: str) -> None:
    pytest.importorskip("triton")
    outcome = dry("--target", target, weight_format=weight_format)
    assert outcome.exit_code == 0, outcome.output
    cells = json.loads(outcome.stdout)["cells"]
    assert len(cells) == 6
    backend = "hopper" if target == "nvidia-h200" else "triton"
    assert {cell["backend"] for cell in cells} == {backend}
    assert all(len(cell["candidates"]) > 1 for cell in cells)
    if weight_format != "mxfp4":
        assert cells[0]["cell"] == f"8,2,256,512 T=1 bf16x{weight_format}"


@pytest.mark.parametrize("weight_format", WEIGHTS)
def test_a_row_serves_its_format_alone(
    weight_format: Any,
    machine: FakeKernel,  # noqa: F811
    tmp_path: Path,
) -> None:
    """`tune`, `explain_problem` and the lookup of rows agree, for every pair of formats."""
    shape = ("--shape", "4,2,128,128", "--tokens", "4", "--format", "bf16")
    outcome = runner.invoke(app, ["tune", *shape, "--weight-format", weight_format])
    assert outcome.exit_code == 0, outcome.output
    (row,) = tables.read_rows(tmp_path / "cache" / "tables" / "nvidia-h200.json", H200.name)
    assert row.formats == f"bf16x{NAMES[weight_format]}"
    wide = tune_cells.parse_shape("4,2,128,128")
    for other in WEIGHTS:
        layout = layouts_for(H200.arch, NAMES[other])[0]
        problem = Cell("x", wide, 4, "bf16", other).problem(H200, layout)
        assert problem.formats == f"bf16x{NAMES[other]}"
        found = tables.tuned_row(problem, "hopper")
        assert (found is not None) == (NAMES[other] == NAMES[weight_format]), other


def test_explain_names_the_row_of_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a config of Hopper's kernels, for INT4: other formats take the heuristic."""
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(tmp_path / "cache"))
    cell = Cell("x", SHAPE, 4, "bf16", "int4_g32")
    layout = layouts_for(H200.arch, "int4_g32")[0]
    choice = tune_cells.choose(cell, H200, [layout], None)
    other = choice.configs()[1]
    row = tables.TunedRow(
        formats=choice.problem.formats,
        num_experts=4,
        top_k=2,
        hidden_size=64,
        intermediate_size=64,
        num_tokens=4,
        backend="hopper",
        config=other,
        us=1.0,
        heuristic_us=2.0,
        spread=0.0,
        source="search",
        note="",
        rel_l2=0.0,
        tried=1,
        valid=1,
        commit="abc",
        date="2026-11-26",
    )
    path = tables.user_table(H200)
    assert path is not None
    path.parent.mkdir(parents=True)
    head = dict.fromkeys(("device", "date", "commit", "torch", "triton"), "x")
    tables.add_rows(path, head | {"device": H200.name}, [row])
    tables.reload_tables()
    assert invalid_row(row, H200) is None
    resolution = explain_problem(choice.problem).resolution
    assert (resolution.source, resolution.config) == ("table", other)
    for name in ("int4_g64", "nvfp4", "mxfp8"):
        held = layouts_for(H200.arch, NAMES[name])[0]
        problem = Cell("x", SHAPE, 4, "bf16", name).problem(H200, held)  # type: ignore[arg-type]
        assert explain_problem(problem).resolution.source == "heuristic"
    monkeypatch.undo()
    tables.reload_tables()


def test_cells_of_another_format_are_not_finished(
    machine: FakeKernel,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.json"
    arguments = ("--format", "bf16", "--tokens", "1", "--output", str(path))
    assert "1 tuned, 0 kept" in invoke(*arguments).output
    assert "1 tuned, 0 kept" in invoke(*arguments, "--weight-format", "nvfp4").output
    assert "0 tuned, 1 kept" in invoke(*arguments, "--weight-format", "nvfp4").output
    assert "1 tuned, 0 kept" in invoke(*arguments, "--weight-format", "mxfp8").output
    again = invoke(*arguments, "--weight-format", "mxfp8_e4m3").output
    assert "0 tuned, 1 kept" in again  # the same format by its other name
    rows = tables.read_rows(path, H200.name)
    assert sorted(row.formats for row in rows) == ["bf16xmxfp4", "bf16xmxfp8_e4m3", "bf16xnvfp4"]


@pytest.mark.parametrize("weight_format", ["nvfp4", "int4_g32", "mxfp8"])
def test_the_gate_compares_with_the_weights_own_values(weight_format: Any) -> None:
    weights = random_moe_problem(SHAPE, 1, weight_format=weight_format).weights
    problem = Cell("x", SHAPE, 5, "bf16", weight_format).problem(H200, Layout.ROW_MAJOR)
    trial = Trial(tune_cells.Choice(FakeKernel(), problem), SHAPE, weights, weights)
    assert trial.error(FIRST) <= trial.limit
    spoilt = random_moe_problem(SHAPE, 1, seed=7, weight_format=weight_format).weights
    other = Trial(tune_cells.Choice(FakeKernel(), problem), SHAPE, spoilt, weights)
    assert not other.error(FIRST) <= other.limit
    assert relative_l2(other.truth, trial.truth) > other.limit


@pytest.mark.parametrize(
    ("weight_format", "match"),
    [
        ("int4_g128", "--weight-format — need H and F in multiples of 128 on gpt-oss-120b, got"),
        ("fp8", "tune: --weight-format — need one of mxfp4, mxfp8"),
    ],
)
def test_formats_that_do_not_fit_are_refused(weight_format: str, match: str) -> None:
    call = ["tune", "--dry-run", "--target", "nvidia-h200", "--weight-format", weight_format]
    outcome = runner.invoke(app, call)
    assert outcome.exit_code == 2
    assert match in outcome.output
