"""What demo and bench share: a case, its float64 truth, its time, its rate against the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..dispatch import override
from ..problem import ReferenceConfig
from ..testing.timing import Timing, Work, matmul_rate, read_bandwidth, time_graph
from .report import Row

CPU_SECONDS_PER_CASE = 1.0


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: bytes/s of a read stream, FLOP/s of a dense GEMM by format."""

    bandwidth: float
    rates: dict[str, float]

    @classmethod
    def measure(cls, device: torch.device, formats: Sequence[str]) -> Ceilings:
        """Measure what the given activation formats need."""
        return cls(read_bandwidth(device), {name: matmul_rate(device, name) for name in formats})

    def as_row(self) -> Row:
        return {"read_tbs": self.bandwidth / 1e12,
                "matmul_tflops": {name: rate / 1e12 for name, rate in self.rates.items()}}

    def judge(self, work: Work, us: float, activation_format: str) -> Row:
        """Rates of one timed call, and its share of the time that the ceilings allow."""
        rate = self.rates[activation_format]
        return {"weight_bytes": work.weight_bytes, "flops": work.flops,
                "tbs": work.weight_bytes / us / 1e6, "tflops": work.flops / us / 1e6,
                "memory_bound": work.weight_bytes / self.bandwidth >= work.flops / rate,
                "percent_of_roof": 100 * work.floor_us(self.bandwidth, rate) / us}


def float64_reference() -> AbstractContextManager[None]:
    """Inside: every op runs on the reference backend and accumulates in float64."""
    return override(backend="reference", config=ReferenceConfig(accumulate=torch.float64))


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Time calls; on a CPU with as many repeats as fit into about a second, at least one."""
    if device.type == "cuda":
        return time_graph({"case": calls}, device=device)["case"]
    first = time_graph({"case": calls}, device=device, repeats=1, warmup=0)["case"]
    repeats = int(CPU_SECONDS_PER_CASE * 1e6 / max(first.us * len(calls), 1.0))
    if repeats < 2:
        return first
    return time_graph({"case": calls}, device=device, repeats=min(repeats, 20), warmup=1)["case"]


def timing_columns(timing: Timing) -> Row:
    """A Timing as JSON columns."""
    return {"us": timing.us, "low_us": timing.low_us, "high_us": timing.high_us,
            "samples": timing.samples}
