"""`mxpert bench --plan`: a table, a document and a plot; options that are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mxpert.cli.expert_parallel.plan import parse_ranks
from mxpert.cli.main import app
from mxpert.distributed.planner import LINKS, ExpertLayer, plan_layer
from support.outcomes import assert_one_line

runner = CliRunner()


def run(output: Path, *arguments: str) -> Any:
    return runner.invoke(app, ["bench", "--plan", "--output", str(output), *arguments])


def test_rows_are_those_of_the_planner(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        *("--model", "gpt-oss-120b", "--model", "qwen3-next", "--ranks", "8..16"),
        *("--tokens", "1,128", "--format", "a8w4,a16w4", "--link", "nvlink4", "--json", "-"),
    )
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document == json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert document["kind"] == "plan"
    assert document["link"]["name"] == "nvlink4"
    assert document["measured_layers"]["device"] == "NVIDIA H200"
    assert len(document["rows"]) == 2 * 2 * 2 * 2
    row = document["rows"][0]
    assert (row["model"], row["N"], row["T"], row["wire"]) == ("gpt-oss-120b", 8, 1, "mxfp8")
    plan = plan_layer(
        ExpertLayer("gpt-oss-120b", 128, 4, 2880, 2880),
        num_ranks=8,
        num_tokens=1,
        link=LINKS["nvlink4"],
    )
    assert row["us"] == plan.us
    assert row["local_us"] == plan.local_us
    assert row["tokens_per_s"] == pytest.approx(1e6 / plan.us)
    assert {each["wire"] for each in document["rows"] if each["activation"] == "bf16"} == {"bf16"}
    for part in ("scaled from kimi-k2-tp4", "joins 8 ranks", "On paper", "tokens/s a GPU"):
        assert part in outcome.stderr


def test_ranks_beyond_the_experts_are_left_out(tmp_path: Path) -> None:
    outcome = run(tmp_path, *("--model", "gpt-oss-20b", "--tokens", "16", "--format", "a8w4"))
    assert outcome.exit_code == 0, outcome.output
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["ranks"] == [8, 16, 32, 64, 72]
    assert [row["N"] for row in document["rows"]] == [8, 16, 32]
    assert "gpt-oss-20b has 32 experts: no more ranks than that" in outcome.output


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8..72", [8, 16, 32, 64, 72]),
        ("2..16", [2, 4, 8, 16]),
        ("3..3", [3]),
        ("2, 8,2", [2, 8]),
        ("5..8", [5, 8]),
    ],
)
def test_ranks(text: str, counts: list[int]) -> None:
    assert parse_ranks(text) == counts


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--ranks", "8-72"], "--ranks", id="no-range"),
        pytest.param(["--ranks", "8..2"], "--ranks", id="backwards"),
        pytest.param(["--ranks", "0"], "--ranks", id="zero"),
        pytest.param(["--ranks", "9999999999"], "--ranks", id="huge"),
        pytest.param(["--ranks", "256"], "at most 128, the experts of gpt", id="more-than-experts"),
        pytest.param(["--link", "pcie"], "--link", id="unknown-link"),
        pytest.param(["--routing", "half"], "uniform, zipf with --plan", id="routing"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    outcome = run(tmp_path, *arguments)
    assert_one_line(outcome, part)
    assert not list(tmp_path.iterdir())
