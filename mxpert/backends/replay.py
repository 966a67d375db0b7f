"""Warm calls of a kernel: allocate, fill in the pointers, launch.

A kernel's `launch` is Python that sizes grids, allocates and starts `Launch`es. It sees geometry
alone (no op looks at data on the host), so for the same problem, config and geometry it does the
same again. Its second call for them is noted: which buffers were allocated, what was launched, and
where each pointer came from. From the third call on `Replayed` does only that, with one allocation
for all scratch.

What cannot be noted runs as it is written: other operators of torch among the launches, launches
that go through Triton (in its interpreter, under hooks, on other targets), unaligned arguments.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.driver import driver

from ..geometry import Known, assembler
from ..problem import KernelSpec
from .launch import Launch, NotedLaunch, PreparedLaunch, has_hooks, is_direct, noted_launches

_MAX_SCRATCH = 128 << 20
"""Bytes. Scratch of a replayed call does not share memory as it is freed; a call with more of it
keeps the device busy for longer than the host."""

_ALIGNMENT = 256
_NO_DEVICE = -1
"""What tensors of a CPU say."""

_LAUNCH = Launch.__call__

_aten = torch.ops.aten
_ALLOCATIONS = frozenset((
    _aten.empty.memory_format, _aten.new_empty.default, _aten.empty_strided.default,
    _aten.new_empty_strided.default, _aten.empty_like.default))


class Replayed:
    """A kernel (see KernelSpec) that can also replay its `launch`."""

    def __init__(self, kernel: KernelSpec) -> None:
        self._kernel = kernel
        self.launch = kernel.launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def replay(self, known: Known, config: Any, tensors: list[torch.Tensor],
               arguments: dict[str, Any]) -> Any:
        """What `launch` returns for `known.problem`, `config` and `arguments`; None if it has to be
        called for that.

        Args:
            known: stands for the problem and the geometry of the arguments.
            tensors: all tensors of the arguments, in order.
        """
        if Launch.__call__ is not _LAUNCH or torch.are_deterministic_algorithms_enabled():
            return None  # launches are watched, or torch fills what is allocated
        device, own = driver.active.get_current_device(), tensors[0].get_device()
        if own not in (device, _NO_DEVICE):
            with torch.cuda.device(own):
                return self.replay(known, config, tensors, arguments)
        key = (self, id(config), device, knobs.runtime.debug,
               knobs.compilation.instrumentation_mode)
        call = known.calls.get(key)
        if type(call) is _Call:
            places = call.places(tensors)
            return None if places is None else call.replay(places, tensors, device)
        if call is None:
            known.calls[key] = _Once(config)
        elif call.is_new:
            result, known.calls[key] = _note(self._kernel, known.problem, config, arguments,
                                             tensors)
            return result
        return None


def replayed(*kernels: KernelSpec) -> tuple[Any, ...]:
    """Each of `kernels`, replayed where launches need not go through Triton."""
    return tuple(map(Replayed, kernels)) if is_direct() else kernels


class _Once(NamedTuple):
    """A call that has happened once, or cannot be replayed; holds what the key has the id of."""

    config: Any
    is_new: bool = True


def _empty(place: torch.device, shape: tuple[int, ...], stride: tuple[int, ...],
           dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=place)


_Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _allocators() -> dict[str, _Allocate]:
    """What the code that torch.compile generates allocates with on the current device, in half the
    time of `torch.empty_strided`; nothing where this torch has no such functions."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    names = {"cpu": "_empty_strided_cpu", "cuda": "_empty_strided_cuda"}
    return {kind: getattr(guards, name) for kind, name in names.items() if hasattr(guards, name)}


_ALLOCATE = _allocators()


