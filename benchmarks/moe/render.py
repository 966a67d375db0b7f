"""Tables and plots of a comparison, from its JSON alone.

    python -m benchmarks.moe.render benchmarks/results/nvidia-h200/moe.json

writes moe.md (everything), moe-summary.md, moe.png and layers.png beside the JSON. --page FILE
replaces the blocks of that file between its "measured" markers. Ratios are speed-ups: a peer's time
over ours, so that above 1 ours is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    OPEN_ROWS,
    Column,
    Report,
    absences,
    bullets,
    conditions,
    draw_cublas,
    folded,
    make_panels,
    markdown_table,
    optional,
    page,
    paragraphs,
    pivot,
    row_table,
    save_figure,
)
from benchmarks.moe.cells import DECODE_TOKENS, GEMM_STAGES, NAMED, STAGES, WIDTHS
from benchmarks.moe.figures import (
    BOTH_STAGES,
    OURS,
    Roof,
    SpeedUp,
    format_rank,
    format_speed_ups,
    gemm_shares,
    line_name,
    model_rank,
    our_rows,
    slower_cells,
    speed_ups,
    token_columns,
)
from benchmarks.moe.goals import NOTES, goals
from benchmarks.moe.layers import NAMES, means_table, summary, write_page
from benchmarks.moe.rows import SCHEMA
from mxpert.cli.plots import (
    COLORS,
    INK,
    figure,
    legend_outside,
    line_style,
    log_scale,
    save,
    styled,
)

STYLES = {"mxpert": 3, "triton_kernels": 0, "marlin": 2, "humming": 4, "flashinfer": 5}
"""Colour and marker of an implementation."""
FORMATS = ("bf16", "fp8_token", "mxfp8", "mxfp4", "fp8_group")
"""Activation formats in the order of their dashes."""
CHART_TOKENS = (1, 128, 8192)


class ChartPeer(NamedTuple):
    """A peer, its activations, ours of the same width, and its marker."""

    impl: str
    activation: str
    ours: str
    marker: str

    @property
    def label(self) -> str:
        """Its name in the legend."""
        groups = ", groups of 128" * (self.activation == "fp8_group")
        return f"{self.impl} ({NAMES[self.ours]}{groups})"


CHART_PEERS = (
    ChartPeer("triton_kernels", "bf16", "bf16", "o"),
    ChartPeer("marlin", "bf16", "bf16", "s"),
    ChartPeer("humming", "bf16", "bf16", "D"),
    ChartPeer("humming", "fp8_token", "mxfp8", "v"),
    ChartPeer("humming", "fp8_group", "mxfp8", "^"),
    ChartPeer("flashinfer", "bf16", "bf16", "P"),
    ChartPeer("flashinfer", "fp8_token", "mxfp8", "X"),
)
DETAIL: dict[str, Column] = {
    **{name: f"{{{name}}}" for name in ("stage", "routing", "T")},
    "hit": "{hit:.0f}",
    **{name: f"{{{name}}}" for name in ("impl", "activation")},
    "µs": "{us:.1f}",
    "10–90 %": "{us_spread:.1f}",
    "TB/s": "{tbs:.2f}",
    "TFLOP/s": "{tflops:.0f}",
}


OUR_TIME: dict[str, Column] = {"cell": str, "our µs": lambda each: f"{each.ours['us']:.1f}"}


def slower_table(found: Sequence[SpeedUp], ceilings: Mapping[str, float]) -> str:
    """Cells with both sides' share of the roof, and what bounds them."""
    columns = {
        **OUR_TIME,
        "our share of the roof": lambda each: str(Roof.of(each.ours, ceilings)),
        "peer's µs": lambda each: "{impl} {us:.1f}".format(**each.peer),
        "its share": lambda each: str(Roof.of(each.peer, ceilings)),
        "speed-up": lambda each: f"{each.value:.2f}",
    }
    return row_table(found, columns)


