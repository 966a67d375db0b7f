"""`mxpert tune`: search the tiles that are fastest on this GPU, and write the tuned table."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..core.backend import BACKENDS
from ..core.files import is_file, kind_of_file
from ..core.problem import GroupedProblem, Op, Target
from ..core.tables import (
    AnyRow,
    GroupedRow,
    TunedRow,
    add_rows,
    every_row,
    grouped_spans,
    user_table,
)
from ..core.target import detect_target
from ..core.toolchain import toolchain
from ..errors import UnsupportedError, message, require
from ..testing.timing import read_bandwidth
from .options import (
    DEFAULT_FORMATS,
    Formats,
    JsonFile,
    KeepFp8,
    ListModels,
    WeightFormat,
    check_copies,
    check_target,
    check_weight_format,
    open_folder,
    parse_formats,
    parse_numbers,
)
from .report import (
    Advance,
    Column,
    Row,
    best_device,
    environment,
    format_time,
    make_console,
    print_table,
    progress,
    result_console,
    write_report,
)
from .tune_cells import (
    TARGETS,
    Candidate,
    Cell,
    Choice,
    Outcome,
    choose,
    invalid_row,
    make_cells,
    search,
)
from .tune_grouped import RECIPES, GroupedCell, invalid_grouped_row, make_grouped_cells

AnyCell = Cell | GroupedCell
DEFAULT_ROWS = "8192,32768,131072"
Grouped = Annotated[
    list[str] | None,
    typer.Option(
        metavar="G,N,K",
        help="Grouped GEMMs of a training layer with weights [G, N, K]: forward, dgrad and wgrad; "
        "repeat for several. Layers of models are then tuned only if they are named.",
    ),
]
RowCounts = Annotated[
    str, typer.Option(help="With --grouped: rows of all groups together, comma-separated.")
]
OperandNames = Annotated[
    str, typer.Option(help=f"With --grouped: operands, comma-separated: {', '.join(RECIPES)}.")
]
DEFAULT_TOKENS = ",".join(str(2**power) for power in range(14))
EXIT_NO_WINNER, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Request:
    """The checked options. backend: pinned, or None. seconds: time budget of all cells."""

    cells: list[AnyCell]
    backend: str | None
    output: Path
    seconds: float
    force: bool
    commit: str | None


@dataclass
class Report:
    """Results of a run, for --json and the last lines."""

    environment: Row
    output: str
    read_tbs: float | None = None
    cells: list[Row] = field(default_factory=list)
    tuned: int = 0
    kept: int = 0
    unfinished: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    interrupted: bool = False


def provenance(facts: Row, read_tbs: float, commit: str | None) -> Row:
    """The head of a table. Without a git history the commit is the version."""
    versions = facts["versions"]
    return {
        "device": facts["device"],
        "arch": facts["arch"],
        "date": facts["date"],
        "commit": commit or facts["commit"] or f"v{__version__}",
        **{name: versions[name] for name in ("mxpert", "python", "torch")},
        "triton": versions["triton"] or toolchain().triton,  # nightlies rename the package
        "cuda": versions["cuda"] or versions["hip"],
        "gpu": facts.get("gpu", {}),
        "read_tbs": round(read_tbs, 3),
        "protocol": "whole ops, cold L2, CUDA-graph replays, configs interleaved, medians",
    }


def make_row(choice: Choice[Any], outcome: Outcome, winner: Candidate, head: Row) -> AnyRow:
    """The table row of a cell with a winner."""
    problem, before = choice.problem, winner.heuristic_us
    measured: dict[str, Any] = dict(
        backend=choice.kernel.backend,
        config=winner.config,
        us=round(winner.us or 0.0, 3),
        heuristic_us=None if before is None else round(before, 3),
        spread=round(winner.spread, 4),
        source=outcome.source,
        note=outcome.note,
        rel_l2=float(f"{winner.rel_l2:.3e}"),
        tried=len(outcome.candidates),
        valid=outcome.valid,
        commit=head["commit"],
        date=head["date"],
    )
    if isinstance(problem, GroupedProblem):
        return GroupedRow(
            "grouped_wgrad" if problem.op is Op.GROUPED_WGRAD else "grouped_gemm",
            problem.formats,
            grouped_spans(problem),
            problem.trans_b,
            problem.num_groups,
            problem.n,
            problem.k,
            problem.num_rows,
            **measured,
        )
    return TunedRow(
        problem.formats,
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
        problem.num_tokens,
        **measured,
    )


def choose_any(cell: AnyCell, target: Target, backend: str | None) -> Choice[Any]:
    """The kernel that would serve a cell on a target."""
    if isinstance(cell, GroupedCell):
        return cell.choose(target, backend)
    return choose(cell, target, cell.layouts(target), backend)


def invalid_any(row: AnyRow, target: Target) -> str | None:
    """Why a row cannot run on its device, None if it can."""
    if isinstance(row, GroupedRow):
        return invalid_grouped_row(row, target)
    return invalid_row(row, target)


def _print_outcome(console: Console, name: str, backend: str, outcome: Outcome) -> None:
    """One line for the cell, and one for each candidate that was wrong or failed."""
    for each in outcome.candidates:
        if each.reason:
            console.print(
                f"[red]{each.state}[/red] {escape(name)} {backend} {escape(str(each.config))}: "
                f"{escape(each.reason)}"
            )
    us, tried = outcome.winner and outcome.winner.us, len(outcome.candidates)
    console.print(
        f"{escape(name)} {backend}: {format_time(us) if us else 'no right config'}, "
        f"{outcome.source} ({escape(outcome.note)}; {tried} of {outcome.valid} tried)",
        highlight=False,
    )


class _Tuner:
    """A run over all cells. Each cell's row is written before the next cell starts."""

    def __init__(self, request: Request, device: torch.device, console: Console) -> None:
        self.request, self.device, self.console = request, device, console
        self.target = detect_target(device)
        self.end = time.monotonic() + request.seconds
        self.report = Report(environment(device), str(request.output))
        self.finished = {
            row.key
            for row in every_row(request.output, self.target.name)
            if not (request.force or row.modelled) and invalid_any(row, self.target) is None
        }
        self.head: Row = {}

    def run(self, advance: Advance) -> None:
        """Tune the cells without a row until the time is over."""
        request = self.request
        pending = [
            cell
            for cell in request.cells
            if choose_any(cell, self.target, request.backend).key not in self.finished
        ]
        self.report.kept = len(request.cells) - len(pending)
        self.report.unfinished = [cell.name for cell in pending]
        if not pending:
            return
        done, total = 0, len(pending)
        advance(done, total, "measuring the read bandwidth")
        self.report.read_tbs = read_bandwidth(self.device) / 1e12
        self.head = provenance(self.report.environment, self.report.read_tbs, request.commit)
        for shape, cells in itertools.groupby(pending, lambda cell: cell.shape):
            advance(done, total, f"making operands of {shape}")
            operands: Any = None  # of the cell's kind, which `shape` has in common
            for cell in cells:
                if operands is None:
                    operands = cell.operands(self.device)
                if time.monotonic() >= self.end:
                    return
                advance(done, total, cell.name)
                self._tune(cell, operands)
                self.report.unfinished.remove(cell.name)
                done += 1
            del operands  # before the next shape's are made

    def _tune(self, cell: AnyCell, operands: Any) -> None:  # Any: of the cell's kind
        """Search one cell within its share of the remaining time and write its row."""
        report, request, name = self.report, self.request, cell.name
        choice, make_trial = cell.trial(operands, self.target, request.backend)
        now = time.monotonic()
        deadline = now + (self.end - now) / len(report.unfinished)
        if choice.key in self.finished:  # these weights took another layout than most do
            report.kept += 1
            return
        outcome = search(
            choice.configs(), make_trial(), deadline=deadline, batch_size=cell.batch_size
        )
        _print_outcome(self.console, name, choice.kernel.backend, outcome)
        winner = outcome.winner
        row = {"cell": name, "backend": choice.kernel.backend, **asdict(outcome)}
        report.cells.append(row | {"winner": asdict(winner.config) if winner else None})
        if winner is None:
            report.unsound.append(name)
            return
        add_rows(request.output, self.head, [make_row(choice, outcome, winner, self.head)])
        report.tuned += 1


