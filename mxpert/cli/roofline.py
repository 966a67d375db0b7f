"""The plot of `mxpert bench`: rates under the ceilings of the same run."""

from __future__ import annotations

from pathlib import Path

from .options import FORMAT_NAMES
from .plots import DASHES, INK, NO_LINE, figure, legend_outside, line_style, log_scale, save, styled
from .report import Row


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
