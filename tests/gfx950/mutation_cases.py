"""Kernels whose mutants are judged, and the record of what is caught.

    PYTHONPATH=.:tests:gfx950-emulator/tests python tests/gfx950/mutation_cases.py

judges the mutants of all cases, in as many processes as there are cores, and writes `RECORD`; with
names of cases it replaces theirs. ``--each 8`` judges a fixed sample, eight of each kind evenly
spaced in the listing. The table of docs/gfx950.md is that of the record; ``--page`` writes it
alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

import mxpert
from mxpert.core.problem import GroupedProblem, Op
from mxpert.grouped.cdna4 import GROUPED_GEMM
from mxpert.moe.cdna4.config import prefill_config
from mxpert.testing.gfx950 import MI355X
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.gfx950_exchange import captured
from support.gfx950_mutants import Launch, Mutant, Trial, capture, digest, sample, tally
from support.layers import run_layer
from support.weight_formats import in_format

RECORD = Path(__file__).with_name("mutants.json")
"""By case: the kernel, Triton's version, a digest of the listing, how many mutants of each kind
were judged (null: all), their number by kind and verdict, and each survivor: its label and kind,
the source line, and why it survives."""

PAGE = Path(__file__).parents[2] / "docs/gfx950.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
"""Around what `PAGE` shows of `RECORD`."""
GEMMS = ("_moe_gate_up_kernel", "_moe_down_kernel", "_moe_gemm_")
"""How the names of the kernels begin."""


class Layer(NamedTuple):
    """One GEMM of a layer with one expert, whose rows fill a tile.

    Args:
        backend: "triton" or "cdna4". a_format: of the activations. block_m: rows of the expert
            and of a tile. depth: H and F. stage: 1 or 2. w_format: of the weights.
    """

    backend: str
    a_format: str
    block_m: int
    depth: int
    stage: int
    w_format: str = "mxfp4"


class Grouped(NamedTuple):
    """A grouped GEMM with MXFP8 operands and two groups, one of which is ragged.

    Args:
        block_m: rows of a tile. n, k: columns of the result, and depth. trans_b: of the op.
    """

    block_m: int
    n: int
    k: int
    trans_b: bool = True


class Exchange(NamedTuple):
    """A kernel of the exchange between two ranks, on the first of them."""

    kernel: str


CASES: dict[str, Layer | Grouped | Exchange] = {
    "triton decode a8w4 stage 1": Layer("triton", "mxfp8", 16, 1024, 1),
    "triton decode a4w4 stage 2": Layer("triton", "mxfp4", 16, 1024, 2),
    "triton prefill a8w4 stage 1": Layer("triton", "mxfp8", 128, 768, 1),
    "triton prefill a4w4 stage 2": Layer("triton", "mxfp4", 128, 768, 2),
    "cdna4 decode a8w4 stage 1": Layer("cdna4", "mxfp8", 16, 1024, 1),
    "cdna4 decode a4w4 stage 2": Layer("cdna4", "mxfp4", 16, 1024, 2),
    "cdna4 decode a16w4 stage 1": Layer("cdna4", "bf16", 16, 1024, 1),
    "cdna4 prefill a8w4 stage 1": Layer("cdna4", "mxfp8", 256, 768, 1),
    "cdna4 prefill a4w4 stage 1": Layer("cdna4", "mxfp4", 256, 768, 1),
    "cdna4 decode a8w8 stage 1": Layer("cdna4", "mxfp8", 16, 1024, 1, "mxfp8_e4m3"),
    "cdna4 prefill a8w8 stage 1": Layer("cdna4", "mxfp8", 128, 768, 1, "mxfp8_e4m3"),
    "cdna4 grouped gemm": Grouped(256, 256, 640),
    "cdna4 grouped gemm across": Grouped(256, 256, 640, trans_b=False),
    "exchange dispatch": Exchange("_exchange_dispatch_kernel"),
    "exchange combine": Exchange("_exchange_combine_kernel"),
    "exchange sort": Exchange("_routing_plan_expert_kernel"),
}


def blocks(rows: int, depth: int, seed: int) -> torch.Tensor:
    """Powers of two, float32 [rows, depth], which differ between blocks of 32."""
    exponents = torch.randint(-2, 3, (rows, depth // 32), generator=draw(seed))
    return torch.exp2(exponents).repeat_interleave(32, 1)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs_of(case: Layer) -> MoEInputs:
    """Random data whose block scales differ, so that a wrong scale byte changes the result."""
    shape = MoEShape(case.depth, case.depth, 1, 1, mxpert.SiLU(), has_bias=True)
    inputs = random_moe_problem(shape, case.block_m, seed=3)
    weights = in_format(inputs.weights, case.w_format, exact=True)
    inputs = replace(inputs, weights=weights)
    return replace(inputs, x=inputs.x * blocks(case.block_m, case.depth, 4).bfloat16())


def launch_of(case: Layer | Grouped | Exchange) -> Launch:
    """The launch of a case's kernel."""
    if isinstance(case, Exchange):
        return captured(case.kernel)
    return grouped_launch(case) if isinstance(case, Grouped) else layer_launch(case)


def layer_launch(case: Layer) -> Launch:
    """The launch of one stage of a layer."""
    inputs, portable = inputs_of(case), case.backend == "triton"
    config = None
    if case.block_m > 16 and not portable:
        config = mxpert.configs.MoEConfig(case.block_m, *[prefill_config(case.block_m)] * 2)
    override = mxpert.override(backend=case.backend, config=config)
    with capture(GEMMS, case.stage) as launches, override:
        run_layer(
            inputs,
            weights=None if portable else inputs.weights.prepare(device="cpu"),
            activation_format=case.a_format,
        )
    return launches[-1]


