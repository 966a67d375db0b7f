"""Comparable timing: cold L2, graph replays, interleaved variants, measured ceilings.

On a GPU each variant is captured once into a graph with one call per routing. A read-only sweep
larger than L2 runs before each replay, so weights are not in L2. Variants are interleaved in
changing order, so clock drift and preceding kernels affect all of them equally. On a CPU the same
interface times plain calls.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..errors import require

Call = Callable[[], object]
Result = TypeVar("Result")
INFINITY_CACHE_BYTES = 256 << 20
"""Cache on the memory side of an MI300 or MI355X (CDNA white papers). torch reports L2 alone, which
is smaller."""
BYTES_PER_MX_WEIGHT = 4.25 / 8
"""MXFP4 bytes per weight: four bits a code, and one scale byte for 32 codes."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the samples, and their 10th and 90th percentiles.

    >>> Timing.of([3.0, 1.0, 2.0]).us
    2.0
    """

    us: float
    low_us: float
    high_us: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples, in microseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
            len(ordered),
        )

    @property
    def spread(self) -> float:
        """Width of the 10–90 % band relative to the median."""
        return (self.high_us - self.low_us) / self.us if self.us else 0.0


def time_graph(
    variants: Mapping[str, Sequence[Call]],
    *,
    device: torch.device | str,
    repeats: int = 20,
    warmup: int = 3,
    failures: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Time variants, interleaved: CUDA-graph replays on a GPU, plain calls on a CPU.

    Args:
        variants: name → calls, one for each routing (or other input). On a GPU a call must be
            capturable. Calls must not depend on each other.
        device: device of the calls.
        repeats: timed replays of each variant. warmup: untimed replays before them.
        failures: receives the error of each variant that cannot run, and the others are timed;
            with None the error is raised.

    Returns:
        name → Timing of one call (time of a replay divided by its number of calls).

    Raises:
        ValueError: a variant without calls, or fewer than one repeat.

    Example:
        >>> list(time_graph({"sum": [torch.ones(8).sum]}, device="cpu", repeats=3))
        ['sum']
    """
    require(repeats > 0, "time_graph", "repeats", need="at least 1", got=repeats)
    _require_calls(variants, "time_graph")
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            return _time_graphs(variants, repeats, warmup, failures)
    return _time_calls(variants, repeats, warmup, failures)


REST_SECONDS = 1.0
"""How long the GPU rests before each variant of `time_sustained`, so that all begin alike."""
LAST_PART = 0.2
"""The replays that `time_sustained` counts: the last ones."""


