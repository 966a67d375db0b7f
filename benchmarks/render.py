"""Tables and plots of a comparison, from its JSON alone.

    python benchmarks/render.py benchmarks/results/nvidia-h200/moe.json

writes moe.md (everything), moe-summary.md, moe.png and layers.png beside the JSON. --readme FILE
replaces the block of that file between its "measured" markers. Ratios are speed-ups: a peer's time
over ours, so that above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import _checkout  # noqa: F401 - finds the library
from cells import DECODE_TOKENS, GEMM_STAGES, NAMED, REFERENCE, REFERENCE_TOKENS, STAGES, WIDTHS
from document import Row, load
from figures import (
    BOTH_STAGES,
    OURS,
    Roof,
    SpeedUp,
    format_rank,
    format_speed_ups,
    gemm_shares,
    geometric_means,
    model_rank,
    our_rows,
    peer_width,
    slower_cells,
    speed_ups,
)
from goals import NOTES, goals

from mxpert.errors import require

SUMMARY_TOKENS = (1, 16, 128, 1024, 8192)
COLORS = {
    "mxpert": "tab:red",
    "triton_kernels": "tab:blue",
    "marlin": "tab:green",
    "humming": "tab:purple",
}
LINES = {"bf16": "-", "fp8_token": "--", "mxfp8": "-.", "mxfp4": ":"}
NAMES = {"bf16": "a16w4", "mxfp8": "a8w4", "mxfp4": "a4w4"}
"""Our formats in a README."""
OPEN_MODELS = 3
CHART_TOKENS = (1, 128, 8192)
CHART_PEERS = (
    ("triton_kernels", "bf16", "bf16", "o"),
    ("marlin", "bf16", "bf16", "s"),
    ("humming", "bf16", "bf16", "D"),
    ("humming", "fp8_token", "mxfp8", "D"),
)
"""Peer, its activations, ours of the same width, marker."""
OPEN_ROWS = 12
"""What a reader sees of a long list before unfolding it."""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned.

    >>> print(markdown_table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def conditions(meta: Mapping[str, Any]) -> str:
    """One paragraph: on what, when and how it was measured."""
    limits, versions = meta["ceilings"], meta["versions"]
    named = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "triton", "cuda", "driver")
        if versions.get(name)
    )
    return (
        f"{meta['device']}, {meta['date']}, commit `{str(meta['commit'])[:12]}`, {named}. "
        f"Ceilings of the same run: {limits['read_tbs']:.2f} TB/s read, cuBLAS "
        f"{limits['bf16_tflops']:.0f} TFLOP/s bf16 and {limits['fp8_tflops']:.0f} fp8. "
        f"Power: {meta['protocol']['power']}."
    )


def folded(title: str, text: str) -> str:
    """Text that a reader unfolds."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def add_render_option(parser: argparse.ArgumentParser) -> None:
    """`--render FILE`, for scripts that measure and write their own tables."""
    parser.add_argument(
        "--render",
        type=Path,
        metavar="FILE",
        help="only write FILE's .md again, from the JSON alone",
    )


def render_again(path: Path, markdown: Callable[[Row], str]) -> int:
    """Write the tables of a JSON that a script wrote earlier beside it; the exit code.

    Raises:
        ValueError: `path` is not a JSON file.
    """
    require(path.is_file(), "render", "--render", need="a JSON file", got=str(path))
    text = markdown(json.loads(path.read_text("utf-8")))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


def pivot(corner: str, cells: Mapping[tuple[str, str], str], columns: Sequence[str]) -> str:
    """(line, column) → text as a table; the lines in their order."""
    body = [
        [line, *(cells.get((line, column), "–") for column in columns)]
        for line in dict.fromkeys(line for line, _ in cells)
    ]
    return markdown_table([corner, *columns], body)


