"""Look for cliffs: skewed routings, odd token counts and shapes never tuned, beside tuned shapes.

    python benchmarks/cliffs.py --output benchmarks/results/nvidia-h200/cliffs.json

writes cliffs.json and cliffs.md beside it. mxpert alone. A cell's efficiency is the time that the
ceilings of this run allow over the time taken. Its neighbour is the named model nearest in log H
and log F, with uniform routing at the same T and activation format. `relative` is the cell's
efficiency over the neighbour's; below 0.8 the cell is a cliff. Processes of their own time first
calls and count the GPU binaries of one model, with an empty and with a filled cache. --render FILE
writes the tables of an earlier run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import cells as named
import torch
from harness.ceilings import IDLE_SECONDS, make_meta, measure_ceilings
from moe.cells import NAMED, ROUTINGS, Cell, Model, parse_list, parse_tokens, random_inputs, tiny
from moe.rows import Row, make_row
from harness.faults import FatalError, check_alive, describe
from moe.ours import Call, Ours, random_weights
from render import OPEN_ROWS, add_render_option, conditions, folded, markdown_table, render_again
from triton.runtime.jit import JITFunction

from mxpert.cli.measure import RunWeights
from mxpert.cli.report import write_json
from mxpert.errors import message, require
from mxpert.formats.tensor import Layout
from mxpert.ops.route import route_topk
from mxpert.testing.timing import time_graph

DEFAULT_OUTPUT = ROOT / "benchmarks/results/nvidia-h200/cliffs.json"
DRY_OUTPUT = ROOT / "reports/cliffs-dry-run.json"
STAGES = ("gate_up", "down", "layer")
FORMATS = ("bf16", "mxfp8", "mxfp4")
TOKENS = (17, 131, 2053)
FEATURES = (384, 704, 1408, 1536)
HIDDEN = (2048, 4096, 5120)
LEAST = 0.8
"""A cell's efficiency over its neighbour's, below which the cell is a cliff."""

MOST_BINARIES = 12
MOST_SECONDS = 20.0
CHILD_SECONDS = 120
REPEATS = 10
PROTOCOL = {
    "power": f"idle {1000 * IDLE_SECONDS:.0f} ms before each cell, three warm-up replays, then "
    f"{REPEATS} timed replays",
    "timing": "CUDA-graph replays, stages and formats of a cell in turns, L2 swept before each; "
    "us is the median, us_spread the width of the 10-90 % band",
    "stages": "gate_up, down: whole stage on a ready routing; layer: from logits, top-k and sort "
    "included",
    "efficiency": "max(weight bytes of the experts hit / read_tbs, flops / bf16_tflops or "
    "fp8_tflops) over the time taken",
    "neighbour": "named model nearest in log H and log F, then in log E; uniform routing, same T, "
    "format and stage",
    "first_call": "seconds of fused_moe from logits until its result is there, weights prepared, "
    "in the order listed, in a process of its own",
    "binaries": "GPU binaries that this process has loaded after the layers of one model, every "
    "format, at every T of this script and of compare.py",
}


def _shape(num_experts: int, hidden_size: int, intermediate_size: int) -> Model:
    """A layer with k = 8, under its model's name if it has one."""
    shape = Model(
        f"E{num_experts}-k8-H{hidden_size}-F{intermediate_size}",
        num_experts,
        8,
        hidden_size,
        intermediate_size,
    )
    return next(
        (
            named
            for named in NAMED.values()
            if (named.E, named.k, named.H, named.F) == (shape.E, shape.k, shape.H, shape.F)
        ),
        shape,
    )


def _shapes() -> dict[str, Model]:
    """Every F with every H, so ordered that the first four show every F and every H."""
    crossed = [
        _shape(128, HIDDEN[(index + shift) % len(HIDDEN)], features)
        for shift in range(len(HIDDEN))
        for index, features in enumerate(FEATURES)
    ]
    few_experts = _shape(32, 5120, 1408)
    return {model.name: model for model in (*crossed[:4], few_experts, *crossed[4:])}


