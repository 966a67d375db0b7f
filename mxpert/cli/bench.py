"""`mxpert bench`: named models against the ceilings of this machine, correctness gate first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..core.files import short
from ..core.problem import MoEOptions, OwnFormat
from ..core.registry import Resolution, override
from ..errors import require
from ..explain import explain
from ..formats.spec import MX_BLOCK_SIZE
from ..formats.tensor import MXTensor
from ..formats.weight_tensor import WeightFormatName
from ..moe.op import fused_moe, moe_down, moe_gate_up
from ..moe.weights import MoEWeights
from ..quantize.op import dequantize
from ..routing.op import make_routing_plan
from ..routing.plan import TOKEN_MASK, RoutingPlan
from ..testing.numerics import relative_l2
from ..testing.problems import (
    MODEL_SHAPES,
    MoEShape,
    Routing,
    model_shape,
    random_tokens,
    scaled_shape,
)
from ..testing.timing import Work
from .expert_parallel.plan import PlanRequest, bench_plan
from .expert_parallel.ranks import RanksRequest, bench_ranks
from .measure import (
    Ceilings,
    RunWeights,
    check_gate,
    float64_reference,
    intermediate_sizes,
    is_timed,
    refusing_wrong_results,
    rotations,
    time_calls,
    timing_columns,
    weights_name,
)
from .options import (
    DEFAULT_FORMATS,
    FORMAT_NAMES,
    Formats,
    JsonFile,
    KeepFp8,
    LinkName,
    ListModels,
    Plan,
    Ranks,
    RanksToStart,
    Tokens,
    WeightFormat,
    check_backend,
    check_copies,
    check_model,
    check_target,
    check_weight_format,
    open_folder,
    parse_choices,
    parse_formats,
    parse_numbers,
)
from .plots import plot_roofline
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

STAGES = ("gate_up", "down", "layer")
NOT_TIMED = (
    "Every result is right; nothing was timed. Without a GPU the reference backend answers, on a "
    "scaled-down model, and its speed says nothing about the kernels. `mxpert bench --plan` "
    "predicts layers from measurements of an H200; on a machine with a GPU, this command measures."
)
CPU_SCALE, MAX_SCALE = 8, 1 << 20


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

        return cls(
            f"{name}/{scale}",
            scaled_shape(
                shape,
                hidden_size=width(shape.hidden_size),
                intermediate_size=width(shape.intermediate_size),
                num_experts=max(shape.top_k, shape.num_experts // scale),
            ),
        )


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
    """Options of the command line. backend: pinned for the op under test, or None."""

    models: list[Model]
    tokens: list[int]
    formats: list[OwnFormat]
    stages: list[str]
    routing: str
    backend: str | None
    weight_format: WeightFormatName = "mxfp4"
    keep_fp8: bool = False


def random_inputs(
    model: Model,
    weights: RunWeights,
    num_tokens: int,
    routing: str,
    seed: int,
    options: MoEOptions,
    backend: str | None,
) -> Inputs:
    """Tokens and a routing; the plan has the padding unit that the layer itself would choose."""
    shape, device = model.shape, weights.plain.device
    generator = torch.Generator(device).manual_seed(seed)
    x, topk_weights, topk_ids = random_tokens(shape, num_tokens, generator, routing)
    chosen, resolution = weights.resolve(
        lambda each: explain(
            fused_moe,
            x,
            each,
            topk_weights,
            topk_ids,
            activation=options.activation,
            activation_format=options.activation_format,
        ),
        backend,
    )
    plan = make_routing_plan(
        topk_weights,
        topk_ids,
        num_experts=shape.num_experts,
        routing_block_m=resolution.config.routing_block_m,
    )
    return Inputs(x, topk_weights, topk_ids, plan, chosen, resolution)


def run_stage(
    stage: str, weights: MoEWeights, inputs: Inputs, h: torch.Tensor | MXTensor, options: MoEOptions
) -> Any:
    """One call of the op under test; `h` is what stage 2 starts from."""
    match stage:
        case "gate_up":
            return moe_gate_up(
                inputs.x,
                weights,
                inputs.plan,
                activation=options.activation,
                activation_format=options.activation_format,
            )
        case "down":
            return moe_down(h, weights, inputs.plan, activation_format=options.activation_format)
    return fused_moe(
        inputs.x,
        weights,
        inputs.topk_weights,
        inputs.topk_ids,
        activation=options.activation,
        activation_format=options.activation_format,
    )


def plain_rows(stage: str, output: torch.Tensor | MXTensor, plan: RoutingPlan) -> torch.Tensor:
    """Values of an output without padding rows, which are undefined."""
    rows = dequantize(output) if isinstance(output, MXTensor) else output
    if stage != "gate_up":
        return rows
    return rows[(plan.sorted_token_ids & TOKEN_MASK) < plan.num_tokens]


def float64_results(
    weights: MoEWeights, inputs: Sequence[Inputs], stages: Sequence[str], options: MoEOptions
) -> tuple[list[torch.Tensor | MXTensor], dict[str, torch.Tensor]]:
    """What stage 2 starts from for each of `inputs`, and each stage's values for the first."""
    first = inputs[0]
    with float64_reference():  # accumulates in float64, rounds where kernels round
        rows = [run_stage("gate_up", weights, each, each.x, options) for each in inputs]
        truths = {
            stage: plain_rows(stage, run_stage(stage, weights, first, rows[0], options), first.plan)
            for stage in stages
        }
    return rows, truths


