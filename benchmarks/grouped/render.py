"""Tables and a plot of grouped/run.py's measurements, from its JSON alone.

    python -m benchmarks.grouped.render benchmarks/results/nvidia-h200/grouped_gemm.json

writes grouped_gemm.md (everything), grouped_gemm-summary.md and grouped_gemm.png beside the JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.grouped.cells import BALANCES, MODES, OPS, SHAPES
from benchmarks.grouped.ours import OURS
from benchmarks.grouped.published import PUBLISHED, REFERENCE_PEAK, SOURCE, Key, peak_of
from benchmarks.grouped.rows import KEY_COLUMNS, SCHEMA
from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    Report,
    absences,
    bullets,
    conditions,
    draw_cublas,
    make_panels,
    markdown_table,
    optional,
    page,
    row_table,
    save_figure,
)
from mxpert.cli.plots import bar_style, styled

DEEPGEMM, TORCH = ("deepgemm", "fp8_1x128"), ("torch", "bf16")
COLUMNS = (
    *((OURS, mode) for mode in MODES),
    TORCH,
    ("torch", "fp8_row"),
    ("deepgemm", "bf16"),
    DEEPGEMM,
    (f"{OURS}_triton", "exact"),
)
DEEPGEMM_GOALS = {"auto": 1.03, "row": 1.03, "block128": 0.95}
WGRAD_GOAL = 1300.0
"""TFLOP/s."""

Column = tuple[str, str]
Times = dict[tuple[Any, ...], Row]


@dataclass(frozen=True)
class Claim:
    """A measured value beside what is wanted of it, in one cell."""

    name: str
    goal: float
    cell: str
    value: float

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal


def by_key(rows: Iterable[Row]) -> Times:
    """(shape, balance, impl, mode, op, with_quant) → row."""
    return {tuple(row[name] for name in KEY_COLUMNS): row for row in rows}


def speed_claims(rows: Iterable[Row]) -> Iterator[Claim]:
    """Our speed over a peer's, and over our own with balanced groups, in each cell."""
    times = by_key(rows)

    def rate(shape: str, balance: str, column: Column, op: str, quant: bool) -> float | None:
        row = times.get((shape, balance, *column, op, quant))
        return row["tflops"] if row else None

    for shape, balance in dict.fromkeys(key[:2] for key in times):
        for mode in MODES:
            for op in OPS[:-1]:
                ours = rate(shape, balance, (OURS, mode), op, False)
                if ours is None:
                    continue
                theirs = rate(shape, balance, DEEPGEMM, op, False)
                torch_rate = rate(shape, balance, TORCH, op, False)
                level = rate(shape, BALANCES[0], (OURS, mode), op, False)
                cell = f"{shape} {balance} {op}"
                if theirs and mode in DEEPGEMM_GOALS:
                    yield Claim(f"{mode} / DeepGEMM fp8", DEEPGEMM_GOALS[mode], cell, ours / theirs)
                if torch_rate and mode == "exact":
                    yield Claim("exact / torch bf16", 0.95, cell, ours / torch_rate)
                if op == "wgrad" and mode == "row":
                    yield Claim("row wgrad / 1300 TFLOP/s", 1.0, cell, ours / WGRAD_GOAL)
                if level and balance != BALANCES[0]:
                    yield Claim(f"{mode}: {balance} / balanced", 0.85, cell, ours / level)
            whole = rate(shape, balance, (OURS, mode), OPS[-1], True)
            plain = rate(shape, balance, TORCH, OPS[-1], False)
            if whole and plain and mode in ("auto", "row"):
                name = f"{mode} forward + backward with quantisation / torch bf16"
                yield Claim(name, 1.3, f"{shape} {balance}", whole / plain)


def claims(document: Mapping[str, Any]) -> list[Claim]:
    """Everything that has a goal, quantisers included."""
    cell = "{shape} {operand} {dtype} {mode}"
    return [
        *speed_claims(document["rows"]),
        *(
            Claim(f"{row['op']} / copy", 0.8, cell.format(**row), row["of_copy"])
            for row in document["quantiser"]
        ),
    ]


def claims_table(found: Sequence[Claim]) -> str:
    """One line for each kind of claim."""
    kinds: dict[str, list[Claim]] = {}
    for claim in found:
        kinds.setdefault(claim.name, []).append(claim)

    def worst(kind: list[Claim]) -> str:
        least = min(kind, key=lambda claim: claim.value)
        return f"{least.value:.2f} ({least.cell})"

    columns = {
        "rate / the other's rate": lambda kind: kind[0].name,
        "goal": lambda kind: f"≥ {kind[0].goal:.2f}",
        "geometric mean": lambda kind: f"{geometric_mean(claim.value for claim in kind):.2f}",
        "worst": worst,
        "cells that meet it": lambda kind: f"{sum(each.is_met for each in kind)} of {len(kind)}",
    }
    return row_table(kinds.values(), columns)


