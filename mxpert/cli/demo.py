"""`mxpert demo`: a gpt-oss checkpoint's MoE layers on real hidden states, every number checked."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .. import problem as text_source
from ..dispatch import override
from ..errors import require
from ..integrations.checkpoints import LoadedMoELayer, load_gpt_oss_layers
from ..integrations.gpt_oss import (
    collect_moe_inputs,
    load_transformers_oracle,
    write_demo_checkpoint,
)
from ..ops.explain import explain
from ..ops.moe import fused_moe
from ..ops.route import route_topk
from ..problem import ACTIVATION_FORMATS
from ..testing.numerics import cosine_similarity, relative_l2
from ..testing.timing import Work
from .measure import (
    MIN_COSINE,
    Ceilings,
    float64_reference,
    gate,
    time_calls,
    timing_columns,
)
from .report import (
    ACTIVATION_NAMES,
    PLOT_HINT,
    Row,
    best_device,
    environment,
    figure,
    format_rate,
    format_time,
    has_matplotlib,
    parse_numbers,
    print_table,
    write_json,
)


@dataclass(frozen=True)
class LayerCase:
    """One layer with what flows into it and what transformers makes of it."""

    layer: LoadedMoELayer
    hidden: torch.Tensor
    oracle: torch.Tensor


def demo_token_ids(checkpoint: Path, count: int, vocab_size: int) -> torch.Tensor:
    """Real text as token ids [1, count]: by the checkpoint's tokenizer, else its UTF-8 bytes.

    The text is this library's own source, so that nothing is downloaded.
    """
    text = inspect.getsource(text_source)
    if (checkpoint / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
        ids = tokenizer(text)["input_ids"]
    else:
        ids = list(text.encode())
    ids = (ids * (count // len(ids) + 1))[:count]
    return torch.tensor([ids]) % vocab_size


def route(case: LayerCase, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights, topk_ids of the first tokens, by the checkpoint's router."""
    layer = case.layer
    logits = torch.nn.functional.linear(case.hidden[:num_tokens].float(),
                                        layer.router_weight.float(), layer.router_bias.float())
    return route_topk(logits, top_k=layer.top_k)


def run_case(case: LayerCase, num_tokens: int, activation_format: str,
             ceilings: Ceilings) -> Row:
    """Run one layer for T tokens in one format; compare with both truths; time it."""
    layer, weights = case.layer, case.layer.weights
    x = case.hidden[:num_tokens].to(torch.bfloat16).contiguous()
    topk_weights, topk_ids = route(case, num_tokens)

    def call() -> torch.Tensor:
        return fused_moe(x, weights, topk_ids, topk_weights, activation=layer.activation,
                         activation_format=activation_format)

    output = call()
    with float64_reference():
        truth = call()
    chosen = explain(fused_moe, x, weights, topk_ids, topk_weights, activation=layer.activation,
                     activation_format=activation_format).resolution
    timing = time_calls([call], weights.device)
    hit = topk_ids.unique().numel()
    work = Work.of_stage("layer", hit_experts=hit, routed_rows=num_tokens * layer.top_k,
                         hidden_size=weights.hidden_size,
                         intermediate_size=weights.intermediate_size)
    error = relative_l2(output, truth)
    cosine = cosine_similarity(output, case.oracle[:num_tokens])
    limit = gate("layer", activation_format)
    passed = error <= limit and cosine >= MIN_COSINE[activation_format]
    return {"layer": layer.layer, "backend": chosen.kernel.backend, "config": str(chosen.config),
            "T": num_tokens, "activation": activation_format, "hit": hit,
            "rel_l2": error, "rel_l2_gate": limit, "cosine": cosine,
            "cosine_gate": MIN_COSINE[activation_format], "passed": passed,
            **timing_columns(timing), **ceilings.judge(work, timing.us, activation_format)}


def load_cases(checkpoint: Path, layers: list[int] | None, num_tokens: int,
               device: torch.device) -> Iterator[LayerCase]:
    """The layers, each with hidden states that reach it and with transformers' MoE output."""
    oracle = load_transformers_oracle(checkpoint)
    token_ids = demo_token_ids(checkpoint, num_tokens, oracle.config.vocab_size)
    for layer in load_gpt_oss_layers(checkpoint, layers, device):
        hidden, expected = collect_moe_inputs(oracle, token_ids, layer.layer)
        yield LayerCase(layer, hidden.to(device), expected.to(device))