def time_sustained(
    variants: Mapping[str, Sequence[Call]],
    *,
    device: torch.device | str,
    seconds: float = 2.0,
    failures: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Time variants one after the other, each alone under unbroken load; on a CPU plain calls.

    A GPU at its power limit lowers its clock rate, more for some kernels than for others.
    `time_graph` does not show it: its variants take turns and its replays pause. L2 is not swept.

    Args:
        variants, device, failures: as in `time_graph`.
        seconds: load of each variant. The last fifth of it counts.

    Returns:
        name → Timing of one call.

    Raises:
        ValueError: a variant without calls, or no load.

    Example:
        >>> list(time_sustained({"sum": [torch.ones(8).sum]}, device="cpu", seconds=0.01))
        ['sum']
    """
    require(seconds > 0, "time_sustained", "seconds", need="more than 0", got=seconds)
    _require_calls(variants, "time_sustained")
    if torch.device(device).type != "cuda":
        return time_graph(variants, device=device, repeats=3, warmup=0, failures=failures)
    with torch.cuda.device(device):
        graphs = _try_each(variants, _capture, failures)
        return {
            name: _time_load(graph, len(variants[name]), seconds) for name, graph in graphs.items()
        }


def _time_load(graph: torch.cuda.CUDAGraph, calls: int, seconds: float) -> Timing:
    """Replay a graph of so many calls for so long; the time of a call in the last replays."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    (first,) = _replay(graph, 1)
    times = _replay(graph, max(5, round(1e6 * seconds / first)))
    return Timing.of([us / calls for us in times[-max(1, round(LAST_PART * len(times))) :]])


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Microseconds of each of `count` replays without a pause."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(marks)]


def _require_calls(variants: Mapping[str, Sequence[Call]], op: str) -> None:
    for name, calls in variants.items():
        require(len(calls) > 0, op, f"variants[{name!r}]", got=0, need="at least one call")


def _turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Order of the variants in each round: each is first in turn, the others are shuffled.

    Few rounds are enough to spread first places and predecessors evenly.
    """
    order = random.Random(0)
    for first in range(rounds if names else 0):
        lead = names[first % len(names)]
        others = [name for name in names if name != lead]
        yield [lead, *order.sample(others, len(others))]


def _try_each(
    variants: Mapping[str, Sequence[Call]],
    attempt: Callable[[Sequence[Call]], Result],
    failures: dict[str, Exception] | None,
) -> dict[str, Result]:
    """Name → attempt(calls); errors are stored in `failures`, or raised if that is None."""
    results = {}
    for name, calls in variants.items():
        try:
            results[name] = attempt(calls)
        except Exception as error:
            if failures is None:
                raise
            failures[name] = error
    return results


def _time_graphs(
    variants: Mapping[str, Sequence[Call]],
    repeats: int,
    warmup: int,
    failures: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    graphs = _try_each(variants, _capture, failures)
    sweep = _l2_sweep()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat, names in enumerate(_turns(list(graphs), warmup + repeats)):
        for name in names:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            sweep.sum()
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if repeat >= warmup:
                samples[name].append(start.elapsed_time(end) * 1e3 / len(variants[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture all calls in one graph, after an eager run that compiles the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _l2_sweep() -> torch.Tensor:
    """A buffer twice as large as L2, on AMD twice as large as the Infinity Cache.

    It is only read, so L2 has no dirty lines to write back during the timed replay.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    if torch.version.hip is not None:
        l2_bytes = max(l2_bytes, INFINITY_CACHE_BYTES)
    return torch.zeros(max(2 * l2_bytes, 1 << 20) // 4, dtype=torch.int32, device="cuda")


def _time_calls(
    variants: Mapping[str, Sequence[Call]],
    repeats: int,
    warmup: int,
    failures: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    if failures is not None:
        sound = _try_each(variants, lambda calls: [call() for call in calls], failures)
        variants = {name: variants[name] for name in sound}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for repeat, names in enumerate(_turns(list(variants), warmup + repeats)):
        for name in names:
            start = time.perf_counter()
            for call in variants[name]:
                call()
            if repeat >= warmup:
                us = (time.perf_counter() - start) * 1e6
                samples[name].append(us / len(variants[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def read_bandwidth(device: torch.device | str) -> float:
    """Bytes per second of a read-only stream: the ceiling of a memory-bound kernel.

    On a GPU: a Triton sum over 4 GiB, the fastest of a few grids. On a CPU: a torch sum over
    256 MiB.
    """
    if torch.device(device).type == "cuda":
        from ._read_kernel import stream_calls

        with torch.cuda.device(device):
            data = torch.zeros(1 << 30, dtype=torch.int32, device=device)
            timings = _time_graphs(stream_calls(data), repeats=10, warmup=2)
    else:
        data = torch.zeros(1 << 26, dtype=torch.int32)
        timings = _time_calls({"sum": [data.view(torch.float32).sum]}, repeats=5, warmup=1)
    return data.nbytes / min(timing.us for timing in timings.values()) * 1e6


def matmul_rate(
    device: torch.device | str,
    activation_format: str = "bf16",
    size: int | None = None,
    *,
    sustained: bool = False,
) -> float:
    """Floating-point operations per second of the vendor's dense GEMM: the compute ceiling.

    Args:
        device: the device to measure.
        activation_format: "bf16" measures bfloat16 (float32 on a CPU, as the reference computes).
            Other formats measure e4m3 with fast accumulation if the GPU supports it.
        size: rows and columns of the square matrices; by default 8192, on a CPU 1024.
        sustained: measure it under unbroken load (`time_sustained`).
    """
    on_gpu = torch.device(device).type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    has_fp8 = on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
    if has_fp8 and activation_format != "bf16":
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)

        def call() -> object:
            return torch._scaled_mm(
                a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
    else:

        def call() -> object:
            return a @ b.T

    calls = {"matmul": [call]}
    if sustained:
        timing = time_sustained(calls, device=device)["matmul"]
    else:
        timing = time_graph(calls, device=device, repeats=10 if on_gpu else 3)["matmul"]
    return 2 * size**3 / timing.us * 1e6


@dataclass(frozen=True)
class Work:
    """Least memory traffic and arithmetic of one call, to compare its time with the ceilings.

    Args:
        weight_bytes: bytes of codes and scales of the experts that have rows.
        flops: floating-point operations, two for each multiply-add.
    """

    weight_bytes: float
    flops: float

    @classmethod
    def of_stage(
        cls,
        stage: str,
        *,
        hit_experts: int,
        routed_rows: int,
        hidden_size: int,
        intermediate_size: int,
        bytes_per_weight: float = BYTES_PER_MX_WEIGHT,
    ) -> Work:
        """Work of "gate_up", "down", or both together ("layer").

        >>> Work.of_stage("down", hit_experts=1, routed_rows=1, hidden_size=64,
        ...               intermediate_size=32)
        Work(weight_bytes=1088.0, flops=4096)
        """
        matrices = {"gate_up": 2, "down": 1, "layer": 3}
        require(stage in matrices, "Work.of_stage", "stage", need=list(matrices), got=repr(stage))
        elements = matrices[stage] * hidden_size * intermediate_size
        return cls(hit_experts * elements * bytes_per_weight, 2 * routed_rows * elements)

    def floor_us(self, bandwidth: float, rate: float) -> float:
        """Lower bound of the time in microseconds: the slower of reading and computing."""
        return max(self.weight_bytes / bandwidth, self.flops / rate) * 1e6