def bench_case(
    model: Model,
    weights: RunWeights,
    num_tokens: int,
    options: MoEOptions,
    request: Request,
    ceilings: Ceilings | None,
) -> Iterator[Row]:
    """Rows of one (model, T, format): each stage gated against float64, then timed cold.

    Without ceilings nothing is timed.
    """
    device, shape, name = weights.plain.device, model.shape, options.activation_format
    turns = rotations(num_tokens) if device.type == "cuda" else 1
    inputs = [
        random_inputs(model, weights, num_tokens, request.routing, seed, options, request.backend)
        for seed in range(turns)
    ]
    first = inputs[0]
    hit = sum(each.topk_ids.unique().numel() for each in inputs) / turns
    rows, truths = float64_results(weights.plain, inputs, request.stages, options)
    for stage in request.stages:
        calls = [
            functools.partial(run_stage, stage, each.weights, each, h, options)
            for each, h in zip(inputs, rows, strict=True)
        ]
        with override(backend=request.backend):
            error = relative_l2(plain_rows(stage, calls[0](), first.plan), truths[stage])
            check_gate(
                f"{model.name} T={num_tokens} {name} {stage}",
                error,
                stage,
                name,
                intermediate_sizes(num_tokens, shape.top_k, shape.intermediate_size),
            )
            timing = None if ceilings is None else time_calls(calls, device)
        work = Work.of_stage(
            stage,
            hit_experts=hit,
            routed_rows=num_tokens * shape.top_k,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            bytes_per_weight=weights.plain.nbytes / weights.plain.numel(),
        )
        row: Row = {
            "model": model.name,
            "E": shape.num_experts,
            "k": shape.top_k,
            "H": shape.hidden_size,
            "F": shape.intermediate_size,
            "T": num_tokens,
            "hit": hit,
            "routing": request.routing,
            "impl": f"mxpert/{first.resolution.kernel.backend}",
            "config": str(first.resolution.config),
            "activation": name,
            "weights": weights_name(first.weights),
            "stage": stage,
            "rel_l2": error,
        }
        if ceilings is not None and timing is not None:
            row |= timing_columns(timing) | ceilings.judge(work, timing.us, name)
        yield row


