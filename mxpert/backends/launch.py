"""Kernel launches with the host work done once: what Triton derives anew at each launch is kept.

``kernel[grid](...)`` binds and specialises every argument, builds a cache key of strings and calls
hooks: 30 µs and more with thirty arguments. A `Launch` holds all arguments but the tensors. A call
looks at what tensors can change about the binary (dtype, absence, 16-byte alignment, device), finds
the binary that Triton made for the same, and hands the pointers to Triton's own C launcher.

The key is never coarser than Triton's. The first call of each key goes through Triton, and so does
every call in the interpreter, under launch hooks, on other targets and with another C launcher.
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
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import message

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # a build of Triton for other devices
    nvidia = None

_CALLING_CONVENTION = "iiiKKppOOOOOO"
"""Leading arguments of the C launcher that `Launch` calls: grid, stream, function, cooperative,
dependent launch, two scratch buffers, metadata, launch metadata, two hooks."""

_DIRECT = getattr(nvidia, "_BASE_ARGS_FORMAT", None) == _CALLING_CONVENTION
_MAX_MAPS = 4096

LAUNCH_OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
"""Compile options of every kernel, where its launch says nothing else: a product and a sum become
one instruction. Triton's own default changes in 3.10."""

CACHED_LAUNCHES = 4096
"""Bound of the caches that hold `Launch` objects: one for each problem, config and stride."""


