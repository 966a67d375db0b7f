"""Small problems that `mxpert doctor` executes and compares with the float64 reference."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ...core.problem import ACTIVATION_FORMATS, ActivationFormat
from ...errors import UnsupportedError, message
from ...explain import explain
from ...formats.spec import MXFormatLike
from ...formats.tensor import MXTensor
from ...grouped.op import grouped_gemm
from ...moe.op import fused_moe
from ...quantize.op import quantize
from ...testing.numerics import STAGE_GATE, is_exact, relative_l2
from ...testing.problems import MoEShape, random_moe_problem
from ..measure import RunWeights, error_gate, float64_reference, intermediate_sizes
from ..options import FORMAT_NAMES
from ..report import Column, Row, print_table, progress

if TYPE_CHECKING:
    from ...testing.gfx950 import Emulation

EMULATED = ("gfx950",)
"""Architectures whose code a CPU can execute."""

_SHAPE = MoEShape(hidden_size=256, intermediate_size=256, num_experts=4, top_k=2, has_bias=True)
_TOKENS = 16
_GROUPS, _ROWS, _WIDTH = 4, 256, 256
"""The grouped GEMM: groups, rows of all together, columns and depth."""

Result = torch.Tensor | MXTensor


@dataclass(frozen=True)
class Case:
    """A problem to execute.

    Args:
        backend: that serves it. run: executes it. want: what it must return.
        limit: largest relative L2 error, derived from the formats; 0 asks for equal bits.
    """

    backend: str
    run: Callable[[], Result]
    want: Result
    limit: float


def quantize_case(format: MXFormatLike, device: torch.device) -> Case:
    """Rows of several magnitudes, compared bit by bit."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((64, _WIDTH), generator=generator, device=device)
    x = x * torch.exp2(torch.arange(64.0, device=device)[:, None] - 32)
    with float64_reference():
        want = quantize(x, format)
    backend = explain(quantize, x, format).resolution.kernel.backend
    return Case(backend, lambda: quantize(x, format), want, 0.0)


def layer_case(activation_format: ActivationFormat, device: torch.device) -> Case:
    """An MoE layer of 16 tokens, its weights prepared for the device."""
    inputs = random_moe_problem(_SHAPE, _TOKENS, device=device)
    routing = inputs.topk_weights, inputs.topk_ids
    run = functools.partial(
        fused_moe, activation=inputs.activation, activation_format=activation_format
    )
    weights, resolution = RunWeights.of(inputs.weights, device).resolve(
        lambda weights: explain(run.func, inputs.x, weights, *routing, **run.keywords), None
    )
    with float64_reference():
        want = run(inputs.x, inputs.weights, *routing)
    sizes = intermediate_sizes(_TOKENS, _SHAPE.top_k, _SHAPE.intermediate_size)
    limit = error_gate("layer", activation_format, sizes)
    return Case(resolution.kernel.backend, lambda: run(inputs.x, weights, *routing), want, limit)


def grouped_case(device: torch.device) -> Case:
    """A grouped GEMM of MXFP8 operands, one group empty."""
    generator = torch.Generator(device).manual_seed(1)
    a = torch.randn((_ROWS, _WIDTH), generator=generator, device=device)
    b = torch.randn((_GROUPS, _WIDTH, _WIDTH), generator=generator, device=device)
    offsets = torch.tensor([0, 100, 100, 180, _ROWS], dtype=torch.int32, device=device)
    with float64_reference():
        operands = quantize(a, "mxfp8"), quantize(b, "mxfp8"), offsets
        want = grouped_gemm(*operands)
    backend = explain(grouped_gemm, *operands).resolution.kernel.backend
    return Case(backend, lambda: grouped_gemm(*operands), want, STAGE_GATE)


def cases(device: torch.device) -> dict[str, Callable[[], Case]]:
    """All problems by name; each is made when it is needed."""
    return {
        **{
            f"quantize {format}": functools.partial(quantize_case, format, device)
            for format in ("mxfp4", "mxfp8")
        },
        **{
            f"fused_moe {FORMAT_NAMES[name]}": functools.partial(layer_case, name, device)
            for name in ACTIVATION_FORMATS
        },
        "grouped_gemm mxfp8": functools.partial(grouped_case, device),
    }


