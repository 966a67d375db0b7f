"""Which devices the Triton kernels run on, and why they refuse the others."""

from __future__ import annotations

from triton import knobs

from ..core.problem import Target

_INTERPRETED = knobs.runtime.interpret
"""Whether ``@triton.jit`` makes interpreted kernels; Triton reads it when it imports a kernel."""


def refuse_cpu(target: Target) -> str | None:
    """Why a kernel cannot run if `target` is a CPU, as a phrase; None if it can."""
    if target.kind == "cpu" and not _INTERPRETED:
        return "runs on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    return None


def refuse_without(target: Target, feature: str, least: int = 80) -> str | None:
    """Why a kernel cannot run on `target`, as a phrase; None if it can.

    Args:
        feature: what the kernel needs of an AMD GPU. gfx950 is the first to have scaled MFMA and
            the OCP fp8 types.
        least: the oldest compute capability of an NVIDIA GPU. From 80 on they have what portable
            kernels need: bf16 tensor cores and asynchronous copies.
    """
    if target.kind == "hip" and target.arch != "gfx950":
        return f"needs {feature} (gfx950), got {target.arch}"
    if target.kind == "cuda" and target.compute_capability < least:
        return f"needs sm_{least} or later, got {target.arch}"
    return refuse_cpu(target)


def has_wgmma(target: Target) -> bool:
    """Whether four warps multiply operands in shared memory (Hopper)."""
    return target.kind == "cuda" and 90 <= target.compute_capability < 100


def has_tcgen05(target: Target) -> bool:
    """Whether the target has block-scaled MMA of tensor memory (Blackwell for data centres)."""
    return target.kind == "cuda" and 100 <= target.compute_capability < 120


def has_mma_sync_only(target: Target) -> bool:
    """Whether warps multiply operands in registers: sm_80 to sm_89, and sm_120 and later."""
    return target.kind == "cuda" and not has_wgmma(target) and not has_tcgen05(target)


def decodes_fp8(target: Target) -> bool:
    """Whether warps decode FP8 operands to bf16 in registers; sm_120 multiplies FP8 itself."""
    return has_mma_sync_only(target) and target.compute_capability < 120
