"""MXFP8 grouped GEMM for training beside torch and DeepGEMM: same GPU, same process, same data.

    python -m benchmarks.grouped.run --peers DIR [--output FILE] [--resume]

Forward, dgrad and wgrad of sixteen shapes with balanced, random and skewed groups, as kernels and
as a whole layer with its quantisation; then the quantisers. Nothing is timed before it was compared
with float64. The JSON is whole after every cell; grouped/render.py makes tables and a plot of it.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.grouped.cells import (
    BALANCES,
    MODES,
    SHAPES,
    Operands,
    Part,
    Shape,
    parse_shapes,
    sample,
    tiny,
)
from benchmarks.grouped.ours import OURS, Ours, Variant, check
from benchmarks.grouped.peers import Compiler, DeepGemm, Jobs, torch_variants
from benchmarks.grouped.quantiser import cases, check_case, make_quantiser_row
from benchmarks.grouped.rows import KEY_COLUMNS, SCHEMA, make_row
from benchmarks.harness.document import FACTS, Document, Row
from benchmarks.harness.faults import FATAL, FatalError, check_alive
from benchmarks.harness.script import Script, machine, within
from benchmarks.harness.timing import PAUSE, measure_ceilings, time_calls
from benchmarks.moe.peers import add_to_path

REPEATS = 7
COMPILE_SECONDS = 90.0
"""How long peers may compile before anything is timed."""

PORTABLE_MODE = "exact"
Makers = list[tuple[str, Callable[[], list[Variant]]]]


@dataclass
class Run:
    """What one invocation works with."""

    device: torch.device
    document: Document
    shapes: list[Shape]
    balances: list[str]
    modes: list[str]
    deadline: float
    pause: float
    has_deepgemm: bool
    compiler: Compiler | None = None
    jobs: Jobs = field(default_factory=dict)

    def missing(self) -> list[tuple[str, Shape]]:
        """Cells without a row, balanced ones first."""
        done = {(row["balance"], row["shape"]) for row in self.document.rows.values()}
        cells = [(balance, shape) for balance in self.balances for shape in self.shapes]
        return [cell for cell in cells if (cell[0], str(cell[1])) not in done]


def attempt(run: Run, place: str, name: str, step: Callable[[], Any]) -> Any:
    """The result of a step, or None where it failed, which is noted."""
    try:
        result = step()
        check_alive(run.device)
        return result
    except FatalError:
        raise
    except Exception as error:
        print(f"  {place} {name}: {run.document.fail((place, name), error)}"[:300], flush=True)
        if not isinstance(error, (RuntimeError, ValueError, ImportError)):
            traceback.print_exc()
        check_alive(run.device)
        return None


def our_variants(
    run: Run, data: Operands, mode: str, main_grad: torch.Tensor, backend: str | None = None
) -> list[Variant]:
    """The kernels and the layer of one mode; the portable backend's kernels alone."""
    ours = Ours(data, mode, backend)
    found = ours.kernels(main_grad)
    kernels = run.document.meta.setdefault("kernels", {})
    kernels.setdefault(f"{ours.impl}/{mode}", ours.explain())
    return found if backend else [*found, *ours.layer()]


def makers(run: Run, data: Operands, balance: str) -> Makers:
    """What makes the variants of a cell, ours first."""
    shape = data.shape
    main_grad = torch.zeros(shape.G, shape.N, shape.K, device=run.device)
    found: Makers = [
        (f"{OURS}/{mode}", lambda mode=mode: our_variants(run, data, mode, main_grad))
        for mode in run.modes
    ]
    if shape == run.shapes[0] and balance == BALANCES[0] and run.device.type == "cuda":
        portable = functools.partial(our_variants, run, data, PORTABLE_MODE, main_grad, "triton")
        found.append((f"{OURS}_triton/{PORTABLE_MODE}", portable))
    peers = torch_variants(data)
    if run.has_deepgemm:
        peers |= DeepGemm(data).variants(run.jobs)
    return [*found, *((name, lambda make=make: [make()]) for name, make in peers.items())]