def line_name(row: Mapping[str, Any]) -> str:
    """Model and activation, and the routing where it is not uniform."""
    return " ".join(
        [
            row["model"],
            row["activation"],
            *([] if row["routing"] == "uniform" else [row["routing"]]),
        ]
    )


def token_columns(counts: Iterable[int]) -> list[str]:
    return [f"T = {count}" for count in sorted(set(counts))]


def means_table(found: Sequence[SpeedUp]) -> str:
    """Geometric means by our format, stage and regime."""
    cells = {}
    for (activation, stage, regime), (mean, count, worst) in geometric_means(found).items():
        line = f"{activation}, {peer_width(activation)} peers, {stage}"
        cells |= {
            (line, regime): f"{mean:.2f}",
            (line, f"worst {regime}"): f"{worst:.2f}",
            (line, f"{regime} cells"): str(count),
        }
    return pivot(
        "speed-up: best peer's time / ours",
        cells,
        [
            text
            for regime in ("decode", "prefill")
            for text in (regime, f"worst {regime}", f"{regime} cells")
        ],
    )


def summary(document: Mapping[str, Any]) -> str:
    """The short form: whole layers at a few token counts, and the geometric means."""
    rows = document["rows"]
    tables = [
        layer_table(
            [row for row in rows if (row["model"] in REFERENCE) == reference],
            REFERENCE_TOKENS if reference else SUMMARY_TOKENS,
            line_name,
        )
        for reference in (False, True)
    ]
    return (
        "\n\n".join(
            [conditions(document["meta"]), *filter(None, tables), means_table(speed_ups(rows))]
        )
        + "\n"
    )


def layer_table(rows: Iterable[Row], tokens: Sequence[int], name: Callable[[Row], str]) -> str:
    """Times and speed-ups of whole layers under uniform routing; empty if there are none.

    Args:
        tokens: the columns. name: the first column of a row.
    """
    rows = [
        row
        for row in rows
        if row["routing"] == "uniform" and row["stage"] == "layer" and row["T"] in tokens
    ]
    found = {id(each.ours): f" ({each.value:.2f}×)" for each in speed_ups(rows)}
    cells = {
        (name(row), f"T = {row['T']}"): f"{row['us']:.0f}{found.get(id(row), '')}"
        for row in our_rows(rows)
    }
    return (
        pivot(
            "whole layer, µs (speed-up over the best peer)",
            cells,
            token_columns(row["T"] for row in rows),
        )
        if cells
        else ""
    )


def readme_block(document: Mapping[str, Any]) -> str:
    """Layers of the named models and of the reference systems' shapes, all but three folded."""
    rows = [row for row in document["rows"] if row["activation"] in NAMES or row["impl"] != OURS]

    def name(row: Row) -> str:
        return f"{row['model']} {NAMES[row['activation']]}"

    def table(models: Iterable[str], tokens: Sequence[int]) -> str:
        chosen = set(models)
        return layer_table([row for row in rows if row["model"] in chosen], tokens, name)

    repository = "https://github.com/mxpert/mxpert/blob/main"  # the package index shows it, too
    folder = f"{repository}/benchmarks/results/nvidia-h200"
    first = table(list(NAMED)[:OPEN_MODELS], SUMMARY_TOKENS)
    others = [
        table(list(NAMED)[OPEN_MODELS:], SUMMARY_TOKENS),
        table([*REFERENCE, "gpt-oss-120b"], REFERENCE_TOKENS),
    ]
    others = [text for text in others if text]
    return "\n\n".join(
        [
            "Whole MoE layer from logits on one NVIDIA H200, µs. In brackets the speed-up, the "
            "best peer's time over ours: above 1 mxpert is faster. a16w4 is compared with a16 "
            "peers, a8w4 and a4w4 with a8 peers (theirs: one scale per token, ours: 1×32; no peer "
            f"multiplies a4). [JSON]({folder}/moe.json), [all cells]({folder}/moe.md), "
            f"[plot]({folder}/moe.png), [what limits it]({repository}/docs/performance.md).",
            first,
            *(
                [folded("other models and the reference systems' shapes", "\n\n".join(others))]
                if others
                else []
            ),
        ]
    )


