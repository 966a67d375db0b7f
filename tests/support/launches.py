"""A mock CUDA driver: kernels are compiled for sm_90, and launches are recorded in a list.

All host code above the driver's C functions runs as on a device. Tests can therefore inspect the
launches and time their host work on any machine. No kernel is executed: outputs are uninitialised.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, GPUDriver
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from mxpert.core.binary import CONVENTION, NUM_LEADING, Convention
from mxpert.core.compilation import ThroughTriton
from mxpert.core.launch import record_launches
from mxpert.core.problem import Target
from mxpert.core.target import on_device

H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
_DEVICE = 1 << 20
"""Device index that no real device has: Triton caches binaries by device, and these cannot run."""


through_triton = functools.partial(on_device, executor=ThroughTriton())
"""Launch through Triton's own ``kernel[grid](...)`` inside the block; nothing is replayed."""


class RecordedLaunch(NamedTuple):
    """A launch: the kernel, its grid, and its arguments and launch options by keyword."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


def count_launches(call: Callable[[], object]) -> int:
    """Number of kernels that `call` launches."""
    with through_triton(), record_launches() as records:
        call()
    return len(records)


class Recorder(list[RecordedLaunch]):
    """An executor that launches nothing: a list of what it was to launch."""

    def execute(
        self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], *, warmup: bool
    ) -> None:
        self.append(RecordedLaunch(kernel, grid, dict(arguments)))

    def reach(self, name: str, tensor: object, *, shared: bool = False) -> None:
        """Nothing is read."""


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Record launches instead of running them, for tensors on any device."""
    launches = Recorder()
    with on_device(executor=launches):
        yield launches


class _Utilities:
    """Stand-in for Triton's C driver module; needs no CUDA driver."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H200.shared_memory, "multiprocessor_count": H200.num_sms}

    def load_binary(self, name: str, *_: object) -> tuple[object, str, int, int, int]:
        """Return module, function, registers, spills and the largest number of threads."""
        return object(), name, 0, 0, 1024

    def fill_tma_descriptor(self, *arguments: Any) -> tuple[Any, ...]:
        return "descriptor", *map(_plain, arguments)

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name from Triton 3.7 on

    def build_signature_metadata(self, signature: list[str]) -> tuple[str, ...]:
        """Types of the kernel's arguments, which the C launcher of Triton 3.7 to 3.9 takes."""
        return tuple(signature)

    def launch(self, *arguments: Any) -> None:
        """The C launcher of Triton 3.7 to 3.9: note its arguments as that of 3.6 gets them."""
        *leading, annotations, signature, own = arguments
        kinds = [each.type for each in annotations]
        assert len(leading) == NUM_LEADING
        assert len(own) == len(kinds)
        assert len(signature) == kinds.count("kernel")
        _Sink.launch(*leading[:7], *leading[11:], *leading[7:11], *own)


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
        result: str = nvidia.ty_to_cpp(ty)
        return result

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError


class _Sink:
    """Stand-in for the C launcher module. A class attribute holds the list, because compiled
    binaries are used after the block that compiled them."""

    launches: list[tuple[Any, ...]] | None = None

    @classmethod
    def launch(cls, *arguments: Any) -> None:
        if cls.launches is not None:
            cls.launches.append(arguments)


@contextlib.contextmanager
def use_driver(
    stub: Any, module: Any, *, record: bool = True, **fakes: Any
) -> Iterator[list[tuple[Any, ...]]]:
    """Make `stub` Triton's driver inside the block; yield a list of the C launcher's arguments.

    Args:
        module: Triton's driver module, whose C launcher is replaced, and so are its `fakes`.
        record: False does not store the arguments, for timing.
    """
    launches: list[tuple[Any, ...]] = []
    before = driver._active
    if hasattr(module, "compile_module_from_src"):
        fakes["compile_module_from_src"] = lambda **_: _Sink
    with mock.patch.multiple(module, **fakes):
        driver.set_active(stub)
        _Sink.launches = launches if record else None
        try:
            yield launches
        finally:
            _Sink.launches, driver._active = None, before


def without_device(*, record: bool = True) -> AbstractContextManager[list[tuple[Any, ...]]]:
    """Use the mock driver inside the block; yield a list of the C launcher's arguments.

    Args:
        record: False does not store the arguments, for timing.
    """
    fakes: dict[str, Any] = {"library_dirs": list}
    if CONVENTION is Convention.NESTED:  # what its C module has
        fakes |= {"PyKernelArg": SimpleNamespace, "ARG_CONSTEXPR": "constexpr"}
        fakes |= {"ARG_KERNEL": "kernel", "ARG_TUPLE": "tuple"}
    return use_driver(_Driver(), nvidia, record=record, **fakes)
