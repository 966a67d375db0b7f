"""What is published follows from its JSON: every page of results/, and the size of every plot."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
from harness import ROOT

RESULTS = ROOT / "benchmarks/results"
RENDERED = {
    "nvidia-h200/moe.json": "render",
    "nvidia-h200/grouped_gemm.json": "grouped_render",
    "nvidia-h200/models.json": "models_render",
    "nvidia-h200/serving.json": "serving_render",
    "nvidia-h200/at_size.json": "at_size",
    "nvidia-h200/hunts.json": "hunts",
    "nvidia-h200/cliffs.json": "cliffs",
    "nvidia-h200-x2/expert_parallel.json": "expert_parallel_render",
}
"""JSON → the script that renders it."""
TESTED_ELSEWHERE = {"gfx950-model/model.md"}


def test_every_page_has_its_json() -> None:
    pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("*/*.md")}
    found = {page for page in pages if page.replace("-summary", "")[:-2] + "json" in RENDERED}
    assert pages == found | TESTED_ELSEWHERE


@pytest.mark.parametrize("name", RENDERED)
def test_pages_and_plots_are_those_of_the_json(name: str, tmp_path: Path) -> None:
    source, copy = RESULTS / name, tmp_path / Path(name).name
    shutil.copy(source, copy)
    script = RENDERED[name]
    option = [] if script.endswith("render") else ["--render"]
    assert importlib.import_module(script).main([*option, str(copy)]) == 0
    drawn = [path for path in tmp_path.iterdir() if path != copy]
    assert drawn
    for path in drawn:
        published = source.parent / path.name
        if path.suffix == ".png":  # the same size: pixels depend on fonts
            assert path.read_bytes()[16:24] == published.read_bytes()[16:24], path.name
        else:
            assert path.read_text("utf-8") == published.read_text("utf-8"), path.name
