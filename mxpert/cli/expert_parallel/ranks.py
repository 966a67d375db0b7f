"""`mxpert bench --expert-parallel N`: a layer over several GPUs, measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from ...core.target import detect_target
from ...distributed import ExpertParallel
from ...distributed.links import find_links, kernel_refusal, transports
from ...errors import message, require
from ...formats.names import OwnFormat
from ...testing.problems import MoEShape
from ...testing.ranks import RankFailedError, join_group, start_ranks
from ...testing.timing import Timing
from ..measure import GateError, refusing_wrong_results, timing_columns
from ..options import FORMAT_NAMES, open_folder
from ..plots import figure, legend_outside, line_style, log_scale, save, styled
from ..report import (
    Column,
    Row,
    environment,
    format_time,
    make_console,
    print_table,
    progress,
    result_console,
    say,
    write_report,
    write_results,
)
from .layer import Case, Collectives, Exchange, OnRanks, RankCase, RankWeights
from .plan import wire_of

STAGES = ("dispatch", "local", "combine", "exchange", "layer")
NOT_TIMED = (
    "Every result is right. Times are left out: without GPUs gloo exchanges and the reference "
    "backend answers, on a scaled-down model. `mxpert bench --plan` predicts a layer over GPUs; "
    "on a machine with GPUs, this command measures."
)
CPU_RANKS = 16
"""Most ranks on a CPU: each is a process."""
REPEATS = {"cuda": 20, "cpu": 3}


@dataclass(frozen=True)
class RanksRequest:
    """What every rank measures; shapes by model name, T of each rank, activation formats."""

    num_ranks: int
    shapes: dict[str, MoEShape]
    tokens: list[int]
    formats: list[OwnFormat]
    routing: str


def bench_ranks(request: RanksRequest, output: Path, json_to: str | None) -> None:
    """`mxpert bench --expert-parallel`: start the ranks, print, write and plot."""
    check_ranks(request.num_ranks, request.shapes)
    open_folder(output, "bench", "--output")
    document = refusing_wrong_results(lambda: run_ranks(request))
    show_ranks(document, result_console(json_to))
    write_report(json_to, document)
    names = "expert_parallel.json", "expert_parallel.png"
    plot = functools.partial(plot_ranks, document=document) if _timed(document) else None
    write_results(output, *names, document, plot)


def _timed(document: Row) -> bool:
    """Whether times say something. A CPU's are in the report only: they follow no kernel."""
    return bool(document["environment"]["kind"] != "cpu")


def check_ranks(num_ranks: int, shapes: dict[str, MoEShape]) -> None:
    """Refuse more ranks than there are GPUs (on a CPU: than `CPU_RANKS`), or than experts."""
    option = "--expert-parallel"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        need, most = f"1 to {count}, the GPUs that are visible here", count
    else:
        need, most = f"1 to {CPU_RANKS} on a CPU", CPU_RANKS
    require(1 <= num_ranks <= most, "bench", option, need=need, got=num_ranks)
    for name, shape in shapes.items():
        require(
            num_ranks <= shape.num_experts,
            "bench",
            option,
            need=f"at most {shape.num_experts}, the experts of {name}",
            got=num_ranks,
        )


def run_ranks(request: RanksRequest) -> Row:
    """Start the ranks, and return the document of rank 0.

    Raises:
        GateError: a result was wrong; nothing was timed on it.
        ValueError: a rank refused its arguments.
        RankFailedError: a rank failed.
    """
    try:
        answer = start_ranks(measure_on_rank, request.num_ranks, request)[0]
    except RankFailedError as error:
        _, _, reason = str(error).partition(": ")
        kind, _, text = reason.partition(": ")
        if " — " in text and kind in ("ValueError", "TypeError"):
            raise ValueError(text) from error
        if "OutOfMemoryError" in kind:
            need, remedy = "enough GPU memory on every rank", "choose fewer tokens"
            got = reason[:200]
            raise ValueError(message("bench", "memory", need, got, remedy)) from error
        raise
    if "gate" in answer:
        raise GateError(answer["gate"])
    found: Row = answer
    return found


def measure_on_rank(request: RanksRequest) -> Row:
    """What each rank does: all cases; the document, or {"gate": what was wrong}."""
    device = join_group()
    rows: list[Row] = []
    explained: dict[str, str] = {}
    answer: Row
    try:
        rows += _measured(request, explained)
    except GateError as error:
        answer = {"gate": str(error)}
    else:
        links = find_links()
        states = transports(links, kernel_refusal(detect_target(device)))
        answer = {
            "kind": "expert_parallel",
            "environment": environment(device),
            "links": asdict(links),
            "transports": [asdict(state) for state in states],
            "ranks": request.num_ranks,
            "explain": explained,
            "rows": rows,
        }
    # Not after another error: NCCL would wait for the other ranks, and for captured graphs.
    dist.destroy_process_group()
    return answer