def execute(
    console: Console, device: torch.device, emulated: Callable[[], Any] | None = None
) -> list[Row]:
    """Execute all problems; a row for each, also for those that fail.

    Args:
        console: where the progress goes. device: where the tensors are.
        emulated: makes the context in which kernels are executed by emulation, an `Emulation`.
    """
    made = cases(device)
    rows: list[Row] = []
    with progress(console, "executing") as advance:
        for done, (name, make) in enumerate(made.items()):
            advance(done, len(made), name)
            with (emulated or contextlib.nullcontext)() as emulation:
                rows.append({"case": name, **_execute_case(make, emulation)})
    return rows


def _execute_case(make: Callable[[], Case], emulation: Emulation | None) -> Row:
    start = time.perf_counter()
    try:
        case = make()
        got = case.run()
    except (UnsupportedError, RuntimeError) as error:  # a fault is a RuntimeError, too
        row: Row = {"backend": None, "error": None, "limit": None, "passed": False}
        row["fault"] = f"{type(error).__name__}: {error}"
    else:
        error_found = _error(got, case)
        row = {
            "backend": case.backend,
            "error": error_found,
            "limit": case.limit,
            "passed": error_found <= case.limit,
            "fault": None,
        }
    row["seconds"] = time.perf_counter() - start
    if emulation is not None:
        row["kernels"] = {name: asdict(total) for name, total in emulation.kernels.items()}
        row["launches"], row["instructions"] = emulation.launches, emulation.instructions
    return row


def _error(got: Result, case: Case) -> float:
    """Relative L2 error, or for a limit of 0 whether any bit differs, as 0 or infinity."""
    if case.limit == 0:
        return 0.0 if is_exact(got, case.want) else math.inf
    return relative_l2(got, case.want)


def failures(rows: list[Row]) -> list[str]:
    """Names of the problems whose result is wrong, or that did not run."""
    return [row["case"] for row in rows if not row["passed"]]


def show(console: Console, title: str, rows: list[Row]) -> None:
    """The table of executed problems, then each fault in full."""
    emulated = any("instructions" in row for row in rows)
    print_table(
        console,
        title,
        (
            "problem",
            "runs on",
            *((Column("kernels", 2), Column("instructions", 1)) if emulated else ()),
            "error",
            Column("limit", 3),
            "result",
        ),
        [_cells(row, emulated) for row in rows],
    )
    for row in rows:
        if row["fault"]:
            console.print(f"{row['case']}: {row['fault']}", highlight=False, markup=False)


def _cells(row: Row, emulated: bool) -> tuple[str, ...]:
    work = (str(row["launches"]), f"{row['instructions']:,}") if emulated else ()
    if row["fault"]:
        return (row["case"], "–", *work, "–", "–", "[red]fault[/]")
    exact = row["limit"] == 0
    error = ("0" if row["error"] == 0 else "bits differ") if exact else f"{row['error']:.1e}"
    return (
        row["case"],
        row["backend"],
        *work,
        error,
        "equal bits" if exact else f"{row['limit']:.1e}",
        "[green]ok[/]" if row["passed"] else "[red]wrong[/]",
    )


def emulation_of(architecture: str) -> Callable[[], AbstractContextManager[Emulation]]:
    """The context that executes kernels by emulation.

    Raises:
        ValueError: no such architecture.
        UnsupportedError: the emulator, or Triton, which compiles the kernels, is not installed.
    """
    if architecture not in EMULATED:
        need = f"one of {', '.join(EMULATED)}"
        raise ValueError(message("doctor", "--emulate", need, repr(architecture)))
    try:
        from ...testing import gfx950
    except ImportError as error:
        if error.name == "gfx950emu":
            raise UnsupportedError(str(error)) from error
        raise UnsupportedError(
            message(
                "doctor",
                "--emulate",
                "Triton, which compiles the kernels",
                str(error),
                "pip install 'triton>=3.6'",
            )
        ) from error
    return gfx950.emulate
