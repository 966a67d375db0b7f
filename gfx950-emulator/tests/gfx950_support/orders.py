"""What the waits and barriers of a gfx950 kernel order, from one run of one workgroup.

`observe` notes the waits, barriers and LDS accesses of each wave, and what stores to LDS change.
From that follows what a run without one of them, or with a weaker one, would order: which
operations a wave's counters would leave in flight longer, and which accesses to LDS would stand in
no order. A wave's path does not depend on the schedule, so neither does the answer.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from gfx950emu.machine import Machine

NOTHING_OUTSTANDING = "nothing outstanding at this wait"
"""Whenever a wave comes to the wait, earlier ones cover all operations that it waits for."""
LATER_WAIT = "a later wait covers it, ahead of the first use"
NO_USE = "nothing uses it before the wave ends"
NO_ACCESSES = "no LDS accesses to order"
"""Without the barrier all accesses of different waves keep the order that they have with it."""
OTHER_BYTES = "orders LDS accesses to different bytes only"
SAME_CONTENT = "orders LDS stores of the same content only"
SAME_VALUE = "stores a value that is already there"
PROOFS = (NOTHING_OUTSTANDING, NO_ACCESSES, OTHER_BYTES)
"""Reasons from which it follows that the mutant behaves as the kernel does.

The others say where the order comes from; that no use is ahead of it, the executor's checks say."""

Counts = Mapping[str, int]
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Wait:
    """A wait that a wave executed: at most `left` may be in flight of those issued so far."""

    index: int
    left: Counts
    issued: Counts


@dataclass(frozen=True)
class _Barrier:
    """A barrier that a wave came to, and how many of its operations were done."""

    index: int
    done: Counts


@dataclass(frozen=True)
class _Access:
    """An LDS access of a wave.

    Args:
        wave: who. passed: barriers that the wave had passed. counter, number: of the operation.
        bytes: that the lanes touch, sorted. write, atomic: what it is.
    """

    wave: int
    passed: int
    counter: str
    number: int
    bytes: Integers
    write: bool
    atomic: bool


