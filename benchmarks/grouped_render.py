"""Tables and a plot of grouped_gemm.py's measurements, from its JSON alone.

    python benchmarks/grouped_render.py benchmarks/results/nvidia-h200/grouped_gemm.json

writes grouped_gemm.md (everything), grouped_gemm-summary.md and grouped_gemm.png beside the JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import _checkout  # noqa: F401 - finds the library
from grouped_cells import BALANCES, MODES, OPS, SHAPES
from grouped_document import Row, load
from grouped_ours import OURS
from render import conditions, markdown_table, render, save_figure

DEEPGEMM, TORCH = ("deepgemm", "fp8_1x128"), ("torch", "bf16")
COLUMNS = (
    *((OURS, mode) for mode in MODES),
    TORCH,
    ("torch", "fp8_row"),
    ("deepgemm", "bf16"),
    DEEPGEMM,
    (f"{OURS}_triton", "exact"),
)
COLORS = dict(
    zip(
        COLUMNS,
        (
            "tab:brown",
            "tab:red",
            "tab:orange",
            "tab:pink",
            "tab:blue",
            "tab:cyan",
            "tab:olive",
            "tab:green",
            "tab:gray",
        ),
        strict=True,
    )
)
DEEPGEMM_GOALS = {"auto": 1.03, "row": 1.03, "block128": 0.95}
WGRAD_GOAL = 1300.0
"""TFLOP/s."""

Column = tuple[str, str]
Times = dict[tuple[str, str, str, str, str, bool], Row]


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
    return {
        (row["shape"], row["balance"], row["impl"], row["mode"], row["op"], row["with_quant"]): row
        for row in rows
    }


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
                    yield Claim(f"{mode}: skewed / balanced", 0.85, cell, ours / level)
            whole = rate(shape, balance, (OURS, mode), OPS[-1], True)
            plain = rate(shape, balance, TORCH, OPS[-1], False)
            if whole and plain and mode in ("auto", "row"):
                yield Claim(
                    f"{mode} forward + backward with quantisation / torch bf16",
                    1.3,
                    f"{shape} {balance}",
                    whole / plain,
                )


def claims(document: Mapping[str, Any]) -> list[Claim]:
    """Everything that has a goal, quantisers included."""
    found = list(speed_claims(document["rows"]))
    for row in document["quantiser"]:
        found.append(
            Claim(
                f"{row['op']} / copy",
                0.8,
                f"{row['shape']} {row['operand']} {row['dtype']} {row['mode']}",
                row["of_copy"],
            )
        )
    return found


def claims_table(found: Sequence[Claim]) -> str:
    """One line for each kind of claim."""
    lines = []
    for name in dict.fromkeys(claim.name for claim in found):
        same = [claim for claim in found if claim.name == name]
        worst = min(same, key=lambda claim: claim.value)
        lines.append(
            (
                name,
                f"≥ {worst.goal:.2f}",
                f"{geometric_mean(claim.value for claim in same):.2f}",
                f"{worst.value:.2f} ({worst.cell})",
                f"{sum(claim.is_met for claim in same)} of {len(same)}",
            )
        )
    return markdown_table(
        ("rate / the other's rate", "goal", "geometric mean", "worst", "cells that meet it"), lines
    )


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


def snr_table(rows: Sequence[Row]) -> str:
    """Least and greatest SNR of each implementation and op over all cells."""
    lines = []
    for column in present(rows):
        for op in OPS:
            values = [
                row["snr_db"]
                for row in rows
                if (row["impl"], row["mode"]) == column
                and row["op"] == op
                and row["snr_db"] is not None
            ]
            if values:
                lines.append(
                    (f"{' '.join(column)} {op}", f"{min(values):.2f}", f"{max(values):.2f}")
                )
    return markdown_table(
        ("SNR against float64 on unquantised operands", "least, dB", "greatest, dB"), lines
    )


def quantiser_table(rows: Sequence[Row]) -> str:
    """Each quantisation against the copy rate."""
    lines = [
        (
            f"{row['op']} {row['operand']} {row['shape']}",
            row["dtype"],
            row["mode"],
            str(row["width"]),
            f"{row['us']:.0f}",
            f"{row['tbs']:.2f}",
            f"{100 * row['of_copy']:.0f} %",
        )
        for row in rows
    ]
    return markdown_table(("quantiser", "from", "mode", "width", "µs", "TB/s", "of copy"), lines)


def detail_table(rows: Sequence[Row]) -> str:
    """Every measurement."""
    order = sorted(
        rows,
        key=lambda row: (
            shape_rank(row["shape"]),
            row["balance"],
            row["with_quant"],
            OPS.index(row["op"]),
            row["us"],
        ),
    )
    lines = [
        (
            row["shape"],
            row["balance"],
            row["op"],
            "yes" if row["with_quant"] else "no",
            f"{row['impl']} {row['mode']}",
            f"{row['us']:.0f}",
            f"{row['us_spread']:.0f}",
            f"{row['tflops']:.0f}",
            _optional(row["snr_db"], ".2f"),
            _optional(row["rel_l2"], ".1e"),
        )
        for row in order
    ]
    return markdown_table(
        (
            "G×rows-N-K",
            "groups",
            "op",
            "quantisation",
            "impl",
            "µs",
            "10–90 %",
            "TFLOP/s",
            "SNR dB",
            "rel L2",
        ),
        lines,
    )


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def head(document: Mapping[str, Any]) -> str:
    """On what, when and how it was measured."""
    meta = document["meta"]
    power = {"power": f"pause {meta['protocol']['pause']}"}
    return conditions({**meta, "protocol": power}) + (
        f" Copy: {meta['ceilings']['copy_tbs']:.2f} TB/s."
    )


def summary(document: Mapping[str, Any]) -> str:
    """The short form: kernels with balanced groups, and what has a goal."""
    return (
        "\n\n".join(
            [
                head(document),
                speed_table(document["rows"], BALANCES[0], False),
                claims_table(claims(document)),
            ]
        )
        + "\n"
    )


def full(document: Mapping[str, Any]) -> str:
    """Everything: goals, missed cells, speeds, SNR, quantisers, all measurements, absences."""
    meta, rows, found = document["meta"], document["rows"], claims(document)
    missed = [
        f"- {claim.name}, {claim.cell}: {claim.value:.2f}, goal {claim.goal:.2f}"
        for claim in sorted(found, key=lambda claim: claim.value / claim.goal)
        if not claim.is_met
    ] or ["None."]
    parts = [
        "# MXFP8 grouped GEMM for training: measurements",
        head(document),
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        "## Against goals",
        claims_table(found),
        "### Cells that miss one",
        "\n".join(missed),
    ]
    for balance in BALANCES:
        if any(row["balance"] == balance for row in rows):
            parts += [
                f"## Kernels alone, {balance} groups",
                speed_table(rows, balance, False),
                f"## With quantisation, {balance} groups",
                speed_table(rows, balance, True),
            ]
    parts += [
        "## Signal to noise",
        snr_table(rows),
        "## Quantisers",
        quantiser_table(document["quantiser"]),
        "## Every measurement",
        detail_table(rows),
    ]
    kernels = [
        f"- {name} {op}: {text}"
        for name, ops in meta.get("kernels", {}).items()
        for op, text in ops.items()
    ]
    absent = [
        f"- {name}: {text}" for name, text in meta.get("peers", {}).items() if text != "present"
    ]
    absent += [
        f"- {each['cell']} {each['variant']}: {each['error']}" for each in meta.get("failures", [])
    ]
    for title, lines in (("## Kernels chosen", kernels), ("## Peers and failures", absent)):
        if lines:
            parts += [title, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Bars: the three kernels and the whole layer, a group for each shape, balanced groups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, limits = document["rows"], document["meta"]["ceilings"]
    shapes = sorted({row["shape"] for row in rows}, key=shape_rank)
    figure, panels = pyplot.subplots(4, 1, figsize=(11, 12), layout="constrained")
    for axes, op in zip(panels, ("forward", "dgrad", "wgrad", "forward+backward"), strict=True):
        whole = op == "forward+backward"
        draw(axes, rows, shapes, op)
        axes.set_title(
            f"{op}, {'from bf16 to bf16' if whole else 'kernel alone'}", fontsize="medium"
        )
        axes.axhline(limits["bf16_tflops"], color="gray", label="cuBLAS bf16")
        axes.axhline(limits["fp8_tflops"], color="gray", linestyle="--", label="cuBLAS fp8")
        axes.set(ylabel="TFLOP/s")
        axes.set_xticks(range(len(shapes)), shapes, fontsize="small")
    save_figure(figure, panels, document, path, columns=5)


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
            axes.bar(
                *zip(*points, strict=True),
                width=width,
                color=COLORS[column],
                label=" ".join(column),
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the three files; 2 if the JSON is not what grouped_gemm.py writes."""
    return render(arguments, __doc__, load=load, full=full, plots={"": plot}, summary=summary)


if __name__ == "__main__":
    sys.exit(main())
