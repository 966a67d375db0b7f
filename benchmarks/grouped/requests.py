"""Requests of grouped_gemm and grouped_wgrad beside the fast one: wide data, b [G, K, N].

    python -m benchmarks.grouped.requests [--shapes 2,6] [--output FILE]

Each call is compared with float64 on the operands that it multiplies before it is timed. "wide" are
data whose blocks of 32 lie up to 20 binades apart: ScaleSpan.AUTO multiplies them in bf16. Rows of
the portable backend show what a fallback would cost.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import mxpert
from benchmarks.grouped.cells import (
    BALANCES,
    Operands,
    Part,
    Rows,
    Shape,
    expected,
    parse_shapes,
    pick,
    sample,
    tiny,
)
from benchmarks.grouped.ours import GATE, UNPROMOTED_ERROR, columns_of, rows_of, wide
from benchmarks.harness.document import Row
from benchmarks.harness.script import Script, machine
from benchmarks.harness.tables import row_table
from benchmarks.harness.timing import time_calls
from mxpert.cli.measure import GateError
from mxpert.cli.report import write_json
from mxpert.formats import MXTensor
from mxpert.testing.numerics import relative_l2

REPEATS = 7
BINADES = 10
SPANS = {
    "row": mxpert.ScaleSpan.ROW,
    "auto": mxpert.ScaleSpan.AUTO,
    "exact": mxpert.ScaleSpan.BLOCK,
}


@dataclass(frozen=True)
class Request:
    """One call, what it multiplies in float64, and how many values it sums; backend None: chosen
    by the library."""

    name: str
    op: str
    call: Callable[[], torch.Tensor]
    operands: tuple[Rows, Rows]
    backend: str | None = None

    def run(self) -> torch.Tensor:
        with mxpert.override(backend=self.backend):
            return self.call()


def widened(data: Operands) -> Operands:
    """Columns of x and weight in blocks of 32 at random powers of two that cancel in the product,
    rows of x likewise within each group, for wgrad."""
    generator = torch.Generator().manual_seed(0)

    def powers(count: int) -> torch.Tensor:
        exponents = torch.randint(-BINADES, BINADES + 1, (-(-count // 32),), generator=generator)
        return exponents.float().exp2().repeat_interleave(32)[:count].to(data.x)

    columns, rows = powers(data.shape.K), powers(len(data.x))[:, None]
    return replace(
        data, x=data.x * columns * rows, weight=data.weight / columns, grad=data.grad / rows
    )


def mx_requests(data: Operands, label: str, backend: str | None = None) -> list[Request]:
    """forward and wgrad in one span of each; `label` names the span, and whether data are wide."""
    span, offsets = SPANS[label.split()[0]], data.group_offsets
    (x_row, x_col), (_, grad_col), (w_row, _) = (
        mxpert.quantize_dual(tensor, group_offsets=groups, scale_span=span)
        for tensor, groups in ((data.x, offsets), (data.grad, offsets), (data.weight, None))
    )
    forward = functools.partial(mxpert.grouped_gemm, x_row, w_row, offsets)
    wgrad = functools.partial(mxpert.grouped_wgrad, grad_col, x_col, offsets)
    rows: tuple[Rows, Rows] = (lambda p: rows_of(x_row, p), lambda p: wide(w_row[p.group]))
    columns: tuple[Rows, Rows] = (
        lambda p: columns_of(grad_col, p, p.features),
        lambda p: columns_of(x_col, p, slice(None)),
    )
    return [
        Request(label, "forward", forward, rows, backend),
        Request(label, "wgrad", wgrad, columns, backend),
    ]


def layout_requests(data: Operands, backend: str | None = None) -> list[Request]:
    """forward with b as [G, N, K] and as [G, K, N], in bf16 and MX."""
    offsets = data.group_offsets
    bf16 = (lambda p: data.x[p.rows].double(), lambda p: data.weight[p.group].double())
    x_row, _ = mxpert.quantize_dual(data.x, group_offsets=offsets)
    w_row, _ = mxpert.quantize_dual(data.weight)
    lying = MXTensor(w_row.qdata.mT.contiguous(), w_row.scale.mT.contiguous(), w_row.format, -2)
    exact = (lambda p: rows_of(x_row, p), lambda p: wide(w_row[p.group]))
    gemm = functools.partial(mxpert.grouped_gemm, group_offsets=offsets)
    turned = data.weight.mT.contiguous()
    calls: dict[str, tuple[Callable[[], torch.Tensor], tuple[Rows, Rows]]] = {
        "bf16": (lambda: gemm(data.x, data.weight), bf16),
        "bf16 [G, K, N]": (lambda: gemm(data.x, turned, trans_b=False), bf16),
        "exact [G, K, N]": (lambda: gemm(x_row, lying, trans_b=False), exact),
    }
    return [
        Request(name, "forward", call, operands, backend)
        for name, (call, operands) in calls.items()
    ]


def check(request: Request, parts: Sequence[Part]) -> float:
    """Relative L2 to float64; GateError where it is not within what the sums may lose."""
    found = pick(parts, request.op, request.run()).double()
    error = relative_l2(found, expected(parts, request.operands))
    depth = max(part.end - part.start for part in parts) if request.op == "wgrad" else 0
    gate = GATE + UNPROMOTED_ERROR * depth**0.5
    if not error <= gate:
        raise GateError(f"{request.name} {request.op}: relative L2 {error:.2e}, gate {gate:.1e}")
    return error


def measure(shape: Shape, device: torch.device) -> list[Row]:
    """One row for each request."""
    data = Operands.random(shape, BALANCES[0], device)
    wide_data, parts = widened(data), sample(data)
    requests = [
        *mx_requests(data, "row"),
        *mx_requests(data, "auto"),
        *mx_requests(wide_data, "auto wide"),
        *mx_requests(data, "exact"),
        *layout_requests(data),
    ]
    if device.type == "cuda":
        requests += [
            *mx_requests(wide_data, "exact wide", "triton"),
            *layout_requests(data, "triton"),
        ]
    errors = [check(request, parts) for request in requests]
    calls = {str(index): request.run for index, request in enumerate(requests)}
    repeats = REPEATS if device.type == "cuda" else 1
    timings = time_calls(calls, device=device, repeats=repeats).values()
    return [
        {
            "shape": str(shape),
            "request": request.name,
            "op": request.op,
            "backend": request.backend or "chosen",
            "us": round(timing.us, 1),
            "spread": timing.spread,
            "rel_l2": error,
            "tflops": round(shape.flops(request.op) / timing.us / 1e6, 1),
        }
        for request, error, timing in zip(requests, errors, timings, strict=True)
    ]


COLUMNS = {name: f"{{{name}}}" for name in ("shape", "request", "op", "backend", "us", "tflops")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--shapes", default="2,6", help="numbers as in grouped/run.py")


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    return parse_shapes(options.shapes)


def measure_all(options: argparse.Namespace, shapes: Sequence[Shape]) -> int:
    """Measure, write the JSON, print the table."""
    rows = []
    for shape in shapes:
        rows += measure(tiny(shape) if options.dry_run else shape, options.device)
    meta = machine(options, "device", "versions", "commit", "date")
    write_json(options.path, {"meta": meta, "rows": rows})
    print(f"{row_table(rows, COLUMNS | {'rel_l2': '{rel_l2:.1e}'})}\nwrote {options.path}")
    return 0


SCRIPT = Script("grouped_requests", __doc__, measure_all, shapes_of, add_options)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