SHAPES = _shapes()


def neighbour_of(model: Model) -> Model:
    """The named model nearest in log H and log F; of equals, the one nearest in log E.

    >>> neighbour_of(Model("mine", 64, 8, 5120, 384)).name
    'kimi-k2-tp4'
    """

    def distance(named: Model) -> tuple[float, float]:
        return (
            math.hypot(math.log(named.H / model.H), math.log(named.F / model.F)),
            abs(math.log(named.E / model.E)),
        )

    return min(NAMED.values(), key=distance)


def plan(
    shapes: Iterable[Model], tokens: Sequence[int], routings: Sequence[str]
) -> dict[Model, list[Cell]]:
    """Cells by model: the neighbours' uniform ones, then those of the shapes."""
    wanted = {
        model: [Cell(model, count, routing) for routing in routings for count in tokens]
        for model in shapes
    }
    neighbours = dict.fromkeys(map(neighbour_of, wanted))
    uniform = {model: [Cell(model, count) for count in tokens] for model in neighbours}
    return {
        model: list(dict.fromkeys([*uniform.get(model, ()), *wanted.get(model, ())]))
        for model in (*neighbours, *wanted)
    }


@dataclass
class Run:
    """What one invocation works with, and what it has found."""

    device: torch.device
    dry: bool
    path: Path
    meta: Row
    deadline: float
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    first_calls: Row = field(default_factory=dict)

    def fail(self, what: str, error: BaseException) -> None:
        """Note what has no time, and why."""
        self.failures.append({"cell": what, "error": describe(error)})
        print(f"{what}: {describe(error)}", file=sys.stderr, flush=True)

    def document(self) -> Row:
        """Everything so far as JSON."""
        every = count_binaries()
        return {
            "meta": self.meta | {"failures": self.failures, "left": self.left},
            "rows": with_neighbours(self.rows),
            "first_calls": self.first_calls
            | {"most_s": MOST_SECONDS, "most_binaries": MOST_BINARIES},
            "binaries": {"total": sum(every.values()), "by_kernel": every},
        }


def count_binaries() -> dict[str, int]:
    """Kernel of `mxpert.backends` → GPU binaries that this process has loaded for it."""
    found: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("mxpert.backends."):
            continue
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                hashes = {
                    compiled.hash
                    for caches in kernel.device_caches.values()
                    for compiled in caches[0].values()
                }
                if hashes:
                    found.setdefault(kernel.__name__, set()).update(hashes)
    return {name: len(hashes) for name, hashes in sorted(found.items())}


