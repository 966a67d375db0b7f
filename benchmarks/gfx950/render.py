"""Tables and plot of the cycle model, from its JSON alone; every figure is marked as modelled.

python -m benchmarks.gfx950.render benchmarks/results/gfx950-model/model.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.document import NUMBER, OPTIONAL, Row, Schema, Section
from benchmarks.harness.tables import Report, make_panels, optional, page, row_table
from mxpert.cli.plots import INK, NO_LINE, bar_style, legend_outside, line_style, save, styled

TEXT = (str,)
WHOLE = (int,)
SCHEMA = Schema(
    "gfx950.run",
    {
        "calibration": Section(
            {
                **dict.fromkeys(("kind", "name", "unit", "source"), TEXT),
                **dict.fromkeys(("published", "modelled", "residual"), NUMBER),
            },
            ("kind", "name"),
            time="modelled",
        ),
        "rows": Section(
            {
                **dict.fromkeys(("regime", "cell", "backend", "kernel", "config", "limit"), TEXT),
                **dict.fromkeys(("cycles", "mfma_percent", "tbs", "others_per_mfma"), NUMBER),
                **dict.fromkeys(("depth", "tflops"), OPTIONAL),
                **dict.fromkeys(
                    ("mfma", "byte_loads", "registers", "lds", "workgroups", "waves"), WHOLE
                ),
                "triton": TEXT,
            },
            ("cell", "backend"),
            choices={"regime": ("decode", "prefill", "grouped")},
            time="cycles",
        ),
    },
    meta=("what", "chip", "commit", "date", "versions", "residuals"),
)

GOALS = (
    ("decode a4w4", "decode", " mxfp4 ", "tbs", 6.2, "≥ 6.2 TB/s"),
    ("decode a8w4", "decode", " mxfp8 ", "tbs", 6.2, "≥ 6.2 TB/s"),
    ("decode a16w4", "decode", " bf16 ", "tbs", 5.5, "≥ 5.5 TB/s"),
    ("prefill a4w4", "prefill", " mxfp4 ", "mfma_percent", 85.0, "≥ 85 % MFMA"),
    ("prefill a8w4", "prefill", " mxfp8 ", "mfma_percent", 90.0, "≥ 90 % MFMA"),
    ("prefill a16w4", "prefill", " bf16 ", "mfma_percent", 75.0, "≥ 75 % MFMA"),
    ("grouped forward", "grouped", "forward", "mfma_percent", 80.0, "≥ 80 % MFMA"),
)
"""Name, regime, part of the cell's name, column, bound, and how it reads."""
OTHERS = {
    **dict.fromkeys(("decode a4w4", "decode a8w4", "decode a16w4"), 14),
    **dict.fromkeys(("prefill a4w4", "prefill a8w4"), 4),
}
"""Goal for instructions beside each MFMA."""


def worst_residuals(residuals: Mapping[str, Row]) -> str:
    """The calibration's error in one sentence."""
    units = {"ladder": "points", "tiles": "points", "bandwidth": "%"}
    text = "{kind} ({rungs}): mean {mean:.1f}, worst {worst:.1f} {unit}"
    parts = (text.format(kind=kind, unit=units[kind], **found) for kind, found in residuals.items())
    return "Residual of the model on AMD's published measurements: " + "; ".join(parts) + "."


def markdown(document: Row) -> str:
    """Everything: residuals, goals, kernels, calibration."""
    meta, rows = document["meta"], document["rows"]
    error = worst_residuals(meta["residuals"])
    parts = [
        "# gfx950: modelled, not measured",
        f"{error} Steady state of the hot loops, without start, epilogue and launch; "
        f"[whole stages](stages.md) stand beside published times. {meta['date'][:10]}, commit "
        f"`{str(meta['commit'])[:12]}`.",
        "## Goals\n\n" + goal_table(rows),
    ]
    for regime in ("decode", "prefill", "grouped"):
        chosen = [row for row in rows if row["regime"] == regime]
        if chosen:
            parts.append(f"## {regime.capitalize()} (modelled)\n\n{kernel_table(chosen)}")
    parts.append("## Calibration\n\n" + calibration_table(document["calibration"]))
    return page(*parts)


