"""Checks while a kernel runs: waits, and bytes shared between workgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .effects import Effects, Unit
from .faults import Place, ScratchFault, SharedBytesFault, WaitFault
from .memory import DEVICE, GlobalMemory, Offsets, Region, Use
from .program import SCALARS, Program
from .state import Lanes

if TYPE_CHECKING:
    from .machine import Machine

Numbers = npt.NDArray[np.int64]

_COUNTERS = ("vm", "lgkm", "smem")
_WAITS = {"vm": "vmcnt", "lgkm": "lgkmcnt", "smem": "lgkmcnt(0)"}


def find_scratch(program: Program) -> ScratchFault | None:
    """The first use of scratch memory; None if the kernel has none."""
    for index, each in enumerate(program.instructions):
        if each.name.startswith("scratch_"):
            place = Place(program.name, index, each.text, each.line)
            return ScratchFault(place, f"{program.scratch} bytes of scratch memory a lane")
    return None


_IN_ORDER = {Unit.VMEM_LOAD: "vm", Unit.LDS: "lgkm"}


@dataclass(frozen=True)
class _Load:
    """A load in flight: its registers, and its number among the operations of each wave."""

    counter: str
    registers: frozenset[int]
    number: Numbers


class WaitCheck:
    """Registers that loads in flight will write.

    Vector memory and LDS operations complete in order, so a counter of n says that all but the last
    n are done. Scalar loads complete in any order: only ``lgkmcnt(0)`` covers them. An operation
    with a number of 0 in a wave was not executed by that wave.

    Attributes:
        pending: all these registers, of any wave.
        issued, done: operations by counter and wave, [waves].
    """

    def __init__(self, machine: Machine) -> None:
        waves = machine.state.waves
        self._machine = machine
        self.issued = {counter: np.zeros(waves, np.int64) for counter in _COUNTERS}
        self.done = {counter: np.zeros(waves, np.int64) for counter in _COUNTERS}
        self._loads: list[_Load] = []
        self.pending: frozenset[int] = frozenset()

    def issue(self, counter: str, registers: Sequence[int]) -> None:
        """Count an operation of the selected waves."""
        selected = self._machine.state.selected
        issued = self.issued[counter]
        issued[selected] += 1
        if registers:
            number = np.zeros_like(issued)
            number[selected] = issued[selected]
            load = _Load(counter, frozenset(registers), number)
            self._loads.append(load)
            self.pending |= load.registers

    def wait(self, vmcnt: int | None, lgkmcnt: int | None) -> None:
        """Note what is done after a wait of the selected waves."""
        if vmcnt is not None:
            self._advance("vm", vmcnt)
        if lgkmcnt is not None:
            self._advance("lgkm", lgkmcnt)
            if lgkmcnt == 0:
                self._advance("smem", 0)
        self._loads = [
            load for load in self._loads if (load.number > self.done[load.counter]).any()
        ]
        self.pending = frozenset().union(*(load.registers for load in self._loads))

    def _advance(self, counter: str, left: int) -> None:
        selected, done = self._machine.state.selected, self.done[counter]
        done[selected] = np.maximum(done[selected], self.issued[counter][selected] - left)

    def check(self, effects: Effects) -> None:
        """Fail if the selected waves use a register whose load is in flight.

        A load may write the register of another one that is in flight in the same order.
        """
        selected = self._machine.state.selected
        for load in self._loads:
            used = load.registers & effects.touched
            if load.counter == _IN_ORDER.get(effects.unit):
                used = load.registers & effects.reads
            if not used:
                continue
            late = load.number[selected] > self.done[load.counter][selected]
            if late.any():
                register = min(used)
                name = f"v{register}" if register < SCALARS else f"s{register - SCALARS}"
                what = f"{name} is used before the {_WAITS[load.counter]} that covers its load"
                self._machine.fault(WaitFault, what, late)


class UntrackedReadError(Exception):
    """A region turned out to be written after reads of it that were not noted."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name)
        self.region = region


_NOBODY, _SEVERAL = -1, -2