def run_bench(request: Request, device: torch.device, console: Console) -> Row:
    """The whole document: environment, ceilings, rows. On a CPU nothing is timed."""
    rows: list[Row] = []
    cases = [(tokens, name) for tokens in request.tokens for name in request.formats]
    total, done = len(request.models) * len(cases), 0
    with progress(console, "bench") as advance:
        ceilings = None
        if is_timed(device):
            advance(done, total, "measuring the ceilings")
            ceilings = Ceilings.measure(device, request.formats)
        for model in request.models:
            advance(done, total, f"{model.name}: making weights")
            weights = RunWeights.random(
                model.shape, device, request.weight_format, keep_fp8=request.keep_fp8
            )
            for num_tokens, name in cases:
                advance(done, total, f"{model.name} T={num_tokens} {FORMAT_NAMES[name]}")
                options = MoEOptions(model.shape.activation, name)
                rows += bench_case(model, weights, num_tokens, options, request, ceilings)
                done += 1
            del weights  # before the next model's are made
    return {
        "kind": "bench",
        "environment": environment(device),
        "timed": ceilings is not None,
        "ceilings": None if ceilings is None else ceilings.as_row(),
        "rows": rows,
    }


def show(document: Row, console: Console) -> None:
    """The table of a bench document."""
    timed = document["timed"]
    if timed:
        limits = document["ceilings"]
        rates = ", ".join(
            f"{FORMAT_NAMES[name]} {rate:.3g} TFLOP/s"
            for name, rate in limits["matmul_tflops"].items()
        )
        device = document["environment"]["device"]
        say(console, f"{device}: reads {limits['read_tbs']:.3g} TB/s; GEMM {rates}")
    columns: list[str | Column] = ["model", "T", Column("hit", 3), "format", "stage"]
    if timed:
        columns += ["time", Column("10–90 %", 2), "rate", Column("of roof", 1)]
    print_table(
        console,
        "mxpert bench",
        [*columns, Column("rel. L2", 4 * timed)],
        [_cells(row, timed) for row in document["rows"]],
    )
    if not timed:
        say(console, NOT_TIMED)


def _format_of(row: Row) -> str:
    """The short name of a row's formats; of other weights than MXFP4 both names."""
    if row["weights"] == "mxfp4":
        return FORMAT_NAMES[row["activation"]]
    return f"{row['activation']} × {row['weights']}"


def _cells(row: Row, timed: bool) -> list[str]:
    times = (
        [
            format_time(row["us"]),
            f"{100 * (row['high_us'] - row['low_us']) / row['us']:.0f} %",
            format_rate(row),
            f"{row['percent_of_roof']:.0f} %",
        ]
        if timed
        else []
    )
    return [
        row["model"],
        str(row["T"]),
        f"{row['hit']:.0f}",
        _format_of(row),
        row["stage"],
        *times,
        f"{row['rel_l2']:.1e}",
    ]


Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A named model; repeat for several. Default: "
        f"gpt-oss-120b. Known: {', '.join(MODEL_SHAPES)}; --list-models says what each is.",
    ),
]
Scale = Annotated[
    int,
    typer.Option(
        show_default=False,
        help=f"Divide E, H and F by this. Default: 1 on a GPU or with --plan, {CPU_SCALE} on a "
        "CPU.",
    ),
]
Output = Annotated[
    Path, typer.Option(help="Folder for the report and the plot (PNG); made if absent.")
]


