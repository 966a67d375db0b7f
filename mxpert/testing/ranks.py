"""Processes of a group on one host: start them, and time what they do together.

On GPUs each step of a variant is captured in a CUDA graph and replayed. Before a replay each rank
spins, sweeps its L2 cache and takes part in a small all-reduce, so that all ranks start within a
microsecond or two and no host time is measured. A sample is the time of the slower rank. On CPUs
the same interface times plain calls after a barrier.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..core.files import write_atomically
from ..core.interrupts import EXIT_INTERRUPTED, deferred
from ..errors import message, require
from .timing import Call, _l2_sweep, _turns

_Result = TypeVar("_Result")

SPIN_CYCLES = 1_000_000
"""About half a millisecond: hides the host's part of a replay and of the all-reduce before it."""
Steps = Mapping[str, Sequence[Call]]
Samples = dict[str, dict[str, list[float]]]


class RankFailedError(RuntimeError):
    """A process of a group failed; the message holds the first failure."""


@dataclass(frozen=True)
class Variant:
    """What is timed together: steps that follow each other, each with a call for every routing.

    Args:
        steps: name → calls. Call i of a step follows call i of the step before.
        is_captured: whether graphs can capture it. Otherwise it is called, and its host time
            counts.
    """

    steps: Steps
    is_captured: bool = True