@dataclass(frozen=True)
class Tile:
    """How a kernel reads a contiguous tensor through a TMA descriptor.

    Args:
        block: rows and columns of a copy; with a 1 ahead, of one matrix of many. layout: how Gluon
            lays it out in shared memory; None for a Triton kernel. width: columns that the tensor
            is viewed with; None takes its last dimension.
    """

    block: tuple[int, ...]
    layout: Any = None
    width: int | None = None

    @property
    def num_arguments(self) -> int:
        """What the C launcher takes for a descriptor: the map, sizes and strides."""
        return 1 + 2 * len(self.block)

    def descriptor(self, tensor: torch.Tensor) -> Any:
        """The descriptor of `tensor` in rows of `width`, all its rows or a matrix for each of its
        leading dimensions; reads past the end of rows or columns give zeros."""
        width, block = self.width or tensor.shape[-1], list(self.block)
        if len(block) == 2:
            rows = tensor.view(-1, width)
        else:
            rows = tensor.view(-1, math.prod(tensor.shape[-2:]) // width, width)
        if self.layout is None:
            return TensorDescriptor.from_tensor(rows, block)
        return gluon.TensorDescriptor.from_tensor(rows, block, self.layout)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel as the C launcher takes it.

    `fixed` stands between the stream and the kernel's own arguments; `maps` keeps encoded
    descriptors.
    """

    launcher: Callable[..., None]
    fixed: tuple[Any, ...]
    tile_metadata: dict[str, Any]
    maps: dict[tuple[Any, ...], dict[int, list[Any]]]

    def maps_of(self, name: str, tensor: torch.Tensor) -> dict[int, list[Any]]:
        """Descriptors of tensors of this shape, by address, as the C launcher takes them."""
        key = name, tensor.shape, tensor.stride()
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            found = self.maps[key] = {}
        return found


class Launch:
    """A kernel with its grid and every argument that is no tensor.

    Make one with a cached function of all that it depends on; call it with the tensors.

    Args:
        kernel: a Triton or Gluon kernel. grid: one to three sizes.
        tiles: parameters that are TMA descriptors of their tensors.
        constants: scalars, constexprs and launch options (num_warps, maxnreg, …) by keyword.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...],
                 tiles: Mapping[str, Tile] = MappingProxyType({}), /, **constants: Any) -> None:
        constants = {**LAUNCH_OPTIONS, **constants}
        self.kernel, self.grid, self.tiles, self.constants = kernel, grid, tiles, constants
        self._binaries: dict[tuple[Any, ...], Binary] | None = None
        if _DIRECT and isinstance(kernel, JITFunction):
            self._grid3 = (*grid, 1, 1)[:3]
            self._template, self._positions = _template(kernel, tiles, constants)
            self._binaries = _BINARIES.setdefault(_signature(kernel, tiles, constants), {})

    def arguments(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """Everything by keyword, as ``kernel[grid]`` takes it."""
        made = {name: tile.descriptor(tensors[name])  # type: ignore[arg-type]
                for name, tile in self.tiles.items()}
        return {**tensors, **made, **self.constants}

    def __call__(self, **tensors: torch.Tensor | None) -> None:
        """Enqueue the kernel on the current stream of the tensors' device."""
        if self._binaries is None or has_hooks() or self.kernel.pre_run_hooks:
            with torch.cuda.device_of(_first(tensors)):  # Triton launches on the current device
                self.kernel[self.grid](**self.arguments(tensors))
            _note(self, tensors, None)
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
            _note(self, tensors, self._learn(key, tensors))
            return
        _note(self, tensors, binary)
        for name, tile in self.tiles.items():
            first = self._positions[name]
            arguments[first:first + tile.num_arguments] = self._map(
                binary, name, tensors[name], arguments[first])  # type: ignore[arg-type]
        binary.launcher(*self._grid3, active.get_current_stream(device), *binary.fixed, *arguments)

    def _bind(self, tensors: Mapping[str, torch.Tensor | None],
              device: int) -> tuple[tuple[Any, ...], list[Any]]:
        """The key of the binary for these tensors, and arguments with pointers."""
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
        key = (device, knobs.runtime.debug, knobs.compilation.instrumentation_mode,
               bits % 16 and _misaligned(tensors), *tensors, *dtypes)
        return key, arguments

    def _learn(self, key: tuple[Any, ...],
               tensors: Mapping[str, torch.Tensor | None]) -> Binary | None:
        """Launch through Triton and keep the binary that it found or compiled."""
        compiled = self.kernel[self.grid](**self.arguments(tensors))
        binary = _binary(compiled, self.kernel, self.tiles)
        if binary is not None and self._binaries is not None:
            self._binaries[key] = binary
        return binary

    def _map(self, binary: Binary, name: str, tensor: torch.Tensor, pointer: int) -> list[Any]:
        """Encoded descriptor, sizes and strides: a function of pointer, shape and strides."""
        found = binary.maps_of(name, tensor).get(pointer)
        if found is None:
            found = _PlacedTile.of(self, binary, name, tensor).encode(pointer)
        return found


class NotedLaunch(NamedTuple):
    """A launch that has happened; `binary` is None if it went through Triton and has to."""

    launch: Launch
    tensors: dict[str, torch.Tensor | None]
    binary: Binary | None


_notes: contextvars.ContextVar[list[NotedLaunch] | None] = contextvars.ContextVar(
    "mxpert_noted_launches", default=None)


@contextlib.contextmanager
def noted_launches() -> Iterator[list[NotedLaunch]]:
    """The launches inside the block, in order (this thread or task)."""
    notes: list[NotedLaunch] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _note(launch: Launch, tensors: dict[str, torch.Tensor | None], binary: Binary | None) -> None:
    notes = _notes.get()
    if notes is not None:
        notes.append(NotedLaunch(launch, tensors, binary))


class PreparedLaunch:
    """A launch whose binary is known, for pointers that come from numbered places.

    Args:
        noted: the launch, with its binary.
        places: index of the place and offset in bytes of each tensor.
    """

    def __init__(self, noted: NotedLaunch, places: Mapping[str, tuple[int, int]]) -> None:
        launch, binary = noted.launch, noted.binary
        assert binary is not None  # checked by whoever prepares
        self.kernel = launch.kernel
        self._grid, self._template = launch._grid3, launch._template
        self._launcher, self._fixed = binary.launcher, binary.fixed
        self._pointers = tuple((launch._positions[name], *place)
                               for name, place in places.items())
        self._tiles = tuple(
            _PlacedTile.of(launch, binary, name, noted.tensors[name])  # type: ignore[arg-type]
            for name in launch.tiles)

    def __call__(self, stream: int, places: list[int]) -> None:
        """Enqueue the kernel; `places` are addresses."""
        arguments = self._template.copy()
        for position, place, offset in self._pointers:
            arguments[position] = places[place] + offset
        for tile in self._tiles:
            first = tile.position
            address = arguments[first]
            arguments[first:first + tile.num_arguments] = (tile.maps.get(address)
                                                           or tile.encode(address))
        self._launcher(*self._grid, stream, *self._fixed, *arguments)


class _Address(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


class _Moved(NamedTuple):
    """A descriptor of a tensor that lies at some address."""

    base: _Address
    shape: Any
    strides: Any
    padding: str


class _PlacedTile(NamedTuple):
    """TMA descriptors of tensors of one shape; `described` holds no tensor."""

    position: int
    num_arguments: int
    described: tuple[Any, Any, str]
    metadata: Any
    maps: dict[int, list[Any]]

    @staticmethod
    def of(launch: Launch, binary: Binary, name: str, tensor: torch.Tensor) -> _PlacedTile:
        """For tensors like `tensor`, as a parameter of `launch`."""
        tile = launch.tiles[name]
        made = tile.descriptor(tensor)
        return _PlacedTile(launch._positions[name], tile.num_arguments,
                           (made.shape, made.strides, made.padding), binary.tile_metadata[name],
                           binary.maps_of(name, tensor))

    def encode(self, address: int) -> list[Any]:
        """The C launcher's arguments for the tensor at `address`."""
        if len(self.maps) >= _MAX_MAPS:
            self.maps.clear()
        found: list[Any] = nvidia.make_tensordesc_arg(
            _Moved(_Address(address), *self.described), self.metadata)
        self.maps[address] = found
        return found


_BINARIES: dict[tuple[Any, ...], dict[tuple[Any, ...], Binary]] = {}
"""Binaries by signature: launches that differ in sizes alone share them."""


def _first(tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    for tensor in tensors.values():
        if tensor is not None:
            return tensor
    raise ValueError(message("Launch", "tensors", "a tensor", "none"))


def is_direct() -> bool:
    """Whether launches can go past Triton: not in its interpreter, not with another C launcher."""
    return _DIRECT and not knobs.runtime.interpret


def has_hooks() -> bool:
    """Whether a profiler or a test wants to see launches: Triton's own path calls its hooks."""
    try:
        runtime = knobs.runtime
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # a hook in place of Triton's chain of hooks
        return True


def _misaligned(tensors: Mapping[str, torch.Tensor | None]) -> tuple[str, ...]:
    """Names of the tensors that do not begin at a multiple of 16 bytes."""
    return tuple(name for name, tensor in tensors.items()
                 if tensor is not None and tensor.data_ptr() % 16)


def _template(kernel: Any, tiles: Mapping[str, Tile],
              constants: Mapping[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """Arguments in the C launcher's order, None for tensors, and where each parameter stands."""
    template: list[Any] = []
    positions = {}
    for name, parameter in kernel.signature.parameters.items():
        positions[name] = len(template)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        count = tiles[name].num_arguments if name in tiles else 1
        template += [constants.get(name, default)] * count
    return template, positions


def _signature(kernel: Any, tiles: Mapping[str, Tile],
               constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """What Triton's choice of a binary can depend on, apart from tensors.

    Of an unspecialised integer that is its width; of another also whether it is 1 or a multiple of
    16; of a float its type; of constexprs and launch options the value.
    """
    parameters = {parameter.name: parameter for parameter in kernel.params}
    parts: list[Any] = [kernel, tuple(tiles.items())]
    for name, value in constants.items():
        parameter = parameters.get(name)
        known: Any = value
        if parameter is not None and not parameter.is_constexpr:
            if type(value) is int:
                width = -(1 << 31) <= value < 1 << 31, -(1 << 63) <= value < 1 << 63
                special = not parameter.do_not_specialize and (value == 1, value % 16 == 0)
                known = (width, special)
            elif type(value) is float:
                known = None
        parts.append((name, type(value), known))
    return tuple(parts)


def _binary(compiled: Any, kernel: Any, tiles: Mapping[str, Tile]) -> Binary | None:
    """The parts of a compiled kernel for the C launcher; None if it has to go through Triton."""
    if not isinstance(compiled.run, nvidia.CudaLauncher):
        return None
    run, launcher = compiled.run, compiled.run.launch
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    described: list[Any] = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    names = [name for name in kernel.arg_names if name in tiles]
    if len(described) != len(names) or None in described:
        return None
    if names:  # below the wrapper that encodes descriptors anew at each launch
        launcher = inspect.getclosurevars(launcher).nonlocals.get("launcher")
        if launcher is None:
            return None
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
             compiled.packed_metadata, None, None, None)
    return Binary(launcher, fixed, dict(zip(names, described, strict=True)), {})
