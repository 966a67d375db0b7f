"""The bits of an instruction, and the operands that its fields stand for.

Source: AMD Instinct CDNA4 ISA, section 12 (operand fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .program import ACCUMULATORS, EXEC, M0, Instruction, Modifier, Operand

LITERAL, SDWA, DPP = 255, 249, 250
"""Values of a 9-bit source: a dword follows, which is a constant or describes the source."""
VECTOR = 256
"""First vector register among the 9-bit sources."""
_INLINE_FLOATS = {
    240: 0x3F000000,
    241: 0xBF000000,
    242: 0x3F800000,
    243: 0xBF800000,
    244: 0x40000000,
    245: 0xC0000000,
    246: 0x40800000,
    247: 0xC0800000,
    248: 0x3E22F983,
}
_SCALARS = frozenset((*range(108), M0, EXEC, EXEC + 1))
"""Scalar registers, VCC among them."""
Modifiers = dict[str, Modifier]


@dataclass(frozen=True)
class Word:
    """The bits of an instruction, the first dword lowest."""

    value: int

    def field(self, high: int, low: int) -> int:
        return self.value >> low & ((1 << high - low + 1) - 1)

    def flag(self, place: int) -> bool:
        return bool(self.value >> place & 1)


def scalar(number: int, size: int) -> Operand:
    """A scalar register that programs use; others raise a KeyError."""
    if number not in _SCALARS:
        raise KeyError(f"scalar register {number}")
    return Operand("s", number, size)


def vector(number: int, size: int, accumulator: bool = False) -> Operand:
    """A vector register, or the accumulator of that number."""
    return Operand("v", number + ACCUMULATORS * accumulator, size)


def source(
    number: int,
    size: int,
    literal: int | None = None,
    *,
    neg: bool = False,
    absolute: bool = False,
    accumulator: bool = False,
) -> Operand:
    """A source of 9 bits: a register, an inline constant, or the literal that follows."""
    if number >= VECTOR:
        index = number - VECTOR + ACCUMULATORS * accumulator
        return Operand("v", index, size, neg, absolute)
    if number in _SCALARS:
        return Operand("s", number, size, neg, absolute)
    if 128 <= number <= 208:
        return Operand("c", number - 128 if number <= 192 else 192 - number, 1, neg, absolute)
    if number in _INLINE_FLOATS:
        return Operand("c", _INLINE_FLOATS[number], 0, neg, absolute)
    if number == LITERAL and literal is not None:
        return Operand("c", literal, 1, neg, absolute)
    raise KeyError(f"source {number}")


def made(
    name: str, operands: list[Operand], modifiers: Modifiers | None = None, encoding: str = ""
) -> Instruction:
    """An instruction without a target and a text."""
    return Instruction(name, encoding, tuple(operands), modifiers or {})


def flags(word: Word, places: Mapping[str, int]) -> Modifiers:
    """The modifiers whose bit is set, by their places."""
    return {name: True for name, place in places.items() if word.flag(place)}


def bits(value: int, count: int) -> tuple[int, ...]:
    """The lowest `count` bits, the lowest first."""
    return tuple(value >> k & 1 for k in range(count))
