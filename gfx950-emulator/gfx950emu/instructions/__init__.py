"""What each gfx950 instruction does: one table, filled by a file for each chapter of the manual.

Source: AMD Instinct CDNA4 Instruction Set Architecture; tests compare each entry with the manual's
pseudocode.
"""

from __future__ import annotations

from ..program import Instruction, Program
from . import ds, memory, mfma, sop, vop1, vop2, vop3, vop3p
from .table import TABLE, Binder, Decoding, Run, UnknownInstructionError

__all__ = ["TABLE", "Run", "UnknownInstructionError", "bind"]

_CHAPTERS = (sop, memory, vop2, vop1, vop3p, vop3, mfma, ds)
"""Imported for the entries that they add to the table."""

_ROUNDING, _DENORMALS = 0x0F, 0xF0
"""Fields of MODE: 0 rounds to nearest even; all bits keep denormals."""


def bind(instruction: Instruction, program: Program) -> Run:
    """The function of a machine that executes an instruction.

    Raises:
        UnknownInstructionError: the mnemonic, its encoding, a modifier or the program's MODE has no
            semantics here. Nothing is ignored in silence.
    """
    if program.mode & (_ROUNDING | _DENORMALS) != _DENORMALS:
        raise UnknownInstructionError(
            program.name, "MODE with rounding to nearest even and denormals", hex(program.mode)
        )
    binder = TABLE.get(instruction.name)
    if binder is None:
        raise UnknownInstructionError(
            instruction.text, f"one of {len(TABLE)} mnemonics", instruction.name
        )
    if instruction.target is not None:
        return _bound(binder, instruction, program)
    key = binder, instruction.meaning
    if key not in _known:
        _known[key] = _bound(binder, instruction, program)
    return _known[key]


_known: dict[tuple[Binder, tuple[object, ...]], Run] = {}
"""What instructions without a target do, by meaning: kernels consist of few different ones."""


def _bound(binder: Binder, instruction: Instruction, program: Program) -> Run:
    decoding = Decoding(instruction, program)
    run = binder(decoding)
    decoding.finish()
    return run
