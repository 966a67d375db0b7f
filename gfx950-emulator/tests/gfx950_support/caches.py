"""Why the cache controls and scopes of a kernel are redundant, where a mutant without one survives.

`watch` notes in one run which instructions use memory of other devices, and what follows each
invalidation of the caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from gfx950emu.coherence import CoherenceCheck
from gfx950emu.program import Instruction

WRITTEN_BACK = "what flags publish is written back without it"
THIS_DEVICE = "orders the accesses of this device alone"
NOTHING_LOADED = "no memory of other devices is loaded before the next invalidation"
UNCHANGED = "the flags do not change while this kernel looks at them"
PROOFS = (WRITTEN_BACK, THIS_DEVICE, NOTHING_LOADED)
"""Reasons from which it follows that one workgroup behaves as before, whatever others do."""


@dataclass
class Watched:
    """What was seen.

    Args:
        shared: instructions that used memory of other devices.
        needed: invalidations behind which such memory is loaded.
    """

    shared: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    _last: dict[int, int] = field(default_factory=dict)

    def reason(self, kind: str, original: Instruction, index: int) -> str | None:
        """Why a mutant survives that changes no order of stores and flags; None if nothing says so.

        Args:
            kind, original, index: of the mutant.
        """
        if kind == "dropped write-back":
            return WRITTEN_BACK
        if kind == "dropped invalidation":
            if "sc0" not in original.modifiers:
                return THIS_DEVICE
            return None if index in self.needed else NOTHING_LOADED
        if index not in self.shared:
            return THIS_DEVICE
        return None if "_atomic_" in original.name else UNCHANGED


@contextlib.contextmanager
def watch() -> Iterator[Watched]:
    """Watch the workgroup that runs inside the block, with checks on."""
    seen = Watched()
    access, load, invalidate = (
        getattr(CoherenceCheck, name) for name in ("access", "_load", "invalidate")
    )

    def note_access(check: Any, offsets: Any, size: int, use: Any, lanes: Any) -> None:
        machine = check._machine
        every = machine.state.active if lanes is None else lanes
        if any(machine.memory.in_shared(offsets, every)):
            seen.shared.add(machine.index)
        access(check, offsets, size, use, lanes)

    def note_load(check: Any, *arguments: Any) -> None:
        seen.needed |= set(seen._last.values())
        load(check, *arguments)

    def note_invalidate(check: Any) -> None:
        for wave in check._machine.state.indices.tolist():
            seen._last[wave] = check._machine.index
        invalidate(check)

    with (
        mock.patch.object(CoherenceCheck, "access", note_access),
        mock.patch.object(CoherenceCheck, "_load", note_load),
        mock.patch.object(CoherenceCheck, "invalidate", note_invalidate),
    ):
        yield seen