def with_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Rows with `neighbour_efficiency`, `relative` and `cliff`; None where the neighbour has no
    time."""
    uniform = {
        (row["model"], row["T"], row["activation"], row["stage"]): row["efficiency"]
        for row in rows
        if row["routing"] == "uniform"
    }
    found = []
    for row in rows:
        best = uniform.get((row["neighbour"], row["T"], row["activation"], row["stage"]))
        share = None if best is None else row["efficiency"] / best
        found.append(
            {
                **row,
                "neighbour_efficiency": best,
                "relative": share,
                "cliff": None if share is None else share < LEAST,
            }
        )
    return found


# --- cells --------------------------------------------------------------------------------------


def measure_cell(run: Run, cell: Cell, full: Model, weights: RunWeights) -> None:
    """Gate every format, then time what passed; a failure leaves the others.

    Args:
        full: the model before a dry run shrank it; names the neighbour.
    """
    batches = random_inputs(cell, run.device)
    ids = [route_topk(each.logits, cell.model.k)[1] for each in batches]
    hit = sum(each.unique().numel() for each in ids) / len(ids)
    timed: dict[str, Sequence[Call]] = {}
    facts: dict[str, tuple[float, Row]] = {}
    for activation in FORMATS:
        ours = Ours(cell.model, weights, activation)
        try:
            resolution = ours._chosen_weights(batches[0])[1]
            backend, config = resolution.kernel.backend, resolution.config
            require(
                run.dry or backend == "hopper",
                "cliffs",
                str(cell),
                need="the hopper backend",
                got=backend,
            )
            calls, errors = ours.prepare(cell, batches, STAGES)
            check_alive(run.device)
        except FatalError:
            raise
        except Exception as error:
            run.fail(f"{cell} {activation}", error)
            check_alive(run.device)
            continue
        choice = {"backend": backend, "config_source": resolution.source, "config": str(config)}
        for stage in STAGES:
            timed[f"{activation}/{stage}"] = calls[stage]
            facts[f"{activation}/{stage}"] = errors[stage], choice
    if not run.dry:
        torch.cuda.synchronize()
        time.sleep(IDLE_SECONDS)
    failed: dict[str, Exception] = {}
    timings = time_graph(
        timed,
        device=run.device,
        repeats=1 if run.dry else REPEATS,
        warmup=0 if run.dry else 3,
        failures=failed,
    )
    check_alive(run.device)
    for name, error in failed.items():
        run.fail(f"{cell} {name}", error)
    for name, timing in timings.items():
        activation, stage = name.split("/")
        error, choice = facts[name]
        row = make_row(cell, hit, Ours.impl, activation, stage, timing, error, run.meta["ceilings"])
        run.rows.append(
            {
                **row,
                **choice,
                "efficiency": row["percent_of_roof"] / 100,
                "neighbour": neighbour_of(full).name,
            }
        )


def measure(run: Run, cells: dict[Model, list[Cell]]) -> None:
    """All models until the time limit, which a cell as long as the one before must still fit."""
    previous = 0.0
    for model, wanted in cells.items():
        began = time.monotonic()
        if began + previous > run.deadline:
            run.left += map(str, wanted)
            continue
        small = tiny(model) if run.dry else model
        weights = random_weights(small, run.device)
        built = time.monotonic() - began
        for cell in wanted:
            start = time.monotonic()
            if start + previous > run.deadline:
                run.left.append(str(cell))
                continue
            try:
                measure_cell(run, Cell(small, cell.tokens, cell.routing), model, weights)
            except FatalError:
                raise
            except Exception as error:
                run.fail(str(cell), error)
                check_alive(run.device)
            previous = time.monotonic() - start
        del weights
        if not run.dry:
            torch.cuda.empty_cache()
        write_json(run.path, run.document())
        print(f"{model.name}: {time.monotonic() - began:.1f} s, weights {built:.1f} s", flush=True)


# --- first calls --------------------------------------------------------------------------------


def time_first_calls(device: torch.device, dry: bool) -> Row:
    """Seconds of this process's first layers, few and many tokens in each format, and the binaries
    that it has loaded once the layer has run at every T."""
    model = tiny(_shape(32, 5120, 1408)) if dry else _shape(32, 5120, 1408)
    weights = random_weights(model, device)
    require(
        dry or weights.prepared.layout is Layout.HOPPER_FRAGMENT,
        "cliffs",
        "weights",
        need="the layout of the hopper backend",
        got=weights.prepared.layout.name,
    )
    first = TOKENS[0], TOKENS[-1]
    others = sorted({*TOKENS, *(() if dry else named.TOKENS)} - set(first))
    seconds, after = {}, {}
    for activation in FORMATS:
        ours = Ours(model, weights, activation)
        for tokens in (*first, *others):
            inputs = random_inputs(Cell(model, tokens), device)[0]
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            ours._layer(weights.prepared, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if tokens in first:
                seconds[f"{activation} T={tokens}"] = time.perf_counter() - began
        after[activation] = sum(count_binaries().values())
    return {"seconds": seconds, "binaries": after, "by_kernel": count_binaries()}


def start_first_calls(dry: bool) -> Row:
    """`time_first_calls` of a new process.

    Raises:
        RuntimeError: it failed; the end of what it printed.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--first-calls"]
    done = subprocess.run(
        command + ["--dry-run"] * dry,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-300:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_first_calls(run: Run) -> None:
    """Twice the same calls, each in a process of its own, before this one uses the GPU."""
    for state in ("empty_cache", "kept_cache"):
        try:
            run.first_calls[state] = start_first_calls(run.dry)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            run.fail(f"first calls, {state}", error)


# --- tables -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """One line for each model, T and routing: efficiency in %, in brackets over the neighbour's,
    cliffs in bold."""
    present = {row["activation"] for row in rows}
    columns = [
        (activation, stage) for activation in FORMATS if activation in present for stage in STAGES
    ]
    by_cell: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        key = row["model"], row["T"], row["routing"], row["neighbour"]
        by_cell.setdefault(key, {})[row["activation"], row["stage"]] = row

    def text(row: Row | None) -> str:
        if row is None:
            return "–"
        share = "–" if row["relative"] is None else f"{row['relative']:.2f}"
        found = f"{100 * row['efficiency']:.0f} ({share})"
        return f"**{found}**" if row["cliff"] else found

    lines = [
        [model, str(tokens), routing, neighbour, *(text(found.get(each)) for each in columns)]
        for (model, tokens, routing, neighbour), found in by_cell.items()
    ]
    names = [f"{stage} {activation}" for activation, stage in columns]
    return markdown_table(["model", "T", "routing", "neighbour", *names], lines)


def summary(document: Row) -> str:
    """Cliffs by format and stage, binaries by kernel, first calls."""
    lines = []
    for activation in FORMATS:
        for stage in STAGES:
            found = [
                row
                for row in document["rows"]
                if row["relative"] is not None
                and (row["activation"], row["stage"]) == (activation, stage)
            ]
            if found:
                worst = min(found, key=lambda row: row["relative"])
                lines.append(
                    [
                        f"{stage} {activation}",
                        str(len(found)),
                        str(sum(row["cliff"] for row in found)),
                        f"{worst['relative']:.2f}",
                        f"{worst['model']} T={worst['T']} {worst['routing']}",
                    ]
                )
    return "\n\n".join(
        (
            markdown_table(
                ["efficiency over the neighbour's", "cells", f"< {LEAST}", "worst", "where"], lines
            ),
            first_calls_table(document["first_calls"]),
            binaries_table(document),
        )
    )


STATES = {"empty_cache": "empty cache", "kept_cache": "kept cache"}


def first_calls_table(found: Row) -> str:
    """Seconds of each first call, and the longest against its limit."""
    states = [state for state in STATES if state in found]
    names = list(dict.fromkeys(name for state in states for name in found[state]["seconds"]))
    lines = [
        [name, *(f"{found[state]['seconds'][name]:.2f}" for state in states)] for name in names
    ]
    lines.append(
        [
            f"longest (at most {MOST_SECONDS:.0f})",
            *(f"{max(found[state]['seconds'].values()):.2f}" for state in states),
        ]
    )
    return markdown_table(
        ["first call, s", *(STATES[state] for state in states)], lines if states else []
    )


def binaries_table(document: Row) -> str:
    """By kernel: one model's, and those of every shape of this run."""
    one = next(
        (document["first_calls"][state] for state in STATES if state in document["first_calls"]),
        {"by_kernel": {}, "binaries": {}},
    )
    every = document["binaries"]["by_kernel"]
    lines = [
        [name, str(one["by_kernel"].get(name, 0)), str(every.get(name, 0))]
        for name in sorted({*every, *one["by_kernel"]})
    ]
    lines.append(
        [
            f"all (of one model at most {MOST_BINARIES})",
            str(sum(one["by_kernel"].values())),
            str(document["binaries"]["total"]),
        ]
    )
    so_far = ", ".join(f"{count} after {name}" for name, count in one["binaries"].items())
    return markdown_table(["kernel", "binaries of one model", "of all shapes"], lines) + (
        f"\n\nOne model: {so_far}." if so_far else ""
    )


def markdown(document: Row) -> str:
    """Everything: summary, cliffs, all efficiencies, what has no time."""
    meta = document["meta"]
    steep = sorted(
        (row for row in document["rows"] if row["cliff"]), key=lambda row: row["relative"]
    )
    lines = [
        [
            f"{row['model']} T={row['T']} {row['routing']} {row['stage']} {row['activation']}",
            f"{100 * row['efficiency']:.0f}",
            row["neighbour"],
            f"{100 * row['neighbour_efficiency']:.0f}",
            f"{row['relative']:.2f}",
            row["config"],
        ]
        for row in steep
    ]
    columns = ["cell", "% of roof", "neighbour", "its %", "over its", "config"]
    parts = [
        "# Cliffs: untuned shapes, odd T and skewed routings",
        conditions(meta),
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        "## Summary",
        summary(document),
        f"## Cliffs: {len(steep)} of {len(document['rows'])}",
        markdown_table(columns, lines[:OPEN_ROWS]),
    ]
    if lines[OPEN_ROWS:]:
        parts.append(folded("the others", markdown_table(columns, lines[OPEN_ROWS:])))
    parts.append(
        folded("every efficiency in % of the roof (over the neighbour's)", table(document["rows"]))
    )
    absent = [f"- {each['cell']}: `{each['error']}`" for each in meta["failures"]]
    absent += [f"- out of time: {', '.join(meta['left'])}"] if meta["left"] else []
    if absent:
        parts += ["## Not measured", "\n".join(absent)]
    return "\n\n".join(parts) + "\n"


# --- command line -------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routings", default=",".join(ROUTINGS), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help=f"default: {DEFAULT_OUTPUT.name}")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=150.0,
        metavar="SECONDS",
        help="of the whole run, first calls and ceilings included; cells that do "
        "not fit are listed as left; default: %(default)s",
    )
    add_render_option(parser)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: proves that everything runs"
    )
    parser.add_argument(
        "--first-calls",
        action="store_true",
        help="only print this process's first calls and binaries, as JSON",
    )
    return parser.parse_args(arguments)


