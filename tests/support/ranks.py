"""Functions of a module run on several processes with gloo, started once for many tests.

A scenario is a function without arguments that every rank calls at the same time; it raises where
something is wrong. The processes are forked from one server that has imported the module.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60
"""Seconds that a collective waits for a rank that has failed."""

AFTER_FAILURE_S = 30.0
"""Seconds that the other ranks get to end by themselves, after one has failed."""


class Outcomes:
    """What each scenario did on each rank.

    Args:
        folder: where the ranks write. size: number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size

    def check(self, scenario: str, ranks: Sequence[int] | None = None) -> None:
        """Raise an AssertionError with the traceback of each rank on which a scenario failed.

        ranks: those that have to finish it; None for all.
        """
        found = []
        for rank in range(self._size) if ranks is None else ranks:
            path = self._folder / f"{scenario}.{rank}"
            text = path.read_text() if path.exists() else "did not finish"
            if text:
                found.append(f"rank {rank} of {self._size}: {text}")
        if found:
            raise AssertionError("\n".join(found))


def run_scenarios(
    module: str,
    scenarios: Sequence[str],
    size: int,
    folder: Path,
    *,
    limit_s: float = 240,
    timeout_s: float = TIMEOUT_S,
    method: str = "forkserver",
) -> Outcomes:
    """Run scenarios of `module` one after the other on `size` ranks.

    The first failure on a rank ends that process, and with it the scenarios after it.

    Args:
        module: name of a module that can be imported. scenarios: its functions, or functions of
            other modules with those modules' full names.
        size: number of ranks. folder: empty, for the outcomes.
        limit_s: seconds after which ranks are ended.
        timeout_s: seconds that a collective waits.
        method: how processes start; "spawn" where they use a GPU.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([module])
    given = module, list(scenarios), size, str(folder), timeout_s, sys.path
    ranks = [context.Process(target=_run, args=(rank, *given)) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit_s
    while (left := [each for each in ranks if each.is_alive()]) and deadline > time.monotonic():
        connection.wait([each.sentinel for each in left], deadline - time.monotonic())
        if any((each.exitcode or 0) > 0 for each in ranks):  # it failed; none has killed it
            deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return Outcomes(folder, size)


def run_once(
    factory: Any,
    module: str,
    scenarios: Sequence[str],
    size: int,
    *,
    name: str = "",
    **options: Any,
) -> Outcomes:
    """`run_scenarios` for a fixture: the workers of pytest-xdist share one run.

    Args:
        factory: pytest's tmp_path_factory.
        module, scenarios, size, options: as for `run_scenarios`.
        name: of the run; the module's for "". A name runs once for each size.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    folder = root / f"{name or module}-{size}"
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            run_scenarios(module, scenarios, size, folder, **options)
    return Outcomes(folder, size)


def scenario_tests(
    module: str,
    scenarios: Sequence[str],
    size: int,
    *,
    then: Sequence[str] = (),
    environment: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    **options: Any,
) -> Callable[..., None]:
    """A test of each scenario, to be bound to a name of a test file; the ranks start once.

    Args:
        module, scenarios, size, options: as for `run_scenarios`.
        then: what the ranks do last; other tests judge it.
        environment: entered while the ranks are started.
    """

    @pytest.mark.parametrize("scenario", scenarios, ids=lambda name: ".".join(name.split(".")[-2:]))
    def test(scenario: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        with environment():
            found = run_once(tmp_path_factory, module, (*scenarios, *then), size, **options)
        found.check(scenario)

    return test


def _run(
    rank: int,
    module: str,
    scenarios: list[str],
    size: int,
    folder: str,
    timeout_s: float,
    path: list[str],
) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    for name in scenarios:
        owner, _, function = name.rpartition(".")
        try:
            getattr(importlib.import_module(owner or module), function)()
        except BaseException:
            (where / f"{name}.{rank}").write_text(traceback.format_exc())
            os._exit(1)  # the other ranks notice at once
        (where / f"{name}.{rank}").write_text("")
    dist.barrier()
    dist.destroy_process_group()
