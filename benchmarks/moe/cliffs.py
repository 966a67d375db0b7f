"""Look for cliffs: skewed routings, odd token counts and shapes never tuned, beside tuned shapes.

    python -m benchmarks.moe.cliffs --output benchmarks/results/nvidia-h200/cliffs.json

writes cliffs.json and cliffs.md beside it. mxpert alone. A cell's efficiency is the time that the
ceilings of this run allow over the time taken. Its neighbour is the named model nearest in log H
and log F, with uniform routing at the same T and activation format. `relative` is the cell's
efficiency over the neighbour's; below 0.8 the cell is a cliff. Processes of their own time first
calls and count the GPU binaries of one model, with an empty and with a filled cache. --render FILE
writes the tables of an earlier run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from benchmarks import ROOT
from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.faults import FatalError, check_alive
from benchmarks.harness.run import Run
from benchmarks.harness.script import Script, machine, parse_list, parse_tokens
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe import cells as named
from benchmarks.moe.cells import NAMED, ROUTINGS, Cell, Model, mean_hit, random_inputs, tiny
from benchmarks.moe.cliff_tables import (
    FORMATS,
    MOST_BINARIES,
    MOST_SECONDS,
    STAGES,
    markdown,
    summary,
    table,
    with_neighbours,
)
from benchmarks.moe.ours import Call, Ours, random_weights
from benchmarks.moe.protocol import DATA, IDLE_SECONDS
from benchmarks.moe.rows import KEY_COLUMNS, make_row
from mxpert.cli.measure import RunWeights
from mxpert.core.cuda_kernel import CudaKernel
from mxpert.errors import message
from mxpert.formats.tensor import Layout
from mxpert.testing.timing import time_graph

TOKENS = (17, 131, 2053)
FEATURES = (384, 704, 1408, 1536)
HIDDEN = (2048, 4096, 5120)
CHILD_SECONDS = 120
REPEATS = 10
PROTOCOL = {
    "data": DATA,
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
    "format, at every T of this script and of moe/run.py",
}


def _shape(num_experts: int, hidden_size: int, intermediate_size: int) -> Model:
    """A layer with k = 8, under its model's name if it has one."""
    sizes = num_experts, 8, hidden_size, intermediate_size
    known = {(model.E, model.k, model.H, model.F): model for model in NAMED.values()}
    return known.get(sizes, Model("E{}-k{}-H{}-F{}".format(*sizes), *sizes))


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


@dataclass(kw_only=True)
class CliffRun(Run):
    """What one invocation works with, and what it has found."""

    first_calls: Row = field(default_factory=dict)

    def miss(self, what: str, error: BaseException) -> None:
        """Note what has no time, and why."""
        print(f"{what}: {self.fail((what,), error)}", file=sys.stderr, flush=True)

    def as_json(self) -> Row:
        """Everything so far."""
        every, found = count_binaries(), super().as_json()
        limits = {"most_s": MOST_SECONDS, "most_binaries": MOST_BINARIES}
        return {
            "meta": found["meta"],
            "rows": with_neighbours(found["rows"]),
            "first_calls": self.first_calls | limits,
            "binaries": {"total": sum(every.values()), "by_kernel": every},
        }


def count_binaries() -> dict[str, int]:
    """Kernel of this library → GPU binaries that this process has loaded for it."""
    found: dict[str, set[str | bytes]] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("mxpert.") or name.startswith("mxpert.testing."):
            continue
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                for caches in kernel.device_caches.values():
                    for compiled in caches[0].values():
                        found.setdefault(kernel.__name__, set()).add(compiled.hash)
            elif isinstance(kernel, CudaKernel):
                found.setdefault(kernel.__name__, set()).update(kernel.binaries)
    return {name: len(hashes) for name, hashes in sorted(found.items())}


# --- cells --------------------------------------------------------------------------------------


def prepare_format(
    run: CliffRun, cell: Cell, ours: Ours, batches: Sequence[Any]
) -> dict[str, tuple[Sequence[Call], float, Row]]:
    """Stage → calls that passed their gate, relative L2, and the kernel that runs."""
    resolution = ours._chosen_weights(batches[0])[1]
    backend = resolution.kernel.backend
    if not run.dry and backend != "hopper":
        raise ValueError(message("cliffs", str(cell), "the hopper backend", backend))
    calls, errors = ours.prepare(cell, batches, STAGES)
    check_alive(run.device)
    choice = {"backend": backend, "config_source": resolution.source}
    choice["config"] = str(resolution.config)
    return {stage: (calls[stage], errors[stage], choice) for stage in STAGES}


