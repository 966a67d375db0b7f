"""A kernel that waits, to delay a rank on its GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxpert.device.exchange_wait import clock


@triton.jit
def _spin_kernel(nanoseconds):  # type: ignore[no-untyped-def]
    """Spin for as long as the int64 word at `nanoseconds` says. Grid: (1,)."""
    wanted = tl.load(nanoseconds)
    start = clock("cuda")
    while clock("cuda") - start < wanted:
        pass


def spin(nanoseconds: torch.Tensor) -> None:
    """Enqueue a delay; int64 [1] on the GPU, read when the kernel runs."""
    _spin_kernel[(1,)](nanoseconds, num_warps=1, enable_fp_fusion=True)
