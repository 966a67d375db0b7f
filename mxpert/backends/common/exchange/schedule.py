"""CTAs and tiles of the exchange's kernels, by the number of slots a rank.

All ranks of a call have the same number of slots, and therefore the same schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from .words import MAX_CTAS

_FEW_BLOCK = 2048
"""Columns of a tile of one row: 16 codes, one 16-byte store, of each of 128 threads."""
_MANY_BLOCK = 1024
_MANY_ROWS = 8
_MANY = 1024
"""Slots from which on a tile has several rows, so that each thread has several loads in flight."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of one kernel.

    Args:
        ctas: number of programs, a power of two of at most MAX_CTAS.
        rows, block: slots and columns of a tile, powers of two.
        num_warps: warps per program.
        rounds: of combine: the stores of a round overlap the sums of the round before.
    """

    ctas: int
    rows: int
    block: int
    num_warps: int
    rounds: int = 1


@functools.lru_cache
def dispatch_schedule(bound: int, hidden_size: int) -> Schedule:
    """Schedule of dispatch for `bound` slots a rank.

    Dispatch never waits for another rank and may fill the GPU.
    """
    return _schedule(bound, hidden_size, MAX_CTAS.value, 1)


@functools.lru_cache
def combine_schedule(bound: int, hidden_size: int) -> Schedule:
    """Schedule of combine for `bound` slots a rank.

    Combine waits. It leaves half of an H200's SMs to what other ranks on the same GPU, and other
    exchanges, wait for.
    """
    return _schedule(bound, hidden_size, MAX_CTAS.value // 2, 4)


def _schedule(bound: int, hidden_size: int, most: int, rounds: int) -> Schedule:
    if bound >= _MANY:
        return Schedule(most, _MANY_ROWS, _MANY_BLOCK, 8, rounds)
    block = min(_FEW_BLOCK, triton.next_power_of_2(hidden_size))
    items = bound * triton.cdiv(hidden_size, block)
    return Schedule(min(most, triton.next_power_of_2(items)), 1, block, 4)
