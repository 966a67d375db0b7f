"""`mxpert tune`: gate before time, the spread rule, resuming, and tables that stay readable."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mxpert.cli import tune, tune_cells
from mxpert.cli.main import app
from mxpert.cli.tune_cells import TARGETS, Cell, Choice, Outcome, Trial, search
from mxpert.core import tables
from mxpert.core.problem import GemmConfig, MoEConfig, MoEProblem, Op
from mxpert.core.registry import override
from mxpert.formats.tensor import Layout
from mxpert.moe.inputs import FusedMoEInputs
from mxpert.moe.op import fused_moe
from mxpert.testing.problems import random_moe_problem
from mxpert.testing.timing import Timing
from support.outcomes import assert_one_line
from support.tables import H200, HEAD, SHAPE

runner = CliRunner()
LIMIT = 1e-2


def config(block_m: int, **settings: int) -> MoEConfig:
    stage = GemmConfig(block_m, 128, 128, **settings)
    return MoEConfig(block_m, stage, stage)


FIRST, SECOND, THIRD = config(8), config(16), config(32)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of this machine's CPU, whatever it has besides."""
    monkeypatch.setattr(tune, "best_device", lambda: torch.device("cpu"))


class FakeTrial:
    """Errors, times and failures by config; remembers what was timed together."""

    limit = LIMIT

    def __init__(
        self,
        us: dict[MoEConfig, float],
        *,
        spread: float = 0.02,
        errors: dict[MoEConfig, float | Exception] | None = None,
        fail_timing: Sequence[MoEConfig] = (),
    ) -> None:
        self.us, self.spread, self.errors = us, spread, errors or {}
        self.fail_timing, self.rounds = fail_timing, []

    def error(self, config: MoEConfig) -> float:
        error = self.errors.get(config, 1e-3)
        if isinstance(error, Exception):
            raise error
        return error

    def require_alive(self, config: MoEConfig) -> None:
        if isinstance(self.errors.get(config), MemoryError):
            raise ValueError("device lost")

    def times(
        self, configs: Sequence[MoEConfig], failures: dict[str, Exception]
    ) -> dict[str, Timing]:
        self.rounds.append(list(configs))
        timings, half = {}, self.spread / 2
        for index, each in enumerate(configs):
            if each in self.fail_timing:
                failures[str(index)] = RuntimeError("out of resources\nmore")
            else:
                us = self.us[each]
                timings[str(index)] = Timing(us, us * (1 - half), us * (1 + half), 30)
        return timings


def run_search(trial: FakeTrial, **options: object) -> Outcome:
    options = {"deadline": 1.0, "clock": lambda: 0.0} | options
    return search((FIRST, SECOND, THIRD), trial, **options)


def states(outcome: Outcome) -> dict[MoEConfig, str]:
    return {each.config: each.state for each in outcome.candidates}


@pytest.mark.parametrize(
    ("us", "spread", "winner", "source"),
    [
        pytest.param(80.0, 0.02, SECOND, "search", id="clearly-faster"),
        pytest.param(99.0, 0.02, FIRST, "heuristic", id="within-the-spread"),
        pytest.param(80.0, 0.25, FIRST, "heuristic", id="noisy"),
        pytest.param(120.0, 0.02, FIRST, "heuristic", id="slower"),
    ],
)
def test_a_rival_must_beat_the_spread(
    us: float, spread: float, winner: MoEConfig, source: str
) -> None:
    outcome = run_search(FakeTrial({FIRST: 100.0, SECOND: us, THIRD: 130.0}, spread=spread))
    assert outcome.winner.config == winner
    assert (outcome.source, outcome.winner.heuristic_us) == (source, 100.0)
    assert outcome.winner.spread == pytest.approx(spread)
    assert f"spread {spread:.1%}" in outcome.note


