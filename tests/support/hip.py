"""A stub of the HIP driver for an MI355X: host code runs down to the driver's C functions.

Kernels are compiled for gfx950, and launches are recorded in a list. Nothing is executed: outputs
are uninitialised, and a graph's replay takes a made-up time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.amd import driver as amd

from support.launches import use_driver

ARCH = "gfx950:sramecc+:xnack-"
"""As the HIP runtime names the chip: with its features."""
PROPERTIES = SimpleNamespace(
    gcnArchName=ARCH, name="AMD Instinct MI355X", multi_processor_count=256, L2_cache_size=4 << 20
)
"""torch's device properties, as far as the library reads them."""
REPLAY_MS = 0.25
_DEVICE = (1 << 20) + 1
"""Device index that no real device has: Triton caches binaries by device, and these cannot run."""
LEADING = 11
"""Arguments of the C launcher ahead of the kernel's own: cooperative, grid, stream, function,
scratch, metadata, launch metadata and two hooks."""


class _Utilities:
    """Stand-in for Triton's C driver module."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {"max_shared_mem": 160 * 1024, "arch": ARCH, "warpSize": 64}

    def load_binary(self, name: str, *_: object) -> tuple[object, str, int, int, int]:
        """Return module, function, registers, spills and the largest number of threads."""
        return object(), name, 0, 0, 1024


class _Driver(amd.HIPDriver):
    """Triton's own driver without its C module and torch's device functions."""

    def __init__(self) -> None:
        self.utils = _Utilities()
        self.launcher_cls = amd.HIPLauncher
        self.get_current_device: Callable[[], int] = lambda: _DEVICE
        self.get_current_stream: Callable[[int], int] = lambda device: 7


def stub_driver() -> AbstractContextManager[list[tuple[Any, ...]]]:
    """Use the stub inside the block; yield a list of the C launcher's arguments."""
    return use_driver(_Driver(), amd, _get_path_to_hip_runtime_dylib=lambda: "libamdhip64.so")


class _Event:
    def __init__(self, **_: object) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "the driver's error: an event that was never recorded"

    def elapsed_time(self, end: _Event) -> float:
        assert self.recorded, "the driver's error: an event that was never recorded"
        assert end.recorded, "the driver's error: an event that was never recorded"
        return REPLAY_MS


class _Stream:
    def wait_stream(self, other: _Stream) -> None: ...


class _Graph:
    replays = 0

    def replay(self) -> None:
        type(self).replays += 1


class _OnMeta(TorchFunctionMode):
    """Makes tensors on the meta device where the code asks for the GPU."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = dict(keywords or {})
        if "cuda" in str(keywords.get("device")):
            keywords["device"] = "meta"
        return function(*arguments, **keywords)


@contextlib.contextmanager
def stub_torch() -> Iterator[None]:
    """Let torch claim one MI355X inside the block: properties, streams, events and graphs."""
    nothing: Callable[..., Any] = lambda *_: contextlib.nullcontext()  # noqa: E731
    _Graph.replays = 0
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda index: PROPERTIES,
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "current_stream": lambda *_: _Stream(),
        "synchronize": lambda *_: None,
        **dict.fromkeys(("device", "stream", "graph"), nothing),
    }
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(torch.version, "hip", "7.0.51831"),
        _OnMeta(),
    ):
        yield


def replayed_graphs() -> int:
    """Graph replays since `stub_torch` began."""
    return _Graph.replays
