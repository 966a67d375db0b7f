"""What longer spans cost: the script's figures, and that the documentation shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from benchmarks.grouped import scale_spans

DOCUMENT = ROOT / "docs/training-spans.md"
FREE_DB = 0.2
"""Least that counts as a cost; the adversarial case within ± 6 binades is 0.06 dB."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(scale_spans.RESULTS.read_text())["rows"]


def test_the_documentation_shows_the_json(rows: list[dict[str, Any]]) -> None:
    assert scale_spans.table(rows) in DOCUMENT.read_text()


def test_the_default_span_costs_nothing_but_where_operands_cancel(
    rows: list[dict[str, Any]],
) -> None:
    names = ("snr_db", "worst_channel_db", "worst_row_db")
    rounded_up = [row for row in rows if row["rule"] == "rceil"]
    exact = {(row["data"], row["formats"]): row for row in rounded_up if row["mode"] == "exact"}
    costly = set()
    for row in rounded_up:
        beside = exact[row["data"], row["formats"]]
        if any(beside[name] - row[name] > FREE_DB for name in names):
            costly.add(row["data"])
    assert costly == {"a and b cancel, 2^±10"}


def test_the_json_is_what_the_script_computes(rows: list[dict[str, Any]]) -> None:
    """One data set again, at its full size."""
    torch.manual_seed(0)
    a, b = scale_spans.plain(*scale_spans.SIZE)
    for mode, spans in scale_spans.SPANS.items():
        how = scale_spans.FORMATS["e4m3"], scale_spans.ScaleRule.RCEIL, spans
        found = scale_spans.snr(scale_spans.product((a, b), *how), a @ b.T)
        case = {"data": "normal", "formats": "e4m3", "rule": "rceil", "mode": mode}
        wanted = next(row for row in rows if case.items() <= row.items())
        for name, value in found.items():
            assert value == pytest.approx(wanted[name], abs=0.02)


def test_the_script_writes_a_row_for_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = scale_spans.measure
    monkeypatch.setattr(scale_spans, "measure", lambda: measure((32, 32, 256)))
    path = tmp_path / "x.json"
    assert scale_spans.main(["--output", str(path)]) == 0
    found = json.loads(path.read_text())["rows"]
    assert len(found) == len(scale_spans.DATA) * 2 * 2 * 3
