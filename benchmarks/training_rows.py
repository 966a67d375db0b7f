"""Do the fused passes between the grouped GEMMs pay? Each beside the torch operations it replaces.

    python benchmarks/training_rows.py [--output FILE]

The torch side is the reference backend on the GPU. Bytes are what a pass must move.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.ceilings import copy_rate
from harness.timing import time_calls
from render import markdown_table

import mxpert
from mxpert.cli.report import environment, write_json
from mxpert.errors import message
from mxpert.ops.rows import (
    activate_rows,
    activate_rows_backward,
    combine_rows,
    combine_rows_backward,
)

RESULTS = ROOT / "benchmarks/results/nvidia-h200/training_rows.json"
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
    return {
        "activation": (
            functools.partial(activate_rows, gate_up, activation),
            gate_up.nbytes + grad.nbytes,
        ),
        "activation backward": (
            functools.partial(activate_rows_backward, grad, gate_up, activation),
            2 * gate_up.nbytes + grad.nbytes,
        ),
        "combine": (
            functools.partial(combine_rows, sorted_rows, ids, weights),
            sorted_rows.nbytes + token_grad.nbytes,
        ),
        "combine backward": (
            functools.partial(combine_rows_backward, token_grad, sorted_rows, ids, weights),
            2 * sorted_rows.nbytes + token_grad.nbytes,
        ),
        "permute backward": (
            functools.partial(combine_rows, sorted_rows, ids),
            sorted_rows.nbytes + token_grad.nbytes,
        ),
    }


def as_torch(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same on the reference backend."""

    def run() -> Any:
        with mxpert.override(backend="reference"):
            return call()

    return run


def measure(
    name: str, sizes: Sequence[int], device: torch.device, copy_tbs: float
) -> list[dict[str, Any]]:
    """One row for each op."""
    tokens, top_k, hidden, width = sizes
    found = cases(tokens, top_k, hidden, width, device)
    calls = {
        f"{op}/{side}": wrap(call)
        for op, (call, _) in found.items()
        for side, wrap in (("kernel", lambda call: call), ("torch", as_torch))
    }
    timings = time_calls(calls, device=device, repeats=7 if device.type == "cuda" else 1)
    rows = []
    for op, (_, size) in found.items():
        us = timings[f"{op}/kernel"].us
        rows.append(
            {
                "model": name,
                "op": op,
                "bytes_ideal": size,
                "us": us,
                "torch_us": timings[f"{op}/torch"].us,
                "tbs": size / us / 1e6,
                "of_copy": size / us / 1e6 / copy_tbs,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            message("training_rows", "device", "a GPU", "none", "run with --dry-run"),
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    models = {name: (8, 2, 64, 96) if options.dry_run else sizes for name, sizes in MODELS.items()}
    copy_tbs = copy_rate(device, 1 << 20 if options.dry_run else 1 << 32) / 1e12
    rows = [row for name, sizes in models.items() for row in measure(name, sizes, device, copy_tbs)]
    facts = environment(device)
    path = options.output or (ROOT / "reports/training_rows.json" if options.dry_run else RESULTS)
    write_json(
        path,
        {
            "meta": facts | {"commit": options.commit or facts["commit"], "copy_tbs": copy_tbs},
            "rows": rows,
        },
    )
    print(
        markdown_table(
            ("pass", "µs", "torch µs", "faster by", "TB/s", "of copy"),
            [
                (
                    f"{row['model']} {row['op']}",
                    f"{row['us']:.0f}",
                    f"{row['torch_us']:.0f}",
                    f"{row['torch_us'] / row['us']:.1f}×",
                    f"{row['tbs']:.2f}",
                    f"{100 * row['of_copy']:.0f} %",
                )
                for row in rows
            ],
        )
    )
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
