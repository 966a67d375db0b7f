"""`mxpert tune`: search the tiles that are fastest on this GPU, and write the tuned table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..dispatch import detect_target
from ..dispatch.registry import BACKENDS
from ..dispatch.tables import Measured, TunedRow, add_rows, read_rows, user_table
from ..errors import UnsupportedError, message, require
from ..problem import Target
from ..runtime.toolchain import toolchain
from ..testing.problems import random_moe_problem
from ..testing.timing import read_bandwidth
from .measure import RunWeights
from .options import (
    FORMAT_NAMES,
    FORMATS_HELP,
    JSON_HELP,
    check_target,
    parse_formats,
    parse_numbers,
)
from .progress import Advance, progress
from .report import (
    Column,
    Row,
    best_device,
    environment,
    format_time,
    make_console,
    print_table,
    result_console,
    write_report,
)
from .tune_cells import (
    TARGETS,
    Cell,
    Choice,
    DeviceTrial,
    Probes,
    choose,
    expected_layouts,
    invalid_row,
    make_cells,
)
from .tune_search import BATCH_SIZE, Candidate, Outcome, State, in_order, search

DEFAULT_TOKENS = ",".join(str(2**power) for power in range(14))
DEFAULT_SECONDS = 600.0
EXIT_NO_WINNER, EXIT_INTERRUPTED = 1, 130
LARGE_BATCH_TOKENS = 1024
"""Above this many tokens half as many configs are timed together, to limit their buffers."""


@dataclass(frozen=True)
class Request:
    """The checked options. backend: pinned, or None. seconds: time budget of all cells."""

    cells: list[Cell]
    backend: str | None
    output: Path
    seconds: float
    force: bool
    commit: str | None


@dataclass
class Report:
    """What a run did: the source of --json and of the last lines."""

    environment: Row
    output: Path
    read_tbs: float | None = None
    cells: list[Row] = field(default_factory=list)
    tuned: int = 0
    kept: int = 0
    unfinished: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    interrupted: bool = False

    def document(self) -> Row:
        return {"kind": "tune", **asdict(self), "output": str(self.output)}


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
        "protocol": "fused_moe, cold L2, CUDA-graph replays, configs interleaved, medians",
    }


def make_row(choice: Choice, outcome: Outcome, winner: Candidate, head: Row) -> TunedRow:
    """The table row of a finished cell."""
    problem, before = choice.problem, outcome.heuristic_us
    measured = Measured(
        us=round(winner.us, 3),
        heuristic_us=None if before is None else round(before, 3),
        spread=round(outcome.spread, 4),
        source=outcome.source,
        note=outcome.note,
        rel_l2=float(f"{winner.rel_l2:.3e}"),
        tried=len(outcome.tried),
        valid=outcome.valid,
        commit=head["commit"],
        date=head["date"],
    )
    return TunedRow(
        problem.formats,
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
        problem.num_tokens,
        choice.kernel.backend,
        winner.config,
        measured,
    )


def name_cell(cell: Cell) -> str:
    """ "gpt-oss-120b T=64 a16w4"."""
    return f"{cell.model} T={cell.num_tokens} {FORMAT_NAMES[cell.activation_format]}"


def _cell_row(cell: Cell, choice: Choice, outcome: Outcome) -> Row:
    """A cell and all its candidates, for --json."""
    return {
        "cell": name_cell(cell),
        "backend": choice.kernel.backend,
        "valid": outcome.valid,
        "source": outcome.source,
        "note": outcome.note,
        "winner": asdict(outcome.winner.config) if outcome.winner else None,
        "candidates": [
            {
                "config": asdict(each.config),
                "state": each.state.value,
                "rel_l2": each.rel_l2,
                "reason": each.reason,
                "us": each.us if each.timing else None,
                "spread": each.timing.spread if each.timing else None,
            }
            for each in outcome.tried
        ],
    }


def _tell(console: Console, name: str, choice: Choice, outcome: Outcome) -> None:
    """One line for the cell, and one for each candidate that was wrong or failed."""
    for each in outcome.tried:
        if each.state in (State.WRONG, State.FAILED):
            console.print(
                f"[red]{each.state.value}[/red] {escape(name)} "
                f"{choice.kernel.backend} {escape(str(each.config))}: "
                f"{escape(each.reason)}"
            )
    winner = outcome.winner
    us = "no right config" if winner is None else format_time(winner.us)
    console.print(
        f"{escape(name)} {choice.kernel.backend}: {us}, {outcome.source} "
        f"({escape(outcome.note)}; {len(outcome.tried)} of {outcome.valid} tried)",
        highlight=False,
    )


def by_shape(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Groups of cells with the same shape, which share weights."""
    for shape in dict.fromkeys(cell.shape for cell in cells):
        yield [cell for cell in cells if cell.shape == shape]


