"""Binaries of Triton's kernels, and the C functions that launch them.

Triton has had two C launchers. That of 3.6 is compiled for each kernel's signature and takes all
arguments in one list. That of 3.7 to 3.9 is the same for all kernels: it takes a description of the
signature and the kernel's arguments as a tuple. A `Binary` hides the difference.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.tools.tensor_descriptor import TensorDescriptor

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # a build of Triton for other devices
    nvidia = None

NUM_LEADING = 13
"""Arguments of both C launchers ahead of the kernel's own: three sizes of the grid, the stream, and
nine that are fixed for a binary."""
MAX_DESCRIPTORS = 4096


class Convention(enum.Enum):
    """Format of a C launcher's arguments, as its source has it.

    Both begin with grid, stream, function, cooperative and dependent launch. FLAT has two scratch
    buffers, the metadata, the launch metadata and two hooks next, then the kernel's arguments.
    NESTED has the metadata, the launch metadata, two hooks and two scratch buffers next, then
    annotations, a signature, and the kernel's arguments as one tuple.
    """

    FLAT = "iiiKKppOOOOOO"
    NESTED = "iiiKKpp(iii)OOOOOOy*O"


def _convention() -> Convention | None:
    """The convention of this Triton's C launcher; None if it is neither of the known ones."""
    if nvidia is None:
        return None
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) == Convention.FLAT.value:
        return Convention.FLAT
    source = Path(nvidia.__file__).with_name("driver.c")
    if source.is_file() and f'"{Convention.NESTED.value}"' in source.read_text(encoding="utf-8"):
        return Convention.NESTED
    return None


CONVENTION = _convention()
_EXTRA = len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2 if CONVENTION else 0
_BASE = ((),) * _EXTRA
"""What `make_tensordesc_arg` takes after the descriptor and its metadata: from Triton 3.8 on the
leading arguments, which it does not read."""


class DescriptorEncoder:
    """Encodes the TMA descriptors of tensors with one shape and strides; holds no tensor.

    Args:
        position: index of the descriptor's first argument of the C launcher.
        like: the descriptor of one such tensor.
        metadata: what the binary expects of the descriptor.
    """

    def __init__(self, position: int, like: TensorDescriptor, metadata: object) -> None:
        self._described = dict(
            shape=like.shape,
            strides=like.strides,
            padding=like.padding,
            round_f32_to_tf32=getattr(like, "round_f32_to_tf32", False),  # new in Triton 3.7
        )
        self._metadata = metadata
        self.position = position
        self.arguments = slice(position, position + 1 + 2 * len(like.shape))
        self.encoded: dict[int, list[Any]] = {}

    def fill(self, arguments: list[Any]) -> None:
        """Replace the address in `arguments` by the encoded descriptor, sizes and strides."""
        address = arguments[self.position]
        arguments[self.arguments] = self.encoded.get(address) or self.encode(address)

    def encode(self, address: int) -> list[Any]:
        """Encode, cache and return the arguments for a tensor at `address`."""
        if len(self.encoded) >= MAX_DESCRIPTORS:
            self.encoded.clear()
        moved = SimpleNamespace(base=SimpleNamespace(data_ptr=lambda: address), **self._described)
        encoded: list[Any] = nvidia.make_tensordesc_arg(moved, self._metadata, *_BASE)
        self.encoded[address] = encoded
        return encoded


@dataclass(frozen=True)
class Binary:
    """A compiled kernel with everything that the C launcher needs.

    Args:
        launcher: Triton's C function, or a function of the same arguments in one flat list.
        fixed: its arguments between the stream and the kernel's own arguments.
        descriptors: what the binary expects of each TMA descriptor, by parameter.
        encoders: encoders by parameter, shape and strides.
    """

    launcher: Callable[..., None]
    fixed: tuple[Any, ...]
    descriptors: dict[str, Any]
    encoders: dict[tuple[Any, ...], DescriptorEncoder] = field(default_factory=dict)


def binary_of(compiled: CompiledKernel, tiles: list[str]) -> Binary | None:
    """Make the Binary of a compiled kernel; None if its launches have to go through Triton.

    Args:
        compiled: Triton's compiled kernel.
        tiles: its parameters that are TMA descriptors, in order.
    """
    if CONVENTION is None or not isinstance(compiled.run, nvidia.CudaLauncher):
        return None
    run, launcher = compiled.run, compiled.run.launch
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    described: list[Any] = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if len(described) != len(tiles) or None in described:
        return None
    if tiles:  # take the inner launcher: the outer one encodes descriptors at each launch
        launcher = inspect.getclosurevars(launcher).nonlocals.get("launcher")
        if launcher is None:
            return None
    leading = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    scratch, metadata, hooks = (None, None), (compiled.packed_metadata, None), (None, None)
    if CONVENTION is Convention.FLAT:
        fixed = (*leading, *scratch, *metadata, *hooks)
    else:
        fixed = (*leading, *metadata, *hooks, *scratch)
        launcher = _flat(launcher, run.arg_annotations, run.kernel_signature)
    return Binary(launcher, fixed, dict(zip(tiles, described, strict=True)))


def _flat(
    launcher: Callable[..., None], annotations: list[Any], signature: object
) -> Callable[..., None]:
    """The NESTED launcher of a kernel as a function of one flat list of arguments."""

    def launch(*arguments: object) -> None:
        leading = arguments[:NUM_LEADING]
        launcher(*leading, annotations, signature, arguments[NUM_LEADING:])

    return launch
