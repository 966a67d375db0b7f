"""`mxpert bench`: named models against the ceilings of this machine, correctness gate first."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from ..problem import ACTIVATION_FORMATS, MoEOptions
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
    RunWeights,
    check_gate,
    float64_reference,
    intermediate_sizes,
    time_calls,
    timing_columns,
)
from .report import (
    ACTIVATION_NAMES,
    FORMATS_HELP,
    PLOT_HINT,
    Row,
    best_device,
    check_backend,
    environment,
    format_rate,
    format_time,
    has_matplotlib,
    make_console,
    open_folder,
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
    """One routing of T tokens, and the weights and kernel that serve it."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    plan: RoutingPlan
    weights: MoEWeights
    resolution: Resolution


@dataclass(frozen=True)
class Request:
    """What the command line asked for. backend: pinned for the op under test, or None."""

    models: list[Model]
    tokens: list[int]
    formats: list[str]
    stages: list[str]
    routing: str
    backend: str | None


def random_inputs(model: Model, weights: RunWeights, num_tokens: int, routing: str, seed: int,
                  options: MoEOptions, backend: str | None) -> Inputs:
    """Tokens and a routing; the plan has the padding unit that the layer itself would choose."""
    shape, device = model.shape, weights.plain.device
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden_size, device=device, generator=generator)
    x = x.to(torch.bfloat16)
    topk_weights, topk_ids = random_routing(num_tokens, shape.num_experts, shape.top_k,
                                            generator=generator, routing=routing)
    chosen, resolution = weights.resolve(lambda each: explain(
        fused_moe, x, each, topk_weights, topk_ids, activation=options.activation,
        activation_format=options.activation_format), backend)
    plan = make_routing_plan(topk_weights, topk_ids, num_experts=shape.num_experts,
                             routing_block_m=resolution.config.routing_block_m)
    return Inputs(x, topk_weights, topk_ids, plan, chosen, resolution)


def run_stage(stage: str, weights: MoEWeights, inputs: Inputs, h: torch.Tensor | MXTensor,
              options: MoEOptions) -> Any:
    """One call of the op under test; `h` is what stage 2 starts from."""
    match stage:
        case "gate_up":
            return moe_gate_up(inputs.x, weights, inputs.plan, activation=options.activation,
                               activation_format=options.activation_format)
        case "down":
            return moe_down(h, weights, inputs.plan, activation_format=options.activation_format)
    return fused_moe(inputs.x, weights, inputs.topk_weights, inputs.topk_ids,
                     activation=options.activation, activation_format=options.activation_format)


def plain_rows(stage: str, output: Any, plan: RoutingPlan) -> torch.Tensor:
    """Values of an output without padding rows, which are undefined."""
    rows = dequantize(output) if isinstance(output, MXTensor) else output
    if stage != "gate_up":
        return rows
    return rows[(plan.sorted_token_ids & TOKEN_MASK) < plan.num_tokens]


def bench_case(model: Model, weights: RunWeights, num_tokens: int, options: MoEOptions,
               request: Request, ceilings: Ceilings) -> Iterator[Row]:
    """Rows of one (model, T, format): each stage gated against float64, then timed cold."""
    device, shape, name = weights.plain.device, model.shape, options.activation_format
    rotations = max(1, min(8, 64 // num_tokens)) if device.type == "cuda" else 1
    inputs = [random_inputs(model, weights, num_tokens, request.routing, seed, options,
                            request.backend) for seed in range(rotations)]
    first = inputs[0]
    hit = sum(each.topk_ids.unique().numel() for each in inputs) / rotations
    with float64_reference():  # accumulates in float64, rounds where kernels round
        rows = [run_stage("gate_up", weights.plain, each, each.x, options) for each in inputs]
        truths = {stage: plain_rows(stage, run_stage(stage, weights.plain, first, rows[0], options),
                                    first.plan) for stage in request.stages}
    for stage in request.stages:
        calls = [functools.partial(run_stage, stage, each.weights, each, h, options)
                 for each, h in zip(inputs, rows, strict=True)]
        with override(backend=request.backend):
            error = relative_l2(plain_rows(stage, calls[0](), first.plan), truths[stage])
            check_gate(f"{model.name} T={num_tokens} {name} {stage}", error, stage, name,
                       intermediate_sizes(num_tokens, shape.top_k, shape.intermediate_size))
            timing = time_calls(calls, device)
        work = Work.of_stage(stage, hit_experts=hit, routed_rows=num_tokens * shape.top_k,
                             hidden_size=shape.hidden_size,
                             intermediate_size=shape.intermediate_size)
        yield {"model": model.name, "E": shape.num_experts, "k": shape.top_k,
               "H": shape.hidden_size, "F": shape.intermediate_size, "T": num_tokens, "hit": hit,
               "routing": request.routing, "impl": f"mxpert/{first.resolution.kernel.backend}",
               "config": str(first.resolution.config), "activation": name, "stage": stage,
               "rel_l2": error, **timing_columns(timing),
               **ceilings.judge(work, timing.us, name)}


def run_bench(request: Request, device: torch.device, console: Console) -> Row:
    """The whole document: environment, ceilings, rows."""
    rows: list[Row] = []
    cases = [(tokens, name) for tokens in request.tokens for name in request.formats]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ceilings", total=1 + len(request.models) * len(cases))
        ceilings = Ceilings.measure(device, request.formats)
        progress.advance(task)
        for model in request.models:
            progress.update(task, description=f"{model.name}: weights")
            weights = RunWeights.of(random_moe_problem(model.shape, 1, device=device).weights,
                                    device)
            for num_tokens, name in cases:
                progress.update(task, description=f"{model.name} T={num_tokens} {name}")
                options = MoEOptions(model.shape.activation, name)
                rows += bench_case(model, weights, num_tokens, options, request, ceilings)
                progress.advance(task)
            del weights  # before the next model's are made
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
        ("model", "T", "hit", "format", "stage", "time", "10–90 %", "rate", "of roof", "rel L2"),
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
    formats: str = typer.Option("bf16,mxfp8,mxfp4", "--format", help=FORMATS_HELP),
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
    prove that the command works, not how fast the library is. "10–90 %" is the width between those
    percentiles of the time, as a share of the median.

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
    check_backend(backend, "bench")
    path = json_file or output / "bench.json"
    require(not path.is_dir(), "bench", "--json", need="a file", got=str(path))
    open_folder(path.parent, "bench", "--json" if json_file else "--output")
    models = _chosen_models(model, scale or (1 if device.type == "cuda" else CPU_SCALE))
    if device.type == "cpu":
        console.print(f"no GPU: {backend or 'reference'} backend, models scaled down by "
                      f"{scale or CPU_SCALE}")
    document = run_bench(Request(models, counts, names, stages, routing, backend), device, console)
    show(document, make_console())
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