@dataclass
class Orders:
    """What was observed; waits and barriers by wave.

    changes: whether a store to LDS changed a byte, by the instruction's index.
    """

    waits: dict[int, list[_Wait]] = field(default_factory=lambda: collections.defaultdict(list))
    barriers: dict[int, list[_Barrier]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    accesses: list[_Access] = field(default_factory=list)
    changes: dict[int, bool] = field(default_factory=dict)

    def reason_for_wait(self, index: int, weakened: str = "") -> str:
        """Why the wait at `index` can be dropped, or the counter `weakened` be one higher."""
        reason = NOTHING_OUTSTANDING
        for waits in self.waits.values():
            same, caught_up = _effect(waits, index, weakened)
            if not caught_up:
                return NO_USE
            if not same:
                reason = LATER_WAIT
        return reason

    def reason_for_barrier(self, index: int) -> str | None:
        """Why the barrier at `index` can be dropped; None if it orders accesses that conflict."""
        before, after = self._ordered(-1), self._ordered(index)
        waves = np.array([each.wave for each in self.accesses])
        lost = before & ~after & (waves[:, None] != waves)
        if not lost.any():
            return NO_ACCESSES
        write = np.array([each.write for each in self.accesses])
        atomic = np.array([each.atomic for each in self.accesses])
        low = np.array([each.bytes[0] for each in self.accesses])
        high = np.array([each.bytes[-1] for each in self.accesses])
        lost &= (write[:, None] | write) & ~(atomic[:, None] & atomic)
        lost &= (low[:, None] <= high) & (low <= high[:, None])
        reason = OTHER_BYTES
        for one, other in np.argwhere(lost):
            first, second = self.accesses[one], self.accesses[other]
            if np.intersect1d(first.bytes, second.bytes, assume_unique=True).size:
                if not (first.write and second.write):
                    return None
                reason = SAME_CONTENT
        return reason

    def reason_for_store(self, index: int) -> str | None:
        """Why the store to LDS at `index` can go elsewhere; None if it changes a byte."""
        return SAME_VALUE if self.changes.get(index) is False else None

    def _ordered(self, dropped: int) -> Bools:
        """Whether access i is ordered ahead of access j of another wave, without a barrier."""
        known = np.full(len(self.accesses), _NEVER)
        issued = np.zeros(len(self.accesses), np.int64)
        ranks: dict[int, Integers] = {}
        done: dict[tuple[int, str], Integers] = {}
        for wave, barriers in self.barriers.items():
            kept = [each.index != dropped for each in barriers]
            ranks[wave] = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
            for counter in ("lgkm", "vm"):
                done[wave, counter] = np.array([each.done[counter] for each in barriers])
        for place, access in enumerate(self.accesses):
            if access.wave not in ranks:  # it comes to no barrier
                continue
            rank = ranks[access.wave]
            issued[place] = rank[access.passed]
            late = int(np.searchsorted(done[access.wave, access.counter], access.number))
            at = rank[max(access.passed, late)]
            if at < rank[-1]:
                known[place] = at
        ordered: Bools = known[:, None] < issued
        return ordered


def _effect(waits: list[_Wait], index: int, weakened: str) -> tuple[bool, bool]:
    """Whether a wave's counters are the same after each wait, and whether after the last one."""
    done: dict[str, int] = collections.defaultdict(int)
    changed: dict[str, int] = collections.defaultdict(int)
    same = True
    for wait in waits:
        left = dict(wait.left)
        _advance(done, left, wait.issued)
        if wait.index == index and weakened:
            left[weakened] += 1
        if wait.index != index or weakened:
            _advance(changed, left, wait.issued)
        same &= all(changed[counter] == number for counter, number in done.items())
    return same, all(changed[counter] == number for counter, number in done.items())


def _advance(done: dict[str, int], left: Counts, issued: Counts) -> None:
    """Note what is done after a wait, as `hazards.WaitCheck` does."""
    for counter, number in left.items():
        name = counter.removesuffix("cnt")
        done[name] = max(done[name], issued[name] - number)
        if counter == "lgkmcnt" and number == 0:
            done["smem"] = issued["smem"]


@contextlib.contextmanager
def observe() -> Iterator[Orders]:
    """Note what the workgroup does that runs inside the block, with checks on."""
    orders = Orders()
    wait, barrier, access = Machine.wait, Machine.barrier, Machine.lds_access

    def counts(machine: Machine, wave: int, which: str) -> Counts:
        assert machine.waits is not None
        return {name: int(each[wave]) for name, each in getattr(machine.waits, which).items()}

    def note_wait(machine: Machine, vmcnt: int | None = None, lgkmcnt: int | None = None) -> None:
        left = {"vmcnt": vmcnt, "lgkmcnt": lgkmcnt}
        given = {name: number for name, number in left.items() if number is not None}
        for wave in machine.state.indices.tolist():
            issued = counts(machine, wave, "issued")
            orders.waits[wave].append(_Wait(machine.index, given, issued))
        wait(machine, vmcnt, lgkmcnt)

    def note_barrier(machine: Machine) -> int:
        for wave in machine.state.indices.tolist():
            done = counts(machine, wave, "done")
            orders.barriers[wave].append(_Barrier(machine.index, done))
        return barrier(machine)

    def note_access(machine: Machine, address: Any, size: int, **options: Any) -> Any:
        offsets = access(machine, address, size, **options)
        lanes = options.get("lanes")
        lanes = machine.state.active if lanes is None else lanes
        if words := options.get("words"):
            stored = np.stack([np.broadcast_to(word, lanes.shape)[lanes] for word in words], -1)
            before = machine.lds.bytes[offsets[lanes][:, None] + np.arange(size)]
            changed = bool((stored.view(np.uint8)[:, :size] != before).any())
            orders.changes[machine.index] = orders.changes.get(machine.index, False) or changed
        counter = "vm" if options.get("direct") else "lgkm"
        for row, wave in enumerate(machine.state.indices.tolist()):
            touched = offsets[row][lanes[row]]
            if touched.size:
                orders.accesses.append(
                    _Access(
                        wave,
                        len(orders.barriers[wave]),
                        counter,
                        counts(machine, wave, "issued")[counter] + 1,
                        np.unique(touched[:, None] + np.arange(size)),
                        bool(options.get("write") or options.get("atomic")),
                        bool(options.get("atomic")),
                    )
                )
        return offsets

    with (
        mock.patch.object(Machine, "wait", note_wait),
        mock.patch.object(Machine, "barrier", note_barrier),
        mock.patch.object(Machine, "lds_access", note_access),
    ):
        yield orders
