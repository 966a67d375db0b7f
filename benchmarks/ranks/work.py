"""What each rank of ranks/run.py does: gate a cell, then time it in turns with the others."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.document import Document, Row
from benchmarks.ranks.cells import Cell, shape_of
from benchmarks.ranks.rows import CELL, KEY_COLUMNS, ONE_GPU, SCHEMA
from mxpert.cli.expert_parallel.layer import Collectives, Exchange, OnRanks, RankCase, RankWeights
from mxpert.cli.expert_parallel.plan import expert_layer
from mxpert.cli.measure import GateError
from mxpert.distributed import ExpertParallel, Transport
from mxpert.distributed.links import find_links
from mxpert.distributed.planner import LINKS, plan_layer
from mxpert.errors import UnsupportedError
from mxpert.testing.ranks import join_group, largest
from mxpert.testing.timing import Timing

LINK = "nvlink4"
TRANSPORTS = (Transport.AUTO, Transport.GATHER, Transport.ALL_TO_ALL)
HOST_CALLS = 50


@dataclass(frozen=True)
class Order:
    """What all ranks do.

    Args:
        cells: in this order. path: the document. meta: its facts.
        deadline: of `time.monotonic`, which all processes of a host share.
        repeats: samples of each variant. resume: keep what the document holds.
        max_tokens: most tokens of a rank in any cell.
    """

    cells: list[Cell]
    path: Path
    meta: Row
    deadline: float
    repeats: int
    resume: bool
    max_tokens: int


@dataclass
class Model:
    """A model that is loaded: weights, and an ExpertParallel for each wire and transport."""

    weights: RankWeights
    ranks: dict[str, list[ExpertParallel]]
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str, wires: Iterable[str], max_tokens: int) -> Model:
        """Weights and objects of a model, the same on all ranks."""
        shape, found, refused = shape_of(name), dict[str, list[ExpertParallel]](), {}
        for wire in wires:
            found[wire] = []
            for transport in TRANSPORTS:
                if transport in [ranks.transport for ranks in found[wire]]:
                    continue  # AUTO took it
                try:
                    ranks = ExpertParallel(
                        num_experts=shape.num_experts,
                        top_k=shape.top_k,
                        hidden_size=shape.hidden_size,
                        max_tokens=max_tokens,
                        transport=transport,
                        wire_format=wire,
                    )
                except UnsupportedError as error:
                    refused[transport.name] = str(error)
                    continue
                found[wire].append(ranks)
        first = next(iter(found.values()))[0]
        return cls(RankWeights.random(shape, first), found, refused)

    def close(self) -> None:
        for each in self.ranks.values():
            for ranks in each:
                ranks.close()


def work(order: Order) -> tuple[int, list[str]]:
    """All cells that fit; rank 0 writes the document.

    Returns:
        The number of rows, and what failed its gate.
    """
    join_group()
    facts = {"links": dataclasses.asdict(find_links()), "nccl": nccl_facts(), "explain": {}}
    document = Document(order.path, order.meta | facts, KEY_COLUMNS)
    document.sections = {"plans": []}
    if order.resume and order.path.exists():
        old = SCHEMA.load(order.path)
        document.resume(old)
        document.sections["plans"] = old["plans"]
        document.meta["explain"] = old["meta"]["explain"]
    run = _Run(order, document)
    run.all_cells()
    # Not after an error: NCCL would wait for the other ranks, and for captured graphs.
    dist.destroy_process_group()
    return len(document.rows), run.wrong


def nccl_facts() -> Row:
    """Version and settings of NCCL: its figures depend on them."""
    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    prefixes = ("NCCL_", "TORCH_SYMM_MEM_")
    settings = {name: text for name, text in os.environ.items() if name.startswith(prefixes)}
    return {"version": version, "settings": dict(sorted(settings.items()))}


class _Run:
    """The cells of one process."""

    def __init__(self, order: Order, document: Document) -> None:
        self.order, self.document = order, document
        self.is_first = dist.get_rank() == 0
        self.longest = 0.0
        self.wrong: list[str] = []

    def all_cells(self) -> None:
        models = dict.fromkeys(cell.model for cell in self.order.cells)
        for name in models:
            todo = [cell for cell in self.order.cells if cell.model == name]
            todo = [cell for cell in todo if not self.is_done(cell)]
            if not todo or not self.fits():
                self.leave(todo)
                continue
            began = time.monotonic()
            wires = dict.fromkeys(cell.wire for cell in todo)
            model = Model.load(name, wires, self.order.max_tokens)
            for transport, reason in model.refused.items():
                self.document.fail((f"{name} {transport}",), reason)
            self.say(f"{name}: weights and buffers in {time.monotonic() - began:.0f} s")
            for cell in todo:
                if self.fits():
                    self.one_cell(cell, model)
                else:
                    self.leave([cell])
            model.close()
            del model

    def is_done(self, cell: Cell) -> bool:
        """Whether the document has the cell; every rank has read the same document."""
        return any(key[:4] == cell.key for key in self.document.rows)

    def fits(self) -> bool:
        """Whether a cell as long as the longest would end before the limit: rank 0 decides."""
        answer = [time.monotonic() + self.longest < self.order.deadline]
        dist.broadcast_object_list(answer, src=0)
        return bool(answer[0])

    def leave(self, cells: list[Cell]) -> None:
        self.document.left += [str(cell) for cell in cells]
        self.save()

    def one_cell(self, cell: Cell, model: Model) -> None:
        began = time.monotonic()
        try:
            self.measure(cell, model)
        except Exception as error:  # the ranks cannot go on together; a new run can
            self.document.fail((str(cell),), error)
            self.save()
            raise
        self.longest = max(self.longest, time.monotonic() - began)
        self.save()

    def measure(self, cell: Cell, model: Model) -> None:
        """Gate every way to run a cell, time those that are right."""
        case = RankCase(cell.case(), model.weights, model.ranks[cell.wire][0])
        ways: list[Exchange] = [
            OnRanks(case.case, model.weights, ranks) for ranks in model.ranks[cell.wire]
        ]
        ways.append(Collectives(case.case, model.weights, case.ranks))
        errors: dict[str, float] = {}
        for way in ways:
            try:
                errors[way.name] = case.gate(way)
            except GateError as error:  # on every rank
                self.say(self.document.fail((f"{cell}, {way.name}",), error))
                self.wrong.append(f"{cell}, {way.name}")
        sound = [way for way in ways if way.name in errors]
        (one_gpu, *_) = case.one_rank_variant().steps["layer"]
        first = case.ranks.rank * cell.num_tokens
        errors[ONE_GPU] = case.judge(ONE_GPU, one_gpu()[first : first + cell.num_tokens])
        for ranks in model.ranks[cell.wire]:
            self.document.meta["explain"][f"{cell.model} {cell.wire} {ranks.transport.value}"] = (
                ranks.explain()
            )
        if not sound:
            return
        samples = timed(case, sound, self.order.repeats)
        for (impl, stage), values in samples.items():
            timing = Timing.of(values)
            self.document.add(
                {
                    **case.columns,
                    **dataclasses.asdict(case.load),
                    "impl": impl,
                    "stage": stage,
                    "captured": stage != "host" and impl != "mxpert/all_to_all",
                    "us": timing.us,
                    "us_spread": timing.high_us - timing.low_us,
                    "rel_l2": errors[impl],
                    "samples": [round(value, 3) for value in values],
                }
            )
        self.predict(case)
        both, whole = (samples[sound[0].name, stage] for stage in ("exchange", "layer"))
        self.say(
            f"{cell}: {sound[0].name}: dispatch + combine {statistics.median(both):.1f} µs, layer "
            f"{statistics.median(whole):.1f} µs"
        )

    def predict(self, case: RankCase) -> None:
        """The planner's row of a cell, in place of an older one."""
        layer = expert_layer(case.case.model, case.case.shape)
        plan = plan_layer(
            layer,
            num_ranks=case.ranks.size,
            num_tokens=case.case.num_tokens,
            link=LINKS[LINK],
            activation_format=case.case.activation_format,
            wire_format=case.case.wire_format,
            routing=case.case.routing,
        )
        names = "dispatch_us", "local_us", "combine_us", "us", "balance"
        row = {
            **case.columns,
            "link": LINK,
            "measured": list(plan.measured),
            **{name: getattr(plan, name) for name in names},
        }
        others = [
            old
            for old in self.document.sections["plans"]
            if any(old[name] != row[name] for name in CELL)
        ]
        self.document.sections["plans"] = [*others, row]

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def save(self) -> None:
        if self.is_first:
            SCHEMA.validate(self.document.as_json())
            self.document.save()


def timed(case: RankCase, ways: list[Exchange], repeats: int) -> dict[tuple[str, str], list[float]]:
    """(implementation, stage) → microseconds by the slower rank, one for each round."""
    one_gpu = case.one_rank_variant()
    found = case.timed(ways, repeats, {ONE_GPU: one_gpu})
    layer = [lambda: ways[0].layer(case.tokens[0])]
    for name, calls in ((ONE_GPU, one_gpu.steps["layer"]), (ways[0].name, layer)):
        found[name, "host"] = host_times(calls[0], case.ranks.device, repeats)
    return found


def host_times(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Microseconds until a warm eager call returns, by the slower rank; one mean a round."""
    return largest(list(_host_times(call, device, repeats)), device)


def _host_times(call: Callable[[], object], device: torch.device, repeats: int) -> Iterator[float]:
    on_gpu = device.type == "cuda"
    count = HOST_CALLS if on_gpu else 1
    for _ in range(repeats):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        yield (time.perf_counter() - began) * 1e6 / count
