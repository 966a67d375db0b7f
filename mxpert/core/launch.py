"""Kernel launches with little host work: the results of Triton's launch code are cached.

``kernel[grid](...)`` binds and specialises every argument, builds a cache key of strings and calls
hooks: 30 µs and more with thirty arguments. A `Launch` holds all arguments except the tensors. A
call builds a key from those properties of the tensors that select the binary (dtype, None, 16-byte
alignment, device), looks up the binary, and passes the pointers to Triton's own C launcher.

The key is at least as fine as Triton's. The first call with each key goes through Triton. So does
every call in the interpreter, under launch hooks, on other targets and with another C launcher.
Inside `on_device` with an executor, that one gets every call.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import message
from .binary import CONVENTION, MAX_DESCRIPTORS, NUM_LEADING, Binary, DescriptorEncoder, binary_of
from .compilation import THROUGH_TRITON, compile_whole_call
from .cuda_kernel import CudaKernel
from .geometry import taker
from .kernel_keys import hash_callees_first
from .target import Kernel, current_device

_STREAM, _FIXED, _LEADING = 3, 4, NUM_LEADING
"""Indices of the stream, of the first argument after it, and of the kernel's first argument."""

_DIRECT = CONVENTION is not None

LAUNCH_OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
"""Default compile options of every launch. With FP fusion a multiplication and an addition compile
to one fma. It is set explicitly because Triton's default changes in 3.10."""

CACHED_LAUNCHES = 4096
"""Size of the caches of `Launch` objects; each problem, config and stride has its own object."""