def start_ranks(
    function: Callable[..., _Result], num_ranks: int, *arguments: object
) -> list[_Result]:
    """Call a function in new processes of this host, by torch.distributed's launcher.

    Each process has the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, …).

    Args:
        function: importable by name. num_ranks: N. arguments: that can be pickled.

    Returns:
        The value that each rank returned, in order of ranks.

    Raises:
        RankFailedError: a rank raised an error or died; the others were ended.
        KeyboardInterrupt: this process was interrupted; the ranks were ended.
    """
    # Imported here: slow, and not part of every build of torch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        local_addr="127.0.0.1",  # the host's own name need not resolve
    )
    with tempfile.TemporaryDirectory(prefix="mxpert-ranks-") as folder:
        try:
            with _quiet_launcher(), _interrupts_wait_in_ranks():
                found = elastic_launch(config, _reporting)(folder, function, *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode in (EXIT_INTERRUPTED, -signal.SIGINT):
                raise KeyboardInterrupt from error
            text = _first_report(Path(folder)) or f"rank {rank}: {failure.message}"
            raise RankFailedError(" ".join(text.split())) from error
        except SignalException as error:  # the launcher's handlers replace Python's
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from error
            raise
    return [found[rank] for rank in range(num_ranks)]


def _reporting(folder: str, function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function; note its error in `folder`, before other ranks see that this one is gone."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        return function(*arguments)
    except Exception as error:
        rank = dist.get_node_local_rank(fallback_rank=0)
        report = f"{time.time():.6f} rank {rank}: {type(error).__name__}: {error}"
        path = Path(folder) / str(rank)
        write_atomically(path, lambda partial: partial.write_text(report, encoding="utf-8"))
        raise


def _first_report(folder: Path) -> str:
    """The earliest error that a rank has noted; empty if none did."""
    found = [path.read_text("utf-8").partition(" ") for path in folder.glob("[0-9]*")]
    reports = sorted((float(moment), text) for moment, _, text in found)
    return reports[0][1] if reports else ""


@contextlib.contextmanager
def _interrupts_wait_in_ranks() -> Iterator[None]:
    """Inside, processes start with interrupts blocked; ranks unblock them once they handle them.

    Python prints a traceback of an interrupt during its own start, and of start data that end too
    early. Another thread of this process receives the signal, and its handlers run as ever, but
    not while a process is being started.
    """
    resource_tracker.ensure_running()  # by starting it multiprocessing would unblock interrupts
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    rank_type = multiprocessing.get_context("spawn").Process
    start = rank_type.start
    rank_type.start = deferred()(start)  # type: ignore[method-assign]
    try:
        yield
    finally:
        rank_type.start = start  # type: ignore[method-assign]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Mute the launcher's log: `RankFailedError` says what failed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # its loggers have levels of their own
    try:
        yield
    finally:
        logging.disable(before)


def join_group(timeout_s: float = 120.0) -> torch.device:
    """Join the group of a process that was started by `start_ranks` or torchrun.

    Returns:
        The rank's device: its own GPU with NCCL, else the CPU with gloo.
    """
    limit = timedelta(seconds=timeout_s)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
        return torch.device("cpu")
    device = torch.device("cuda", int(dist.get_node_local_rank()))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=limit)
    return device


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest value of all ranks, one by one."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]


def time_ranks(
    variants: Mapping[str, Variant], *, device: torch.device, repeats: int, warmup: int = 2
) -> Samples:
    """Time variants in turns on all ranks of the default group.

    Args:
        variants: the same names and steps on every rank, with calls that communicate in the same
            order. device: of this rank.
        repeats: samples of each variant. warmup: replays before them.

    Returns:
        variant → step → microseconds of one call, by the slower rank, one for each repeat. With
        several steps there is also "total", the time from the first to the last.

    Raises:
        ValueError: no repeats, or steps with different numbers of calls.
    """
    require(repeats > 0, "time_ranks", "repeats", need="at least 1", got=repeats)
    for name, variant in variants.items():
        counts = {len(calls) for calls in variant.steps.values()}
        if len(counts) != 1 or 0 in counts:
            need = "steps with equally many calls"
            raise ValueError(message("time_ranks", f"variants[{name!r}]", need, sorted(counts)))
    timer: _Timer = _GraphTimer(variants, device) if device.type == "cuda" else _CallTimer(variants)
    mine: dict[str, list[list[float]]] = {name: [] for name in variants}
    for repeat, names in enumerate(_turns(list(variants), warmup + repeats)):
        for name in names:
            times = timer.sample(name)
            if repeat >= warmup:
                mine[name].append(times)
    return {
        name: _by_step(list(variant.steps), mine[name], device)
        for name, variant in variants.items()
    }


def _by_step(
    steps: list[str], samples: list[list[float]], device: torch.device
) -> dict[str, list[float]]:
    """Samples of each step, and of all together, by the slower rank."""
    columns = {step: [times[index] for times in samples] for index, step in enumerate(steps)}
    if len(steps) > 1:
        columns["total"] = [sum(times) for times in samples]
    return {step: largest(values, device) for step, values in columns.items()}


class _Timer:
    """Takes one sample: microseconds of one call of each step."""

    def sample(self, name: str) -> list[float]:
        raise NotImplementedError


class _CallTimer(_Timer):
    """Plain calls on a CPU."""

    def __init__(self, variants: Mapping[str, Variant]) -> None:
        self._variants = variants

    def sample(self, name: str) -> list[float]:
        steps = list(self._variants[name].steps.values())
        spent = [0.0] * len(steps)
        for calls in zip(*steps, strict=True):
            dist.barrier()
            for index, call in enumerate(calls):
                start = time.perf_counter()
                call()
                spent[index] += (time.perf_counter() - start) * 1e6
        return [us / len(steps[0]) for us in spent]


class _GraphTimer(_Timer):
    """Replays on a GPU, or calls where a variant cannot be captured."""

    def __init__(self, variants: Mapping[str, Variant], device: torch.device) -> None:
        self._sweep = _l2_sweep()
        self._token = torch.zeros(1, device=device)
        dist.all_reduce(self._token)
        self._sequences = {name: self._sequence(variant) for name, variant in variants.items()}
        self._counts = {
            name: len(next(iter(variant.steps.values()))) for name, variant in variants.items()
        }

    def _sequence(self, variant: Variant) -> list[list[Call]]:
        """For each start: what runs then, a call or a replay for each step."""
        steps = list(variant.steps.values())
        for calls in zip(*steps, strict=True):  # compiles, and allocates
            for call in calls:
                call()
        torch.cuda.synchronize()
        if not variant.is_captured:
            return [list(calls) for calls in zip(*steps, strict=True)]
        if len(steps) == 1:
            return [[_captured(steps[0])]]
        return [[_captured([call]) for call in calls] for calls in zip(*steps, strict=True)]

    def sample(self, name: str) -> list[float]:
        sequence = self._sequences[name]
        spent = [0.0] * len(sequence[0])
        for calls in sequence:
            torch.cuda._sleep(SPIN_CYCLES)
            self._sweep.sum()
            dist.all_reduce(self._token)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
            marks[0].record()
            for call, mark in zip(calls, marks[1:], strict=True):
                call()
                mark.record()
            marks[-1].synchronize()
            for index, (before, after) in enumerate(itertools.pairwise(marks)):
                spent[index] += before.elapsed_time(after) * 1e3
        return [us / self._counts[name] for us in spent]


def _captured(calls: Sequence[Call]) -> Call:
    """A replay of all calls in one graph. NCCL's watchdog may query events meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph.replay