def write_readme(document: Mapping[str, Any], path: Path) -> None:
    """Replace the block between the markers of a file.

    Raises:
        ValueError: the file does not have both markers.
    """
    begin, end = (f"<!-- measured: {name} -->" for name in ("begin", "end"))
    text = path.read_text(encoding="utf-8")
    require(
        text.count(begin) == text.count(end) == 1,
        "render",
        f"--readme {path}",
        need=f"one {begin} and one {end}",
        got="another number",
    )
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{head}{begin}\n{readme_block(document)}\n{end}{tail}", encoding="utf-8")


def slower_table(found: Sequence[SpeedUp], ceilings: Mapping[str, float]) -> str:
    """Cells with both sides' share of the roof, and what bounds them."""
    lines = [
        (
            str(each),
            f"{each.ours['us']:.1f}",
            str(Roof.of(each.ours, ceilings)),
            f"{each.peer['impl']} {each.peer['us']:.1f}",
            str(Roof.of(each.peer, ceilings)),
            f"{each.value:.2f}",
        )
        for each in found
    ]
    return markdown_table(
        ("cell", "our µs", "our share of the roof", "peer's µs", "its share", "speed-up"), lines
    )


def slower_part(found: Sequence[SpeedUp], ceilings: Mapping[str, float]) -> str:
    """How many cells a peer wins, the worst of them, the rest folded."""
    slower = slower_cells(found)
    parts = [f"{len(slower)} of {len(found)} cells."]
    if slower:
        parts.append(slower_table(slower[:OPEN_ROWS], ceilings))
    if slower[OPEN_ROWS:]:
        parts.append(
            folded(
                f"the other {len(slower) - OPEN_ROWS}", slower_table(slower[OPEN_ROWS:], ceilings)
            )
        )
    return "\n\n".join(parts)


def roof_part(rows: Sequence[Row], ceilings: Mapping[str, float]) -> str:
    """Our GEMMs: weight traffic in decode, arithmetic in prefill, each with its share."""
    mine = [row for row in our_rows(rows) if row["stage"] in GEMM_STAGES]
    decode = [row for row in mine if row["T"] <= DECODE_TOKENS]
    prefill = [row for row in mine if row["T"] > DECODE_TOKENS]
    parts = []
    for stage in GEMM_STAGES:
        cells = {}
        for row in decode:
            if row["stage"] == stage:
                mark = "" if Roof.of(row, ceilings).bound == "read" else "*"
                share = 100 * row["tbs"] / ceilings["read_tbs"]
                cells[line_name(row), f"T = {row['T']}"] = f"{row['tbs']:.2f} ({share:.0f} %){mark}"
        if cells:
            parts.append(
                pivot(
                    f"{stage}, TB/s of weights (of read ceiling)",
                    cells,
                    token_columns(row["T"] for row in decode),
                )
            )
    if decode:
        parts.append("\\* multiplying takes longer than reading: the read ceiling is out of reach.")
    if prefill:
        cells = {
            (
                line_name(row),
                f"{row['stage']} T = {row['T']}",
            ): f"{row['tflops']:.0f} ({Roof.of(row, ceilings)})"
            for row in prefill
        }
        columns = [
            f"{stage} {text}"
            for stage in GEMM_STAGES
            for text in token_columns(row["T"] for row in prefill)
        ]
        parts.append(pivot("TFLOP/s (of roof, and what bounds it)", cells, columns))
    return "\n\n".join(parts) or "No GEMMs of ours were measured."