def kernel_table(rows: Sequence[Row]) -> str:
    """One line a cell and backend."""
    regime = rows[0]["regime"]
    rate: dict[str, Any] = {"TB/s": "{tbs:.2f}"} if regime == "decode" else {}
    flops = {} if regime == "decode" else {"TFLOP/s": lambda row: optional(row["tflops"], ".0f")}
    return row_table(
        rows,
        {
            "cell": "{cell}",
            "backend": "{backend}",
            **rate,
            "MFMA %": "{mfma_percent:.1f}",
            **flops,
            "cycles": "{cycles:.0f}",
            "MFMA": "{mfma}",
            "others an MFMA": "{others_per_mfma:.1f}",
            "byte loads": "{byte_loads}",
            "limit": "{limit}",
            "registers": "{registers}",
            "workgroups": "{workgroups}",
            "Triton": "{triton}",
        },
    )


def goal_table(rows: Sequence[Row]) -> str:
    """The worst modelled cell of each goal and backend."""
    lines = []
    for name, regime, part, column, bound, text in GOALS:
        for backend in dict.fromkeys(row["backend"] for row in rows):
            chosen = [
                row
                for row in rows
                if row["regime"] == regime
                and row["backend"] == backend
                and part in row["cell"] + " "
            ]
            if not chosen:
                continue
            worst = min(chosen, key=lambda row: row[column])
            best = max(row[column] for row in chosen)
            most = max(row["others_per_mfma"] for row in chosen)
            lines.append(
                {
                    "goal": f"{name} {text}",
                    "backend": backend,
                    "found": f"{worst[column]:.2f} … {best:.2f}",
                    "met": "yes" if worst[column] >= bound else "no",
                    "others": f"{most:.1f}" + (f" (≤ {OTHERS[name]})" if name in OTHERS else ""),
                    "limit": worst["limit"],
                }
            )
    return row_table(
        lines,
        {
            "goal": "{goal}",
            "backend": "{backend}",
            "modelled, worst … best": "{found}",
            "met": "{met}",
            "others an MFMA": "{others}",
            "limit of the worst": "{limit}",
        },
    )


def calibration_table(rows: Sequence[Row]) -> str:
    """Published, modelled and residual of each rung."""
    return row_table(
        rows,
        {
            "kernel": "{name}",
            "unit": "{unit}",
            "measured by AMD": "{published:g}",
            "modelled": "{modelled:.1f}",
            "residual": "{residual:+.1f}",
            "source": "`{source}`",
        },
    )


@styled
def plot(document: Row, path: Path) -> None:
    """Modelled over measured of the calibration; decode rates; MFMA efficiencies."""
    drawing, panels = make_panels(1, 3, (15, 4.6))
    _plot_calibration(panels[0][0], document["calibration"])
    _plot_bars(panels[0][1], document["rows"], "decode", "tbs", "TB/s (modelled)")
    _plot_bars(panels[0][2], document["rows"], "", "mfma_percent", "% MFMA (modelled)")
    legend_outside(drawing, panels[0][1:], columns=2, loc="outside lower right")
    date = document["meta"]["date"][:10]
    drawing.suptitle(f"gfx950, cycle model, not measured; {date}")
    save(drawing, path)


def _plot_calibration(axes: Any, rows: Sequence[Row]) -> None:
    for index, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        chosen = [row for row in rows if row["kind"] == kind]
        scale = 100 / 8000 if kind == "bandwidth" else 1  # % of 8 TB/s
        axes.plot(
            [row["published"] * scale for row in chosen],
            [row["modelled"] * scale for row in chosen],
            label=kind,
            **line_style(index, dash=NO_LINE),
        )
    axes.plot([0, 100], [0, 100], color=INK)
    axes.set(xlabel="measured by AMD, % of peak", ylabel="modelled, % of peak")
    axes.legend(fontsize="small")


def _plot_bars(axes: Any, rows: Sequence[Row], regime: str, column: str, label: str) -> None:
    chosen = [r for r in rows if (r["regime"] == regime if regime else r["regime"] != "decode")]
    backends = list(dict.fromkeys(row["backend"] for row in chosen))
    names = list(dict.fromkeys(row["cell"] for row in chosen))
    for place, backend in enumerate(backends):
        values = {row["cell"]: row[column] for row in chosen if row["backend"] == backend}
        heights = [values.get(name, 0.0) for name in names]
        axes.barh(
            [k + 0.4 * place for k in range(len(names))],
            heights,
            0.4,
            label=backend,
            **bar_style(place),
        )
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_xlabel(label)


REPORT = Report(__doc__, SCHEMA, markdown, {"": plot})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
