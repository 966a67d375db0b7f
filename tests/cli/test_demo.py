"""`mxpert demo` on a tiny checkpoint: the whole path, its report, and that its gates can fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mxpert.cli import demo, demo_layers, measure, options, report
from mxpert.cli.main import app
from mxpert.core.problem import ACTIVATION_FORMATS
from support.outcomes import assert_one_line

pytest.importorskip("transformers")
runner = CliRunner()


def run(checkpoint: Path, output: Path, *options: str) -> Any:
    arguments = ["demo", "--checkpoint", str(checkpoint), "--output", str(output), *options]
    return runner.invoke(app, arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mxpert.integrations.checkpoints.gpt_oss import write_demo_checkpoint

    return write_demo_checkpoint(
        tmp_path_factory.mktemp("demo") / "tiny",
        hidden_size=128,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        num_layers=2,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No repeats and no measured ceilings: these tests are about the path, not the figures."""
    ceilings = measure.Ceilings(1e10, dict.fromkeys(options.FORMAT_NAMES, 1e11))
    monkeypatch.setattr(measure, "CPU_SECONDS_PER_CASE", 0.0)
    monkeypatch.setattr(measure.Ceilings, "measure", classmethod(lambda *_: ceilings))


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    outcome = run(tmp_path, tmp_path / "out")
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        f"error: demo: {tmp_path}/config.json: model_type — need gpt_oss, got 'mixtral'; "
        "`mxpert eval` compares formats on other MoE checkpoints\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_passes_its_gates_and_writes_its_report(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run(checkpoint, tmp_path, "--tokens", "1,33", "--json", "-")
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document == json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["T"], row["activation"]) for row in document["summary"]] == [
        (tokens, name) for tokens in (1, 33) for name in ACTIVATION_FORMATS
    ]
    assert {row["layer"] for row in document["rows"]} == {0, 1}
    for row in document["rows"]:
        assert row["passed"]
        assert "us" not in row  # a CPU is not timed
        assert 1 <= row["hit"] <= min(8, 2 * row["T"])
        assert row["rel_l2"] < 1e-2
    assert all(row["cosine"] >= 0.9999 for row in document["rows"] if row["activation"] == "bf16")
    for key in ("commit", "date", "device", "versions"):
        assert document["environment"][key]