def formats_part(rows: Sequence[Row], activation: str, other: str) -> str:
    """Goal 3: the speed of one of our formats against another."""
    found = format_speed_ups(rows, activation, other)
    if not found:
        return f"Not measured: needs rows of mxpert with {activation} and with {other}."
    lines = []
    for stage in (*STAGES, BOTH_STAGES):
        values = {key: value for key, value in found.items() if key[3] == stage}
        if values:
            worst = min(values, key=lambda key: values[key])
            lines.append(
                (
                    stage,
                    f"{geometric_mean(values.values()):.2f}",
                    f"{values[worst]:.2f} ({worst[0]} T={worst[1]})",
                    str(len(values)),
                )
            )
    return markdown_table(
        (f"speed-up of {activation} over {other}", "geometric mean", "worst", "cells"), lines
    )


def gemm_share_table(rows: Sequence[Row]) -> str:
    """Goal 4, by model, format and T."""
    found = gemm_shares(rows)
    cells = {
        (
            line_name({"model": model, "routing": routing, "activation": activation}),
            f"T = {tokens}",
        ): f"{value:.2f}"
        for (model, routing, activation, tokens), value in found.items()
    }
    return pivot(
        "(gate_up_gemm + down_gemm) / layer", cells, token_columns(key[3] for key in found)
    )


def speed_up_table(found: Sequence[SpeedUp]) -> str:
    """Every cell that a peer has, too."""
    lines = [
        (
            str(each),
            f"{each.ours['us']:.1f}",
            each.peer["impl"],
            f"{each.peer['us']:.1f}",
            f"{each.value:.2f}",
        )
        for each in found
    ]
    return markdown_table(("cell", "our µs", "best peer", "its µs", "speed-up"), lines)


def detail_table(rows: Sequence[Row], ceilings: Mapping[str, float]) -> str:
    """Every measurement of one model."""
    order = sorted(
        rows,
        key=lambda row: (
            row["routing"],
            STAGES.index(row["stage"]),
            row["T"],
            WIDTHS[row["activation"]],
            row["us"],
        ),
    )
    body = [
        (
            row["stage"],
            row["routing"],
            str(row["T"]),
            f"{row['hit']:.0f}",
            row["impl"],
            row["activation"],
            f"{row['us']:.1f}",
            f"{row['us_spread']:.1f}",
            f"{row['tbs']:.2f}",
            f"{row['tflops']:.0f}",
            str(Roof.of(row, ceilings)),
            "–" if row["rel_l2"] is None else f"{row['rel_l2']:.1e}",
        )
        for row in order
    ]
    return markdown_table(
        (
            "stage",
            "routing",
            "T",
            "hit",
            "impl",
            "activation",
            "µs",
            "10–90 %",
            "TB/s",
            "TFLOP/s",
            "of roof",
            "rel L2",
        ),
        body,
    )


def absence_part(meta: Mapping[str, Any]) -> list[str]:
    """Peers that were absent, failures alike but for T and stage in one line, cells left."""
    lines = [
        f"- {name}: {text}" for name, text in meta.get("peers", {}).items() if text != "present"
    ]
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in meta.get("failures", []):
        what = f"{each['impl']}/{each['activation']} {each['model']}"
        alike.setdefault((what, each["error"]), []).append(each)
    for (what, error), found in alike.items():
        counts = ", ".join(str(count) for count in sorted({each["T"] for each in found}))
        stages = [stage for stage in STAGES if stage in {each["stage"] for each in found}]
        names = "every stage" if stages == list(STAGES) else ", ".join(stages)
        lines.append(f"- {what}, T = {counts}, {names}: `{error}`")
    if meta.get("left"):
        lines.append("- out of time: " + ", ".join(meta["left"]))
    return ["## Not measured", "\n".join(lines)] if lines else []


