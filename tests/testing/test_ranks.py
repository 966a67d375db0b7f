"""Timing of several ranks: the order of what a GPU gets, on a simulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mxpert.testing import ranks
from mxpert.testing.ranks import Variant, largest, time_ranks


class Simulated:
    """A GPU with a clock in microseconds: kernels take time when they run, not when captured."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, list[str]()
        self.recording: list[Callable[[], None]] | None = None

    def kernel(self, name: str, us: float) -> Callable[[], None]:
        def run() -> None:
            if self.recording is not None:
                self.recording.append(run)
                return
            self.log.append(name)
            self.now += us

        return run

    def event(self, **options: Any) -> Any:
        gpu = self

        class Event:
            def record(self) -> None:
                self.at = gpu.now
                gpu.log.append("|")

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) / 1e3

        return Event()

    def graph_class(self) -> Any:
        gpu = self

        class Graph:
            def __init__(self) -> None:
                self.kernels: list[Callable[[], None]] = []

            def replay(self) -> None:
                gpu.log.append("replay")
                for kernel in self.kernels:
                    kernel()

        return Graph

    @contextlib.contextmanager
    def capture(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "NCCL's watchdog queries events meanwhile"
        self.recording = graph.kernels
        yield
        self.recording = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """torch.cuda as `time_ranks` uses it, and a group of this process alone."""
    made = Simulated()

    class Sweep:
        def sum(self) -> None:
            made.kernel("sweep", 40.0)()

    def align(token: torch.Tensor, **options: Any) -> None:
        if token.dtype is torch.float32:  # the small all-reduce; the other one is of the result
            made.kernel("align", 9.0)()

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, device=None, **more: tensor(value, **more))
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph_class())
    monkeypatch.setattr(torch.cuda, "graph", made.capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.kernel("spin", 500.0)())
    monkeypatch.setattr(ranks, "_l2_sweep", Sweep)
    monkeypatch.setattr(dist, "all_reduce", align)
    return made


def test_each_replay_starts_cold_and_together(gpu: Simulated) -> None:
    a, b, c = gpu.kernel("a", 10.0), gpu.kernel("b", 30.0), gpu.kernel("c", 5.0)
    variants = {
        "parts": Variant({"first": [a, a], "second": [b, b]}),
        "whole": Variant({"whole": [c, c, c]}),
        "eager": Variant({"eager": [c]}, is_captured=False),
    }
    found = time_ranks(variants, device=torch.device("cuda"), repeats=3, warmup=1)
    assert found["parts"]["first"] == pytest.approx([10.0] * 3)
    assert found["parts"]["second"] == pytest.approx([30.0] * 3)
    assert found["parts"]["total"] == pytest.approx([40.0] * 3)
    assert found["whole"]["whole"] == pytest.approx([5.0] * 3), "of one call"
    assert found["eager"]["eager"] == pytest.approx([5.0] * 3)
    text = " ".join(gpu.log)
    start = "spin sweep align |"
    assert text.count(f"{start} replay a | replay b |") == 2 * 4, "a start for each routing"
    assert text.count(f"{start} replay c c c |") == 4, "one graph of all calls"
    assert text.count(f"{start} c |") == 4, "not captured: called"
    assert text.count(start) == 2 * 4 + 4 + 4


def test_kernels_run_once_before_they_are_captured(gpu: Simulated) -> None:
    a, b = gpu.kernel("a", 1.0), gpu.kernel("b", 1.0)
    time_ranks({"x": Variant({"s": [a], "t": [b]})}, device=torch.device("cuda"), repeats=1)
    assert gpu.log[:4] == ["align", "a", "b", "spin"], "compiled, steps in their order"


def fail(error: Exception) -> None:
    raise error


def test_the_first_error_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails because another one is gone fails later."""
    assert ranks._first_report(tmp_path) == ""
    for rank, error in ((1, ValueError("the cause")), (0, RuntimeError("Connection closed"))):
        monkeypatch.setattr(dist, "get_node_local_rank", lambda rank=rank, **options: rank)
        with pytest.raises(type(error), match=str(error)):
            ranks._reporting(str(tmp_path), fail, error)
    assert ranks._first_report(tmp_path) == "rank 1: ValueError: the cause"


def test_the_slower_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(values: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        values.copy_(torch.maximum(values, torch.tensor([2.0, 2.0], dtype=values.dtype)))

    monkeypatch.setattr(dist, "all_reduce", slower)
    assert largest([1.0, 3.0], torch.device("cpu")) == [2.0, 3.0]
