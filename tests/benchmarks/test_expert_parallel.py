"""The benchmark over several ranks, with two processes on a CPU, and what is rendered from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import cells, rows, work
from benchmarks.ranks import render as expert_parallel_render
from benchmarks.ranks import run as expert_parallel
from mxpert.distributed.planner import LINKS, plan_layer
from mxpert.testing.ranks import RankFailedError
from tests.benchmarks.scripts import dry_run

FOUR = [("uniform", "mxfp8"), ("uniform", "bf16"), ("zipf", "mxfp8"), ("zipf", "bf16")]
WAYS = ("mxpert/gather", "mxpert/all_to_all", rows.COLLECTIVES)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of one dry run that a time limit of no seconds cuts, and of its resumption."""
    path = tmp_path_factory.mktemp("ranks") / "expert_parallel.json"
    code, cut = dry_run(expert_parallel.main, path, "--time-limit", "0")
    assert (code, cut["rows"]) == (1, []), "nothing fits"
    assert len(cut["meta"]["left"]) == 8
    assert dry_run(expert_parallel.main, path, "--resume")[0] == 0
    return path


def test_every_cell_has_every_way_and_stage(measured: Path) -> None:
    document = json.loads(measured.read_text())
    rows.SCHEMA.validate(document)
    found = {tuple(row[name] for name in rows.KEY_COLUMNS) for row in document["rows"]}
    expected = {
        (cells.DRY_MODEL, routing, wire, count, way, stage)
        for routing, wire in FOUR
        for count in cells.DRY_TOKENS
        for way, stages in (
            *((way, ("dispatch", "combine", "exchange", "layer")) for way in WAYS),
            ("mxpert/gather", ("local", "host")),
            (rows.ONE_GPU, ("layer", "host")),
        )
        for stage in stages
    }
    assert found == expected
    for row in document["rows"]:
        assert len(row["samples"]) == 2, "all rounds are kept"
        assert min(row["samples"]) > 0
        assert 0 <= row["rel_l2"] < 1e-2
        assert row["activation"] == cells.WIRES[row["wire"]]
        assert row["captured"] == (row["stage"] != "host" and "all_to_all" not in row["impl"])
    assert document["meta"]["left"] == []
    assert document["meta"]["commit"] == "abc"
    assert "transport: gather" in document["meta"]["explain"]["tiny mxfp8 gather"]


def test_predictions_are_the_planner_s(measured: Path) -> None:
    plans = json.loads(measured.read_text())["plans"]
    assert len(plans) == 8
    plan = plans[0]
    layer = work.expert_layer(plan["model"], cells.shape_of(plan["model"]))
    predicted = plan_layer(
        layer,
        num_ranks=2,
        num_tokens=plan["T"],
        link=LINKS["nvlink4"],
        activation_format=plan["activation"],
        wire_format=plan["wire"],
        routing=plan["routing"],
    )
    assert plan["us"] == pytest.approx(predicted.us)


def test_tables_and_plot(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert expert_parallel_render.main([str(measured), "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "expert_parallel.md").read_text()
    assert text.count("### tiny") == 4
    for part in ("ours / NCCL", "The planner's predictions", "## Protocol", "one GPU"):
        assert part in text
    assert "2 ranks of one host, no NVLink" in capsys.readouterr().out
    assert (tmp_path / "expert_parallel.png").read_bytes().startswith(b"\x89PNG")
    assert "| tiny | 1 |" in (tmp_path / "expert_parallel-summary.md").read_text()


def synthetic(measured: Path) -> dict[str, Any]:
    """The document with round times: ours by SYMMETRIC 10, 20, 40, 100 µs; NCCL twice of it."""
    document = json.loads(measured.read_text())
    times = {"dispatch": 10.0, "combine": 20.0, "exchange": 40.0, "local": 50.0, "layer": 100.0}
    kept = []
    for row in document["rows"]:
        row = copy.deepcopy(row)
        if row["impl"] == "mxpert/gather":
            row["impl"] = "mxpert/symmetric"
        factor = {rows.COLLECTIVES: 2, rows.ONE_GPU: 3}.get(row["impl"], 1)
        row["us"] = factor * times.get(row["stage"], 7.0)
        kept.append(row)
    document["rows"] = kept
    for plan in document["plans"]:
        plan |= {"us": 90.0, "dispatch_us": 5.0, "local_us": 75.0, "combine_us": 20.0}
    return document


def test_ratios_by_hand(measured: Path) -> None:
    document = synthetic(measured)
    rows.SCHEMA.validate(document)
    times = expert_parallel_render.groups(document)["tiny", "uniform", "mxfp8"][4]
    assert expert_parallel_render.best_of(times) == "mxpert/symmetric"
    exchange = {
        name: text((4, times)) for name, text in expert_parallel_render.exchange_columns().items()
    }
    assert (exchange["both"], exchange["in a layer"], exchange["NCCL"]) == ("40.0", "50.0", "150.0")
    assert exchange["ours / NCCL"] == "0.33"
    assert exchange["GATHER"] == "–"
    assert expert_parallel_render.added_us(times, rows.ONE_GPU) is None
    layer = {
        name: text((4, times)) for name, text in expert_parallel_render.layer_columns().items()
    }
    assert (layer["speed-up"], layer["speed-up over it"]) == ("2.00", "3.00")
    assert layer["− local − both"] == "+10.0"
    assert layer["host above one GPU's"] == "-14.0"
    (plan, *_) = expert_parallel_render.plan_rows(document)
    assert plan["ratios"] == {"dispatch": 0.5, "local": 1.5, "combine": 1.0, "layer": 0.9}
    document["plans"][0]["us"] = 50.0
    said = expert_parallel_render.deviation(document)
    assert "uniform routing layers are off by 10 % in the median, at most 50 %." in said
    assert "zipf routing layers are off by 10 % in the median, at most 10 %." in said


def test_a_failed_rank_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def start(*arguments: object) -> None:
        raise RankFailedError("rank 1: RuntimeError: an illegal access")

    monkeypatch.setattr(expert_parallel, "start_ranks", start)
    assert expert_parallel.main(["--dry-run", "--output", str(tmp_path / "a.json")]) == 1
    assert "rank 1: RuntimeError: an illegal access" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [((5, []), 0), ((5, ["cell"]), 1), ((0, []), 1)])
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, list[str]], code: int
) -> None:
    monkeypatch.setattr(expert_parallel, "start_ranks", lambda *_: [answer, answer])
    assert expert_parallel.main(["--dry-run", "--output", str(tmp_path / "a.json")]) == code


@pytest.mark.parametrize("option", [["--wires", "fp4"], ["--models", "gpt-5"]])
def test_bad_options_are_refused(option: list[str]) -> None:
    assert expert_parallel.main([*option, "--dry-run"] if "--wires" in option else option) == 2


def test_cells_start_with_the_most_important() -> None:
    found = cells.cells_of(["gpt-oss-120b", "kimi-k2"], (1, 16), ["mxfp8", "bf16"])
    assert str(found[0]) == "gpt-oss-120b uniform mxfp8 T=1"
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert [cell.model for cell in found[:8]] == ["gpt-oss-120b"] * 8
