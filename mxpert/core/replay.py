"""Replay of kernel calls: repeat the allocations and launches of an earlier call.

A kernel's `launch` is Python code that sizes grids, allocates and makes `Launch` calls. It never
reads data on the host, so it does the same for the same problem, config and geometry. The second
such call is recorded: the allocated buffers, the launches, and the origin of each pointer. From the
third call on `Replayed` repeats the recording, with one allocation for all scratch.

A kernel that keeps memory of its own between calls lists it in `resident`. Pointers into it are
the same in every call.

A call is not recorded, and always runs its own code, if it uses other torch operators, if its
launches go through Triton (in the interpreter, under hooks, on other targets) or to an executor, or
if an argument is not 16-byte aligned.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.driver import driver

from .geometry import CachedCall, assembler
from .kernel import Launchable
from .launch import LaunchRecord, PreparedLaunches, has_hooks, is_direct, record_launches
from .problem import Problem

_MAX_SCRATCH = 128 << 20
"""Largest scratch of a replayed call in bytes. Replay allocates all scratch buffers side by side,
which takes more memory. Calls with more scratch are limited by the device, not by host time."""

_ALIGNMENT = 256
_NO_DEVICE = -1
"""Device index of CPU tensors."""
_fills_new_memory = torch._C._get_deterministic_algorithms
_cuda_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""`torch.cuda.current_device` for a process that has tensors on one."""

_ConfigT = TypeVar("_ConfigT")
_InputsT = TypeVar("_InputsT")
_T = TypeVar("_T")

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.new_empty.default,
        _aten.empty_strided.default,
        _aten.new_empty_strided.default,
        _aten.empty_like.default,
    )
)


class Replayed(Generic[_ConfigT, _InputsT, _T]):
    """Wraps a Launchable, for example a KernelSpec, and can replay its `launch`."""

    def __init__(self, kernel: Launchable[Any, _ConfigT, _InputsT, _T]) -> None:
        self._kernel = kernel
        self.launch = kernel.launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def replay(
        self, cached: CachedCall, config: _ConfigT, tensors: list[torch.Tensor], inputs: _InputsT
    ) -> _T | None:
        """Return the result of `launch`, by replay or while recording it.

        The result is None if the caller has to call `launch`.

        Args:
            cached: the problem and the geometry of the arguments, with its recordings.
            config: the kernel's config.
            tensors: all tensors of the inputs, in order.
            inputs: of `launch`.
        """
        if not cached.is_replayed or _fills_new_memory():
            return None  # launches are an executor's, or torch fills new memory
        active = driver._active or driver.active  # without a property's frame
        current = active.get_current_device
        device: int = _cuda_device() if current is torch.cuda.current_device else current()
        own = tensors[0].get_device()
        if own not in (device, _NO_DEVICE):
            with torch.cuda.device(own):
                return self.replay(cached, config, tensors, inputs)
        key = (
            self,
            id(config),
            device,
            knobs.runtime.debug,
            knobs.compilation.instrumentation_mode,
        )
        state = cached.recordings.get(key)
        if state is None:
            cached.recordings[key] = _Seen(config)
        elif type(state) is Recording:
            addresses = state.addresses(tensors)
            if addresses is None:
                return None
            replay: Callable[..., _T] = state.replay  # of the type that `launch` has
            return replay(addresses, tensors, active.get_current_stream(device))
        elif state.is_recordable:
            result, recording = _record(self._kernel, cached.problem, config, inputs, tensors)
            cached.recordings[key] = recording or _Seen(config, is_recordable=False)
            return result
        return None


def replayed(*kernels: Any) -> tuple[Any, ...]:  # kernels of several ops, as in KERNELS
    """Wrap each kernel in `Replayed`, unless launches have to go through Triton."""
    return tuple(map(Replayed, kernels)) if is_direct() else kernels


class _Seen(NamedTuple):
    """State of a call that was made once, or that cannot be replayed (not `is_recordable`).

    It holds the config, because the key contains the config's id.
    """

    config: object
    is_recordable: bool = True


_Buffer = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of an allocation."""


def _empty(
    place: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=place)


_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_ALLOCATORS = {
    kind: getattr(_GUARDS, f"_empty_strided_{kind}")
    for kind in ("cpu", "cuda")
    if hasattr(_GUARDS, f"_empty_strided_{kind}")
}
"""Allocation functions of torch.compile's generated code, by device type, where torch has them:
0.6 µs a buffer instead of 1.2."""


@dataclass(frozen=True)
class Recording:
    """A recorded call.

    The launches index a list of addresses: the arguments' tensors, then the scratch buffer if there
    is one, then the outputs. `build` makes the result from the outputs followed by the arguments'
    tensors.
    """

    config: object
    launches: PreparedLaunches
    place: str  # the type of their device
    scratch: int
    outputs: tuple[_Buffer, ...]
    build: Callable[[list[torch.Tensor]], Any]

    def addresses(self, tensors: list[torch.Tensor]) -> list[int] | None:
        """Addresses of the arguments; None if they need other binaries or a hook is set."""
        addresses, bits = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        if bits % 16 or has_hooks():
            return None
        for kernel in self.launches.kernels:
            if kernel.pre_run_hooks:
                return None
        return addresses

    def replay(self, addresses: list[int], tensors: list[torch.Tensor], stream: int) -> Any:
        """Allocate, launch, and return the result that the kernel's `launch` would return."""
        allocate = _ALLOCATORS.get(self.place) or functools.partial(_empty, self.place)
        made = [allocate(*buffer) for buffer in self.outputs]
        if self.scratch:
            scratch = allocate((self.scratch,), (1,), torch.uint8)
            addresses.append(scratch.data_ptr())
        for tensor in made:
            addresses.append(tensor.data_ptr())
        self.launches(stream, addresses)
        return self.build(made + tensors)