def bench(
    model: Models = None,
    tokens: Tokens = "1,16,64,128,256,1024",
    formats: Formats = DEFAULT_FORMATS,
    stage: str = typer.Option(",".join(STAGES), help="Stages to time, comma-separated."),
    routing: str = typer.Option("uniform", help="uniform, zipf, half or one_expert."),
    backend: str = typer.Option(None, help="Time this backend instead of the best one."),
    weight_format: WeightFormat = "mxfp4",
    keep_fp8: KeepFp8 = False,
    scale: Scale = 0,
    expert_parallel: RanksToStart = None,
    plan: Plan = False,
    ranks: Ranks = "8..72",
    link: LinkName = "nvlink5",
    output: Output = Path("reports/bench"),
    json_to: JsonFile = None,
    list_models: ListModels = False,
) -> None:
    """Time named models against the ceilings of this machine.

    Each case is first compared with the float64 reference on the same quantised operands; a wrong
    result ends the run with exit code 1. Then the case is timed with a cold L2 cache, in CUDA-graph
    replays that rotate among several routings. Read bandwidth and dense GEMM rate are measured in
    the same run. "of roof" is the time that they allow, as a share of the time taken. TB/s counts
    the weight bytes of the experts that were hit. "10–90 %" is the width between these percentiles
    of the time, as a share of the median.

    On a CPU the reference backend is checked on a scaled-down model, and nothing is timed: its
    speed says nothing about the kernels.

    With --expert-parallel N the experts of a layer lie on N GPUs (on a CPU: in N processes, with
    gloo). Results are compared with all experts on one rank; then dispatch, local layer, combine
    and the whole are timed, beside all-gather and reduce-scatter. --tokens are those of one rank.

    With --plan nothing is measured: the time of a layer whose experts lie on several GPUs follows
    from layers measured on one H200 and a stated link model. --tokens are those of one GPU.

    Examples:
        mxpert bench --model gpt-oss-120b --tokens 1,64,1024 --format a16w4
        mxpert bench --model kimi-k2 --model deepseek-v3 --stage layer --routing zipf
        mxpert bench --model qwen3-235b --weight-format int4_g128 --tokens 1,64
        mxpert bench --keep-fp8 --tokens 8192 --format a8w4
        mxpert bench --tokens 1 --json - | jq '.rows[].us'
        mxpert bench --expert-parallel 2 --model gpt-oss-120b --tokens 16,1024 --format a8w4
        mxpert bench --plan --model deepseek-v3 --ranks 8..72 --link nvlink5 --format a8w4
    """
    device = best_device()
    require(0 <= scale <= MAX_SCALE, "bench", "--scale", need=f"1 to {MAX_SCALE}", got=scale)
    routings = [each.value for each in Routing]
    require(
        routing in routings, "bench", "--routing", need=f"one of {routings}", got=short(routing)
    )
    counts = parse_numbers(tokens, "bench", "--tokens")
    names = parse_formats(formats, "bench", "--format")
    stages = parse_choices(stage, STAGES, "bench", "--stage")
    check_backend(backend, "bench")
    check_target(json_to, "bench")
    scale = scale or (1 if plan or device.type == "cuda" else CPU_SCALE)
    models = [Model.named(check_model(name, "bench"), scale) for name in model or ["gpt-oss-120b"]]
    held = check_weight_format(weight_format, "bench")
    check_copies(keep_fp8, names, held, backend, "bench")
    request = Request(models, counts, names, stages, routing, backend, held, keep_fp8)
    if plan or expert_parallel is not None:
        refuse_unused(plan, expert_parallel, request)
    shapes = {each.name: each.shape for each in models}
    if plan:
        asked = PlanRequest(shapes, counts, names, routing, ranks, link)
        bench_plan(asked, output, json_to)
    elif expert_parallel is not None:
        bench_ranks(RanksRequest(expert_parallel, shapes, counts, names, routing), output, json_to)
    else:
        bench_layers(request, device, output, json_to)


def refuse_unused(plan: bool, num_ranks: int | None, request: Request) -> None:
    """Refuse options that a layer over several GPUs does not take."""
    option = "--plan" if plan else "--expert-parallel"
    for name, is_unused in (
        ("--expert-parallel", not plan or num_ranks is None),
        ("--stage", tuple(request.stages) == STAGES),
        ("--backend", request.backend is None),
        ("--weight-format", request.weight_format == "mxfp4"),
        ("--keep-fp8", not request.keep_fp8),
    ):
        require(is_unused, "bench", name, need=f"none with {option}", got="one")


def bench_layers(request: Request, device: torch.device, output: Path, json_to: str | None) -> None:
    """`mxpert bench` on one device: measure, print, write and plot."""
    open_folder(output, "bench", "--output")
    document = refusing_wrong_results(lambda: run_bench(request, device, make_console(stderr=True)))
    show(document, result_console(json_to))
    write_report(json_to, document)
    plot = functools.partial(plot_roofline, document=document) if document["timed"] else None
    write_results(output, "bench.json", "roofline.png", document, plot)
