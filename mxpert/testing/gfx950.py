"""The library's own ops on CPU tensors, through gfx950 code."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from .. import weights
from ..backends.common.exchange import host
from ..dispatch import calls, target
from ..distributed.workspace import Workspace
from ..errors import message
from ..problem import Target
from ..runtime.launch import Launch, _record
from ..runtime.replay import Replayed
from .ahead_of_time import compile_call, specialize

try:
    from gfx950emu import Reachable, Report, run
    from gfx950emu.machine import Schedule
except ModuleNotFoundError as error:
    if error.name != "gfx950emu":
        raise
    raise ModuleNotFoundError(
        message(
            __name__,
            "import",
            "the gfx950 emulator",
            "no package gfx950emu",
            "pip install 'git+https://github.com/mxpert/mxpert#subdirectory=gfx950-emulator', "
            "in a checkout pip install ./gfx950-emulator",
        ),
        name=error.name,
    ) from error

MI355X = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)
"""The device that ops see: 256 compute units, 160 KiB of LDS each."""


@dataclass
class KernelTotals:
    """All launches of one kernel.

    Args:
        launches: how many. instructions: wave-instructions of all of them.
        seconds: of this computer, not of the device.
    """

    launches: int = 0
    instructions: int = 0
    seconds: float = 0.0


@dataclass
class Emulation:
    """What was executed under `emulate`.

    Args:
        options: schedule, seed, checks and trace, as `run` takes them.
        kernels: totals by name of the kernel. counts: wave-instructions by mnemonic.
        last: the report of the last launch; None ahead of the first.
        reports: of each launch, if traces were asked for.

    Example:
        >>> import torch, mxpert
        >>> with emulate(schedule="random", seed=3) as emulation:
        ...     codes = mxpert.quantize(torch.ones(2, 32), "mxfp4").qdata
        >>> list(emulation.kernels), emulation.last.checks
        (['_quantize_rows_kernel'], True)
    """

    options: Mapping[str, Any]
    kernels: dict[str, KernelTotals] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    last: Report | None = None
    reports: list[Report] = field(default_factory=list)
    _reachable: dict[int, tuple[str, weakref.ref[torch.Tensor], bool]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """How many kernels were launched."""
        return sum(kernel.launches for kernel in self.kernels.values())

    @property
    def instructions(self) -> int:
        """Wave-instructions of all kernels."""
        return sum(kernel.instructions for kernel in self.kernels.values())

    def reach(self, name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
        """Let kernels reach a tensor by pointers in memory, as long as it lives.

        The memory of an `ExpertParallel` that is made inside the block needs no such call.

        Args:
            name, tensor, shared: as `Reachable` has them. The name gets a number if it is taken.
        """
        living = self.reachable
        taken = sum(each.name.split(" (")[0] == name for each in living)
        if all(each.address != tensor.data_ptr() for each in living):
            name = f"{name} ({taken + 1})" if taken else name
            self._reachable[tensor.data_ptr()] = name, weakref.ref(tensor), shared

    @property
    def reachable(self) -> list[Reachable]:
        """What kernels reach by pointers in memory."""
        found = ((name, tensor(), shared) for name, tensor, shared in self._reachable.values())
        return [Reachable(name, each, shared) for name, each, shared in found if each is not None]

    def execute(self, kernel: Any, grid: Any, arguments: Mapping[str, Any]) -> Any:
        """Compile a kernel for these arguments, execute it, and return Triton's binary."""
        call = specialize(kernel, arguments, MI355X.arch)
        compiled = compile_call(kernel, call, MI355X.arch)
        if callable(grid):
            grid = grid(call.bound)
        sizes = tuple(map(int, grid))
        report = run(compiled, sizes, call.bound, reachable=self.reachable, **self.options)
        totals = self.kernels.setdefault(report.kernel, KernelTotals())
        totals.launches += 1
        totals.instructions += report.instructions
        totals.seconds += report.seconds
        for name, count in report.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.last = report
        if report.traces:
            self.reports.append(report)
        return compiled


_current: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar(
    "mxpert_gfx950_emulation", default=None
)