def test_the_run_ends_with_a_verdict_and_shows_each_gate(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run(checkpoint, tmp_path, "--tokens", "1,9", "--layers", "1")
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.strip().splitlines()
    assert lines[-1] == "8 of 8 checks passed"
    row = json.loads((tmp_path / "report.json").read_text())["summary"][0]
    assert f"{row['rel_l2']:.1e} ≤ {row['rel_l2_gate']:.1e}" in outcome.stdout
    assert f"{row['cosine']:.6f} ≥ {row['cosine_gate']:.4f}" in outcome.stdout
    assert "Times are left out" in outcome.stdout
    assert "8 checks: 2 token counts × 4 formats, each on layer 1;" in outcome.stderr
    assert "demo: 0 %, layer 1 T=1 a16w4" in outcome.stderr  # progress off a terminal


def test_times_are_shown_where_they_are_measured(checkpoint: Path) -> None:
    """As on a GPU: time and rate stand in the rows, in the table and in the plot's document."""
    case = next(demo_layers.CheckpointLayers(checkpoint).cases([0], 4, torch.device("cpu")))
    ceilings = measure.Ceilings.measure(torch.device("cpu"), [])
    rows = [demo.run_case(case, tokens, "bf16", ceilings) for tokens in (1, 4)]
    document = {
        "environment": {"device": "GPU", "arch": "sm_90"},
        "layers": [0],
        "timed": True,
        "rows": rows,
        "summary": demo.summarise(rows),
        "oracle": "transformers",
    }
    console = Console(record=True, width=120)
    demo.show(document, console)
    shown = console.export_text()
    assert report.format_time(rows[0]["us"]) in shown
    assert report.format_rate(rows[1]) in shown
    assert "Times are left out" not in shown


def test_a_wrong_result_fails_the_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up rows exchanged: the float64 reference shares the weights and sees nothing, so
    transformers has to."""
    load = demo_layers.load_gpt_oss_layers

    def exchanged(*arguments: object) -> object:
        for layer in load(*arguments):
            weights = layer.weights
            swapped = weights.gate_up_proj.qdata.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
            projection = dataclasses.replace(weights.gate_up_proj, qdata=swapped)
            yield dataclasses.replace(
                layer, weights=dataclasses.replace(weights, gate_up_proj=projection)
            )

    monkeypatch.setattr(demo_layers, "load_gpt_oss_layers", exchanged)
    outcome = run(checkpoint, tmp_path, "--tokens", "16", "--layers", "0")
    assert outcome.exit_code == 1
    assert outcome.stdout.strip().splitlines()[-1] == "0 of 4 checks passed"
    assert "layer 0 T=16 a16w4: relative L2 error" in outcome.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert not any(row["passed"] for row in rows)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_the_error_gate_sees_a_wrong_kernel(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of sixteen is off by twelve gates, as one bad tile would leave it: the layer is off
    by about three."""
    case = next(demo_layers.CheckpointLayers(checkpoint).cases([0], 16, torch.device("cpu")))
    ceilings = measure.Ceilings.measure(torch.device("cpu"), [name])
    sound = demo.run_case(case, 16, name, ceilings)
    assert sound["passed"]
    factor = 1 + 12 * sound["rel_l2_gate"]
    right = demo.fused_moe

    def wrong(*arguments: object, **chosen: object) -> torch.Tensor:
        y = right(*arguments, **chosen)
        if y.dtype is torch.bfloat16:
            y[3] *= factor
        return y

    monkeypatch.setattr(demo, "fused_moe", wrong)
    monkeypatch.setattr(demo, "explain", lambda _, *a, **k: _explain(right, *a, **k))
    found = demo.run_case(case, 16, name, ceilings)
    assert not found["passed"]
    assert found["rel_l2_gate"] < found["rel_l2"] < 8 * found["rel_l2_gate"]


_explain = demo.explain


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--tokens", "0"], "--tokens", id="zero-tokens"),
        pytest.param(["--tokens", "1,x"], "--tokens", id="tokens-not-numbers"),
        pytest.param(["--layers", "-1"], "--layers", id="negative-layer"),
        pytest.param(["--layers", "7"], "layers 0 to 1", id="layer-out-of-range"),
        pytest.param(["--backend", "cuda"], "reference", id="unknown-backend"),
        pytest.param(["--json", "/nowhere/x.json"], "--json", id="json-nowhere"),
        pytest.param(["--layers", "9" * 5000], "--layers", id="layer-of-5000-digits"),
        pytest.param(["--tokens", "9" * 5000], "--tokens", id="tokens-of-5000-digits"),
        pytest.param(["--checkpoint", "/nowhere"], "/nowhere", id="no-checkpoint"),
    ],
)
def test_bad_input_is_one_line(
    checkpoint: Path, tmp_path: Path, arguments: list[str], part: str
) -> None:
    given = [] if "--checkpoint" in arguments else ["--checkpoint", str(checkpoint)]
    outcome = runner.invoke(app, ["demo", *given, "--output", str(tmp_path), *arguments])
    assert_one_line(outcome, part)
    assert not (tmp_path / "report.json").exists()


def test_without_matplotlib_the_report_has_no_plot_and_says_why(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    outcome = run(checkpoint, tmp_path, "--tokens", "1", "--layers", "0")
    assert outcome.exit_code == 0, outcome.output
    assert "pip install matplotlib" in outcome.output
    assert not (tmp_path / "report.png").exists()


def test_tokens_are_text(checkpoint: Path) -> None:
    assert bytes(demo_layers.text_token_ids(checkpoint, 9).tolist()) == b"A mixture"
