"""CTAs and tiles of the exchange's kernels, by the number of slots a rank.

All ranks of a call have the same number of slots and of CTAs, and therefore the same schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from ...core.problem import Target
from ...device.exchange_wait import MAX_CTAS

_MANY = 3
"""Tiles of one row and 1024 columns for each CTA; if there are more, tiles have several rows."""
_ROWS = (4, 8, 16)
_TILE_COST = 6
"""Fixed cost of a tile, in rows: its loads wait for those of the tile before."""


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


@dataclass(frozen=True)
class Work:
    """Work that a kernel divides into tiles.

    Args:
        bound: slots of a rank. hidden_size: columns of a slot.
        most_ctas: CTAs, at most; a power of two.
    """

    bound: int
    hidden_size: int
    most_ctas: int

    @property
    def is_small(self) -> bool:
        """Whether a tile has one row."""
        return self.tiles(1, 1024) <= _MANY * self.most_ctas

    def tiles(self, rows: int, block: int) -> int:
        """Number of tiles."""
        count: int = triton.cdiv(self.bound, rows) * triton.cdiv(self.hidden_size, block)
        return count

    def schedule(self, rows: int, block: int, num_warps: int) -> Schedule:
        """A CTA for each tile, as far as there are so many."""
        block = min(block, triton.next_power_of_2(self.hidden_size))
        ctas = min(self.most_ctas, triton.next_power_of_2(self.tiles(rows, block)))
        return Schedule(ctas, rows, block, num_warps)

    def with_rows(self, block: int) -> Schedule:
        """Tiles of several rows, so that each thread has several loads in flight.

        Their number of rows gives the CTA with the most tiles the least work.
        """

        def cost(rows: int) -> int:
            tiles: int = triton.cdiv(self.tiles(rows, block), self.most_ctas)
            return tiles * (rows + _TILE_COST)

        rows = min(_ROWS, key=cost)
        return self.schedule(rows, block, min(2 * rows, 16))


def most_ctas(target: Target) -> int:
    """The most CTAs of a kernel on `target`: a power of two, so few that some SMs stay free.

    A CTA of 16 warps may take all registers of an SM while it waits for another rank. Kernels that
    the other rank waits for, of a second object on another stream, need SMs meanwhile.
    """
    most: int = MAX_CTAS.value
    if target.kind == "cpu":
        return most
    fewer = max(1, min(target.num_sms - 1, most))
    return 1 << (fewer.bit_length() - 1)


@functools.lru_cache
def dispatch_schedule(work: Work) -> Schedule:
    """Schedule of dispatch; timed on H200s.

    A row of few slots has tiles of 2048 codes, one 16-byte store of each of 128 threads, or larger
    ones where a CTA would have several.
    """
    if not work.is_small:
        return work.with_rows(1024)
    return work.schedule(1, 2048 if work.tiles(1, 2048) <= work.most_ctas else 4096, 4)


@functools.lru_cache
def combine_schedule(work: Work, itemsize: int) -> Schedule:
    """Schedule of combine for values of `itemsize` bytes; timed on H200s.

    A row of few slots has tiles of 2048 bytes, one 16-byte store of each of 128 threads. A CTA may
    have several, because their loads do not wait for each other.
    """
    block = 2048 // itemsize
    return work.schedule(1, block, 4) if work.is_small else work.with_rows(block)