def prepare_run(
    options: argparse.Namespace, device: torch.device
) -> tuple[Run, dict[Model, list[Cell]]]:
    """Checked options, and the cells."""
    shapes = [SHAPES[name] for name in parse_list(options.shapes, list(SHAPES), "--shapes")]
    cells = plan(
        shapes, parse_tokens(options.tokens), parse_list(options.routings, ROUTINGS, "--routings")
    )
    path = options.output or (DRY_OUTPUT if options.dry_run else DEFAULT_OUTPUT)
    deadline = time.monotonic() + options.time_limit
    return Run(device, options.dry_run, path, {}, deadline), cells


def execute(run: Run, cells: dict[Model, list[Cell]], commit: str | None) -> None:
    """First calls in other processes, then the cells in this one, which finds their binaries in
    the same folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}),
    ):
        compare_first_calls(run)
        run.meta = make_meta(run.device, commit, sustained=False)
        del run.meta["peers"]
        protocol = {"data": run.meta["protocol"]["data"].split(";")[0], **PROTOCOL}
        run.meta |= {"protocol": protocol, "ceilings": measure_ceilings(run.device)}
        print(f"{run.meta['device']}: {run.meta['ceilings']}", flush=True)
        try:
            measure(run, cells)
        except FatalError as error:
            run.fail("the CUDA context is lost", error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every cell that was started passed its gate and has a time."""
    options, began = parse_arguments(arguments), time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    try:
        if options.render is not None:
            return render_again(
                options.render,
                lambda found: markdown({**found, "rows": with_neighbours(found["rows"])}),
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                message("cliffs", "device", "a GPU", "none", "run with --dry-run to try the script")
            )
        if options.first_calls:
            print(json.dumps(time_first_calls(device, options.dry_run)))
            return 0
        run, cells = prepare_run(options, device)
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    execute(run, cells, options.commit)
    document = run.document()
    write_json(run.path, document)
    run.path.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
    print("\n" + table(document["rows"]) + "\n\n" + summary(document) + "\n")
    print(
        f"wrote {run.path} and .md: {len(run.rows)} rows, {len(run.failures)} failures, "
        f"{len(run.left)} cells left, {time.monotonic() - began:.0f} s"
    )
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
