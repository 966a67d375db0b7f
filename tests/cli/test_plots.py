"""Plots: readable on light and dark pages and without colour, ticks that do not collide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.image import imread

from mxpert.cli import demo, eval, plots
from mxpert.cli.expert_parallel import plan, ranks
from mxpert.cli.options import FORMAT_NAMES
from mxpert.integrations.models.evaluation import EvalReport, FormatResult, LayerResult

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"white": "#ffffff", "code host": "#0d1117", "site": "#1e2129"}
FORMATS = list(FORMAT_NAMES)
PUBLISHED = sorted(
    path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.png")
)


def luminance(color: str) -> float:
    """Relative luminance as the accessibility guidelines define it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_ink_and_colours_stand_out(page: str) -> None:
    assert contrast(plots.INK, page) >= 3.7
    assert all(contrast(color, page) >= 3 for color in plots.COLORS)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_plots_are_transparent(path: Path) -> None:
    pixels = imread(path)
    assert pixels.shape[-1] == 4, "no alpha"
    assert pixels[0, 0, 3] == pixels[-1, -1, 3] == 0
    dark = (pixels[..., :3].max(-1) < 0.25) & (pixels[..., 3] > 0.5)
    assert dark.mean() < 1e-3, "black ink"


def test_line_styles_differ_without_colour() -> None:
    styles = [plots.line_style(i) for i in range(len(plots.COLORS))]
    assert len({style["marker"] for style in styles}) == len(styles)
    bars = [plots.bar_style(i) for i in range(len(plots.COLORS))]
    assert len({style["hatch"] for style in bars}) == len(bars)
    longest = max(sum(dash[1]) for dash in plots.DASHES if isinstance(dash, tuple))
    length = plots.STYLE["legend.handlelength"]
    assert isinstance(length, float)
    assert longest * 1.3 < length * 8, "the legend shows more than one dash (8 points a letter)"


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("low", [3e-9, 0.4, 59.0, 7e5])
@pytest.mark.parametrize("ratio", [1.01, 1.4, 3, 8, 90, 5e3, 1e12])
def test_ticks_are_few_and_inside(low: float, ratio: float, base: int) -> None:
    found = plots.log_ticks(low, low * ratio, base)
    assert len(found) <= plots.MOST_TICKS
    assert found == sorted(set(found))
    assert all(low / 1.001 <= each <= low * ratio * 1.001 for each in found)
    assert len(found) >= (2 if base == 10 else min(2, int(math.log2(ratio))))


def test_a_plot_of_nothing_has_no_ticks() -> None:
    assert plots.log_ticks(0, 5) == plots.log_ticks(5, 5) == plots.log_ticks(1, math.inf) == []


# ---- what the commands draw ---------------------------------------------------------------------

ENVIRONMENT = {"device": "NVIDIA H200", "kind": "cuda"}
FEW, MANY = (16,), (1, 16, 64, 128, 256, 1024, 4096)


def draw_plan(path: Path, tokens: Sequence[int]) -> None:
    rows = [
        {"model": "m", "N": count, "T": T, "activation": name, "us": 80 + 3 * T / count + 2 * i}
        for count in (8, 16)
        for T in tokens
        for i, name in enumerate(FORMATS)
    ]
    plan.plot_plan(path, {"link": {"name": "nvlink5"}, "rows": rows})


def draw_ranks(path: Path, tokens: Sequence[int]) -> None:
    rows = [
        {"model": "m", "T": T, "activation": name, "impl": impl, "stage": stage, "us": 50.0 + T}
        for T in tokens
        for name in FORMATS
        for impl in ("mxpert/symmetric", "collectives")
        for stage in ranks.STAGES
    ]
    ranks.plot_ranks(path, {"environment": ENVIRONMENT, "ranks": 2, "rows": rows})


def draw_roofline(path: Path, tokens: Sequence[int]) -> None:
    rates = {name: 600.0 + 100 * i for i, name in enumerate(FORMATS)}
    rows = [
        {"activation": name, "stage": stage, "flops": 1e9 * T, "weight_bytes": 1.2e7, "us": 10 + T}
        for T in tokens
        for name in FORMATS
        for stage in ("gate_up", "down", "layer")
    ]
    limits = {"read_tbs": 4.1, "matmul_tflops": rates}
    document = {"environment": ENVIRONMENT, "ceilings": limits, "rows": rows}
    plots.plot_roofline(path, document)


def draw_demo(path: Path, tokens: Sequence[int]) -> None:
    row = {"rel_l2": 2e-3, "rel_l2_gate": 1e-2, "cosine": 0.999, "cosine_gate": 0.99, "us": 30.0}
    rows = [row | {"T": T, "activation": name} for T in tokens for name in FORMATS]
    rows[0] |= {"rel_l2": math.nan}
    document = {"environment": ENVIRONMENT, "timed": True, "oracle": "torch", "summary": rows}
    demo.plot(document, path)


def draw_eval(path: Path, tokens: Sequence[int]) -> None:
    names = list(FORMAT_NAMES.values())
    formats = [FormatResult("bf16", 1.0, 0.0, 0.0, 9.0)]
    formats += [FormatResult(name, 1.01, 0.01, 0.001, 9.0) for name in names]
    layers = [LayerResult(str(i), dict.fromkeys(names, 20.0 + i)) for i in range(3)]
    eval.draw(path, EvalReport(100, 4, 25, formats, layers), "model")


DRAWN = {
    "plan": draw_plan,
    "ranks": draw_ranks,
    "roofline": draw_roofline,
    "demo": draw_demo,
    "eval": draw_eval,
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is written."""
    found: list[Figure] = []
    write = Figure.savefig

    def note(figure: Figure, *arguments: Any, **options: Any) -> None:
        found.append(figure)
        write(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    return found


def look(handle: Any) -> tuple[object, ...]:
    """A legend's sample without its colour."""
    if hasattr(handle, "patches"):  # bars
        return (handle.patches[0].get_hatch(),)
    line = handle.lines[0] if hasattr(handle, "lines") else handle
    return (line.get_marker(), line.get_fillstyle(), str(line._dash_pattern), line.get_linestyle())


@pytest.mark.parametrize("tokens", [FEW, MANY], ids=["one-count", "many-counts"])
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_labels_do_not_collide_and_lines_differ_without_colour(
    draw: Callable[[Path, Sequence[int]], None],
    tokens: Sequence[int],
    figures: list[Figure],
    tmp_path: Path,
) -> None:
    draw(tmp_path / "plot.png", tokens)
    assert imread(tmp_path / "plot.png")[0, 0, 3] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    (figure,) = figures
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            texts = [text for text in axis.get_ticklabels() if text.get_text()]
            boxes = [text.get_window_extent() for text in texts if text.get_visible()]
            assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes)), axes.get_title()
        handles, labels = axes.get_legend_handles_labels()
        looks: dict[object, str] = {}
        for handle, label in zip(handles, labels, strict=True):
            same = looks.setdefault(look(handle), label)
            assert same == label, "two lines look alike without colour"
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


def test_the_demo_shows_how_much_of_each_gate_is_used(
    figures: list[Figure], tmp_path: Path
) -> None:
    draw_demo(tmp_path / "plot.png", FEW)
    errors, distances = figures[0].axes[1:]
    heights = [round(bar.get_height()) for bar in errors.patches]
    assert heights == [demo.MOST_PERCENT, 20, 20, 20], "NaN is the highest bar"
    assert [round(bar.get_height()) for bar in distances.patches] == [10] * 4
    assert [line.get_ydata()[0] for line in errors.lines] == [100]