class _Output(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    """Everything that a warm call does.

    Places of pointers are the arguments' tensors, then the scratch if there is any, then the
    outputs, by index. `build` takes the outputs, followed by the arguments' tensors.
    """

    config: Any
    launches: tuple[PreparedLaunch, ...]
    scratch: int
    outputs: tuple[_Output, ...]
    build: Callable[[list[torch.Tensor]], Any]

    def places(self, tensors: list[torch.Tensor]) -> list[int] | None:
        """Addresses of the arguments; None where these need other binaries or a hook is set."""
        places, bits = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            places.append(address)
            bits |= address
        if bits % 16 or has_hooks():
            return None
        for launch in self.launches:
            if launch.kernel.pre_run_hooks:
                return None
        return places

    def replay(self, places: list[int], tensors: list[torch.Tensor], device: int) -> Any:
        """Allocate, launch, and return what the kernel's `launch` would."""
        place = tensors[0].device
        allocate = _ALLOCATE.get(place.type) or functools.partial(_empty, place)
        made = [allocate(shape, stride, dtype) for shape, stride, dtype in self.outputs]
        if self.scratch:
            scratch = allocate((self.scratch,), (1,), torch.uint8)
            places.append(scratch.data_ptr())
        for tensor in made:
            places.append(tensor.data_ptr())
        stream = driver.active.get_current_stream(device)
        for launch in self.launches:
            launch(stream, places)
        return self.build(made + tensors)


class _Allocations(TorchDispatchMode):
    """Keeps what is allocated, so that no two tensors share an address, and tells of operators that
    are no allocations and no views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.foreign = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
        elif not getattr(func, "is_view", False):
            self.foreign = True
        return result


def _note(kernel: KernelSpec, problem: Any, config: Any, arguments: Mapping[str, Any],
          tensors: list[torch.Tensor]) -> tuple[Any, _Call | _Once]:
    """Run the kernel's `launch`; its result, and the call if it can be replayed."""
    never = _Once(config, is_new=False)
    with torch.no_grad(), noted_launches() as launches, _Allocations() as allocations:
        result = kernel.launch(problem, config, **arguments)
    distinct = len({id(tensor) for tensor in tensors}) == len(tensors)
    aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    direct = all(noted.binary is not None for noted in launches)
    if allocations.foreign or not (distinct and aligned and direct and launches):
        return result, never
    try:
        return result, _call(config, launches, tensors, allocations.made, result)
    except _UnplacedError:
        return result, never


class _UnplacedError(Exception):
    """A tensor that is not known to come from an argument or an allocation of the call."""


def _call(config: Any, launches: list[NotedLaunch], tensors: list[torch.Tensor],
          made: list[torch.Tensor], result: Any) -> _Call:
    returned: list[torch.Tensor] = []

    def output(tensor: torch.Tensor) -> int:
        """Number of the output that `tensor` is, a whole allocation; from the end, of an argument
        (`accumulate_into`)."""
        for place, argument in enumerate(tensors):
            if tensor is argument:
                return place - len(tensors)
        if not any(tensor is other for other in returned):
            if tensor.storage_offset() or _memory(tensor) in map(_memory, returned):
                raise _UnplacedError
            returned.append(tensor)
        return [tensor is other for other in returned].index(True)

    build = _builder(result, output)
    outputs = {_memory(tensor): number for number, tensor in enumerate(returned)}
    if not outputs.keys() <= set(map(_memory, made)):
        raise _UnplacedError
    offsets: dict[int, int] = {}
    scratch = 0
    for buffer in made:
        if _memory(buffer) not in outputs:
            offsets[_memory(buffer)] = scratch
            scratch += -(-buffer.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    if scratch > _MAX_SCRATCH:
        raise _UnplacedError
    first = len(tensors) + bool(scratch)
    places = {memory: (first + number, 0) for memory, number in outputs.items()}
    places |= {memory: (len(tensors), offset) for memory, offset in offsets.items()}
    find = _finder(tensors, made, places)
    prepared = tuple(
        PreparedLaunch(noted, {name: find(tensor) for name, tensor in noted.tensors.items()
                               if tensor is not None})
        for noted in launches)
    return _Call(config, prepared, scratch, tuple(
        _Output(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in returned), build)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors have in common that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _finder(tensors: list[torch.Tensor], made: list[torch.Tensor],
            places: dict[int, tuple[int, int]]) -> Callable[[torch.Tensor], tuple[int, int]]:
    """Where a tensor begins (place, offset in bytes).

    Args:
        tensors: the arguments, known by identity; views of them by memory, where that is not
            shared among arguments. made: allocations, which lie at `places` by memory.
    """
    by_identity = {id(tensor): (index, 0) for index, tensor in enumerate(tensors)}
    wholes: dict[int, tuple[torch.Tensor, tuple[int, int]] | None] = {}
    for index, tensor in enumerate(tensors):
        memory = _memory(tensor)
        wholes[memory] = None if memory in wholes else (tensor, (index, 0))
    wholes |= {_memory(buffer): (buffer, places[_memory(buffer)]) for buffer in made}

    def find(tensor: torch.Tensor) -> tuple[int, int]:
        place = by_identity.get(id(tensor))
        if place is not None:
            return place
        whole = wholes.get(_memory(tensor))
        if whole is None:
            raise _UnplacedError
        base, (index, offset) = whole
        return index, offset + tensor.data_ptr() - base.data_ptr()

    return find


def _builder(result: Any, output: Callable[[torch.Tensor], int],
             ) -> Callable[[list[torch.Tensor]], Any]:
    """What makes the call's result of its outputs; `output` numbers them."""
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
