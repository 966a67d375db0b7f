"""The report of the gfx950 cycle model: form, residuals, and what the documentation shows."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.gfx950 import run as gfx950_model
from benchmarks.gfx950.calibration import calibrate, residuals, tile_loop
from benchmarks.gfx950.cells import BACKENDS, cells
from benchmarks.gfx950.published import LADDER, SKINNY, TILES
from benchmarks.gfx950.render import (
    SCHEMA,
    calibration_table,
    goal_table,
    markdown,
    worst_residuals,
)

PAGES = [ROOT / "docs/gfx950-model.md", ROOT / "docs/gfx950-modelled.md"]
"""How the model is calibrated, and what it says of our kernels."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return SCHEMA.load(gfx950_model.OUTPUT)


def test_the_documentation_shows_the_json(document: dict[str, Any]) -> None:
    model, modelled = (page.read_text(encoding="utf-8") for page in PAGES)
    assert worst_residuals(document["meta"]["residuals"]) in model
    assert calibration_table(document["calibration"]) in model
    assert goal_table(document["rows"]) in modelled
    assert "modelled, not measured" in markdown(document)


def test_every_published_figure_has_a_row(document: dict[str, Any]) -> None:
    rows = document["calibration"]
    assert len(rows) == len(LADDER) + len(TILES) + len(SKINNY)
    assert document["meta"]["residuals"] == residuals(rows)


def test_each_backend_has_every_cell(document: dict[str, Any]) -> None:
    found = {(row["backend"], row["cell"]) for row in document["rows"]}
    assert found == {(backend, cell.name) for backend in BACKENDS for cell in cells()}


def test_native_loops_load_no_bytes(document: dict[str, Any]) -> None:
    assert not any(row["byte_loads"] for row in document["rows"] if row["backend"] == "cdna4")


def test_the_tiles_give_the_recorded_figures(document: dict[str, Any]) -> None:
    """The part of the calibration that needs no kernel of AMD."""
    recorded = [row for row in document["calibration"] if row["kind"] == "tiles"]
    assert calibrate(None) == recorded


def test_a_tile_has_the_loads_and_mfmas_of_the_table() -> None:
    counts: dict[str, int] = {}
    for each in tile_loop(256, 128).program.instructions:
        counts[each.name] = counts.get(each.name, 0) + 1
    assert counts["v_mfma_f32_16x16x32_f16"] == 64
    assert counts["buffer_load_dwordx4"] == 48 // 4


@pytest.mark.parametrize(
    ("section", "column", "value"),
    [("rows", "regime", "training"), ("rows", "cycles", 0), ("calibration", "modelled", "95")],
)
def test_other_documents_are_refused(
    document: dict[str, Any], section: str, column: str, value: object
) -> None:
    wrong = copy.deepcopy(document)
    wrong[section][0][column] = value
    with pytest.raises(ValueError, match=rf"{section}\[0\]\.{column}"):
        SCHEMA.validate(wrong)


def test_a_missing_checkout_is_an_error(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model.json"
    code = gfx950_model.main(["--ladder", str(tmp_path), "--no-kernels", "--output", str(output)])
    assert code == 2
    assert re.search("--ladder: need a checkout with kernels/", capsys.readouterr().err)
    assert not output.exists()
