"""What demo and bench share: a case, its float64 truth, its time, its rate against the ceilings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..dispatch import Explanation, Resolution, override
from ..errors import UnsupportedError
from ..formats.token import FP8_TOKEN
from ..problem import ReferenceConfig
from ..testing.numerics import (
    END_TO_END_GATE,
    INTERMEDIATE_NOISE,
    STAGE_GATE,
    requantisation_error,
    rounding_rms,
)
from ..testing.timing import Timing, Work, matmul_rate, read_bandwidth, time_graph
from ..weights import MoEWeights
from .report import Row

CPU_SECONDS_PER_CASE = 0.25
BF16_MIN_COSINE = 0.9999
"""a16w4 against the same weights in transformers: what differs is bfloat16 rounding, about 4e-3
relative, that is a cosine of 0.99999; ten times that is an error."""


class GateError(ValueError):
    """A result that is too far from the float64 reference to be worth timing."""


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


@dataclass(frozen=True)
class RunWeights:
    """The same weights twice: as stored, for the reference, and as `prepare` lays them out here."""

    plain: MoEWeights
    prepared: MoEWeights

    @classmethod
    def of(cls, weights: MoEWeights, device: torch.device) -> RunWeights:
        """Move weights to `device` and prepare them."""
        prepared = weights.prepare(device=device)
        return cls(prepared.unprepare(), prepared)

    def resolve(self, explain_with: Callable[[MoEWeights], Explanation],
                backend: str | None) -> tuple[MoEWeights, Resolution]:
        """The weights to run with, and what runs: prepared ones where a kernel reads them.

        Args:
            explain_with: explains the op under test for given weights. backend: pinned, or None.
        """
        with override(backend=backend):
            if self.prepared.layout is not self.plain.layout:
                with contextlib.suppress(UnsupportedError):
                    return self.prepared, explain_with(self.prepared).resolution
            return self.plain, explain_with(self.plain).resolution


def float64_reference() -> AbstractContextManager[None]:
    """Inside: every op runs on the reference backend and accumulates in float64."""
    return override(backend="reference", config=ReferenceConfig(accumulate=torch.float64))


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Time calls; on a CPU with as many repeats as fit into a fraction of a second."""
    if device.type == "cuda":
        return time_graph({"case": calls}, device=device)["case"]
    first = time_graph({"case": calls}, device=device, repeats=1, warmup=0)["case"]
    repeats = int(CPU_SECONDS_PER_CASE * 1e6 / max(first.us * len(calls), 1.0))
    if repeats < 2:
        return first
    return time_graph({"case": calls}, device=device, repeats=min(repeats, 20), warmup=0)["case"]


def timing_columns(timing: Timing) -> Row:
    """A Timing as JSON columns."""
    return {"us": timing.us, "low_us": timing.low_us, "high_us": timing.high_us,
            "samples": timing.samples}


def error_gate(stage: str, activation_format: str,
               intermediate: tuple[int, int] | None = None) -> float:
    """Largest relative L2 to float64 of "gate_up", "down" or "layer".

    A stage with bfloat16 output is held to the rounding of that output; where an MX intermediate
    is rounded, accumulator noise flips codes at rounding boundaries, and the wider gate applies.
    Two formats may exceed that gate by what `numerics.requantisation_error` derives: a flip of an
    "mxfp4" code is half of a value, and where the scale of "fp8_token" moves, a whole row moves.

    Args:
        intermediate: values of the intermediate behind the compared outputs, and of one of its
            rows; None: so many that rows average out.
    """
    flips = stage == "layer" or (
        stage == "gate_up" and activation_format in ("mxfp8", "mxfp4"))
    if not flips:
        return STAGE_GATE
    if activation_format not in (FP8_TOKEN, "mxfp4") or intermediate is None:
        return END_TO_END_GATE
    values, row = intermediate
    return max(END_TO_END_GATE,
               requantisation_error(activation_format, INTERMEDIATE_NOISE, values, row=row))


def intermediate_sizes(num_tokens: int, top_k: int, intermediate_size: int) -> tuple[int, int]:
    """`intermediate` of `error_gate` where the outputs of so many tokens are compared."""
    return num_tokens * top_k * intermediate_size, intermediate_size


def cosine_gate(activation_format: str, rows_noise: float, intermediate_noise: float) -> float:
    """Least cosine to the model with unquantised activations.

    An error of relative size r turns a vector by at most ``asin r``, so its cosine is at least
    ``sqrt(1 - r²)``. As in `numerics.sqnr_floor_db`, noise that is independent of the weights gives
    r² = 2.2 n_x + n_h + 2 · (bfloat16 rounding)², here with n_x and n_h measured on the data at
    hand instead of on a Gaussian. In one layer it is not independent: few tokens, experts and
    rows carry most of the output, and all of it may fall on noisy ones. Twice the amplitude is
    allowed. The sharp gates are the error to float64 and the cosine of a16w4; this one is to see
    a quantiser that both sides share and that is wrong.

    Args:
        activation_format: a name of `mxpert.problem.ACTIVATION_FORMATS`.
        rows_noise: n_x, noise over signal (energies) of the quantised input rows.
        intermediate_noise: n_h, the same of the quantised intermediate.
    """
    if activation_format == "bf16":
        return BF16_MIN_COSINE
    expected = 2.2 * rows_noise + intermediate_noise + 2 * rounding_rms(8) ** 2
    return math.sqrt(max(0.0, 1 - 2**2 * expected))


def check_gate(case: str, error: float, stage: str, activation_format: str,
               intermediate: tuple[int, int] | None = None) -> None:
    """No time without a correct result. Args as `error_gate`.

    Raises:
        GateError: the error is above the gate, or NaN.
    """
    limit = error_gate(stage, activation_format, intermediate)
    if not error <= limit:
        raise GateError(f"bench: {case} — need relative L2 to float64 of at most {limit:.1e}, got "
                        f"{error:.3e}; nothing is timed on a wrong result")
