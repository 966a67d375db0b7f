"""Do the fused passes between the grouped GEMMs pay? Each beside the torch operations it replaces.

    python -m benchmarks.grouped.training_rows [--output FILE]

The torch side is the reference backend on the GPU. Bytes are what a pass must move.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mxpert
from benchmarks.harness.document import Row
from benchmarks.harness.script import Script, machine
from benchmarks.harness.tables import row_table
from benchmarks.harness.timing import copy_rate, time_calls
from mxpert.cli.report import write_json
from mxpert.training.rows.op import (
    activate_rows,
    activate_rows_backward,
    combine_rows,
    combine_rows_backward,
)

MODELS = {"dsv3": (4096, 8, 7168, 2048), "gpt-oss-20b": (8192, 4, 2880, 2880)}
"""name → tokens, top k, hidden size, intermediate size."""

Case = tuple[Callable[[], Any], float]


def cases(
    tokens: int, top_k: int, hidden: int, width: int, device: torch.device
) -> dict[str, Case]:
    """op → call and the bytes that it must move."""
    rows = tokens * top_k

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    gate_up, grad = normal(rows, 2 * width), normal(rows, width)
    sorted_rows, token_grad = normal(rows, hidden), normal(tokens, hidden)
    ids = torch.randperm(rows, device=device).view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    activation = mxpert.SiLU()
    wide, narrow = gate_up.nbytes, grad.nbytes
    summed, once = sorted_rows.nbytes, token_grad.nbytes
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
        "activation": (activate_rows, (gate_up, activation), wide + narrow),
        "activation backward": (
            activate_rows_backward,
            (grad, gate_up, activation),
            2 * wide + narrow,
        ),
        "combine": (combine_rows, (sorted_rows, ids, weights), summed + once),
        "combine backward": (
            combine_rows_backward,
            (token_grad, sorted_rows, ids, weights),
            2 * summed + once,
        ),
        "permute backward": (combine_rows, (sorted_rows, ids), summed + once),
    }
    return {
        name: (functools.partial(op, *operands), size)
        for name, (op, operands, size) in calls.items()
    }


def as_torch(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same on the reference backend."""

    def run() -> Any:
        with mxpert.override(backend="reference"):
            return call()

    return run


def measure(name: str, sizes: Sequence[int], device: torch.device, copy_tbs: float) -> list[Row]:
    """One row for each op."""
    tokens, top_k, hidden, width = sizes
    found = cases(tokens, top_k, hidden, width, device)
    calls: dict[str, Callable[[], Any]] = {}
    for op, (call, _) in found.items():
        calls |= {f"{op}/kernel": call, f"{op}/torch": as_torch(call)}
    timings = time_calls(calls, device=device, repeats=7 if device.type == "cuda" else 1)
    rows = []
    for op, (_, size) in found.items():
        us, torch_us = (timings[f"{op}/{side}"].us for side in ("kernel", "torch"))
        rate = {"tbs": size / us / 1e6, "of_copy": size / us / 1e6 / copy_tbs}
        row = {"model": name, "op": op, "bytes_ideal": size, "us": us, "torch_us": torch_us}
        rows.append(row | rate)
    return rows


COLUMNS = {
    "pass": "{model} {op}",
    "µs": "{us:.0f}",
    "torch µs": "{torch_us:.0f}",
    "faster by": lambda row: f"{row['torch_us'] / row['us']:.1f}×",
    "TB/s": "{tbs:.2f}",
    "of copy": lambda row: f"{100 * row['of_copy']:.0f} %",
}


def measure_all(options: argparse.Namespace, _: None) -> int:
    """Measure, print a table, write the JSON."""
    dry, device = options.dry_run, options.device
    copy_tbs = copy_rate(device, 1 << 20 if dry else 1 << 32) / 1e12
    rows = []
    for name, sizes in MODELS.items():
        rows += measure(name, (8, 2, 64, 96) if dry else sizes, device, copy_tbs)
    write_json(options.path, {"meta": machine(options, copy_tbs=copy_tbs), "rows": rows})
    print(f"{row_table(rows, COLUMNS)}\nwrote {options.path}")
    return 0


SCRIPT = Script("training_rows", __doc__, measure_all)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