class _Allocations(TorchDispatchMode):
    """Records allocations, and whether other operators than allocations and views ran.

    It keeps the tensors alive, so that no two of them have the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.foreign = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` as it is: torch's wrapper imports its compiler for seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # what `func` returns
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
        elif not getattr(func, "is_view", False):
            self.foreign = True
        return result


def _record(
    kernel: Launchable[Any, _ConfigT, _InputsT, _T],
    problem: Problem,
    config: _ConfigT,
    inputs: _InputsT,
    tensors: list[torch.Tensor],
) -> tuple[_T, Recording | None]:
    """Run the kernel's `launch`; return its result, and the recording if it can be replayed."""
    resident: Sequence[torch.Tensor] = getattr(kernel, "resident", ())
    with torch.no_grad(), record_launches() as launches, _Allocations() as allocations:
        result = kernel.launch(problem, config, inputs)
    distinct = len({id(tensor) for tensor in tensors}) == len(tensors)
    aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    direct = all(record.binary is not None for record in launches)
    if allocations.foreign or not (distinct and aligned and direct and launches):
        return result, None
    try:
        made = _recording(config, launches, tensors, allocations.made, resident, result)
        return result, made
    except _UnplacedError:
        return result, None


class _UnplacedError(Exception):
    """Raised for a tensor that comes neither from an argument nor from a recorded allocation."""


def _recording(
    config: object,
    launches: list[LaunchRecord],
    tensors: list[torch.Tensor],
    made: list[torch.Tensor],
    resident: Sequence[torch.Tensor],
    result: object,
) -> Recording:
    outputs: list[torch.Tensor] = []
    build = _builder(result, functools.partial(_output_index, outputs, tensors))
    memories = [_memory(tensor) for tensor in outputs]
    if not set(memories) <= set(map(_memory, made)):
        raise _UnplacedError
    places: dict[int, tuple[int, int]] = {}
    scratch = 0
    for buffer in made:
        if _memory(buffer) not in memories:
            places[_memory(buffer)] = len(tensors), scratch
            scratch += -(-buffer.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    if scratch > _MAX_SCRATCH:
        raise _UnplacedError
    first = len(tensors) + bool(scratch)
    places |= {memory: (first + number, 0) for number, memory in enumerate(memories)}
    find = _finder(tensors, made, resident, places)
    prepared = PreparedLaunches(launches, find, first + len(outputs))
    buffers = tuple((tuple(each.shape), each.stride(), each.dtype) for each in outputs)
    return Recording(config, prepared, tensors[0].device.type, scratch, buffers, build)


def _output_index(
    outputs: list[torch.Tensor], tensors: list[torch.Tensor], tensor: torch.Tensor
) -> int:
    """Index of a result's tensor in the list that `Recording.build` takes.

    An output has to be a whole allocation; new ones are appended to `outputs`. An argument that is
    returned (`accumulate_into`) has a negative index.
    """
    for place, argument in enumerate(tensors):
        if tensor is argument:
            return place - len(tensors)
    for place, output in enumerate(outputs):
        if tensor is output:
            return place
    if tensor.storage_offset() or _memory(tensor) in map(_memory, outputs):
        raise _UnplacedError
    outputs.append(tensor)
    return len(outputs) - 1


def _memory(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage: equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _addresses(tensor: torch.Tensor) -> range:
    """Addresses from the first to the last byte of a tensor."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    length = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return range(tensor.data_ptr(), tensor.data_ptr() + length)


def _finder(
    tensors: list[torch.Tensor],
    made: list[torch.Tensor],
    resident: Sequence[torch.Tensor],
    places: dict[int, tuple[int, int]],
) -> Callable[[torch.Tensor], tuple[int, int] | None]:
    """Return a function from a tensor to its (place, offset in bytes), or None if it is resident.

    Args:
        tensors: the arguments. They are found by identity; views of them by storage, and by address
            if several arguments share it.
        made: the allocations.
        resident: tensors that stay where they are.
        places: place of each allocation, by storage.
    """
    stay = set(map(_memory, resident))
    by_identity = {id(tensor): (index, 0) for index, tensor in enumerate(tensors)}
    wholes: dict[int, list[tuple[torch.Tensor, tuple[int, int]]]] = {}
    for index, tensor in enumerate(tensors):
        wholes.setdefault(_memory(tensor), []).append((tensor, (index, 0)))
    wholes |= {_memory(buffer): [(buffer, places[_memory(buffer)])] for buffer in made}

    def find(tensor: torch.Tensor) -> tuple[int, int] | None:
        place = by_identity.get(id(tensor))
        if place is not None:
            return place
        found = wholes.get(_memory(tensor), [])
        if not found and _memory(tensor) in stay:
            return None
        if len(found) > 1:
            found = [whole for whole in found if tensor.data_ptr() in _addresses(whole[0])]
        if len(found) != 1:
            raise _UnplacedError
        ((base, (index, offset)),) = found
        return index, offset + tensor.data_ptr() - base.data_ptr()

    return find


def _builder(
    result: object, output: Callable[[torch.Tensor], int]
) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that makes the call's result from the list of outputs and arguments.

    `output` gives the index of a tensor in that list.
    """
    if isinstance(result, torch.Tensor):
        return operator.itemgetter(output(result))
    if isinstance(result, tuple) and len(result) > 1:
        if all(isinstance(part, torch.Tensor) for part in result):
            return operator.itemgetter(*map(output, result))
        builders = [_builder(part, output) for part in result]
        return lambda tensors: tuple([build(tensors) for build in builders])
    build = assembler(result, output)
    if build is None:
        raise _UnplacedError
    return build
