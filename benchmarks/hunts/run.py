"""Hunt for races: every kernel variant again and again on the same data must give the same bits.

    python -m benchmarks.hunts.run --output benchmarks/results/nvidia-h200/hunts.json
    python -m benchmarks.hunts.run --dry-run --plant 1    # on any machine: the hunt finds an error

Several processes share the GPU; each takes the next variant and repeats it in CUDA graphs beside
other work on a second stream, with fresh data after each batch. Differing values are counted on the
device. Writes hunts.json and hunts.md; --resume hunts what an earlier run left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import torch

from benchmarks.harness.document import RUN, Document, Row
from benchmarks.harness.faults import describe
from benchmarks.harness.script import Script, machine
from benchmarks.harness.tables import absences, bullets, folded, page, row_table, where
from benchmarks.hunts.variants import Variant, variants
from mxpert.errors import require
from support.races import LOAD_ROUNDS, hunt

FRESH = 500
"""Repeats on the same data."""
PER_GRAPH = 10
DRY_REPEATS, DRY_FRESH = 6, 3
JOIN_SECONDS = 20.0
PROTOCOL = {
    "repeats": f"batches of {FRESH} on the same data in CUDA graphs of {PER_GRAPH}, every result "
    "compared bit for bit with the batch's first on the device; then fresh activations, "
    "weights, routings and group sizes",
    "load": f"{LOAD_ROUNDS} matrix products and copies on a second stream at the start of a batch; "
    "the other processes hunt on the same GPU",
    "mismatches": "values that differed, over all repeats",
}


@dataclass(frozen=True)
class Order:
    """What a process needs to know of a run."""

    device: str
    dry: bool
    repeats: int | None
    plant: int | None
    processes: int
    deadline: float


def hunt_one(variant: Variant, order: Order) -> Row:
    """Repeat one variant until it has its repeats or the time is over."""
    device, began = torch.device(order.device), time.monotonic()
    wanted = DRY_REPEATS if order.dry else order.repeats or variant.repeats
    fresh = DRY_FRESH if order.dry else min(FRESH, wanted)
    with variant.pinned(order.dry):
        problem = variant.make(device, order.dry)
        ready = time.monotonic()
        found = hunt(
            problem.run,
            problem.renew,
            wanted,
            device,
            fresh=fresh,
            plant=order.plant,
            per_graph=1 if order.dry else PER_GRAPH,
            deadline=order.deadline,
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    now = time.monotonic()
    return {
        "name": variant.name,
        "config": problem.config,
        "shape": variant.shape,
        "wanted": wanted,
        **asdict(found),
        "processes": order.processes,
        "seconds": now - ready,
        "setup_seconds": ready - began,
    }


def work(names: Any, answers: Any, order: Order) -> None:
    """A process: variants from one queue, ("begun" or "done" or "failed", name, row or error) into
    the other. A lost CUDA context ends it."""
    known = {variant.name: variant for variant in variants()}
    while (name := names.get()) is not None:
        if time.monotonic() > order.deadline:
            continue
        answers.put(("begun", name, None))
        try:
            answers.put(("done", name, hunt_one(known[name], order)))
        except Exception as error:
            answers.put(("failed", name, describe(error)))
            if order.device == "cuda":
                torch.cuda.synchronize()


@dataclass
class Hunts(Document):
    """The document in the making; rows in the order of all variants."""

    every: Sequence[Variant] = ()

    def finished(self, name: str) -> bool:
        row = self.rows.get((name,))
        return row is not None and row["repeats"] >= row["wanted"]

    def as_json(self) -> Row:
        names = [each.name for each in self.every if (each.name,) not in self.failures]
        self.left = [name for name in names if not self.finished(name)]
        order = [each.name for each in variants()]
        found = super().as_json()
        return found | {"rows": sorted(found["rows"], key=lambda row: order.index(row["name"]))}


def answers_of(order: Order, names: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """What the processes say, until all names are answered or all processes have ended."""
    if order.processes == 1:
        waiting: Any = queue.SimpleQueue()
        heard: Any = queue.SimpleQueue()
        for name in (*names, None):
            waiting.put(name)
        work(waiting, heard, order)
        while not heard.empty():
            yield heard.get()
        return
    context = multiprocessing.get_context("spawn")
    waiting, heard = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(waiting, heard, order), daemon=True)
        for _ in range(order.processes)
    ]
    for worker in workers:
        worker.start()
    for name in (*names, *[None] * len(workers)):
        waiting.put(name)
    while True:
        alive = any(worker.is_alive() for worker in workers)
        try:
            yield heard.get(timeout=0.5)
        except queue.Empty:
            if not alive or time.monotonic() > order.deadline + JOIN_SECONDS:
                break
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()


def run_hunts(hunts: Hunts, order: Order) -> None:
    """Hunt what is not finished; a variant whose process ended within it has failed."""
    names = [each.name for each in hunts.every if not hunts.finished(each.name)]
    begun: dict[str, None] = {}
    for kind, name, answer in answers_of(order, names):
        if kind == "begun":
            begun[name] = None
            continue
        begun.pop(name, None)
        if kind == "failed":
            print(f"{name}: {hunts.fail((name,), answer)}", file=sys.stderr, flush=True)
        else:
            hunts.add(answer)
            print(
                "{name}: {repeats} repeats, {mismatches} mismatches, {seconds:.1f} s + "
                "{setup_seconds:.1f} s".format(**answer),
                flush=True,
            )
        hunts.save()
    for name in begun:
        hunts.fail((name,), "the process ended, or did not end in time")
    hunts.save()


# --- tables -------------------------------------------------------------------------------------

DETAIL = {
    "variant": "{name}",
    "shape": "{shape}",
    "repeats": "{repeats:,}",
    "values that differed": "{mismatches}",
    "seconds": "{seconds:.1f}",
    "config": "{config}",
}


def summary(document: Row) -> str:
    """One line for each kind of kernel."""
    kinds: dict[str, list[Row]] = {}
    for row in document["rows"]:
        kinds.setdefault(row["name"].split("/")[0], []).append(row)
    lines = [
        {"kind": kind, "variants": len(rows), "fewest": min(row["repeats"] for row in rows)}
        | {
            name: sum(row[name] for row in rows)
            for name in ("repeats", "mismatches", "seconds", "setup_seconds")
        }
        for kind, rows in kinds.items()
    ]
    columns = {
        "kernels": "{kind}",
        "variants": "{variants}",
        "fewest repeats": "{fewest:,}",
        "repeats in all": "{repeats:,}",
        "values that differed": "{mismatches}",
        "seconds": "{seconds:.0f}",
        "seconds of setup": "{setup_seconds:.0f}",
    }
    return row_table(lines, columns)


def markdown(document: Row) -> str:
    """Summary, every variant, what is missing."""
    meta = document["meta"]
    control = (
        f"**Control: one bit of repeat {meta['planted']} of every variant was "
        "flipped and must be found.**"
    )
    failures = [f"{name}: `{error}`" for name, error in meta["failures"].items()]
    counts = sorted({row["processes"] for row in document["rows"]})
    processes = " or ".join(map(str, counts))
    return page(
        "# Race hunts",
        "" if meta["planted"] is None else control,
        f"{where(meta)}; {processes} processes at once, {meta['seconds']:.0f} s.",
        bullets(meta["protocol"]),
        summary(document),
        folded("every variant", row_table(document["rows"], DETAIL)),
        absences("Not finished", failures, meta["left"]),
    )


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--variants", default="*", metavar="PATTERN", help="shell pattern of names; default: all")
    add("--repeats", type=int, help="of each variant (default: its own number)")
    add("--processes", type=int, default=8, help="default: %(default)s")
    text = "control: flip one bit in this repeat of every variant"
    add("--plant", type=int, metavar="REPEAT", help=text)


def prepare(options: argparse.Namespace) -> tuple[Hunts, Order]:
    """Checked options: the document, and what the processes are told."""
    number, pattern = options.processes, options.variants
    require(number > 0, "hunts", "--processes", need="at least 1", got=number)
    every = [each for each in variants() if fnmatch(each.name, pattern)]
    need = "a pattern that matches a name"
    require(bool(every), "hunts", "--variants", need=need, got=repr(pattern))
    names = ("device", "versions", "date", "commit")
    meta = machine(options, *names, protocol=PROTOCOL, planted=options.plant)
    meta |= {"processes": number, "seconds": 0.0}
    hunts = Hunts(options.path, meta, ("name",), every=every)
    if options.resume and options.path.is_file():
        old = json.loads(options.path.read_text("utf-8"))
        hunts.resume(old, (*RUN, "planted"))
        meta["seconds"] = old["meta"]["seconds"]
    case = options.device.type, options.dry_run, options.repeats, options.plant
    return hunts, Order(*case, number, options.deadline)


def measure(options: argparse.Namespace, prepared: tuple[Hunts, Order]) -> int:
    """Run it; 0 if nothing differed and nothing failed, or with --plant if every variant that ran
    found the planted bit and nothing else."""
    hunts, order = prepared
    run_hunts(hunts, order)
    hunts.meta["seconds"] += time.monotonic() - options.began
    hunts.save()
    document = hunts.as_json()
    SCRIPT.write_tables(hunts.path, document)
    expected = 0 if options.plant is None else 1
    wrong = [row["name"] for row in document["rows"] if row["mismatches"] != expected]
    print(
        f"\n{summary(document)}\n\nwrote {hunts.path} and .md: {len(document['rows'])} variants, "
        f"{len(wrong)} wrong, {len(hunts.failures)} failures, {len(hunts.left)} left, "
        f"{time.monotonic() - options.began:.0f} s"
    )
    return 1 if wrong or hunts.failures else 0


SCRIPT = Script(
    "hunts", __doc__, measure, prepare, add_options, limit=240.0, resumes=True, markdown=markdown
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
