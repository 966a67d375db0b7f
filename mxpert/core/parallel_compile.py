"""Compilation of several kernels side by side.

Triton compiles a kernel at its first launch, so the kernels of a layer follow one another: ten
seconds for many tokens. Its passes and assemblers run without Python's lock, three quarters of the
time, so threads compile several kernels at once. The C code that launches a kernel (Triton 3.6) is
compiled with it.

An error is not raised here. The launch that needs the kernel compiles it again, and raises it.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode
from triton.runtime.driver import driver

from .calls import current_call
from .target import Kernel, on_device

_MOST_THREADS = 16
"""The front end holds Python's lock for a quarter of the time: more threads would only wait."""

_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.new_empty.default,
        _aten.empty_strided.default,
        _aten.new_empty_strided.default,
        _aten.empty_like.default,
    )
)
"""Operators that allocate without initialising."""


class _Threads:
    """What Triton's mode hands its work to."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:  # Triton's compiled kernel
    compiled = compile_kernel()
    with contextlib.suppress(Exception):  # the launch makes its own, and finds this one on disk
        driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


@contextlib.contextmanager
def compile_in_threads() -> Iterator[None]:
    """Compile kernels in threads inside the block, and wait for all at its end.

    What is launched inside the block waits for its own kernel alone.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(_Threads(pool), ignore_errors=True):
        yield


class _StopError(Exception):
    """Raised where the host code needs memory."""


class _WithoutMemory(TorchDispatchMode):
    """Tensors that are allocated inside have no memory."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # what `func` returns
        if func in ALLOCATIONS:
            return func(*args, **{**(kwargs or {}), "device": "meta", "pin_memory": False})
        if getattr(func, "is_view", False):
            return func(*args, **(kwargs or {}))
        raise _StopError


class _Launches(list[tuple[Kernel, tuple[int, ...], Mapping[str, Any]]]):
    """An executor that notes what it was to launch."""

    def execute(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: Mapping[str, Any], *, warmup: bool
    ) -> None:
        self.append((kernel, grid, arguments))

    def reach(self, name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
        """Nothing is read."""


def _launches_of(call: Callable[[], object]) -> _Launches:
    """The launches of a kernel's host code, up to the first operator that needs memory."""
    launches = _Launches()
    # What the call raises, it raises again when it runs.
    with contextlib.suppress(Exception), on_device(executor=launches), _WithoutMemory():
        call()
    return launches


def compile_call() -> None:
    """Compile all kernels of the call in progress, if there is one.

    Nothing is launched, and no memory of the device is used.
    """
    call = current_call.get()
    if call is not None:
        current_call.set(None)  # until it ends: what it needs is compiled
        contextvars.copy_context().run(_compile, call)


def _compile(call: Callable[[], object]) -> None:
    launches = _launches_of(call)
    with contextlib.suppress(Exception), compile_in_threads():  # see _launches_of
        for kernel, grid, arguments in launches:
            kernel.run(grid=grid, warmup=True, **arguments)
