"""Global memory and LDS of an emulated launch."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .state import Lanes

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_ALIGNMENT = 256
"""Bytes; the allocator of PyTorch aligns more coarsely still."""


@dataclass(frozen=True)
class Region:
    """An allocation. `start` and `end` are offsets in bytes into `GlobalMemory.bytes`."""

    name: str
    start: int
    end: int
    source: Bytes


class GlobalMemory:
    """Allocations at virtual addresses of their own, with unmapped gaps between them.

    Buffers are copied in by `load` and out by `store`.

    Attributes:
        bytes: uint8, all allocations and the gaps.
    """

    BASE = 0x7_0000_0000
    _GAP = 1 << 16

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._starts: list[int] = []
        self._size = self._GAP
        self.bytes: Bytes = np.zeros(0, np.uint8)

    def add(self, name: str, source: Bytes, *, alignment: int = 0) -> int:
        """Map the bytes of `source`; return their address, as well aligned as `alignment`."""
        start = self._size + alignment % _ALIGNMENT
        self.regions.append(Region(name, start, start + source.nbytes, source))
        self._starts.append(start)
        self._size = -(-(start + source.nbytes) // _ALIGNMENT) * _ALIGNMENT + self._GAP
        return self.BASE + start

    def load(self) -> None:
        """Copy all buffers in."""
        self.bytes = np.zeros(self._size, np.uint8)
        for region in self.regions:
            self.bytes[region.start : region.end] = region.source

    def store(self) -> None:
        """Copy what has changed back to the buffers."""
        for region in self.regions:
            if region.source.flags.writeable:
                region.source[:] = self.bytes[region.start : region.end]

    def region_of(self, low: int, high: int) -> Region | None:
        """The allocation that holds all bytes from offset `low` up to `high`."""
        place = bisect.bisect_right(self._starts, low) - 1
        if place >= 0 and high <= self.regions[place].end:
            return self.regions[place]
        return None

    def outside(self, offsets: Offsets, size: int) -> Lanes:
        """Which accesses of `size` bytes do not lie in one allocation."""
        places = np.searchsorted(np.array(self._starts), offsets, "right") - 1
        ends = np.array([region.end for region in self.regions])
        result: Lanes = (places < 0) | (offsets + size > ends[places])
        return result

    def describe(self, offset: int) -> str:
        """Where an offset lies relative to the nearest allocation."""
        place = max(bisect.bisect_right(self._starts, offset) - 1, 0)
        if place + 1 < len(self.regions):
            after = self.regions[place + 1]
            if after.start - offset < abs(offset - self.regions[place].end):
                return f"{after.start - offset} bytes ahead of {after.name}"
        region = self.regions[place]
        if offset < region.start:
            return f"{region.start - offset} bytes ahead of {region.name}"
        return f"byte {offset - region.start} of the {region.end - region.start} of {region.name}"


class Lds:
    """LDS of a batch of workgroups, filled with garbage.

    Attributes:
        size: bytes of each workgroup. bytes: uint8, the workgroups one after another.
    """

    def __init__(self, workgroups: int, size: int, garbage: np.random.Generator) -> None:
        self.size = max(-(-size // 16) * 16, 16)
        self.limit = size
        content = garbage.integers(0, 256, self.size, np.uint8)
        self.bytes: Bytes = np.tile(content, workgroups)
