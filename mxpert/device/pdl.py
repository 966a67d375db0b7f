"""Programmatic dependent launch (sm_90): a kernel starts while the previous one still runs.

A kernel launched with the options `PDL_LAUNCH` calls `grid_dependency_wait` before it accesses
global memory, and `launch_dependents` to let the next kernel start. The next kernel starts once
every CTA has called `launch_dependents` or has ended. All CTAs are resident by then, so waiting
CTAs of the next kernel cannot block them.

Correctness. grid_dependency_wait ends when the previous kernel has completed and its writes are
visible. Every kernel waits, so by induction all earlier kernels in the stream have completed, too.
Before the wait a kernel may only set up its own state, such as mbarriers in shared memory: the
previous kernel may still write this kernel's inputs, or read buffers that this kernel writes. CTAs
without work wait, too; otherwise the induction fails. After a kernel that never calls
launch_dependents, or was launched without the option, the wait ends at once.

Reads before the wait. A kernel may read what no kernel writes, such as addresses of other ranks'
memories. GEMMs, and the kernels that encode rows for them, wait first and then call
launch_dependents. The next kernel therefore starts after their wait, and all kernels before them
have completed. It may read their results before its own wait: weights, biases and the routing
plan, which is made at least two kernels before a GEMM or a combine. These loads bypass L1
(`BEFORE_WAIT`), which may hold stale lines.

Inside a layer, the kernel that encodes rows for stage 2 calls launch_dependents first. At that time
the GEMM of stage 1 has finished its own wait, so the routing plan is complete. The GEMM of stage 2
can start on SMs that stage 1 has left. It loads its first weights while the last tiles of stage 1
are computed and their rows are encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..core.problem import Target

PDL_LAUNCH: Mapping[str, Any] = MappingProxyType({"launch_pdl": True})
"""Launch options that enable programmatic dependent launch."""

BEFORE_WAIT = tl.constexpr(".cg")
"""Cache modifier of loads before grid_dependency_wait: bypass L1."""


@triton.jit
def grid_dependency_wait() -> None:
    """grid_dependency_wait: wait until the previous kernel has completed."""
    gdc_wait()


@triton.jit
def launch_dependents() -> None:
    """launch_dependents: let the next kernel start."""
    gdc_launch_dependents()


@triton.jit
def launch_dependents_and_wait(USE_PDL: tl.constexpr = True) -> None:
    """Let the next kernel start, then wait for the previous one.

    USE_PDL is False on targets without programmatic dependent launch; this then does nothing.
    """
    if USE_PDL:
        launch_dependents()
        grid_dependency_wait()


@triton.jit
def wait_and_launch_dependents() -> None:
    """Wait for the previous kernel, then let the next one start.

    Before its own wait the next kernel may read results of kernels before the previous one.
    """
    grid_dependency_wait()
    launch_dependents()


def pdl_options(target: Target) -> dict[str, Any]:
    """USE_PDL and launch options of a portable kernel: on from sm_90 on, off elsewhere."""
    if target.kind == "cuda" and target.compute_capability >= 90:
        return {"USE_PDL": True, **PDL_LAUNCH}
    return {"USE_PDL": False}
