"""Tables and plot of serving/run.py, from its JSON alone.

    python -m benchmarks.serving.render benchmarks/results/nvidia-h200/serving.json

writes serving.md and serving.png beside the JSON, and prints the tables. `summary_table` and
`decode_text` are what README.md and docs say of it, through `benchmarks.cards.render`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.tables import (
    Report,
    closing,
    make_panels,
    page,
    pivot,
    row_table,
    save_figure,
    span,
    where,
)
from benchmarks.serving.backends import BACKENDS, IN_TREE, Backend
from benchmarks.serving.rows import SCHEMA
from mxpert.cli.plots import bar_style, styled

Cells = dict[tuple[str, str], str]
BARS = {
    "vllm": 0,
    "marlin": 2,
    "humming": 4,
    "humming-fp8_token": 5,
    "mxpert-a16w4": 3,
    "mxpert-a8w4": 1,
    "mxpert-fp8_token": 7,
    "mxpert-a4w4": 8,
    "mxpert-a16w4-modular": 6,
}
"""Colour and hatch of a backend; those that are not here are in the tables alone."""

TITLES = {
    "marlin": "Marlin",
    "humming": "Humming",
    "humming-fp8_token": "Humming, FP8 activations",
    "humming-grouped": "Humming, grouped GEMMs",
    "humming-grouped-fp8_token": "Humming, grouped GEMMs, FP8 activations",
    "triton": "triton_kernels",
    "triton-unfused": "triton_kernels, not fused",
    "flashinfer": "FlashInfer CUTLASS",
    "mxpert-a16w4": "mxpert a16w4",
    "mxpert-a8w4": "mxpert a8w4",
}
"""What the summaries call a backend; they leave out those that are not here."""
KERNELS = {"TRITON": "triton_kernels", "MARLIN": "Marlin"}


def rates(rows: Sequence[Row], model: str, phase: str) -> dict[str, dict[int, list[float]]]:
    """Backend → concurrency → tokens/s of every round."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (list(BACKENDS).index(row["backend"]), row["round"])):
        if (row["model"], row["phase"]) == (model, phase):
            by_size = found.setdefault(row["backend"], {})
            by_size.setdefault(row["concurrency"], []).append(row["tokens_per_s"])
    return found


def best_in_tree(
    found: Mapping[str, Mapping[int, list[float]]], size: int, backend: Backend
) -> float | None:
    """Median of the fastest of vLLM's own backends that one of ours is compared with: those with
    16-bit activations if ours has them, else all of them. None if none ran."""
    known = [
        median(found[name][size])
        for name in IN_TREE
        if size in found.get(name, {}) and (backend.is_narrow or not BACKENDS[name].is_narrow)
    ]
    return max(known, default=None)


def rate_table(rows: Sequence[Row], model: str, phase: str) -> str:
    """Backends down, concurrency across: the median, and its ratio to `best_in_tree`."""
    found, cells = rates(rows, model, phase), Cells()
    sizes = sorted({size for by_size in found.values() for size in by_size})
    for name, by_size in found.items():
        for size, samples in by_size.items():
            best, text = best_in_tree(found, size, BACKENDS[name]), f"{median(samples):,.0f}"
            if best is not None and BACKENDS[name].is_ours:
                text += f" ({median(samples) / best:.2f}×)"
            cells[name, str(size)] = text
    title = f"{phase}, tokens/s, by concurrency"
    return pivot(title, cells, [str(size) for size in sizes]) if cells else ""


def share_table(rows: Sequence[Row], model: str) -> str:
    """The experts' share of a decode step: what is saved by leaving them out."""
    found, cells = rates(rows, model, "decode"), Cells()
    without = found.pop("no-experts", {})
    for name, by_size in found.items():
        for size in sorted(by_size):
            if size in without:
                share = 1 - median(by_size[size]) / median(without[size])
                cells[name, str(size)] = f"{100 * share:.0f} %"
    sizes = sorted(without)
    return pivot("experts' share of a decode step", cells, list(map(str, sizes))) if cells else ""


def latency_table(rows: Sequence[Row], model: str) -> str:
    """Time to the first token and per output token, of the median round."""
    cells = Cells()
    for name in BACKENDS:
        for size in sorted({row["concurrency"] for row in rows}):
            mine = [
                row
                for row in rows
                if (row["model"], row["phase"]) == (model, "decode")
                and (row["backend"], row["concurrency"]) == (name, size)
            ]
            if mine:
                first = 1e3 * median(row["first_s"] for row in mine)
                later = 1e3 * median(row["concurrency"] / row["tokens_per_s"] for row in mine)
                cells[name, str(size)] = f"{first:.1f} / {later:.2f}"
    sizes = list(dict.fromkeys(size for _, size in cells))
    title = "first token / each further one, ms"
    return pivot(title, cells, sorted(sizes, key=int)) if cells else ""


