"""Every kernel of a backend, imported."""

from __future__ import annotations

from mxpert.core.backend import BACKENDS
from mxpert.core.kernel import AnyKernel
from mxpert.core.problem import Op


def kernels_of(backend: str) -> dict[Op, AnyKernel]:
    manifest = BACKENDS[backend]
    return {op: manifest.load(op) for op in manifest.kernels}
