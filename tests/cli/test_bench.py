"""`mxpert bench`: gate before time, rows that can be judged, inputs that are checked."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mxpert.cli import bench, measure
from mxpert.cli.main import app
from mxpert.testing.timing import (
    Timing,
    Work,
    matmul_rate,
    read_bandwidth,
    time_graph,
    time_sustained,
)
from support.outcomes import assert_one_line

runner = CliRunner()
TIMES = {"us", "tbs", "tflops", "percent_of_roof"}
COLUMNS = {"model", *"EkHFT", "hit", "routing", "impl", "activation", "stage", "rel_l2"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_SECONDS_PER_CASE", 0.0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is timed, as a GPU is."""
    monkeypatch.setattr(bench, "is_timed", lambda _: True)


def run(output: Path, *arguments: str) -> object:
    return runner.invoke(app, ["bench", "--scale", "32", "--output", str(output), *arguments])


@pytest.mark.usefixtures("timed")
def test_rows_tell_all_that_is_needed_to_judge_them(tmp_path: Path) -> None:
    cells = "--model gpt-oss-20b --model qwen3-next --tokens 1,17 --routing zipf"
    outcome = run(tmp_path, *cells.split(), "--format", "bf16,mxfp8,fp8_token")
    assert outcome.exit_code == 0, outcome.output
    document = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert len(document["rows"]) == 2 * 2 * 3 * 3
    for row in document["rows"]:
        assert set(row) >= COLUMNS | TIMES
        assert row["us"] > 0
        assert row["percent_of_roof"] >= 0
        assert row["tflops"] == pytest.approx(row["flops"] / row["us"] / 1e6)
    assert {row["model"] for row in document["rows"]} == {"gpt-oss-20b/32", "qwen3-next/32"}
    assert set(document["ceilings"]["matmul_tflops"]) == {"bf16", "mxfp8", "fp8_token"}
    assert document["environment"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("weight_format", ["mxfp8", "nvfp4", "int4_g32"])
def test_weights_of_other_formats(weight_format: str, tmp_path: Path) -> None:
    cell = ["--model", "qwen3-next", "--tokens", "3", "--format", "a16w4"]
    outcome = run(tmp_path, *cell, "--weight-format", weight_format)
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["weights"].removesuffix("_e4m3") for row in rows} == {weight_format}
    assert f"bf16 × {weight_format}" in outcome.stdout


def test_a_weight_format_is_checked(tmp_path: Path) -> None:
    outcome = run(tmp_path, "--weight-format", "int8")
    assert_one_line(outcome, "bench: --weight-format — need one of mxfp4, ", "int8")
    outcome = run(tmp_path, "--plan", "--weight-format", "nvfp4")
    assert_one_line(outcome, "bench: --weight-format — need none with --plan")


def test_a_cpu_is_checked_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "roofline.png").touch()
    outcome = run(tmp_path, "--tokens", "1", "--format", "a16w4,a8w4")
    assert outcome.exit_code == 0, outcome.output
    document = json.loads((tmp_path / "bench.json").read_text())
    assert (document["timed"], document["ceilings"]) == (False, None)
    assert all(set(row) >= COLUMNS and not TIMES & set(row) for row in document["rows"])
    assert not re.search(r"\d (µs|ms)|/s|roof", outcome.stdout), outcome.stdout
    assert "nothing was timed" in outcome.stdout
    assert "mxpert bench --plan" in outcome.stdout
    assert not (tmp_path / "roofline.png").exists(), "of an earlier run"


@pytest.mark.usefixtures("timed")
def test_json_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    target = tmp_path / "h200.json"
    cell = ["--tokens", "1", "--format", "a16w4", "--stage", "layer"]
    outcome = run(tmp_path / "new", *cell, "--json", str(target))
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(target.read_text())
    assert [row["stage"] for row in document["rows"]] == ["layer"]
    assert document == json.loads((tmp_path / "new" / "bench.json").read_text())
    assert (tmp_path / "new" / "roofline.png").is_file()


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.moe_down
    calls = []

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        calls.append(1)  # every second call is the one under test; the first is the truth
        return right(*arguments, **options) * (1 if len(calls) % 2 else 1.01)

    monkeypatch.setattr(bench, "moe_down", wrong)
    outcome = run(tmp_path, "--tokens", "4", "--format", "bf16", "--stage", "down")
    assert outcome.exit_code == 1
    assert "nothing is timed on a wrong result" in outcome.output
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize("error", [math.nan, math.inf, 3e-3])
def test_the_gate_refuses(error: float) -> None:
    with pytest.raises(measure.GateError, match="need relative L2"):
        measure.check_gate("case", error, "down", "bf16")


