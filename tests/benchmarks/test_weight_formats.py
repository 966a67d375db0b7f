"""The comparison by format of weights: every format runs, nothing wrong is timed, rows add up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from benchmarks.moe import weight_format_tables as tables
from benchmarks.moe import weight_formats
from benchmarks.moe.cells import Cell
from benchmarks.moe.humming import WEIGHT_CONFIGS
from benchmarks.moe.ours import ACTIVATION, random_weights
from benchmarks.moe.peers import MARLIN_FORMATS
from tests.benchmarks.scripts import dry_run

ONE = ("--models", "qwen3-30b", "--weights", "nvfp4")


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    return dry_run(weight_formats.main, path, *arguments)


def test_every_format_is_checked_and_written(tmp_path: Path) -> None:
    code, document = run(tmp_path / "a.json", "--models", "qwen3-30b,kimi-k3-ep8")
    assert code == 0
    tables.SCHEMA.validate(document)
    places = itertools.product(
        ("qwen3-30b", "kimi-k3-ep8"), tables.WEIGHTS, weight_formats.DRY_TOKENS, tables.ACTIVATIONS
    )
    found = [
        (row["model"], row["weights"], row["T"], row["activation"]) for row in document["rows"]
    ]
    assert sorted(found) == sorted(places)
    assert all(0 <= row["rel_l2"] < 0.1 for row in document["rows"])
    assert document["meta"]["failures"] == document["meta"]["left"] == []
    page = (tmp_path / "a.md").read_text("utf-8")
    assert "| kimi-k3-ep8, int4_g128 |" in page
    (tmp_path / "a.md").unlink()
    assert tables.main([str(tmp_path / "a.json")]) == 0
    assert (tmp_path / "a.md").read_text("utf-8") == page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_models_and_tokens_are_those_of_the_goals() -> None:
    sizes = {name: (m.E, m.k, m.H, m.F) for name, m in weight_formats.MODELS.items()}
    assert sizes == {
        "kimi-k2-tp8": (384, 8, 7168, 256),
        "kimi-k2-tp4": (384, 8, 7168, 512),
        "kimi-k3-ep8": (896 // 8, 16 // 8, 3584, 3072),
        "minimax-m3-tp4": (128, 4, 6144, 768),
        "qwen3-30b": (128, 8, 2048, 768),
        "dsv4-flash": (256, 6, 4096, 2048),
    }
    assert {1, 16, 128, 1024, 8192} <= set(weight_formats.TOKENS)
    widest = max(int(name.partition("_g")[2] or 1) for name in tables.WEIGHTS)
    assert all(m.H % widest == m.F % widest == 0 for m in weight_formats.MODELS.values())
    assert set(tables.WEIGHTS) <= set(WEIGHT_CONFIGS) & set(MARLIN_FORMATS)


@pytest.mark.parametrize("weights", tables.WEIGHTS)
def test_peers_are_given_as_many_codes_and_scales(weights: str) -> None:
    """Bytes of Marlin's random operands are those of ours; NVFP4 has a factor an expert."""
    model = weight_formats.tiny(weight_formats.MODELS["qwen3-30b"])
    ours = random_weights(model, torch.device("cpu"), weights).plain.down_proj
    marlin = object.__new__(weight_formats.Marlin)
    marlin.model, marlin.stored = model, MARLIN_FORMATS[weights]
    codes, scales, factors = marlin._random(model.H, model.F, torch.device("cpu"))
    assert codes.nbytes == ours.qdata.nbytes
    assert scales.nbytes == ours.scale.nbytes
    assert (factors is not None) == (weights == "nvfp4")
    if factors is not None:
        assert ours.row_scale.unique(dim=1).shape == (model.E, 1)


def test_a_run_is_resumed_and_ends_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code, document = run(path, *ONE, "--tokens", "1")
    assert code == 0
    first = {row["activation"]: row["us"] for row in document["rows"]}
    code, document = run(path, *ONE, "--tokens", "1,16", "--resume")
    assert code == 0
    assert {row["activation"]: row["us"] for row in document["rows"] if row["T"] == 1} == first
    assert len(document["rows"]) == 6
    code, document = run(path, *ONE, "--tokens", "1,4,16", "--resume", "--time-limit", "0")
    assert code == 0
    assert document["meta"]["left"] == ["qwen3-30b T=4 uniform nvfp4"]
    assert len(document["rows"]) == 6


def test_a_wrong_layer_of_ours_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = weight_formats.Ours._layer
    monkeypatch.setattr(weight_formats.Ours, "_layer", lambda self, *rest: 1.1 * layer(self, *rest))
    code, document = run(tmp_path / "a.json", *ONE, "--tokens", "1")
    assert code == 1
    assert document["rows"] == []
    assert len(document["meta"]["failures"]) == 3
    assert "no time for ('qwen3-30b', 'nvfp4', 1, 'mxpert', 'bf16')" in capsys.readouterr().err


