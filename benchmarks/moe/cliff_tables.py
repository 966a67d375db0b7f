"""Tables of moe/cliffs.py: efficiencies beside the neighbours', cliffs, first calls, binaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    OPEN_ROWS,
    absences,
    bullets,
    conditions,
    folded,
    markdown_table,
    optional,
    page,
    paragraphs,
    pivot,
    row_table,
)

STAGES = ("gate_up", "down", "layer")
FORMATS = ("bf16", "mxfp8", "mxfp4")
KINDS = [(activation, stage) for activation in FORMATS for stage in STAGES]
LEAST = 0.8
"""A cell's efficiency over its neighbour's, below which the cell is a cliff."""

MOST_BINARIES = 12
MOST_SECONDS = 20.0


def with_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Rows with `neighbour_efficiency`, `relative` and `cliff`; None where the neighbour has no
    time."""

    def place(row: Row, model: str) -> tuple[Any, ...]:
        return row[model], row["T"], row["activation"], row["stage"]

    uniform = {
        place(row, "model"): row["efficiency"] for row in rows if row["routing"] == "uniform"
    }
    found = []
    for row in rows:
        best = uniform.get(place(row, "neighbour"))
        share = None if best is None else row["efficiency"] / best
        cliff = None if share is None else share < LEAST
        found.append({**row, "neighbour_efficiency": best, "relative": share, "cliff": cliff})
    return found


def table(rows: Sequence[Row]) -> str:
    """One line for each model, T and routing: efficiency in %, in brackets over the neighbour's,
    cliffs in bold."""
    present = {row["activation"] for row in rows}
    kinds = [kind for kind in KINDS if kind[0] in present]
    by_cell: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        key = row["model"], str(row["T"]), row["routing"], row["neighbour"]
        by_cell.setdefault(key, {})[row["activation"], row["stage"]] = row

    def text(row: Row | None) -> str:
        if row is None:
            return "–"
        found = f"{100 * row['efficiency']:.0f} ({optional(row['relative'], '.2f')})"
        return f"**{found}**" if row["cliff"] else found

    lines = [(*key, *(text(found.get(kind)) for kind in kinds)) for key, found in by_cell.items()]
    names = [f"{stage} {activation}" for activation, stage in kinds]
    return markdown_table(["model", "T", "routing", "neighbour", *names], lines)


def summary(document: Row) -> str:
    """Cliffs by format and stage, binaries by kernel, first calls."""
    lines = []
    known = [row for row in document["rows"] if row["relative"] is not None]
    for kind in KINDS:
        found = [row for row in known if (row["activation"], row["stage"]) == kind]
        if found:
            worst = min(found, key=lambda row: row["relative"])
            counts = str(len(found)), str(sum(row["cliff"] for row in found))
            where = "{model} T={T} {routing}".format(**worst)
            lines.append((f"{kind[1]} {kind[0]}", *counts, f"{worst['relative']:.2f}", where))
    head = ("efficiency over the neighbour's", "cells", f"< {LEAST}", "worst", "where")
    return paragraphs(
        markdown_table(head, lines),
        first_calls_table(document["first_calls"]),
        binaries_table(document),
    )


STATES = {"empty_cache": "empty cache", "kept_cache": "kept cache"}


def first_calls_table(calls: Row) -> str:
    """Seconds of each first call, and the longest against its limit."""
    cells, longest = {}, f"longest (at most {MOST_SECONDS:.0f})"
    columns = {state: text for state, text in STATES.items() if state in calls}
    for state, text in columns.items():
        seconds = calls[state]["seconds"]
        for name, value in (*seconds.items(), (longest, max(seconds.values()))):
            cells[name, text] = f"{value:.2f}"
    return pivot("first call, s", cells, list(columns.values()))


def binaries_table(document: Row) -> str:
    """By kernel: one model's, and those of every shape of this run."""
    calls = document["first_calls"]
    none = {"by_kernel": {}, "binaries": {}}
    one = next((calls[state] for state in STATES if state in calls), none)
    mine, every = one["by_kernel"], document["binaries"]["by_kernel"]
    lines = [
        (name, str(mine.get(name, 0)), str(every.get(name, 0))) for name in sorted({*every, *mine})
    ]
    name = f"all (of one model at most {MOST_BINARIES})"
    lines.append((name, str(sum(mine.values())), str(document["binaries"]["total"])))
    so_far = ", ".join(f"{count} after {name}" for name, count in one["binaries"].items())
    return paragraphs(
        markdown_table(["kernel", "binaries of one model", "of all shapes"], lines),
        f"One model: {so_far}." if so_far else "",
    )


STEEP = {
    "cell": "{model} T={T} {routing} {stage} {activation}",
    "% of roof": lambda row: f"{100 * row['efficiency']:.0f}",
    "neighbour": "{neighbour}",
    "its %": lambda row: f"{100 * row['neighbour_efficiency']:.0f}",
    "over its": "{relative:.2f}",
    "config": "{config}",
}


def markdown(document: Row) -> str:
    """Everything: summary, cliffs, all efficiencies, what has no time."""
    meta, rows = document["meta"], with_neighbours(document["rows"])
    document = {**document, "rows": rows}
    steep = sorted((row for row in rows if row["cliff"]), key=lambda row: row["relative"])
    others = steep[OPEN_ROWS:]
    return page(
        "# Cliffs: untuned shapes, odd T and skewed routings",
        conditions(meta),
        bullets(meta["protocol"]),
        "## Summary",
        summary(document),
        f"## Cliffs: {len(steep)} of {len(rows)}",
        row_table(steep[:OPEN_ROWS], STEEP),
        folded("the others", row_table(others, STEEP)) if others else "",
        folded("every efficiency in % of the roof (over the neighbour's)", table(rows)),
        absences(
            "Not measured", map("{cell}: `{error}`".format_map, meta["failures"]), meta["left"]
        ),
    )