def full(document: Mapping[str, Any]) -> str:
    """Everything: goals, speed-ups, slower cells, roofs, measurements, absences."""
    meta, rows = document["meta"], document["rows"]
    limits, found = meta["ceilings"], speed_ups(rows)
    claims = markdown_table(
        ("goal", "wanted", "geometric mean", "worst cell", "cells that meet it", "verdict"),
        [goal.columns() for goal in goals(document)],
    )
    parts = [
        "# MoE with MXFP4 weights: measurements",
        conditions(meta),
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        "## Goals",
        claims,
        "\n".join(f"- {note}" for note in NOTES),
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
    ]
    for model in sorted({row["model"] for row in rows}, key=model_rank):
        mine = [row for row in rows if row["model"] == model]
        sizes = ", ".join(f"{name} {mine[0][name]}" for name in "EkHF")
        parts.append(folded(f"{model} ({sizes})", detail_table(mine, limits)))
    return "\n\n".join([*parts, *absence_part(meta)]) + "\n"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Weight bandwidth and arithmetic rate of both GEMMs against T, a row of panels per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["routing"] == "uniform"]
    limits = document["meta"]["ceilings"]
    stages = [
        stage
        for stage in ("gate_up_gemm", "down_gemm")
        if any(row["stage"] == stage for row in rows)
    ] or ["layer"]
    models = sorted({row["model"] for row in rows if row["stage"] in stages}, key=model_rank)
    columns = [(stage, rate) for stage in stages for rate in ("tbs", "tflops")]
    figure, panels = pyplot.subplots(
        max(1, len(models)),
        len(columns),
        squeeze=False,
        layout="constrained",
        figsize=(4 * len(columns), 2.6 * max(1, len(models))),
    )
    for line, model in zip(panels, models, strict=False):
        for axes, (stage, rate) in zip(line, columns, strict=True):
            chosen = [row for row in rows if (row["model"], row["stage"]) == (model, stage)]
            draw(axes, chosen, rate, limits)
            axes.set_title(f"{model}, {stage}", fontsize="small")
            axes.set_ylabel("TB/s of weights" if rate == "tbs" else "TFLOP/s")
            axes.set_xlabel("tokens")
    save_figure(figure, panels.flat, document, path, columns=4)


def plot_layers(document: Mapping[str, Any], path: Path) -> None:
    """Speed-up of the whole layer over each peer: a panel for each T, a line for each model."""
    from matplotlib.figure import Figure

    rows = [
        row for row in document["rows"] if row["stage"] == "layer" and row["routing"] == "uniform"
    ]
    times = {(row["model"], row["T"], row["impl"], row["activation"]): row["us"] for row in rows}
    models = [name for name in NAMED if any(row["model"] == name for row in rows)]
    figure = Figure(figsize=(8, 3.8), dpi=200, layout="constrained")
    panels = figure.subplots(1, len(CHART_TOKENS), sharex=True, sharey=True)
    for axes, tokens in zip(panels, CHART_TOKENS, strict=True):
        for place, (impl, activation, ours, marker) in enumerate(CHART_PEERS):
            found = [
                (
                    times[model, tokens, impl, activation] / times[model, tokens, OURS, ours],
                    line + 0.2 * (place - 1.5),
                )
                for line, model in enumerate(models)
                if {(model, tokens, impl, activation), (model, tokens, OURS, ours)} <= set(times)
            ]
            kind = "a16w4" if activation == "bf16" else "a8w4"
            filled = activation == "bf16"
            axes.scatter(
                *zip(*found, strict=True),
                s=26,
                marker=marker,
                color=COLORS[impl],
                facecolor=COLORS[impl] if filled else "white",
                linewidths=1.3,
                zorder=3,
                label=f"{impl} ({kind})",
            ) if found else None
        axes.axvline(1, color="black", linewidth=1)
        for line in range(1, len(models)):
            axes.axhline(line - 0.5, color="lightgray", linewidth=0.6)
        axes.set_title(f"{tokens} token{'s' * (tokens > 1)}", fontsize=10)
        axes.grid(axis="x", color="lightgray", linewidth=0.6)
        axes.set_yticks(range(len(models)), models, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    panels[0].set_xlim(left=0.9)
    panels[len(panels) // 2].set_xlabel(
        "peer's time / mxpert's time, whole MoE layer (right of 1: mxpert is faster)\n"
        "no mark: the peer does not run this model",
        fontsize=9,
    )
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        fontsize=9,
        ncols=len(CHART_PEERS),
        frameon=False,
        handletextpad=0.1,
        title=f"Speed-up of mxpert on {document['meta']['device']} over",
        title_fontsize=10,
    )
    figure.savefig(path)