class _Tuner:
    """A run over all cells. Each cell's row is written before the next cell starts."""

    def __init__(self, request: Request, device: torch.device, console: Console) -> None:
        self.request, self.device, self.console = request, device, console
        self.target = detect_target(device)
        self.end = time.monotonic() + request.seconds
        self.report = Report(environment(device), request.output)
        rows = read_rows(request.output, self.target.name)
        self.finished = (
            set()
            if request.force
            else {row.key for row in rows if invalid_row(row, self.target) is None}
        )
        self.head: Row = {}

    def run(self, advance: Advance) -> None:
        """Tune the cells without a row until the time is over."""
        request, layouts = self.request, expected_layouts(self.target)
        pending = [
            cell
            for cell in request.cells
            if choose(cell, self.target, layouts, request.backend).key not in self.finished
        ]
        self.report.kept = len(request.cells) - len(pending)
        self.report.unfinished = [name_cell(cell) for cell in pending]
        if not pending:
            return
        done, total = 0, len(pending)
        advance(done, total, "measuring the read bandwidth")
        self.report.read_tbs = read_bandwidth(self.device) / 1e12
        self.head = provenance(self.report.environment, self.report.read_tbs, request.commit)
        for cells in by_shape(pending):
            advance(done, total, f"{cells[0].model}: making weights")
            weights = RunWeights.of(
                random_moe_problem(cells[0].shape, 1, device=self.device).weights, self.device
            )
            probes: dict[str, Probes] = {}
            for cell in cells:
                if time.monotonic() >= self.end and self.report.cells:
                    return
                advance(done, total, name_cell(cell))
                if cell.activation_format not in probes:
                    probes[cell.activation_format] = Probes.of(
                        cell.shape, weights.plain, cell.options
                    )
                self._tune(cell, weights, probes[cell.activation_format])
                done += 1
            del weights  # before the next shape's are made

    def _tune(self, cell: Cell, weights: RunWeights, probes: Probes) -> None:
        """Search one cell within its share of the remaining time and write its row."""
        report, name = self.report, name_cell(cell)
        choice = choose(
            cell, self.target, (weights.prepared.layout, weights.plain.layout), self.request.backend
        )
        if choice.key in self.finished:  # these weights took another layout than most do
            report.unfinished.remove(name)
            report.kept += 1
            return
        chosen = (
            weights.prepared
            if choice.problem.weight_layout is weights.prepared.layout
            else weights.plain
        )
        configs = in_order(
            choice.kernel.heuristic(choice.problem), choice.kernel.configs(choice.problem)
        )
        trial = DeviceTrial(choice, cell.shape, chosen, probes)
        now = time.monotonic()
        outcome = search(
            configs,
            trial,
            limit=trial.limit,
            end=self.end,
            deadline=now + (self.end - now) / len(report.unfinished),
            batch_size=BATCH_SIZE if cell.num_tokens <= LARGE_BATCH_TOKENS else BATCH_SIZE // 2,
        )
        _tell(self.console, name, choice, outcome)
        report.cells.append(_cell_row(cell, choice, outcome))
        if outcome.cut_short:
            return
        report.unfinished.remove(name)
        if outcome.winner is None:
            report.unsound.append(name)
            return
        add_rows(
            self.request.output, self.head, [make_row(choice, outcome, outcome.winner, self.head)]
        )
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


def dry_run(cells: Sequence[Cell], target: Target, backend: str | None) -> Row:
    """The cells and their candidates on a target, without running any."""
    rows = []
    for cell in cells:
        choice = choose(cell, target, expected_layouts(target), backend)
        configs = in_order(
            choice.kernel.heuristic(choice.problem), choice.kernel.configs(choice.problem)
        )
        rows.append(
            {
                "cell": name_cell(cell),
                "backend": choice.kernel.backend,
                "candidates": [asdict(config) for config in configs],
            }
        )
    return {"kind": "tune-dry-run", "target": asdict(target), "cells": rows}