def run_tune(request: Request, device: torch.device, console: Console) -> Report:
    """Tune all cells. An interrupt ends the run; finished cells are kept."""
    tuner = _Tuner(request, device, console)
    try:
        with progress(console, "tune") as advance:
            tuner.run(advance)
    except KeyboardInterrupt:
        tuner.report.interrupted = True
    return tuner.report


def dry_run(
    cells: Sequence[AnyCell], target: Target, backend: str | None, json_to: str | None
) -> None:
    """Show the cells and their candidates on a target, without running any."""
    choices = [choose_any(cell, target, backend) for cell in cells]
    rows: list[Row] = [
        {
            "cell": cell.name,
            "backend": choice.kernel.backend,
            "candidates": [asdict(config) for config in choice.configs()],
        }
        for cell, choice in zip(cells, choices, strict=True)
    ]
    print_table(
        result_console(json_to),
        f"mxpert tune --dry-run on {target.name}",
        ("cell", Column("backend", 1), "candidates", Column("heuristic", 2)),
        [
            (
                escape(row["cell"]),
                row["backend"],
                str(len(row["candidates"])),
                _short(row["candidates"][0]),
            )
            for row in rows
        ],
    )
    facts = environment(torch.device("cpu"))
    document = {"kind": "tune-dry-run", "environment": facts, "target": asdict(target)}
    write_report(json_to, {**document, "cells": rows})


