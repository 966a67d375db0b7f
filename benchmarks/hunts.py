"""Hunt for races: every kernel variant again and again on the same data must give the same bits.

    python benchmarks/hunts.py --output benchmarks/results/nvidia-h200/hunts.json
    python benchmarks/hunts.py --dry-run --plant 1        # on any machine: the hunt finds an error

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
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from harness.faults import describe
from hunt_variants import Variant, variants
from render import add_render_option, folded, markdown_table, render_again

from mxpert.cli.report import environment, write_json
from mxpert.errors import message, require
from support.races import LOAD_ROUNDS, hunt

Row = dict[str, Any]
DEFAULT_OUTPUT = ROOT / "benchmarks/results/nvidia-h200/hunts.json"
DRY_OUTPUT = ROOT / "reports/hunts-dry-run.json"
FRESH = 500
"""Repeats on the same data."""
PER_GRAPH = 10
DRY_REPEATS, DRY_FRESH = 6, 3
JOIN_SECONDS = 20.0
KEPT = ("device", "commit", "protocol")
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
        "repeats": found.repeats,
        "mismatches": found.mismatches,
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
class Hunts:
    """The document in the making."""

    path: Path
    meta: Row
    rows: dict[str, Row] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def finished(self, name: str) -> bool:
        return name in self.rows and self.rows[name]["repeats"] >= self.rows[name]["wanted"]

    def document(self, every: Sequence[Variant]) -> Row:
        left = [
            each.name
            for each in every
            if not self.finished(each.name) and each.name not in self.failures
        ]
        names = [each.name for each in variants()]
        rows = sorted(self.rows.values(), key=lambda row: names.index(row["name"]))
        return {"meta": self.meta | {"failures": self.failures, "left": left}, "rows": rows}

    def save(self, every: Sequence[Variant]) -> None:
        write_json(self.path, self.document(every))


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
            if not alive:
                break
            if time.monotonic() > order.deadline + JOIN_SECONDS:
                break
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()


def run_hunts(hunts: Hunts, every: Sequence[Variant], order: Order) -> None:
    """Hunt what is not finished; a variant whose process ended within it has failed."""
    names = [each.name for each in every if not hunts.finished(each.name)]
    begun: dict[str, None] = {}
    for kind, name, answer in answers_of(order, names):
        if kind == "begun":
            begun[name] = None
            continue
        begun.pop(name, None)
        if kind == "failed":
            hunts.failures[name] = answer
            print(f"{name}: {answer}", file=sys.stderr, flush=True)
        else:
            hunts.rows[name] = answer
            print(
                f"{name}: {answer['repeats']} repeats, {answer['mismatches']} mismatches, "
                f"{answer['seconds']:.1f} s + {answer['setup_seconds']:.1f} s",
                flush=True,
            )
        hunts.save(every)
    for name in begun:
        hunts.failures[name] = "the process ended, or did not end in time"
    hunts.save(every)


# --- tables -------------------------------------------------------------------------------------


def summary(document: Row) -> str:
    """One line for each kind of kernel."""
    kinds: dict[str, list[Row]] = {}
    for row in document["rows"]:
        kinds.setdefault(row["name"].split("/")[0], []).append(row)
    lines = [
        [
            kind,
            str(len(rows)),
            f"{min(row['repeats'] for row in rows):,}",
            f"{sum(row['repeats'] for row in rows):,}",
            str(sum(row["mismatches"] for row in rows)),
            f"{sum(row['seconds'] for row in rows):.0f}",
            f"{sum(row['setup_seconds'] for row in rows):.0f}",
        ]
        for kind, rows in kinds.items()
    ]
    return markdown_table(
        [
            "kernels",
            "variants",
            "fewest repeats",
            "repeats in all",
            "values that differed",
            "seconds",
            "seconds of setup",
        ],
        lines,
    )


def markdown(document: Row) -> str:
    """Summary, every variant, what is missing."""
    meta, rows = document["meta"], document["rows"]
    versions = ", ".join(f"{name} {text}" for name, text in meta["versions"].items() if text)
    table = markdown_table(
        ["variant", "shape", "repeats", "values that differed", "seconds", "config"],
        [
            [
                row["name"],
                row["shape"],
                f"{row['repeats']:,}",
                str(row["mismatches"]),
                f"{row['seconds']:.1f}",
                row["config"],
            ]
            for row in rows
        ],
    )
    parts = [
        "# Race hunts",
        f"{meta['device']}, {meta['date']}, commit "
        f"`{str(meta['commit'])[:12]}`, {versions}; {meta['processes']} processes, "
        f"{meta['seconds']:.0f} s.",
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        summary(document),
        folded("every variant", table),
    ]
    if meta["planted"] is not None:
        parts.insert(
            1,
            f"**Control: one bit of repeat {meta['planted']} of every variant was "
            "flipped and must be found.**",
        )
    absent = [f"- {name}: `{error}`" for name, error in meta["failures"].items()]
    absent += [f"- out of time: {', '.join(meta['left'])}"] if meta["left"] else []
    if absent:
        parts += ["## Not finished", "\n".join(absent)]
    return "\n\n".join(parts) + "\n"


# --- command line -------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants", default="*", metavar="PATTERN", help="shell pattern of names; default: all"
    )
    parser.add_argument("--repeats", type=int, help="of each variant (default: its own number)")
    parser.add_argument("--processes", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--plant",
        type=int,
        metavar="REPEAT",
        help="control: flip one bit in this repeat of every variant",
    )
    parser.add_argument("--output", type=Path, help=f"default: {DEFAULT_OUTPUT.name}")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=240.0,
        metavar="SECONDS",
        help="variants that do not fit are listed as left; default: %(default)s",
    )
    parser.add_argument("--resume", action="store_true", help="keep what --output holds")
    add_render_option(parser)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny problems on the CPU's reference kernels, in one process unless "
        "--processes is given",
    )
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, began: float) -> tuple[Hunts, list[Variant], Order]:
    """Checked options: the document, the variants, what the processes are told."""
    require(options.processes > 0, "hunts", "--processes", need="at least 1", got=options.processes)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            message("hunts", "device", "a GPU", "none", "run with --dry-run to try the script")
        )
    every = [each for each in variants() if fnmatch(each.name, options.variants)]
    require(
        bool(every),
        "hunts",
        "--variants",
        need="a pattern that matches a name",
        got=repr(options.variants),
    )
    facts = environment(device)
    meta = {
        "device": facts["device"],
        "versions": facts["versions"],
        "date": facts["date"],
        "commit": options.commit or facts["commit"],
        "processes": options.processes,
        "protocol": PROTOCOL,
        "planted": options.plant,
        "seconds": 0.0,
    }
    path = options.output or (DRY_OUTPUT if options.dry_run else DEFAULT_OUTPUT)
    hunts = Hunts(path, meta)
    if options.resume and path.is_file():
        old = json.loads(path.read_text("utf-8"))
        for name in (*KEPT, "planted"):
            require(
                old["meta"][name] == meta[name],
                "hunts",
                f"--resume {path}: {name}",
                need=meta[name],
                got=old["meta"][name],
                remedy="start a new run",
            )
        hunts.rows = {row["name"]: row for row in old["rows"]}
        meta["seconds"] = old["meta"]["seconds"]
    order = Order(
        device.type,
        options.dry_run,
        options.repeats,
        options.plant,
        options.processes,
        began + options.time_limit,
    )
    return hunts, every, order


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if nothing differed and nothing failed, or with --plant if every variant that ran
    found the planted bit and nothing else."""
    options, began = parse_arguments(arguments), time.monotonic()
    try:
        if options.render is not None:
            return render_again(options.render, markdown)
        hunts, every, order = prepare(options, began)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    run_hunts(hunts, every, order)
    hunts.meta["seconds"] += time.monotonic() - began
    hunts.save(every)
    document = hunts.document(every)
    hunts.path.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
    expected = 0 if options.plant is None else 1
    wrong = [row["name"] for row in document["rows"] if row["mismatches"] != expected]
    print("\n" + summary(document) + "\n")
    print(
        f"wrote {hunts.path} and .md: {len(document['rows'])} variants, {len(wrong)} wrong, "
        f"{len(hunts.failures)} failures, {len(document['meta']['left'])} left, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if wrong or hunts.failures else 0


if __name__ == "__main__":
    sys.exit(main())
