"""An instruction as the model schedules it: unit, times, registers; decoded once a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..program import Instruction, Program
from .chip import Chip
from .classes import Unit, classify, lane_bytes, matrix_cycles, results

LANES = 64


@dataclass(frozen=True)
class Cost:
    """What one instruction asks of the compute unit.

    Args:
        unit: that executes it. cycles: that the unit is busy with it.
        size: bytes that all lanes move. writes_lds: whether LDS takes those bytes.
        beside_mfma: may issue while the matrix core is busy.
        sources, results: registers read and written. accumulator: registers that an MFMA adds to.
        vector_count, lds_count: counters of a wait, None where it does not wait for them.
        priority: that ``s_setprio`` sets.
    """

    unit: Unit
    cycles: float = 4
    size: int = 0
    writes_lds: bool = False
    beside_mfma: bool = True
    sources: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    accumulator: frozenset[int] = frozenset()
    vector_count: int | None = None
    lds_count: int | None = None
    priority: int = 0


def decode(program: Program, chip: Chip) -> Sequence[Cost]:
    """The costs of all instructions of a program."""
    return [_decode(each, chip) for each in program.instructions]


def _decode(instruction: Instruction, chip: Chip) -> Cost:
    kind = classify(instruction.name)
    unit, cycles = kind.unit, kind.cycles
    written = results(instruction)
    size, accumulator = 0, frozenset[int]()
    vector_count = lds_count = None
    if unit is Unit.MFMA:
        cycles = matrix_cycles(instruction)
        accumulator = frozenset(instruction.operands[3].registers)
    elif unit in (Unit.LDS, Unit.LOAD, Unit.STORE):
        size = LANES * lane_bytes(instruction.name)
    elif unit is Unit.NOP:
        cycles = chip.issue_cycles * (instruction.operands[0].index + 1)
    elif unit is Unit.WAIT:
        vector_count = _counter(instruction, "vmcnt")
        lds_count = _counter(instruction, "lgkmcnt")
    return Cost(
        unit,
        cycles,
        size,
        _writes_lds(instruction, unit),
        kind.beside_mfma,
        _sources(instruction, written),
        written,
        accumulator,
        vector_count,
        lds_count,
        instruction.operands[0].index if unit is Unit.PRIORITY else 0,
    )


def _writes_lds(instruction: Instruction, unit: Unit) -> bool:
    if unit is Unit.LDS:
        return instruction.name.startswith("ds_write")
    return "lds" in instruction.modifiers or "load_lds" in instruction.name


def _counter(instruction: Instruction, name: str) -> int | None:
    return instruction.integer(name) if name in instruction.modifiers else None


def _sources(instruction: Instruction, written: frozenset[int]) -> frozenset[int]:
    """Registers that must be ready: all that are read, and those that are overwritten."""
    return frozenset(instruction.registers) | written
