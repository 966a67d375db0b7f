"""Memory that other devices use at the same time: what flags publish, and what caches may hold.

A device that hands data to another one stores them, writes its L2 cache back (``buffer_wbl2 sc0
sc1``), waits for both (``s_waitcnt vmcnt(0)``), lets the waves of its workgroup meet, and sets a
flag by an atomic operation of system scope. The other one polls the flag with loads of system
scope, throws away what its caches hold (``buffer_inv sc0 sc1``), and loads the data.

Source: CDNA4 ISA, chapters 4 (waits) and 9 (memory scopes), and section 12.13 (``buffer_wbl2``,
``buffer_inv``); the memory model of gfx942 in LLVM's AMDGPUUsage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .faults import AcquireFault, ReleaseFault
from .memory import SYSTEM, Offsets, Region, Use
from .program import Instruction, Program
from .state import Lanes

if TYPE_CHECKING:
    from .machine import Machine

_STORES = ("global_store_", "buffer_store_")
_ATOMICS = ("global_atomic_", "buffer_atomic_")
_MEETING, _WAIT, _WRITE_BACK, _ORDERED = range(4)
_MISSING = {
    _MEETING: "an s_barrier behind the wait for it",
    _WAIT: "an s_waitcnt vmcnt(0) behind buffer_wbl2",
    _WRITE_BACK: "a buffer_wbl2 sc0 sc1",
}
"""What has to stand between a store and a flag, from the flag backwards."""


def _is_wide(instruction: Instruction) -> bool:
    """Whether a cache control or store has system scope: sc0 and sc1."""
    return bool(instruction.modifiers.get("sc0") and instruction.modifiers.get("sc1"))


def find_unordered(program: Program) -> dict[int, dict[int, str]]:
    """Atomic operation of system scope → stores ahead of it, and what is missing in between.

    All paths through the program are followed. What waves store is only known to the one that sets
    the flag once they have waited for it and then come to a barrier.
    """
    flags = [
        index
        for index, each in enumerate(program.instructions)
        if each.name.startswith(_ATOMICS) and "sc1" in each.modifiers
    ]
    ahead = _predecessors(program) if flags else []
    return {flag: _unordered(program, flag, ahead) for flag in flags}


def _unordered(program: Program, flag: int, ahead: list[list[int]]) -> dict[int, str]:
    first = _Stage(_MEETING if program.num_waves > 1 else _WAIT)
    found: dict[int, str] = {}
    pending = [(index, first) for index in ahead[flag]]
    seen = set(pending)
    while pending:
        index, stage = pending.pop()
        each = program.instructions[index]
        if each.name.startswith(_STORES) and not (stage.needs == _WRITE_BACK and _is_wide(each)):
            found.setdefault(index, stage.missing)
        stage = stage.ahead_of(each)
        if stage.needs < _ORDERED:
            following = {(previous, stage) for previous in ahead[index]} - seen
            seen |= following
            pending += following
    return found


class _Stage(NamedTuple):
    """What is still to come on the way from a flag backwards, and whether a wait was missed."""

    needs: int
    unfinished: bool = False

    @property
    def missing(self) -> str:
        return _MISSING[_WAIT if self.unfinished else self.needs]

    def ahead_of(self, each: Instruction) -> _Stage:
        """The stage ahead of an instruction."""
        writes_back = each.name == "buffer_wbl2" and _is_wide(each)
        if self.needs == _MEETING:
            return _Stage(_WAIT) if each.name == "s_barrier" else self
        if self.needs == _WAIT:
            if each.name == "s_waitcnt" and each.modifiers.get("vmcnt") == 0:
                return self._replace(needs=_WRITE_BACK)
            return self._replace(unfinished=self.unfinished or writes_back)
        return _Stage(_ORDERED) if writes_back else self


def _predecessors(program: Program) -> list[list[int]]:
    """Instructions from which each one is reached."""
    count = len(program.instructions)
    ahead: list[list[int]] = [[] for _ in range(count + 1)]
    for index, each in enumerate(program.instructions):
        if each.target is not None:
            ahead[program.labels[each.target]].append(index)
        if each.name not in ("s_branch", "s_endpgm"):
            ahead[index + 1].append(index)
    return ahead


@dataclass
class _Cached:
    """What a compute unit's cache may hold of each dword of an allocation.

    Args:
        words: as they were loaded last. groups: the workgroup that did, or −1.
        generations: how often that workgroup had invalidated its cache.
    """

    words: npt.NDArray[np.uint32]
    groups: npt.NDArray[np.int32]
    generations: npt.NDArray[np.int32]

    @classmethod
    def nothing(cls, region: Region) -> _Cached:
        count = -(-(region.end - region.start) // 4)
        return cls(
            np.zeros(count, np.uint32), np.full(count, -1, np.int32), np.zeros(count, np.int32)
        )


class CoherenceCheck:
    """Accesses of a batch of workgroups to memory that other processes use at the same time.

    What a compute unit's cache holds is only invalid after ``buffer_inv``. Between a load of system
    scope, with which a wave looks at a flag, and plain loads of its workgroup there has to be one,
    behind the wait for the flag.
    """

    def __init__(self, machine: Machine) -> None:
        waves, groups = machine.state.waves, machine.state.waves // machine.num_waves
        assert machine.waits is not None  # for the type checker
        self._machine, self._waits = machine, machine.waits
        self._stored: list[set[int]] = [set() for _ in range(groups)]
        self._polls: npt.NDArray[np.int64] = np.zeros(waves, np.int64)
        self._stale: Lanes = np.zeros(groups, np.bool_)
        self._generations: npt.NDArray[np.int32] = np.zeros(groups, np.int32)
        self._cached: dict[str, _Cached] = {}

    def access(self, offsets: Offsets, size: int, use: Use, lanes: Lanes | None) -> None:
        """Check and note an access of the selected waves."""
        machine = self._machine
        lanes = np.ones(offsets.shape, np.bool_) if lanes is None else lanes
        for region, inside in machine.memory.in_shared(offsets, lanes):
            waves = machine.state.indices[inside.any(1)]
            if use.atomic:
                self._flag(waves, use, inside)
            elif use.write:
                for group in np.unique(machine.group[waves]):
                    self._stored[group].add(machine.index)
            elif use.scope == SYSTEM:
                self._polls[waves] = self._waits.issued["vm"][waves] + 1
            else:
                self._load(region, offsets, size, inside)
            if use.write and region.name in self._cached:
                self._cached[region.name].groups[_dwords(region, offsets[inside], size)] = -1

    def invalidate(self) -> None:
        """The selected waves invalidate the caches: what flags said that they waited for holds."""
        indices = self._machine.state.indices
        seen = indices[self._waits.done["vm"][indices] >= self._polls[indices]]
        groups = self._machine.group[seen]
        self._polls[seen] = 0
        self._stale[groups] = False
        self._generations[groups] += 1

    def release(self, waves: npt.NDArray[np.intp]) -> None:
        """Waves, all of some workgroups, leave a barrier: each knows what others polled."""
        polled = waves[self._polls[waves] > 0]
        self._stale[self._machine.group[polled]] = True

    def _flag(self, waves: npt.NDArray[np.intp], use: Use, inside: Lanes) -> None:
        machine = self._machine
        if use.scope != SYSTEM:
            what = "an atomic operation on memory of other devices without sc1 (system scope)"
            machine.fault(ReleaseFault, what, inside)
        unordered = machine.executable.unordered[machine.index]
        for group in np.unique(machine.group[waves]):
            for store in sorted(self._stored[group] & unordered.keys()):
                each = machine.program.instructions[store]
                what = f"the flag is set without {unordered[store]}: {each.text}"
                what += f" ({each.line}) may not have reached the other devices"
                mine = (machine.group[machine.state.indices] == group)[:, None] & inside
                machine.fault(ReleaseFault, what, mine)
        if use.read:
            self._polls[waves] = self._waits.issued["vm"][waves] + 1

    def _load(self, region: Region, offsets: Offsets, size: int, inside: Lanes) -> None:
        machine = self._machine
        indices = machine.state.indices
        groups = machine.group[indices]
        late = (self._polls[indices] > 0) | self._stale[groups]
        if (late[:, None] & inside).any():
            what = (
                f"{region.name} is loaded behind a flag without a buffer_inv sc0 sc1 in between, "
                "which follows the wait for the flag"
            )
            machine.fault(AcquireFault, what, late[:, None] & inside)
        cached = self._cached.setdefault(region.name, _Cached.nothing(region))
        dwords = _dwords(region, offsets[inside], size)
        me = np.broadcast_to(groups[:, None], inside.shape)[inside][:, None]
        content = machine.memory.bytes[(4 * dwords + region.start)[..., None] + np.arange(4)]
        words = content.view(np.uint32)[..., 0]
        again = (cached.groups[dwords] == me) & (
            cached.generations[dwords] == self._generations[me]
        )
        changed = (again & (cached.words[dwords] != words)).any(1)
        if changed.any():
            where = np.zeros(inside.shape, np.bool_)
            where[inside] = changed
            byte = int(dwords[changed][0, 0]) * 4
            what = (
                f"byte {byte} of {region.name} has changed since this workgroup loaded it; without "
                "sc0 sc1 its cache may go on returning the old one"
            )
            machine.fault(AcquireFault, what, where)
        cached.words[dwords], cached.groups[dwords] = words, me
        cached.generations[dwords] = self._generations[me]


def _dwords(region: Region, offsets: Offsets, size: int) -> Offsets:
    """Dwords of an allocation that accesses at these offsets touch, [accesses, dwords]."""
    return ((offsets - region.start) >> 2)[:, None] + np.arange(max(1, size // 4))