@pytest.mark.parametrize("error", [LIMIT * 1.01, float("nan"), float("inf")])
def test_a_wrong_candidate_is_told_and_never_timed(error: float) -> None:
    trial = FakeTrial({FIRST: 100.0, SECOND: 1.0, THIRD: 90.0}, errors={SECOND: error})
    outcome = run_search(trial)
    assert outcome.winner.config == THIRD
    assert states(outcome)[SECOND] == "wrong"
    assert all(SECOND not in configs for configs in trial.rounds)


def test_candidates_that_raise_fail_alone() -> None:
    trial = FakeTrial(
        {FIRST: 100.0, SECOND: 1.0, THIRD: 90.0},
        fail_timing=[THIRD],
        errors={SECOND: KeyError("compiler")},
    )
    outcome = run_search(trial)
    assert outcome.winner.config == FIRST
    assert states(outcome) == {FIRST: "timed", SECOND: "failed", THIRD: "failed"}
    assert outcome.candidates[2].reason == "RuntimeError: out of resources"


def test_a_lost_device_ends_the_search() -> None:
    with pytest.raises(ValueError, match="device lost"):
        run_search(FakeTrial({FIRST: 1.0}, errors={SECOND: MemoryError()}))


@pytest.mark.parametrize("failing", [{"errors": {FIRST: 1.0}}, {"fail_timing": [FIRST]}])
def test_an_unsound_heuristic_leaves_the_field_to_others(failing: dict) -> None:
    outcome = run_search(FakeTrial({FIRST: 1.0, SECOND: 80.0, THIRD: 90.0}, **failing))
    assert (outcome.winner.config, outcome.winner.heuristic_us) == (SECOND, None)
    assert "the heuristic's choice" in outcome.note
    nothing = FakeTrial({}, errors=dict.fromkeys((FIRST, SECOND, THIRD), 1.0))
    assert run_search(nothing).winner is None


def test_only_times_of_one_run_are_compared() -> None:
    trial = FakeTrial({FIRST: 100.0, SECOND: 70.0, THIRD: 60.0})
    times = trial.times

    def slower_each_time(configs: Sequence[MoEConfig], failures: dict) -> dict[str, Timing]:
        trial.us = {each: 2 * us for each, us in trial.us.items()}
        return times(configs, failures)

    trial.times = slower_each_time
    outcome = run_search(trial, batch_size=1)
    assert trial.rounds == [[FIRST, SECOND], [FIRST, THIRD]]
    winner = outcome.winner
    assert (winner.config, winner.us, winner.heuristic_us) == (THIRD, 240.0, 400.0)


@pytest.mark.parametrize(
    ("deadline", "tried"), [pytest.param(9.0, 3, id="enough"), pytest.param(0.0, 2, id="one-batch")]
)
def test_time_bounds_the_search(deadline: float, tried: int) -> None:
    trial = FakeTrial({FIRST: 3.0, SECOND: 2.0, THIRD: 1.0})
    outcome = run_search(trial, deadline=deadline, batch_size=1, clock=lambda: 5.0)
    assert (len(outcome.candidates), outcome.valid) == (tried, 3)
    assert outcome.winner.config == (THIRD if tried == 3 else SECOND)


class FakeKernel:
    """The reference under the name of a backend; some configs give wrong results."""

    op, backend = Op.FUSED_MOE, "hopper"
    spoil: Callable[[torch.Tensor], torch.Tensor] | None = None
    spoilt = SECOND

    def unsupported(self, problem: MoEProblem) -> None:
        return None

    def configs(self, problem: MoEProblem) -> list[MoEConfig]:
        return [FIRST, SECOND, THIRD]

    def heuristic(self, problem: MoEProblem) -> MoEConfig:
        return FIRST

    def launch(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs
    ) -> torch.Tensor:
        with override(backend="reference"):
            result = fused_moe(
                inputs.x,
                inputs.weights,
                inputs.topk_weights,
                inputs.topk_ids,
                activation=problem.options.activation,
                activation_format=problem.options.activation_format,
            )
        return self.spoil(result) if self.spoil and config == self.spoilt else result


