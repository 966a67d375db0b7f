"""Executors of the conformance suite: a backend, and how this process runs its kernels.

``@pytest.mark.cases(CASES)`` runs a test with each `case` of a dict on each `executor` that serves
it; ``cases(name=CASES, ...)`` those of several dicts, whose names begin the ids. A process has one
kind of executor besides the reference: the interpreter with TRITON_INTERPRET=1, the emulator with
``--gfx950``, or the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import pytest
import torch

import mxpert
from mxpert.core.backend import BACKENDS
from mxpert.core.stage_configs import Config
from mxpert.core.target import detect_target
from support.poison import nan_filled_scratch

CHIPS = {arch: backend.name for backend in BACKENDS.values() for arch in backend.made_for}
"""Backend with kernels of its own for an architecture."""


@dataclass(frozen=True)
class Executor:
    """A backend in this process."""

    backend: str
    way: Literal["plain", "interpreted", "emulated", "gpu"]

    def __str__(self) -> str:
        return self.backend if self.way == "plain" else f"{self.backend}-{self.way}"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.way == "gpu" else "cpu")

    @contextlib.contextmanager
    def serving(self, config: Config | None = None) -> Iterator[None]:
        """Only this backend serves calls. New memory is NaN, so no result depends on it."""
        with mxpert.override(backend=self.backend, config=config), nan_filled_scratch():
            yield


class Case(Protocol):
    """A case of the suite."""

    def served_by(self, backend: str) -> bool:
        """Whether the backend has a kernel for it; `kernel.unsupported` must agree."""


def executors(*, emulated: bool) -> list[Executor]:
    """The executors of this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [Executor("triton", "interpreted")]
    if emulated:
        return [Executor(backend, "emulated") for backend in ("triton", "cdna4")]
    found = [Executor("reference", "plain")]
    if torch.cuda.is_available():
        own = CHIPS.get(detect_target("cuda").arch)
        found += [Executor(backend, "gpu") for backend in ("triton", own) if backend is not None]
    return found


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a test that is marked with `cases` its cases and executors."""
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None:
        return
    groups = {"": marker.args[0]} if marker.args else marker.kwargs
    pairs = [
        pytest.param(
            case,
            executor,
            id=f"{executor}-{group}-{name}" if group else f"{executor}-{name}",
            marks=[pytest.mark.group(group), *([pytest.mark.gpu] if executor.way == "gpu" else [])],
        )
        for executor in executors(emulated=metafunc.config.getoption("--gfx950"))
        for group, cases in groups.items()
        for name, case in cases.items()
        if case.served_by(executor.backend)
    ]
    metafunc.parametrize("case, executor", pairs)