def present(rows: Sequence[Row]) -> list[Column]:
    """Implementations in the order of the tables."""
    found = {(row["impl"], row["mode"]) for row in rows}
    return [column for column in COLUMNS if column in found]


def shape_rank(name: str) -> tuple[int, str]:
    """The order in which shapes are listed, unknown ones last."""
    names = [str(shape) for shape in SHAPES]
    return (names.index(name) if name in names else len(names)), name


def speed_table(rows: Sequence[Row], balance: str, with_quant: bool) -> str:
    """TFLOP/s of every shape and op."""
    times, columns = by_key(rows), present(rows)
    lines = []
    for shape in sorted({row["shape"] for row in rows}, key=shape_rank):
        for op in OPS if with_quant else OPS[:-1]:
            cells = []
            for column in columns:
                quant = with_quant and column[0] == OURS
                row = times.get((shape, balance, *column, op, quant))
                cells.append(f"{row['tflops']:.0f}" if row else "–")
            if set(cells) != {"–"}:
                lines.append((f"{shape} {op}", *cells))
    return markdown_table(("TFLOP/s", *(" ".join(column) for column in columns)), lines)


def published_table(document: Mapping[str, Any]) -> str:
    """Shares of each chip's FP8 peak: ours, and those that the reference published; every shape."""
    times, peak = by_key(document["rows"]), peak_of(document["meta"]["device"])

    def rate(key: Key, mode: str) -> str:
        shape, balance, op, with_quant = key
        row = times.get((shape, balance, OURS, mode, op, with_quant))
        if row is None:
            return "–"
        share = "" if peak is None else f" ({100 * row['tflops'] / peak:.0f} %)"
        return f"{row['tflops']:.0f}{share}"

    modes = [mode for impl, mode in present(document["rows"]) if impl == OURS]
    lines = [
        (
            f"{key[0]} {key[1]} {key[2]}{' with quantisation' if key[3] else ''}",
            *(rate(key, mode) for mode in modes),
            f"{theirs:.0f} ({100 * theirs / REFERENCE_PEAK:.0f} %)",
        )
        for key, theirs in PUBLISHED.items()
    ]
    head = ("TFLOP/s (of FP8 peak)", *(f"{OURS} {mode}" for mode in modes), "Primus-Turbo")
    return markdown_table(head, lines)


def published_text(document: Mapping[str, Any]) -> str:
    """What the table of published figures compares."""
    device = document["meta"]["device"]
    peak = peak_of(device)
    own = "whose peak is not listed" if peak is None else f"{peak:.0f} TFLOP/s"
    return (
        f"{SOURCE}. Another chip, so compare shares of the dense FP8 peak: {device} {own}, MI355X "
        f'{REFERENCE_PEAK:.0f} TFLOP/s. "random" splits the rows at random, as their unbalanced '
        "rows do; their backward is dgrad and wgrad. – is not measured yet."
    )