def _measured(request: RanksRequest, explained: dict[str, str]) -> Iterator[Row]:
    """Rows of all cases, and how each wire travels; rank 0 shows how far it is."""
    console = make_console(stderr=True)
    console.quiet = dist.get_rank() != 0
    cases = [(count, name) for name in request.formats for count in request.tokens]
    total, done = len(request.shapes) * len(cases), 0
    with progress(console, "bench") as advance:
        for model, shape in request.shapes.items():
            advance(done, total, f"{model}: making weights")
            objects = {
                wire: ExpertParallel(
                    num_experts=shape.num_experts,
                    top_k=shape.top_k,
                    hidden_size=shape.hidden_size,
                    max_tokens=max(request.tokens),
                    wire_format=wire,
                )
                for wire in dict.fromkeys(map(wire_of, request.formats))
            }
            first = next(iter(objects.values()))
            weights = RankWeights.random(shape, first)
            for count, name in cases:
                wire = wire_of(name)
                case = Case(model, shape, count, request.routing, name, wire)
                advance(done, total, str(case))
                yield from case_rows(
                    RankCase(case, weights, objects[wire]), REPEATS[objects[wire].device.type]
                )
                explained[f"{model}, {wire} wire"] = objects[wire].explain()
                done += 1
            for ranks in objects.values():
                ranks.close()
            del weights


def case_rows(case: RankCase, repeats: int) -> Iterator[Row]:
    """Rows of one case: ours and plain collectives, both gated, then timed in turns."""
    exchanges: list[Exchange] = [
        OnRanks(case.case, case.weights, case.ranks),
        Collectives(case.case, case.weights, case.ranks),
    ]
    errors = {exchange.name: case.gate(exchange) for exchange in exchanges}
    samples = case.timed(exchanges, repeats)
    for exchange in exchanges:
        for stage in STAGES:
            of = exchanges[0] if stage == "local" else exchange
            yield {
                **case.columns,
                **asdict(case.load),
                "impl": exchange.name,
                "stage": stage,
                "rel_l2": errors[exchange.name],
                **timing_columns(Timing.of(samples[of.name, stage])),
            }


def show_ranks(document: Row, console: Console) -> None:
    """The table of a document: a line for each case and way to exchange."""
    for name, text in document["explain"].items():
        say(console, f"{name}: {text}")
    cells: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in document["rows"]:
        key = row["model"], row["T"], row["activation"], row["impl"]
        cells.setdefault(key, {})[row["stage"]] = row
    timed = _timed(document)
    columns: list[str | Column] = ["model", "T a rank", "format", "exchange by"]
    if timed:
        columns += [Column("dispatch", 1), Column("local", 1), Column("combine", 1)]
        columns += [Column("both", 2), "layer"]
    print_table(
        console,
        f"mxpert bench --expert-parallel {document['ranks']}",
        [*columns, Column("balance", 3), Column("rel. L2", 4 * timed)],
        [_cells(stages, timed) for stages in cells.values()],
    )
    notes = ["balance: mean rows of a rank over those of the busiest."]
    if timed:
        notes.insert(0, "Times of the slower rank. both: dispatch and combine in one CUDA graph;")
    else:
        notes.append(NOT_TIMED)
    say(console, " ".join(notes))


def _cells(stages: dict[str, Row], timed: bool) -> Sequence[str]:
    row = stages["layer"]
    return (
        row["model"],
        str(row["T"]),
        FORMAT_NAMES[row["activation"]],
        row["impl"],
        *(format_time(stages[stage]["us"]) for stage in STAGES if timed),
        f"{100 * row['balance']:.0f} %",
        f"{row['rel_l2']:.1e}",
    )


@styled
def plot_ranks(path: Path, document: Row) -> None:
    """Time of a layer by tokens of a rank, and of its exchange: a panel for each model."""
    rows = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    device = document["environment"]["device"]
    drawing, (panels,) = figure(f"{document['ranks']} ranks: {device}", 1, len(models))
    for axes, model in zip(panels, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        lines = dict.fromkeys((row["impl"], row["activation"]) for row in mine)
        for index, (impl, name) in enumerate(lines):
            for dash, (stage, fill) in enumerate((("layer", "full"), ("exchange", "none"))):
                line = [
                    row
                    for row in mine
                    if (row["impl"], row["activation"], row["stage"]) == (impl, name, stage)
                ]
                axes.plot(
                    [row["T"] for row in line],
                    [row["us"] for row in line],
                    label=f"{impl}, {FORMAT_NAMES[name]}: {stage}",
                    **line_style(index, dash=dash, fill=fill),
                )
        axes.set(title=model, xlabel="tokens of a rank", ylabel="µs")
        log_scale(axes, x=2, y=10)
        axes.grid()
    legend_outside(drawing, panels, columns=2 * len(models), fontsize="x-small")
    save(drawing, path)
