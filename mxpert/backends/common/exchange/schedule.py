"""CTAs and tiles of the exchange's kernels, by the number of slots a rank.

All ranks of a call have the same number of slots, and therefore the same schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from .words import MAX_CTAS

_LARGEST_BLOCK = 4096
"""Columns of a tile of one row, at most."""
_MANY_BLOCK = 1024
_MANY_ROWS = 8
_MANY = 1024
"""Slots from which on a tile has several rows, so that each thread has several loads in flight."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of a kernel.

    Args:
        ctas: number of programs, a power of two of at most MAX_CTAS.
        rows, block: slots and columns of a tile, powers of two.
        num_warps: warps per program.
    """

    ctas: int
    rows: int
    block: int
    num_warps: int


@functools.lru_cache
def dispatch_schedule(bound: int, hidden_size: int) -> Schedule:
    """Schedule of dispatch for `bound` slots a rank; timed on two H200s.

    A tile of 2048 codes is one 16-byte store of each of 128 threads. Tiles grow where a CTA would
    have several, because each further one costs a microsecond.
    """
    return _schedule(bound, hidden_size, 2048, 1)


@functools.lru_cache
def combine_schedule(bound: int, hidden_size: int) -> Schedule:
    """Schedule of combine for `bound` slots a rank; timed on two H200s.

    A tile of 1024 bfloat16 values is one 16-byte store of each of 128 threads. A CTA may have four,
    because the loads of a tile do not wait for each other.
    """
    return _schedule(bound, hidden_size, 1024, 4)


def _schedule(bound: int, hidden_size: int, block: int, tiles: int) -> Schedule:
    """Tiles of `block` columns, or larger ones where a CTA would have more than `tiles`."""
    most = MAX_CTAS.value
    if bound >= _MANY:
        return Schedule(most, _MANY_ROWS, _MANY_BLOCK, 8)
    while bound * triton.cdiv(hidden_size, block) > tiles * most and block < _LARGEST_BLOCK:
        block *= 2
    block = min(block, triton.next_power_of_2(hidden_size))
    items = bound * triton.cdiv(hidden_size, block)
    return Schedule(min(most, triton.next_power_of_2(items)), 1, block, 4)