def run_cell(run: Run, shape: Shape, balance: str) -> None:
    """Check, then time everything in turns, then save."""
    began, place = time.monotonic(), f"{shape} {balance}"
    data = Operands.random(shape, balance, run.device)
    parts = sample(data)
    checked: dict[str, tuple[Variant, tuple[float | None, float]]] = {}
    for name, make in makers(run, data, balance):
        for variant in attempt(run, place, name, make) or []:
            found = attempt(run, place, variant.name, lambda v=variant: check(v, data, parts))
            if found is not None:
                checked[variant.name] = variant, found
    failures: dict[str, Exception] = {}
    load: dict[str, Any] = dict(device=run.device, repeats=repeats(run), pause=run.pause)
    timings = time_calls(
        {name: each[0].call for name, each in checked.items()}, failures=failures, **load
    )
    check_alive(run.device)
    for name, timing in timings.items():
        variant, (rel_l2, snr_db) = checked[name]
        run.document.add(make_row(shape, balance, variant, timing, snr_db, rel_l2))
    for name, error in failures.items():
        run.document.fail((place, name), error)
    checked.clear()
    if balance == BALANCES[0]:
        measure_quantisers(run, data, parts)
    run.document.save()
    print(f"{place}: {time.monotonic() - began:.1f} s, {len(timings)} variants", flush=True)


def measure_quantisers(run: Run, data: Operands, parts: Sequence[Part]) -> None:
    """quantize_dual and rebase on the operands of a cell."""
    place = f"{data.shape} quantiser"
    sound = {}
    for case in cases(data, run.modes):
        if attempt(run, place, case.name, lambda case=case: (check_case(case, parts), True)):
            sound[case.name] = case
    calls = {name: case.call for name, case in sound.items()}
    timings = time_calls(calls, device=run.device, repeats=repeats(run), pause=run.pause)
    run.document.sections["quantiser"] += [
        make_quantiser_row(data, sound[name], timing, run.document.meta["ceilings"])
        for name, timing in timings.items()
    ]


def repeats(run: Run) -> int:
    return REPEATS if run.device.type == "cuda" else 1


def run_cells(run: Run) -> None:
    """All cells, balanced ones first, until one as long as the longest would not fit."""
    if run.device.type == "cuda":
        warm_up(run)  # a first cell that compiles would count as the longest
    if run.compiler is not None:
        run.jobs = run.compiler.wait(min(run.deadline, time.monotonic() + COMPILE_SECONDS))
        run.document.meta["peers"]["deepgemm"] = summary(run.jobs)
        print(f"deepgemm: {run.document.meta['peers']['deepgemm']}", flush=True)
    left: list[tuple[str, Shape]] = []
    for balance, shape in within(run.missing(), run.deadline, left):
        run_cell(run, shape, balance)
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    if left:
        balance, shape = left[0]
        print(f"time limit: {shape} {balance} and what follows is left out", flush=True)


def warm_up(run: Run) -> None:
    """Compile our own kernels while the peers' compiler runs."""
    data = Operands.random(run.shapes[0], BALANCES[0], run.device)
    main_grad = torch.zeros(data.weight.shape, device=run.device)
    for mode in run.modes:
        make = functools.partial(our_variants, run, data, mode, main_grad)
        for variant in attempt(run, "warm-up", mode, make) or []:
            attempt(run, "warm-up", variant.name, variant.call)


def summary(jobs: Jobs) -> str:
    """How many of DeepGEMM's kernels were compiled, and why not all."""
    missing = sorted({job.error for job in jobs.values() if job.error})
    padded = sorted(
        f"{shape} {op}: depth padded to 128"
        for (shape, _, op), job in jobs.items()
        if job.pad_depth
    )
    counted = f"{sum(not job.error for job in jobs.values())} of {len(jobs)} variants compiled"
    return "; ".join([counted, *padded, *missing])