def save_figure(
    figure: Any, panels: Iterable[Any], document: Mapping[str, Any], path: Path, *, columns: int
) -> None:
    """One legend of all panels below them, the device and the day above, and the file."""
    from matplotlib import pyplot

    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
    )
    figure.suptitle(f"{document['meta']['device']}, {document['meta']['date'][:10]}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(axes: Any, rows: Sequence[Row], rate: str, limits: Mapping[str, float]) -> None:
    """One panel: a line for each implementation and activation, and the roof."""
    kinds = dict.fromkeys((row["impl"], row["activation"]) for row in rows)
    for impl, activation in sorted(kinds, key=lambda kind: (kind[0] != OURS, format_rank(kind[1]))):
        points = sorted(
            (row["T"], row[rate])
            for row in rows
            if (row["impl"], row["activation"]) == (impl, activation)
        )
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker=".",
            color=COLORS.get(impl),
            label=f"{impl} {activation}",
            linestyle=LINES[activation],
        )
    if rate == "tbs":
        axes.axhline(limits["read_tbs"], color="gray", label="read ceiling")
    else:
        axes.axhline(limits["bf16_tflops"], color="gray", label="cuBLAS bf16")
        axes.axhline(limits["fp8_tflops"], color="gray", linestyle="--", label="cuBLAS fp8")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def render(
    arguments: Sequence[str] | None,
    description: str | None,
    *,
    load: Callable[[Path], Any],
    full: Callable[[Any], str],
    plots: Mapping[str, Callable[[Any, Path], None]],
    summary: Callable[[Any], str] | None = None,
    readme: Callable[[Any, Path], None] | None = None,
) -> int:
    """The command line of a render script: Markdown, a summary if there is one, and a plot.

    Args:
        arguments: None for those of the process. description: for --help.
        load: JSON file → document, ValueError if it is another script's.
        full, summary: what the document becomes; without `summary` all of it is printed.
        plots: file name → what draws it; an empty name takes the JSON's.

    Returns:
        The exit code: 2 if the file is not the document.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json_file", type=Path)
    parser.add_argument("--folder", type=Path, help="write there (default: beside the JSON)")
    parser.add_argument(
        "--readme",
        type=Path,
        help=argparse.SUPPRESS if readme is None else "replace the measured block of this file",
    )
    options = parser.parse_args(arguments)
    try:
        document = load(options.json_file)
        if options.readme is not None and readme is not None:
            readme(document, options.readme)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder, stem = options.folder or options.json_file.parent, options.json_file.stem
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{stem}.md": full(document)}
    if summary is not None:
        texts[f"{stem}-summary.md"] = summary(document)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    written = list(texts)
    try:
        for name, plot_one in plots.items():
            written.append(f"{name or stem}.png")
            plot_one(document, folder / written[-1])
    except ImportError:
        print("no plot: matplotlib is not installed; pip install 'mxpert[plot]'", file=sys.stderr)
    print(text)  # the last: the shortest
    print(f"wrote {', '.join(written)} in {folder}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the four files; 2 if the JSON is not a comparison."""
    return render(
        arguments,
        __doc__,
        load=load,
        full=full,
        summary=summary,
        readme=write_readme,
        plots={"": plot, "layers": plot_layers},
    )


if __name__ == "__main__":
    sys.exit(main())