def _short(config: Row) -> str:
    """A config, each setting by the initials of its name: "bm16 bn64 …"; a layer's unit first."""
    if "gate_up" not in config:
        return _initials(config)
    stages = [_initials(config["gate_up"]), _initials(config["down"])]
    return " | ".join((str(config["routing_block_m"]), *stages))


def _initials(stage: Row) -> str:
    return " ".join(f"{''.join(p[0] for p in key.split('_'))}{stage[key]}" for key in stage)


def _writable(output: Path | None, target: Target) -> Path:
    """The table to write: `output`, else the user's table of this target. Makes its folder."""
    path = output or user_table(target)
    if path is None:
        need, got = "a file to write", "no home directory"
        raise UnsupportedError(message("tune", "--output", need, got, "name one with --output"))
    open_folder(path.absolute().parent, "tune", "--output")
    check_target(path, "tune", "--output")
    regular = is_file(path) or not path.exists()
    require(regular, "tune", "--output", need="a regular file", got=kind_of_file(path))
    return path


def _named_target(name: str | None, dry: bool) -> Target:
    """The target of --target, else this machine's."""
    if name is not None:
        remedy = "without --dry-run this machine's GPU is tuned"
        need = "--dry-run beside it"
        require(dry, "tune", "--target", need=need, got=repr(name), remedy=remedy)
        need = f"one of {sorted(TARGETS)}"
        require(name in TARGETS, "tune", "--target", need=need, got=repr(name))
        return TARGETS[name]
    device = best_device()
    if device.type == "cpu":
        remedy = f"add --dry-run --target {next(iter(TARGETS))} to see what would be tried"
        raise UnsupportedError(message("tune", "device", "a GPU", "none on this machine", remedy))
    return detect_target(device)


def _check_search(backend: str | None, time_budget: float) -> None:
    """Refuse a --backend without tiles and a --time-budget that is no time."""
    tunable = sorted(set(BACKENDS) - {"reference"})
    require(
        backend is None or backend in tunable,
        "tune",
        "--backend",
        need=f"one of {tunable}",
        got=repr(backend),
        remedy="the reference has no tiles to tune",
    )
    require(
        time_budget > 0 and math.isfinite(time_budget),
        "tune",
        "--time-budget",
        need="a positive number of seconds",
        got=time_budget,
    )


_OF_LAYERS, _OF_GROUPED = {"tokens", "formats", "weight_format", "keep_fp8"}, {"rows", "operands"}
"""Parameters that only layers have, and only grouped GEMMs."""


def _refuse_unread(context: typer.Context, *, layers: bool, grouped: bool) -> None:
    """Refuse options that were given and that no cell of this run reads."""
    for names, are_read, need in (
        (_OF_LAYERS, layers, "a --model or --shape beside --grouped"),
        (_OF_GROUPED, grouped, "--grouped beside it"),
    ):
        for each in context.command.params:
            source = context.get_parameter_source(each.name or "")
            given = each.name in names and source is not None and source.name == "COMMANDLINE"
            option, fits = each.opts[0], are_read or not given
            require(fits, "tune", option, need=need, got="none", remedy="omit it")


