"""Which devices the Triton kernels run on, and why they refuse the others."""

from __future__ import annotations

from triton import knobs

from ...problem import Target

_INTERPRETED = knobs.runtime.interpret
"""Whether ``@triton.jit`` makes interpreted kernels; Triton reads it when it imports a kernel."""


def refuse_cpu(target: Target) -> str | None:
    """Why a kernel cannot run if `target` is a CPU, as a phrase; None if it can."""
    if target.kind == "cpu" and not _INTERPRETED:
        return "runs on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    return None


def refuse_without(target: Target, feature: str) -> str | None:
    """Why a kernel cannot run on `target`, as a phrase; None if it can.

    feature: what the kernel needs of an AMD GPU. gfx950 is the first to have scaled MFMA and the
    OCP fp8 types; NVIDIA GPUs have what these kernels need from sm_90 on.
    """
    if target.kind == "hip" and target.arch != "gfx950":
        return f"needs {feature} (gfx950), got {target.arch}"
    if target.kind == "cuda" and target.compute_capability < 90:
        return f"needs sm_90 or later, got {target.arch}"
    return refuse_cpu(target)


def is_blackwell(target: Target) -> bool:
    """Whether the target has block-scaled MMA (sm_100 or later)."""
    return target.kind == "cuda" and target.compute_capability >= 100
