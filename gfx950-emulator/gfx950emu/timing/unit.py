"""One compute unit replaying executed waves: in-order issue on the ports of four SIMDs, LDS, loads.

Each wave issues in order. Of several waves the one whose instruction can issue first goes on. Ties
go to other instructions before LDS accesses, then to the higher priority, then to the wave that has
waited longest. An instruction occupies the queues of its unit until it is done; time advances from
issue to issue, not cycle by cycle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..trace import WaveTrace
from .chip import Chip
from .classes import Unit
from .costs import Cost
from .lds import LdsPath
from .loads import LoadPath, Request

Due = tuple[float, str]
"""When an instruction can issue as far as its own wave decides, and what it waits for."""
Entry = tuple[float, bool, int, float, int]
"""Place of a wave in the order of issue: when its next instruction may issue, then ties."""

QUEUES = {Unit.LDS: "lds queue", Unit.LOAD: "load queue", Unit.STORE: "load queue"}
"""What an instruction waits for if it cannot issue."""

WORKGROUP_OFFSET = 37.0
"""Cycles between the starts of the workgroups of one compute unit, so that they do not run in
lockstep."""


@dataclass
class Wave:
    """The state of one wave.

    Attributes:
        order: place among all waves. time: when its next instruction can issue as far as the
            order of its own decides.
        ready: register → when its value can be used. added: registers that an MFMA has written →
            when another MFMA can add to them.
        loads, reads: when each outstanding load and LDS access is done.
        issued: cycle of each of its steps. due: of the next one.
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
    added: dict[int, float] = field(default_factory=dict)
    loads: deque[float] = field(default_factory=deque)
    reads: deque[float] = field(default_factory=deque)
    issued: list[float] = field(default_factory=list)
    due: Due = (0.0, "issue")


@dataclass
class Simd:
    """When a SIMD can issue again.

    Attributes:
        vector: a VALU instruction. matrix: an MFMA. scalar: a scalar instruction.
        reading: any vector, LDS or memory instruction, while an MFMA reads its operands.
    """

    vector: float = 0.0
    matrix: float = 0.0
    scalar: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """Totals up to a time.

    Args:
        busy: unit → cycles. waits: what waves waited for → cycles of all of them.
        loaded, streamed: bytes from L2 and from HBM.
    """

    time: float
    loaded: int
    streamed: int
    busy: Mapping[str, float]
    waits: Mapping[str, float]


