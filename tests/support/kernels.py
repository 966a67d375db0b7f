"""Every kernel of a backend, imported."""

from __future__ import annotations

from mxpert.backend import BACKENDS
from mxpert.kernel_spec import AnyKernel
from mxpert.problem import Op


def kernels_of(backend: str) -> dict[Op, AnyKernel]:
    manifest = BACKENDS[backend]
    return {op: manifest.load(op) for op in manifest.kernels}
