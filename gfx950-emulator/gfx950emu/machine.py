"""Runs the waves of a kernel: which wave goes next, barriers, and the way to memory.

All waves of a batch of workgroups that stand at the same instruction execute it together, so that
one numpy call serves waves x 64 lanes. The default schedule always continues at the lowest program
counter, which brings waves together again after a branch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from . import hazards
from .coherence import CoherenceCheck, find_unordered
from .effects import Effects, effects
from .errors import message
from .faults import EndlessLoopFault, Fault, MisalignedFault, OutOfBoundsFault, Place
from .instructions import bind
from .lds_check import LdsCheck
from .listing import read_program
from .memory import GlobalMemory, Lds, Offsets, Use
from .program import SCALARS, Program
from .state import LANES, Indices, Lanes, WaveState, Words, spread
from .trace import WaveTrace
from .wait_states import find_hazard

STORED = -1
"""Result of an instruction that has stored program counters: a split, a barrier or the end."""

Schedule = Literal["lowest", "random"]
Counter = Literal["vm", "lgkm", "smem"]
"""Loads and stores in flight: vector memory, LDS, and scalar loads (which LGKM_CNT counts too)."""

_MAX_WAVES: dict[Schedule, int] = {"lowest": 128, "random": 256}
"""Waves of a batch. More amortise Python, fewer fit into the caches; T32 H = F = 1024: 4.2 s of CPU
instead of 6.6 with 32, random 5.9 instead of 14.8."""
_MAX_RUN = 60
"""Instructions that a wave executes at most before the random schedule picks another."""
_READY, _WAITING, _ENDED = range(3)
"""States of a wave; it waits at a barrier."""
_BUDGET = 2_000_000
"""Instructions of a wave; the longest kernel of the library executes some 100,000. A wave that
reads the clock starts anew: its own time-out ends its wait for other devices."""
_TICK_NS = 10
"""Nanoseconds of a tick of ``s_memrealtime``."""
_CLOCK_PAUSE_S = 2e-4
"""How long a wave that reads the clock lets other processes run: it probably waits for one."""


@dataclass(frozen=True)
class Executable:
    """A program with its instructions bound to what they do.

    Args:
        program: the kernel. written: names of the arguments that it was seen to write.
    """

    program: Program
    written: set[str] = field(default_factory=set, compare=False)

    @functools.cached_property
    def bound(self) -> tuple[Callable[[Machine], int | None], ...]:
        """A function for each instruction."""
        return tuple(bind(instruction, self.program) for instruction in self.program.instructions)

    @functools.cached_property
    def effects(self) -> tuple[Effects, ...]:
        """Registers read and written by each instruction."""
        return tuple(map(effects, self.program.instructions))

    @functools.cached_property
    def unordered(self) -> dict[int, dict[int, str]]:
        """See `coherence.find_unordered`."""
        return find_unordered(self.program)

    @functools.cached_property
    def vectors(self) -> frozenset[int]:
        """Vector registers that the kernel uses, and the one that holds the lane's number."""
        used = frozenset().union(*(each.touched for each in self.effects))
        return frozenset(register for register in used if register < SCALARS) | {0}

    @functools.cached_property
    def fault(self) -> Fault | None:
        """The first fault that the listing shows: scratch memory, or instructions too close."""
        return hazards.find_scratch(self.program) or find_hazard(self.program, self.effects)


@functools.lru_cache(maxsize=256)
def load(code_object: bytes, listing: str = "") -> Executable:
    """The executable of a kernel, see `read_program`; the same kernel is read once."""
    return Executable(read_program(code_object, listing))


