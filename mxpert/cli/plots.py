"""How every plot is drawn: for light and dark pages, lines that differ without colour, plain ticks.

Figures are transparent, with ink and colours of medium lightness that stand out from white and from
the dark pages of code hosts and of this project's site (at least 3 to 1; text at least 3.7 to 1).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..core.files import write_atomically
from .options import FORMAT_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .report import Row

INK = "#7b7b7b"
COLORS = (
    "#1f77b4",
    "#dd6b00",
    "#2a962a",
    "#d9363e",
    "#9467bd",
    "#0f93a0",
    "#d455b0",
    "#8a8a00",
    "#a9652f",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")
DASHES = ("-", (0, (4, 1.2)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (8, 1.5)))
FILLS = ("full", "none", "left", "right", "top", "bottom")
"""Which part of a marker is filled."""
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "ooo", "+++", "|||")
BAR = {"edgecolor": "white", "linewidth": 0}
"""Of bars: white hatches show on a colour of medium lightness, whatever is behind the figure."""
STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.facecolor": "none",
    "legend.edgecolor": "none",
    "legend.handlelength": 3.2,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.8,
}
MOST_TICKS, NO_LINE = 7, -1
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def has_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def styled(draw: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that draws a figure, in the style of this module."""

    @functools.wraps(draw)
    def drawn(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        from cycler import cycler
        from matplotlib import rc_context

        with rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLORS)}):
            return draw(*arguments, **named)

    return drawn


def figure(
    title: str,
    rows: int,
    columns: int,
    *,
    size: tuple[float, float] | None = None,
    dpi: int = 120,
    share: bool = False,
    heights: Sequence[float] | None = None,
) -> tuple[Figure, Any]:
    """A matplotlib figure, drawn without a display, and its panels [rows][columns].

    Args:
        title: above the panels, or "". size: inches; None for 6.4 × 4.8 a panel.
        share: whether all panels have the same scales.
        heights: of the rows, in proportion; their panels have the same x.
    """
    from matplotlib.figure import Figure

    drawing = Figure(figsize=size or (6.4 * columns, 4.8 * rows), dpi=dpi, layout="constrained")
    if title:
        drawing.suptitle(title)
    same_x = share or heights is not None
    panels = drawing.subplots(
        rows, columns, squeeze=False, sharex=same_x, sharey=share, height_ratios=heights
    )
    return drawing, panels


def save(drawing: Figure, path: Path) -> None:
    """Write a figure whole or not at all; a PNG, if the name does not say another format."""
    kind = path.suffix.removeprefix(".") or "png"
    write_atomically(path, lambda partial: drawing.savefig(partial, format=kind))


def legend_outside(
    drawing: Figure, panels: Iterable[Axes], *, columns: int, **options: object
) -> None:
    """One legend for all panels, where it hides nothing; a label stands in it once.

    options: of `Figure.legend`; below the panels and small without them.
    """
    found = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    usual = {"loc": "outside lower center", "fontsize": "small"}
    drawing.legend(found.values(), found.keys(), ncols=columns, **(usual | options))


def line_style(
    color: int,
    shape: int | None = None,
    *,
    dash: int | None = None,
    fill: str = "full",
    size: float = 6,
) -> dict[str, Any]:
    """Style of a line: a colour, and without colours a marker and dashes.

    Args:
        color: index. shape: of the marker; None for `color`. dash: None for `shape`, or NO_LINE.
        fill: the marker's, as matplotlib's `fillstyle`. size: the marker's, in points.
    """
    shape = color if shape is None else shape
    dash = shape if dash is None else dash
    return {
        "color": COLORS[color % len(COLORS)],
        "marker": MARKERS[shape % len(MARKERS)],
        "markersize": size,
        "fillstyle": fill,
        "markerfacecoloralt": "none",
        "linestyle": "" if dash == NO_LINE else DASHES[dash % len(DASHES)],
        "linewidth": 1.3,
    }


