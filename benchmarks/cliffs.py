"""Look for cliffs: skewed routings, odd token counts and shapes never tuned, beside tuned shapes.

    python benchmarks/cliffs.py --output benchmarks/results/nvidia-h200/cliffs.json

mxpert alone. A cell's efficiency is the time that the ceilings of this run allow over the time
taken. Its neighbour is the named model nearest in log H and log F, with uniform routing at the same
T and activation format; a cell is a cliff where the neighbour is more than 1.25 times as efficient.
The same run counts the GPU binaries, and times first calls with an empty and with a filled cache.
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

import _checkout
import torch
from triton.runtime.jit import JITFunction

from cells import ACTIVATION_FORMATS, MODELS, ROUTINGS, Cell, Model, parse_list, parse_tokens
from cells import random_inputs, tiny
from compare import IDLE_SECONDS, FatalError, check_alive, describe, make_meta, measure_ceilings
from document import Row, make_row
from mxpert.cli.measure import RunWeights
from mxpert.cli.report import write_json
from mxpert.errors import message, require
from mxpert.ops.route import route_topk
from mxpert.testing.timing import time_graph
from ours import Call, Ours, random_weights
from render import markdown_table

DEFAULT_OUTPUT = _checkout.ROOT / "benchmarks/results/nvidia-h200/cliffs.json"
DRY_OUTPUT = _checkout.ROOT / "reports/cliffs-dry-run.json"
STAGES = ("gate_up", "down", "layer")
FORMATS = tuple(ACTIVATION_FORMATS.values())
TOKENS = (17, 131, 2053)
FEATURES = (384, 704, 1408, 1536)
HIDDEN = (2048, 4096, 5120)
MOST = 1.25
"""Neighbour's efficiency over a cell's, above which the cell is a cliff."""

MOST_BINARIES = 12
MOST_SECONDS = 20.0
CHILD_SECONDS = 180
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
                  "in the order listed, in a process of its own"}


def _shape(num_experts: int, hidden_size: int, intermediate_size: int) -> Model:
    """A layer with k = 8, under its model's name if it has one."""
    shape = Model(f"E{num_experts}-k8-H{hidden_size}-F{intermediate_size}", num_experts, 8,
                  hidden_size, intermediate_size)
    return next((named for named in MODELS.values()
                 if (named.E, named.k, named.H, named.F) == (
                     shape.E, shape.k, shape.H, shape.F)), shape)


def _shapes() -> dict[str, Model]:
    """Every F with every H, so ordered that the first four show every F and every H."""
    crossed = [_shape(128, HIDDEN[(index + shift) % len(HIDDEN)], features)
               for shift in range(len(HIDDEN)) for index, features in enumerate(FEATURES)]
    few_experts = _shape(32, 5120, 1408)
    return {model.name: model for model in (*crossed[:4], few_experts, *crossed[4:])}


SHAPES = _shapes()


def neighbour_of(model: Model) -> Model:
    """The named model nearest in log H and log F; of equals, the one nearest in log E.

    >>> neighbour_of(Model("mine", 64, 8, 5120, 384)).name
    'kimi-k2-tp4'
    """
    def distance(named: Model) -> tuple[float, float]:
        return (math.hypot(math.log(named.H / model.H), math.log(named.F / model.F)),
                abs(math.log(named.E / model.E)))

    return min(MODELS.values(), key=distance)