def slower_part(found: Sequence[SpeedUp], ceilings: Mapping[str, float]) -> str:
    """How many cells a peer wins, the worst of them, the rest folded."""
    slower = slower_cells(found)
    shown, others = slower[:OPEN_ROWS], slower[OPEN_ROWS:]
    return paragraphs(
        f"{len(slower)} of {len(found)} cells.",
        slower_table(shown, ceilings) if shown else "",
        folded(f"the other {len(others)}", slower_table(others, ceilings)) if others else "",
    )


def roof_part(rows: Sequence[Row], ceilings: Mapping[str, float]) -> str:
    """Our GEMMs: weight traffic in decode, arithmetic in prefill, each with its share."""
    mine = [row for row in our_rows(rows) if row["stage"] in GEMM_STAGES]
    decode = [row for row in mine if row["T"] <= DECODE_TOKENS]
    prefill = [row for row in mine if row["T"] > DECODE_TOKENS]

    def traffic(row: Row) -> str:
        share = 100 * row["tbs"] / ceilings["read_tbs"]
        mark = "" if Roof.of(row, ceilings).bound == "read" else "*"
        return f"{row['tbs']:.2f} ({share:.0f} %){mark}"

    parts = []
    columns = token_columns(row["T"] for row in decode)
    for stage in GEMM_STAGES:
        chosen = [row for row in decode if row["stage"] == stage]
        cells = {(line_name(row), f"T = {row['T']}"): traffic(row) for row in chosen}
        if cells:
            parts.append(pivot(f"{stage}, TB/s of weights (of read ceiling)", cells, columns))
    if decode:
        parts.append("\\* multiplying takes longer than reading: the read ceiling is out of reach.")
    if prefill:
        counts = token_columns(row["T"] for row in prefill)
        columns = [f"{stage} {text}" for stage in GEMM_STAGES for text in counts]
        cells = {
            (line_name(row), f"{row['stage']} T = {row['T']}"): f"{row['tflops']:.0f} "
            f"({Roof.of(row, ceilings)})"
            for row in prefill
        }
        parts.append(pivot("TFLOP/s (of roof, and what bounds it)", cells, columns))
    return paragraphs(*parts) or "No GEMMs of ours were measured."


def formats_part(rows: Sequence[Row], activation: str, other: str) -> str:
    """Goal 3: the speed of one of our formats against another."""
    found = format_speed_ups(rows, activation, other)
    if not found:
        return f"Not measured: needs rows of mxpert with {activation} and with {other}."
    lines = []
    for stage in (*STAGES, BOTH_STAGES):
        values = {key: value for key, value in found.items() if key[3] == stage}
        if values:
            mean, worst = geometric_mean(values.values()), min(values, key=lambda key: values[key])
            text = f"{values[worst]:.2f} ({worst[0]} T={worst[1]})"
            lines.append((stage, f"{mean:.2f}", text, str(len(values))))
    title = f"speed-up of {activation} over {other}"
    return markdown_table((title, "geometric mean", "worst", "cells"), lines)


def gemm_share_table(rows: Sequence[Row]) -> str:
    """Goal 4, by model, format and T."""
    found = gemm_shares(rows)
    names, cells = ("model", "routing", "activation"), {}
    for (*place, tokens), value in found.items():
        line = line_name(dict(zip(names, place, strict=True)))
        cells[line, f"T = {tokens}"] = f"{value:.2f}"
    columns = token_columns(key[3] for key in found)
    return pivot("(gate_up_gemm + down_gemm) / layer", cells, columns)


def speed_up_table(found: Sequence[SpeedUp]) -> str:
    """Every cell that a peer has, too."""
    columns = {
        **OUR_TIME,
        "best peer": lambda each: each.peer["impl"],
        "its µs": lambda each: f"{each.peer['us']:.1f}",
        "speed-up": lambda each: f"{each.value:.2f}",
    }
    return row_table(found, columns)