def device_trial(kernel: FakeKernel, num_tokens: int, name: str) -> Trial:
    weights = random_moe_problem(SHAPE, 1).weights
    problem = Cell("x", SHAPE, num_tokens, name).problem(H200, Layout.ROW_MAJOR)
    return Trial(Choice(kernel, problem), SHAPE, weights, weights)


def test_similar_configs_are_tried_first() -> None:
    kernel = FakeKernel()
    near, far = config(8, num_stages=4), config(32, num_stages=4)
    kernel.configs = lambda _: [FIRST, far, near, FIRST]
    choice = Choice(kernel, Cell("x", SHAPE, 4, "bf16").problem(H200, Layout.ROW_MAJOR))
    assert choice.configs() == [FIRST, near, far]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 45])
def test_a_right_config_passes_and_is_timed(
    num_tokens: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_cells, "REPEATS", 2)
    trial = device_trial(FakeKernel(), num_tokens, name)
    assert trial.error(FIRST) <= trial.limit
    assert trial.places[0] == 0
    assert trial.places[-1] == num_tokens - 1
    timings = trial.times([FIRST, SECOND], {})
    assert [timing.samples for timing in timings.values()] == [2, 2]


def test_the_gate_knows_how_many_rows_are_compared() -> None:
    def limit(name: str, num_tokens: int) -> float:
        return device_trial(FakeKernel(), num_tokens, name).limit

    assert limit("fp8_token", 1) > limit("fp8_token", 45) > limit("mxfp8", 1) == LIMIT


def zero_last(result: torch.Tensor) -> torch.Tensor:
    result[-1] = 0
    return result


def poison_between_probes(result: torch.Tensor) -> torch.Tensor:
    result[1] = float("nan")  # of 45 tokens 16 are probes: 0, 3, 6, …
    return result


def scale_between_probes(result: torch.Tensor) -> torch.Tensor:
    result[1] *= 2
    return result


@pytest.mark.parametrize(
    ("spoil", "spoilt"),
    [
        pytest.param(zero_last, FIRST, id="last-token-of-the-first"),
        pytest.param(zero_last, SECOND, id="last-token-of-a-later"),
        pytest.param(poison_between_probes, FIRST, id="nan-in-the-first"),
        pytest.param(poison_between_probes, SECOND, id="nan-in-a-later"),
        pytest.param(scale_between_probes, SECOND, id="other-token-of-a-later"),
    ],
)
def test_the_gate_sees_every_token(spoil: Callable, spoilt: MoEConfig) -> None:
    kernel = FakeKernel()
    kernel.spoil, kernel.spoilt = spoil, spoilt
    trial = device_trial(kernel, 45, "bf16")
    errors = {each: trial.error(each) for each in (FIRST, SECOND)}
    assert not errors.pop(spoilt) <= trial.limit
    assert all(error <= trial.limit for error in errors.values())


TIMES = {FIRST: 100.0, SECOND: 60.0, THIRD: 90.0}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeKernel:
    """An H200 whose kernel is the reference, with times from TIMES."""
    kernel = FakeKernel()
    fake = FakeTrial(TIMES)
    for name in ("_named_target", "detect_target"):
        monkeypatch.setattr(tune, name, lambda *_: H200)
    facts = tune.environment(torch.device("cpu")) | {"device": H200.name}
    monkeypatch.setattr(tune, "environment", lambda _: facts)
    for module in (tune, tune_cells):
        monkeypatch.setattr(
            module,
            "choose",
            lambda cell, target, layouts, backend: Choice(
                kernel, cell.problem(target, Layout.ROW_MAJOR)
            ),
        )
    monkeypatch.setattr(
        tune,
        "invalid_row",
        lambda row, _: None if row.config in (FIRST, SECOND, THIRD) else "is no config",
    )
    monkeypatch.setattr(tune, "read_bandwidth", lambda _: 4.2e12)
    monkeypatch.setattr(Trial, "times", lambda self, *rest: fake.times(*rest))
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(tmp_path / "cache"))
    tables.reload_tables()
    return kernel


def invoke(*arguments: str) -> object:
    return runner.invoke(app, ["tune", "--shape", "4,2,64,64", *arguments])


