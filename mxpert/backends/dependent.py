"""Programmatic dependent launch: a kernel is set up while the one before it still runs (sm_90).

A kernel that is launched with `FOLLOWS` waits for the previous one (`wait_for_previous`) before it
touches global memory, and lets the next one be scheduled (`release_next`), which happens once every
block has released it or has ended: all blocks are resident then, so that waiting blocks of the next
kernel can keep nobody from running. `follow_previous` does both at once, and releases first.

Why that is enough. The wait ends when the kernel before has completed and its writes are visible.
Every kernel waits, so whoever follows waits for this one, which has waited for the one before, and
so on: everything earlier in the stream is complete. Before the wait a kernel may prepare what is
its own (barriers in shared memory): what the kernel before wrote is not there yet, and it may still
read buffers that are going to be written. Blocks that have nothing to do wait, too, else the chain
would break. After a kernel that releases nobody (or was launched without the option) the wait ends
at once, as an ordinary launch does.

What may be read before the wait. GEMMs and the kernels that encode their rows wait first, then
release. A kernel after one of those starts when that one's wait has ended, so it may read at once
what the kernel before that one wrote, or an earlier one: weights, biases and the routing plan,
which is made at least two kernels before a GEMM or a combine. It reads them past L1 (`EARLY`), in
which older lines may lie.

Inside a layer the kernel that encodes rows of stage 2 releases first. It has started by then, so
the GEMM of stage 1 before it has waited for the rows of stage 1, which are younger than the plan.
The GEMM of stage 2 thus starts on SMs that stage 1 has left, and its first weights are on their way
while the last tiles of stage 1 are computed and their rows encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..problem import Target

FOLLOWS: Mapping[str, Any] = MappingProxyType({"launch_pdl": True})
"""Launch options of a kernel for Hopper that waits for the previous one."""

EARLY = tl.constexpr(".cg")
"""Cache modifier of loads before the wait."""


@triton.jit
def wait_for_previous() -> None:
    """Wait until the previous kernel has completed."""
    gdc_wait()


@triton.jit
def release_next() -> None:
    """Let the next kernel start."""
    gdc_launch_dependents()


@triton.jit
def follow_previous() -> None:
    """Let the next kernel start, wait for the previous one."""
    release_next()
    wait_for_previous()


@triton.jit
def wait_then_release() -> None:
    """Wait for the previous kernel, let the next one start: it may read what came before both."""
    wait_for_previous()
    release_next()


@triton.jit
def maybe_follow_previous(FOLLOW: tl.constexpr) -> None:
    """`follow_previous` in a kernel that other targets run as well."""
    if FOLLOW:
        follow_previous()


def follow_options(target: Target) -> dict[str, Any]:
    """FOLLOW of a portable kernel, with the launch options that go with it."""
    if target.kind == "cuda" and int(target.arch.removeprefix("sm_")) >= 90:
        return {"FOLLOW": True, **FOLLOWS}
    return {"FOLLOW": False}