def detail_table(rows: Sequence[Row], ceilings: Mapping[str, float]) -> str:
    """Every measurement of one model."""

    def rank(row: Row) -> tuple[Any, ...]:
        stage, width = STAGES.index(row["stage"]), WIDTHS[row["activation"]]
        return row["routing"], stage, row["T"], width, row["us"]

    columns = DETAIL | {
        "of roof": lambda row: str(Roof.of(row, ceilings)),
        "rel L2": lambda row: optional(row["rel_l2"], ".1e"),
    }
    return row_table(sorted(rows, key=rank), columns)


def failures_of(meta: Mapping[str, Any]) -> list[str]:
    """Peers that were absent, and failures: those alike but for T and stage in one line."""
    lines = [f"{name}: {text}" for name, text in meta.get("peers", {}).items() if text != "present"]
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in meta.get("failures", []):
        what = f"{each['impl']}/{each['activation']} {each['model']}"
        alike.setdefault((what, each["error"]), []).append(each)
    for (what, error), found in alike.items():
        counts = ", ".join(str(count) for count in sorted({each["T"] for each in found}))
        stages = [stage for stage in STAGES if stage in {each["stage"] for each in found}]
        names = "every stage" if stages == list(STAGES) else ", ".join(stages)
        lines.append(f"{what}, T = {counts}, {names}: `{error}`")
    return lines


def full(document: Mapping[str, Any]) -> str:
    """Everything: goals, speed-ups, slower cells, roofs, measurements, absences."""
    meta, rows = document["meta"], document["rows"]
    limits, found = meta["ceilings"], speed_ups(rows)
    head = ("goal", "wanted", "geometric mean", "worst cell", "cells that meet it", "verdict")
    details = []
    for model in sorted({row["model"] for row in rows}, key=model_rank):
        mine = [row for row in rows if row["model"] == model]
        sizes = ", ".join(f"{name} {mine[0][name]}" for name in "EkHF")
        details.append(folded(f"{model} ({sizes})", detail_table(mine, limits)))
    return page(
        "# MoE with MXFP4 weights: measurements",
        conditions(meta),
        bullets(meta["protocol"]),
        "## Goals",
        markdown_table(head, [goal.columns() for goal in goals(document)]),
        bullets(NOTES),
        "## Against the best peer of the same activation width",
        "Speed-up is the best peer's time over ours: above 1 ours is faster. No peer multiplies "
        "a4: mxfp4 is compared with a8 peers.",
        means_table(found),
        "### Cells slower than a peer",
        slower_part(found, limits),
        folded("every speed-up", speed_up_table(found)),
        "## Our GEMMs and the roof of this run",
        "The roof is the time that reading the weights of the experts hit takes at the read "
        "ceiling, or the arithmetic at the cuBLAS rate of the width, whichever is longer.",
        roof_part(rows, limits),
        "## Our formats against each other",
        "mxfp8 has 1×32 scales, fp8_token one scale per token.",
        formats_part(rows, "mxfp8", "fp8_token"),
        formats_part(rows, "mxfp4", "mxfp8"),
        "## The two GEMMs' share of a whole layer",
        gemm_share_table(rows),
        "## Every measurement",
        *details,
        absences("Not measured", failures_of(meta), meta.get("left", ())),
    )


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """Weight bandwidth and arithmetic rate of both GEMMs against T, a row of panels per model."""
    rows = [row for row in document["rows"] if row["routing"] == "uniform"]
    measured = {row["stage"] for row in rows}
    stages = [stage for stage in GEMM_STAGES if stage in measured] or ["layer"]
    models = sorted({row["model"] for row in rows if row["stage"] in stages}, key=model_rank)
    columns = [(stage, rate) for stage in stages for rate in ("tbs", "tflops")]
    count = max(1, len(models))
    figure, panels = make_panels(count, len(columns), (4 * len(columns), 2.6 * count))
    for line, model in zip(panels, models, strict=False):
        for axes, (stage, rate) in zip(line, columns, strict=True):
            chosen = [row for row in rows if (row["model"], row["stage"]) == (model, stage)]
            draw(axes, chosen, rate, document["meta"]["ceilings"])
            axes.set_title(f"{model}, {stage}", fontsize="small")
            axes.set_ylabel("TB/s of weights" if rate == "tbs" else "TFLOP/s")
            axes.set_xlabel("tokens")
    save_figure(figure, panels.flat, document, path, columns=4)


