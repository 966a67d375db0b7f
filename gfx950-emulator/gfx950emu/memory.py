"""Global memory and LDS of an emulated launch."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .state import Lanes

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_ALIGNMENT = 256
"""Bytes; the allocator of PyTorch aligns more coarsely still."""

WAVE, GROUP, DEVICE, SYSTEM = range(4)
"""Scopes of an access, the bits sc1 and sc0 as a number (CDNA4 ISA, chapter 9). From DEVICE on a
load passes by the caches of its compute unit; SYSTEM reaches other devices."""


class Use(NamedTuple):
    """How an instruction uses global memory.

    Args:
        read: whether it puts content into registers or LDS. write: whether it changes memory.
        atomic: whether it is an atomic operation. scope: WAVE, GROUP, DEVICE or SYSTEM.
    """

    read: bool = True
    write: bool = False
    atomic: bool = False
    scope: int = WAVE


@dataclass(frozen=True)
class Region:
    """An allocation. `start` and `end` are offsets in bytes into `GlobalMemory.bytes`.

    Args:
        source: its content. shared: whether other processes use it at the same time.
    """

    name: str
    start: int
    end: int
    source: Bytes
    shared: bool = False


class GlobalMemory:
    """Allocations at virtual addresses of their own, with unmapped gaps between them.

    Buffers are copied in by `load` and out by `store`. Memory that kernels find by pointers in
    memory stands at its real address instead, and memory that is shared with other processes is
    copied access by access, with `fetch` and `publish`.

    Attributes:
        bytes: uint8, all allocations and the gaps.
    """

    BASE = 0x7_0000_0000
    _GAP = 1 << 16

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.shared: list[Region] = []
        self._placed: list[tuple[int, Region]] = []
        self._starts: list[int] = []
        self._size = self._GAP
        self.bytes: Bytes = np.zeros(0, np.uint8)

    def add(
        self,
        name: str,
        source: Bytes,
        *,
        alignment: int = 0,
        address: int | None = None,
        shared: bool = False,
    ) -> int:
        """Map the bytes of `source`; return their address.

        Args:
            alignment: of a virtual address: as well aligned as this one.
            address: where kernels see the bytes; None for a virtual address.
            shared: whether other processes use them at the same time.
        """
        start = self._size + (alignment if address is None else address) % _ALIGNMENT
        region = Region(name, start, start + source.nbytes, source, shared)
        self.regions.append(region)
        self._starts.append(start)
        self._size = -(-(start + source.nbytes) // _ALIGNMENT) * _ALIGNMENT + self._GAP
        if address is not None:
            self._placed.append((address, region))
        if shared:
            self.shared.append(region)
        return self.BASE + start if address is None else address

    def is_placed(self, address: int) -> bool:
        """Whether memory at this address of the process stands at its real address."""
        return any(0 <= address - first < each.end - each.start for first, each in self._placed)

    def load(self) -> None:
        """Copy all buffers in."""
        # NumPy asks for huge pages; in these, memory that is never touched takes no space.
        self.bytes = np.frombuffer(mmap.mmap(-1, self._size), np.uint8)
        for region in self.regions:
            if not region.shared:
                self.bytes[region.start : region.end] = region.source

    def store(self) -> None:
        """Copy what has changed back to the buffers."""
        for region in self.regions:
            if region.source.flags.writeable and not region.shared:
                region.source[:] = self.bytes[region.start : region.end]

    def offsets_of(self, addresses: Offsets) -> Offsets:
        """Offsets of addresses; those close to a real allocation lie in the gaps around it."""
        offsets: Offsets = addresses - self.BASE
        for margin in (self._GAP // 2, 0):  # what lies in one is not taken for close to another
            for first, region in self._placed:
                inner = addresses - first
                size = region.end - region.start
                near = (inner >= -margin) & (inner < size + margin)
                offsets = np.where(near, region.start + inner, offsets)
        return offsets

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

    # -- memory that other processes use -----------------------------------------------------------

    def in_shared(self, offsets: Offsets, lanes: Lanes) -> Iterator[tuple[Region, Lanes]]:
        """Shared allocations that an access touches, each with the lanes that touch it."""
        for region in self.shared:
            inside = lanes & (offsets >= region.start) & (offsets < region.end)
            if inside.any():
                yield region, inside

    def fetch(self, offsets: Offsets, size: int, lanes: Lanes) -> None:
        """Copy in what the lanes are going to access in shared memory."""
        for region, inside in self.in_shared(offsets, lanes):
            places = offsets[inside]
            _copy(region.source, places - region.start, self.bytes, places, size)

    def publish(self, offsets: Offsets, size: int, lanes: Lanes) -> None:
        """Copy out what the lanes have stored in shared memory."""
        for region, inside in self.in_shared(offsets, lanes):
            places = offsets[inside]
            _copy(self.bytes, places, region.source, places - region.start, size)


def _copy(source: Bytes, origins: Offsets, target: Bytes, places: Offsets, size: int) -> None:
    """Copy `size` bytes from each origin to each place, aligned words of 8 bytes in one move."""
    unit = min(size & -size, 8)
    while (source.size | target.size) % unit or ((origins | places) & (unit - 1)).any():
        unit >>= 1
    kind, steps = np.dtype(f"u{unit}"), np.arange(size // unit)
    words = source.view(kind)[origins[:, None] // unit + steps]
    target.view(kind)[places[:, None] // unit + steps] = words


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
