"""Whether kernels in CUDA C++ can be compiled here (`core/cuda_kernel.py` does); without Triton."""

from __future__ import annotations

import functools
import importlib.util

COMPILER = "cuda-core"
"""The package that holds the compiler's interface."""
_OLDEST = 1
"""Its oldest major version that pyproject.toml admits."""


@functools.cache
def missing_compiler() -> str | None:
    """What is not installed of what compiles these kernels, as a phrase; None if all is there."""
    from importlib.metadata import version  # takes time that `import mxpert` need not take

    for module, package in (("cuda.core", COMPILER), ("cuda.bindings", "cuda-bindings")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # not even the package `cuda`
            found = None
        if found is None:
            return f"needs {package} (pip install {package})"
    if int(version(COMPILER).split(".")[0]) < _OLDEST:
        return f"needs {COMPILER} {_OLDEST}.0 or newer (pip install -U {COMPILER})"
    return None
