"""Checks while a kernel runs: waits, LDS shared between waves, bytes shared between workgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .effects import Effects, Unit
from .faults import (
    ConflictingStoreFault,
    LdsDirectFault,
    LdsRaceFault,
    Place,
    ScratchFault,
    SharedBytesFault,
    WaitFault,
)
from .memory import GlobalMemory, Offsets, Region
from .program import SCALARS, Program
from .state import Lanes, Words

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


_DS, _DIRECT, _ATOMIC = range(3)
_WAVE_BITS, _KIND_BITS = 5, 2
_WAVE_MASK, _KIND_MASK = (1 << _WAVE_BITS) - 1, (1 << _KIND_BITS) - 1


class LdsCheck:
    """Who wrote and read each granule of LDS last, and what the others know of it.

    What a wave has done is known to the others once it has waited for it and then come to a
    barrier. Each granule holds the number of the last writing operation, its kind and its wave, and
    the number of the last reading operation of each wave. A granule is as small as the smallest
    access so far: 4 bytes, 2 or 1.
    """

    def __init__(self, machine: Machine) -> None:
        waves = machine.state.waves
        assert machine.waits is not None  # for the type checker
        self._machine, self._waits, self._lds = machine, machine.waits, machine.lds
        self._waves = machine.num_waves
        self._known = {counter: np.zeros(waves, np.int64) for counter in ("lgkm", "vm")}
        self._shift = 2
        granules = machine.lds.bytes.size >> self._shift
        self._writer = np.zeros(granules, np.int64)
        self._readers = np.zeros((granules, self._waves), np.int32)

    def release(self, waves: npt.NDArray[np.intp]) -> None:
        """Waves leave a barrier: what they had waited for is known to the others."""
        for counter, known in self._known.items():
            known[waves] = self._waits.done[counter][waves]

    def _refine(self, shift: int) -> None:
        """Make granules smaller."""
        times = 1 << (self._shift - shift)
        self._writer = np.repeat(self._writer, times)
        self._readers = np.repeat(self._readers, times, axis=0)
        self._shift = shift

    def access(
        self,
        offsets: Offsets,
        size: int,
        write: bool,
        direct: bool,
        atomic: bool,
        lanes: Lanes,
        words: Sequence[Words],
    ) -> None:
        """Check and note an access of the selected waves; see `Machine.lds_access`."""
        if size < 1 << self._shift:
            self._refine(size.bit_length() - 1)
        machine, count = self._machine, max(1, size >> self._shift)
        granules = (offsets >> self._shift)[..., None] + np.arange(count)
        waves = np.broadcast_to(machine.state.indices[:, None, None], granules.shape)
        if not lanes.all():
            granules, waves = granules[lanes], waves[lanes]
        granules, waves = granules.reshape(-1, count), waves.reshape(-1, count)
        if not granules.size:
            return
        me = machine.wave[waves]
        first = waves - me  # wave 0 of the same workgroup
        self._check_writer(granules, waves, me, first, lanes, (write, direct, atomic), words)
        if write or atomic:
            self._check_readers(granules, waves, me, first, lanes, direct, atomic)
        counter = "vm" if direct else "lgkm"
        number = self._waits.issued[counter][waves] + 1
        if write or atomic:
            kind = _DIRECT if direct else _ATOMIC if atomic else _DS
            self._writer[granules] = (number << _KIND_BITS | kind) << _WAVE_BITS | me
        if not write:
            self._readers[granules, me] = number

    def _check_writer(
        self,
        granules: Offsets,
        waves: npt.NDArray[np.intp],
        me: npt.NDArray[np.intp],
        first: npt.NDArray[np.intp],
        lanes: Lanes,
        access: tuple[bool, bool, bool],
        words: Sequence[Words],
    ) -> None:
        """Fail unless the last write is complete, and known to this wave."""
        write, direct, atomic = access
        last = self._writer[granules]
        if not last.any():
            return
        writer = last & _WAVE_MASK
        kind = last >> _WAVE_BITS & _KIND_MASK
        number = last >> (_WAVE_BITS + _KIND_BITS)
        by = first + writer
        loaded = kind == _DIRECT
        known = np.where(loaded, self._known["vm"][by], self._known["lgkm"][by])
        racing = (number > known) & (writer != me)
        if atomic:
            racing &= kind != _ATOMIC
        own = (writer == me) & loaded & (number > self._waits.done["vm"][waves])
        if direct:  # the two paths into LDS keep no order
            late = ~loaded & (number > self._waits.done["lgkm"][waves])
            racing |= (writer == me) & late
        if own.any() and not direct:
            self._fail(LdsDirectFault, granules, own, lanes, "is used before vmcnt covers its load")
        if racing.any() and words:
            racing &= self._differs(granules, words, lanes)
        if racing.any():
            author = int(writer[racing][0])
            verb = "written" if write else "used"
            missing = "without a barrier, or a wait ahead of it, in between"
            what = f"was written by wave {author} and is {verb} {missing}"
            self._fail(LdsRaceFault, granules, racing, lanes, what)

    def _check_readers(
        self,
        granules: Offsets,
        waves: npt.NDArray[np.intp],
        me: npt.NDArray[np.intp],
        first: npt.NDArray[np.intp],
        lanes: Lanes,
        direct: bool,
        atomic: bool,
    ) -> None:
        """Fail unless all reads are complete, and known to this wave."""
        readers = self._readers[granules]
        if not readers.any():
            return
        others = np.arange(self._waves)
        known = self._known["lgkm"].reshape(-1, self._waves)[first // self._waves]
        late = readers > known
        own = others == me[..., None]
        if direct:
            done = self._waits.done["lgkm"][waves][..., None]
            late = np.where(own, readers > done, late)
        else:
            late &= ~own
        if atomic:  # atomic operations note themselves as readers, too
            kind = self._writer[granules] >> _WAVE_BITS & _KIND_MASK
            late &= (kind != _ATOMIC)[..., None]
        bad: Lanes = np.asarray(late.any(-1))
        if bad.any():
            reader = int(np.argwhere(late)[0][-1])
            what = f"is overwritten while wave {reader} may still read it"
            self._fail(LdsRaceFault, granules, bad, lanes, what)

    def _differs(self, granules: Offsets, words: Sequence[Words], lanes: Lanes) -> Lanes:
        """Which granules a store gives another content than they have."""
        size = granules.shape[1] << self._shift
        offsets = (granules[:, :1] << self._shift) + np.arange(size)
        new = _bytes_of(words, size, lanes)
        differs = new != self._lds.bytes[offsets]
        result: Lanes = differs.reshape(len(granules), granules.shape[1], -1).any(-1)
        return result

    def stored(self, offsets: Offsets, size: int, words: Sequence[Words], lanes: Lanes) -> None:
        """Check that LDS holds what each lane stored."""
        content = self._lds.bytes[offsets[lanes][:, None] + np.arange(size)]
        wrong = content != _bytes_of(words, size, lanes)
        if wrong.any():
            where = np.zeros(lanes.shape, np.bool_)
            where[lanes] = wrong.any(-1)
            what = "one store gives an LDS byte two values"
            self._machine.fault(ConflictingStoreFault, what, where)

    def _fail(
        self,
        kind: type[LdsRaceFault | LdsDirectFault],
        granules: Offsets,
        bad: Lanes,
        lanes: Lanes,
        what: str,
    ) -> None:
        byte = (int(granules[bad][0]) << self._shift) % self._lds.size
        where = np.zeros(lanes.shape, np.bool_)
        where[lanes] = bad.any(-1)
        self._machine.fault(kind, f"LDS byte {byte:#x} {what}", where)


def _bytes_of(words: Sequence[Words], size: int, lanes: Lanes) -> npt.NDArray[np.uint8]:
    """The bytes that the active lanes store: uint8 [lanes, size]."""
    stacked = np.stack([np.broadcast_to(word, lanes.shape)[lanes] for word in words], -1)
    return stacked.astype("<u4", copy=False).view(np.uint8)[:, :size]


class UntrackedReadError(Exception):
    """A region turned out to be written after reads of it that were not noted."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name)
        self.region = region