@dataclass
class _Tracked:
    """Workgroups that used each granule of a region, by how they did; see `SharingCheck`."""

    shift: int
    reads: npt.NDArray[np.int32]
    polls: npt.NDArray[np.int32]
    writes: npt.NDArray[np.int32]
    updates: npt.NDArray[np.int32]

    @classmethod
    def nobody(cls, region: Region) -> _Tracked:
        """A region without accesses, in granules of 4 bytes."""
        granules = -(-(region.end - region.start) // 4)
        return cls(2, *(np.full(granules, _NOBODY, np.int32) for _ in range(4)))

    def refine(self, shift: int) -> None:
        """Make granules smaller."""
        times = 1 << (self.shift - shift)
        self.reads, self.polls, self.writes, self.updates = (
            np.repeat(users, times) for users in (self.reads, self.polls, self.writes, self.updates)
        )
        self.shift = shift

    def note(self, use: Use) -> npt.NDArray[np.int32]:
        """The users among whom an access is noted."""
        if use.atomic:
            return self.updates
        if use.write:
            return self.writes
        return self.polls if use.scope >= DEVICE else self.reads

    def conflicts(self, use: Use) -> list[tuple[npt.NDArray[np.int32], str]]:
        """Users whose accesses have no order with this one, and what they did."""
        found = [(self.writes, "wrote")]
        if use.write and not use.atomic:
            found += [(self.updates, "updated"), (self.reads, "read"), (self.polls, "read")]
        elif use.atomic:
            found += [(self.reads, "read")]
        elif use.scope < DEVICE:
            found += [(self.updates, "updated")]
        return found


@dataclass
class SharingCheck:
    """Bytes of global memory that workgroups share.

    An access has an order with others if both are atomic operations or loads that pass by the
    caches of the compute unit (DEVICE or SYSTEM); all other pairs, of which one writes, have none.

    Most tensors are only read, so reads are noted in regions that the kernel writes alone. These
    are found out by `UntrackedReadError`: the launch starts again with the region in `written`. A
    launch that other processes see cannot start again, so it notes all reads.

    Args:
        memory: of the launch. written: names of regions that the kernel is known to write.
    """

    memory: GlobalMemory
    written: set[str] = field(default_factory=set)
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def access(
        self,
        machine: Machine,
        region: Region | None,
        offsets: Offsets,
        size: int,
        use: Use,
        lanes: Lanes | None,
    ) -> None:
        """Check and note an access.

        Args:
            region: None if it touches several. lanes: that take part; None for all.
        """
        if region is not None and self._is_read_only(region, use.write):
            return
        lanes = np.ones(offsets.shape, np.bool_) if lanes is None else lanes
        if region is not None:
            self._access(machine, region, offsets, size, use, lanes)
            return
        for each in self.memory.regions:
            inside = lanes & (offsets >= each.start) & (offsets < each.end)
            if inside.any() and not self._is_read_only(each, use.write):
                self._access(machine, each, offsets, size, use, inside)

    def _is_read_only(self, region: Region, write: bool) -> bool:
        """Whether an access needs no check, because the kernel is not known to write there."""
        if region.name in self._tracked:
            return False
        if not (write or region.name in self.written or self.memory.shared):
            self._read.add(region.name)
            return True
        if region.name in self._read:
            raise UntrackedReadError(region)
        self._tracked[region.name] = _Tracked.nobody(region)
        return False

    def _access(
        self, machine: Machine, region: Region, offsets: Offsets, size: int, use: Use, lanes: Lanes
    ) -> None:
        name = region.name
        tracked = self._tracked[name]
        if size < 1 << tracked.shift:
            tracked.refine(size.bit_length() - 1)
        count = max(1, size >> tracked.shift)
        granules = ((offsets[lanes] - region.start) >> tracked.shift)[:, None] + np.arange(count)
        workgroups = machine.workgroup[machine.state.selected][:, None]
        me = np.broadcast_to(workgroups, lanes.shape)[lanes][:, None]
        _note(tracked.note(use), granules, me)
        for users, verb in tracked.conflicts(use):
            last = users[granules]
            shared = (last != _NOBODY) & (last != me)
            if shared.any():
                where = np.zeros(lanes.shape, np.bool_)
                where[lanes] = shared.any(1)
                byte = int(granules[shared][0]) << tracked.shift
                what = f"byte {byte} of {name}, which another workgroup {verb} without order"
                machine.fault(SharedBytesFault, what, where)


def _note(users: npt.NDArray[np.int32], granules: Offsets, me: npt.NDArray[np.int32]) -> None:
    """Add `me` to the users of granules; several lanes may name the same one."""
    last = users[granules]
    users[granules] = np.where((last == _NOBODY) | (last == me), me, _SEVERAL)
    last = users[granules]
    users[granules[(last != me) & (last != _SEVERAL)]] = _SEVERAL