def tune(
    context: typer.Context,
    model: list[str] = typer.Option(
        None,
        help="A named model (see --list-models); repeat for several. Default: gpt-oss-120b, unless "
        "--shape is given.",
    ),
    shape: list[str] = typer.Option(
        None,
        help="E,k,H,F of another layer: experts, experts per "
        "token, hidden and intermediate size; repeat for several.",
    ),
    tokens: str = typer.Option(
        DEFAULT_TOKENS,
        show_default=False,
        help="Token counts, comma-separated. Default: the powers of two up to 8192.",
    ),
    formats: Formats = DEFAULT_FORMATS,
    weight_format: WeightFormat = "mxfp4",
    keep_fp8: KeepFp8 = False,
    grouped: Grouped = None,
    rows: RowCounts = DEFAULT_ROWS,
    operands: OperandNames = "mxfp8",
    time_budget: float = typer.Option(
        600.0, help="Seconds for the whole run; cells left are tuned when it is run again."
    ),
    output: Path = typer.Option(
        None,
        help="The table to write. Default: tables/DEVICE.json in "
        "$MXPERT_CACHE_DIR or ~/.cache/mxpert.",
    ),
    backend: str = typer.Option(None, help="Tune this backend instead of the one that would run."),
    force: bool = typer.Option(False, "--force", help="Tune finished cells again."),
    commit: str = typer.Option(None, help="The commit to record, for a copy without history."),
    dry: bool = typer.Option(False, "--dry-run", help="List cells and candidates; run nothing."),
    target: str = typer.Option(
        None, help=f"With --dry-run: a device that need not be here: {', '.join(TARGETS)}."
    ),
    list_models: ListModels = False,
    json_to: JsonFile = None,
) -> None:
    """Search the tiles that are fastest on this GPU.

    A cell is one format of activations and one of weights, one layer shape and one token count, or
    one of the three grouped GEMMs of a training layer with one number of rows. A row serves layers
    with its own formats alone. For each cell every config of the
    kernel that serves it is compared with the float64 reference; a wrong config is reported and
    never wins. The right ones take turns being timed with a cold L2 cache. The heuristic's choice
    stays unless another config is faster by more than the spread of the two.

    The row of each finished cell is written to the table at once; run the command again to continue
    where it stopped. Rows in your cache directory replace the shipped ones. The report for --json
    has every candidate. Exit code 1 means that a cell has no right config.

    Examples:
        mxpert tune --model gpt-oss-120b --time-budget 300
        mxpert tune --shape 64,8,2048,1024 --tokens 1,16,256 --format a16w4
        mxpert tune --model qwen3-235b --weight-format nvfp4
        mxpert tune --tokens 4096,8192 --format a8w4 --keep-fp8
        mxpert tune --grouped 32,4096,7168 --rows 65536 --operands mxfp8,bf16
        mxpert tune --dry-run --target nvidia-h200
    """
    counts = parse_numbers(tokens, "tune", "--tokens")
    names = parse_formats(formats, "tune", "--format")
    check_target(json_to, "tune")
    _check_search(backend, time_budget)
    models = list(model or ([] if shape or grouped else ["gpt-oss-120b"]))
    _refuse_unread(context, layers=bool(models or shape), grouped=bool(grouped))
    held = check_weight_format(weight_format, "tune")
    check_copies(keep_fp8, names, held, backend, "tune")
    made = make_cells(models, list(shape or []), counts, names, held, keep_fp8=keep_fp8)
    row_counts = parse_numbers(rows, "tune", "--rows")
    cells: list[AnyCell] = [*made, *make_grouped_cells(grouped or [], row_counts, operands)]
    here, console = _named_target(target, dry), make_console(stderr=True)
    if dry:
        dry_run(cells, here, backend, json_to)
        return
    request = Request(cells, backend, _writable(output, here), time_budget, force, commit)
    report = run_tune(request, best_device(), console)
    write_report(json_to, {"kind": "tune", **asdict(report)})
    raise typer.Exit(_close(report, console))


def _close(report: Report, console: Console) -> int:
    """Print the last lines; return the exit code."""
    console.print(
        f"{report.output}: {report.tuned} tuned, {report.kept} kept, {len(report.unfinished)} left",
        markup=False,
        highlight=False,
    )
    for name in report.unsound:
        console.print(f"no right config: {name}", markup=False)
    if report.interrupted:
        console.print("interrupted; run the same command again to continue")
        return EXIT_INTERRUPTED
    if report.unsound:
        return EXIT_NO_WINNER
    if report.unfinished:
        console.print("out of time; run the same command again to continue")
    return 0
