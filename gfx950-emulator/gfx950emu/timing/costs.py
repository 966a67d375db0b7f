"""An instruction as the model schedules it: unit, times, registers; decoded once a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..effects import effects, loads_to_lds
from ..program import EXEC, SCALARS, Instruction, Program
from .chip import Chip
from .classes import Unit, classify, lane_bytes, matrix_cycles
from .lds import LANES

_EXEC = frozenset((SCALARS + EXEC, SCALARS + EXEC + 1))


@dataclass(frozen=True)
class Cost:
    """What one instruction asks of the compute unit.

    Args:
        unit: that executes it. cycles: that the unit is busy with it.
        size: bytes that all lanes move. write: whether it writes LDS, or copies to it.
        scaled: an MFMA with scales. beside_mfma: may issue while the matrix core computes.
        registers: read and written. results: written.
        accumulator: registers that an MFMA adds to.
        vector_count, lds_count: counters of a wait, None where it does not wait for them.
        priority: that ``s_setprio`` sets.
    """

    unit: Unit
    cycles: float = 4
    size: int = 0
    write: bool = False
    scaled: bool = False
    beside_mfma: bool = True
    registers: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    accumulator: frozenset[int] = frozenset()
    vector_count: int | None = None
    lds_count: int | None = None
    priority: int = 0


def decode(program: Program, chip: Chip) -> Sequence[Cost]:
    """The costs of all instructions of a program."""
    return [_decode(each, chip) for each in program.instructions]


def _decode(instruction: Instruction, chip: Chip) -> Cost:
    kind, name = classify(instruction.name), instruction.name
    unit, cycles, facts = kind.unit, kind.cycles, effects(instruction)
    accumulator = frozenset[int]()
    size = 0
    if unit is Unit.MFMA:
        cycles = matrix_cycles(instruction)
        accumulator = frozenset(instruction.operands[3].registers)
    elif unit in (Unit.LDS, Unit.LOAD, Unit.STORE):
        size = LANES * lane_bytes(name)
    elif unit is Unit.NOP:
        cycles = chip.issue_cycles * (instruction.operands[0].index + 1)
    copies = unit is Unit.LOAD and loads_to_lds(instruction)
    return Cost(
        unit,
        cycles,
        size,
        write=copies or name.startswith("ds_write"),
        scaled=name.startswith("v_mfma_scale"),
        beside_mfma=kind.beside_mfma,
        registers=(facts.reads | facts.writes) - _EXEC,
        results=facts.writes,
        accumulator=accumulator,
        vector_count=_counter(instruction, "vmcnt"),
        lds_count=_counter(instruction, "lgkmcnt"),
        priority=instruction.operands[0].index if unit is Unit.PRIORITY else 0,
    )


def _counter(instruction: Instruction, name: str) -> int | None:
    return instruction.integer(name) if name in instruction.modifiers else None