def snr_table(rows: Sequence[Row]) -> str:
    """Least and greatest SNR of each implementation and op over all cells."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["snr_db"] is not None:
            found.setdefault((row["impl"], row["mode"], row["op"]), []).append(row["snr_db"])
    kinds = [(*column, op) for column in COLUMNS for op in OPS]
    lines = [
        (" ".join(kind), f"{min(found[kind]):.2f}", f"{max(found[kind]):.2f}")
        for kind in kinds
        if kind in found
    ]
    head = ("SNR against float64 on unquantised operands", "least, dB", "greatest, dB")
    return markdown_table(head, lines)


QUANTISER = {
    "quantiser": "{op} {operand} {shape}",
    "from": "{dtype}",
    "mode": "{mode}",
    "width": "{width}",
    "µs": "{us:.0f}",
    "TB/s": "{tbs:.2f}",
    "of copy": lambda row: f"{100 * row['of_copy']:.0f} %",
}
DETAIL = {
    "G×rows-N-K": "{shape}",
    "groups": "{balance}",
    "op": "{op}",
    "quantisation": lambda row: "yes" if row["with_quant"] else "no",
    "impl": "{impl} {mode}",
    "µs": "{us:.0f}",
    "10–90 %": "{us_spread:.0f}",
    "TFLOP/s": "{tflops:.0f}",
    "SNR dB": lambda row: optional(row["snr_db"], ".2f"),
    "rel L2": lambda row: optional(row["rel_l2"], ".1e"),
}


def detail_rank(row: Row) -> tuple[Any, ...]:
    """The order of all measurements."""
    shape, op = shape_rank(row["shape"]), OPS.index(row["op"])
    return shape, row["balance"], row["with_quant"], op, row["us"]


def head(document: Mapping[str, Any]) -> str:
    """On what, when and how it was measured."""
    meta = document["meta"]
    text = conditions(meta, f"pause {meta['protocol']['pause']}")
    return f"{text} Copy: {meta['ceilings']['copy_tbs']:.2f} TB/s."


def summary(document: Mapping[str, Any]) -> str:
    """The short form: kernels with balanced groups, and what has a goal."""
    return page(
        head(document),
        speed_table(document["rows"], BALANCES[0], False),
        claims_table(claims(document)),
    )


def full(document: Mapping[str, Any]) -> str:
    """Everything: goals, missed cells, speeds, SNR, quantisers, all measurements, absences."""
    meta, rows, found = document["meta"], document["rows"], claims(document)
    missed = [
        f"- {claim.name}, {claim.cell}: {claim.value:.2f}, goal {claim.goal:.2f}"
        for claim in sorted(found, key=lambda claim: claim.value / claim.goal)
        if not claim.is_met
    ] or ["None."]
    speeds = []
    for balance in BALANCES:
        if any(row["balance"] == balance for row in rows):
            speeds += [
                f"## Kernels alone, {balance} groups",
                speed_table(rows, balance, False),
                f"## With quantisation, {balance} groups",
                speed_table(rows, balance, True),
            ]
    kernels = [
        f"{name} {op}: {text}"
        for name, ops in meta.get("kernels", {}).items()
        for op, text in ops.items()
    ]
    peers = meta.get("peers", {}).items()
    absent = [f"{name}: {text}" for name, text in peers if text != "present"]
    absent += ["{cell} {variant}: {error}".format(**each) for each in meta.get("failures", [])]
    return page(
        "# MXFP8 grouped GEMM for training: measurements",
        head(document),
        bullets(meta["protocol"]),
        "## Against goals",
        claims_table(found),
        "### Cells that miss one",
        "\n".join(missed),
        *speeds,
        "## Beside the reference's figures",
        published_text(document),
        published_table(document),
        "## Signal to noise",
        snr_table(rows),
        "## Quantisers",
        row_table(document["quantiser"], QUANTISER),
        "## Every measurement",
        row_table(sorted(rows, key=detail_rank), DETAIL),
        absences("Kernels chosen", kernels),
        absences("Peers and failures", absent),
    )


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """Bars: the three kernels and the whole layer, a group for each shape, balanced groups."""
    rows = document["rows"]
    shapes = sorted({row["shape"] for row in rows}, key=shape_rank)
    figure, panels = make_panels(4, 1, (11, 12))
    for axes, op in zip(panels[:, 0], ("forward", "dgrad", "wgrad", OPS[-1]), strict=True):
        draw(axes, rows, shapes, op)
        what = "from bf16 to bf16" if op == OPS[-1] else "kernel alone"
        axes.set_title(f"{op}, {what}", fontsize="medium")
        draw_cublas(axes, document["meta"]["ceilings"])
        axes.set(ylabel="TFLOP/s")
        axes.set_xticks(range(len(shapes)), shapes, fontsize="small")
    save_figure(figure, panels.flat, document, path, columns=5)


def draw(axes: Any, rows: Sequence[Row], shapes: Sequence[str], op: str) -> None:
    """One panel; wgrad of a peer that only accumulates counts as its wgrad."""
    times, columns = by_key(rows), present(rows)
    width = 0.8 / max(1, len(columns))
    for index, column in enumerate(columns):
        quant = op == "forward+backward" and column[0] == OURS
        points = []
        for place, shape in enumerate(shapes):
            row = times.get((shape, BALANCES[0], *column, op, quant))
            if row is None and op == "wgrad":
                row = times.get((shape, BALANCES[0], *column, "wgrad_accumulate", False))
            if row is not None:
                points.append((place - 0.4 + (index + 0.5) * width, row["tflops"]))
        if points:
            label = " ".join(column)
            style = bar_style(COLUMNS.index(column))
            axes.bar(*zip(*points, strict=True), width=width, label=label, **style)


REPORT = Report(__doc__, SCHEMA, full, {"": plot}, summary=summary)
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