def measure_cell(run: CliffRun, cell: Cell, full: Model, weights: RunWeights) -> None:
    """Gate every format, then time what passed; a failure leaves the others.

    Args:
        full: the model before a dry run shrank it; names the neighbour.
    """
    batches = random_inputs(cell, run.device)
    hit = mean_hit(batches, cell.model.k)
    ready: dict[str, tuple[Sequence[Call], float, Row]] = {}
    for activation in FORMATS:
        try:
            found = prepare_format(run, cell, Ours(cell.model, weights, activation), batches)
        except FatalError:
            raise
        except Exception as error:
            run.miss(f"{cell} {activation}", error)
            check_alive(run.device)
            continue
        ready |= {f"{activation}/{stage}": each for stage, each in found.items()}
    if not run.dry:
        run.synchronize()
        time.sleep(IDLE_SECONDS)
    failed: dict[str, Exception] = {}
    timings = time_graph(
        {name: each[0] for name, each in ready.items()},
        device=run.device,
        repeats=1 if run.dry else REPEATS,
        warmup=0 if run.dry else 3,
        failures=failed,
    )
    check_alive(run.device)
    for name, error in failed.items():
        run.miss(f"{cell} {name}", error)
    for name, timing in timings.items():
        _, rel_l2, choice = ready[name]
        kind, ceilings = name.split("/"), run.meta["ceilings"]
        row = make_row(cell, hit, Ours.impl, *kind, timing, rel_l2, ceilings)
        efficiency, neighbour = row["percent_of_roof"] / 100, neighbour_of(full).name
        run.add({**row, **choice, "efficiency": efficiency, "neighbour": neighbour})


def measure(run: CliffRun, cells: dict[Model, list[Cell]]) -> None:
    """All models until the time limit, which a cell as long as the one before must still fit."""
    named = {cell: model for model, wanted in cells.items() for cell in wanted}
    for model, wanted in itertools.groupby(run.each(named), named.__getitem__):
        small = tiny(model) if run.dry else model
        weights = random_weights(small, run.device)
        for cell in wanted:
            try:
                measure_cell(run, Cell(small, cell.tokens, cell.routing), model, weights)
            except FatalError:
                raise
            except Exception as error:
                run.miss(str(cell), error)
                check_alive(run.device)
        del weights


# --- first calls --------------------------------------------------------------------------------


def time_first_calls(device: torch.device, dry: bool) -> Row:
    """Seconds of this process's first layers, few and many tokens in each format, and the binaries
    that it has loaded once the layer has run at every T."""
    model = tiny(_shape(32, 5120, 1408)) if dry else _shape(32, 5120, 1408)
    weights = random_weights(model, device)
    layout = weights.prepared.layout
    if not dry and layout is not Layout.HOPPER_FRAGMENT:
        need = "the layout of the hopper backend"
        raise ValueError(message("cliffs", "weights", need, layout.name))
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
    command = [sys.executable, "-m", "benchmarks.moe.cliffs", "--first-calls"]
    options: dict[str, Any] = dict(capture_output=True, text=True, timeout=CHILD_SECONDS, cwd=ROOT)
    done = subprocess.run(command + ["--dry-run"] * dry, check=False, **options)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-300:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_first_calls(run: CliffRun) -> None:
    """Twice the same calls, each in a process of its own, before this one uses the GPU."""
    for state in ("empty_cache", "kept_cache"):
        try:
            run.first_calls[state] = start_first_calls(run.dry)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            run.miss(f"first calls, {state}", error)


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routings", default=",".join(ROUTINGS), help="default: %(default)s")
    text = "only print this process's first calls and binaries, as JSON"
    parser.add_argument("--first-calls", action="store_true", help=text)


def prepare(options: argparse.Namespace) -> tuple[CliffRun, dict[Model, list[Cell]]]:
    """Checked options, and the cells."""
    shapes = [SHAPES[name] for name in parse_list(options.shapes, list(SHAPES), "--shapes")]
    routings = parse_list(options.routings, ROUTINGS, "--routings")
    run = CliffRun.of(options, {}, KEY_COLUMNS, ("cell",))
    return run, plan(shapes, parse_tokens(options.tokens), routings)


def execute(options: argparse.Namespace, run: CliffRun, cells: dict[Model, list[Cell]]) -> None:
    """First calls in other processes, then the cells in this one, which finds their binaries in
    the same folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}),
    ):
        compare_first_calls(run)
        run.meta = machine(options, *FACTS, protocol=PROTOCOL)
        run.meta["ceilings"] = measure_ceilings(run.device)
        print(f"{run.meta['device']}: {run.meta['ceilings']}", flush=True)
        try:
            measure(run, cells)
        except FatalError as error:
            run.miss("the CUDA context is lost", error)


def search(options: argparse.Namespace, prepared: tuple[CliffRun, dict[Model, list[Cell]]]) -> int:
    """Run it; 0 if every cell that was started passed its gate and has a time."""
    if options.first_calls:
        print(json.dumps(time_first_calls(options.device, options.dry_run)))
        return 0
    run, cells = prepared
    execute(options, run, cells)
    document = run.as_json()
    run.save()
    SCRIPT.write_tables(run.path, document)
    print(f"\n{table(document['rows'])}\n\n{summary(document)}\n")
    print(
        f"wrote {run.path} and .md: {len(run.rows)} rows, {len(run.failures)} failures, "
        f"{len(run.left)} cells left, {time.monotonic() - options.began:.0f} s"
    )
    return 1 if run.failures else 0


SCRIPT = Script("cliffs", __doc__, search, prepare, add_options, limit=150.0, markdown=markdown)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