@contextlib.contextmanager
def emulate(
    *, schedule: Schedule = "lowest", seed: int = 0, checks: bool = True, trace: bool = False
) -> Iterator[Emulation]:
    """Run the library's ops on CPU tensors through gfx950 code inside the block.

    Ops see an MI355X. Each launch, also of other Triton and Gluon kernels by ``kernel[grid](...)``,
    is compiled for gfx950 with the specialisation of Triton's AMD launcher and executed as `run`
    does.

    It holds for the thread or task that enters it; other threads are not affected, and threads that
    are started inside do not inherit it. Blocks nest: the innermost executes and counts. Caches of
    warm calls and recorded replays are neither read nor filled inside. Other threads record no
    replays while a block is open.

    Args:
        schedule, seed, checks, trace: of each launch, see `run`.

    Yields:
        An `Emulation` with totals by kernel.

    Raises:
        Fault: by the op whose kernel does something undefined.
        TypeError: by a launch, if Triton interprets kernels (``TRITON_INTERPRET=1``).

    Example:
        >>> import torch, mxpert
        >>> from mxpert.testing.gfx950 import emulate
        >>> x = torch.randn(4, 64)
        >>> with emulate() as emulation:
        ...     quantized = mxpert.quantize(x, "mxfp4")
        >>> torch.equal(quantized.qdata, mxpert.quantize(x, "mxfp4").qdata), emulation.launches
        (True, 1)
    """
    emulation = Emulation(dict(schedule=schedule, seed=seed, checks=checks, trace=trace))
    with _installed():
        token = _current.set(emulation)
        try:
            yield emulation
        finally:
            _current.reset(token)


_lock = threading.Lock()
_open = 0
_patches = contextlib.ExitStack()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Divert launches, target detection and caches while a block is open in any thread."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for owner, name, replacement in _diversions():
                _patches.enter_context(mock.patch.object(owner, name, replacement))
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                _patches.close()


def _diversions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and replacement of all functions that behave differently in a block."""
    launch, run_jitted = Launch.__call__, JITFunction.run
    replay, find, add = Replayed.replay, calls.CallCache.find, calls.CallCache.add
    detect, architecture = target._cpu_target, weights._architecture

    def launch_or_emulate(made: Launch, **tensors: torch.Tensor | None) -> None:
        emulation = _current.get()
        if emulation is None:
            launch(made, **tensors)
        else:
            emulation.execute(made.kernel, made.grid, made.arguments(tensors))
            _record(made, tensors, None)

    def run_or_emulate(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        emulation = _current.get()
        if emulation is None or warmup:
            return run_jitted(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        named = dict(zip(kernel.arg_names, args, strict=False))
        return emulation.execute(kernel, grid, {**named, **kwargs})

    def replay_outside(kernel: Any, *arguments: Any) -> Any:
        return replay(kernel, *arguments) if _current.get() is None else None

    def find_outside(cache: Any, options: Any, geometry: Any) -> Any:
        return find(cache, options, geometry if _current.get() is None else None)

    def add_outside(cache: Any, options: Any, geometry: Any, problem: Any) -> Any:
        return add(cache, options, geometry if _current.get() is None else None, problem)

    def detect_or_emulate(kind: str) -> Target:
        return detect(kind) if _current.get() is None else MI355X

    def architecture_or_emulate(device: torch.device) -> str:
        return architecture(device) if _current.get() is None else MI355X.arch

    yield from _watched_exchanges()
    yield Launch, "__call__", launch_or_emulate
    yield JITFunction, "run", run_or_emulate
    yield Replayed, "replay", replay_outside
    yield calls.CallCache, "find", find_outside
    yield calls.CallCache, "add", add_outside
    yield target, "_cpu_target", detect_or_emulate
    yield weights, "_architecture", architecture_or_emulate


def _watched_exchanges() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Functions of the SYMMETRIC transport that tell the emulation of memory behind pointers."""
    make, new_arrivals = Workspace.__init__, host.new_arrivals

    def make_and_reach(workspace: Workspace, *arguments: Any, **named: Any) -> None:
        make(workspace, *arguments, **named)
        emulation = _current.get()
        if emulation is not None:
            for rank, memory in enumerate(workspace.keep):
                emulation.reach(f"the memory of rank {rank}", memory, shared=True)

    def arrivals_and_reach(arrived: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        emulation = _current.get()
        if emulation is not None:
            emulation.reach("the words of an exchange", words)
        return new_arrivals(arrived, words)

    yield Workspace, "__init__", make_and_reach
    yield host, "new_arrivals", arrivals_and_reach