def draw(axes: Any, rows: Sequence[Row], rate: str, limits: Mapping[str, float]) -> None:
    """One panel: a line for each implementation and activation, and the roof."""
    kinds = {(row["impl"], row["activation"]): None for row in rows}
    for impl, activation in sorted(kinds, key=lambda kind: (kind[0] != OURS, format_rank(kind[1]))):
        mine = [row for row in rows if (row["impl"], row["activation"]) == (impl, activation)]
        axes.plot(
            *zip(*sorted((row["T"], row[rate]) for row in mine), strict=True),
            label=f"{impl} {activation}",
            **line_style(STYLES.get(impl, 5), dash=FORMATS.index(activation), size=4),
        )
    if rate == "tbs":
        axes.axhline(limits["read_tbs"], color=INK, label="read ceiling")
    else:
        draw_cublas(axes, limits)
    log_scale(axes, x=2)
    axes.grid()


@styled
def plot_layers(document: Mapping[str, Any], path: Path) -> None:
    """Speed-up of the whole layer over each peer: a panel for each T, a line for each model."""
    layers = [
        row for row in document["rows"] if (row["stage"], row["routing"]) == ("layer", "uniform")
    ]
    times = {(row["model"], row["T"], row["impl"], row["activation"]): row["us"] for row in layers}
    models = [name for name in NAMED if any(row["model"] == name for row in layers)]
    kinds = {(row["impl"], row["activation"]) for row in layers}
    peers = [each for each in CHART_PEERS if (each.impl, each.activation) in kinds]
    size = 8, 2.4 + 0.4 * len(peers)
    drawing, (panels,) = figure("", 1, len(CHART_TOKENS), size=size, dpi=200, share=True)
    for axes, tokens in zip(panels, CHART_TOKENS, strict=True):
        for place, peer in enumerate(peers):
            color = COLORS[STYLES[peer.impl]]
            below = (place - (len(peers) - 1) / 2) * 0.85 / len(peers)  # the middle of the line
            points = []
            for line, model in enumerate(models):
                theirs = times.get((model, tokens, peer.impl, peer.activation))
                mine = times.get((model, tokens, OURS, peer.ours))
                if theirs and mine:
                    points.append((theirs / mine, line + below))
            if points:
                axes.scatter(
                    *zip(*points, strict=True),
                    s=26,
                    marker=peer.marker,
                    color=color,
                    facecolor=color if peer.activation == "bf16" else "none",
                    linewidths=1.3,
                    zorder=3,
                    label=peer.label,
                )
        style_layers(axes, models, f"{tokens} token{'s' * (tokens > 1)}")
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    panels[0].set_xlim(left=0.9)
    panels[len(panels) // 2].set_xlabel(
        "peer's time / mxpert's time, whole MoE layer (right of 1: mxpert is faster)\n"
        "no mark: the peer gave no time",
        fontsize=9,
    )
    legend_outside(
        drawing,
        panels,
        columns=min(4, len(peers)),
        loc="outside upper center",
        fontsize=9,
        handletextpad=0.1,
        columnspacing=1,
        title=f"Speed-up of mxpert on {document['meta']['device']} over",
        title_fontsize=10,
    )
    save(drawing, path)


def style_layers(axes: Any, models: Sequence[str], title: str) -> None:
    """Lines between the models, and one where both are equally fast."""
    axes.axvline(1, color=INK, linewidth=1)
    for line in range(1, len(models)):
        axes.axhline(line - 0.5, color=INK, linewidth=0.4)
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_yticks(range(len(models)), models, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


REPORT = Report(
    __doc__, SCHEMA, full, {"": plot, "layers": plot_layers}, summary=summary, fill=write_page
)
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
