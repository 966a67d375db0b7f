"""Mutants of gfx950 kernels: one instruction is changed, and the executor has to notice.

`capture` records the launches of a call. `mutants` lists what can be changed: waits and barriers
dropped or weakened, scale bytes, operands and LDS offsets exchanged. `Trial.judge` runs a mutant:

* "fault": a check of the executor names it,
* "wrong": the outputs differ,
* "survived": neither, in the lowest schedule and in `RANDOM_RUNS` random ones.

A wait or barrier that survives is redundant for this problem: something else orders the accesses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from mxpert.testing.gfx950 import CodeObject, Fault, Report, emulate, emulation, run
from mxpert.testing.gfx950.machine import Executable
from mxpert.testing.gfx950.program import Instruction, Operand

RANDOM_RUNS = 3
"""Random schedules in which a mutant must give the same bits to count as redundant."""

LDS_SHIFT = 16
"""Bytes by which the offset of an LDS access is moved."""


@dataclass(frozen=True)
class Launch:
    """A launch that was made, with copies of its arguments from before.

    Args:
        name: of the kernel. code: its code object. grid: workgroups.
        arguments: by name; tensors are copies, those of one storage share one.
        binary: its ELF file.
    """

    name: str
    code: CodeObject
    grid: tuple[int, ...]
    arguments: Mapping[str, Any] = field(repr=False)
    binary: bytes = field(repr=False)


@contextlib.contextmanager
def capture() -> Iterator[list[Launch]]:
    """Emulate the ops called inside the block, and yield a list of their launches."""
    launches: list[Launch] = []

    def spy(
        compiled: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any
    ) -> Any:
        code = CodeObject.of(compiled)
        name = code.executable.program.name
        launches.append(Launch(name, code, grid, copied(arguments), compiled.asm["hsaco"]))
        return run(compiled, grid, arguments, **options)

    with mock.patch.object(emulation, "run", spy), emulate():
        yield launches


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with copies of their tensors; tensors of one storage share the copy."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            clone = storages.setdefault(storage.data_ptr(), storage.clone())
            made = torch.empty(0, dtype=value.dtype)
            value = made.set_(clone, value.storage_offset(), value.shape, value.stride())
        copies[name] = value
    return copies


@dataclass(frozen=True)
class Mutant:
    """A change of one instruction.

    Args:
        kind: what is changed. index: of the instruction. instruction: its replacement.
        text: the instruction as it was listed.
    """

    kind: str
    index: int
    instruction: Instruction
    text: str

    @property
    def label(self) -> str:
        """Kind and original text, by which survivors are recorded."""
        return f"{self.kind}: {self.text}"


_NOP = Instruction("s_nop", operands=(Operand("c", 0),), text="s_nop 0")


def _waits(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    if instruction.name != "s_waitcnt":
        return
    yield "dropped wait", _NOP
    for counter in instruction.modifiers:
        later = instruction.integer(counter) + 1
        yield (
            "weakened wait",
            replace(instruction, modifiers={**instruction.modifiers, counter: later}),
        )


def _barriers(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    if instruction.name == "s_barrier":
        yield "dropped barrier", _NOP


def _scale_bytes(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    """Bits of the byte numbers: op_sel is the low one, op_sel_hi the high one; A's, then B's."""
    if not instruction.name.startswith("v_mfma_scale"):
        return
    for name in ("op_sel", "op_sel_hi"):
        bits = instruction.integers(name, (0, 0, 0))
        for place, operand in enumerate(("A", "B")):
            flipped = tuple(bit ^ (place == at) for at, bit in enumerate(bits))
            yield (
                f"scale byte of {operand}",
                replace(instruction, modifiers={**instruction.modifiers, name: flipped}),
            )


def _operands(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    """A scaled MFMA has D, A, B, C, the scale of A and the scale of B."""
    if not instruction.name.startswith("v_mfma_scale"):
        return
    d, a, b, c, a_scale, b_scale = instruction.operands
    yield "swapped scales", replace(instruction, operands=(d, a, b, c, b_scale, a_scale))
    if a.count == b.count:
        yield "swapped operands", replace(instruction, operands=(d, b, a, c, a_scale, b_scale))


def _lds_offsets(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    if not instruction.name.startswith(("ds_read", "ds_write")):
        return
    name = "offset0" if "offset1" in instruction.modifiers else "offset"
    step = 1 if name == "offset0" else LDS_SHIFT
    moved = {**instruction.modifiers, name: instruction.integer(name) + step}
    yield "LDS offset", replace(instruction, modifiers=moved)


_CHANGES = (_waits, _barriers, _scale_bytes, _operands, _lds_offsets)

SOME_SURVIVE = ("dropped wait", "weakened wait", "dropped barrier")
"""Kinds whose mutants can be redundant, because something else orders the accesses."""


def mutants(executable: Executable) -> list[Mutant]:
    """All mutants of a kernel, in the order of its listing."""
    return [
        Mutant(kind, index, changed, instruction.text)
        for index, instruction in enumerate(executable.program.instructions)
        for change in _CHANGES
        for kind, changed in change(instruction)
    ]


def changed(code: CodeObject, mutant: Mutant) -> CodeObject:
    """A code object with the mutant's instruction."""
    instructions = list(code.executable.program.instructions)
    instructions[mutant.index] = mutant.instruction
    program = replace(code.executable.program, instructions=tuple(instructions))
    return replace(code, executable=Executable(program))


class Trial:
    """Judges the mutants of one launch, of which the first workgroups are run.

    Args:
        launch: the launch. workgroups: how many of its first axis.
    """

    def __init__(self, launch: Launch, workgroups: int = 1) -> None:
        self.launch = launch
        self.grid = (min(workgroups, launch.grid[0]), *launch.grid[1:])
        self.expected, report = self._run(launch.code)
        self.executed = report.executed
        self.mutants = [
            each for each in mutants(launch.code.executable) if self.executed[each.index]
        ]

    def _run(self, code: CodeObject, **options: Any) -> tuple[list[torch.Tensor], Report]:
        """Bytes of all tensors after a run, and its report."""
        arguments = copied(self.launch.arguments)
        report = run(code, self.grid, arguments, **options)
        storages = [
            each.untyped_storage() for each in arguments.values() if isinstance(each, torch.Tensor)
        ]
        return [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages], report

    def judge(self, mutant: Mutant) -> str:
        """ "fault", "wrong" or "survived"."""
        code = changed(self.launch.code, mutant)
        schedules: list[dict[str, Any]] = [{}]
        schedules += [{"schedule": "random", "seed": seed} for seed in range(RANDOM_RUNS)]
        for options in schedules:
            try:
                found, _ = self._run(code, **options)
            except Fault:
                return "fault"
            if not all(map(torch.equal, found, self.expected)):
                return "wrong"
        return "survived"


def tally(judged: Iterable[tuple[Mutant, str]]) -> dict[str, dict[str, int]]:
    """Number of mutants by kind and verdict."""
    counts: dict[str, dict[str, int]] = {}
    for mutant, verdict in judged:
        row = counts.setdefault(mutant.kind, {"fault": 0, "wrong": 0, "survived": 0})
        row[verdict] += 1
    return counts


def sample(found: list[Mutant], count: int) -> list[Mutant]:
    """Up to `count` mutants of each kind, evenly spaced in the listing."""
    kinds: dict[str, list[Mutant]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    return [
        members[(2 * place + 1) * len(members) // (2 * min(count, len(members)))]
        for members in kinds.values()
        for place in range(min(count, len(members)))
    ]
