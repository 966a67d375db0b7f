"""`mxpert demo`: a gpt-oss checkpoint's MoE layers on real hidden states, every number checked."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from ..dispatch import override
from ..errors import require
from ..formats.token import FP8_TOKEN, quantize_token_rows
from ..integrations.checkpoints import LoadedMoELayer, load_gpt_oss_layers
from ..integrations.gpt_oss import (
    DEMO_TEXT,
    collect_moe_inputs,
    demo_token_ids,
    load_transformers_oracle,
    write_demo_checkpoint,
)
from ..integrations.safetensors_files import CONFIG_FILE, positive_int, read_json
from ..ops.explain import explain
from ..ops.moe import fused_moe, moe_gate_up
from ..ops.quantize import dequantize, quantize
from ..ops.route import make_routing_plan, route_topk
from ..problem import ACTIVATION_FORMATS
from ..routing import TOKEN_MASK
from ..testing.numerics import cosine, relative_l2
from ..testing.timing import Work
from .measure import (
    Ceilings,
    RunWeights,
    cosine_gate,
    error_gate,
    float64_reference,
    intermediate_sizes,
    time_calls,
    timing_columns,
)
from .report import (
    ACTIVATION_NAMES,
    PLOT_HINT,
    Row,
    best_device,
    check_backend,
    environment,
    figure,
    format_rate,
    format_time,
    has_matplotlib,
    make_console,
    open_folder,
    parse_numbers,
    print_table,
    write_json,
)

Noise = tuple[float, float]


@dataclass(frozen=True)
class LayerCase:
    """One layer with what flows into it and what transformers makes of it."""

    layer: LoadedMoELayer
    weights: RunWeights
    hidden: torch.Tensor
    oracle: torch.Tensor

    def rows(self, num_tokens: int) -> torch.Tensor:
        """The first tokens' hidden states as the layer takes them."""
        return self.hidden[:num_tokens].to(torch.bfloat16).contiguous()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Mute the warnings that optional packages log about their own extensions when imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def text_token_ids(checkpoint: Path, count: int) -> torch.Tensor:
    """Real text as token ids [count]: by the checkpoint's tokenizer, else as bytes."""
    if not (checkpoint / "tokenizer.json").is_file():
        return demo_token_ids(count)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    ids = tokenizer(DEMO_TEXT)["input_ids"]
    return torch.tensor((ids * (count // len(ids) + 1))[:count])


def route(case: LayerCase, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights, topk_ids of the first tokens, by the checkpoint's router."""
    layer = case.layer
    logits = torch.nn.functional.linear(case.hidden[:num_tokens].float(),
                                        layer.router_weight.float(), layer.router_bias.float())
    return route_topk(logits, top_k=layer.top_k)


def quantisation_noise(case: LayerCase, num_tokens: int, activation_format: str) -> Noise:
    """What the format alone costs on this layer's input and intermediate, by the reference."""
    if activation_format == "bf16":
        return 0.0, 0.0
    weights, x = case.weights.plain, case.rows(num_tokens)
    topk_weights, topk_ids = route(case, num_tokens)
    with override(backend="reference"):
        plan = make_routing_plan(topk_weights, topk_ids, num_experts=weights.num_experts,
                                 routing_block_m=16)
        h = moe_gate_up(x, weights, plan, activation=case.layer.activation)
        assert isinstance(h, torch.Tensor)  # for the type checker: bf16 in, bf16 out
        h = h[(plan.sorted_token_ids & TOKEN_MASK) < num_tokens]
        noise_x, noise_h = (relative_l2(quantised(rows, activation_format), rows) ** 2
                            for rows in (x, h))
    return noise_x, noise_h


def quantised(rows: torch.Tensor, activation_format: str) -> torch.Tensor:
    """The rows as a quantised activation format holds them, float32."""
    if activation_format == FP8_TOKEN:
        return quantize_token_rows(rows).dequantize()
    return dequantize(quantize(rows, activation_format))


def run_case(case: LayerCase, num_tokens: int, activation_format: str, ceilings: Ceilings,
             backend: str | None = None) -> Row:
    """Run one layer for T tokens in one format; compare with both truths; time it."""
    layer, x = case.layer, case.rows(num_tokens)
    topk_weights, topk_ids = route(case, num_tokens)
    options: dict[str, Any] = {"activation": layer.activation,
                               "activation_format": activation_format}
    weights, chosen = case.weights.resolve(
        lambda weights: explain(fused_moe, x, weights, topk_weights, topk_ids, **options), backend)

    def call() -> torch.Tensor:
        return fused_moe(x, weights, topk_weights, topk_ids, **options)

    with override(backend=backend):
        output = call()
        timing = time_calls([call], weights.device)
    with float64_reference():
        truth = fused_moe(x, case.weights.plain, topk_weights, topk_ids, **options,
                          out_dtype=torch.float64)
    hit = topk_ids.unique().numel()
    work = Work.of_stage("layer", hit_experts=hit, routed_rows=num_tokens * layer.top_k,
                         hidden_size=weights.hidden_size,
                         intermediate_size=weights.intermediate_size)
    error = relative_l2(output, truth)
    error_limit = error_gate("layer", activation_format, intermediate_sizes(
        num_tokens, layer.top_k, weights.intermediate_size))
    likeness = cosine(output, case.oracle[:num_tokens])
    least = cosine_gate(activation_format,
                        *quantisation_noise(case, num_tokens, activation_format))
    return {"layer": layer.layer, "backend": chosen.kernel.backend, "config": str(chosen.config),
            "T": num_tokens, "activation": activation_format, "hit": hit,
            "rel_l2": error, "rel_l2_gate": error_limit, "cosine": likeness, "cosine_gate": least,
            "passed": error <= error_limit and likeness >= least,
            **timing_columns(timing), **ceilings.judge(work, timing.us, activation_format)}


def load_cases(checkpoint: Path, layers: list[int], num_tokens: int,
               device: torch.device) -> Iterator[LayerCase]:
    """The layers, each with hidden states that reach it and with transformers' MoE output."""
    loaded = load_gpt_oss_layers(checkpoint, layers, device)
    with quiet_imports():
        oracle = load_transformers_oracle(checkpoint, num_layers=max(layers) + 1)
    token_ids = text_token_ids(checkpoint, num_tokens)
    for layer in loaded:
        capture = collect_moe_inputs(oracle, token_ids, layer.layer)
        yield LayerCase(layer, RunWeights.of(layer.weights, device), capture.hidden.to(device),
                        capture.output.to(device))


def chosen_layers(text: str | None, checkpoint: Path) -> list[int]:
    """--layers as numbers; by default the first and the last."""
    if text is None:
        config = read_json(checkpoint / CONFIG_FILE, "demo")
        last = positive_int(config, ["num_hidden_layers"], checkpoint / CONFIG_FILE, "demo") - 1
        return sorted({0, last})
    parts = [part.strip() for part in text.split(",")]
    require(all(part.isascii() and part.isdigit() for part in parts), "demo", "--layers",
            need="layer numbers separated by commas", got=repr(text),
            remedy="for example --layers 0,11")
    return [int(part) for part in parts]


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
                        "cosine_gate": min(row["cosine_gate"] for row in group),
                        "passed": all(row["passed"] for row in group)})
    return summary


def show(document: Row, console: Console) -> None:
    """The one table of the demo, and a line for every gate that failed."""
    rows = document["summary"]
    facts = document["environment"]
    print_table(
        console, f"mxpert demo on {facts['device']} ({facts['arch']}), layers {document['layers']}",
        ("backend", "T", "format", "time/layer", "rate", "rel L2 to float64",
         "cosine to transformers", "check"),
        [(row["backend"], str(row["T"]), ACTIVATION_NAMES[row["activation"]],
          format_time(row["us"]), format_rate(row), f"{row['rel_l2']:.2e}",
          f"{row['cosine']:.6f}", "[green]ok[/]" if row["passed"] else "[red]FAILED[/]")
         for row in rows])
    for row in document["rows"]:
        if not row["passed"]:
            console.print(
                f"[red]layer {row['layer']} T={row['T']} {ACTIVATION_NAMES[row['activation']]}[/]: "
                f"relative L2 "
                f"{row['rel_l2']:.3e} (at most {row['rel_l2_gate']:.1e}), cosine "
                f"{row['cosine']:.6f} (at least {row['cosine_gate']:.4f})")


def plot(document: Row, path: Path) -> None:
    """Time and error against T, one line for each format."""
    drawing, (times, errors) = figure(f"mxpert demo on {document['environment']['device']}", 2)
    for name in ACTIVATION_FORMATS:
        rows = [row for row in document["summary"] if row["activation"] == name]
        counts, label = [row["T"] for row in rows], ACTIVATION_NAMES[name]
        times.plot(counts, [row["us"] for row in rows], marker="o", label=label)
        (line,) = errors.plot(counts, [row["rel_l2"] for row in rows], marker="o", label=label)
        errors.plot(counts, [row["rel_l2_gate"] for row in rows], color=line.get_color(),
                    linestyle=":", alpha=0.6)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer")
    errors.set(xscale="log", yscale="log", xlabel="tokens",
               ylabel="relative L2 to float64 (dotted: gate)")
    for axes in (times, errors):
        axes.grid(which="both", alpha=0.3)
        axes.legend()
    drawing.savefig(path)


def run_demo(checkpoint: Path, layers: list[int], tokens: list[int],
             device: torch.device, console: Console, backend: str | None = None) -> Row:
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
                    rows.append(run_case(case, num_tokens, name, ceilings, backend))
    summary = summarise(rows)
    return {"kind": "demo", "environment": environment(device), "checkpoint": str(checkpoint),
            "layers": sorted({row["layer"] for row in rows}), "ceilings": ceilings.as_row(),
            "rows": rows, "summary": summary, "passed": all(row["passed"] for row in summary)}


def demo(
    checkpoint: Path = typer.Option(None, help="A gpt-oss checkpoint (MXFP4 safetensors). Without "
                                    "it a small one is written through transformers."),
    output: Path = typer.Option(Path("reports/demo"), help="Folder for report.json, report.png."),
    tokens: str = typer.Option("1,16,128,1024", help="Token counts, comma-separated."),
    layers: str = typer.Option(None, help="Layers to run, comma-separated. "
                               "Default: the first and the last; transformers loads "
                               "the model up to the last one chosen."),
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
    console, device = make_console(stderr=True), best_device()
    counts = parse_numbers(tokens, "demo", "--tokens")
    require(json_to in (None, "-"), "demo", "--json", need="'-' for standard output", got=json_to,
            remedy="report.json is always written to --output")
    check_backend(backend, "demo")
    open_folder(output, "demo", "--output")
    if checkpoint is None:
        checkpoint = output / "checkpoint"
        if not (checkpoint / CONFIG_FILE).is_file():
            with quiet_imports():
                write_demo_checkpoint(checkpoint)
            console.print(f"wrote {checkpoint}")
    document = run_demo(checkpoint, chosen_layers(layers, checkpoint), counts, device, console,
                        backend)
    show(document, console if json_to else make_console())
    write_json(output / "report.json", document)
    console.print(f"wrote {output / 'report.json'}")
    if has_matplotlib():
        plot(document, output / "report.png")
        console.print(f"wrote {output / 'report.png'}")
    else:
        console.print(PLOT_HINT, markup=False)
    if json_to:
        typer.echo(json.dumps(document))
    if not document["passed"]:
        raise typer.Exit(1)