def test_a_run_writes_a_table_that_can_be_read(machine: FakeKernel, tmp_path: Path) -> None:
    machine.spoil = zero_last
    path, report = tmp_path / "new" / "nvidia-h200.json", tmp_path / "report.json"
    outcome = invoke(
        "--tokens", "1,4", "--output", str(path), "--commit", "f00", "--json", str(report)
    )
    assert outcome.exit_code == 0, outcome.output
    assert "6 tuned, 0 kept, 0 left" in outcome.output
    assert "wrong 4,2,64,64 T=4 a16w4" in outcome.output
    text = path.read_text()
    head, rows = tables.parse_table(text, "table")
    assert len(rows) == 6
    assert {row.formats for row in rows} == {f"{name}xmxfp4" for name in ("bf16", "mxfp8", "mxfp4")}
    assert {row.config for row in rows} == {THIRD}, "the fastest is wrong"
    for row in rows:
        assert (row.us, row.heuristic_us, row.source) == (90.0, 100.0, "search")
    assert (head["device"], head["commit"], head["read_tbs"]) == ("NVIDIA H200", "f00", 4.2)
    candidates = json.loads(report.read_text())["cells"][0]["candidates"]
    assert [each["state"] for each in candidates] == ["timed", "wrong", "timed"]
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no partial file is left"


