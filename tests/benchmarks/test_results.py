"""What is published follows from its JSON: every page of results/, and the size of every plot."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.cards import render as cards
from benchmarks.harness.script import RESULTS

GFX950 = {
    "gfx950-model/model.json": "gfx950.render",
    "gfx950-model/newest.json": "gfx950.render",
    "gfx950-model/stages.json": "gfx950.stage_tables",
}


def measured(renderers: Mapping[str, str]) -> dict[str, str]:
    """Every card's JSON with a renderer → the script."""
    folders = sorted(RESULTS.glob("nvidia-*"))
    found = [path for folder in folders for path in cards.rendered(folder, renderers)]
    return {path.relative_to(RESULTS).as_posix(): renderers[path.name] for path in found}


REPORTS = measured(cards.REPORTS) | GFX950
"""JSON → the script that renders it."""
RENDERED = measured(cards.RENDERERS) | GFX950 | {"cpu/loading.json": "models.loading"}
"""Also those that render with --render what they have measured."""


def main_of(script: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"benchmarks.{script}").main


def test_every_page_has_its_json() -> None:
    pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("*/*.md")}
    found = {page for page in pages if page.replace("-summary", "")[:-2] + "json" in RENDERED}
    assert pages == found


@pytest.mark.parametrize("name", RENDERED)
def test_pages_and_plots_are_those_of_the_json(name: str, tmp_path: Path) -> None:
    source, copy = RESULTS / name, tmp_path / Path(name).name
    shutil.copy(source, copy)
    option = [] if name in REPORTS else ["--render"]
    assert main_of(RENDERED[name])([*option, str(copy)]) == 0
    drawn = [path for path in tmp_path.iterdir() if path != copy]
    assert drawn
    for path in drawn:
        published = source.parent / path.name
        if path.suffix == ".png":  # the same size: pixels depend on fonts
            assert path.read_bytes()[16:24] == published.read_bytes()[16:24], path.name
        else:
            assert path.read_text("utf-8") == published.read_text("utf-8"), path.name


@pytest.mark.parametrize("script", dict.fromkeys(REPORTS.values()))
def test_what_is_not_its_document_is_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "x.json").write_text('{"rows": []}')
    assert main_of(script)([str(tmp_path / "absent.json")]) == 2
    assert main_of(script)([str(tmp_path / "x.json")]) == 2
