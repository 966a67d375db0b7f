"""The library's own ops on CPU tensors, through gfx950 code."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ..core.problem import Target
from ..core.target import Kernel, current_device, on_device
from ..errors import message
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

Grid = tuple[int, ...] | Callable[[Mapping[str, Any]], tuple[int, ...]]
"""Sizes of a launch, or a function of its arguments that returns them."""
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
    """The executor of `emulate`, and what it has executed.

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

    def __post_init__(self) -> None:
        _divert_plain_launches()

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

    def execute(
        self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Any], *, warmup: bool = False
    ) -> CompiledKernel:
        """Compile a kernel for these arguments, execute it, and return Triton's binary."""
        call = specialize(kernel, arguments, MI355X.arch)
        compiled = compile_call(kernel, call, MI355X.arch)
        if not warmup:
            sizes = tuple(map(int, grid(call.bound) if callable(grid) else grid))
            self._count(self.run(compiled, sizes, call.bound))
        return compiled

    def run(
        self, compiled: CompiledKernel, grid: tuple[int, ...], arguments: Mapping[str, Any]
    ) -> Report:
        """Execute a launch of a binary."""
        return run(compiled, grid, arguments, reachable=self.reachable, **self.options)

    def _count(self, report: Report) -> None:
        totals = self.kernels.setdefault(report.kernel, KernelTotals())
        totals.launches += 1
        totals.instructions += report.instructions
        totals.seconds += report.seconds
        for name, count in report.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.last = report
        if report.traces:
            self.reports.append(report)


@contextlib.contextmanager
def emulate(
    *, schedule: Schedule = "lowest", seed: int = 0, checks: bool = True, trace: bool = False
) -> Iterator[Emulation]:
    """Run the library's ops on CPU tensors through gfx950 code inside the block.

    Ops see an MI355X. Each launch, also of other Triton and Gluon kernels by ``kernel[grid](...)``,
    is compiled for gfx950 with the specialisation of Triton's AMD launcher and executed as `run`
    does.

    It holds for the thread or task that enters it; other threads are not affected, and threads that
    are started inside do not inherit it. Blocks nest: the innermost executes and counts. Calls
    that were cached or recorded outside are not used inside, and the other way round.

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
    with on_device(MI355X, emulation):
        yield emulation


@functools.cache
def _divert_plain_launches() -> None:
    """Let ``kernel[grid](...)`` ask for an `Emulation` first, from now on.

    Triton lets no hook replace a launch, and its driver is one for all threads.
    """
    run_jitted = JITFunction.run

    def run_or_emulate(
        kernel: Kernel, *args: object, grid: Grid, warmup: bool, **kwargs: object
    ) -> CompiledKernel:
        executor = current_device().executor
        if not isinstance(executor, Emulation):
            return run_jitted(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        named = dict(zip(kernel.arg_names, args, strict=False))
        return executor.execute(kernel, grid, {**named, **kwargs}, warmup=warmup)

    JITFunction.run = run_or_emulate
