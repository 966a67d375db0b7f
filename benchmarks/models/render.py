"""Table and plot of models/run.py, from its JSON alone.

    python -m benchmarks.models.render benchmarks/results/nvidia-h200/models.json

writes models.md and models.png beside the JSON, and prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    Report,
    absences,
    bullets,
    make_panels,
    markdown_table,
    page,
    pivot,
    where,
)
from benchmarks.models.rows import SCHEMA
from mxpert.cli.plots import BAR, COLORS, INK, save, styled

HEADINGS = {
    ("decode", "generate"): "decode through generate, tokens/s",
    ("decode", "static"): "decode through generate with a static cache, tokens/s",
    ("decode", "graph"): "decode step in a CUDA graph, tokens/s",
    ("prefill", "forward"): "prefill, tokens/s",
}
COLOR_OF = {
    "mxpert a16w4": COLORS[3],
    "mxpert a8w4": COLORS[1],
    "transformers grouped_mm": COLORS[0],
    "transformers eager": INK,
    "transformers mxfp4": COLORS[2],
    "no experts": COLORS[4],
}


def name_of(row: Mapping[str, Any]) -> str:
    return f"{row['impl']} {row['format']}"


def conditions(meta: Mapping[str, Any]) -> str:
    """On what, when and how."""
    model = meta["model"]
    return (
        f"{model['name']} ({model['layers']} layers, {model['experts']} experts, top "
        f"{model['top_k']}, H {model['hidden_size']}, F {model['intermediate_size']}) on "
        f"{where(meta, ('torch', 'triton', 'transformers'))}; "
        f"read ceiling of the same run {meta['read_tbs']:.2f} TB/s."
    )


def size_of(row: Mapping[str, Any]) -> str:
    """Batch of a decode step, tokens of a prefill."""
    return f"batch {row['batch']}" if row["phase"] == "decode" else f"{row['tokens']} tokens"


def share_of(row: Mapping[str, Any]) -> str:
    """The MoE blocks' share in brackets, where it was measured."""
    return "" if row["moe_share"] is None else f" ({100 * row['moe_share']:.0f} %)"


def groups(rows: Sequence[Row], phase: str, mode: str) -> dict[str, list[Row]]:
    """Size → rows of a phase and mode, the smallest first."""
    chosen = [row for row in rows if (row["phase"], row["mode"]) == (phase, mode)]
    found: dict[str, list[Row]] = {}
    for row in sorted(chosen, key=lambda row: (row["batch"], row["tokens"])):
        found.setdefault(size_of(row), []).append(row)
    return found


def table(rows: Sequence[Row], phase: str, mode: str) -> str:
    """Implementations down, batches across: tokens/s, and in brackets the MoE blocks' share."""
    cells = {
        (name_of(row), size_of(row)): f"{row['tokens_per_s']:,.0f}{share_of(row)}"
        for row in rows
        if (row["phase"], row["mode"]) == (phase, mode)
    }
    sizes = list(groups(rows, phase, mode))
    return pivot(f"{HEADINGS[phase, mode]} (MoE share)", cells, sizes) if cells else ""


def bands(rows: Sequence[Row]) -> str:
    """Width of the 10–90 % band as a share of the time; the host's pauses show in `generate`."""
    cells = {
        (name_of(row), f"{mode}, {size}"): f"{100 * row['ms_spread'] / row['ms']:.1f} %"
        for phase, mode in HEADINGS
        for size, found in groups(rows, phase, mode).items()
        for row in found
    }
    return pivot("implementation", cells, list(dict.fromkeys(column for _, column in cells)))


def full(document: Mapping[str, Any]) -> str:
    """Everything: tables, gates, protocol, what was not measured."""
    meta, rows = document["meta"], document["rows"]
    gates = {name_of(row): (row["layer_cosine"], row["logits_cosine"]) for row in rows}
    lines = [
        (name, *("–" if each is None else f"{each:.6f}" for each in cosines))
        for name, cosines in gates.items()
    ]
    return page(
        "# A whole model through Transformers",
        conditions(meta),
        *(table(rows, *key) for key in HEADINGS),
        "## Width of the 10–90 % band, as a share of the median time",
        bands(rows),
        "## Gates: cosine to Transformers' eager on the same weights",
        markdown_table(("implementation", "worst layer", "logits"), lines),
        bullets(meta["protocol"]),
        absences("Not measured", [f"{name}: {text}" for name, text in meta["failures"].items()]),
    )


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """A panel per phase and mode: step time, the MoE blocks' part of it hatched."""
    panels = [
        (f"{phase}, {mode}\n{size}", rows)
        for phase, mode in HEADINGS
        for size, rows in groups(document["rows"], phase, mode).items()
    ]
    count = max(1, len(panels))
    drawing, (axes_row,) = make_panels(1, count, (3.1 * count, 4.4))
    for axes, (title, rows) in zip(axes_row, panels, strict=False):
        for index, row in enumerate(rows):
            part = row["ms"] * min(1.0, row["moe_share"] or 0.0)
            color = COLOR_OF.get(name_of(row), COLORS[4])
            axes.bar(index, part, color=color, hatch="///", **BAR)
            axes.bar(index, row["ms"] - part, bottom=part, color=color, alpha=0.5)
        axes.set_xticks(range(len(rows)), map(name_of, rows), rotation=60, fontsize="small")
        axes.set_title(title, fontsize="small")
        axes.set_ylabel("ms")
    title = f"{document['meta']['device']}: step time, MoE blocks hatched"
    drawing.suptitle(title, fontsize="medium")
    save(drawing, path)


REPORT = Report(__doc__, SCHEMA, full, {"": plot})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
