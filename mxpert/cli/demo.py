"""`mxpert demo`: a gpt-oss checkpoint's MoE layers on real hidden states, every number checked.

Without Transformers the layers and hidden states are random, and a loop over experts in torch takes
the place of Transformers' MoE layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from ..core.files import short
from ..core.problem import ACTIVATION_FORMATS
from ..core.registry import override
from ..errors import require
from ..explain import explain
from ..formats.spec import get_format
from ..formats.token import FP8_TOKEN, quantize_token_rows
from ..moe.op import fused_moe, moe_gate_up
from ..quantize.op import dequantize, quantize
from ..routing.op import make_routing_plan
from ..routing.plan import TOKEN_MASK
from ..testing.numerics import cosine, relative_l2
from ..testing.timing import Work
from .demo_layers import CheckpointLayers, DemoLayer, RandomLayers, open_layers, route
from .measure import (
    Ceilings,
    cosine_gate,
    error_gate,
    float64_reference,
    intermediate_sizes,
    is_timed,
    time_calls,
    timing_columns,
)
from .options import FORMAT_NAMES, JsonFile, Tokens, check_backend, check_target, parse_numbers
from .plots import INK, figure, grouped_bars, legend_outside, line_style, log_scale, save, styled
from .report import (
    Column,
    Row,
    best_device,
    environment,
    format_rate,
    format_time,
    make_console,
    print_table,
    progress,
    result_console,
    say,
    write_report,
    write_results,
)

CASE_OVERHEAD = 32
"""Time of a case that does not depend on T, in tokens: for the time left."""
MOST_PERCENT = 150.0
"""Of a gate: higher bars are cut there."""
MOST_DIGITS = 9
"""Digits of a layer number."""
Noise = tuple[float, float]


def quantisation_noise(case: DemoLayer, num_tokens: int, activation_format: str) -> Noise:
    """Noise of the activation format alone on this layer, computed by the reference."""
    if activation_format == "bf16":
        return 0.0, 0.0
    weights, x = case.weights.plain, case.rows(num_tokens)
    topk_weights, topk_ids = route(case, num_tokens)
    with override(backend="reference"):
        plan = make_routing_plan(
            topk_weights, topk_ids, num_experts=weights.num_experts, routing_block_m=16
        )
        h = moe_gate_up(x, weights, plan, activation=case.layer.activation)
        assert isinstance(h, torch.Tensor)  # for the type checker: bf16 in, bf16 out
        h = h[(plan.sorted_token_ids & TOKEN_MASK) < num_tokens]
        noise_x, noise_h = (
            relative_l2(quantised(rows, activation_format), rows) ** 2 for rows in (x, h)
        )
    return noise_x, noise_h


def quantised(rows: torch.Tensor, activation_format: str) -> torch.Tensor:
    """The rows as a quantised activation format holds them, float32."""
    if activation_format == FP8_TOKEN:
        return quantize_token_rows(rows).dequantize()
    return dequantize(quantize(rows, get_format(activation_format)))


def run_case(
    case: DemoLayer,
    num_tokens: int,
    activation_format: str,
    ceilings: Ceilings | None = None,
    backend: str | None = None,
) -> Row:
    """Run one layer for T tokens in one format and compare with both truths.

    Args:
        case: the layer and what flows into it. ceilings: time the layer, too, and judge the time.
        backend: pinned, or None.
    """
    layer, x = case.layer, case.rows(num_tokens)
    topk_weights, topk_ids = route(case, num_tokens)
    options: dict[str, Any] = {
        "activation": layer.activation,
        "activation_format": activation_format,
    }
    weights, chosen = case.weights.resolve(
        lambda weights: explain(fused_moe, x, weights, topk_weights, topk_ids, **options), backend
    )

    def call() -> torch.Tensor:
        return fused_moe(x, weights, topk_weights, topk_ids, **options)

    with override(backend=backend):
        output = call()
        timing = None if ceilings is None else time_calls([call], weights.device)
    with float64_reference():
        truth = fused_moe(
            x, case.weights.plain, topk_weights, topk_ids, **options, out_dtype=torch.float64
        )
    hit = topk_ids.unique().numel()
    error = relative_l2(output, truth)
    error_limit = error_gate(
        "layer",
        activation_format,
        intermediate_sizes(num_tokens, layer.top_k, weights.intermediate_size),
    )
    likeness = cosine(output, case.oracle[:num_tokens])
    least = cosine_gate(activation_format, *quantisation_noise(case, num_tokens, activation_format))
    row: Row = {
        "layer": layer.layer,
        "backend": chosen.kernel.backend,
        "config": str(chosen.config),
        "T": num_tokens,
        "activation": activation_format,
        "hit": hit,
        "rel_l2": error,
        "rel_l2_gate": error_limit,
        "cosine": likeness,
        "cosine_gate": least,
        "passed": error <= error_limit and likeness >= least,
    }
    if ceilings is None or timing is None:
        return row
    work = Work.of_stage(
        "layer",
        hit_experts=hit,
        routed_rows=num_tokens * layer.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
    )
    return row | timing_columns(timing) | ceilings.judge(work, timing.us, activation_format)


def parse_layers(text: str) -> list[int]:
    """--layers as ascending numbers."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isascii() and part.isdigit() and len(part) <= MOST_DIGITS for part in parts),
        "demo",
        "--layers",
        need="layer numbers separated by commas",
        got=short(text),
        remedy="for example --layers 0,11",
    )
    return sorted({int(part) for part in parts})


