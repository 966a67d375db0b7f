"""What the processes of test_exchange.py do: ``CASE__EXECUTOR`` runs a case on all ranks.

    PYTHONPATH=.:tests python -m tests.conformance.layer_ranks 3 0 500  # ranks, first and last case

runs more random cases. A failure names the case.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from mxpert.distributed import Transport
from mxpert.testing.gfx950 import emulate
from support.executors import Executor
from support.interpreter import install
from support.ranks import run_scenarios
from tests.conformance.cases import exchange as cases
from tests.distributed.multi_gpu.environment import gpu_group, share_one_gpu

if os.environ.get("TRITON_INTERPRET") == "1":
    install()


def run(case: cases.ExchangeCase, executor: Executor) -> None:
    """Run a case with every transport that the executor has."""
    group, transports = dist.group.WORLD, (Transport.SYMMETRIC,)
    if executor.way == "plain":
        transports = case.transports
    elif executor.way == "gpu":
        group = gpu_group()
        transports += () if share_one_gpu() else cases.TRANSPORTS
    emulated = executor.way == "emulated"
    with emulate(schedule="random", seed=dist.get_rank()) if emulated else contextlib.nullcontext():
        for transport in transports:
            case.check(executor, transport, group)
            dist.barrier()


def __getattr__(name: str) -> Callable[[], None]:
    name, _, executor = name.partition("__")
    case, (kind, *numbers) = cases.ALL.get(name), name.split("-")
    if case is None and kind == "drawn":
        size, number = map(int, numbers)
        case = cases.drawn(number, size)
    if case is None:
        raise AttributeError(name)
    backend, _, way = executor.partition("-")
    return functools.partial(run, case, Executor(backend, way or "plain"))  # type: ignore[arg-type]


def main() -> None:
    ranks, first, last = map(int, sys.argv[1:])
    names = [f"drawn-{ranks}-{number}__reference" for number in range(first, last)]
    with tempfile.TemporaryDirectory() as folder:
        module = "tests.conformance.layer_ranks"
        outcomes = run_scenarios(module, names, ranks, Path(folder), limit_s=1e6)
        for name in names:
            outcomes.check(name)


if __name__ == "__main__":
    main()
