"""Functions that have different names in the supported releases of Triton (3.6 to 3.9).

They have their newest names here.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Look for the new names first: Triton 3.9 keeps the old ones as functions that raise.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Start a TMA copy to shared memory: (descriptor, coordinates, barrier, destination)."""

async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Start a TMA copy from shared memory: (descriptor, coordinates, source)."""

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""View shared memory as another type, shape and layout: (memory, type, shape, layout)."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Synchronise the threads of this warp partition."""