class Machine:
    """Executes one kernel.

    Args:
        executable: the kernel. memory: its global memory, loaded.
        lds: bytes of LDS a workgroup.
        checks: whether to look for faults that do not show in the results.
        schedule: "lowest" or "random". seed: of garbage in registers and LDS, and of the schedule.
        trace: whether to record what each wave executes.
        budget: instructions that a wave may execute.

    Attributes:
        state: registers of the waves of the current batch. lds: their LDS.
        executed: wave-instructions by index of the instruction.
        traces: a `WaveTrace` for each wave of the launch, if asked for.
    """

    def __init__(
        self,
        executable: Executable,
        memory: GlobalMemory,
        lds: int,
        *,
        checks: bool = True,
        schedule: Schedule = "lowest",
        seed: int = 0,
        trace: bool = False,
        budget: int = _BUDGET,
    ) -> None:
        self.executable, self.program, self.memory = executable, executable.program, memory
        self.num_waves, self.lds_size = self.program.num_waves, max(lds, self.program.lds)
        self._schedule, self._budget, self._seed = schedule, budget, seed
        self._random = np.random.default_rng(seed)
        self.executed = [0] * len(self.program.instructions)
        self.traces: list[WaveTrace] = []
        self._tracing, self._read_clock = trace, False
        self.sharing = hazards.SharingCheck(memory, executable.written) if checks else None
        self.waits: hazards.WaitCheck | None = None
        self.races: LdsCheck | None = None
        self.coherence: CoherenceCheck | None = None
        self._checks = checks
        self.index = 0
        self.state: WaveState
        self.lds: Lds

    # -- running -----------------------------------------------------------------------------------

    def launch(self, grid: Sequence[int], kernarg: int, packet: int) -> None:
        """Execute all workgroups of a grid of up to three sizes.

        Args:
            grid: workgroups along x, y and z.
            kernarg, packet: addresses of the kernel arguments and of the dispatch packet.

        Raises:
            Fault: the kernel does something undefined.
        """
        x, y, z = (*grid, 1, 1)[:3]
        ids = np.array(
            [place[::-1] for place in itertools.product(range(z), range(y), range(x))], np.uint32
        ).reshape(-1, 3)
        order = np.arange(len(ids))
        if self._schedule == "random":
            order = self._random.permutation(len(ids))
        batch = max(1, _MAX_WAVES[self._schedule] // self.num_waves)
        with np.errstate(all="ignore"):
            for first in range(0, len(ids), batch):
                self._start(order[first : first + batch], ids, kernarg, packet)
                self._run()

    def _start(
        self, workgroups: Indices, ids: npt.NDArray[np.uint32], kernarg: int, packet: int
    ) -> None:
        """Set up the registers and LDS of a batch of workgroups."""
        count, waves = workgroups.size, workgroups.size * self.num_waves
        program, garbage = self.program, np.random.default_rng(self._seed)
        self.state = state = WaveState(waves, garbage, program.mode, self.executable.vectors)
        self.lds = Lds(count, self.lds_size, garbage)
        self._status = np.full(waves, _READY, np.int8)
        self._counter = np.full(waves, program.entry, np.int64)
        self.group = np.repeat(np.arange(count), self.num_waves)
        self.wave = np.tile(np.arange(self.num_waves), count)
        self.workgroup = workgroups[self.group].astype(np.int32)
        if program.descriptor.get("user_sgpr_dispatch_ptr", 0):
            first = 4 * program.descriptor.get("user_sgpr_private_segment_buffer", 0)
            state.scalar[first : first + 2] = [[packet & 0xFFFFFFFF], [packet >> 32]]
        register = program.kernarg_register
        state.scalar[register : register + 2] = [[kernarg & 0xFFFFFFFF], [kernarg >> 32]]
        start = kernarg - GlobalMemory.BASE
        words = self.memory.bytes[start : start + 4 * program.preloaded_dwords].view(np.uint32)
        preloaded = register + 2 + 2 * program.descriptor.get("user_sgpr_dispatch_id", 0)
        state.scalar[preloaded : preloaded + words.size] = words[:, None]
        place = program.descriptor["user_sgpr_count"]
        for axis, name in enumerate("xyz"):
            if program.descriptor.get(f"system_sgpr_workgroup_id_{name}", 0):
                state.scalar[place] = ids[self.workgroup, axis]
                place += 1
        state.vector[0] = self.wave[:, None] * LANES + np.arange(LANES)
        self._done = np.zeros(waves, np.int64)
        if self._checks:
            self.waits = hazards.WaitCheck(self)
            self.races = LdsCheck(self)
            self.coherence = CoherenceCheck(self) if self.memory.shared else None
        if self._tracing:
            self._traces = [
                WaveTrace(int(group), int(wave))
                for group, wave in zip(self.workgroup, self.wave, strict=True)
            ]
            self.traces += self._traces

    def _run(self) -> None:
        while True:
            ready = np.flatnonzero(self._status == _READY)
            if ready.size:
                self._execute(*self._choose(ready))
            elif (self._status == _ENDED).all():
                return
            else:
                self._release()

    def _choose(self, ready: Indices) -> tuple[int, int, int]:
        """Select waves; return their instruction, one where to stop, and how many to execute."""
        counters = self._counter[ready]
        if self._schedule == "random":  # one wave of each workgroup, where they stand together
            wave = ready[self._random.integers(ready.size)]
            together = (counters == self._counter[wave]) & (self.wave[ready] == self.wave[wave])
            self.state.select(ready[together])
            return int(self._counter[wave]), -1, int(self._random.integers(1, _MAX_RUN))
        lowest = int(counters.min())
        others = counters[counters != lowest]
        self.state.select(ready[counters == lowest])
        return lowest, int(others.min()) if others.size else -1, self._budget

    def _execute(self, index: int, stop: int, count: int) -> None:
        """Let the selected waves execute up to `count` instructions, or as far as `stop`."""
        bound, executed, facts = self.executable.bound, self.executed, self.executable.effects
        state, waits = self.state, self.waits
        done = self._done[state.indices]
        left = min(count, self._budget - int(done.max()))
        if left <= 0:
            self.index = index
            self.fault(EndlessLoopFault, f"a wave has executed {self._budget} instructions")
        executed_now, self._read_clock = 0, False
        while True:
            self.index = index
            if waits is not None and not waits.pending.isdisjoint(facts[index].touched):
                waits.check(facts[index])
            executed[index] += state.count
            executed_now += 1
            if self._tracing:
                for wave in state.indices:
                    self._traces[wave].instructions.append(index)
            following = bound[index](self)
            if following == STORED:
                break
            index = index + 1 if following is None else following
            if executed_now == left or 0 <= stop <= index:
                self._counter[state.indices] = index
                break
        self._done[state.indices] = 0 if self._read_clock else done + executed_now

    def _release(self) -> None:
        """Let all workgroups continue whose waves have all come to the barrier or to the end."""
        waiting = (self._status == _WAITING).reshape(-1, self.num_waves)
        ended = (self._status == _ENDED).reshape(-1, self.num_waves)
        # A wave that has ended no longer counts.
        free = (waiting | ended).all(1) & waiting.any(1)
        waves = np.flatnonzero(np.repeat(free, self.num_waves))
        if self.races is not None:
            self.races.release(waves)
        if self.coherence is not None:
            self.coherence.release(waves)
        self._status[np.flatnonzero((free[:, None] & waiting).ravel())] = _READY

    # -- what instructions call --------------------------------------------------------------------

    def fault(self, kind: type[Fault], what: str, where: Lanes | None = None) -> NoReturn:
        """Raise a fault of the current instruction.

        Args:
            kind: its class. what: what is wrong.
            where: bool [count] or [count, 64], the waves or lanes of which this holds.
        """
        instruction = self.program.instructions[self.index]
        who: list[int | None] = [None, None, None]
        if where is not None and where.any():
            first = np.argwhere(where)[0]
            wave = self.state.indices[first[0]]
            who = [int(self.workgroup[wave]), int(self.wave[wave]), None]
            if where.ndim == 2:
                who[2] = int(first[1])
        place = Place(self.program.name, self.index, instruction.text, instruction.line, *who)
        raise kind(place, what)

    def branch(self, taken: Lanes, target: int) -> int | None:
        """Let the waves that have `taken` the branch, bool [count], continue at `target`."""
        if taken.all():
            return target
        if not taken.any():
            return None
        self._counter[self.state.indices] = np.where(taken, target, self.index + 1)
        return STORED

    def barrier(self) -> int:
        """Let the selected waves wait for the other waves of their workgroups."""
        self._status[self.state.indices] = _WAITING
        self._counter[self.state.indices] = self.index + 1
        return STORED

    def end(self) -> int:
        """End the selected waves."""
        self._status[self.state.indices] = _ENDED
        return STORED

    def issue_load(self, counter: Counter, registers: Sequence[int]) -> None:
        """Count a load in flight to these registers, scalar ones from `program.SCALARS` on."""
        if self.waits is not None:
            self.waits.issue(counter, registers)

    def issue_store(self, counter: Counter) -> None:
        """Count a memory operation in flight that writes no register."""
        if self.waits is not None:
            self.waits.issue(counter, ())

    def wait(self, vmcnt: int | None = None, lgkmcnt: int | None = None) -> None:
        """Wait until at most so many operations are in flight."""
        if self.waits is not None:
            self.waits.wait(vmcnt, lgkmcnt)

    def global_access(
        self, address: npt.NDArray[Any], size: int, use: Use, lanes: Lanes | None = None
    ) -> Offsets:
        """Check an access to global memory; `stored` has to follow if it writes.

        Args:
            address: of each lane, [count, 64]. size: bytes of each lane. use: what it does.
            lanes: those that take part; None means the active ones.

        Returns:
            Offsets into ``memory.bytes``, int64 [count, 64]; lanes that take no part have a valid
            one.
        """
        lanes = self._participants(lanes)
        shape = (self.state.count, LANES) if lanes is None else lanes.shape
        offsets = self.memory.offsets_of(spread(address, shape).astype(np.int64, copy=False))
        if lanes is not None:
            if not lanes.any():
                return np.full(shape, self.memory.regions[0].start, np.int64)
            offsets = np.where(lanes, offsets, offsets[lanes][0])
        region = self.memory.region_of(int(offsets.min()), int(offsets.max()) + size)
        if region is None:
            outside = self.memory.outside(offsets, size)
            if outside.any():
                where = self.memory.describe(int(offsets[outside][0]))
                self.fault(OutOfBoundsFault, f"{size} bytes at {where}", outside)
        self._check_alignment(offsets, size, size if use.atomic else 4)
        if self.memory.shared:
            self.memory.fetch(offsets, size, np.ones(shape, np.bool_) if lanes is None else lanes)
        if self._tracing:
            on = np.ones(shape, np.bool_) if lanes is None else lanes
            self._note(lambda trace, row: trace.note_lines(offsets[row][on[row]], size))
        if self.sharing is not None:
            self.sharing.access(self, region, offsets, size, use, lanes)
        if self.coherence is not None:
            self.coherence.access(offsets, size, use, lanes)
        return offsets

    def stored(self, offsets: Offsets, size: int, lanes: Lanes) -> None:
        """Let other processes see what an access has written to ``memory.bytes``."""
        if self.memory.shared:
            self.memory.publish(offsets, size, lanes)

    def updated(self, offsets: Offsets, old: npt.NDArray[Any], lanes: Lanes, blind: bool) -> None:
        """Let other processes see what an atomic operation has done to ``memory.bytes``.

        Args:
            old: words before it. blind: whether it stores the same whatever they were.

        Raises:
            NotImplementedError: the result depends on words that others may change meanwhile.
        """
        for region, inside in self.memory.in_shared(offsets, lanes):
            words = self.memory.bytes.view(old.dtype)[offsets[inside] // old.itemsize]
            if blind:
                self.memory.publish(offsets, old.itemsize, inside)
            elif (words != old[inside]).any():
                text = self.program.instructions[self.index].text
                need = "a swap, the one operation that is atomic between processes"
                raise NotImplementedError(message("gfx950", region.name, need, text))

    def write_back(self) -> None:
        """Count a write-back of the caches: ``vmcnt`` says when it is done."""
        self.issue_store("vm")

    def invalidate(self) -> None:
        """Invalidate the caches of all data that other devices may have changed."""
        if self.coherence is not None:
            self.coherence.invalidate()

    def clock(self) -> int:
        """Ticks of 10 ns of this computer's monotonic clock; other processes run first."""
        time.sleep(_CLOCK_PAUSE_S)
        self._read_clock = True
        return time.monotonic_ns() // _TICK_NS

    def _participants(self, lanes: Lanes | None) -> Lanes | None:
        """Lanes that take part in an access, the active ones unless given; None if all do."""
        if lanes is None:
            return None if self.state.all_active else self.state.active
        return None if lanes.shape[1] == LANES and lanes.all() else lanes

    def _check_alignment(self, offsets: Offsets, size: int, most: int = 4) -> None:
        if self._checks:
            mask = min(size, most) - 1
            if int(np.bitwise_or.reduce(offsets, None)) & mask:
                self.fault(MisalignedFault, "the address is not aligned", offsets & mask != 0)

    def scalar_access(self, address: npt.NDArray[Any], size: int) -> Offsets:
        """Check a scalar load; `address` and the returned offsets are [count]."""
        lanes = np.ones((self.state.count, 1), np.bool_)
        offsets: Offsets = self.global_access(address[:, None], size, Use(), lanes)[:, 0]
        return offsets

    def lds_access(
        self,
        address: npt.NDArray[Any],
        size: int,
        *,
        write: bool = False,
        direct: bool = False,
        atomic: bool = False,
        lanes: Lanes | None = None,
        words: Sequence[Words] = (),
    ) -> Offsets:
        """Check an access to LDS.

        Args:
            address: bytes from the workgroup's first, [count, 64]. size: bytes of each lane.
            write: whether it stores. direct: whether a load from global memory stores.
            atomic: whether it is an atomic operation.
            lanes: those that take part; None means the active ones.
            words: what is stored. Waves may store the same bytes twice.

        Returns:
            Offsets into ``lds.bytes``, int64 [count, 64]; lanes that take no part have a valid one.
        """
        lanes = self._participants(lanes)
        shape = (self.state.count, LANES)
        address = spread(address, shape).astype(np.int64, copy=False)
        if lanes is not None:
            address = np.where(lanes, address, 0)
        if int(address.max()) + size > self.lds.limit:
            outside = address + size > self.lds.limit
            if lanes is not None:
                outside &= lanes
            if outside.any():
                what = f"LDS bytes from {int(address[outside][0]):#x} on, of {self.lds.limit:#x}"
                self.fault(OutOfBoundsFault, what, outside)
        self._check_alignment(address, size)
        if self._tracing and not direct:
            on = np.ones(shape, np.bool_) if lanes is None else lanes
            self._note(lambda trace, row: trace.note_banks(address[row], on[row], size, write))
        offsets: Offsets = address + self.group[self.state.selected][:, None] * self.lds.size
        if self.races is not None:
            self.races.access(offsets, size, write, direct, atomic, lanes, words)
        return offsets

    def lds_stored(
        self, offsets: Offsets, size: int, words: Sequence[Words], lanes: Lanes | None = None
    ) -> None:
        """Check after a store that no two lanes or waves gave one byte different values."""
        if self.races is not None:
            self.races.stored(offsets, size, words, self._participants(lanes))

    def _note(self, note: Callable[[WaveTrace, int], None]) -> None:
        for row, wave in enumerate(self.state.indices):
            note(self._traces[wave], row)
