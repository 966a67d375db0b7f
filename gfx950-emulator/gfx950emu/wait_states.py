"""Distances that the hardware requires between dependent instructions.

Most dependencies are interlocked. For some the compiler has to put independent instructions or
``s_nop`` in between: each instruction is one wait state, ``s_nop n`` is n + 1. All paths through
the program are followed, as the compiler does, whether or not they are taken.

Source: LLVM's GCNHazardRecognizer and SISchedule for gfx940; gfx950 needs one more state after
matrix instructions of 4 passes and more, which the code that LLVM emits for it shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .effects import Effects, Unit, loads_to_lds
from .faults import HazardFault, MfmaHazardFault, Place
from .program import EXEC, M0, SCALARS, VCC, Instruction, Operand, Program

_EXEC, _VCC, _M0 = SCALARS + EXEC, SCALARS + VCC, SCALARS + M0
_VALU = (Unit.VALU, Unit.TRANSCENDENTAL)
_VMEM = (Unit.VMEM_LOAD, Unit.VMEM_STORE)
_LANES = re.compile(r"v_(readlane|readfirstlane|writelane)_b32")
_PERMLANE = re.compile(r"v_permlane(16|32)_swap_b32")
_SHAPE = re.compile(r"v_mfma(?:_scale)?_[fi]32_(\d+)x\d+x(\d+)\w*?_(\w+)")

_LOOKBACK = 19
"""Wait states that LLVM keeps after a matrix instruction at most."""

_FARTHEST = {Unit.MFMA: _LOOKBACK, Unit.VALU: 5, Unit.TRANSCENDENTAL: 5}
"""Wait states after which an instruction of a unit affects no other."""
_NEAR = 2
"""The same of all other units."""


def passes(instruction: Instruction) -> int:
    """Passes of a matrix instruction, each of 4 cycles.

    >>> passes(Instruction("v_mfma_f32_32x32x16_bf16"))
    8
    """
    shape = _SHAPE.fullmatch(instruction.name)
    if shape is None:
        raise ValueError(f"{instruction.text}: no matrix instruction of a known shape")
    rows, depth = int(shape[1]), int(shape[2])
    if rows == 4:
        return 2
    if shape[3] == "f8f6f4":
        # Formats 0 and 1 have 8 bits; they take twice the passes of 6 and 4 bits.
        wide = min(instruction.integer("cbsz"), instruction.integer("blgp")) < 2
        return (8 if rows == 16 else 16) // (1 if wide else 2)
    return (4 if rows == 16 else 8) * (2 if depth < 8 else 1)


@dataclass(frozen=True)
class _Fact:
    """An instruction, with the effects that the wait-state rules look at."""

    instruction: Instruction
    effects: Effects

    @property
    def is_valu(self) -> bool:
        """A vector instruction that is no matrix instruction."""
        return self.effects.unit in _VALU

    @property
    def is_memory(self) -> bool:
        return self.effects.unit in (*_VMEM, Unit.LDS)

    @property
    def is_mfma(self) -> bool:
        return self.effects.unit is Unit.MFMA

    @property
    def farthest(self) -> int:
        return _FARTHEST.get(self.effects.unit, _NEAR)

    def operand(self, place: int) -> frozenset[int]:
        """Registers of one operand."""
        return frozenset(self.instruction.operands[place].registers)


def find_hazard(program: Program, effects: Sequence[Effects]) -> HazardFault | None:
    """The first two dependent instructions of a program that stand too close on some path.

    Args:
        effects: of each instruction.
    """
    facts = [
        _Fact(instruction, each)
        for instruction, each in zip(program.instructions, effects, strict=True)
    ]
    successors = [_successors(program, index) for index in range(len(facts))]
    for index, first in enumerate(facts):
        for place, states in _following(successors, index, first.farthest):
            second = facts[place]
            if not _may_depend(first, second):
                continue
            need, why = max(_rules(first, second), default=(0, ""))
            if states < need:
                kind = MfmaHazardFault if first.is_mfma or second.is_mfma else HazardFault
                text, line = second.instruction.text, second.instruction.line
                return kind(
                    Place(program.name, place, text, line),
                    f"needs {need} wait states after +{index} {first.instruction.text}, "
                    f"has {states}: {why}",
                )
    return None


def _following(
    successors: Sequence[Sequence[tuple[int, int]]], index: int, farthest: int
) -> Iterable[tuple[int, int]]:
    """Instructions after `index` on all paths, with the fewest wait states in between."""
    fewest: dict[int, int] = {}
    stack = [(place, 0) for place, _ in successors[index]]
    while stack:
        place, states = stack.pop()
        if states >= farthest or states >= fewest.get(place, farthest):
            continue
        fewest[place] = states
        stack += [(after, states + own) for after, own in successors[place]]
    return fewest.items()


def _successors(program: Program, index: int) -> list[tuple[int, int]]:
    """Instructions that may come next, each with the wait states that this one gives it."""
    instruction, last = program.instructions[index], len(program.instructions) - 1
    if instruction.name == "s_endpgm":
        return []
    own = instruction.operands[0].index + 1 if instruction.name == "s_nop" else 1
    after = [(index + 1, own)] if instruction.name != "s_branch" and index < last else []
    if instruction.target is not None:
        # LLVM counts an s_branch behind a conditional branch also if that one is taken. It may:
        # refilling the instruction buffer takes longer than one state.
        behind = index < last and program.instructions[index + 1].name == "s_branch"
        after.append((program.labels[instruction.target], own + behind))
    return after


def _may_depend(first: _Fact, second: _Fact) -> bool:
    """Whether a rule can hold: it is about a register that one of both writes, or a mode."""
    return (
        not first.effects.writes.isdisjoint(second.effects.touched)
        or not first.effects.reads.isdisjoint(second.effects.writes)
        or first.instruction.name.startswith("s_setreg")
    )


def _rules(first: _Fact, second: _Fact) -> Iterator[tuple[int, str]]:
    """Wait states that two instructions need in between, and why."""
    if first.is_mfma:
        yield from _after_mfma(first, second)
    elif first.is_valu:
        yield from _after_valu(first, second)
    elif "_store_" in first.instruction.name:
        yield from _after_store(first, second)
    elif first.effects.unit is Unit.SALU:
        yield from _after_scalar(first, second)
    if second.instruction.encoding == "dpp" and (
        first.effects.writes & second.effects.reads & frozenset(range(SCALARS))
    ):
        yield 2, "DPP reads the register"


def _after_mfma(first: _Fact, second: _Fact) -> Iterator[tuple[int, str]]:
    result, count = first.effects.writes, passes(first.instruction)
    # float32 inputs are multiplied by another unit, which needs one state less.
    slower = 0 if first.instruction.name.endswith("_f32") else 1
    newer = 1 if slower and count > 2 else 0
    complete = min(count + 2 + slower + newer, _LOOKBACK)
    if second.is_mfma:
        accumulator = second.operand(3)
        if result & (second.effects.reads - accumulator):
            yield complete, "a matrix operand is its result"
        if result & accumulator:
            if accumulator == first.operand(0):
                yield (2 if count == 2 else 0), "it accumulates onto the result"
            else:
                yield count + 2 * slower, "the accumulator overlaps its result"
        return
    if not (second.is_valu or second.is_memory):
        return
    if result & second.effects.reads:
        yield complete, "it reads the result"
    if result & second.effects.writes:
        yield complete, "it overwrites the result"
    if first.operand(3) & second.effects.writes and slower:
        yield count - 1, "it overwrites the accumulator"


def _after_valu(first: _Fact, second: _Fact) -> Iterator[tuple[int, str]]:
    written, read = first.effects.writes, second.effects.reads
    scalars = frozenset(register for register in written if register >= SCALARS)
    vectors = written - scalars
    name = second.instruction.name
    if scalars & read and second.effects.unit in _VMEM and scalars & read != {_EXEC, _EXEC + 1}:
        yield 5, "a memory instruction reads the scalar register"
    if second.is_mfma:
        if vectors & read:
            yield 2, "a matrix operand is its result"
        if _EXEC in scalars:
            yield 4, "EXEC changes ahead of a matrix instruction"
    if not second.is_valu:
        return
    if name.startswith("v_div_fmas") and _VCC in scalars:
        yield 4, "v_div_fmas reads vcc"
    if (scalars - {_EXEC, _EXEC + 1}) & read:
        yield 2, "a vector instruction reads the scalar register"
    quick = first.effects.unit is Unit.VALU or second.effects.unit is Unit.TRANSCENDENTAL
    if vectors & read and not quick:
        yield 1, "the result of a transcendental is read"
    if vectors & read and _writes_part(first.instruction):
        yield 1, "a register of which it writes a part is read"
    if _LANES.fullmatch(name):
        if vectors & read and not name.startswith("v_writelane"):
            yield 1, "a lane of the register is read"
        if _EXEC in scalars:
            yield 4, "EXEC changes ahead of a lane access"
        if len(second.instruction.operands) > 2 and scalars & second.operand(2):
            yield 4, "the lane's number is its result"
    if _PERMLANE.fullmatch(name):
        if vectors & read:
            yield 2, "lanes of the register are swapped"
        if _EXEC in scalars:
            yield 4, "EXEC changes ahead of a swap of lanes"
    if second.instruction.encoding == "dpp" and _EXEC in scalars:
        yield 5, "EXEC changes ahead of DPP"


def _writes_part(instruction: Instruction) -> bool:
    """Whether a vector instruction writes a byte or a half of its destination by selection."""
    if instruction.encoding == "sdwa":
        return instruction.modifiers.get("dst_sel", "DWORD") != "DWORD"
    if instruction.name.startswith(("v_pk_", "v_mfma")):
        return False
    selected = instruction.modifiers.get("op_sel")
    sources = len(instruction.operands) - 1
    return isinstance(selected, tuple) and len(selected) > sources and bool(selected[sources])


def _after_store(first: _Fact, second: _Fact) -> Iterator[tuple[int, str]]:
    """Stores of more than 8 bytes read their data late."""
    operands = first.instruction.operands
    buffer = first.instruction.name.startswith("buffer")
    data: Operand = operands[0 if buffer else 1]
    if buffer and operands[-1].kind == "s":
        return
    if data.count > 2 and second.is_valu and frozenset(data.registers) & second.effects.writes:
        yield 2, "it overwrites the data of a store"


def _after_scalar(first: _Fact, second: _Fact) -> Iterator[tuple[int, str]]:
    if _M0 in first.effects.writes and loads_to_lds(second.instruction):
        yield 1, "a load to LDS reads m0"
    if first.instruction.name.startswith("s_setreg"):
        register = first.instruction.modifiers.get("hwreg")
        same = register == second.instruction.modifiers.get("hwreg")
        if same and second.instruction.name.startswith(("s_getreg", "s_setreg")):
            yield 2, "it uses the same hardware register"
