"""Table and plot of models.py, from its JSON alone.

    python benchmarks/models_render.py benchmarks/results/nvidia-h200/models.json

writes models.md and models.png beside the JSON, and prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 - finds the library
from models_document import load
from render import markdown_table, render

HEADINGS = {
    ("decode", "generate"): "decode through generate, tokens/s",
    ("decode", "graph"): "decode step in a CUDA graph, tokens/s",
    ("prefill", "forward"): "prefill, tokens/s",
}
COLORS = {
    "mxpert a16w4": "tab:red",
    "mxpert a8w4": "tab:orange",
    "transformers grouped_mm": "tab:blue",
    "transformers eager": "tab:gray",
    "transformers mxfp4": "tab:green",
}


def name_of(row: Mapping[str, Any]) -> str:
    return f"{row['impl']} {row['format']}"


def conditions(meta: Mapping[str, Any]) -> str:
    """On what, when and how."""
    model, versions = meta["model"], meta["versions"]
    named = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "triton", "transformers")
        if versions.get(name)
    )
    return (
        f"{model['name']} ({model['layers']} layers, {model['experts']} experts, top "
        f"{model['top_k']}, H {model['hidden_size']}, F {model['intermediate_size']}) on "
        f"{meta['device']}, {meta['date']}, commit `{str(meta['commit'])[:12]}`, {named}; "
        f"read ceiling of the same run {meta['read_tbs']:.2f} TB/s."
    )


def table(rows: Sequence[Mapping[str, Any]], phase: str, mode: str) -> str:
    """Implementations down, batches across: tokens/s, and in brackets the MoE blocks' share."""
    chosen = [row for row in rows if (row["phase"], row["mode"]) == (phase, mode)]
    columns = sorted({(row["batch"], row["tokens"]) for row in chosen})
    names = list(dict.fromkeys(name_of(row) for row in chosen))
    cells = {(name_of(row), row["batch"], row["tokens"]): row for row in chosen}
    body = []
    for name in names:
        line = [name]
        for column in columns:
            row = cells.get((name, *column))
            line.append(
                "–"
                if row is None
                else f"{row['tokens_per_s']:,.0f} ({100 * row['moe_share']:.0f} %)"
            )
        body.append(line)
    heads = [
        f"batch {batch}" if phase == "decode" else f"{tokens} tokens" for batch, tokens in columns
    ]
    return markdown_table([f"{HEADINGS[phase, mode]} (MoE share)", *heads], body)


def full(document: Mapping[str, Any]) -> str:
    """Everything: tables, gates, protocol, what was not measured."""
    meta, rows = document["meta"], document["rows"]
    present = [key for key in HEADINGS if any((r["phase"], r["mode"]) == key for r in rows)]
    parts = [
        "# A whole model through Transformers",
        conditions(meta),
        *(table(rows, *key) for key in present),
    ]
    gates = {name_of(row): (row["layer_cosine"], row["logits_cosine"]) for row in rows}
    parts += [
        "## Gates: cosine to Transformers' eager on the same weights",
        markdown_table(
            ("implementation", "worst layer", "logits"),
            [
                (name, "–" if layer is None else f"{layer:.6f}", f"{logits:.6f}")
                for name, (layer, logits) in gates.items()
            ],
        ),
    ]
    parts.append("\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()))
    if meta["failures"]:
        parts += [
            "## Not measured",
            "\n".join(f"- {name}: {text}" for name, text in meta["failures"].items()),
        ]
    return "\n\n".join(parts) + "\n"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """A panel per phase and mode: step time, the MoE blocks' part of it hatched."""
    from matplotlib.figure import Figure

    rows = document["rows"]
    panels = [
        (key, column)
        for key in HEADINGS
        for column in sorted(
            {(r["batch"], r["tokens"]) for r in rows if (r["phase"], r["mode"]) == key}
        )
    ]
    figure = Figure(figsize=(3.1 * max(1, len(panels)), 3.6), dpi=110, layout="constrained")
    axes_row = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, ((phase, mode), (batch, tokens)) in zip(axes_row, panels, strict=False):
        chosen = [
            row
            for row in rows
            if (row["phase"], row["mode"], row["batch"], row["tokens"])
            == (phase, mode, batch, tokens)
        ]
        for index, row in enumerate(chosen):
            part = row["ms"] * min(1.0, row["moe_share"])
            color = COLORS.get(name_of(row), "tab:purple")
            axes.bar(index, part, color=color, hatch="//", edgecolor="white")
            axes.bar(index, row["ms"] - part, bottom=part, color=color, alpha=0.5)
        axes.set_xticks(
            range(len(chosen)), [row["format"] for row in chosen], rotation=60, fontsize="small"
        )
        what = f"batch {batch}" if phase == "decode" else f"{tokens} tokens"
        axes.set_title(f"{phase}, {mode}\n{what}", fontsize="small")
        axes.set_ylabel("ms")
    figure.suptitle(
        f"{document['meta']['device']}: step time, MoE blocks hatched", fontsize="medium"
    )
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files; 2 if the JSON is not one of models.py."""
    return render(arguments, __doc__, load=load, full=full, plots={"": plot})


if __name__ == "__main__":
    sys.exit(main())
