"""LDS as the model sees it: queues and buses of two pairs of SIMDs, banks, the write port."""

from __future__ import annotations

from collections import deque

from .chip import Chip

LANES = 64


class LdsPath:
    """Times of LDS accesses.

    SIMDs 0 and 2 share a bus and a queue, and so do 1 and 3. Copies straight from global memory
    take the write port ahead of ``ds_write``.

    Attributes:
        banks_busy, buses_busy: cycles so far, of the buses together.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        pairs = range(chip.simds // 2)
        self._issue = [0.0 for _ in pairs]
        self._queues = [deque[float](maxlen=chip.lds_queue) for _ in pairs]
        self._returns = [0.0 for _ in pairs]
        self._banks = 0.0
        self._copies: deque[tuple[float, float]] = deque()
        self.banks_busy = self.buses_busy = 0.0

    def earliest(self, simd: int) -> float:
        """When the pair of a SIMD can issue: one access in four cycles, if its queue has room."""
        pair = simd % len(self._queues)
        queue = self._queues[pair]
        room = queue[0] if len(queue) == self.chip.lds_queue else 0.0
        return max(self._issue[pair], room)

    def access(self, simd: int, start: float, size: int, conflicts: float, write: bool) -> float:
        """Take the places of an access in all queues; returns when it is done.

        Args:
            size: bytes of all lanes. conflicts: cycles of the banks, if more than without any.
        """
        pair = simd % len(self._queues)
        sent = LANES * 4 + (size if write else 0)
        send = sent / self.chip.lds_bus_bytes_per_cycle
        self._issue[pair] = start + max(self.chip.issue_cycles, send)
        cycles = max(size / self.chip.lds_bytes_per_cycle, conflicts)
        begin = max(self._banks, start + max(self.chip.issue_cycles, send))
        if write:
            begin = self._behind_copies(begin, cycles)
        self._banks = begin + cycles
        self.banks_busy += cycles
        left = self._banks
        self.buses_busy += send if write else size / self.chip.lds_bus_bytes_per_cycle
        if not write:
            bus = size / self.chip.lds_bus_bytes_per_cycle
            self._returns[pair] = max(self._returns[pair], begin) + bus
            left = max(left, self._returns[pair])
        self._queues[pair].append(left)
        return max(left, start + self.chip.lds_latency)

    def copy(self, arrival: float, size: int) -> None:
        """Data of a direct copy arrives and takes the write port."""
        begin = max(arrival, self._copies[-1][1]) if self._copies else arrival
        self._copies.append((begin, begin + size / self.chip.load_bytes_per_cycle))

    def _behind_copies(self, begin: float, cycles: float) -> float:
        """When the write port has a gap for a write."""
        while self._copies and self._copies[0][1] <= begin:
            self._copies.popleft()
        for taken, free in self._copies:
            if begin + cycles <= taken:
                break
            begin = max(begin, free)
        return begin
