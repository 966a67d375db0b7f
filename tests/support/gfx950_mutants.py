"""Mutants of gfx950 kernels: one instruction is changed, and the executor has to notice.

`capture` records the launches of a call. `mutants` lists what can be changed: waits, barriers,
cache controls and scopes dropped or weakened, scale bytes, operands and LDS offsets exchanged.
`Trial.judge` runs a mutant:

* "fault": a check of the executor names it,
* "wrong": the outputs differ,
* "survived": neither, in the lowest schedule, with LDS that holds zeros at the start, and in
  `RANDOM_RUNS` random schedules.

A wait or barrier that survives is redundant for this problem: something else orders the accesses,
and `Trial.reason` says what. A store to LDS that can go elsewhere stores what is already there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

from gfx950_support.caches import Watched, watch
from gfx950_support.orders import Orders, observe
from gfx950emu import CodeObject, Fault, Reachable, Report, machine, run
from gfx950emu.effects import effects
from gfx950emu.instructions import bind
from gfx950emu.machine import Executable
from gfx950emu.memory import Lds
from gfx950emu.program import Instruction, Operand
from mxpert.testing.gfx950 import emulate

_T = TypeVar("_T")

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
        reachable: memory behind pointers. Then arguments are no copies, as addresses have to stay.
    """

    name: str
    code: CodeObject
    grid: tuple[int, ...]
    arguments: Mapping[str, Any] = field(repr=False)
    binary: bytes = field(repr=False)
    reachable: tuple[Reachable, ...] = field(default=(), repr=False)

    @functools.cached_property
    def _content(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """The memory of a launch with pointers in memory, and what it held before."""
        tensors = [each.tensor for each in self.reachable]
        tensors += [each for each in self.arguments.values() if isinstance(each, torch.Tensor)]
        storages = {each.data_ptr(): each for each in map(torch.Tensor.untyped_storage, tensors)}
        return [(each, each.clone()) for each in storages.values()]

    def run(self, code: CodeObject, **options: Any) -> tuple[list[torch.Tensor], Report]:
        """Run the first workgroup; returns the bytes of all memory after it, and the report."""
        arguments: Mapping[str, Any] = self.arguments
        if self.reachable:
            for storage, content in self._content:
                storage.copy_(content)
            storages = [storage for storage, _ in self._content]
        else:
            arguments = copied(arguments)
            tensors = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
            storages = [each.untyped_storage() for each in tensors]
        report = run(code, (1,), arguments, reachable=self.reachable, **options)
        made = [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages]
        return [each.clone() for each in made] if self.reachable else made, report


class _CapturedError(Exception):
    """The last launch that is wanted was captured."""


@contextlib.contextmanager
def capture(names: tuple[str, ...] = (), count: int = 0) -> Iterator[list[Launch]]:
    """Emulate the ops called inside the block, and yield a list of their launches.

    Args:
        names: how names of kernels begin. count: launches of them after which the block is left,
            the last of them without executing it; 0 for never.
    """
    launches: list[Launch] = []

    def spy(compiled: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        code = CodeObject.of(compiled)
        name = code.executable.program.name
        launches.append(Launch(name, code, grid, copied(arguments), compiled.asm["hsaco"]))
        if count and sum(each.name.startswith(names) for each in launches) == count:
            raise _CapturedError
        return execute(compiled, grid, arguments)

    with contextlib.suppress(_CapturedError), emulate() as emulation:
        execute = emulation.run
        with mock.patch.object(emulation, "run", spy):
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
        original: the instruction as it was listed. modifier: the one that is changed, or "".
    """

    kind: str
    index: int
    instruction: Instruction
    original: Instruction
    modifier: str = ""

    @property
    def label(self) -> str:
        """Place and change: "191 s_waitcnt lgkmcnt(0): weakened wait of lgkmcnt"."""
        of = f" of {self.modifier}" if self.modifier else ""
        return f"{self.index} {self.original.text}: {self.kind}{of}"


_Change = tuple[Instruction, str]
"""The changed instruction, and the modifier that is changed."""

_NOP = Instruction("s_nop", operands=(Operand("c", 0),), text="s_nop 0")


def _modified(instruction: Instruction, modifier: str, value: Any) -> _Change:
    return replace(instruction, modifiers={**instruction.modifiers, modifier: value}), modifier


def _waits(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    if instruction.name != "s_waitcnt":
        return
    yield "dropped wait", (_NOP, "")
    for counter in instruction.modifiers:
        later = instruction.integer(counter) + 1
        yield "weakened wait", _modified(instruction, counter, later)


def _barriers(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    if instruction.name == "s_barrier":
        yield "dropped barrier", (_NOP, "")


def _caches(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    """Cache controls; the scope of what looks at flags (loads) and sets them (atomics)."""
    name, scope = instruction.name, {"sc0", "sc1"} & instruction.modifiers.keys()
    if name in ("buffer_wbl2", "buffer_inv"):
        kind = "dropped write-back" if name == "buffer_wbl2" else "dropped invalidation"
        yield kind, (_NOP, "")
    elif "sc1" in scope and name.startswith(("global_", "buffer_")):
        dropped = {"sc1"} if "_atomic_" in name else scope
        kept = {key: value for key, value in instruction.modifiers.items() if key not in dropped}
        yield "narrow scope", (replace(instruction, modifiers=kept), "sc1")


def _scale_bytes(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    """Bits of the byte numbers: op_sel is the low one, op_sel_hi the high one; A's, then B's."""
    if not instruction.name.startswith("v_mfma_scale"):
        return
    for name in ("op_sel", "op_sel_hi"):
        bits = instruction.integers(name, (0, 0, 0))
        for place, operand in enumerate(("A", "B")):
            flipped = tuple(bit ^ (place == at) for at, bit in enumerate(bits))
            yield f"scale byte of {operand}", _modified(instruction, name, flipped)


def _operands(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    """A scaled MFMA has D, A, B, C, the scale of A and the scale of B."""
    if not instruction.name.startswith("v_mfma_scale"):
        return
    d, a, b, c, a_scale, b_scale = instruction.operands
    swapped = replace(instruction, operands=(d, a, b, c, b_scale, a_scale))
    yield "swapped scales", (swapped, "")
    if a.count == b.count:
        swapped = replace(instruction, operands=(d, b, a, c, a_scale, b_scale))
        yield "swapped operands", (swapped, "")


def _lds_offsets(instruction: Instruction) -> Iterator[tuple[str, _Change]]:
    if not instruction.name.startswith(("ds_read", "ds_write")):
        return
    name = "offset0" if "offset1" in instruction.modifiers else "offset"
    step = 1 if name == "offset0" else LDS_SHIFT
    yield "LDS offset", _modified(instruction, name, instruction.integer(name) + step)


_CHANGES = (_waits, _barriers, _caches, _scale_bytes, _operands, _lds_offsets)

OF_CACHES = ("dropped write-back", "dropped invalidation", "narrow scope")
SOME_SURVIVE = ("dropped wait", "weakened wait", "dropped barrier", "LDS offset", *OF_CACHES)
"""Kinds whose mutants can be redundant: something else orders the accesses, or a store changes
nothing."""


def mutants(executable: Executable) -> list[Mutant]:
    """All mutants of a kernel, in the order of its listing."""
    return [
        Mutant(kind, index, changed, instruction, modifier)
        for index, instruction in enumerate(executable.program.instructions)
        for change in _CHANGES
        for kind, (changed, modifier) in change(instruction)
    ]


def changed(code: CodeObject, mutant: Mutant) -> CodeObject:
    """A code object with the mutant's instruction; the other ones stay bound."""
    original = code.executable

    def with_mutant(members: Sequence[_T], member: _T) -> tuple[_T, ...]:
        return (*members[: mutant.index], member, *members[mutant.index + 1 :])

    instructions = with_mutant(original.program.instructions, mutant.instruction)
    executable = Executable(replace(original.program, instructions=instructions))
    vars(executable).update(
        bound=with_mutant(original.bound, bind(mutant.instruction, original.program)),
        effects=with_mutant(original.effects, effects(mutant.instruction)),
    )
    return replace(code, executable=executable)


def digest(executable: Executable) -> str:
    """SHA-256 of a kernel's instructions, without their source lines."""
    texts = "\n".join(each.text for each in executable.program.instructions)
    return hashlib.sha256(texts.encode()).hexdigest()


@contextlib.contextmanager
def zeroed_lds() -> Iterator[None]:
    """Let LDS hold zeros at the start instead of random bytes; a kernel may find either.

    Random bytes can hide a moved offset: the portable prefill kernel asks whether any row of its
    tile is real, through a maximum over waves in LDS, and words that nobody wrote say yes, too.
    """

    def zeros(workgroups: int, size: int, garbage: np.random.Generator) -> Lds:
        lds = Lds(workgroups, size, garbage)
        lds.bytes[:] = 0
        return lds

    with mock.patch.object(machine, "Lds", zeros):
        yield


class Trial:
    """Judges the mutants of one launch, of which the first workgroup is run.

    Args:
        launch: the launch, with a grid of one axis.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.expected, report = self.launch.run(launch.code)
        self.mutants = [
            each for each in mutants(launch.code.executable) if report.executed[each.index]
        ]

    def judge(self, mutant: Mutant) -> str:
        """ "fault", "wrong" or "survived"."""
        code = changed(self.launch.code, mutant)
        schedules: list[dict[str, Any]] = [{}, {}]
        schedules += [{"schedule": "random", "seed": seed} for seed in range(RANDOM_RUNS)]
        for place, options in enumerate(schedules):
            try:
                with zeroed_lds() if place == 1 else contextlib.nullcontext():
                    found, _ = self.launch.run(code, **options)
            except Fault:
                return "fault"
            if not all(map(torch.equal, found, self.expected)):
                return "wrong"
        return "survived"

    @functools.cached_property
    def orders(self) -> Orders:
        """What the kernel's waits and barriers order."""
        with observe() as orders:
            self.launch.run(self.launch.code)
        return orders

    @functools.cached_property
    def caches(self) -> Watched:
        """What the kernel's cache controls and scopes order."""
        with watch() as watched:
            self.launch.run(self.launch.code)
        return watched

    def reason(self, mutant: Mutant) -> str | None:
        """Why what a mutant lacks is redundant if it survives; None if nothing says so."""
        before, after = self.launch.code.executable, changed(self.launch.code, mutant).executable
        if before.unordered != after.unordered:  # a flag may overtake what it publishes
            return None
        if mutant.kind in OF_CACHES:
            return self.caches.reason(mutant.kind, mutant.original, mutant.index)
        if mutant.kind == "LDS offset":
            return self.orders.reason_for_store(mutant.index)
        if mutant.kind == "dropped barrier":
            return self.orders.reason_for_barrier(mutant.index)
        if mutant.kind in SOME_SURVIVE:
            return self.orders.reason_for_wait(mutant.index, mutant.modifier)
        return None


def tally(judged: Iterable[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Number of mutants by kind and verdict, of pairs of both."""
    counts: dict[str, dict[str, int]] = {}
    for kind, verdict in judged:
        row = counts.setdefault(kind, {"fault": 0, "wrong": 0, "survived": 0})
        row[verdict] += 1
    return counts


def sample(found: list[Mutant], count: int | None) -> list[Mutant]:
    """Up to `count` mutants of each kind, evenly spaced in the listing; None for all."""
    if count is None:
        return found
    kinds: dict[str, list[Mutant]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    return [
        members[(2 * place + 1) * len(members) // (2 * min(count, len(members)))]
        for members in kinds.values()
        for place in range(min(count, len(members)))
    ]