def round_table(rows: Sequence[Row], model: str) -> str:
    """Every round of every cell."""
    cells = Cells()
    for phase in ("decode", "prefill"):
        for name, by_size in rates(rows, model, phase).items():
            for size, samples in by_size.items():
                text = " / ".join(f"{sample:,.0f}" for sample in samples)
                cells[name, f"{phase} {size}"] = text
    columns = list(dict.fromkeys(column for _, column in cells))
    return pivot("all rounds, tokens/s", cells, columns) if cells else ""


ENGINE_COLUMNS = {
    "engine": "{backend}",
    "vLLM's method": "{moe_method}",
    "weights, GiB": "{weights_gib:.2f}",
    "peak, GiB": "{peak_gib:.2f}",
    "load, s": "{load_s:.0f}",
    "loading at once": "{together}",
    "first request, s": "{first_request_s:.2f}",
    "warm, s": "{warm_request_s:.2f}",
}
GATE_COLUMNS = {
    "backend": "{backend}",
    "mean Δ log p": "{difference:.4f}",
    "allowed": "{bound:.4f}",
    "gate": lambda row: "green" if row["passed"] else "red",
    "first request, cold, s": "{first_request_s:.2f}",
    "warm, s": "{warm_request_s:.2f}",
}


def of_model(document: Mapping[str, Any], model: str) -> str:
    """All tables of one model."""
    rows = document["rows"]
    engines, gates = (
        [row for row in document[name] if row["model"] == model] for name in ("engines", "gates")
    )
    return page(
        f"## {model}",
        baselines(document, model),
        rate_table(rows, model, "decode"),
        rate_table(rows, model, "prefill"),
        latency_table(rows, model),
        share_table(rows, model),
        row_table(engines, ENGINE_COLUMNS) if engines else "",
        row_table(gates, GATE_COLUMNS) if gates else "",
        round_table(rows, model),
    ).rstrip()


def chosen_kernels(document: Mapping[str, Any], model: str) -> dict[str, str]:
    """Backend → the name that vLLM gives it."""
    methods = {
        row["backend"]: row["moe_method"].split()
        for row in document["engines"]
        if row["model"] == model
    }
    return {name: words[1] for name, words in methods.items() if len(words) > 1}


def baselines(document: Mapping[str, Any], model: str) -> str:
    """Which of vLLM's own backends were measured, with the name that vLLM gives them."""
    chosen = chosen_kernels(document, model)
    timed = {row["backend"] for row in document["rows"] if row["model"] == model}
    has = [name for name in IN_TREE if name in timed]
    told = [f"{name} ({chosen[name]})" if chosen.get(name) else name for name in has]
    by_itself = chosen.get("vllm", "").lower() if "vllm" in timed else ""
    absent = [name for name in IN_TREE if name not in {*timed, by_itself}]
    text = f"vLLM's own that were measured: {', '.join(told) or 'none'}"
    return f"{text}; not measured: {', '.join(absent)}." if absent else f"{text}."


def summary_table(document: Mapping[str, Any], *, ours_only: bool = False) -> str:
    """All models, decode at each concurrency and prefill: medians, and ratios of ours."""
    rows, cells = document["rows"], Cells()
    columns: dict[tuple[str, int], str] = {}
    for row in sorted(rows, key=lambda row: (row["phase"], row["concurrency"])):
        size, tokens = row["concurrency"], row["prompt_tokens"]
        text = f"prefill, {size} × {tokens} tokens" if row["phase"] == "prefill" else str(size)
        columns[row["phase"], size] = text
    first = next((key for key in columns if key[0] == "decode"), None)
    if first is not None:
        columns[first] = f"decode, {first[1]} request" + ("s" if first[1] > 1 else "")
    for model in dict.fromkeys(row["model"] for row in rows):
        chosen = chosen_kernels(document, model).get("vllm", "")
        default = f"vLLM's default ({KERNELS.get(chosen, chosen)})" if chosen else "vLLM's default"
        for (phase, size), column in columns.items():
            found = rates(rows, model, phase)
            for name, title in ({"vllm": default} | TITLES).items():
                backend, samples = BACKENDS[name], found.get(name, {}).get(size)
                if samples is None or (ours_only and not backend.is_ours):
                    continue
                best = best_in_tree(found, size, backend) if backend.is_ours else None
                ratio = "" if best is None else f" ({median(samples) / best:.2f}×)"
                cells[f"{model}, {title}", column] = f"{median(samples):.0f}{ratio}"
    return pivot("model, experts", cells, list(columns.values())) if cells else ""