_NOBODY, _SEVERAL = -1, -2


@dataclass
class _Tracked:
    """Workgroups that read, wrote or updated each granule of a region."""

    shift: int
    reads: npt.NDArray[np.int32]
    writes: npt.NDArray[np.int32]
    updates: npt.NDArray[np.int32]

    @classmethod
    def nobody(cls, region: Region) -> _Tracked:
        """Granules of 4 bytes that nobody has used."""
        granules = -(-(region.end - region.start) // 4)
        return cls(2, *(np.full(granules, _NOBODY, np.int32) for _ in range(3)))

    def refine(self, shift: int) -> None:
        """Make granules smaller."""
        times = 1 << (self.shift - shift)
        self.reads, self.writes, self.updates = (
            np.repeat(users, times) for users in (self.reads, self.writes, self.updates)
        )
        self.shift = shift


@dataclass
class SharingCheck:
    """Bytes of global memory that workgroups share.

    Most tensors are only read, so reads are noted in regions that the kernel writes alone. These
    are found out by `UntrackedReadError`: the launch starts again with the region in `written`.

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
        write: bool,
        atomic: bool,
        lanes: Lanes,
    ) -> None:
        """Check and note an access; `region` is None if it touches several."""
        if region is not None:
            self._access(machine, region, offsets, size, write, atomic, lanes)
            return
        for each in self.memory.regions:
            inside = lanes & (offsets >= each.start) & (offsets < each.end)
            if inside.any():
                self._access(machine, each, offsets, size, write, atomic, inside)

    def _access(
        self,
        machine: Machine,
        region: Region,
        offsets: Offsets,
        size: int,
        write: bool,
        atomic: bool,
        lanes: Lanes,
    ) -> None:
        name = region.name
        tracked = self._tracked.get(name)
        if tracked is None:
            if not (write or atomic or name in self.written):
                self._read.add(name)
                return
            if name in self._read:
                raise UntrackedReadError(region)
            tracked = self._tracked[name] = _Tracked.nobody(region)
        if size < 1 << tracked.shift:
            tracked.refine(size.bit_length() - 1)
        count = max(1, size >> tracked.shift)
        granules = ((offsets[lanes] - region.start) >> tracked.shift)[:, None] + np.arange(count)
        workgroups = machine.workgroup[machine.state.selected][:, None]
        me = np.broadcast_to(workgroups, lanes.shape)[lanes][:, None]
        mine = tracked.updates if atomic else tracked.writes if write else tracked.reads
        verbs = (
            (tracked.writes, "wrote"),
            (tracked.updates, "" if atomic else "updated"),
            (tracked.reads, "read" if write or atomic else ""),
        )
        shared = np.zeros(granules.shape, np.bool_)
        _note(mine, granules, me)
        for users, verb in verbs:
            if not verb:
                continue
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
