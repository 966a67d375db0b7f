"""Shared by demo, bench and tune: float64 references, gates, timings, rates against ceilings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import typer

from ..core.problem import ReferenceConfig
from ..core.registry import Explanation, Resolution, override
from ..errors import UnsupportedError
from ..formats.names import WITH_FP8
from ..formats.token import FP8_TOKEN
from ..formats.weight_tensor import WeightFormatName
from ..moe.weights import MoEWeights
from ..testing.numerics import (
    END_TO_END_GATE,
    INTERMEDIATE_NOISE,
    STAGE_GATE,
    requantisation_error,
    rounding_rms,
)
from ..testing.problems import MoEShape, random_moe_problem
from ..testing.timing import Timing, Work, matmul_rate, read_bandwidth, time_graph
from .report import Row

CPU_SECONDS_PER_CASE = 0.25
EXIT_WRONG_RESULT = 1
BF16_MIN_COSINE = 0.9999
"""a16w4 against the same weights in transformers: what differs is bfloat16 rounding, about 4e-3
relative, that is a cosine of 0.99999; ten times that is an error."""


class GateError(ValueError):
    """A result whose error to the float64 reference is above its gate; it is not timed."""


@dataclass(frozen=True)
class Ceilings:
    """Limits of the device, measured in the same run.

    Args:
        bandwidth: bytes/s of a read stream.
        rates: activation format → FLOP/s of a dense GEMM.
    """

    bandwidth: float
    rates: dict[str, float]

    @classmethod
    def measure(cls, device: torch.device, formats: Sequence[str]) -> Ceilings:
        """Measure the bandwidth, and the GEMM rate of each activation format."""
        return cls(read_bandwidth(device), {name: matmul_rate(device, name) for name in formats})

    def as_row(self) -> Row:
        return {
            "read_tbs": self.bandwidth / 1e12,
            "matmul_tflops": {name: rate / 1e12 for name, rate in self.rates.items()},
        }

    def judge(self, work: Work, us: float, activation_format: str) -> Row:
        """Rates of one timed call, and the time that the ceilings allow as a share of its time."""
        rate = self.rates[activation_format]
        return {
            "weight_bytes": work.weight_bytes,
            "flops": work.flops,
            "tbs": work.weight_bytes / us / 1e6,
            "tflops": work.flops / us / 1e6,
            "memory_bound": work.weight_bytes / self.bandwidth >= work.flops / rate,
            "percent_of_roof": 100 * work.floor_us(self.bandwidth, rate) / us,
        }


@dataclass(frozen=True)
class RunWeights:
    """The same weights as stored, for the reference, and as prepared for the device."""

    plain: MoEWeights
    prepared: MoEWeights

    @classmethod
    def of(cls, weights: MoEWeights, device: torch.device, *, keep_fp8: bool = False) -> RunWeights:
        """Move weights to `device` and prepare them, with an FP8 copy if that is asked for."""
        prepared = weights.prepare(device=device, keep_fp8=keep_fp8)
        return cls(prepared.unprepare(), prepared)

    @classmethod
    def random(
        cls,
        shape: MoEShape,
        device: torch.device,
        weight_format: WeightFormatName = "mxfp4",
        *,
        keep_fp8: bool = False,
    ) -> RunWeights:
        """Random weights of a shape and a format, made on `device`; `keep_fp8` as for `of`."""
        made = random_moe_problem(shape, 1, device=device, weight_format=weight_format)
        return cls.of(made.weights, device, keep_fp8=keep_fp8)

    def resolve(
        self, explain_with: Callable[[MoEWeights], Explanation], backend: str | None
    ) -> tuple[MoEWeights, Resolution]:
        """Choose prepared weights if a kernel reads them or they have an FP8 copy, else the stored.

        Args:
            explain_with: explains the op under test for given weights.
            backend: pinned, or None.

        Returns:
            The chosen weights, and the kernel and config that run with them.

        Raises:
            UnsupportedError: no kernel reads the chosen weights.
        """
        with override(backend=backend):
            if self.prepared.layout.has_fp8_codes:  # asked for: without it is another measurement
                return self.prepared, explain_with(self.prepared).resolution
            if self.prepared.layout is not self.plain.layout:
                with contextlib.suppress(UnsupportedError):
                    return self.prepared, explain_with(self.prepared).resolution
            return self.plain, explain_with(self.plain).resolution


def weights_name(weights: MoEWeights) -> str:
    """As rows name weights: "mxfp4", "nvfp4", …, and "mxfp4+fp8" with an FP8 copy."""
    return weights.weight_format + (WITH_FP8 if weights.layout.has_fp8_codes else "")


def is_timed(device: torch.device) -> bool:
    """Whether commands time what runs on `device`; on a CPU they check results only."""
    return device.type != "cpu"


def float64_reference() -> AbstractContextManager[None]:
    """A context in which every op runs on the reference backend and accumulates in float64."""
    return override(backend="reference", config=ReferenceConfig(accumulate=torch.float64))


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Time calls. On a CPU the number of repeats is limited by CPU_SECONDS_PER_CASE."""
    if device.type == "cuda":
        return time_graph({"case": calls}, device=device)["case"]
    first = time_graph({"case": calls}, device=device, repeats=1, warmup=0)["case"]
    repeats = int(CPU_SECONDS_PER_CASE * 1e6 / max(first.us * len(calls), 1.0))
    if repeats < 2:
        return first
    return time_graph({"case": calls}, device=device, repeats=min(repeats, 20), warmup=0)["case"]


