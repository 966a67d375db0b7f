"""Which card gave which figure: blocks of the pages, and a folder of a new card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.cards import render as cards
from benchmarks.harness.script import RESULTS, device_folder


@pytest.mark.parametrize("page", cards.PAGES)
def test_the_committed_blocks_are_those_of_the_results(page: str) -> None:
    assert cards.filled(page, cards.results()) == (ROOT / page).read_text("utf-8")


def test_the_opening_of_the_readme_says_what_the_results_say() -> None:
    every = cards.results()
    h200, h100 = (
        cards.span(cards.layer_means(cards.named(every[folder], "moe.json")), ".1f")
        for folder in ("nvidia-h200", "nvidia-h100")
    )
    opening = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]
    assert f"on one H200, layers of six models run **{h200} times as fast" in opening
    assert f"on one H100 {h100} times" in opening


def test_every_file_names_its_card() -> None:
    for folder, found in cards.results().items():
        for each in found:
            assert device_folder(each.meta["device"]) == folder.removesuffix("-x2"), each.path


def copy_of(name: str, folder: Path, **meta: Any) -> None:
    """A JSON of the H200 as one of another card."""
    document = json.loads((RESULTS / "nvidia-h200" / name).read_text("utf-8"))
    document["meta"] |= meta
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document), encoding="utf-8")


def test_a_new_card_gets_its_pages_and_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100"
    for name in ("cliffs.json", "grouped_gemm.json", "moe.json"):
        copy_of(name, folder, device="NVIDIA H100 80GB HBM3", commit="1234567890")
    assert cards.render(folder) == []
    assert {path.name for path in folder.glob("*.md")} == {
        "cliffs.md",
        *("grouped_gemm.md", "grouped_gemm-summary.md"),
        *("moe.md", "moe-summary.md"),
    }
    assert "NVIDIA H100" in (folder / "moe-summary.md").read_text("utf-8")
    found = cards.results(tmp_path)
    known = cards.cards(cards.results(), "results").splitlines()
    (line,) = (each for each in known if "(results/nvidia-h200)" in each)
    _, _, rates = line.partition("(results/nvidia-h200) | ")
    head, _, here = cards.cards(found, "results").partition("(results/nvidia-h100) | ")
    assert head.endswith("| [NVIDIA H100 80GB HBM3]")
    assert here.split(" | ")[1:] == rates.split(" | ")[1:]  # the first is a median of all files
    line = "| [cliffs](results/nvidia-h100/cliffs.json) | NVIDIA H100 80GB HBM3 |"
    assert line in cards.files(found, "results")
    assert cards.files(found, "results").count("`1234567`") == 3


def test_a_document_that_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100"
    folder.mkdir()
    (folder / "moe.json").write_text("{}")
    shutil.copy(RESULTS / "nvidia-h200/routing.json", folder)
    assert cards.render(folder) == ["moe.json"]


def test_a_report_of_bench_has_no_page(tmp_path: Path) -> None:
    """Two scripts write a weight_formats.json."""
    (tmp_path / "weight_formats.json").write_text('{"kind": "bench", "environment": {}}')
    copy_of("cliffs.json", tmp_path)
    assert [path.name for path in cards.rendered(tmp_path)] == ["cliffs.json"]


def test_other_columns_of_a_card_that_lacks_a_benchmark(tmp_path: Path) -> None:
    copy_of("routing.json", tmp_path / "nvidia-h20", device="NVIDIA H20")
    text = cards.cards(cards.results(tmp_path), "x")
    assert "| [NVIDIA H20](x/nvidia-h20) | – | – | – |" in text


def test_pages_on_vllm_begin_with_its_newest_release() -> None:
    every = cards.results()
    lines = cards.serving(every, "x").splitlines()
    releases = [line.split()[1].rstrip(",") for line in lines if line.startswith("vLLM ")]
    assert releases == sorted(releases, key=lambda each: tuple(map(int, each.split("."))))[::-1]
    assert len(releases) == len(cards.SERVING)
    brief = cards.serving(every, "x", brief=True)
    for text in (brief, cards.decode_in_vllm(every, "x")):
        assert releases[0] in text
        assert not any(older in text for older in releases[1:])
    assert "mxpert a16w4" in brief
    assert "Marlin" not in brief