class FakePeer:
    """A peer that multiplies with mxpert's weights, times `factor`."""

    impl, same_weights = "humming", True

    def __init__(self, cell: Cell, weights: Any, factor: float) -> None:
        self.model, self.weights, self.factor = cell.model, weights, factor

    def prepare(self, cell: Cell, batches: Any) -> Any:
        def layer(inputs: Any) -> torch.Tensor:
            routed = mxpert.route_topk(inputs.logits, self.model.k)
            y = mxpert.fused_moe(inputs.x, self.weights.plain, *routed, activation=ACTIVATION)
            return self.factor * y

        return {"": {"layer": [functools.partial(layer, each) for each in batches]}}


@pytest.fixture
def with_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(weight_formats, "start_compiler", lambda *_: None)

    def measured(factor: float) -> dict[str, Any]:
        monkeypatch.setattr(
            weight_formats,
            "make_peer",
            lambda run, cell, key, weights: FakePeer(cell, weights, factor),
        )
        arguments = ("--tokens", "1", "--peers", str(tmp_path), "--only-peers", "humming")
        code, document = run(tmp_path / "a.json", *ONE, *arguments)
        assert code == 0
        return document

    return measured


def test_a_right_peer_is_compared_and_a_wrong_one_is_not(with_peer: Callable[..., Any]) -> None:
    document = with_peer(1.0)
    rows = [row for row in document["rows"] if row["impl"] == "humming"]
    assert [row["activation"] for row in rows] == ["bf16", "fp8_token"]
    assert all(0 <= row["rel_l2"] < 0.01 for row in rows)
    assert tables.fastest_peers(document["rows"])["qwen3-30b", "nvfp4", 1].keys() == {"a16", "a8"}
    document = with_peer(1.2)
    assert {row["impl"] for row in document["rows"]} == {"mxpert"}
    errors = [each["error"] for each in document["meta"]["failures"]]
    assert len(errors) == 2
    assert all("relative L2 to float64 is 2.0" in error for error in errors)


def row_of(weights: str, tokens: int, impl: str, activation: str, us: float, tbs: float) -> Any:
    sizes = {"E": 8, "k": 2, "H": 128, "F": 128, "hit": 8.0}
    more = {"us_spread": 0.0, "tflops": 1.0, "percent_of_roof": 1.0, "rel_l2": None}
    return {
        "model": "m",
        "weights": weights,
        "T": tokens,
        "impl": impl,
        "activation": activation,
        "us": us,
        "tbs": tbs,
        **sizes,
        **more,
    }


def test_goals_are_counted_as_they_are_stated() -> None:
    rows = [
        row_of("nvfp4", 64, "mxpert", "bf16", 10.0, 3.6),
        row_of("nvfp4", 64, "mxpert", "mxfp8", 9.0, 4.0),
        row_of("nvfp4", 64, "humming", "bf16", 12.0, 1.0),
        row_of("nvfp4", 64, "marlin", "bf16", 18.0, 1.0),
        row_of("nvfp4", 1, "mxpert", "bf16", 10.0, 1.0),
        row_of("nvfp4", 1, "humming", "fp8_token", 8.0, 1.0),
        row_of("int4_g128", 1024, "mxpert", "bf16", 50.0, 1.0),
        row_of("int4_g128", 1024, "mxpert", "mxfp8", 100.0, 1.0),
        row_of("int4_g128", 1024, "humming", "fp8_token", 90.0, 1.0),
        row_of("int4_g128", 1024, "marlin", "bf16", 150.0, 1.0),
        row_of("int4_g32", 8192, "mxpert", "fp8_token", 100.0, 1.0),
        row_of("int4_g32", 8192, "marlin", "bf16", 90.0, 1.0),
    ]
    document = {"rows": rows, "meta": {"ceilings": {"read_tbs": 4.0}}}
    found = [values for _, values, _ in tables.goals(document)]
    assert found == [[1.0], [12.0 / 9.0, 0.8], [1.5], [0.9]]
    text = tables.goal_table(document)
    assert "| 0.88 | 1 of 1 | 1.00 | 1.00 |" in text
    assert "| 1.0 | 1 of 2 | 0.80 |" in text
    assert "| 1.4 | 1 of 1 | 1.50 | 1.50 |" in text
    assert tables.means(document, "int4_g128", "mxfp8") == [(1024, 0.9)]
    assert tables.cell_text(rows[1], {"a16": 12.0}, 4.0) == "9 (1.33× a16), 100 %"
