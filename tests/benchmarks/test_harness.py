"""What the scripts share: documents are checked and resumed, options refused, tables reproduced."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.grouped.rows import SCHEMA as GROUPED
from benchmarks.harness.document import Document
from benchmarks.harness.script import RESULTS, Script, Seconds, within
from benchmarks.harness.tables import absences, page
from benchmarks.models import rows as whole_model
from benchmarks.moe.rows import KEY_COLUMNS, SCHEMA
from mxpert.core.problem import Target
from mxpert.core.target import on_device
from tests.benchmarks.comparison_rows import CEILINGS, META, grouped_document, row, row_key

TIMES = {"ms": 4.0, "ms_spread": 0.1, "moe_ms": 1.0, "step_ms_hooked": 5.0}
COSINES = {"layer_cosine": 0.99999, "logits_cosine": 0.999}
MODEL_ROW = whole_model.make_row("mxpert", "a16w4", "decode", "graph", 8, 32, TIMES, COSINES)
DOCUMENTS = {
    "moe.run": (SCHEMA, {"meta": META | {"peers": {}, "failures": []}, "rows": [row()]}),
    "grouped.run": (GROUPED, grouped_document()),
    "models.run": (
        whole_model.SCHEMA,
        {"meta": dict.fromkeys(whole_model.META, ""), "rows": [MODEL_ROW]},
    ),
}
SPOILS: dict[str, tuple[Any, str]] = {
    "no-rows": (lambda d: d.pop("rows"), "need meta and rows"),
    "no-clocks": (lambda d: d["meta"].pop("clocks"), "meta"),
    "unknown-meta": (lambda d: d["meta"].update(extra=1), "meta"),
    "missing-column": (lambda d: d["rows"][0].pop("impl"), r"rows\[0\]"),
    "row-twice": (lambda d: d["rows"].append(dict(d["rows"][0])), "twice"),
    "number-for-a-text": (lambda d: d["rows"][0].update(impl=1), r"rows\[0\]\.impl"),
}
OF_ONE: dict[str, tuple[str, Any, str]] = {
    "text-for-a-time": ("moe.run", lambda d: d["rows"][0].update(us="1"), r"rows\[0\]\.us"),
    "zero-time": ("moe.run", lambda d: d["rows"][0].update(us=0), "more than 0"),
    "bool-for-a-number": ("moe.run", lambda d: d["rows"][0].update(T=True), r"rows\[0\]\.T"),
    "unknown-stage": ("moe.run", lambda d: d["rows"][0].update(stage="up"), "stage"),
    "no-quantiser": ("grouped.run", lambda d: d.pop("quantiser"), "keys"),
    "int-for-bool": ("grouped.run", lambda d: d["rows"][0].update(with_quant=1), "with_quant"),
    "bool-for-us": ("grouped.run", lambda d: d["rows"][0].update(us=True), r"rows\[0\].us"),
    "zero-us": ("grouped.run", lambda d: d["rows"][0].update(us=0), "more than 0"),
    "unknown-op": ("grouped.run", lambda d: d["rows"][0].update(op="fwd"), "op"),
    "text-for-a-width": ("grouped.run", lambda d: d["quantiser"][0].update(width="1"), "width"),
    "zero-ms": ("models.run", lambda d: d["rows"][0].update(ms=0.0), r"rows\[0\]\.ms"),
    "mode-of-another": ("models.run", lambda d: d["rows"][0].update(mode="forward"), r"\.mode"),
}
CASES = [
    *(
        pytest.param(name, *SPOILS[spoil], id=f"{name}-{spoil}")
        for name in DOCUMENTS
        for spoil in SPOILS
    ),
    *(pytest.param(*case, id=spoil) for spoil, case in OF_ONE.items()),
]


@pytest.mark.parametrize("name, spoil, complaint", CASES)
def test_a_spoilt_document_is_refused(name: str, spoil: Any, complaint: str) -> None:
    schema, good = DOCUMENTS[name]
    schema.validate(good)
    broken = copy.deepcopy(good)
    spoil(broken)
    with pytest.raises(ValueError, match=complaint):
        schema.validate(broken)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=f"need the JSON of benchmarks.{name}"):
        DOCUMENTS[name][0].load(tmp_path / "x.json")


def comparison(path: Path, meta: dict[str, Any]) -> Document:
    return Document(path, meta, KEY_COLUMNS, KEY_COLUMNS)


def test_a_document_knows_what_is_done(tmp_path: Path) -> None:
    first = comparison(tmp_path / "x.json", dict(META))
    first.add(row())
    assert first.fail(row_key(row("humming")), RuntimeError("no\n way")) == "RuntimeError: no way"
    first.save()
    old = SCHEMA.load(first.path)
    assert old["meta"]["failures"][0]["impl"] == "humming"
    again = comparison(first.path, META | {"date": "2027-01-01", "ceilings": CEILINGS})
    again.resume(old)
    assert again.is_done(row_key(row()))
    assert first.is_done(row_key(row("humming")))
    assert not again.is_done(row_key(row(tokens=4)))


@pytest.mark.parametrize("name", ["device", "commit", "protocol"])
def test_resume_refuses_another_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        comparison(tmp_path, META | {name: "other"}).resume({"meta": META, "rows": []})


def test_what_does_not_fit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], []
    monkeypatch.setattr("benchmarks.harness.script.time.monotonic", lambda: now[0])
    for item in within([3.0, 2.0, 4.0, 1.0], 7.5, left):
        now[0] += item
    assert left == [4.0, 1.0]


def test_seconds_are_added_by_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 2.0, 5.5])
    monkeypatch.setattr("benchmarks.harness.script.time.monotonic", lambda: next(times))
    seconds = Seconds()
    for what in ("a", "b"):
        with seconds.clock(what):
            pass
    assert str(seconds) == "seconds: b 3.5, a 1.0"


def test_absences_are_named_or_left_out() -> None:
    assert absences("Not measured", [], []) == ""
    assert page("", absences("Not measured", ["a"], ["b", "c"])) == (
        "## Not measured\n\n- a\n- out of time: b, c\n"
    )


BAD = {
    "moe.run": "models=gpt-5 tokens=0 activations=a7 stages= peers=/nonexistent",
    "grouped.run": "shapes=99 shapes= peers=/nonexistent",
    "grouped.requests": "shapes=99",
    "moe.cliffs": "shapes=E1 tokens=0 routings=x render=/nonexistent",
    "hunts.run": "variants=none processes=0 render=/nonexistent",
    "moe.at_size": "models=gpt-5 formats=a7 render=/nonexistent",
    "routing.run": "tokens=x",
}


@pytest.mark.parametrize(
    "script, option", [(script, option) for script in BAD for option in BAD[script].split()]
)
def test_bad_options_are_refused(
    script: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.import_module(f"benchmarks.{script}").main(["--dry-run", f"--{option}"]) == 2
    assert "need" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
@pytest.mark.parametrize(
    "script",
    [
        *("moe.run", "moe.cliffs", "moe.at_size", "routing.run", "hunts.run"),
        *("grouped.run", "grouped.requests", "grouped.training_rows", "grouped.training_host"),
    ],
)
def test_without_a_gpu_a_dry_run_is_advised(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.import_module(f"benchmarks.{script}").main([]) == 2
    assert "need a GPU, got none; run with --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, folder",
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
        ("NVIDIA GH200 480GB", "nvidia-gh200"),
    ],
)
def test_results_land_in_the_folder_of_their_device(name: str, folder: str) -> None:
    script = Script("cliffs", None, lambda options, prepared: 0, suffix="-x2")
    with on_device(Target("cuda", "sm_90", name, 132, 232448)):
        found = script.default_output(torch.device("cuda"))
    assert found == RESULTS / f"{folder}-x2" / "cliffs.json"