def summarise(rows: list[Row]) -> list[Row]:
    """One check for each (T, format): the worst layer of every comparison, the mean of times."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["T"], row["activation"]), []).append(row)
    summary = []
    for group in groups.values():
        mean: Row = {
            key: sum(row[key] for row in group) / len(group)
            for key in ("us", "tbs", "tflops", "percent_of_roof")
            if key in group[0]
        }
        closest = min(group, key=lambda row: row["cosine"] - row["cosine_gate"])
        worst: Row = {
            "layers": [row["layer"] for row in group],
            "rel_l2": max((row["rel_l2"] for row in group), key=_nan_last),
            "cosine": closest["cosine"],
            "cosine_gate": closest["cosine_gate"],
            "passed": all(row["passed"] for row in group),
        }
        summary.append(group[0] | mean | worst)
    return summary


def _nan_last(value: float) -> tuple[bool, float]:
    """A sort key that takes NaN for the largest number."""
    return math.isnan(value), value


def show(document: Row, console: Console) -> None:
    """The table of checks, each value beside its gate, and a line for every layer that failed."""
    rows, facts, timed = document["summary"], document["environment"], document["timed"]
    columns: list[str | Column] = ["T", "format", Column("backend", 2)]
    if timed:
        columns += ["time/layer", Column("rate", 1)]
    columns += ["rel. L2 error\nto float64", f"cosine to\n{document['oracle']}", "check"]
    cells = []
    for row in rows:
        times = [format_time(row["us"]), format_rate(row)] if timed else []
        cells.append(
            [
                str(row["T"]),
                FORMAT_NAMES[row["activation"]],
                row["backend"],
                *times,
                f"{row['rel_l2']:.1e} ≤ {row['rel_l2_gate']:.1e}",
                f"{row['cosine']:.6f} ≥ {row['cosine_gate']:.4f}",
                "[green]ok[/]" if row["passed"] else "[red]FAILED[/]",
            ]
        )
    layers = ", ".join(str(layer) for layer in document["layers"])
    print_table(
        console,
        f"mxpert demo on {facts['device']} ({facts['arch']}), layers {layers}",
        columns,
        cells,
    )
    if not timed:
        say(
            console,
            "Times are left out: without a GPU the reference backend answers, and its speed says "
            "nothing about the kernels.",
        )
    for row in document["rows"]:
        if not row["passed"]:
            console.print(
                f"[red]layer {row['layer']} T={row['T']} {FORMAT_NAMES[row['activation']]}[/]: "
                f"relative L2 error {row['rel_l2']:.3e} (at most {row['rel_l2_gate']:.1e}), cosine "
                f"{row['cosine']:.6f} (at least {row['cosine_gate']:.4f})",
                soft_wrap=True,
            )


def verdict(document: Row, console: Console) -> None:
    """The last line: how many checks passed."""
    checks = [row["passed"] for row in document["summary"]]
    style = "bold green" if all(checks) else "bold red"
    console.print(f"{sum(checks)} of {len(checks)} checks passed", style=style, highlight=False)


@styled
def plot(document: Row, path: Path) -> None:
    """How much of each gate is used up, by T and format; times first where they were measured.

    A bar that reaches the line fails its check; one of a result that is no number is the highest.
    """
    title = f"mxpert demo on {document['environment']['device']}"
    drawing, (panels,) = figure(title, 1, 2 + document["timed"])
    summary = document["summary"]
    counts = list(dict.fromkeys(row["T"] for row in summary))
    names = [name for name in FORMAT_NAMES if any(row["activation"] == name for row in summary)]
    if document["timed"]:
        for index, name in enumerate(names):
            rows = [row for row in summary if row["activation"] == name]
            xs, ys = [row["T"] for row in rows], [row["us"] for row in rows]
            panels[0].plot(xs, ys, label=FORMAT_NAMES[name], **line_style(index))
        panels[0].set(xlabel="tokens", ylabel="µs per layer")
        log_scale(panels[0], x=2, y=10)
        panels[0].grid()
        panels[0].legend()
    for axes, what, used in (
        (
            panels[-2],
            "relative L2 error to float64",
            lambda row: row["rel_l2"] / row["rel_l2_gate"],
        ),
        (
            panels[-1],
            f"distance to {document['oracle']} (1 − cosine)",
            lambda row: (1 - row["cosine"]) / (1 - row["cosine_gate"]),
        ),
    ):
        of = {(row["T"], row["activation"]): 100 * used(row) for row in summary}
        bars = {FORMAT_NAMES[name]: [_shown(of[count, name]) for count in counts] for name in names}
        grouped_bars(axes, [str(count) for count in counts], bars)
        axes.axhline(100, color=INK, linestyle="--", label="gate")
        axes.set(title=what, xlabel="tokens", ylabel="% of the gate", ylim=(0, None))
        axes.grid(axis="y")
    legend_outside(drawing, panels[-2:], columns=len(names) + 1)
    save(drawing, path)


def _shown(percent: float) -> float:
    """Height of a bar; rounding can bring a cosine above 1."""
    return min(max(percent, 0.0), MOST_PERCENT) if math.isfinite(percent) else MOST_PERCENT


def run_demo(
    source: CheckpointLayers | RandomLayers,
    layers: list[int],
    tokens: list[int],
    device: torch.device,
    console: Console,
    backend: str | None = None,
) -> Row:
    """The whole document: environment, ceilings, a row for each layer, T and format.

    On a CPU nothing is timed.
    """
    rows: list[Row] = []
    timed = is_timed(device)
    checks = len(tokens) * len(ACTIVATION_FORMATS)
    which = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
    console.print(
        f"{checks} checks: {len(tokens)} token count{'s' * (len(tokens) > 1)} × "
        f"{len(ACTIVATION_FORMATS)} "
        f"formats, each on {which}{source.first_step}",
        markup=False,
        highlight=False,
    )
    ceilings = Ceilings.measure(device, ACTIVATION_FORMATS) if timed else None
    total = (sum(tokens) + CASE_OVERHEAD * len(tokens)) * len(ACTIVATION_FORMATS) * len(layers)
    done = 0
    with progress(console, "demo") as advance:
        for case in source.cases(layers, max(tokens), device):
            for num_tokens in tokens:
                for name in ACTIVATION_FORMATS:
                    advance(
                        done, total, f"layer {case.layer.layer} T={num_tokens} {FORMAT_NAMES[name]}"
                    )
                    rows.append(run_case(case, num_tokens, name, ceilings, backend))
                    done += num_tokens + CASE_OVERHEAD
    summary = summarise(rows)
    return {
        "kind": "demo",
        "environment": environment(device),
        "checkpoint": source.checkpoint and str(source.checkpoint),
        "layers": layers,
        "timed": timed,
        "oracle": source.oracle,
        "ceilings": None if ceilings is None else ceilings.as_row(),
        "rows": rows,
        "summary": summary,
        "passed": all(row["passed"] for row in summary),
    }


def demo(
    checkpoint: Path = typer.Option(
        None,
        help="A gpt-oss checkpoint (MXFP4 safetensors; no other model's): a folder, or the id of "
        "a model on the Hugging Face Hub. Without it a small one with random weights is written "
        "to OUTPUT/checkpoint.",
    ),
    output: Path = typer.Option(
        Path("reports/demo"), help="Folder for report.json and report.png; made if absent."
    ),
    tokens: Tokens = "1,16,128,1024",
    layers: str = typer.Option(
        None,
        help="Layers to run, comma-separated. "
        "Default: the first and the last. Transformers loads "
        "the model up to the last one chosen.",
    ),
    backend: str = typer.Option(None, help="Run this backend instead of the best one."),
    json_to: JsonFile = None,
) -> None:
    """Run a gpt-oss checkpoint's MoE layers here and check every number.

    Text goes through the model. mxpert runs each MoE layer on the hidden states that reach it, with
    bf16, MXFP8 and MXFP4 activations (a16w4, a8w4, a4w4), on the best backend of this machine.
    Every output is compared twice: with the same quantised layer in float64, and with the MoE
    output of Transformers. If Transformers is not installed, the layers are random and a loop over
    experts in torch takes its place. The table shows each value beside its gate; the last line
    counts the checks that passed. A GPU is timed as well; a CPU is not, as its speed says nothing
    about the kernels. Without options it takes about a minute on two CPU cores.

    Examples:
        mxpert demo
        mxpert demo --checkpoint ./gpt-oss-20b --layers 0,12 --tokens 1,64,1024
        mxpert demo --json - | jq .passed
    """
    console, device = make_console(stderr=True), best_device()
    counts = list(dict.fromkeys(parse_numbers(tokens, "demo", "--tokens")))
    check_target(json_to, "demo")
    check_backend(backend, "demo")
    chosen = None if layers is None else parse_layers(layers)
    source = open_layers(checkpoint, output, console)
    document = run_demo(source, chosen or source.default(), counts, device, console, backend)
    results = result_console(json_to)
    show(document, results)
    write_results(output, "report.json", "report.png", document, lambda path: plot(document, path))
    write_report(json_to, document)
    verdict(document, results)
    if not document["passed"]:
        raise typer.Exit(1)
