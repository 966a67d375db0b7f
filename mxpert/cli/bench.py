"""`mxpert bench`: named models against the ceilings of this machine, correctness gate first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from ..dispatch import Resolution, override
from ..errors import require
from ..formats.spec import MX_BLOCK_SIZE
from ..formats.tensor import MXTensor
from ..ops.explain import explain
from ..ops.moe import fused_moe, moe_down, moe_gate_up
from ..ops.quantize import dequantize
from ..ops.route import make_routing_plan
from ..problem import ACTIVATION_FORMATS, Activation
from ..routing import TOKEN_MASK, RoutingPlan
from ..testing.numerics import relative_l2
from ..testing.problems import (
    MODEL_SHAPES,
    MoEShape,
    Routing,
    model_shape,
    random_moe_problem,
    random_routing,
    scaled_shape,
)
from ..testing.timing import Work
from ..weights import MoEWeights
from .measure import (
    Ceilings,
    check_gate,
    float64_reference,
    time_calls,
    timing_columns,
)
from .report import (
    ACTIVATION_NAMES,
    PLOT_HINT,
    Row,
    best_device,
    environment,
    format_rate,
    format_time,
    has_matplotlib,
    make_console,
    parse_choices,
    parse_numbers,
    plot_roofline,
    print_table,
    write_json,
)

STAGES = ("gate_up", "down", "layer")
CPU_SCALE = 8


@dataclass(frozen=True)
class Model:
    """A benchmark problem: a named layer, after scaling down."""

    name: str
    shape: MoEShape

    @classmethod
    def named(cls, name: str, scale: int) -> Model:
        """A named model with E, H and F divided by `scale`; widths stay multiples of 32."""
        shape = model_shape(name)
        if scale == 1:
            return cls(name, shape)

        def width(size: int) -> int:
            return max(MX_BLOCK_SIZE, round(size / scale / MX_BLOCK_SIZE) * MX_BLOCK_SIZE)

        return cls(f"{name}/{scale}", scaled_shape(
            shape, hidden_size=width(shape.hidden_size),
            intermediate_size=width(shape.intermediate_size),
            num_experts=max(shape.top_k, shape.num_experts // scale)))


@dataclass(frozen=True)
class Inputs:
    """One routing of T tokens."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    plan: RoutingPlan
    resolution: Resolution


def random_inputs(model: Model, weights: MoEWeights, num_tokens: int, routing: str, seed: int,
                  activation_format: str) -> Inputs:
    """Tokens and a routing; the plan has the padding unit that the layer itself would choose."""
    shape, generator = model.shape, torch.Generator(weights.device).manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden_size, device=weights.device, generator=generator)
    x = x.to(torch.bfloat16)
    topk_weights, topk_ids = random_routing(num_tokens, shape.num_experts, shape.top_k,
                                            generator=generator, routing=routing)
    resolution = explain(fused_moe, x, weights, topk_ids, topk_weights,
                         activation=shape.activation,
                         activation_format=activation_format).resolution
    plan = make_routing_plan(topk_ids, topk_weights, num_experts=shape.num_experts,
                             routing_block_m=resolution.config.routing_block_m)
    return Inputs(x, topk_ids, topk_weights, plan, resolution)


def stage_call(stage: str, weights: MoEWeights, inputs: Inputs, activation: Activation,
               activation_format: str) -> Callable[[], Any]:
    """The call to time for one stage; stage 2 gets the intermediate of the float64 reference, so
    that its error is its own."""
    if stage == "layer":
        return lambda: fused_moe(inputs.x, weights, inputs.topk_ids, inputs.topk_weights,
                                 activation=activation, activation_format=activation_format)
    if stage == "gate_up":
        return lambda: moe_gate_up(inputs.x, weights, inputs.plan, activation=activation,
                                   activation_format=activation_format)
    with float64_reference():
        h = moe_gate_up(inputs.x, weights, inputs.plan, activation=activation,
                        activation_format=activation_format)
    return lambda: moe_down(h, weights, inputs.plan)


def plain_rows(stage: str, output: Any, plan: RoutingPlan) -> torch.Tensor:
    """Values of an output without padding rows, which are undefined."""
    rows = dequantize(output) if isinstance(output, MXTensor) else output
    if stage != "gate_up":
        return rows
    return rows[(plan.sorted_token_ids & TOKEN_MASK) < plan.num_tokens]


