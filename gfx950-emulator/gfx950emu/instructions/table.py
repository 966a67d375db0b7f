"""The table of mnemonics, and the view that an entry has of the instruction that it binds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import message
from ..program import Instruction, Modifier, Operand, Program

if TYPE_CHECKING:
    from ..machine import Machine

Run = Callable[["Machine"], "int | None"]
"""Executes one instruction for the selected waves. Returns None (go on with the next instruction),
the index of the instruction to go on with, or `machine.STORED`."""


class UnknownInstructionError(ValueError):
    """The executor has no semantics for a mnemonic, an encoding, a modifier or a mode."""

    def __init__(self, text: str, need: str, got: object) -> None:
        super().__init__(message("gfx950", text, need, got, "add it to gfx950emu.instructions"))


class Decoding:
    """An instruction while it is bound to its semantics.

    Operands and modifiers that its table entry does not read are refused at the end.

    Args:
        instruction: what to bind. program: gives the places of labels.
    """

    def __init__(self, instruction: Instruction, program: Program) -> None:
        self.instruction, self.program = instruction, program
        self.name, self.operands = instruction.name, instruction.operands
        self._modifiers = dict(instruction.modifiers)
        self._places = set(range(len(instruction.operands)))
        self._encoding_used = instruction.encoding in ("", "e32", "e64")

    def unknown(self, need: str, got: object) -> UnknownInstructionError:
        """The error of something that the executor does not support."""
        return UnknownInstructionError(self.instruction.text, need, got)

    @property
    def encoding(self) -> str:
        """The encoding. An entry that does not read it supports plain, e32 and e64 alone."""
        self._encoding_used = True
        return self.instruction.encoding

    def take(self, name: str, default: Modifier) -> Modifier:
        """A modifier's value, which then counts as served."""
        return self._modifiers.pop(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        """A modifier that is a number."""
        value = self.take(name, default)
        if not isinstance(value, int):
            raise self.unknown(f"a number as {name}", repr(value))
        return value

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A modifier that is a list; missing entries at the end are those of the default."""
        value = self.take(name, default)
        if not isinstance(value, tuple) or len(value) > len(default):
            raise self.unknown(f"at most {len(default)} numbers as {name}", repr(value))
        return value + default[len(value) :]

    def ignore(self, *names: str) -> None:
        """Serve modifiers that change no result (cache policy)."""
        for name in names:
            self._modifiers.pop(name, None)

    def operand(self, place: int, kinds: str = "vsc") -> Operand:
        """An operand, which then counts as served. `kinds` as in `Operand`, "off" as "o"."""
        if place >= len(self.operands):
            raise self.unknown(f"{place + 1} operands", len(self.operands))
        self._places.discard(place)
        operand = self.operands[place]
        if operand.kind[0] not in kinds:
            raise self.unknown(f"operand {place} of a kind in {kinds!r}", operand.kind)
        return operand

    def destination(self, place: int = 0, kinds: str = "v") -> int:
        """Number of the first register of an operand that is written (or read as data)."""
        operand = self.operand(place, kinds)
        if operand.neg or operand.absolute or operand.sext:
            raise self.unknown(f"no source modifier on operand {place}", operand)
        return operand.index

    def finish(self) -> None:
        """Refuse what no entry has asked for."""
        if not self._encoding_used:
            raise self.unknown("an encoding e32 or e64", self.instruction.encoding)
        if self._modifiers:
            raise self.unknown("no further modifier", sorted(self._modifiers))
        if self._places:
            raise self.unknown("fewer operands", len(self.operands))


Binder = Callable[[Decoding], Run]

TABLE: dict[str, Binder] = {}
"""What each mnemonic does, filled by the chapters."""


def chapter(entries: Mapping[str, Binder]) -> None:
    """Add a chapter's mnemonics to the table."""
    twice = entries.keys() & TABLE.keys()
    if twice:
        raise ValueError(message("gfx950", "table", "each mnemonic once", sorted(twice)))
    TABLE.update(entries)
