"""`mxpert tune --grouped`: cells are the problems of training; gate, tables and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mxpert
from mxpert.cli import tune, tune_cells
from mxpert.cli.main import app
from mxpert.cli.tune_cells import TARGETS, AnyTrial, Choice
from mxpert.cli.tune_grouped import (
    PARTS,
    RECIPES,
    GroupedCell,
    GroupedOperands,
    GroupedShape,
    GroupedTrial,
    invalid_grouped_row,
    make_grouped_cells,
)
from mxpert.configs import GemmConfig
from mxpert.core import tables
from mxpert.core.describe import describe
from mxpert.core.problem import GroupedProblem, Op
from mxpert.core.registry import explain_problem, override, resolve
from mxpert.core.target import detect_target, on_device
from mxpert.grouped.inputs import GroupedGemmInputs, GroupedWgradInputs
from support.devices import DEVICES
from support.launches import recorded_launches
from support.outcomes import assert_one_line
from support.tables import HEAD, MEASURED, ship_tables_of
from tests.cli.test_tune import FakeTrial
from tests.core.test_tables import FIRST as LAYER
from tests.core.test_tables import row as layer_row

runner = CliRunner()
H200 = TARGETS["nvidia-h200"]
SHAPE = GroupedShape(num_groups=3, n=64, k=96, num_rows=70)
CELLS = [GroupedCell(SHAPE, name, part) for name in RECIPES for part in PARTS]
ids = [f"{cell.operands_name}-{cell.part}" for cell in CELLS]
FIRST, SECOND, THIRD = (
    GemmConfig(128, 256, 128, num_warps=4, num_stages=4, group_m=band) for band in (16, 8, 32)
)
"""The configs of Hopper."""


class FakeKernel:
    """The reference under the name of a backend; one config gives wrong results."""

    backend = "hopper"
    spoil: Callable[[torch.Tensor], torch.Tensor] | None = None
    spoilt = SECOND

    def configs(self, problem: GroupedProblem) -> list[GemmConfig]:
        return [FIRST, SECOND, THIRD]

    def heuristic(self, problem: GroupedProblem) -> GemmConfig:
        return FIRST

    def launch(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        inputs: GroupedGemmInputs | GroupedWgradInputs,
    ) -> torch.Tensor:
        with override(backend="reference"):
            if isinstance(inputs, GroupedWgradInputs):
                made = mxpert.grouped_wgrad(inputs.grad, inputs.a, inputs.group_offsets)
            else:
                made = mxpert.grouped_gemm(
                    inputs.a, inputs.b, inputs.group_offsets, trans_b=problem.trans_b
                )
        return self.spoil(made) if self.spoil and config == self.spoilt else made


def trial_of(cell: GroupedCell, kernel: FakeKernel) -> GroupedTrial:
    operands = cell.operands(torch.device("cpu"))
    problem = cell.problem(detect_target("cpu"), cell.spans(detect_target("cpu")))
    return GroupedTrial(Choice(kernel, problem), cell, operands)


# ---- cells


@pytest.mark.parametrize("cell", CELLS, ids=ids)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx950"])
def test_a_cell_is_the_problem_of_its_call(arch: str, cell: GroupedCell) -> None:
    """Otherwise a row would answer no call."""
    with on_device(DEVICES[arch]), recorded_launches():
        operands = GroupedOperands(SHAPE, torch.device("cpu"))
        a, b = operands.of(cell)
        if cell.part == "wgrad":
            called = describe(mxpert.grouped_wgrad, a, b, operands.offsets)
        else:
            trans_b = cell.operands_name != "bf16" or cell.part == "forward"
            called = describe(mxpert.grouped_gemm, a, b, operands.offsets, trans_b=trans_b)
    assert cell.problem(DEVICES[arch], cell.spans(DEVICES[arch])) == called


def test_groups_differ_by_one_row_at_most() -> None:
    sizes = SHAPE.offsets(torch.device("cpu")).diff()
    assert sizes.sum() == SHAPE.num_rows
    assert sizes.max() - sizes.min() == 1


def test_cells_of_several_shapes_and_operands() -> None:
    cells = make_grouped_cells(["4,64,96", "2,32,32", "4,64,96"], [64, 128], "mxfp8,bf16")
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 3
    assert len(make_grouped_cells(["4,64,96"], [64], "mxfp8,hybrid")) == 5, "one forward"
    assert cells[0].name == "4,64,96 M=64 forward mxfp8"


# ---- the gate


@pytest.mark.parametrize("cell", CELLS, ids=ids)
def test_a_right_config_passes_and_is_timed(
    cell: GroupedCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_cells, "REPEATS", 2)
    trial = trial_of(cell, FakeKernel())
    assert 0 < trial.error(FIRST) <= trial.limit < 4e-3
    assert [timing.samples for timing in trial.times([FIRST, SECOND], {}).values()] == [2, 2]
    assert trial.places[-1] == (64 if cell.part == "wgrad" else 70) - 1


def zero_a_probe(result: torch.Tensor) -> torch.Tensor:
    result[-1] = 0
    return result


def scale_another(result: torch.Tensor) -> torch.Tensor:
    result.flatten(0, -2)[1] *= 2
    return result


def poison_another(result: torch.Tensor) -> torch.Tensor:
    result.flatten(0, -2)[1] = torch.nan
    return result


@pytest.mark.parametrize("cell", CELLS, ids=ids)
@pytest.mark.parametrize("spoil", [zero_a_probe, scale_another, poison_another])
def test_the_gate_sees_every_row(spoil: Callable[..., Any], cell: GroupedCell) -> None:
    kernel = FakeKernel()
    kernel.spoil = spoil
    trial = trial_of(cell, kernel)
    assert trial.error(FIRST) <= trial.limit
    assert not trial.error(SECOND) <= trial.limit


def test_nan_in_the_first_result_is_not_sound() -> None:
    kernel = FakeKernel()
    kernel.spoil, kernel.spoilt = poison_another, FIRST
    trial = trial_of(CELLS[0], kernel)
    assert not trial.error(FIRST) <= trial.limit
    assert trial.sound is None


# ---- the command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeKernel:
    """An H200 whose kernel is the reference, and the second config the fastest."""
    kernel, times = FakeKernel(), FakeTrial({FIRST: 100.0, SECOND: 60.0, THIRD: 90.0})
    for name in ("_named_target", "detect_target"):
        monkeypatch.setattr(tune, name, lambda *_: H200)
    facts = tune.environment(torch.device("cpu")) | {"device": H200.name}
    monkeypatch.setattr(tune, "environment", lambda _: facts)
    monkeypatch.setattr(tune, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "read_bandwidth", lambda _: 4.2e12)
    monkeypatch.setattr(
        GroupedCell,
        "choose",
        lambda self, target, _: Choice(kernel, self.problem(target, self.spans(target))),
    )
    monkeypatch.setattr(AnyTrial, "times", lambda self, *rest: times.times(*rest))
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(tmp_path / "cache"))
    tables.reload_tables()
    return kernel


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, ["tune", "--grouped", "3,64,96", "--rows", "70", *arguments])


def test_a_run_writes_rows_that_dispatch_takes(machine: FakeKernel, tmp_path: Path) -> None:
    outcome = invoke("--operands", "mxfp8,hybrid,bf16", "--commit", "f00")
    assert outcome.exit_code == 0, outcome.output
    assert "8 tuned, 0 kept, 0 left" in outcome.output
    path = tmp_path / "cache" / "tables" / "nvidia-h200.json"
    rows = tables.every_row(path, H200.name)
    assert [type(row) for row in rows] == [tables.GroupedRow] * 8
    assert {(row.config, row.us, row.heuristic_us, row.commit) for row in rows} == {
        (SECOND, 60.0, 100.0, "f00")
    }
    for cell in CELLS:
        problem = cell.problem(H200, cell.spans(H200))
        found = explain_problem(problem).resolution
        if found.kernel.backend == "hopper":  # bf16 wgrad runs on the portable kernel
            assert (found.source, found.config) == ("table", SECOND)
            assert found.detail.startswith(f"{path}: grouped[")
            assert resolve(replace(problem, num_sms=8))[1] == SECOND
        else:
            assert (cell.operands_name, cell.part, found.source) == ("bf16", "wgrad", "heuristic")
    again = invoke("--operands", "mxfp8,hybrid,bf16").output
    assert "1 tuned, 7 kept" in again, "a row that its backend does not serve is made again"
    assert "3 tuned, 0 kept" in invoke("--force").output


def test_rows_of_layers_stay(machine: FakeKernel, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tables.add_rows(path, HEAD, [layer_row(4, LAYER)])
    assert "3 tuned" in " ".join(invoke("--output", str(path)).output.split())  # of any width
    assert len(tables.read_rows(path, H200.name)) == 1
    assert len(tables.every_row(path, H200.name)) == 4


def test_a_wrong_config_never_wins(machine: FakeKernel, tmp_path: Path) -> None:
    machine.spoil = zero_a_probe
    path = tmp_path / "table.json"
    outcome = invoke("--output", str(path))
    assert "wrong 3,64,96 M=70 forward mxfp8" in outcome.output
    assert {row.config for row in tables.every_row(path, H200.name)} == {THIRD}


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_lists_cells_of_any_target(target: str) -> None:
    pytest.importorskip("triton")
    outcome = runner.invoke(
        app, ["tune", "--dry-run", "--target", target, "--grouped", "8,4096,2880", "--rows", "8192"]
    )
    assert outcome.exit_code == 0, outcome.output
    native = {"sm_90": "hopper", "gfx950": "cdna4"}.get(TARGETS[target].arch, "triton")
    for part in PARTS:
        assert f"8,4096,2880 M=8192 {part} mxfp8" in outcome.output
    assert native in outcome.output
    assert "gpt-oss" not in outcome.output


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--grouped", "4,64"], "three numbers G,N,K", id="short"),
        pytest.param(["--grouped", "4,65,64"], "N and K in multiples of 32", id="odd"),
        pytest.param(["--grouped", "4,64,64", "--rows", "0"], "--rows", id="no-rows"),
        pytest.param(["--grouped", "4,64,64", "--operands", "fp8"], "--operands", id="operands"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], part: str) -> None:
    assert_one_line(runner.invoke(app, ["tune", *arguments]), part)


GROUPED = ["--grouped", "4,64,64"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([*GROUPED, "--tokens", "1"], "--tokens"),
        ([*GROUPED, "--format", "a8w4"], "--format"),
        ([*GROUPED, "--weight-format", "nvfp4"], "--weight-format"),
        ([*GROUPED, "--keep-fp8"], "--keep-fp8"),
        (["--rows", "64"], "--rows"),
        (["--shape", "4,2,64,64", "--operands", "bf16"], "--operands"),
    ],
)
def test_an_option_that_no_cell_reads_is_refused(arguments: list[str], option: str) -> None:
    outcome = runner.invoke(app, ["tune", "--dry-run", "--target", "nvidia-h200", *arguments])
    assert_one_line(outcome, f"tune: {option} — need")


def test_options_of_both_kinds_stand_beside_each_other() -> None:
    both = ["--shape", "4,2,64,64", "--tokens", "1", *GROUPED, "--rows", "64"]
    outcome = runner.invoke(app, ["tune", "--dry-run", "--target", "nvidia-h200", *both])
    assert outcome.exit_code == 0, outcome.output


# ---- rows


def row(num_rows: int = 1024, config: GemmConfig = SECOND, **changes: Any) -> tables.GroupedRow:
    cell = GroupedCell(replace(SHAPE, num_rows=num_rows), "mxfp8", "forward")
    problem = cell.problem(H200, cell.spans(H200))
    made = tables.GroupedRow(
        "grouped_gemm",
        problem.formats,
        tables.grouped_spans(problem),
        *(problem.trans_b, problem.num_groups, problem.n, problem.k, problem.num_rows),
        *("hopper", config),
        **MEASURED,
    )
    return replace(made, **changes)


def problem_of(num_rows: int) -> GroupedProblem:
    cell = GroupedCell(replace(SHAPE, num_rows=num_rows), "mxfp8", "forward")
    return cell.problem(H200, cell.spans(H200))


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return ship_tables_of(tmp_path, monkeypatch)


def test_a_row_answers_near_its_own_number_of_rows(shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(1024), row(2048, THIRD)])
    assert tables.tuned_grouped_row(problem_of(768), "hopper") is None
    for rows, config in ((769, SECOND), (1024, SECOND), (1537, THIRD), (2048, THIRD)):
        found = tables.tuned_grouped_row(problem_of(rows), "hopper")
        assert found is not None
        assert found.config == config
    for rows in (1025, 1536, 2049):
        assert explain_problem(problem_of(rows)).resolution.source == "heuristic"


OTHERS: dict[str, Callable[[GroupedProblem], GroupedProblem]] = {
    "op": lambda p: replace(p, op=Op.GROUPED_WGRAD, trans_b=False),
    "formats": lambda p: replace(p, a_format="mxfp8_e5m2"),
    "spans": lambda p: replace(p, a_span=mxpert.ScaleSpan.ROW),
    "trans_b": lambda p: replace(p, trans_b=False),
    "groups": lambda p: replace(p, num_groups=4),
    "n": lambda p: replace(p, n=96),
    "k": lambda p: replace(p, k=64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_answers_for_its_own_shape_alone(name: str, shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(1024)])
    assert tables.tuned_grouped_row(problem_of(1024), "hopper") is not None
    assert tables.tuned_grouped_row(OTHERS[name](problem_of(1024)), "hopper") is None


def test_the_users_row_replaces_the_shipped_one(shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(1024)])
    own = tables.user_table(H200)
    assert own is not None
    tables.add_rows(own, HEAD, [row(1024, THIRD)])
    found = explain_problem(problem_of(1024)).resolution
    assert (found.config, found.detail) == (THIRD, f"{own}: grouped[0]")


def test_a_row_of_another_version_is_passed_over(shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(1024, replace(SECOND, group_m=7))])
    with pytest.warns(RuntimeWarning, match=r"grouped\[0\] names tiles that this version does not"):
        assert explain_problem(problem_of(1024)).resolution.source == "heuristic"


def test_rows_survive_a_round_trip() -> None:
    rows = [row(8), row(4), row(4, backend="triton")]
    read = tables.read_table(tables.format_table(HEAD, rows), "t")
    assert read.rows == []
    assert [replace(each, place="") for each in read.grouped] == sorted(rows, key=lambda r: r.key)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        pytest.param([row(4), row(4)], r"grouped\[1\] — need one row .* the key of", id="twice"),
        pytest.param([row(formats="fp8xfp8")], r"grouped\[0\]\.formats — need", id="formats"),
        pytest.param([row(op="fused_moe")], r"grouped\[0\]\.op — need", id="op"),
    ],
)
def test_a_bad_row_is_named(rows: list[tables.GroupedRow], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        tables.read_table(tables.format_table(HEAD, rows), "t.json")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        pytest.param({}, None, id="valid"),
        pytest.param({"config": GemmConfig(128, 256, 64)}, "has no config", id="tile"),
        pytest.param({"backend": "cutlass"}, "is no backend", id="backend"),
        pytest.param({"backend": "cdna4"}, "needs gfx950", id="chip"),
        pytest.param({"n": 60}, "pad the operand", id="shape"),
    ],
)
def test_an_invalid_row_is_found(changes: dict[str, Any], part: str | None) -> None:
    pytest.importorskip("triton")
    found = invalid_grouped_row(row(**changes), H200)
    assert (found is None) if part is None else part in str(found)
    assert tune.invalid_any(row(**changes), H200) == found