class ComputeUnit:
    """Replays waves and keeps the time of each issue.

    Args:
        chip: figures of the hardware. costs: of the program's instructions.
        waves: of one workgroup. workgroups: copies of it on this compute unit.
        requests: of each wave, by step. loads: its way to memory.

    Attributes:
        waves: all waves, those of workgroup 0 first.
    """

    def __init__(
        self,
        chip: Chip,
        costs: Sequence[Cost],
        waves: Sequence[WaveTrace],
        workgroups: int,
        requests: Sequence[Mapping[int, Request]],
        loads: LoadPath,
    ) -> None:
        self.chip, self.costs, self.loads, self.lds = chip, costs, loads, LdsPath(chip)
        self._requests = requests
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
        self.simds = [Simd() for _ in range(chip.simds)]
        self._at_barrier: dict[int, list[Wave]] = {}
        self._mfma = self._valu = 0.0
        self._waits: dict[str, float] = {}

    def run(self, first: int = 0, last: int = 0) -> tuple[Snapshot, Snapshot]:
        """Replay everything.

        Args:
            first, last: steps of the first wave of each workgroup.

        Returns:
            A snapshot when every workgroup has issued `first`, and one when one has issued `last`.
        """
        started = 0
        before = after = None
        heap = [self._entry(wave) for wave in self.waves]
        heapq.heapify(heap)
        now = 0.0
        while heap:
            asked, is_lds, rank, since, order = heap[0]
            wave = self.waves[order]
            cost = self.costs[wave.trace.instructions[wave.step]]
            start, reason = wave.due
            port = self._port(wave.simd, cost)
            start = max(start, port)
            if start > asked:
                heapq.heapreplace(heap, (start, is_lds, rank, since, order))
                continue
            heapq.heappop(heap)
            if start > wave.time:
                if port > wave.due[0]:
                    reason = QUEUES.get(cost.unit, cost.unit.value)
                self._wait(reason, start - wave.time)
            now = max(now, start)
            wave.issued.append(start)
            if order % len(self._requests) == 0:
                started += wave.step == first
                if before is None and started == self.waves[-1].workgroup + 1:
                    before = self._snapshot(now)
                if after is None and wave.step == last:
                    after = self._snapshot(now)
            for each in self._issue(wave, cost, start):
                if each.step < len(each.trace.instructions):
                    heapq.heappush(heap, self._entry(each))
        end = self._snapshot(now)
        return before or end, after or end

    def _entry(self, wave: Wave) -> Entry:
        """The place of a wave's next instruction, when no port keeps it."""
        cost = self.costs[wave.trace.instructions[wave.step]]
        wave.due = self._due(wave, cost)
        return wave.due[0], cost.unit is Unit.LDS, -wave.priority, wave.time, wave.order

    def _snapshot(self, now: float) -> Snapshot:
        simds, buses = self.chip.simds, self.chip.simds // 2
        busy = {
            "mfma": self._mfma / simds,
            "valu": self._valu / simds,
            "lds banks": self.lds.banks_busy,
            "lds bus": self.lds.buses_busy / buses,
            "tcp": self.loads.tcp_busy,
            "l2": self.loads.l2_busy,
            "hbm": self.loads.stream_busy,
        }
        return Snapshot(now, self.loads.loaded, self.loads.streamed, busy, dict(self._waits))

    def _wait(self, reason: str, cycles: float) -> None:
        self._waits[reason] = self._waits.get(reason, 0.0) + cycles

    # -- when --------------------------------------------------------------------------------------

    def _due(self, wave: Wave, cost: Cost) -> Due:
        """When an instruction can issue, and what it waits for last. Other waves change nothing."""
        if cost.unit is Unit.WAIT:
            return self._waited(wave, cost)
        start, reason = wave.time, "issue"
        ready = wave.ready
        for register in cost.registers:
            time = ready.get(register, 0.0)
            if time > start and register in cost.accumulator:
                time = wave.added.get(register, time)
            if time > start:
                start, reason = time, "dependency"
        return start, reason

    def _waited(self, wave: Wave, cost: Cost) -> Due:
        start, reason = wave.time, "issue"
        for queue, count, name in (
            (wave.loads, cost.vector_count, "load latency"),
            (wave.reads, cost.lds_count, "lds latency"),
        ):
            if count is not None and len(queue) > count:
                done = queue[len(queue) - count - 1]
                if done > start:
                    start, reason = done, name
        if cost.lds_count == 0 and wave.scalar_done > start:
            start, reason = wave.scalar_done, "scalar latency"
        return start, reason

    def _port(self, number: int, cost: Cost) -> float:
        """When the unit of an instruction takes it; never earlier than it was before."""
        simd = self.simds[number]
        if cost.unit is Unit.MFMA:
            return max(simd.matrix, simd.vector, simd.reading)
        if cost.unit is Unit.VALU:
            if not cost.beside_mfma:
                return max(simd.vector, simd.matrix + self.chip.mfma_to_vector)
            return max(simd.vector, simd.reading)
        if cost.unit in (Unit.SALU, Unit.BRANCH):
            return simd.scalar
        if cost.unit is Unit.LDS:
            return max(self.lds.earliest(number), simd.reading)
        if cost.unit in (Unit.LOAD, Unit.STORE):
            return max(self.loads.earliest(), simd.reading)
        return 0.0

    # -- issue -------------------------------------------------------------------------------------

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
        simd, chip = self.simds[wave.simd], self.chip
        scales = chip.mfma_scale_cycles if cost.scaled else 0.0
        done = start + scales + cost.cycles
        simd.matrix = start + cost.cycles  # the next scales are read while this one computes
        simd.reading = start + scales + chip.mfma_read_cycles
        self._mfma += cost.cycles
        for register in cost.results:
            wave.ready[register] = done + chip.mfma_to_vector
            wave.added[register] = done - scales

    def _issue_valu(self, wave: Wave, cost: Cost, start: float) -> None:
        self.simds[wave.simd].vector = start + cost.cycles
        self._valu += cost.cycles
        for register in cost.results:
            wave.ready[register] = start + cost.cycles
            wave.added.pop(register, None)

    def _issue_salu(self, wave: Wave, cost: Cost, start: float) -> None:
        self.simds[wave.simd].scalar = start + cost.cycles
        for register in cost.results:
            wave.ready[register] = start + cost.cycles

    def _issue_branch(self, wave: Wave, cost: Cost, start: float) -> None:
        self.simds[wave.simd].scalar = start + cost.cycles
        path, step = wave.trace.instructions, wave.step
        if step + 1 < len(path) and path[step + 1] != path[step] + 1:
            wave.time = start + self.chip.branch_cycles

    def _issue_lds(self, wave: Wave, cost: Cost, start: float) -> None:
        conflicts = wave.trace.bank_cycles.get(wave.step, 0)
        done = self.lds.access(wave.simd, start, cost.size, conflicts, cost.write)
        wave.reads.append(done)
        self._loaded(wave, cost)

    def _issue_load(self, wave: Wave, cost: Cost, start: float) -> None:
        request = self._requests[wave.order % len(self._requests)][wave.step]
        done = self.loads.load(start, cost.size, request, wave.workgroup)
        if cost.write:
            self.lds.copy(done, cost.size)
        wave.loads.append(max(done, wave.loads[-1]) if wave.loads else done)
        self._loaded(wave, cost)

    @staticmethod
    def _loaded(wave: Wave, cost: Cost) -> None:
        """Registers of a load are ready when the program has waited for it."""
        for register in cost.results:
            wave.ready.pop(register, None)
            wave.added.pop(register, None)

    def _issue_store(self, wave: Wave, cost: Cost, start: float) -> None:
        done = self.loads.store(start, cost.size)
        wave.loads.append(max(done, wave.loads[-1]) if wave.loads else done)

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

    def _issue_end(self, wave: Wave, cost: Cost, start: float) -> None:
        """The next workgroup in this place waits for nothing that this one has asked for."""
        wave.priority, wave.scalar_done = 0, 0.0
        for each in (wave.ready, wave.added, wave.loads, wave.reads):
            each.clear()

    def _barrier(self, wave: Wave, start: float) -> Sequence[Wave]:
        """Stop at a barrier; the last wave of the workgroup frees all of them."""
        wave.step += 1
        wave.time = start
        waiting = self._at_barrier.setdefault(wave.workgroup, [])
        waiting.append(wave)
        alive = sum(
            each.workgroup == wave.workgroup
            and (each.step < len(each.trace.instructions) or each in waiting)
            for each in self.waves
        )
        if len(waiting) < alive:
            return ()
        for each in waiting:
            self._wait("barrier", start - each.time)
            each.time = start + self.chip.issue_cycles
        self._at_barrier[wave.workgroup] = []
        return waiting

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
        Unit.END: _issue_end,
    }