def bench_case(model: Model, weights: MoEWeights, num_tokens: int, activation_format: str,
               routing: str, stages: list[str], ceilings: Ceilings) -> Iterator[Row]:
    """Rows of one (model, T, format): each stage gated against float64, then timed cold."""
    device, shape = weights.device, model.shape
    rotations = max(1, min(8, 64 // num_tokens)) if device.type == "cuda" else 1
    inputs = [random_inputs(model, weights, num_tokens, routing, seed, activation_format)
              for seed in range(rotations)]
    chosen = inputs[0].resolution
    hit = sum(each.topk_ids.unique().numel() for each in inputs) / rotations
    for stage in stages:
        calls = [stage_call(stage, weights, each, shape.activation, activation_format)
                 for each in inputs]
        with float64_reference():  # accumulates in float64, rounds where kernels round
            truth = plain_rows(stage, calls[0](), inputs[0].plan)
        error = relative_l2(plain_rows(stage, calls[0](), inputs[0].plan), truth)
        check_gate(f"{model.name} T={num_tokens} {activation_format} {stage}", error, stage,
                   activation_format)
        timing = time_calls(calls, device)
        work = Work.of_stage(stage, hit_experts=hit, routed_rows=num_tokens * shape.top_k,
                             hidden_size=shape.hidden_size,
                             intermediate_size=shape.intermediate_size)
        yield {"model": model.name, "E": shape.num_experts, "k": shape.top_k,
               "H": shape.hidden_size, "F": shape.intermediate_size, "T": num_tokens, "hit": hit,
               "routing": routing, "impl": f"mxpert/{chosen.kernel.backend}",
               "config": str(chosen.config), "activation": activation_format,
               "stage": stage, "rel_l2": error, **timing_columns(timing),
               **ceilings.judge(work, timing.us, activation_format)}


def run_bench(models: list[Model], tokens: list[int], formats: list[str], stages: list[str],
              routing: str, device: torch.device, console: Console) -> Row:
    """The whole document: environment, ceilings, rows."""
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ceilings", total=1 + len(models) * len(tokens) * len(formats))
        ceilings = Ceilings.measure(device, formats)
        progress.advance(task)
        for model in models:
            progress.update(task, description=f"{model.name}: weights")
            weights = random_moe_problem(model.shape, 1, device=device).weights
            weights = weights.prepare(device=device)
            for num_tokens in tokens:
                for name in formats:
                    progress.update(task, description=f"{model.name} T={num_tokens} {name}")
                    rows += bench_case(model, weights, num_tokens, name, routing, stages, ceilings)
                    progress.advance(task)
            del weights
    return {"kind": "bench", "environment": environment(device), "ceilings": ceilings.as_row(),
            "rows": rows}


def show(document: Row, console: Console) -> None:
    """The table of a bench document."""
    limits = document["ceilings"]
    console.print(f"{document['environment']['device']}: reads {limits['read_tbs']:.3g} TB/s, " +
                  ", ".join(f"{name} GEMM {rate:.3g} TFLOP/s"
                            for name, rate in limits["matmul_tflops"].items()))
    print_table(
        console, "mxpert bench",
        ("model", "T", "hit", "format", "stage", "time", "± 10–90 %", "rate", "of roof", "rel L2"),
        [(row["model"], str(row["T"]), f"{row['hit']:.0f}", ACTIVATION_NAMES[row["activation"]],
          row["stage"], format_time(row["us"]),
          f"{100 * (row['high_us'] - row['low_us']) / row['us']:.0f} %", format_rate(row),
          f"{row['percent_of_roof']:.0f} %", f"{row['rel_l2']:.1e}") for row in document["rows"]])


def _chosen_models(names: list[str] | None, scale: int) -> list[Model]:
    names = names or ["gpt-oss-120b"]
    for name in names:
        require(name in MODEL_SHAPES, "bench", "--model", need=f"one of {', '.join(MODEL_SHAPES)}",
                got=repr(name))
    return [Model.named(name, scale) for name in names]


def bench(
    model: list[str] = typer.Option(None, help="A named model; repeat for several. "
                                    "Default: gpt-oss-120b."),
    tokens: str = typer.Option("1,16,64,128,256,1024", help="Token counts, comma-separated."),
    formats: str = typer.Option("bf16,mxfp8,mxfp4", "--format", help="Activation formats."),
    stage: str = typer.Option("gate_up,down,layer", help="Stages to time."),
    routing: str = typer.Option("uniform", help="uniform, zipf, half or one_expert."),
    backend: str = typer.Option(None, help="Pin a backend instead of the best one."),
    scale: int = typer.Option(0, help="Divide E, H and F by this. Default: 1 on a GPU, "
                              f"{CPU_SCALE} on a CPU."),
    output: Path = typer.Option(Path("reports/bench"), help="Folder for bench.json, roofline.png."),
    json_file: Path = typer.Option(None, "--json", help="Write the JSON here instead."),
) -> None:
    """Time named models against the ceilings of this machine.

    Each case is compared with the float64 reference on the same quantised operands first; a case
    that is wrong stops the run. Then it is timed with a cold L2 cache: CUDA-graph replays that
    rotate among several routings. Read bandwidth and dense GEMM rate are measured in the same run;
    "of roof" is the time that they allow over the time taken. TB/s counts weight bytes of the
    experts that were hit. A CPU runs the reference backend on a scaled-down model: its figures
    prove that the command works, not how fast the library is.

    Examples:

        mxpert bench --model gpt-oss-120b --tokens 1,64,1024 --format bf16

        mxpert bench --model kimi-k2 --model deepseek-v3 --stage layer --routing zipf
    """
    console, device = make_console(stderr=True), best_device()
    require(scale >= 0, "bench", "--scale", need="a positive number", got=scale)
    routings = [each.value for each in Routing]
    require(routing in routings, "bench", "--routing", need=f"one of {routings}", got=repr(routing))
    counts = parse_numbers(tokens, "bench", "--tokens")
    names = parse_choices(formats, ACTIVATION_FORMATS, "bench", "--format")
    stages = parse_choices(stage, STAGES, "bench", "--stage")
    models = _chosen_models(model, scale or (1 if device.type == "cuda" else CPU_SCALE))
    if device.type == "cpu":
        console.print(f"no GPU: reference backend, models scaled down by {scale or CPU_SCALE}")
    with override(backend=backend):
        document = run_bench(models, counts, names, stages, routing, device, console)
    show(document, make_console())
    path = json_file or output / "bench.json"
    write_json(path, document)
    console.print(f"wrote {path}")
    if not has_matplotlib():
        console.print(PLOT_HINT, markup=False)
        return
    limits = document["ceilings"]
    plot = path.with_name("roofline.png") if json_file is None else path.with_suffix(".png")
    plot_roofline(plot, f"mxpert on {document['environment']['device']}", document["rows"],
                  limits["read_tbs"] * 1e12,
                  {name: rate * 1e12 for name, rate in limits["matmul_tflops"].items()})
    console.print(f"wrote {plot}")
