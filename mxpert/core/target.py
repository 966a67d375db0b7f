"""The device that ops run on: facts about it, read once per process, and who launches kernels.

`on_device` replaces either inside a block: kernels chosen for another device, launches that are
recorded, executed elsewhere or only compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import Checks
from .problem import Target


class Kernel(Protocol):
    """A Triton or Gluon kernel, compiled or interpreted."""

    @property
    def arg_names(self) -> Sequence[str]: ...

    @property
    def params(self) -> Sequence[Any]: ...  # Triton's KernelParam

    @property
    def signature(self) -> inspect.Signature: ...

    @property
    def pre_run_hooks(self) -> Sequence[Callable[..., object]]: ...

    def run(self, *args: object, grid: object, warmup: bool, **options: object) -> Any:
        """Launch or only compile it; returns Triton's compiled kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...


class Executor(Protocol):
    """Launches kernels in place of Triton and the driver."""

    def execute(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: Mapping[str, Any], *, warmup: bool
    ) -> Any:
        """Launch a kernel.

        Args:
            kernel: a Triton or Gluon kernel.
            arguments: arguments and launch options by keyword, as ``kernel[grid](...)`` takes them.
            warmup: whether to compile the kernel and not launch it.
        """

    def reach(self, name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
        """Learn of memory that kernels reach by an address in other memory.

        Args:
            shared: whether other devices write to it.
        """


@dataclass(frozen=True, eq=False)
class Device:
    """What ops take for their device.

    Args:
        target: of all tensors; None for what torch tells of each device.
        executor: gets each launch, and nothing is replayed; None launches on the device itself.
        compiles_only: whether launches only compile their kernels.
        calls: of each op's cache, the calls that were made on this device.
    """

    target: Target | None = None
    executor: Executor | None = None
    compiles_only: bool = False
    calls: defaultdict[object, dict[object, Any]] = field(
        default_factory=lambda: defaultdict(dict), repr=False
    )


_device = contextvars.ContextVar("mxpert_device", default=Device())

current_device = _device.get
"""Return the `Device` of this thread or task."""


@contextlib.contextmanager
def on_device(
    target: Target | None = None, executor: Executor | None = None, *, compiles_only: bool = False
) -> Iterator[None]:
    """Run ops on another `Device` inside the block, which is the enclosing one where not given.

    It holds for the thread or task that enters it; threads that are started inside do not inherit
    it. Calls that were cached outside are not used inside, and the other way round.
    """
    outer = _device.get()
    inner = Device(
        outer.target if target is None else target,
        outer.executor if executor is None else executor,
        compiles_only or outer.compiles_only,
    )
    token = _device.set(inner)
    try:
        yield
    finally:
        _device.reset(token)


def tell_executor(name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
    """Tell the executor, if there is one, of memory that kernels reach by an address in memory."""
    executor = _device.get().executor
    if executor is not None:
        executor.reach(name, tensor, shared=shared)


def detect_target(device: torch.device | str) -> Target:
    """Describe the device that a tensor lives on.

    >>> detect_target("cpu").arch
    'cpu'
    """
    replaced = _device.get().target
    if replaced is not None:
        return replaced
    device = torch.device(device)
    if device.type != "cuda":
        return _cpu_target(device.type)
    return _gpu_target(torch.cuda.current_device() if device.index is None else device.index)


def check_num_sms(num_sms: int | None, device: torch.device, need: Checks) -> None:
    """Check `num_sms`: None, or 1 to the number of SMs (compute units) of a device.

    Raises:
        TypeError: no int. ValueError: out of range.
    """
    if num_sms is None:
        return
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        raise need.type_error("num_sms", "an int or None", repr(num_sms))
    if torch.compiler.is_compiling():  # the op checks it again when it runs
        return
    target = detect_target(device)
    most = num_sms if target.kind == "cpu" else target.num_sms  # of no use there: no grid
    if not 1 <= num_sms <= most:
        wanted = "at least 1" if target.kind == "cpu" else f"1 to {most}, which {target.name} has"
        raise need.value_error("num_sms", wanted, num_sms, "None takes all of them")


@functools.cache
def _cpu_target(kind: str) -> Target:
    return Target(
        kind="cpu",
        arch=kind,
        name=platform.processor() or platform.machine(),
        num_sms=torch.get_num_threads(),
        shared_memory=0,
    )


@functools.cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        return Target("hip", arch, properties.name, properties.multi_processor_count, 160 * 1024)
    # torch's stub lacks the attribute.
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined,unused-ignore]
    arch = f"sm_{properties.major}{properties.minor}"
    return Target(
        "cuda",
        arch,
        properties.name,
        properties.multi_processor_count,
        shared_memory,
        clock=1e3 * properties.clock_rate,
        bandwidth=2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8,
    )