PROTOCOL = {
    "timing": f"eager calls in turns between events, host time hidden by a spinning "
    f"kernel; median of {REPEATS}; operands larger than L2",
    "data": "normal values; random: shares drawn evenly; skewed: Zipf sizes in shuffled order, one "
    "group empty",
    "work": "TFLOP/s of real rows; DeepGEMM's groups are padded to 128 rows before the "
    "clock runs, those of torch's wgrad to 16",
    "with_quant": "mxpert: grouped_linear and its autograd, bfloat16 to bfloat16, both "
    "copies made; backward: dgrad and wgrad; forward+backward: everything, torch: its three GEMMs",
    "wgrad": "wgrad: bfloat16 result; wgrad_accumulate: added to float32",
    "snr_db": "sampled rows, to float64 on unquantised operands; rel_l2: to float64 on "
    "the dequantised operands, ours alone",
}


def make_meta(options: argparse.Namespace) -> Row:
    """Everything but the ceilings."""
    idle = f"{PAUSE:g} times a call's duration after it"
    protocol = {"pause": "none: sustained load" if options.sustained else idle, **PROTOCOL}
    peers = {"torch": "present"}
    return machine(options, *FACTS, ceilings={}, kernels={}, peers=peers, protocol=protocol)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    numbers = {str(index): shape for index, shape in enumerate(SHAPES, 1)}
    text = ", ".join(f"{number} = {shape}" for number, shape in numbers.items())
    add("--shapes", default=",".join(numbers), help=f"numbers of shapes: {text}")
    add("--balances", nargs="+", choices=BALANCES, default=list(BALANCES))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--peers", type=Path, help="directory that holds deep_gemm")
    add("--sustained", action="store_true", help="no pauses between calls")


def prepare_run(options: argparse.Namespace) -> Run:
    """Checked options, ceilings, and DeepGEMM's compiler at work."""
    shapes = [tiny(shape) if options.dry_run else shape for shape in parse_shapes(options.shapes)]
    if options.peers is not None:
        add_to_path(options.peers)
    device, meta = options.device, make_meta(options)
    document = Document(options.path, meta, KEY_COLUMNS, ("cell", "variant"), saves_left=False)
    document.sections["quantiser"] = []
    if options.resume and options.path.is_file():
        take_over(document, SCHEMA.load(options.path))
    else:
        meta["ceilings"] = measure_ceilings(device)
    has_deepgemm = options.peers is not None and (options.peers / "deep_gemm").is_dir()
    if not has_deepgemm:
        meta["peers"]["deepgemm"] = "absent: no --peers directory with deep_gemm"
    pause = 0.0 if options.sustained else PAUSE
    what = shapes, options.balances, options.modes
    run = Run(device, document, *what, options.deadline, pause, has_deepgemm)
    if has_deepgemm and device.type == "cuda":
        left = dict.fromkeys(shape for _, shape in run.missing())
        run.compiler = Compiler(options.peers, list(left))
    return run


def take_over(document: Document, old: Row) -> None:
    """Go on where an earlier run ended, with its ceilings and its failures."""
    document.resume(old)
    document.sections["quantiser"] = old["quantiser"]
    document.keep_failures(old)
    document.meta |= {name: old["meta"][name] for name in ("ceilings", "kernels")}


def measure(options: argparse.Namespace, run: Run) -> int:
    """Run it; 0 if every variant of mxpert has a time, 3 if the CUDA context was lost."""
    document = run.document
    print(f"{document.meta['device']}: {document.meta['ceilings']}", flush=True)
    try:
        run_cells(run)
    except FatalError as error:
        print(f"the CUDA context is lost: {error}", file=sys.stderr)
        document.save()
        return FATAL
    document.save()
    failures = document.failures.items()
    red = {key: text for key, text in failures if key[1].startswith(OURS) or "quantiser" in key[0]}
    for (cell, variant), text in red.items():
        print(f"no time for {cell} {variant}: {text}", file=sys.stderr)
    print(
        f"wrote {document.path}: {len(document.rows)} rows, "
        f"{len(document.sections['quantiser'])} of quantisers, {len(failures)} failures, "
        f"{time.monotonic() - options.began:.0f} s"
    )
    return 1 if red else 0


SCRIPT = Script(
    "grouped_gemm", __doc__, measure, prepare_run, add_options, limit=math.inf, resumes=True
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
