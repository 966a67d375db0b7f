"""Time what one grouped linear, forward and backward, costs the host.

    python -m benchmarks.grouped.training_host [--dry-run]

Each row is one recipe: kernels of ours that are launched, and the median host time of a warm eager
forward and backward. The layer is small, so that the device keeps up. With --dry-run kernels are
compiled for sm_90 (a minute, the first time) and launched into nothing: the host time of a machine
without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

import torch

from benchmarks.harness.script import Script, machine
from benchmarks.harness.tables import row_table
from benchmarks.routing.run import host_us
from mxpert.cli.report import write_json
from mxpert.core.target import on_device
from mxpert.formats.spec import LINE_SPANS
from mxpert.training import MXFP8Recipe, grouped_linear
from support.launches import H200, count_launches, without_device

ROWS, GROUPS, IN, OUT = 256, 8, 512, 256
CALLS = 400
RECIPES = {
    "bf16": MXFP8Recipe(enabled=False),
    **{span.name: MXFP8Recipe(scale_span=span) for span in LINE_SPANS},
}


def step_of(recipe: MXFP8Recipe, device: torch.device) -> Callable[[], object]:
    """Forward and backward of one layer."""
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(GROUPS, OUT, IN, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.randn(ROWS, OUT, dtype=torch.bfloat16, device=device)
    offsets = torch.arange(0, ROWS + 1, ROWS // GROUPS, dtype=torch.int32, device=device)

    def step() -> object:
        y = grouped_linear(x, weight, offsets, recipe=recipe)
        return torch.autograd.grad(y, (x, weight), grad)

    return step


COLUMNS = {"forward and backward": "{recipe}", "launches": "{launches}", "host µs": "{host_us:.0f}"}


def measure(options: argparse.Namespace, _: None) -> int:
    """Print the table, write the JSON."""
    rows = []
    with contextlib.ExitStack() as stack:
        if options.dry_run:
            stack.enter_context(without_device(record=False))
            stack.enter_context(on_device(H200))
        for name, recipe in RECIPES.items():
            step = step_of(recipe, options.device)
            step()
            us = host_us(step, options.device, CALLS)
            with torch.autograd.set_multithreading_enabled(False):  # launches of a thread count
                rows.append({"recipe": name, "launches": count_launches(step), "host_us": us})
    print(row_table(rows, COLUMNS))
    write_json(options.path, {"meta": machine(options), "rows": rows})
    return 0


SCRIPT = Script("training_host", __doc__, measure)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
