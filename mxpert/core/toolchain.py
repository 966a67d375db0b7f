"""Facts about the compiler behind the Triton kernels: versions, the assembler, the cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass

FIXED_PTXAS = (13, 3)
"""First CUDA release whose ptxas does not reuse the registers of a wgmma A operand too early."""
_COPYING_TRITON = (3, 9)
"""First release of Triton for which `copies_register_operands` is true."""


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


@dataclass(frozen=True)
class Toolchain:
    """Versions and paths of the installed compiler.

    Args:
        triton: version of Triton. ptxas_path, ptxas: path and release of the assembler, or None.
        cache_directory: Triton's cache of compiled kernels.
    """

    triton: str
    ptxas_path: str | None
    ptxas: str | None
    cache_directory: str

    @property
    def register_operand_hazard(self) -> bool:
        """Whether this ptxas may reuse registers of a wgmma A operand before they have been read.

        With such a ptxas, kernels with A in registers are tested for races.
        """
        if self.ptxas is None:
            return False
        return _release(self.ptxas) < FIXED_PTXAS


@functools.cache
def copies_register_operands() -> bool:
    """Whether Triton copies a wgmma A operand in registers before each product that reads it.

    Two products that read the same operand then need twice its registers. False without Triton.
    """
    try:
        from triton import __version__
    except ImportError:
        return False
    return _release(__version__) >= _COPYING_TRITON


def toolchain() -> Toolchain:
    """Read versions and paths from Triton.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton
    from triton import knobs

    try:
        from triton.backends.nvidia.compiler import get_ptxas

        tool = get_ptxas(90)  # one of the two that Triton bundles: which one changed in 3.9
    except (ImportError, RuntimeError):  # a Triton built without the NVIDIA backend has no ptxas
        tool = None
    return Toolchain(
        triton.__version__,
        tool.path if tool else None,
        tool.version if tool else None,
        str(knobs.cache.dir),
    )
