"""The check of LDS that waves share.

What a wave has done is known to the others once it has waited for it and then come to a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .faults import ConflictingStoreFault, Fault, LdsDirectFault, LdsRaceFault
from .memory import Offsets
from .state import Indices, Lanes, Words

if TYPE_CHECKING:
    from .machine import Machine

Numbers = npt.NDArray[np.int64]

_DS, _DIRECT, _ATOMIC = range(3)
_WAVE_BITS, _KIND_BITS = 5, 2
_WAVE_MASK, _KIND_MASK = (1 << _WAVE_BITS) - 1, (1 << _KIND_BITS) - 1
_LINE_BITS = 4
"""Lines of 16 bytes: most accesses only look whether their lines hold anything unknown."""


@dataclass
class _Read:
    """A reading operation that may still be in flight, or unknown to other waves.

    Args:
        offsets: of the lanes that took part, in bytes. waves: of these lanes. number: the operation
            among those of each wave. size: bytes of a lane. low, high: extent in a workgroup's LDS.
        noted: whether the granules hold it.
    """

    offsets: Offsets
    waves: Indices
    number: Numbers
    size: int
    low: int
    high: int
    noted: bool = False


@dataclass(frozen=True)
class _Access:
    """An access of the selected waves, its granules [lanes, granules of a lane]."""

    granules: Offsets
    waves: Indices
    lanes: Lanes
    write: bool
    direct: bool
    atomic: bool
    words: Sequence[Words]


class LdsCheck:
    """Who wrote and read each granule of LDS last.

    A granule holds the last writing operation, packed as number, kind and wave, and the number of
    the last reading operation of each wave; 0 is none. It is as small as the smallest access so
    far: 4 bytes, 2 or 1. At a barrier what is known to all waves is forgotten.
    """

    def __init__(self, machine: Machine) -> None:
        waves = machine.state.waves
        assert machine.waits is not None  # for the type checker
        self._machine, self._waits, self._lds = machine, machine.waits, machine.lds
        self._waves = machine.num_waves
        self._known = {counter: np.zeros(waves, np.int64) for counter in ("lgkm", "vm")}
        self._shift = 2
        size = machine.lds.bytes.size
        self._writer: Numbers = np.zeros(size >> self._shift, np.int64)
        self._unknown: Lanes = np.zeros(size >> _LINE_BITS, np.bool_)
        self._readers: npt.NDArray[np.int32] | None = None
        self._reads: list[_Read] = []
        self._has_direct = False

    def release(self, waves: Indices) -> None:
        """Waves, all of some workgroups, leave a barrier: what they waited for is known."""
        for counter, known in self._known.items():
            known[waves] = self._waits.done[counter][waves]
        known = self._known["lgkm"]
        self._reads = [each for each in self._reads if (each.number > known[each.waves]).any()]
        per_group = self._lds.size >> _LINE_BITS
        unknown = self._unknown.reshape(-1, per_group)
        groups = np.unique(waves // self._waves)
        places, lines = np.nonzero(unknown[groups])
        if not lines.size:
            return
        lines += groups[places] * per_group
        writer = self._writer.reshape(self._unknown.size, -1)
        counters = ("lgkm", "vm") if self._has_direct else ("lgkm",)
        if all(
            (self._known[each][waves] == self._waits.issued[each][waves]).all() for each in counters
        ):
            writer[lines] = 0
            self._unknown[lines] = False
            return
        last = writer[lines]
        by = (lines // per_group * self._waves)[:, None] + (last & _WAVE_MASK)
        left = np.where(self._number(last) > self._known_number(last, by), last, 0)
        writer[lines] = left
        self._unknown[lines] = left.any(1)

    @staticmethod
    def _number(last: Numbers) -> Numbers:
        return last >> (_WAVE_BITS + _KIND_BITS)

    def _known_number(self, last: Numbers, by: Indices) -> Numbers:
        """Number of the last operation of wave `by`, of its kind, that all waves know of."""
        if not self._has_direct:
            return self._known["lgkm"][by]
        direct = (last >> _WAVE_BITS & _KIND_MASK) == _DIRECT
        return np.where(direct, self._known["vm"][by], self._known["lgkm"][by])

    def _refine(self, shift: int) -> None:
        """Make granules smaller."""
        times = 1 << (self._shift - shift)
        self._writer = np.repeat(self._writer, times)
        if self._readers is not None:
            self._readers = np.repeat(self._readers, times, axis=0)
        self._shift = shift

    def access(
        self,
        offsets: Offsets,
        size: int,
        write: bool,
        direct: bool,
        atomic: bool,
        lanes: Lanes | None,
        words: Sequence[Words],
    ) -> None:
        """Check and note an access of the selected waves; see `Machine.lds_access`.

        Args:
            lanes: that take part; None for all.
        """
        if size < 1 << self._shift:
            self._refine(size.bit_length() - 1)
        machine = self._machine
        shape = offsets.shape
        waves = np.broadcast_to(machine.state.indices[:, None], shape)
        if lanes is not None:
            if not lanes.any():
                return
            offsets, waves = offsets[lanes], waves[lanes]
        else:
            lanes = np.ones(shape, np.bool_)
            offsets, waves = offsets.ravel(), waves.ravel()
        first, last = offsets >> _LINE_BITS, (offsets + (size - 1)) >> _LINE_BITS
        risky = bool(self._unknown[first].any()) or bool(self._unknown[last].any())
        if not (risky or write or atomic):
            self._note_read(offsets, waves, size)
            return
        count = max(1, size >> self._shift)
        granules = (offsets >> self._shift)[:, None] + np.arange(count)
        access = _Access(granules, waves[:, None], lanes, write, direct, atomic, words)
        if risky:
            self._check_writer(access)
        if write or atomic:
            self._check_readers(access, offsets, size)
            kind = _DIRECT if direct else _ATOMIC if atomic else _DS
            self._has_direct |= direct
            number = self._waits.issued["vm" if direct else "lgkm"][waves] + 1
            packed = (number << _KIND_BITS | kind) << _WAVE_BITS | machine.wave[waves]
            self._writer[granules] = packed[:, None]
            self._unknown[first] = self._unknown[last] = True
        if not write:
            self._note_read(offsets, waves, size)

    def _note_read(self, offsets: Offsets, waves: Indices, size: int) -> None:
        local = offsets % self._lds.size
        number = self._waits.issued["lgkm"][waves] + 1
        low, high = int(local.min()), int(local.max()) + size
        self._reads.append(_Read(offsets, waves, number, size, low, high))

    def _check_writer(self, access: _Access) -> None:
        """Fail unless the last write is complete, and known to this wave."""
        last = self._writer[access.granules]
        writer = last & _WAVE_MASK
        kind = last >> _WAVE_BITS & _KIND_MASK
        number, me = self._number(last), self._machine.wave[access.waves]
        racing = (number > self._known_number(last, access.waves - me + writer)) & (writer != me)
        if access.atomic:
            racing &= kind != _ATOMIC
        mine, loaded = (writer == me) & (last != 0), kind == _DIRECT
        if access.direct:  # the two paths into LDS keep no order
            racing |= mine & ~loaded & (number > self._waits.done["lgkm"][access.waves])
        else:
            late = mine & loaded & (number > self._waits.done["vm"][access.waves])
            if late.any():
                self._fail(LdsDirectFault, access, late, "is used before vmcnt covers its load")
        if racing.any() and access.words:
            racing &= self._differs(access)
        if racing.any():
            author = int(writer[racing][0])
            verb = "written" if access.write else "used"
            what = f"was written by wave {author} and is {verb} without a barrier, "
            self._fail(LdsRaceFault, access, racing, f"{what}or a wait ahead of it, in between")

    def _check_readers(self, access: _Access, offsets: Offsets, size: int) -> None:
        """Fail unless all reads are complete, and known to this wave."""
        local = offsets % self._lds.size
        low, high = int(local.min()), int(local.max()) + size
        near = [each for each in self._reads if each.low < high and low < each.high]
        if not near:
            return
        readers = self._readers_with(near)[access.granules]
        me = self._machine.wave[access.waves]
        known = self._known["lgkm"].reshape(-1, self._waves)[access.waves // self._waves]
        own = np.arange(self._waves) == me[..., None]
        if access.direct:
            done = self._waits.done["lgkm"][access.waves][..., None]
            late = readers > np.where(own, done, known)
        else:
            late = (readers > known) & ~own
        if access.atomic:  # atomic operations note themselves as readers, too
            kind = self._writer[access.granules] >> _WAVE_BITS & _KIND_MASK
            late &= (kind != _ATOMIC)[..., None]
        bad: Lanes = np.asarray(late.any(-1))
        if bad.any():
            reader = int(np.argwhere(late)[0][-1])
            what = f"is overwritten while wave {reader} may still read it"
            self._fail(LdsRaceFault, access, bad, what)

    def _readers_with(self, reads: Sequence[_Read]) -> npt.NDArray[np.int32]:
        """Numbers of the last reads, [granules, waves of a workgroup], with these ones noted."""
        if self._readers is None:
            self._readers = np.zeros((self._writer.size, self._waves), np.int32)
        for each in reads:
            if not each.noted:
                count = max(1, each.size >> self._shift)
                granules = (each.offsets >> self._shift)[:, None] + np.arange(count)
                wave = self._machine.wave[each.waves][:, None]
                self._readers[granules, wave] = each.number[:, None]
                each.noted = True
        return self._readers

    def _differs(self, access: _Access) -> Lanes:
        """Which granules a store gives another content than they have."""
        size = access.granules.shape[1] << self._shift
        offsets = (access.granules[:, :1] << self._shift) + np.arange(size)
        differs = _bytes_of(access.words, size, access.lanes) != self._lds.bytes[offsets]
        result: Lanes = differs.reshape(*access.granules.shape, -1).any(-1)
        return result

    def stored(
        self, offsets: Offsets, size: int, words: Sequence[Words], lanes: Lanes | None
    ) -> None:
        """Check that LDS holds what each lane stored; `lanes` is None for all."""
        if size >= 4 and lanes is None and not int(np.bitwise_or.reduce(offsets, None)) & 3:
            content: Any = self._lds.bytes.view(np.uint32)
            place = offsets >> 2
            if all((content[place + k] == word).all() for k, word in enumerate(words)):
                return
        lanes = np.ones(offsets.shape, np.bool_) if lanes is None else lanes
        content = self._lds.bytes[offsets[lanes][:, None] + np.arange(size)]
        wrong = content != _bytes_of(words, size, lanes)
        if wrong.any():
            where = np.zeros(lanes.shape, np.bool_)
            where[lanes] = wrong.any(-1)
            what = "one store gives an LDS byte two values"
            self._machine.fault(ConflictingStoreFault, what, where)

    def _fail(self, kind: type[Fault], access: _Access, bad: Lanes, what: str) -> None:
        byte = (int(access.granules[bad][0]) << self._shift) % self._lds.size
        where = np.zeros(access.lanes.shape, np.bool_)
        where[access.lanes] = bad.any(-1)
        self._machine.fault(kind, f"LDS byte {byte:#x} {what}", where)


def _bytes_of(words: Sequence[Words], size: int, lanes: Lanes) -> npt.NDArray[np.uint8]:
    """The bytes that the active lanes store: uint8 [lanes, size]."""
    stacked = np.stack([np.broadcast_to(word, lanes.shape)[lanes] for word in words], -1)
    return stacked.astype("<u4", copy=False).view(np.uint8)[:, :size]