EXPERTS_DECIDE = 1.1
"""Experts decide the rate of decode where an engine whose experts take no time is at least so many
times as fast as vLLM's best."""


@dataclass(frozen=True)
class DecodeRatio:
    """Rate of one backend of ours at one concurrency, over that of `best_in_tree`.

    Attributes:
        form: format of the activations. value: the ratio. bound: the same of an engine whose
            experts take no time; None if it was not measured.
    """

    model: str
    form: str
    concurrency: int
    value: float
    bound: float | None

    @property
    def experts_decide(self) -> bool:
        """Whether faster experts would show; also where that was not measured."""
        return self.bound is None or self.bound >= EXPERTS_DECIDE


def decode_ratios(document: Mapping[str, Any]) -> list[DecodeRatio]:
    """All models and concurrencies, a16w4 and a8w4; medians over the rounds."""
    rows, ratios = document["rows"], []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = rates(rows, model, "decode")
        without = found.get("no-experts", {})
        for form in ("a16w4", "a8w4"):
            backend = BACKENDS[f"mxpert-{form}"]
            for size, samples in found.get(backend.name, {}).items():
                best = best_in_tree(found, size, backend)
                if best is not None:
                    bound = median(without[size]) / best if size in without else None
                    ratios.append(DecodeRatio(model, form, size, median(samples) / best, bound))
    return ratios


def decode_text(document: Mapping[str, Any]) -> str:
    """What mxpert's experts gain in decode, in a clause; empty if nothing was measured."""
    ratios, decided = decode_ratios(document), dict[str, list[float]]()
    for each in ratios:
        if each.experts_decide:
            decided.setdefault(each.form, []).append(each.value)
    others = [each for each in ratios if not each.experts_decide]
    if not decided:
        return ""
    spans = (f"in {form} {span(values, '.2f')}" for form, values in decided.items())
    text = (
        f"{' and '.join(spans)} times as fast as with the best of vLLM's own kernels "
        "with activations as wide or wider"
    )
    for model, size in dict.fromkeys((each.model, each.concurrency) for each in others):
        mine = [each for each in others if (each.model, each.concurrency) == (model, size)]
        values = span([each.value for each in mine], ".2f")
        bounds = span([each.bound for each in mine if each.bound is not None], ".2f")
        text += (
            f"; with {size} requests of {model} the rest of the engine decides "
            f"({values}, experts that take no time {bounds})"
        )
    return text


def full(document: Mapping[str, Any]) -> str:
    """Everything: tables of each model, protocol, what was not measured."""
    meta = document["meta"]
    models = dict.fromkeys(row["model"] for row in (*document["gates"], *document["rows"]))
    return page(
        "# gpt-oss in vLLM",
        where(meta, ("vllm", "torch", "triton", "driver"))
        + ". Random weights. In brackets: times the best of vLLM's own backends, for a16w4 the "
        "best of those with bfloat16 activations.",
        *(of_model(document, model) for model in models),
        closing(meta),
    )


@styled
def plot(document: Mapping[str, Any], path: Path) -> None:
    """A row for each model: decode at each concurrency, then prefill; bars are medians."""
    rows = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows)) or ["none"]
    sizes = {
        phase: sorted({r["concurrency"] for r in rows if r["phase"] == phase})
        for phase in ("decode", "prefill")
    }
    columns = [(phase, size) for phase, all_sizes in sizes.items() for size in all_sizes]
    shape = len(models), max(1, len(columns))
    figure, panels = make_panels(*shape, (2.6 * shape[1], 3.0 * shape[0]))
    for line, model in zip(panels, models, strict=True):
        for axes, (phase, size) in zip(line, columns, strict=False):
            found = rates(rows, model, phase)
            names = [name for name in BARS if size in found.get(name, {})]
            for place, name in enumerate(names):
                axes.bar(place, median(found[name][size]), label=name, **bar_style(BARS[name]))
            axes.set_xticks([])
            axes.set_title(f"{model}, {phase} {size}", fontsize="small")
            axes.set_ylabel("tokens/s", fontsize="small")
            if not names:
                axes.set_axis_off()
                axes.text(0.5, 0.5, "not measured", ha="center", va="center", fontsize="small")
    save_figure(figure, [axes for line in panels for axes in line], document, path, columns=4)


REPORT = Report(__doc__, SCHEMA, full, {"": plot})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
