"""Tables and plot of moe/weight_formats.py's JSON: speed-ups over peers, goals, times.

python -m benchmarks.moe.weight_format_tables benchmarks/results/nvidia-h200/weight_formats.json
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.document import META, NUMBER, OPTIONAL, Row, Schema, Section
from benchmarks.harness.tables import (
    Report,
    absences,
    bullets,
    conditions,
    make_panels,
    markdown_table,
    page,
    pivot,
    save_figure,
)
from benchmarks.moe.cells import FORMATS, PEER_WIDTHS, WIDTHS
from benchmarks.moe.figures import token_columns
from mxpert.cli.plots import line_style, log_scale, styled

WEIGHTS = ("mxfp4", "mxfp8_e4m3", "nvfp4", "int4_g32", "int4_g128")
OURS = "mxpert"
_REASON = 200
"""Characters of a peer's error in the tables; the JSON has more."""
DECODE_TOKENS, PREFILL_TOKENS = 128, 1024
"""Most tokens of a decode cell, fewest of a prefill cell."""

KEY_COLUMNS = ("model", "weights", "T", "impl", "activation")
SECTION = Section(
    dict.fromkeys(("model", "weights", "impl", "activation"), (str,))
    | dict.fromkeys("EkHFT", (int,))
    | dict.fromkeys(("hit", "us", "us_spread", "tbs"), NUMBER)
    | {"rel_l2": OPTIONAL},
    KEY_COLUMNS,
    {"weights": WEIGHTS, "activation": tuple(WIDTHS)},
)
SCHEMA = Schema(
    "moe.weight_formats", {"rows": SECTION}, META, optional_meta=("peers", "failures", "left")
)
Place = tuple[str, str, int]
"""Model, weights, T."""


def place_of(row: Row) -> Place:
    return row["model"], row["weights"], row["T"]


