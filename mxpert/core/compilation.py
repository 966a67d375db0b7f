"""Compilation of kernels: without a launch, and of all kernels of an op's call at once.

Triton compiles a kernel when it is first launched, one after the other, and a layer launches up to
ten. So the first launch that finds no binary compiles all kernels of its op's call, in threads:
most of the time is spent in LLVM, ptxas and the C compiler, where Python's lock is free. The
launches that follow find the binaries.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from .environment import compile_threads
from .target import Kernel, current_device, on_device

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel


class ThroughTriton:
    """The executor that launches by Triton's own code."""

    def execute(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: Mapping[str, Any], *, warmup: bool
    ) -> Any:
        """Launch a kernel on the current device, or only compile it."""
        return kernel.run(grid=grid, warmup=warmup, **arguments)

    def reach(self, name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
        """Does nothing: devices reach all memory."""


THROUGH_TRITON = ThroughTriton()


class _Compilers:
    """Triton's compilations in threads, each with what launches the binary: C code with Triton 3.6.

    Args:
        pool: the threads.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], CompiledKernel]) -> Future[CompiledKernel]:
        """Start a compilation."""
        return self._pool.submit(self._with_launcher, compile_kernel)

    @staticmethod
    def _with_launcher(compile_kernel: Callable[[], CompiledKernel]) -> CompiledKernel:
        from triton.runtime.driver import driver

        kernel = compile_kernel()
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # stays in Triton's cache
        return kernel


def compile_only() -> contextlib.AbstractContextManager[None]:
    """Compile the kernels of this thread's or task's launches inside the block; launch none."""
    executor = current_device().executor
    return on_device(executor=THROUGH_TRITON if executor is None else executor, compiles_only=True)


@contextlib.contextmanager
def compile_together() -> Iterator[None]:
    """As `compile_only`, in threads: the block ends when all kernels are compiled.

    A kernel that does not compile is left out; its launch raises the error.
    """
    threads = compile_threads()
    with contextlib.ExitStack() as stack:
        if threads > 1:
            from triton import AsyncCompileMode  # where launches are made, it is there

            # Triton changes the process's filters for a moment, which threads undo in any order.
            stack.enter_context(warnings.catch_warnings())
            pool = stack.enter_context(ThreadPoolExecutor(threads, "mxpert-compile"))
            stack.enter_context(AsyncCompileMode(_Compilers(pool), ignore_errors=True))
        stack.enter_context(compile_only())
        yield


_whole_calls: contextvars.ContextVar[list[Callable[[], object]] | None] = contextvars.ContextVar(
    "mxpert_whole_calls", default=None
)


@contextlib.contextmanager
def whole_call(launches: Callable[[], object]) -> Iterator[None]:
    """Say what launches all kernels of the op's call inside the block; an outer call contains it.

    Args:
        launches: can run more than once, without another effect than its launches.
    """
    if _whole_calls.get() is not None:
        yield
        return
    token = _whole_calls.set([launches])
    try:
        yield
    finally:
        _whole_calls.reset(token)


def compile_whole_call() -> None:
    """Compile all kernels of the `whole_call` around this launch, at most once in each."""
    calls = _whole_calls.get()
    if not calls or compile_threads() == 1:
        return
    launches = calls.pop()
    # What fails here, even for lack of memory, is left to the launches themselves.
    with contextlib.suppress(Exception), compile_together():
        launches()
