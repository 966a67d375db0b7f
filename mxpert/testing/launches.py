"""A CUDA driver without a GPU: kernels are compiled for sm_90 and launched into a list.

Everything above the driver's C functions runs as it does on a device, so that what the library
would launch can be looked at, and what a launch costs the host can be timed, on any machine. The
launched kernels do nothing: results hold whatever memory held.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, GPUDriver
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from ..backends.launch import Launch
from ..dispatch import Calls
from ..ops import grouped_gemm, moe, quantize, quantize_dual, route, rows
from ..problem import Target

H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
_DEVICE = 1 << 20
"""No real device: Triton keeps binaries by device, and these have no function."""

_OPS = (grouped_gemm, moe, quantize, quantize_dual, route, rows)


class RecordedLaunch(NamedTuple):
    """A kernel, its grid, and all its arguments and launch options by keyword."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@contextlib.contextmanager
def through_triton() -> Iterator[None]:
    """Let every launch take Triton's own path, as a ruler for `Launch`."""
    def launch(made: Launch, **tensors: Any) -> None:
        made.kernel[made.grid](**made.arguments(tensors))

    with mock.patch.object(Launch, "__call__", launch):
        yield


def count_launches(call: Callable[[], object]) -> int:
    """Kernels that `call` launches."""
    launch, count = Launch.__call__, itertools.count()

    def counted(made: Launch, **tensors: Any) -> None:
        next(count)
        launch(made, **tensors)

    with mock.patch.object(Launch, "__call__", counted):
        call()
    return next(count)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Note what would be launched, for tensors of any device, and launch nothing."""
    launches: list[RecordedLaunch] = []

    def record(launch: Launch, **tensors: Any) -> None:
        launches.append(RecordedLaunch(launch.kernel, launch.grid, launch.arguments(tensors)))

    with mock.patch.object(Launch, "__call__", record):
        yield launches


class _Utilities:
    """The functions of Triton's C module for the driver, without a driver."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H200.shared_memory, "multiprocessor_count": H200.num_sms}

    def load_binary(self, name: str, *_: object) -> tuple[object, str, int, int, int]:
        """Module, function, registers, spills, threads that a block may have."""
        return object(), name, 0, 0, 1024

    def fill_tma_descriptor(self, *arguments: Any) -> tuple[Any, ...]:
        return "descriptor", *map(_plain, arguments)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Driver(GPUDriver):
    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.utils = _Utilities()
        self.get_current_device = lambda: _DEVICE
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return nvidia.ty_to_cpp(ty)

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError


class _Sink:
    """Where launches go: binaries outlive the block that compiled them."""

    launches: list[tuple[Any, ...]] | None = None

    @classmethod
    def launch(cls, *arguments: Any) -> None:
        if cls.launches is not None:
            cls.launches.append(arguments)


@contextlib.contextmanager
def without_device(*, record: bool = True) -> Iterator[list[tuple[Any, ...]]]:
    """Launch Triton's kernels into the list that this yields: arguments of its C launcher.

    Args:
        record: False drops them, for timing.
    """
    launches: list[tuple[Any, ...]] = []
    before = driver._active
    with mock.patch.multiple(nvidia, compile_module_from_src=lambda **_: _Sink,
                             library_dirs=list):
        driver.set_active(_Driver())
        _Sink.launches = launches if record else None
        try:
            yield launches
        finally:
            _Sink.launches, driver._active = None, before


def _h200(device: object) -> Target:
    """Cheaper than a mock, which would be timed with the ops."""
    return H200


@contextlib.contextmanager
def as_if_on_h200() -> Iterator[None]:
    """Resolve problems of CPU tensors as if they lay on an H200, in ops that know no arguments."""
    with contextlib.ExitStack() as stack:
        for module in _OPS:
            stack.enter_context(mock.patch.object(module, "detect_target", _h200))
            for calls in [each for each in vars(module).values() if isinstance(each, Calls)]:
                stack.enter_context(mock.patch.object(calls, "_known", {}))
        yield


