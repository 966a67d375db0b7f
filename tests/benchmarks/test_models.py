"""The benchmark of whole models: on tiny layers, with gates that can fail, and its documents."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.harness.document import Document
from benchmarks.models import render as models_render
from benchmarks.models import run as models
from benchmarks.models.peer import TransformersMXFP4
from benchmarks.models.rows import KEY_COLUMNS, SCHEMA, make_row
from benchmarks.models.timing import Stopwatch
from mxpert import GateUpOrder
from tests.benchmarks.scripts import dry_run

TIMES = {"ms": 4.0, "ms_spread": 0.1, "moe_ms": 1.0, "step_ms_hooked": 5.0}
COSINES = {"layer_cosine": 0.99999, "logits_cosine": 0.999}


@pytest.fixture(autouse=True)
def _single_threaded() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a dry run."""
    path = tmp_path_factory.mktemp("models") / "models.json"
    assert dry_run(models.main, path, "--static", "1,2")[0] == 0
    return path


def test_a_dry_run_measures_every_phase(measured: Path) -> None:
    document = json.loads(measured.read_text("utf-8"))
    SCHEMA.validate(document)
    found = {
        (row["impl"], row["format"], row["phase"], row["mode"], row["batch"])
        for row in document["rows"]
    }
    for format in ("a16w4", "a8w4"):
        for mode, batch in itertools.product(("generate", "static", "graph"), (1, 2)):
            assert ("mxpert", format, "decode", mode, batch) in found
        assert ("mxpert", format, "prefill", "forward", 1) in found
    assert ("transformers", "eager", "decode", "generate", 1) in found
    assert ("no", "experts", "decode", "graph", 1) in found
    assert ("transformers", "eager", "decode", "graph", 1) not in found
    assert ("transformers", "eager", "decode", "static", 1) not in found
    assert document["meta"]["commit"] == "abc"
    if isinstance(TransformersMXFP4.load(), str):
        assert "absent" in document["meta"]["failures"]["transformers mxfp4"]


def test_tables_and_plot_come_from_the_json_alone(measured: Path, tmp_path: Path) -> None:
    assert models_render.main([str(measured), "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "models.md").read_text("utf-8")
    assert "| mxpert a16w4 |" in text
    assert "| no experts | – | – |" in text
    assert "decode through generate, tokens/s (MoE share) | batch 1 | batch 2 |" in text
    assert "decode through generate with a static cache, tokens/s" in text
    assert "## Not measured" in text
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_counts_what_was_made() -> None:
    decode = make_row("mxpert", "a16w4", "decode", "graph", 8, 32, TIMES, COSINES)
    prefill = make_row("mxpert", "a16w4", "prefill", "forward", 1, 8192, TIMES, COSINES)
    assert decode["tokens_per_s"] == pytest.approx(8 / 4e-3)
    assert prefill["tokens_per_s"] == pytest.approx(8192 / 4e-3)
    assert decode["moe_share"] == pytest.approx(0.2)
    times = {"ms": 4.0, "ms_spread": 0.1}
    static = make_row("mxpert", "a16w4", "decode", "static", 8, 32, times, COSINES)
    assert (static["moe_ms"], static["moe_share"]) == (None, None)


def test_wrong_experts_are_not_timed(tmp_path: Path) -> None:
    """Gate and up exchanged in one layer: a red gate, no row."""
    device = torch.device("cpu")
    model, converted = models.build(models.tiny_config(), device)
    document = Document(tmp_path / "models.json", {}, KEY_COLUMNS, saves_left=False)
    bench = models.Bench(model, converted, "absent", document, float("inf"))
    truth = models.eager_truth(bench)
    good = copy.copy(converted[1].weights)
    converted[1].weights = replace(good, gate_up_order=GateUpOrder.CONCATENATED)
    options = models.SCRIPT.parser().parse_args(["--dry-run"])
    models.measure(bench, models.VARIANTS[0], truth, options)
    assert not document.rows
    assert "red: layer cosine" in document.failures["mxpert a16w4",]
    converted[1].weights = good
    models.use(bench, models.VARIANTS[0])
    assert models.gate(bench, models.VARIANTS[0], truth)["layer_cosine"] >= models.LAYER_COSINE


def test_nothing_is_timed_after_the_limit(tmp_path: Path) -> None:
    code, found = dry_run(models.main, tmp_path / "models.json", "--time-limit", "0")
    assert code == 1
    error = found["meta"]["failures"]["mxpert a16w4 decode generate batch 1"]
    assert error.startswith("not measured")


def test_a_stopwatch_counts_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.25])
    monkeypatch.setattr("benchmarks.models.timing.time.perf_counter", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    watch.mark()
    watch.mark()
    assert watch.between(0, 1) == pytest.approx(250.0)
