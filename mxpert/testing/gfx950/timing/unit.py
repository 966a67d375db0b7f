"""One compute unit replaying executed waves: in-order issue on the ports of four SIMDs, LDS, TCP.

Each wave issues in order. The wave that can issue first does; among equals the one of higher
priority, then the one that waits longest. Every instruction takes a place in the queues of its
unit, so that later ones wait: nothing is stepped cycle by cycle.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .chip import Chip
from .classes import Unit
from .costs import Cost
from .trace import WaveTrace

Start = tuple[float, str]
"""When an instruction can issue, and what it waits for."""

NEVER = float("inf")
WORKGROUP_OFFSET = 37.0
"""Cycles between the starts of the workgroups of one compute unit, so that they do not run in
lockstep."""


@dataclass
class Wave:
    """The state of one wave.

    Attributes:
        time: when its next instruction can issue as far as its order decides.
        ready: register → when its value can be used. by_matrix: registers whose value an MFMA
            makes, → when the next MFMA can add to it.
        loads, reads: when each outstanding load and LDS access is done.
        issued: cycle of each of its steps.
    """

    order: int
    workgroup: int
    trace: WaveTrace
    simd: int
    time: float
    step: int = 0
    priority: int = 0
    scalar_done: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    by_matrix: dict[int, float] = field(default_factory=dict)
    loads: deque[float] = field(default_factory=deque)
    reads: deque[float] = field(default_factory=deque)
    issued: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """Totals up to a time.

    Args:
        busy: unit → cycles. waits: what waves waited for → cycles of all of them.
        loaded: bytes asked of L2.
    """

    time: float
    loaded: int
    busy: dict[str, float]
    waits: dict[str, float]


class ComputeUnit:
    """Replays waves and keeps the time of each issue.

    Args:
        chip: figures of the hardware. costs: of the program's instructions.
        waves: of one workgroup. workgroups: copies of it on this compute unit.
        memory_bytes_per_cycle: that this compute unit gets from L2 or HBM.

    Attributes:
        waves: all waves, those of workgroup 0 first. busy: cycles that each unit was busy.
    """

    def __init__(
        self,
        chip: Chip,
        costs: Sequence[Cost],
        waves: Sequence[WaveTrace],
        workgroups: int,
        memory_bytes_per_cycle: float,
    ) -> None:
        self.chip, self.costs = chip, costs
        self.memory_bytes_per_cycle = memory_bytes_per_cycle
        self.waves = [
            Wave(
                order,
                order // len(waves),
                waves[order % len(waves)],
                order % chip.simds,
                order // len(waves) * WORKGROUP_OFFSET,
            )
            for order in range(workgroups * len(waves))
        ]
        self.valu = [0.0] * chip.simds
        self.matrix = [0.0] * chip.simds
        self.salu = [0.0] * chip.simds
        self.lds = 0.0
        self.buses = [0.0] * (chip.simds // 2)
        self.queues = [deque[float](maxlen=chip.lds_queue) for _ in self.buses]
        self.load_port = 0.0
        self.memory = 0.0
        self.in_flight: deque[tuple[float, int]] = deque()
        self.in_flight_bytes = 0
        self.cache: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.at_barrier: dict[int, list[Wave]] = {}
        units = ("mfma", "valu", "lds", "lds bus", "load", "memory")
        self.busy = dict.fromkeys(units, 0.0)
        self.waits: dict[str, float] = {}
        self.loaded = 0

    def run(self, marks: Sequence[int] = ()) -> Sequence[Snapshot]:
        """Replay everything.

        Args:
            marks: steps of the first wave.

        Returns:
            A snapshot at the issue of each of those steps, and one of the end.
        """
        snapshots: list[Snapshot] = []
        heap = [(wave.time, 0, wave.time, wave.order) for wave in self.waves]
        now = 0.0
        while heap:
            asked, _, _, order = heapq.heappop(heap)
            wave = self.waves[order]
            cost = self.costs[wave.trace.steps[wave.step]]
            start, reason = self._start(wave, cost)
            if start > asked:
                heapq.heappush(heap, (start, -wave.priority, wave.time, order))
                continue
            if start > wave.time:
                self._wait(reason, start - wave.time)
            now = max(now, start)
            wave.issued.append(start)
            if wave.order == 0 and wave.step in marks:
                snapshots.append(self._snapshot(now))
            released = self._issue(wave, cost, start)
            for each in released:
                if each.step < len(each.trace.steps):
                    heapq.heappush(heap, (each.time, -each.priority, each.time, each.order))
        return [*snapshots, self._snapshot(now)]

    def _snapshot(self, now: float) -> Snapshot:
        return Snapshot(now, self.loaded, dict(self.busy), dict(self.waits))

    def _wait(self, reason: str, cycles: float) -> None:
        self.waits[reason] = self.waits.get(reason, 0.0) + cycles

    # -- when ----------------------------------------------------------------------------------

    def _start(self, wave: Wave, cost: Cost) -> Start:
        """The earliest time at which an instruction can issue, and what it waits for last."""
        if cost.unit is Unit.WAIT:
            return self._waited(wave, cost)
        start, reason = wave.time, "issue"
        if wave.ready:
            for register in cost.sources & wave.ready.keys():
                time = wave.ready[register]
                if register in cost.accumulator:
                    time = wave.by_matrix.get(register, time)
                if time > start:
                    start, reason = time, "dependency"
        time, unit = self._port(wave, cost, start)
        return (time, unit) if time > start else (start, reason)

    def _waited(self, wave: Wave, cost: Cost) -> Start:
        start, reason = wave.time, "issue"
        if cost.vector_count is not None and len(wave.loads) > cost.vector_count:
            done = wave.loads[len(wave.loads) - cost.vector_count - 1]
            if done > start:
                start, reason = done, "latency"
        if cost.lds_count is not None:
            if len(wave.reads) > cost.lds_count:
                done = wave.reads[len(wave.reads) - cost.lds_count - 1]
                if done > start:
                    start, reason = done, "lds latency"
            if cost.lds_count == 0 and wave.scalar_done > start:
                start, reason = wave.scalar_done, "scalar latency"
        return start, reason

    def _port(self, wave: Wave, cost: Cost, start: float) -> Start:
        """When the unit of an instruction takes it."""
        simd = wave.simd
        if cost.unit is Unit.MFMA:
            return max(self.matrix[simd], self.valu[simd]), "mfma"
        if cost.unit is Unit.VALU:
            if not cost.beside_mfma:
                return max(self.valu[simd], self.matrix[simd] + self.chip.mfma_to_vector), "valu"
            return self.valu[simd], "valu"
        if cost.unit in (Unit.SALU, Unit.BRANCH):
            return self.salu[simd], "salu"
        if cost.unit is Unit.LDS:
            queue = self.queues[simd // 2]
            return (queue[0] if len(queue) == self.chip.lds_queue else 0.0), "lds"
        if cost.unit in (Unit.LOAD, Unit.STORE):
            return self._load_port(wave, cost, start)
        return 0.0, "issue"

    def _load_port(self, wave: Wave, cost: Cost, start: float) -> Start:
        """When the path to TCP is free and the load's lines find place there."""
        start = max(start, self.load_port)
        if cost.unit is Unit.STORE or not (missing := self._missing(wave, cost)):
            return start, "load"
        room = self.chip.bytes_in_flight - len(missing) * self.chip.line_bytes
        held = self.in_flight_bytes
        reason = "load"
        for done, size in self.in_flight:
            if done > start and held <= room:
                break
            held -= size
            if done > start:
                start, reason = done, "memory"
        return start, reason

    # -- issue ---------------------------------------------------------------------------------

    def _issue(self, wave: Wave, cost: Cost, start: float) -> Sequence[Wave]:
        """Take the places in the queues; returns the waves that can go on."""
        wave.time = start + self.chip.issue_cycles
        if cost.unit is Unit.BARRIER:
            return self._barrier(wave, start)
        action = self.ACTIONS.get(cost.unit)
        if action is not None:
            action(self, wave, cost, start)
        wave.step += 1
        return (wave,)

    def _issue_mfma(self, wave: Wave, cost: Cost, start: float) -> None:
        simd, done = wave.simd, start + cost.cycles
        self.matrix[simd] = done
        self.valu[simd] = start + max(
            self.chip.issue_cycles, cost.cycles * self.chip.mfma_read_phase
        )
        self.busy["mfma"] += cost.cycles
        for register in cost.results:
            wave.ready[register] = done + self.chip.mfma_to_vector
            wave.by_matrix[register] = done

    def _issue_valu(self, wave: Wave, cost: Cost, start: float) -> None:
        self.valu[wave.simd] = start + cost.cycles
        self.busy["valu"] += cost.cycles
        for register in cost.results:
            wave.ready[register] = start + cost.cycles
            wave.by_matrix.pop(register, None)

    def _issue_salu(self, wave: Wave, cost: Cost, start: float) -> None:
        self.salu[wave.simd] = start + cost.cycles
        for register in cost.results:
            wave.ready[register] = start + cost.cycles

    def _issue_branch(self, wave: Wave, cost: Cost, start: float) -> None:
        self.salu[wave.simd] = start + cost.cycles
        steps, step = wave.trace.steps, wave.step
        if step + 1 < len(steps) and steps[step + 1] != steps[step] + 1:
            wave.time = start + self.chip.branch_cycles

    def _issue_lds(self, wave: Wave, cost: Cost, start: float) -> None:
        pair = wave.simd // 2
        conflicts = wave.trace.bank_cycles.get(wave.step, 0)
        banks = max(cost.size / self.chip.lds_bytes_per_cycle, conflicts)
        served = self._serve_lds(start, banks)
        bus = cost.size / self.chip.lds_bus_bytes_per_cycle
        self.buses[pair] = max(self.buses[pair], served - banks) + bus
        self.busy["lds bus"] += bus
        left = max(served, self.buses[pair])
        self.queues[pair].append(left)
        done = max(left, start + self.chip.lds_latency)
        wave.reads.append(done)
        for register in cost.results:
            wave.ready[register] = 0.0
            wave.by_matrix.pop(register, None)

    def _serve_lds(self, start: float, cycles: float) -> float:
        """Occupy the banks; returns when they are done."""
        self.lds = max(self.lds, start + self.chip.issue_cycles) + cycles
        self.busy["lds"] += cycles
        return self.lds

    def _issue_load(self, wave: Wave, cost: Cost, start: float) -> None:
        missing = self._missing(wave, cost)
        size = len(missing) * self.chip.line_bytes
        lines = self._lines(wave, cost)
        cycles = max(self.chip.issue_cycles, cost.size / self.chip.load_bytes_per_cycle, len(lines))
        self.load_port = start + cycles
        self.busy["load"] += cycles
        arrived = start + self.chip.load_latency / 4
        if missing:
            transfer = size / self.memory_bytes_per_cycle
            self.memory = max(self.memory, start) + transfer
            self.busy["memory"] += transfer
            arrived = self.memory + self.chip.load_latency
            self._hold(start, arrived, size)
            self.loaded += size
        for line in lines:
            if line in missing or line not in self.cache:
                self.cache[line] = arrived
            arrived = max(arrived, self.cache[line])
            self.cache.move_to_end(line)
        while len(self.cache) > self.chip.cache_bytes // self.chip.line_bytes:
            self.cache.popitem(last=False)
        if cost.writes_lds:
            self._serve_lds(start, cost.size / self.chip.lds_bytes_per_cycle)
        if wave.loads:
            arrived = max(arrived, wave.loads[-1])
        wave.loads.append(arrived)
        for register in cost.results:
            wave.ready[register] = 0.0
            wave.by_matrix.pop(register, None)

    def _issue_store(self, wave: Wave, cost: Cost, start: float) -> None:
        cycles = max(self.chip.issue_cycles, cost.size / self.chip.load_bytes_per_cycle)
        self.load_port = start + cycles
        self.busy["load"] += cycles
        done = start + self.chip.load_latency
        wave.loads.append(max(done, wave.loads[-1]) if wave.loads else done)

    def _hold(self, start: float, until: float, size: int) -> None:
        while self.in_flight and self.in_flight[0][0] <= start:
            self.in_flight_bytes -= self.in_flight.popleft()[1]
        self.in_flight.append((until, size))
        self.in_flight_bytes += size

    def _issue_scalar_load(self, wave: Wave, cost: Cost, start: float) -> None:
        wave.scalar_done = start + self.chip.scalar_latency

    def _issue_nop(self, wave: Wave, cost: Cost, start: float) -> None:
        wave.time = start + cost.cycles

    def _issue_priority(self, wave: Wave, cost: Cost, start: float) -> None:
        wave.priority = cost.priority

    def _issue_wait(self, wave: Wave, cost: Cost, start: float) -> None:
        wave.time = start
        for queue, count in ((wave.loads, cost.vector_count), (wave.reads, cost.lds_count)):
            while count is not None and len(queue) > count:
                queue.popleft()

    def _barrier(self, wave: Wave, start: float) -> Sequence[Wave]:
        """Stop at a barrier; the last wave of the workgroup frees all of them."""
        wave.step += 1
        wave.time = start
        waiting = self.at_barrier.setdefault(wave.workgroup, [])
        waiting.append(wave)
        alive = [
            each
            for each in self.waves
            if each.workgroup == wave.workgroup
            and (each in waiting or each.step < len(each.trace.steps))
        ]
        if len(waiting) < len(alive):
            return ()
        for each in waiting:
            self._wait("barrier", start - each.time)
            each.time = start + self.chip.issue_cycles
        self.at_barrier[wave.workgroup] = []
        return waiting

    # -- memory --------------------------------------------------------------------------------

    def _lines(self, wave: Wave, cost: Cost) -> Sequence[tuple[int, int]]:
        """Lines that a load asks for; without a record, lines that nothing else touches."""
        known = wave.trace.lines.get(wave.step)
        if known is not None:
            return [(wave.workgroup, line) for line in known]
        number = -(-cost.size // self.chip.line_bytes)
        return [(-1 - wave.order, wave.step * 64 + k) for k in range(number)]

    def _missing(self, wave: Wave, cost: Cost) -> Sequence[tuple[int, int]]:
        """Lines that are neither in TCP nor on their way."""
        return [line for line in self._lines(wave, cost) if line not in self.cache]

    ACTIONS: ClassVar[dict[Unit, Callable[[ComputeUnit, Wave, Cost, float], None]]] = {
        Unit.MFMA: _issue_mfma,
        Unit.VALU: _issue_valu,
        Unit.SALU: _issue_salu,
        Unit.BRANCH: _issue_branch,
        Unit.LDS: _issue_lds,
        Unit.LOAD: _issue_load,
        Unit.STORE: _issue_store,
        Unit.SCALAR_LOAD: _issue_scalar_load,
        Unit.NOP: _issue_nop,
        Unit.PRIORITY: _issue_priority,
        Unit.WAIT: _issue_wait,
    }