def grouped_launch(case: Grouped) -> Launch:
    """The launch of a grouped GEMM; its first tile is full."""
    rows = case.block_m + 40
    offsets = torch.tensor([0, case.block_m, rows], dtype=torch.int32)
    x = torch.randn(rows, case.k, generator=draw(3)) * blocks(rows, case.k, 4)
    w = torch.randn(2 * case.n, case.k, generator=draw(5)) * blocks(2 * case.n, case.k, 6)
    a = mxpert.quantize(x, "mxfp8_e4m3")
    w = w.view(2, case.n, case.k)
    if case.trans_b:
        b = mxpert.quantize(w, "mxfp8_e4m3")
    else:
        b = mxpert.quantize(w.mT.contiguous(), "mxfp8_e4m3", axis=-2)
    formats = ("mxfp8_e4m3", "mxfp8_e4m3", case.trans_b, torch.float32)
    problem = GroupedProblem(Op.GROUPED_GEMM, MI355X, rows, 2, case.n, case.k, *formats)
    config = next(each for each in GROUPED_GEMM.configs(problem) if each.block_m == case.block_m)
    override = mxpert.override(backend="cdna4", config=config)
    with capture(("_grouped_gemm",), 1) as launches, override:
        mxpert.grouped_gemm(a, b, offsets, trans_b=case.trans_b, out_dtype=torch.float32)
    return launches[-1]


def survivor(trial: Trial, mutant: Mutant) -> dict[str, str | None]:
    """How a survivor is recorded. Lines move with comments, so labels do not name them."""
    return {
        "label": mutant.label,
        "kind": mutant.kind,
        "line": mutant.original.line,
        "reason": trial.reason(mutant),
    }


class Part(NamedTuple):
    """Every ``of``-th mutant of a case, from `first` on. each: as ``--each``."""

    name: str
    each: int | None
    first: int
    of: int


class Judged(NamedTuple):
    """Head of a case's record, and for each mutant of a part: its place, kind, verdict, and how it
    is recorded if it survives."""

    part: Part
    head: dict[str, Any]
    mutants: list[tuple[int, str, str, dict[str, str | None] | None]]
    seconds: float


def judge(part: Part) -> Judged:
    """Judge the mutants of a part."""
    start = time.monotonic()
    launch = launch_of(CASES[part.name])
    trial = Trial(launch)
    mutants = []
    for place, mutant in list(enumerate(sample(trial.mutants, part.each)))[part.first :: part.of]:
        verdict = trial.judge(mutant)
        found = survivor(trial, mutant) if verdict == "survived" else None
        mutants.append((place, mutant.kind, verdict, found))
    head = {
        "kernel": launch.name,
        "triton": triton.__version__,
        "digest": digest(launch.code.executable),
        "judged_of_each_kind": part.each,
    }
    return Judged(part, head, mutants, time.monotonic() - start)


def record(parts: list[Judged]) -> dict[str, Any]:
    """The record of a case, from all of its parts."""
    mutants = sorted(each for part in parts for each in part.mutants)
    return {
        **parts[0].head,
        "counts": tally((kind, verdict) for _, kind, verdict, _ in mutants),
        "survivors": [found for *_, found in mutants if found is not None],
    }


def shown(recorded: dict[str, Any]) -> str:
    """What the page shows of a record: totals, and a line for each kind of mutant."""
    kinds: dict[str, Counter[str]] = {}
    for row in recorded.values():
        for kind, counts in row["counts"].items():
            kinds.setdefault(kind, Counter()).update(counts)
    total = sum(kinds.values(), Counter())
    lines = [
        f"{total.total() - total['survived']:,} of {total.total():,} mutants of {len(recorded)} "
        f"kernels are noticed: {total['fault']:,} by a fault, {total['wrong']:,} by a wrong "
        f"result. The record has the reason why each of the other {total['survived']:,} changes no "
        "bit.",
        "",
        "| mutant | judged | fault | wrong result | survives |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, counts in kinds.items():
        numbers = counts.total(), counts["fault"], counts["wrong"], counts["survived"]
        lines.append(f"| {kind} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join((BEGIN, "", *lines, "", END))


def write_page() -> None:
    """Replace what `PAGE` shows of the record."""
    page = PAGE.read_text("utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(before + shown(json.loads(RECORD.read_text("utf-8"))) + after, "utf-8")


def main(names: list[str], each_kind: int | None) -> None:
    """Record the named cases, or all."""
    recorded = json.loads(RECORD.read_text("utf-8")) if names and RECORD.exists() else {}
    cores = len(os.sched_getaffinity(0))
    parts = [Part(name, each_kind, core, cores) for name in names or CASES for core in range(cores)]
    done: dict[str, list[Judged]] = {}
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for judged in pool.imap_unordered(judge, parts):
            name = judged.part.name
            finished = done.setdefault(name, [])
            finished.append(judged)
            if len(finished) < cores:
                continue
            recorded[name] = record(finished)
            rows = recorded[name]["counts"].values()
            total, survived = sum(sum(row.values()) for row in rows), recorded[name]["survivors"]
            seconds = sum(each.seconds for each in finished)
            print(f"{name}: {total - len(survived)} of {total} caught, {seconds:.0f} s", flush=True)
            text = json.dumps({key: recorded[key] for key in CASES if key in recorded}, indent=1)
            RECORD.write_text(text + "\n", "utf-8")
    write_page()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--each", type=int, help="mutants of each kind; all by default")
    parser.add_argument("--page", action="store_true", help="only write the table of the page")
    options = parser.parse_args()
    if options.page:
        write_page()
    else:
        main(options.names, options.each)