def summarise(rows: list[Row]) -> list[Row]:
    """One row for each (T, format): mean time and rates over layers, the worst of every check."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["T"], row["activation"]), []).append(row)
    summary = []
    for group in groups.values():
        mean = {key: sum(row[key] for row in group) / len(group)
                for key in ("us", "tbs", "tflops", "percent_of_roof")}
        summary.append({**group[0], **mean, "layers": [row["layer"] for row in group],
                        "rel_l2": max(row["rel_l2"] for row in group),
                        "cosine": min(row["cosine"] for row in group),
                        "passed": all(row["passed"] for row in group)})
    return summary


def show(document: Row, console: Console) -> None:
    """The one table of the demo, and a line for every gate that failed."""
    rows = document["summary"]
    facts = document["environment"]
    print_table(
        console, f"mxpert demo on {facts['device']} ({facts['arch']}), layers {document['layers']}",
        ("backend", "T", "format", "time", "rate", "rel L2 to float64", "cosine to transformers",
         "check"),
        [(row["backend"], str(row["T"]), ACTIVATION_NAMES[row["activation"]],
          format_time(row["us"]), format_rate(row), f"{row['rel_l2']:.2e}",
          f"{row['cosine']:.6f}", "[green]ok[/]" if row["passed"] else "[red]FAILED[/]")
         for row in rows])
    for row in rows:
        if not row["passed"]:
            console.print(
                f"[red]T={row['T']} {ACTIVATION_NAMES[row['activation']]}[/]: relative L2 "
                f"{row['rel_l2']:.3e} (at most {row['rel_l2_gate']:.1e}), cosine "
                f"{row['cosine']:.6f} (at least {row['cosine_gate']})")


def plot(document: Row, path: Path) -> None:
    """Time and error against T, one line for each format."""
    drawing, (times, errors) = figure(f"mxpert demo on {document['environment']['device']}", 2)
    for name in ACTIVATION_FORMATS:
        rows = [row for row in document["summary"] if row["activation"] == name]
        counts, label = [row["T"] for row in rows], ACTIVATION_NAMES[name]
        times.plot(counts, [row["us"] for row in rows], marker="o", label=label)
        (line,) = errors.plot(counts, [row["rel_l2"] for row in rows], marker="o", label=label)
        errors.axhline(rows[0]["rel_l2_gate"], color=line.get_color(), linestyle=":", alpha=0.6)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer")
    errors.set(xscale="log", yscale="log", xlabel="tokens",
               ylabel="relative L2 to float64 (dotted: gate)")
    for axes in (times, errors):
        axes.grid(which="both", alpha=0.3)
        axes.legend()
    drawing.savefig(path)


def run_demo(checkpoint: Path, layers: list[int] | None, tokens: list[int],
             device: torch.device, console: Console) -> Row:
    """The whole document: environment, ceilings, a row for each layer, T and format."""
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ceilings of this machine", total=None)
        ceilings = Ceilings.measure(device, ACTIVATION_FORMATS)
        progress.update(task, description="transformers' model")
        for case in load_cases(checkpoint, layers, max(tokens), device):
            for num_tokens in tokens:
                for name in ACTIVATION_FORMATS:
                    progress.update(task, description=f"layer {case.layer.layer} T={num_tokens} "
                                                      f"{ACTIVATION_NAMES[name]}")
                    rows.append(run_case(case, num_tokens, name, ceilings))
    summary = summarise(rows)
    return {"kind": "demo", "environment": environment(device), "checkpoint": str(checkpoint),
            "layers": sorted({row["layer"] for row in rows}), "ceilings": ceilings.as_row(),
            "rows": rows, "summary": summary, "passed": all(row["passed"] for row in summary)}


def demo(
    checkpoint: Path = typer.Option(None, help="A gpt-oss checkpoint (MXFP4 safetensors). Without "
                                    "it a small one is written through transformers."),
    output: Path = typer.Option(Path("reports/demo"), help="Folder for report.json, report.png."),
    tokens: str = typer.Option("1,16,128,1024", help="Token counts, comma-separated."),
    layers: str = typer.Option(None, help="Layers to run, comma-separated. Default: all."),
    backend: str = typer.Option(None, help="Pin a backend instead of the best one."),
    json_to: str = typer.Option(None, "--json", help="Also print the report as JSON: '-'."),
) -> None:
    """Run a gpt-oss checkpoint's MoE layers here and check every number.

    Real tokens go through the model; what reaches each MoE layer is run by mxpert with bf16, MXFP8
    and MXFP4 activations (a16w4, a8w4, a4w4) on the best backend of this machine. Every output is
    compared with the same quantised layer in float64, and with transformers' own MoE output.
    The exit code is 1 if a comparison fails.

    Examples:

        mxpert demo

        mxpert demo --checkpoint ./gpt-oss-20b --layers 0,12 --tokens 1,64,1024
    """
    console, device = Console(stderr=True), best_device()
    counts = parse_numbers(tokens, "demo", "--tokens")
    chosen = None if layers is None else [int(part) for part in layers.split(",")]
    require(json_to in (None, "-"), "demo", "--json", need="'-' for standard output", got=json_to,
            remedy="report.json is always written to --output")
    if checkpoint is None:
        checkpoint = output / "checkpoint"
        if not (checkpoint / "config.json").is_file():
            write_demo_checkpoint(checkpoint)
            console.print(f"wrote {checkpoint}")
    with override(backend=backend) if backend else contextlib.nullcontext():
        document = run_demo(checkpoint, chosen, counts, device, console)
    show(document, console if json_to else Console())
    write_json(output / "report.json", document)
    if has_matplotlib():
        plot(document, output / "report.png")
    else:
        console.print(PLOT_HINT)
    if json_to:
        typer.echo(json.dumps(document))
    if not document["passed"]:
        raise typer.Exit(1)
