"""Tables and plot of ranks/run.py, from its JSON alone.

    python -m benchmarks.ranks.render \\
        benchmarks/results/nvidia-h200-x2/expert_parallel.json

writes expert_parallel.md, expert_parallel-summary.md and expert_parallel.png beside the JSON, and
prints the summary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    Report,
    bullets,
    closing,
    make_panels,
    optional,
    page,
    row_table,
    save_figure,
    where,
)
from benchmarks.ranks.rows import COLLECTIVES, ONE_GPU, SCHEMA
from mxpert.cli.plots import line_style, log_scale, styled

Times = dict[tuple[str, str], Row]
OURS = ("mxpert/symmetric", "mxpert/gather", "mxpert/all_to_all")
LINES = {
    "mxpert/symmetric": 3,
    "mxpert/gather": 1,
    "mxpert/all_to_all": 8,
    COLLECTIVES: 2,
    ONE_GPU: 0,
}
"""Colour, marker and dashes of a way to exchange."""


def groups(document: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[int, Times]]:
    """(model, routing, wire) → T → (implementation, stage) → row."""
    found: dict[tuple[str, str, str], dict[int, Times]] = {}
    for row in document["rows"]:
        by_tokens = found.setdefault((row["model"], row["routing"], row["wire"]), {})
        by_tokens.setdefault(row["T"], {})[row["impl"], row["stage"]] = row
    return found


def best_of(times: Times) -> str:
    """Our implementation that AUTO takes: the first of `OURS` that was measured."""
    return next((name for name in OURS if (name, "layer") in times), OURS[0])


def us(times: Times, impl: str, stage: str) -> float | None:
    row = times.get((impl, stage))
    return None if row is None else float(row["us"])


def added_us(times: Times, impl: str) -> float | None:
    """What an exchange adds to the local layer; None for one GPU, which exchanges nothing."""
    whole, local = us(times, impl, "layer"), us(times, best_of(times), "local")
    return None if impl == ONE_GPU or whole is None or local is None else whole - local


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def exchange_columns() -> dict[str, Callable[[Any], str]]:
    """Columns of the table of exchanges; a row is (T, times)."""

    def added(impl: str) -> Callable[[Any], str]:
        return lambda row: optional(added_us(row[1], impl), ".1f")

    def ours(stage: str) -> Callable[[Any], str]:
        return lambda row: optional(us(row[1], best_of(row[1]), stage), ".1f")

    return {
        "T a rank": lambda row: str(row[0]),
        "dispatch": ours("dispatch"),
        "combine": ours("combine"),
        "both": ours("exchange"),
        "in a layer": lambda row: optional(added_us(row[1], best_of(row[1])), ".1f"),
        "GATHER": added("mxpert/gather"),
        "ALL_TO_ALL (eager)": added("mxpert/all_to_all"),
        "NCCL": added(COLLECTIVES),
        "ours / NCCL": lambda row: optional(
            ratio(added_us(row[1], best_of(row[1])), added_us(row[1], COLLECTIVES)), ".2f"
        ),
    }


def layer_columns() -> dict[str, Callable[[Any], str]]:
    """Columns of the table of whole layers."""

    def ours(row: Any, stage: str = "layer") -> float | None:
        return us(row[1], best_of(row[1]), stage)

    def speed_up(impl: str) -> Callable[[Any], str]:
        return lambda row: optional(ratio(us(row[1], impl, "layer"), ours(row)), ".2f")

    def above_parts(row: Any) -> str:
        parts = [ours(row, stage) for stage in ("layer", "local", "exchange")]
        known = [part for part in parts if part is not None]
        return optional(known[0] - known[1] - known[2] if len(known) == 3 else None, "+.1f")

    return {
        "T a rank": lambda row: str(row[0]),
        "local": lambda row: optional(ours(row, "local"), ".1f"),
        "layer": lambda row: optional(ours(row), ".1f"),
        "− local − both": above_parts,
        "NCCL": lambda row: optional(us(row[1], COLLECTIVES, "layer"), ".1f"),
        "speed-up": speed_up(COLLECTIVES),
        "one GPU": lambda row: optional(us(row[1], ONE_GPU, "layer"), ".1f"),
        "speed-up over it": speed_up(ONE_GPU),
        "hit": lambda row: f"{_any(row[1])['hit']:.0f}",
        "balance": lambda row: f"{_any(row[1])['balance']:.2f}",
        "host above one GPU's": lambda row: optional(_above(row[1]), "+.1f"),
    }


def _any(times: Times) -> Row:
    return next(iter(times.values()))


def _above(times: Times) -> float | None:
    """Host time of our layer beyond that of `fused_moe` on one GPU."""
    mine, other = us(times, best_of(times), "host"), us(times, ONE_GPU, "host")
    return None if mine is None or other is None else mine - other


def plan_rows(document: Mapping[str, Any]) -> list[Row]:
    """Predictions beside what was measured; a ratio above 1: predicted too slow."""
    measured, found = groups(document), []
    for plan in document["plans"]:
        times = measured[plan["model"], plan["routing"], plan["wire"]][plan["T"]]
        mine = best_of(times)
        stages = {"dispatch": "dispatch_us", "local": "local_us", "combine": "combine_us"}
        ratios = {
            stage: ratio(plan[name], us(times, mine, stage))
            for stage, name in {**stages, "layer": "us"}.items()
        }
        found.append({**plan, "ratios": ratios, "layer": us(times, mine, "layer")})
    return found


def deviation(document: Mapping[str, Any]) -> str:
    """How far the predicted layers are off, in one sentence for each routing."""
    found: dict[str, list[float]] = {}
    for row in plan_rows(document):
        if row["ratios"]["layer"] is not None:
            found.setdefault(row["routing"], []).append(100 * abs(row["ratios"]["layer"] - 1))
    return " ".join(
        f"With {routing} routing layers are off by {median(values):.0f} % in the median, at most "
        f"{max(values):.0f} %."
        for routing, values in found.items()
    )


PLAN_COLUMNS: dict[str, Any] = {
    "model": "{model}",
    "routing": "{routing}",
    "wire": "{wire}",
    "T a rank": "{T}",
    "predicted": "{us:.1f}",
    "measured": lambda row: optional(row["layer"], ".1f"),
    **{
        f"{stage} ratio": lambda row, stage=stage: optional(row["ratios"][stage], ".2f")
        for stage in ("layer", "dispatch", "local", "combine")
    },
}


def of_group(key: tuple[str, str, str], by_tokens: Mapping[int, Times]) -> str:
    """Both tables of a model, a routing and a wire."""
    model, routing, wire = key
    rows = sorted(by_tokens.items())
    return page(
        f"### {model}, {routing} routing, {wire} wire",
        "Dispatch and combine, µs: each in a graph of its own, whose replay costs several "
        "microseconds; both, 16 times in one graph. The columns behind them say what an exchange "
        "adds to the local layer. That includes the wait for the slower rank, which changes with "
        "the routing where T is below 64.",
        row_table(rows, exchange_columns()),
        "Layers, µs; speed-ups above 1: mxpert is faster.",
        row_table(rows, layer_columns()),
    ).rstrip()


def heading(document: Mapping[str, Any]) -> str:
    meta = document["meta"]
    rate = meta["links"]["nvlink_gbs"]
    link = f"NVLink, {rate:.0f} GB/s a direction" if rate else "no NVLink"
    settings = ", ".join(f"{name}={text}" for name, text in meta["nccl"]["settings"].items())
    return (
        where(meta, ("torch", "triton", "cuda", "driver"))
        + f". {meta['ranks']} ranks of one host, {link}; NCCL {meta['nccl']['version']}"
        + (f" ({settings})" if settings else "")
        + "."
    )


def full(document: Mapping[str, Any]) -> str:
    """Everything: tables, predictions, protocol, what was not measured."""
    meta = document["meta"]
    return page(
        "# Expert parallelism",
        heading(document),
        *(of_group(key, by_tokens) for key, by_tokens in groups(document).items()),
        "## The planner's predictions",
        f"{deviation(document)} Ratios are predicted over measured.",
        row_table(plan_rows(document), PLAN_COLUMNS),
        "## Transports",
        bullets({name: text.splitlines()[0] for name, text in meta["explain"].items()}),
        closing(meta),
    )


def summary(document: Mapping[str, Any]) -> str:
    """Uniform routing with an MXFP8 wire: a line for each model and T."""
    rows = [
        (model, count, times)
        for (model, routing, wire), by_tokens in groups(document).items()
        if (routing, wire) == ("uniform", "mxfp8")
        for count, times in sorted(by_tokens.items())
    ]
    exchanges, layers = exchange_columns(), layer_columns()
    names = "T a rank", "both", "in a layer", "NCCL", "ours / NCCL"
    taken = {name: exchanges[name] for name in names}
    taken |= {name: layers[name] for name in ("local", "layer", "one GPU", "speed-up over it")}
    columns: dict[str, Any] = {
        "model": lambda row: row[0],
        **{name: lambda row, text=text: text(row[1:]) for name, text in taken.items()},
    }
    return page(heading(document), row_table(rows, columns), deviation(document))


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """A row for each model, MXFP8 wire and uniform routing: what the exchange adds, then layers."""
    chosen = {
        model: by_tokens
        for (model, routing, wire), by_tokens in groups(document).items()
        if (routing, wire) == ("uniform", "mxfp8")
    }
    models = list(chosen) or ["none"]
    figure, panels = make_panels(len(models), 2, (9.0, 3.2 * len(models)))
    for line, model in zip(panels, models, strict=True):
        drawn = {"added by the exchange": added_us, "layer": functools.partial(us, stage="layer")}
        for axes, (title, value) in zip(line, drawn.items(), strict=True):
            by_tokens = sorted(chosen.get(model, {}).items())
            for name, style in LINES.items():
                points = [
                    (count, found)
                    for count, times in by_tokens
                    if (found := value(times, name)) is not None
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), label=name, **line_style(style, size=4))
            axes.set(xlabel="tokens of a rank", ylabel="µs")
            log_scale(axes, x=2, y=10)
            axes.set_title(f"{model}, {title}", fontsize="small")
            axes.grid()
    save_figure(figure, [axes for line in panels for axes in line], document, path, columns=5)


REPORT = Report(__doc__, SCHEMA, full, {"": plot}, summary=summary)
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