def plan(shapes: Iterable[Model], tokens: Sequence[int],
         routings: Sequence[str]) -> dict[Model, list[Cell]]:
    """Cells by model: the neighbours' uniform ones, then those of the shapes."""
    wanted = {model: [Cell(model, count, routing) for routing in routings for count in tokens]
              for model in shapes}
    neighbours = dict.fromkeys(map(neighbour_of, wanted))
    uniform = {model: [Cell(model, count) for count in tokens] for model in neighbours}
    return {model: list(dict.fromkeys([*uniform.get(model, ()), *wanted.get(model, ())]))
            for model in (*neighbours, *wanted)}


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
    first_call: Row = field(default_factory=dict)

    def fail(self, what: str, error: BaseException) -> None:
        """Note what has no time, and why."""
        self.failures.append({"cell": what, "error": describe(error)})
        print(f"{what}: {describe(error)}", file=sys.stderr, flush=True)

    def document(self) -> Row:
        """Everything so far as JSON."""
        by_kernel = count_binaries()
        binaries = {"total": sum(by_kernel.values()), "most": MOST_BINARIES,
                    "by_kernel": by_kernel, "first_call_s": self.first_call,
                    "first_call_most_s": MOST_SECONDS}
        return {"meta": self.meta | {"failures": self.failures, "left": self.left},
                "rows": with_neighbours(self.rows), "binaries": binaries}


def count_binaries() -> dict[str, int]:
    """Kernel of `mxpert.backends` → GPU binaries that this process has loaded for it."""
    found: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("mxpert.backends."):
            continue
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                hashes = {compiled.hash for caches in kernel.device_caches.values()
                          for compiled in caches[0].values()}
                if hashes:
                    found.setdefault(kernel.__name__, set()).update(hashes)
    return {name: len(hashes) for name, hashes in sorted(found.items())}


def with_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Rows with `neighbour_efficiency`, `ratio` and `cliff`; None where the neighbour has no
    time."""
    uniform = {(row["model"], row["T"], row["activation"], row["stage"]): row["efficiency"]
               for row in rows if row["routing"] == "uniform"}
    found = []
    for row in rows:
        best = uniform.get((row["neighbour"], row["T"], row["activation"], row["stage"]))
        ratio = None if best is None else best / row["efficiency"]
        found.append({**row, "neighbour_efficiency": best, "ratio": ratio,
                      "cliff": None if ratio is None else ratio > MOST})
    return found


# --- cells --------------------------------------------------------------------------------------


def measure_cell(run: Run, cell: Cell, full: Model, weights: RunWeights) -> None:
    """Gate both formats, then time what passed; a failure leaves the others.

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
            require(run.dry or backend == "hopper", "cliffs", str(cell), need="the hopper backend",
                    got=backend)
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
    timings = time_graph(timed, device=run.device, repeats=1 if run.dry else REPEATS,
                         warmup=0 if run.dry else 3, failures=failed)
    check_alive(run.device)
    for name, error in failed.items():
        run.fail(f"{cell} {name}", error)
    for name, timing in timings.items():
        activation, stage = name.split("/")
        error, choice = facts[name]
        row = make_row(cell, hit, Ours.impl, activation, stage, timing, error, run.meta["ceilings"])
        run.rows.append({**row, **choice, "efficiency": row["percent_of_roof"] / 100,
                         "neighbour": neighbour_of(full).name})


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