def rotations(num_tokens: int) -> int:
    """Number of routings that a timing rotates among: small batches hit few experts each."""
    return max(1, min(8, 64 // num_tokens))


def timing_columns(timing: Timing) -> Row:
    """A Timing as JSON columns."""
    return {
        "us": timing.us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "samples": timing.samples,
    }


def error_gate(
    stage: str, activation_format: str, intermediate: tuple[int, int] | None = None
) -> float:
    """Largest relative L2 error to float64 that a right result of a stage may have.

    The gate of a stage with bfloat16 output follows from the rounding of that output. If an
    intermediate is quantised, accumulation noise can move values across rounding boundaries, so a
    wider gate applies. "mxfp4" and "fp8_token" can need more than that, as derived in
    `numerics.requantisation_error`: one "mxfp4" step is up to half of a value, and a changed
    "fp8_token" scale changes a whole row.

    Args:
        stage: "gate_up", "down" or "layer".
        intermediate: number of intermediate values behind the compared outputs, and number in one
            row. None means so many that the differences of rows average out.
    """
    flips = stage == "layer" or (stage == "gate_up" and activation_format in ("mxfp8", "mxfp4"))
    if not flips:
        return STAGE_GATE
    if activation_format not in (FP8_TOKEN, "mxfp4") or intermediate is None:
        return END_TO_END_GATE
    values, row = intermediate
    return max(
        END_TO_END_GATE,
        requantisation_error(activation_format, INTERMEDIATE_NOISE, values, row=row),
    )


def intermediate_sizes(num_tokens: int, top_k: int, intermediate_size: int) -> tuple[int, int]:
    """`intermediate` of `error_gate` for a comparison of `num_tokens` outputs."""
    return num_tokens * top_k * intermediate_size, intermediate_size


def cosine_gate(activation_format: str, rows_noise: float, intermediate_noise: float) -> float:
    """Smallest cosine to the model with unquantised activations that passes.

    An error of relative size r turns a vector by at most ``asin r``, so its cosine is at least
    ``sqrt(1 - r²)``. As in `noise.sqnr_floor_db`, noise that is independent of the weights gives
    r² = 2.2 n_x + n_h + 2 · (bfloat16 rounding)², with n_x and n_h measured on the given data. In
    one layer the noise is not independent, because few tokens, experts and rows carry most of the
    output. Twice the amplitude is therefore allowed. The strict gates are the error to float64
    and the cosine of a16w4; this one detects a wrong quantiser that both sides share.

    Args:
        activation_format: a name of `mxpert.core.problem.ACTIVATION_FORMATS`.
        rows_noise: n_x, noise over signal (energies) of the quantised input rows.
        intermediate_noise: n_h, the same of the quantised intermediate.
    """
    if activation_format == "bf16":
        return BF16_MIN_COSINE
    expected = 2.2 * rows_noise + intermediate_noise + 2 * rounding_rms(8) ** 2
    return math.sqrt(max(0.0, 1 - 2**2 * expected))


def check_gate(
    case: str,
    error: float,
    stage: str,
    activation_format: str,
    intermediate: tuple[int, int] | None = None,
) -> None:
    """Refuse to time a wrong result. Args as `error_gate`.

    Raises:
        GateError: the error is above the gate, or NaN.
    """
    limit = error_gate(stage, activation_format, intermediate)
    if not error <= limit:
        raise GateError(
            f"bench: {case} — need relative L2 to float64 of at most {limit:.1e}, got "
            f"{error:.3e}; nothing is timed on a wrong result"
        )


def refusing_wrong_results(run: Callable[[], Row]) -> Row:
    """The document of a run; a wrong result ends the command."""
    try:
        return run()
    except GateError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_WRONG_RESULT) from error
