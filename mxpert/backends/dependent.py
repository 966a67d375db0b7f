"""Programmatic dependent launch: a kernel is set up while the one before it still runs (sm_90).

A kernel that is launched with `FOLLOWS` calls `follow_previous` before it touches global memory.

Why that is enough. The call first lets the next kernel be scheduled, which happens once every block
of this one has called it: all of them are resident then, so that waiting blocks of the next kernel
can keep nobody from running. It then waits until the kernel before has completed and its writes are
visible. Whoever follows therefore waits for this kernel, which has waited for the one before, and
so on: everything earlier in the stream is complete. Before the call a kernel may only prepare what
is its own (barriers in shared memory): what earlier kernels wrote is not there yet, and they may
still read buffers that it is going to write. Blocks that have nothing to do call it, too, else the
chain would break. After a kernel that never calls it (or launched without the option) the call
waits as an ordinary launch does.
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
"""Launch options of a kernel for Hopper that calls `follow_previous`."""


@triton.jit
def follow_previous() -> None:
    """Let the next kernel start, wait for the previous one."""
    gdc_launch_dependents()
    gdc_wait()


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
