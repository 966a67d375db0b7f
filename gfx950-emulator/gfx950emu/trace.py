"""What one wave executed, for cycle models."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .memory import Offsets
from .state import Lanes

_BANKS = 64
_BANK_BYTES = 4
_PHASE_BYTES = _BANKS * _BANK_BYTES
"""Bytes that the LDS serves in a cycle without conflicts."""
_WIDE = 16
_WIDE_READ = np.array(
    [
        half + 4 * quad + lane
        for half in (0, 32)
        for quad in (0, 3, 5, 6, 1, 2, 4, 7)
        for lane in range(4)
    ]
)
"""Lanes in the order in which ``ds_read_b128`` serves them, 16 in a cycle (AMD's kernel
optimization guide in nod-ai/amd-shark-ai, MI350). Others go in the order of the lanes."""
_HALF_LINE = 64
"""Bytes of half a cache line, the unit in which memory is read."""


@dataclass
class WaveTrace:
    """One wave's path through a kernel.

    Args:
        workgroup: number in the launch. wave: number in the workgroup.
        instructions: indices of the instructions in the order of execution.
        bank_cycles: cycles of the 64 LDS banks, by position in `instructions`.
        half_lines: 64-byte half lines of global memory (offset // 64), by position in
            `instructions`.
    """

    workgroup: int
    wave: int
    instructions: list[int] = field(default_factory=list)
    bank_cycles: dict[int, int] = field(default_factory=dict)
    half_lines: dict[int, Offsets] = field(default_factory=dict)

    def note_banks(self, addresses: Offsets, active: Lanes, size: int, write: bool) -> None:
        """Add the bank cycles of an LDS access; several of one instruction add up."""
        if size == _WIDE and not write:
            addresses, active = addresses[_WIDE_READ], active[_WIDE_READ]
        lanes = max(1, _PHASE_BYTES // max(size, _BANK_BYTES))
        words = np.arange(max(1, size // _BANK_BYTES))
        cycles = 0
        for first in range(0, addresses.size, lanes):
            phase = slice(first, first + lanes)
            rows = addresses[phase][active[phase]] // _BANK_BYTES
            if rows.size:
                cycles += int(np.bincount(np.unique(rows[:, None] + words) % _BANKS).max())
        position = len(self.instructions) - 1
        self.bank_cycles[position] = self.bank_cycles.get(position, 0) + cycles

    def note_lines(self, offsets: Offsets, size: int) -> None:
        """Add the half lines that an access to global memory touches."""
        lines = np.union1d(offsets // _HALF_LINE, (offsets + size - 1) // _HALF_LINE)
        position = len(self.instructions) - 1
        self.half_lines[position] = np.union1d(self.half_lines.get(position, lines), lines)
