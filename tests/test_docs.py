"""What the documents show runs: README, CONTRIBUTING and docs code blocks, doctests, figures."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mxpert

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS_TRITON = ("mxpert.backends.triton", "mxpert.backends.hopper", "mxpert.testing")
NEEDS_TRANSFORMERS = (
    "mxpert.integrations.dense_checkpoints",
    "mxpert.integrations.transformers",
    "mxpert.integrations.models.convert",
    "mxpert.integrations.models.evaluation",
    "mxpert.cli.eval",
)
NEEDS_VLLM = tuple(
    f"mxpert.integrations.vllm.{name}" for name in ("_configs", "_experts", "_method", "_refusals")
)
NEEDS_SGLANG = ("mxpert.integrations.sglang._method",)


def pages() -> list[Path]:
    return [path for path in DOCUMENTS if BLOCK.search(path.read_text(encoding="utf-8"))]


def modules() -> list[str]:
    return ["mxpert", *(found.name for found in pkgutil.walk_packages(mxpert.__path__, "mxpert."))]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_code_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace and an empty folder."""
    text = path.read_text(encoding="utf-8")
    if "transformers" in "".join(BLOCK.findall(text)):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for index, block in enumerate(BLOCK.findall(text), start=1):
        exec(compile(block, f"<{path.name}, block {index}>", "exec"), namespace)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs" / "figures").glob("*.py")), ids=lambda path: path.stem
)
def test_figures_are_drawn_by_their_script(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn
    assert all((script.parent / name).is_file() for name in drawn)


def test_readme_has_its_first_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = BLOCK.findall(text)[0].strip().splitlines()
    assert len(block) <= 12, "the first example is ten lines"
    for part in ("make demo", "make test", "measured", "compiled-only", "mxpert bench"):
        assert part in text


def test_readme_says_what_why_how_and_where_it_ends() -> None:
    """In this order: the speed-up, the chart, installation, the example, limits, the matrix."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = (
        "times as fast as the best of",
        "layers.png",
        "## Install",
        "```python",
        "## Limits",
        "| op | formats |",
        "<!-- measured: begin -->",
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)


@pytest.mark.parametrize("name", modules())
def test_doctests_pass(name: str) -> None:
    if name.startswith(NEEDS_TRITON):
        pytest.importorskip("triton")
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    if name in NEEDS_VLLM:
        pytest.importorskip("vllm")
    if name in NEEDS_SGLANG:
        pytest.importorskip("sglang")
    outcome = doctest.testmod(importlib.import_module(name), verbose=False)
    assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples failed"


def test_doctests_exist() -> None:
    """The check above is worth something only where there are examples to run."""
    finder = doctest.DocTestFinder()
    for name in ("fused_moe", "quantize", "route_topk", "make_routing_plan"):
        tests = finder.find(getattr(mxpert, name), name)
        assert any(test.examples for test in tests), f"{name} has no example"
