"""Global memory as the model sees it: the request queue, TCP, L2 and a share of HBM."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .chip import Chip
from .classes import Unit
from .costs import Cost
from .execution import Execution

WORKGROUP = 1 << 60
"""Lines between those of two workgroups: they share none."""


class Request(NamedTuple):
    """What one load asks for.

    Args:
        lines: numbers of 128-byte lines. halves: of 64 bytes, in them.
        streamed: whether they come from HBM.
    """

    lines: Sequence[int]
    halves: int
    streamed: bool


def requests(
    execution: Execution, costs: Sequence[Cost], chip: Chip
) -> Sequence[Mapping[int, Request]]:
    """Step → request, for each wave. A load without a record asks for lines of its own."""
    return [
        {
            step: _request(execution, number, step, costs[index].size, chip)
            for step, index in enumerate(wave.instructions)
            if costs[index].unit is Unit.LOAD
        }
        for number, wave in enumerate(execution.waves)
    ]


def _request(execution: Execution, wave: int, step: int, size: int, chip: Chip) -> Request:
    known = execution.waves[wave].half_lines.get(step)
    if known is None:
        count = -(-size // chip.line_bytes)
        first = -((wave << 40) + (step + 1) * chip.cache_bytes)
        return Request(range(first, first + count), 2 * count, False)
    if not len(known):
        return Request((), 0, False)
    return Request(np.unique(known // 2).tolist(), len(known), execution.is_streamed(int(known[0])))


class LoadPath:
    """Times of loads and stores of one compute unit.

    A load waits in the queue until TCP takes it. TCP processes a half line in a cycle, and the
    lines that it lacks occupy it until they arrive. A second load of a line that is in TCP, or on
    its way, waits for that line alone.

    Args:
        chip: figures of the hardware.
        stream_latency: cycles of a load from HBM. stream_rate: bytes a cycle from there.
        lends: whether other compute units take what this one leaves of its rate, and give it back.

    Attributes:
        tcp_busy, l2_busy, stream_busy: cycles so far. loaded, streamed: bytes from L2 and HBM.
    """

    def __init__(
        self, chip: Chip, stream_latency: float, stream_rate: float, lends: bool = False
    ) -> None:
        self.chip = chip
        self._stream_latency, self._stream_rate = stream_latency, stream_rate
        self._lends = lends
        self._queue = deque[float](maxlen=chip.load_queue)
        self._tcp = self._l2 = self._stream = 0.0
        self._in_flight: deque[tuple[float, int]] = deque()
        self._held = 0
        self._lines: OrderedDict[int, float] = OrderedDict()
        self._fetched: set[int] = set()
        self.tcp_busy = self.l2_busy = self.stream_busy = 0.0
        self.loaded = self.streamed = 0

    def earliest(self) -> float:
        """When the queue has room."""
        return self._queue[0] if len(self._queue) == self.chip.load_queue else 0.0

    def load(self, start: float, size: int, request: Request, workgroup: int) -> float:
        """Take the places of a load in all queues; returns when its data is there.

        Args:
            size: bytes of all lanes. request: the lines. workgroup: whose they are.
        """
        lines = [line + workgroup * WORKGROUP for line in request.lines]
        missing = [line for line in lines if line not in self._lines]
        begin = self._room(max(start, self._tcp), len(missing) * self.chip.line_bytes)
        cycles = max(self.chip.issue_cycles, size / self.chip.load_bytes_per_cycle, request.halves)
        self._tcp = done = begin + cycles
        self._queue.append(done)
        self.tcp_busy += cycles
        arrival = (
            self._fetch(done, missing, request.streamed)
            if missing
            else done + self.chip.tcp_latency
        )
        for line in lines:
            self._lines.setdefault(line, arrival)
            self._lines.move_to_end(line)
            arrival = max(arrival, self._lines[line])
        while len(self._lines) > self.chip.cache_bytes // self.chip.line_bytes:
            self._lines.popitem(last=False)
        return arrival

    def store(self, start: float, size: int) -> float:
        """The same of a store."""
        cycles = max(self.chip.issue_cycles, size / self.chip.load_bytes_per_cycle)
        self._tcp = max(start, self._tcp) + cycles
        self._queue.append(self._tcp)
        self.tcp_busy += cycles
        return self._tcp + self.chip.l2_latency

    def _room(self, begin: float, size: int) -> float:
        """When TCP has room for lines."""
        while self._in_flight:
            done, held = self._in_flight[0]
            if done > begin and self._held + size <= self.chip.cache_bytes:
                break
            begin = max(begin, done) if self._held + size > self.chip.cache_bytes else begin
            self._held -= held
            self._in_flight.popleft()
        return begin

    def _fetch(self, begin: float, missing: Sequence[int], streamed: bool) -> float:
        """Ask L2 and HBM for lines; returns when the last one arrives."""
        size = len(missing) * self.chip.line_bytes
        new = [line for line in missing if line not in self._fetched] if streamed else []
        self._fetched.update(new)
        cycles = size / self.chip.l2_bytes_per_cycle
        self._l2 = max(self._l2, begin) + cycles
        self.l2_busy += cycles
        self.loaded += size
        arrival = self._l2 + self.chip.l2_latency
        if new:
            share = len(new) * self.chip.line_bytes
            cycles = share / self._stream_rate
            self._stream = (self._stream if self._lends else max(self._stream, begin)) + cycles
            self.stream_busy += cycles
            self.streamed += share
            arrival = max(arrival, max(self._stream, begin) + self._stream_latency)
        if self._in_flight:
            arrival = max(arrival, self._in_flight[-1][0])
        self._in_flight.append((arrival, size))
        self._held += size
        return arrival