def time_first_calls(device: torch.device, dry: bool) -> dict[str, float]:
    """Seconds of this process's first layers: few and many tokens, both formats."""
    model = tiny(_shape(32, 5120, 1408)) if dry else _shape(32, 5120, 1408)
    weights = random_weights(model, device)
    found = {}
    for activation in FORMATS:
        ours = Ours(model, weights, activation)
        for tokens in (TOKENS[0], TOKENS[-1]):
            inputs = random_inputs(Cell(model, tokens), device)[0]
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            ours._layer(weights.prepared, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[f"{activation} T={tokens}"] = time.perf_counter() - began
    return found


def start_first_calls(dry: bool) -> dict[str, float]:
    """`time_first_calls` of a new process.

    Raises:
        RuntimeError: it failed; the end of what it printed.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--first-calls"]
    done = subprocess.run(command + ["--dry-run"] * dry, capture_output=True, text=True,
                          timeout=CHILD_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-300:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_first_calls(run: Run) -> None:
    """Twice the same calls, each in a process of its own, before this one uses the GPU."""
    for state in ("empty_cache", "kept_cache"):
        try:
            run.first_call[state] = start_first_calls(run.dry)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            run.fail(f"first calls, {state}", error)


# --- tables -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """One line for each model, T and routing: efficiency in %, ratio to the neighbour in brackets,
    cliffs in bold."""
    columns = [(activation, stage) for activation in FORMATS for stage in STAGES]
    by_cell: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        key = row["model"], row["T"], row["routing"], row["neighbour"]
        by_cell.setdefault(key, {})[row["activation"], row["stage"]] = row

    def text(row: Row | None) -> str:
        if row is None:
            return "–"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        found = f"{100 * row['efficiency']:.0f} ({ratio})"
        return f"**{found}**" if row["cliff"] else found

    lines = [[model, str(tokens), routing, neighbour, *(text(found.get(each)) for each in columns)]
             for (model, tokens, routing, neighbour), found in by_cell.items()]
    names = [f"{stage} {activation}" for activation, stage in columns]
    return markdown_table(["model", "T", "routing", "neighbour", *names], lines)


def summary(document: Row) -> str:
    """Cliffs by format and stage, binaries by kernel, first calls."""
    lines = []
    for activation in FORMATS:
        for stage in STAGES:
            found = [row for row in document["rows"] if row["ratio"] is not None
                     and (row["activation"], row["stage"]) == (activation, stage)]
            if found:
                worst = max(found, key=lambda row: row["ratio"])
                lines.append([f"{stage} {activation}", str(len(found)),
                              str(sum(row["cliff"] for row in found)), f"{worst['ratio']:.2f}",
                              f"{worst['model']} T={worst['T']} {worst['routing']}"])
    binaries = document["binaries"]
    kernels = [[name, str(count)] for name, count in binaries["by_kernel"].items()]
    calls = [f"first calls, {state.replace('_', ' ')} (at most {MOST_SECONDS:.0f} s): "
             + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())
             for state, found in binaries["first_call_s"].items()]
    return "\n\n".join((
        markdown_table(["stage", "cells", f"> {MOST}", "worst", "where"], lines),
        markdown_table(["kernel", "binaries"],
                       [*kernels, [f"all (at most {MOST_BINARIES})", str(binaries["total"])]]),
        *calls))


# --- command line -------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routings", default=",".join(ROUTINGS), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help=f"default: {DEFAULT_OUTPUT.name}")
    parser.add_argument("--time-limit", type=float, default=75.0, metavar="SECONDS",
                        help="cells that do not fit are listed as left; default: %(default)s")
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--dry-run", action="store_true",
                        help="tiny shapes on the CPU: proves that everything runs")
    parser.add_argument("--first-calls", action="store_true",
                        help="only print the seconds of this process's first calls, as JSON")
    return parser.parse_args(arguments)


def prepare_run(options: argparse.Namespace, device: torch.device) -> tuple[
        Run, dict[Model, list[Cell]]]:
    """Checked options, and the cells."""
    shapes = [SHAPES[name] for name in parse_list(options.shapes, list(SHAPES), "--shapes")]
    cells = plan(shapes, parse_tokens(options.tokens),
                 parse_list(options.routings, ROUTINGS, "--routings"))
    path = options.output or (DRY_OUTPUT if options.dry_run else DEFAULT_OUTPUT)
    deadline = time.monotonic() + options.time_limit
    return Run(device, options.dry_run, path, {}, deadline), cells


def execute(run: Run, cells: dict[Model, list[Cell]], commit: str | None) -> None:
    """First calls in other processes, then the cells in this one, which finds their binaries in
    the same folder."""
    with (tempfile.TemporaryDirectory() as folder,
          mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder})):
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
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(message("cliffs", "device", "a GPU", "none",
                                     "run with --dry-run to try the script"))
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
    print("\n" + table(document["rows"]) + "\n\n" + summary(document) + "\n")
    print(f"wrote {run.path}: {len(run.rows)} rows, {len(run.failures)} failures, "
          f"{len(run.left)} cells left, {time.monotonic() - began:.0f} s")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
