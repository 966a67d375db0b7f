"""Register files of the gfx950 kernels."""

from __future__ import annotations

from typing import Any

from triton.backends.amd.compiler import HIPOptions

NO_ACCUMULATOR_REGISTERS: dict[str, Any] = (
    {"llvm_fn_attrs": (("amdgpu-agpr-alloc", "0,0"),)}
    if "llvm_fn_attrs" in HIPOptions.__dataclass_fields__
    else {}
)
"""Launch options that keep MFMA sums in vector registers. Triton 3.6 does so by itself. 3.9 would
split the 256 registers of a lane in halves and move values between them."""