@dataclass(frozen=True)
class DescriptorSpec:
    """Parameters of a TMA descriptor for a contiguous tensor.

    Args:
        block: (rows, columns) of a copy, or (1, rows, columns) for tensors of several matrices.
        width: columns of the 2-D view of the tensor; None takes its last dimension.
    """

    block: tuple[int, ...]
    width: int | None = None

    @property
    def num_arguments(self) -> int:
        """Number of C launcher arguments per descriptor: the map, the sizes and the strides."""
        return 1 + 2 * len(self.block)

    def descriptor(self, tensor: torch.Tensor) -> Any:
        """Make the descriptor of `tensor`, viewed as rows of `width`.

        With a 2-D block it covers all rows, with a 3-D block one matrix per leading index. Reads
        past the last row or column give zeros.
        """
        width, block = self.width or tensor.shape[-1], list(self.block)
        if len(block) == 2:
            rows = tensor.view(-1, width)
        else:
            rows = tensor.view(-1, math.prod(tensor.shape[-2:]) // width, width)
        return self.from_rows(rows, block)

    def from_rows(self, rows: torch.Tensor, block: list[int]) -> Any:
        """The descriptor of this view, for a Triton kernel."""
        return TensorDescriptor.from_tensor(rows, block)


class Launch:
    """A kernel with its grid and all arguments except the tensors.

    Create it in a cached function of everything it depends on. Call it with the tensors by keyword.

    Args:
        kernel: a Triton or Gluon kernel. grid: one to three sizes.
        tiles: parameters that the kernel takes as TMA descriptors.
        constants: scalars, constexprs and launch options (num_warps, maxnreg, …) by keyword.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        tiles: Mapping[str, DescriptorSpec] = MappingProxyType({}),
        /,
        **constants: Any,  # of the kernel's parameters
    ) -> None:
        if isinstance(kernel, JITFunction) and not knobs.runtime.interpret:
            hash_callees_first(kernel)
        constants = {**LAUNCH_OPTIONS, **constants}
        self.kernel, self.grid, self.tiles, self.constants = kernel, grid, tiles, constants
        self._binaries: dict[tuple[Any, ...], Binary] | None = None
        if _DIRECT and isinstance(kernel, (JITFunction, CudaKernel)):
            self._template, self._positions = _template(kernel, grid, tiles, constants)
            self._binaries = _BINARIES.setdefault(_signature(kernel, tiles, constants), {})

    def arguments(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """All arguments by keyword, for ``kernel[grid](...)``."""
        made = {
            name: tile.descriptor(tensors[name])  # type: ignore[arg-type]
            for name, tile in self.tiles.items()
        }
        return {**tensors, **made, **self.constants}

    def __call__(self, **tensors: torch.Tensor | None) -> None:
        """Enqueue the kernel on the current stream of the tensors' device."""
        place = current_device()
        executor = place.executor
        if (
            executor is not None
            or self._binaries is None
            or has_hooks()
            or self.kernel.pre_run_hooks
        ):
            with torch.cuda.device_of(_first(tensors)):  # Triton launches on the current device
                (THROUGH_TRITON if executor is None else executor).execute(
                    self.kernel, self.grid, self.arguments(tensors), warmup=place.compiles_only
                )
            if not place.compiles_only:
                _record(self, tensors, None)
            return
        active = driver.active
        device = active.get_current_device()
        if _first(tensors).get_device() not in (device, -1):
            with torch.cuda.device_of(_first(tensors)):
                self(**tensors)
            return
        key, arguments = self._bind(tensors, device)
        binary = self._binaries.get(key)
        if binary is None:
            _record(self, tensors, self._learn(key, tensors))
            return
        _record(self, tensors, binary)
        arguments[_STREAM:_LEADING] = active.get_current_stream(device), *binary.fixed
        for encoder in self.encoders(binary, tensors):
            encoder.fill(arguments)
        binary.launcher(*arguments)

    def encoders(
        self, binary: Binary, tensors: Mapping[str, torch.Tensor | None]
    ) -> list[DescriptorEncoder]:
        """The encoders of the descriptors of these tensors."""
        encoders = []
        for name, tile in self.tiles.items():
            tensor: Any = tensors[name]  # a tile's is never None
            key = name, tensor.shape, tensor.stride()
            encoder = binary.encoders.get(key)
            if encoder is None:
                encoder = DescriptorEncoder(
                    self._positions[name], tile.descriptor(tensor), binary.descriptors[name]
                )
                if len(binary.encoders) >= MAX_DESCRIPTORS:
                    binary.encoders.clear()
                binary.encoders[key] = encoder
            encoders.append(encoder)
        return encoders

    def _bind(
        self, tensors: Mapping[str, torch.Tensor | None], device: int
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the key of the binary for these tensors, and the arguments with pointers."""
        arguments, positions = self._template.copy(), self._positions
        dtypes: list[torch.dtype | None] = []
        bits = 0
        for name, tensor in tensors.items():
            if tensor is None:
                dtypes.append(None)
            else:
                arguments[positions[name]] = pointer = tensor.data_ptr()
                dtypes.append(tensor.dtype)
                bits |= pointer
        key = (
            device,
            knobs.runtime.debug,
            knobs.compilation.instrumentation_mode,
            bits % 16 and _misaligned(tensors),
            *tensors,
            *dtypes,
        )
        return key, arguments

    def _learn(
        self, key: tuple[Any, ...], tensors: Mapping[str, torch.Tensor | None]
    ) -> Binary | None:
        """Launch through Triton and store the binary that it found or compiled."""
        compile_whole_call()
        compiled = self.kernel[self.grid](**self.arguments(tensors))
        binary = binary_of(compiled, [name for name in self.kernel.arg_names if name in self.tiles])
        if binary is not None and self._binaries is not None:
            self._binaries[key] = binary
        return binary


class LaunchRecord(NamedTuple):
    """A launch that was made. `binary` is None if the launch has to go through Triton."""

    launch: Launch
    tensors: dict[str, torch.Tensor | None]
    binary: Binary | None


_records: contextvars.ContextVar[list[LaunchRecord] | None] = contextvars.ContextVar(
    "mxpert_launch_records", default=None
)


@contextlib.contextmanager
def record_launches() -> Iterator[list[LaunchRecord]]:
    """Record the launches of this thread or task inside the block, in order."""
    records: list[LaunchRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def _record(launch: Launch, tensors: dict[str, torch.Tensor | None], binary: Binary | None) -> None:
    records = _records.get()
    if records is not None:
        records.append(LaunchRecord(launch, tensors, binary))


_Place = tuple[int, int] | None
"""Index of an address and an offset in bytes; None for a tensor that stays where it is."""


class PreparedLaunches:
    """Launches with known binaries, whose tensors are given as a list of addresses.

    An argument that is no constant is one of a pool of values: the addresses, addresses at an
    offset from them, and TMA descriptors. Each launch takes its part of the pool at once, from its
    first to its last such argument; the constants between them lie in the pool, too.

    Args:
        records: the launches, with their binaries.
        find: the place of a tensor.
        num_addresses: length of the list.
    """

    def __init__(
        self,
        records: list[LaunchRecord],
        find: Callable[[torch.Tensor], _Place],
        num_addresses: int,
    ) -> None:
        placed: list[tuple[LaunchRecord, dict[str, _Place]]] = []
        for record in records:
            tensors = record.tensors.items()
            own = {name: find(tensor) for name, tensor in tensors if tensor is not None}
            placed.append((record, own))
        used = dict.fromkeys(place for _, own in placed for place in own.values() if place)
        self._offsets = tuple([place for place in used if place[1]])
        indices: dict[_Place, int] = {(index, 0): index for index in range(num_addresses)}
        indices |= {place: num_addresses + index for index, place in enumerate(self._offsets)}
        self._descriptors: list[tuple[DescriptorEncoder, int]] = []
        filled = [_filled(*each, indices, self._descriptors) for each in placed]
        self._constants: list[Any] = []
        constants: dict[int, int] = {}  # by identity; `filled` keeps them alive
        self._launches = []
        for record, (arguments, varying) in zip(records, filled, strict=True):
            start, stop = min(varying, default=_FIXED), max(varying, default=_FIXED - 1) + 1
            taken = []
            for position in range(start, stop):
                index = varying.get(position)
                if index is None:
                    value = arguments[position]
                    place = constants.setdefault(id(value), len(self._constants))
                    if place == len(self._constants):
                        self._constants.append(value)
                    index = len(indices) + len(self._descriptors) + place
                taken.append(index)
            assert record.binary is not None  # for the type checker; the caller has checked it
            grid, fixed, rest = arguments[:_STREAM], arguments[_FIXED:start], arguments[stop:]
            parts = tuple(grid), tuple(fixed), taker(taken), tuple(rest)
            self._launches.append((record.binary.launcher, *parts))
        self.kernels = tuple(dict.fromkeys(record.launch.kernel for record in records))

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Enqueue the kernels on `stream`."""
        pool: list[Any] = addresses
        for place, offset in self._offsets:
            pool.append(pool[place] + offset)
        for encoder, place in self._descriptors:
            address = pool[place]
            pool.append((encoder.encoded.get(address) or encoder.encode(address))[0])
        pool += self._constants
        own = (stream,)
        for launcher, grid, fixed, take, rest in self._launches:
            launcher(*(grid + own + fixed + take(pool) + rest))


def _filled(
    record: LaunchRecord,
    places: Mapping[str, _Place],
    indices: Mapping[_Place, int],
    descriptors: list[tuple[DescriptorEncoder, int]],
) -> tuple[list[Any], dict[int, int]]:
    """The C launcher's arguments of a launch, and where in the pool those that vary are.

    Args:
        places: of its tensors.
        indices: in the pool, of places.
        descriptors: of all launches, which follow in the pool; those of this one are added.
    """
    launch, binary = record.launch, record.binary
    assert binary is not None  # for the type checker; the caller has checked it
    arguments, varying = launch._template.copy(), {}
    arguments[_FIXED:_LEADING] = binary.fixed
    for name, place in places.items():
        position, tensor = launch._positions[name], record.tensors[name]
        assert tensor is not None  # for the type checker: it has a place
        arguments[position] = tensor.data_ptr()
        if place is not None:
            varying[position] = indices[place]
    for encoder in launch.encoders(binary, record.tensors):
        encoder.fill(arguments)  # sizes and strides do not vary
        address = varying.get(encoder.position)
        if address is not None:
            described = encoder, address
            if described not in descriptors:
                descriptors.append(described)
            varying[encoder.position] = len(indices) + descriptors.index(described)
    return arguments, varying


_BINARIES: dict[tuple[Any, ...], dict[tuple[Any, ...], Binary]] = {}
"""Binaries by `_signature` and key. Launches that differ only in sizes share them."""


def _first(tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    for tensor in tensors.values():
        if tensor is not None:
            return tensor
    raise ValueError(message("Launch", "tensors", "a tensor", "none"))


def is_direct() -> bool:
    """Whether launches can bypass Triton: not in its interpreter, not with another C launcher."""
    return _DIRECT and not knobs.runtime.interpret


def has_hooks() -> bool:
    """Whether launch hooks are set, so that launches go through Triton."""
    try:
        runtime = knobs.runtime
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # a hook in place of Triton's chain of hooks
        return True


def _misaligned(tensors: Mapping[str, torch.Tensor | None]) -> tuple[str, ...]:
    """Names of the tensors whose address is not a multiple of 16 bytes."""
    return tuple(
        name for name, tensor in tensors.items() if tensor is not None and tensor.data_ptr() % 16
    )


def _template(
    kernel: Kernel,
    grid: tuple[int, ...],
    tiles: Mapping[str, DescriptorSpec],
    constants: Mapping[str, Any],
) -> tuple[list[Any], dict[str, int]]:
    """The C launcher's arguments, None where they are not known yet, and parameters' positions."""
    template: list[Any] = [*grid, 1, 1][:_STREAM]
    template += [None] * (_LEADING - _STREAM)
    positions = {}
    for name, parameter in kernel.signature.parameters.items():
        positions[name] = len(template)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        count = tiles[name].num_arguments if name in tiles else 1
        template += [constants.get(name, default)] * count
    return template, positions


def _signature(
    kernel: Kernel, tiles: Mapping[str, DescriptorSpec], constants: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Key of everything except tensors that can change Triton's choice of a binary.

    Integers contribute their width, and if Triton specialises on them, whether they are 1 or a
    multiple of 16. Floats contribute their type. Constexprs and launch options contribute their
    value.
    """
    parameters = {parameter.name: parameter for parameter in kernel.params}
    parts: list[Any] = [kernel, tuple(tiles.items())]
    for name, value in constants.items():
        parameter = parameters.get(name)
        part: object = value
        if parameter is not None and not parameter.is_constexpr:
            if type(value) is int:
                width = -(1 << 31) <= value < 1 << 31, -(1 << 63) <= value < 1 << 63
                special = not parameter.do_not_specialize and (value == 1, value % 16 == 0)
                part = (width, special)
            elif type(value) is float:
                part = None
        parts.append((name, type(value), part))
    return tuple(parts)