def log_scale(axes: Axes, *, x: int | None = None, y: int | None = None) -> None:
    """Scale axes by logarithms, with a few plain numbers at round places.

    Args:
        axes: a matplotlib panel. x, y: base of each axis, 2 for token counts; None leaves it.
    """
    from matplotlib.ticker import FuncFormatter, Locator, NullLocator

    class RoundPlaces(Locator):
        base = 10

        def __call__(self) -> list[float]:
            assert self.axis is not None  # for the type checker: an axis asks
            return self.tick_values(*self.axis.get_view_interval())

        def tick_values(self, vmin: float, vmax: float) -> list[float]:
            return log_ticks(vmin, vmax, self.base)

    for axis, set_scale, base in (
        (axes.xaxis, axes.set_xscale, x),
        (axes.yaxis, axes.set_yscale, y),
    ):
        if base is not None:
            set_scale("log", base=base)
            locator = RoundPlaces()
            locator.base = base
            axis.set_major_locator(locator)
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def log_ticks(low: float, high: float, base: int = 10) -> list[float]:
    """At most `MOST_TICKS` round numbers from `low` to `high`, spread over a logarithmic scale.

    >>> log_ticks(0.9, 9000), log_ticks(60, 140), log_ticks(1, 8192, base=2)
    ([1, 10, 100, 1000], [60.0, 80.0, 100.0, 120.0, 140.0], [1, 4, 16, 64, 256, 1024, 4096])
    """
    low, high = min(low, high), max(low, high)
    if not 0 < low < high < math.inf:
        return []
    first, last = math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 1
    choices: list[list[float]] = []
    if base == 10 and high / low < 5:  # narrow: as on a linear scale
        decade = math.floor(math.log10(high))
        for power in range(decade - 2, decade + 1):
            for factor in (1, 2, 5):
                step = factor * 10.0**power
                choices.append([i * step for i in range(int(low / step), int(high / step) + 1)])
    powers = [base**power if power >= 0 else float(base) ** power for power in range(first, last)]
    if base == 10:
        for factors in ((1, 2, 5), (1, 3)):
            choices.append([power * factor for power in powers for factor in factors])
    for stride in range(1, last - first + 1):
        kept = [p for p, n in zip(powers, range(first, last), strict=True) if n % stride == 0]
        choices.append(kept)
    margin = 1 + 1e-9
    inside = [[v for v in values if low / margin <= v <= high * margin] for values in choices]
    return max((values for values in inside if len(values) <= MOST_TICKS), key=len, default=[])


def tick_text(value: float) -> str:
    """A plain number.

    >>> [tick_text(value) for value in (0.002, 1.0, 83.5, 200000.0, 3e-6)]
    ['0.002', '1', '83.5', '200000', '3e-6']
    """
    if 1e-4 <= value < 1e7:
        return f"{value:.6f}".rstrip("0").rstrip(".")
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def grouped_bars(axes: Axes, groups: Sequence[str], bars: Mapping[str, Sequence[float]]) -> None:
    """Bars side by side in groups; each kind has a colour and a hatch. NaN leaves a gap."""
    width = 0.8 / max(1, len(bars))
    for index, (label, heights) in enumerate(bars.items()):
        places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
        axes.bar(places, heights, width=0.9 * width, label=label, **bar_style(index))
    axes.set_xticks(range(len(groups)), groups)


def bar_style(index: int) -> dict[str, Any]:
    """Style of bars: a colour, and without colours a hatch."""
    return {"color": COLORS[index % len(COLORS)], "hatch": HATCHES[index % len(HATCHES)], **BAR}


# ---- the plot of `mxpert bench`


@styled
def plot_roofline(path: Path, document: Row) -> None:
    """Arithmetic intensity against rate: a panel for each stage, under the run's ceilings."""
    rows, limits = document["rows"], document["ceilings"]
    bandwidth, rates = limits["read_tbs"], limits["matmul_tflops"]
    stages = list(dict.fromkeys(row["stage"] for row in rows)) or ["layer"]
    title = f"mxpert on {document['environment']['device']}"
    size = 4.2 * len(stages) + 1, 4.8
    drawing, (panels,) = figure(title, 1, len(stages), size=size, share=True)
    intensities = [row["flops"] / row["weight_bytes"] for row in rows] or [1.0]
    low, high = min(intensities) / 2, max(intensities) * 2
    xs = [low * (high / low) ** (i / 99) for i in range(100)]
    for axes, stage in zip(panels, stages, strict=True):
        for index, (name, rate) in enumerate(rates.items()):
            axes.plot(
                xs,
                [min(x * bandwidth, rate) for x in xs],
                color=INK,
                linestyle=DASHES[index % len(DASHES)],
                label=f"roof {FORMAT_NAMES[name]}: {bandwidth:.3g} TB/s, {rate:.4g} TFLOP/s",
            )
            chosen = [row for row in rows if (row["stage"], row["activation"]) == (stage, name)]
            axes.plot(
                [row["flops"] / row["weight_bytes"] for row in chosen],
                [row["flops"] / row["us"] / 1e6 for row in chosen],
                label=FORMAT_NAMES[name],
                **line_style(index, dash=NO_LINE),
            )
        axes.set(title=stage, xlabel="FLOP per weight byte")
        log_scale(axes, x=10, y=10)
        axes.grid()
    panels[0].set_ylabel("TFLOP/s")
    legend_outside(drawing, panels, columns=min(len(stages), len(rates)))
    save(drawing, path)