def _short(config: Row) -> str:
    """A config as "m16 | 16x64x256 w4 s4 | 16x128x128 w4 s4 /2".

    Routing unit, then for gate_up and down: tile, warps, pipeline stages, and split-K if above 1.
    """
    stages = [
        f"{c['block_m']}x{c['block_n']}x{c['block_k']} w{c['num_warps']} s{c['num_stages']}"
        + (f" /{c['split_k']}" if c["split_k"] > 1 else "")
        for c in (config["gate_up"], config["down"])
    ]
    return " | ".join((f"m{config['routing_block_m']}", *stages))


def _show_plan(document: Row, console: Console) -> None:
    print_table(
        console,
        f"mxpert tune --dry-run on {document['target']['name']}",
        ("cell", Column("backend", 1), "candidates", Column("heuristic: unit | gate_up | down", 2)),
        [
            (
                escape(row["cell"]),
                row["backend"],
                str(len(row["candidates"])),
                _short(row["candidates"][0]),
            )
            for row in document["cells"]
        ],
    )


def _writable(output: Path | None, target: Target) -> Path:
    """The table to write: `output`, else the user's table of this target."""
    path = output or user_table(target)
    if path is None:
        raise UnsupportedError(
            message(
                "tune", "--output", "a file to write", "no home directory", "name one with --output"
            )
        )
    folder = next(
        each for each in (path.absolute().parent, *path.absolute().parents) if each.exists()
    )
    usable = (path.is_file() or not path.exists()) and folder.is_dir()
    require(
        usable and os.access(folder, os.W_OK),
        "tune",
        "--output",
        need="a file in a folder that can be written",
        got=str(path),
    )
    return path


def _named_target(name: str | None, dry: bool) -> Target:
    """The target of --target, else this machine's."""
    if name is not None:
        require(
            dry,
            "tune",
            "--target",
            need="--dry-run beside it",
            got=repr(name),
            remedy="without --dry-run this machine's GPU is tuned",
        )
        require(
            name in TARGETS, "tune", "--target", need=f"one of {sorted(TARGETS)}", got=repr(name)
        )
        return TARGETS[name]
    device = best_device()
    if device.type == "cpu":
        raise UnsupportedError(
            message(
                "tune",
                "device",
                "a GPU",
                "none on this machine",
                f"add --dry-run --target {next(iter(TARGETS))} to see what would be tried",
            )
        )
    return detect_target(device)


def tune(
    model: list[str] = typer.Option(
        None,
        help="A named model; repeat for several. Default: gpt-oss-120b, unless --shape is given.",
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
    formats: str = typer.Option("a16w4,a8w4,a4w4", "--format", "--formats", help=FORMATS_HELP),
    time_budget: float = typer.Option(
        DEFAULT_SECONDS,
        help="Seconds for the whole run; cells left are tuned when it is run again.",
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
    json_to: str = typer.Option(None, "--json", metavar="FILE", help=JSON_HELP),
) -> None:
    """Search the tiles that are fastest on this GPU.

    A cell is one format, one layer shape and one token count. For each cell every config of the
    kernel that serves it is compared with the float64 reference; a wrong config is reported and
    never wins. The right ones take turns being timed with a cold L2 cache. The heuristic's choice
    stays unless another config is faster by more than the spread of the two.

    The row of each finished cell is written to the table at once; run the command again to continue
    where it stopped. Rows in your cache directory replace the shipped ones. The report for --json
    has every candidate. Exit code 1 means that a cell has no right config.

    Examples:

        mxpert tune --model gpt-oss-120b --time-budget 300

        mxpert tune --shape 64,8,2048,1024 --tokens 1,16,256 --format a16w4

        mxpert tune --dry-run --target nvidia-h200
    """
    counts = parse_numbers(tokens, "tune", "--tokens")
    names = parse_formats(formats, "tune", "--format")
    check_target(json_to, "tune")
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
    models = list(model or ([] if shape else ["gpt-oss-120b"]))
    cells = make_cells(models, list(shape or []), counts, names)
    here, console = _named_target(target, dry), make_console(stderr=True)
    if dry:
        plan = dry_run(cells, here, backend)
        _show_plan(plan, result_console(json_to))
        write_report(json_to, plan)
        return
    request = Request(cells, backend, _writable(output, here), time_budget, force, commit)
    report = run_tune(request, best_device(), console)
    write_report(json_to, report.document())
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