def test_finished_cells_are_skipped(machine: FakeKernel, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    arguments = ("--format", "bf16", "--output", str(path), "--commit")
    assert "1 tuned, 0 kept" in invoke("--tokens", "1", *arguments, "one").output
    assert "1 tuned, 1 kept" in invoke("--tokens", "1,4", *arguments, "two").output
    assert "0 tuned, 2 kept" in invoke("--tokens", "1,4", *arguments, "three").output
    assert [row.commit for row in tables.read_rows(path, H200.name)] == ["one", "two"]
    assert "2 tuned, 0 kept" in invoke("--tokens", "1,4", *arguments, "four", "--force").output
    assert {row.commit for row in tables.read_rows(path, H200.name)} == {"four"}


def test_modelled_rows_are_replaced_by_measured_ones(machine: FakeKernel, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    arguments = ("--tokens", "1", "--format", "bf16", "--output", str(path))
    invoke(*arguments)
    (row,) = tables.read_rows(path, H200.name)
    tables.add_rows(path, HEAD, [replace(row, source="model", rel_l2=None)])
    assert "1 tuned, 0 kept" in invoke(*arguments).output
    assert tables.read_rows(path, H200.name)[0].source == row.source


def test_cells_of_another_version_are_tuned_again(machine: FakeKernel, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    arguments = ("--tokens", "1", "--format", "bf16", "--output", str(path), "--commit")
    invoke(*arguments, "one")
    (row,) = tables.read_rows(path, H200.name)
    gone = replace(row.config, down=replace(row.config.down, block_n=7))
    tables.add_rows(path, HEAD, [replace(row, config=gone)])
    assert "1 tuned, 0 kept" in invoke(*arguments, "two").output
    (again,) = tables.read_rows(path, H200.name)
    assert (again.config, again.commit) == (row.config, "two")


def test_an_interrupt_keeps_finished_cells(
    machine: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    right = Trial.error

    def interrupted(self: Trial, config: MoEConfig) -> float:
        if self.choice.problem.num_tokens == 4:
            raise KeyboardInterrupt
        return right(self, config)

    monkeypatch.setattr(Trial, "error", interrupted)
    outcome = invoke("--tokens", "1,4,8", "--format", "bf16", "--output", str(path))
    assert outcome.exit_code == tune.EXIT_INTERRUPTED
    assert "1 tuned, 0 kept, 2 left" in outcome.output
    assert [row.num_tokens for row in tables.read_rows(path, H200.name)] == [1]


def test_a_spent_budget_leaves_cells_for_the_next_run(machine: FakeKernel, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    outcome = invoke(
        "--tokens", "1,4", "--format", "bf16", "--output", str(path), "--time-budget", "1e-9"
    )
    assert outcome.exit_code == 0, outcome.output
    assert "2 left" in outcome.output
    assert "run the same command again" in outcome.output
    assert not path.exists(), "a cell in which only the heuristic was tried is not finished"


def test_a_cell_without_sound_config_has_no_row(
    machine: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "error", lambda self, config: float("nan"))
    outcome = invoke("--tokens", "1", "--format", "bf16", "--output", str(tmp_path / "t.json"))
    assert outcome.exit_code == tune.EXIT_NO_WINNER
    assert "no right config" in outcome.output
    assert not (tmp_path / "t.json").exists()


def test_the_default_table_is_the_users_and_overrides(machine: FakeKernel, tmp_path: Path) -> None:
    outcome = invoke("--tokens", "4", "--format", "bf16")
    assert outcome.exit_code == 0, outcome.output
    path = tmp_path / "cache" / "tables" / "nvidia-h200.json"
    problem = Cell("x", SHAPE, 4, "bf16").problem(H200, Layout.HOPPER_FRAGMENT)
    found = tables.tuned_row(problem, "hopper")
    assert found is not None
    assert (found.config, found.place) == (SECOND, f"{path}: rows[0]")


def test_a_machine_without_gpu_is_told_so() -> None:
    outcome = runner.invoke(app, ["tune"])
    assert outcome.exit_code == 2
    assert outcome.output.startswith("error: tune: device — need a GPU, got none")
    assert "--dry-run --target nvidia-h200" in outcome.output


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_lists_cells_of_any_target(target: str) -> None:
    pytest.importorskip("triton")
    cells = ["--tokens", "1,64", "--shape", "8,2,256,512", "--json", "-"]
    outcome = runner.invoke(app, ["tune", "--dry-run", "--target", target, *cells])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document["target"] == vars(TARGETS[target])
    assert len(document["cells"]) == 6
    native = {"sm_90": "hopper", "gfx950": "cdna4"}.get(TARGETS[target].arch, "triton")
    for cell in document["cells"]:
        assert cell["backend"] == native
        assert len(cell["candidates"]) > 1
    shown = runner.invoke(app, ["tune", "--dry-run", "--target", target, "--tokens", "64"])
    assert "gpt-oss-120b T=64 a4w4" in shown.output


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--model", "gpt-5"], "gpt-oss-120b", id="unknown-model"),
        pytest.param(["--shape", "4,2,64"], "E,k,H,F", id="short-shape"),
        pytest.param(["--shape", "2,4,64,64"], "k of at most E = 2", id="k-above-E"),
        pytest.param(["--shape", "4,2,64,65"], "multiples of 32", id="odd-width"),
        pytest.param(["--tokens", "0"], "--tokens", id="no-tokens"),
        pytest.param(["--tokens", "9999999"], "T · k", id="too-many-tokens"),
        pytest.param(["--format", "fp8"], "--format", id="unknown-format"),
        pytest.param(["--time-budget", "0"], "--time-budget", id="no-time"),
        pytest.param(["--backend", "reference"], "hopper", id="backend-without-tiles"),
        pytest.param(["--target", "nvidia-h200"], "--dry-run", id="target-without-dry-run"),
        pytest.param(["--dry-run", "--target", "tpu"], "nvidia-h200", id="unknown-target"),
        pytest.param(
            ["--dry-run", "--target", "nvidia-b200", "--backend", "hopper"],
            "needs sm_90",
            id="backend-that-cannot",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], part: str) -> None:
    outcome = runner.invoke(app, ["tune", *arguments])
    assert_one_line(outcome, part)


def test_an_output_that_cannot_be_written_is_told_before_tuning(
    machine: FakeKernel, tmp_path: Path
) -> None:
    outcome = invoke("--output", str(tmp_path))
    assert outcome.exit_code == 2
    assert "--output" in outcome.output
    (tmp_path / "file").touch()
    assert invoke("--output", str(tmp_path / "file" / "table.json")).exit_code == 2
