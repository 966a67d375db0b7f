"""CTAs and tiles of the exchange's kernels, by the number of slots a rank.

All ranks of a call have the same number of slots, and therefore the same schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from .words import MAX_CTAS

_MOST_CTAS: int = MAX_CTAS.value
_FEW_TILES = 3
"""Tiles of one row and 1024 columns that a CTA takes; beyond that a tile has several rows."""
_ROWS = (4, 8, 16)
_ROUND_COST = 6
"""What a tile costs beside its rows, in rows: its loads wait for those of the tile before."""


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
    """Schedule of dispatch for `bound` slots a rank; timed on H200s.

    A row of few slots has tiles of 2048 codes, one 16-byte store of each of 128 threads, or larger
    ones where a CTA would have several.
    """
    if _has_many(bound, hidden_size):
        return _tiles_of_rows(bound, hidden_size, 1024)
    one_each = _tiles(bound, hidden_size, 1, 2048) <= _MOST_CTAS
    return _schedule(bound, hidden_size, 1, 2048 if one_each else 4096, 4)


@functools.lru_cache
def combine_schedule(bound: int, hidden_size: int, itemsize: int) -> Schedule:
    """Schedule of combine for `bound` slots a rank and values of `itemsize` bytes; timed on H200s.

    A row of few slots has tiles of 2048 bytes, one 16-byte store of each of 128 threads. A CTA may
    have several, because their loads do not wait for each other.
    """
    block = 2048 // itemsize
    if _has_many(bound, hidden_size):
        return _tiles_of_rows(bound, hidden_size, block)
    return _schedule(bound, hidden_size, 1, block, 4)


def _has_many(bound: int, hidden_size: int) -> bool:
    return _tiles(bound, hidden_size, 1, 1024) > _FEW_TILES * _MOST_CTAS


def _tiles_of_rows(bound: int, hidden_size: int, block: int) -> Schedule:
    """Tiles of several rows, so that each thread has several loads in flight.

    The busiest CTA has the fewest rows and tiles.
    """

    def cost(rows: int) -> int:
        tiles: int = triton.cdiv(_tiles(bound, hidden_size, rows, block), _MOST_CTAS)
        return tiles * (rows + _ROUND_COST)

    rows = min(_ROWS, key=cost)
    return _schedule(bound, hidden_size, rows, block, min(2 * rows, 16))


def _schedule(bound: int, hidden_size: int, rows: int, block: int, num_warps: int) -> Schedule:
    block = min(block, triton.next_power_of_2(hidden_size))
    tiles = _tiles(bound, hidden_size, rows, block)
    return Schedule(min(_MOST_CTAS, triton.next_power_of_2(tiles)), rows, block, num_warps)


def _tiles(bound: int, hidden_size: int, rows: int, block: int) -> int:
    tiles: int = triton.cdiv(bound, rows) * triton.cdiv(hidden_size, block)
    return tiles