def test_the_gate_of_few_rows_with_one_scale_each() -> None:
    """Where the scale of "fp8_token" moves, a whole row moves; power-of-two scales keep rows."""

    def gate(activation_format: str, tokens: int) -> float:
        return measure.error_gate(
            "layer", activation_format, measure.intermediate_sizes(tokens, 8, 2048)
        )

    assert gate("fp8_token", 4) > gate("fp8_token", 64) > measure.END_TO_END_GATE
    assert gate("fp8_token", 4) < 0.025
    assert gate("mxfp4", 4) > gate("mxfp4", 64) > 4 * measure.END_TO_END_GATE  # one flip: half
    assert gate("mxfp8", 4) == measure.error_gate("layer", "fp8_token") == 1e-2
    assert measure.error_gate("down", "fp8_token", (1, 1)) == measure.STAGE_GATE


def test_every_stage_is_gated_by_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = []
    monkeypatch.setattr(bench, "check_gate", lambda case, error, *rest: gated.append(rest))
    outcome = run(tmp_path, "--model", "gpt-oss-20b", "--tokens", "1,17", "--format", "fp8_token")
    assert outcome.exit_code == 0, outcome.output
    features = json.loads((tmp_path / "bench.json").read_text())["rows"][0]["F"]
    assert gated == [
        (stage, "fp8_token", (tokens * 4 * features, features))
        for tokens in (1, 17)
        for stage in ("gate_up", "down", "layer")
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--model", "gpt-5"], "gpt-oss-120b", id="unknown-model"),
        pytest.param(["--tokens", "1,,2"], "--tokens", id="empty-token-count"),
        pytest.param(["--format", "fp16"], "--format", id="unknown-format"),
        pytest.param(["--stage", "middle"], "--stage", id="unknown-stage"),
        pytest.param(["--routing", "odd"], "--routing", id="unknown-routing"),
        pytest.param(["--scale", "-2"], "--scale", id="negative-scale"),
        pytest.param(["--backend", "none"], "--backend", id="unknown-backend"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    outcome = run(tmp_path, *arguments)
    assert_one_line(outcome, part)
    assert not list(tmp_path.iterdir())


def test_variants_take_turns_in_changing_order() -> None:
    order: list[str] = []
    timings = time_graph(
        {name: [lambda name=name: order.append(name)] for name in "abc"},
        device="cpu",
        repeats=9,
        warmup=1,
    )
    rounds = [tuple(order[first : first + 3]) for first in range(0, 30, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert [each[0] for each in rounds] == list("abcabcabca")
    assert {each[1] for each in rounds} == {"a", "b", "c"}
    assert all(timing.samples == 9 for timing in timings.values())


@pytest.mark.parametrize(
    ("variants", "repeats"), [({"a": []}, 1), ({"a": [list]}, 0)], ids=["no-calls", "no-repeats"]
)
def test_time_graph_refuses(variants: dict, repeats: int) -> None:
    with pytest.raises(ValueError, match="time_graph: "):
        time_graph(variants, device="cpu", repeats=repeats)


@pytest.mark.parametrize(
    ("variants", "seconds"), [({"a": []}, 1.0), ({"a": [list]}, 0.0)], ids=["no-calls", "no-load"]
)
def test_time_sustained_refuses(variants: dict, seconds: float) -> None:
    with pytest.raises(ValueError, match="time_sustained: "):
        time_sustained(variants, device="cpu", seconds=seconds)


@pytest.mark.gpu
def test_unbroken_load_counts_single_calls() -> None:
    """Two multiplications a replay: the time is that of one.

    A wrong count would double or halve it; the bounds lie half way. The power limit explains less:
    cuBLAS takes 1.21 times as long under unbroken load (sustained.json and moe.json of one H200).
    """
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    calls = {"matmul": [lambda: a @ a.T] * 2}
    paused = time_graph(calls, device="cuda", repeats=5)["matmul"].us
    sustained = time_sustained(calls, device="cuda", seconds=0.3)["matmul"]
    assert 1 / math.sqrt(2) < sustained.us / paused < math.sqrt(2)
    assert sustained.samples >= 10


def test_timing_is_a_median_with_its_band() -> None:
    timing = Timing.of([float(value) for value in range(11)])
    assert (timing.us, timing.low_us, timing.high_us) == (5.0, 1.0, 9.0)
    assert timing.spread == pytest.approx(1.6)


@pytest.mark.parametrize(("stage", "share"), [("gate_up", 2), ("down", 1), ("layer", 3)])
def test_work_counts_the_experts_that_were_hit(stage: str, share: int) -> None:
    work = Work.of_stage(stage, hit_experts=5, routed_rows=7, hidden_size=64, intermediate_size=96)
    assert work.weight_bytes == 5 * share * (64 * 96 // 2 + 64 * 96 // 32)
    assert work.flops == 2 * 7 * share * 64 * 96
    assert work.floor_us(1e6, 1e15) == pytest.approx(work.weight_bytes)
    assert work.floor_us(1e15, 1e6) == pytest.approx(work.flops)


def test_ceilings_are_plausible() -> None:
    assert 1e8 < read_bandwidth("cpu") < 1e13
    assert 1e8 < matmul_rate("cpu") < 1e15
    assert 1e8 < matmul_rate("cpu", sustained=True) < 1e15