def fastest_peers(rows: Iterable[Row]) -> dict[Place, dict[str, float]]:
    """µs of the fastest peer of the same format, by the width of its activations."""
    found: dict[Place, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["impl"] != OURS:
            times, width = found[place_of(row)], WIDTHS[row["activation"]]
            times[width] = min(row["us"], times.get(width, row["us"]))
    return found


def our_times(rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """Our rows by activations."""
    found: dict[Place, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["impl"] == OURS:
            found[place_of(row)][row["activation"]] = row
    return found


def goals(document: Row) -> list[tuple[str, list[float], float]]:
    """What is aimed at: in words, the values of all cells, the least one that meets it."""
    rows, ceiling = document["rows"], document["meta"]["ceilings"]["read_tbs"]
    peers, ours = fastest_peers(rows), our_times(rows)
    reads, decode = [], []
    prefill: dict[bool, list[float]] = {True: [], False: []}
    for place, by_activation in ours.items():
        _, weights, tokens = place
        fastest = min(row["us"] for row in by_activation.values())
        if 64 <= tokens <= DECODE_TOKENS:
            reads.append(max(row["tbs"] for row in by_activation.values()) / ceiling)
        times = peers.get(place, {})
        if times and tokens <= DECODE_TOKENS:
            decode.append(min(times.values()) / fastest)
        narrow = [row["us"] for name, row in by_activation.items() if WIDTHS[name] == "a8"]
        if tokens >= PREFILL_TOKENS and "a16" in times and narrow:
            is_exact = weights in ("nvfp4", "int4_g32")
            prefill[is_exact].append(times["a16"] / min(narrow))
    return [
        ("decode, T = 64 to 128: share of the read ceiling", reads, 0.88),
        ("decode: the fastest peer's time over ours", decode, 1.0),
        (
            "prefill, 8-bit activations, mxfp4, mxfp8 and int4_g128: the fastest 16-bit peer's "
            "time over ours",
            prefill[False],
            1.4,
        ),
        ("prefill, 8-bit activations, nvfp4 and int4_g32: the same", prefill[True], 1.0),
    ]


def goal_table(document: Row) -> str:
    """A line for each goal that has cells."""
    lines = [
        (name, f"{least}", f"{sum(value >= least for value in found)} of {len(found)}")
        + (f"{min(found):.2f}", f"{geometric_mean(found):.2f}")
        for name, found, least in goals(document)
        if found
    ]
    return markdown_table(["goal", "at least", "cells", "worst", "mean"], lines)


def cell_text(row: Row, peers: Mapping[str, float], ceiling: float) -> str:
    """Time, speed-ups over peers of each width, and the share of the read ceiling."""
    found = [
        f"{peers[width] / row['us']:.2f}× {width}" for width in ("a16", "a8") if width in peers
    ]
    shown = f" ({', '.join(found)})" if found else ""
    return f"{row['us']:.0f}{shown}, {100 * row['tbs'] / ceiling:.0f} %"


def means_table(rows: Sequence[Row]) -> str:
    """Geometric means over models of the time of the fastest peer with activations of the same
    width over ours."""
    peers = fastest_peers(rows)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for place, by_activation in our_times(rows).items():
        _, weights, tokens = place
        for activation, row in by_activation.items():
            width = WIDTHS[activation]
            others = peers.get(place, {})
            if PEER_WIDTHS[width] in others:
                ratio = others[PEER_WIDTHS[width]] / row["us"]
                found[f"{weights}, {width}", f"T = {tokens}"].append(ratio)
    cells = {key: f"{geometric_mean(values):.2f}" for key, values in found.items()}
    return pivot("best peer's time / ours", cells, token_columns(row["T"] for row in rows))


def reasons(failures: Iterable[Row]) -> list[str]:
    """Why an implementation has no rows, once for all cells of a format."""
    found: dict[str, str] = {}
    for each in failures:
        line = f"{each['impl']} {each['activation']}, {each['weights']} weights"
        found.setdefault(line, f"`{each['error'][:_REASON]}`")
    return [f"{line}: {text}" for line, text in found.items()]


def full(document: Row) -> str:
    """Means, goals, then our times with their speed-ups, a table for each activation."""
    rows, meta = document["rows"], document["meta"]
    peers, parts = fastest_peers(rows), []
    columns = token_columns(row["T"] for row in rows)
    for activation in FORMATS:
        cells = {
            (f"{row['model']}, {row['weights']}", f"T = {row['T']}"): cell_text(
                row, peers.get(place_of(row), {}), meta["ceilings"]["read_tbs"]
            )
            for row in rows
            if (row["impl"], row["activation"]) == (OURS, activation)
        }
        if cells:
            parts += [f"## {activation} activations", pivot("µs", cells, columns)]
    return page(
        "# Layers by the format of their weights",
        conditions(meta),
        means_table(rows),
        goal_table(document),
        "Each cell below: µs of the whole layer, the time of the fastest of Humming and Marlin "
        "with the same weights over ours (above 1 mxpert is faster; a16: peers with bf16 "
        "activations, a8: with 8-bit ones), and the weights' bytes a second as a share of the read "
        "ceiling.",
        *parts,
        bullets(meta["protocol"]),
        absences("Not measured", reasons(meta["failures"]), meta["left"]),
    )


def means(document: Row, weights: str, activation: str) -> list[tuple[int, float]]:
    """Geometric means over models of the fastest peer's time over ours, by T."""
    rows = document["rows"]
    peers, by_tokens = fastest_peers(rows), defaultdict(list)
    for place, by_activation in our_times(rows).items():
        if place[1] == weights and activation in by_activation and peers.get(place):
            fastest = min(peers[place].values())
            by_tokens[place[2]].append(fastest / by_activation[activation]["us"])
    return [(count, geometric_mean(found)) for count, found in sorted(by_tokens.items())]


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """Speed-up over the fastest peer of the format by T, a panel for each format."""
    drawing, panels = make_panels(1, len(WEIGHTS), (3.4 * len(WEIGHTS), 3.4))
    for axes, weights in zip(panels[0], WEIGHTS, strict=True):
        for index, activation in enumerate(FORMATS):
            points = means(dict(document), weights, activation)
            if points:
                style = line_style(index, size=4)
                axes.plot(*zip(*points, strict=True), label=f"{activation} activations", **style)
        axes.axhline(1, linewidth=0.8)
        axes.set(xlabel="tokens", ylabel="fastest peer's time / ours")
        log_scale(axes, x=2)
        axes.set_title(weights, fontsize="small")
        axes.grid()
    save_figure(drawing, panels[0], document, path, columns=len(FORMATS))


REPORT = Report(__doc__, SCHEMA, full, {"": plot})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
