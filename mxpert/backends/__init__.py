"""Manifests: what each backend is made for, and where its kernels are.

The order is that of the table of GPUs.
"""

import importlib

from ..core.backend import add_backend

for _name in ("hopper", "triton", "cdna4", "reference"):
    add_backend(importlib.import_module(f"{__name__}.{_name}").BACKEND)
