"""Instruction classes: which unit executes an instruction, and for how long.

`CLASSES` is the table; the first pattern that matches a mnemonic decides. Sources are named as in
`chip`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ..program import Instruction


class Unit(Enum):
    """Where an instruction waits for its turn."""

    MFMA = "mfma"
    VALU = "valu"
    SALU = "salu"
    LDS = "lds"
    LOAD = "load"
    STORE = "store"
    SCALAR_LOAD = "scalar load"
    WAIT = "wait"
    BARRIER = "barrier"
    NOP = "nop"
    BRANCH = "branch"
    PRIORITY = "priority"
    END = "end"


@dataclass(frozen=True)
class InstructionClass:
    """One line of the table.

    Args:
        pattern: of the mnemonic without encoding suffix.
        unit: that executes it.
        cycles: that its unit is busy; MFMA, LDS and loads have formulas of their own.
        beside_mfma: may issue while the SIMD's matrix core computes.
        source: of the figure.
    """

    pattern: str
    unit: Unit
    cycles: float = 4
    beside_mfma: bool = True
    source: str = "lds 1.1"


CLASSES = (
    InstructionClass(r"v_s?mfma", Unit.MFMA, source="tiles; llvm: passes of 4 cycles"),
    InstructionClass(r"(global|buffer|flat|scratch)_load", Unit.LOAD, source="tiles"),
    InstructionClass(r"(global|buffer|flat|scratch)_(store|atomic)", Unit.STORE, source="tiles"),
    InstructionClass(r"(buffer|global)_(inv|wbl2|wbinvl1)", Unit.SALU),
    InstructionClass(r"ds_", Unit.LDS, source="lds"),
    InstructionClass(r"s_(load|buffer_load|store|dcache|mem)", Unit.SCALAR_LOAD, source="gcn"),
    InstructionClass(r"s_waitcnt", Unit.WAIT, 0),
    InstructionClass(r"s_barrier$", Unit.BARRIER, 0),
    InstructionClass(r"s_(nop|sleep)$", Unit.NOP),
    InstructionClass(r"s_(c?branch|setpc|swappc)", Unit.BRANCH, source="gcn"),
    InstructionClass(r"s_setprio$", Unit.PRIORITY),
    InstructionClass(r"s_endpgm$", Unit.END, 0),
    InstructionClass(r"s_", Unit.SALU, source="gcn"),
    InstructionClass(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)", Unit.VALU, 16, source="llvm: Trans32"),
    InstructionClass(r"v_(mul_lo|mul_hi)_[iu]32", Unit.VALU, 16, source="gcn: quarter rate"),
    InstructionClass(r"v_mad_[iu]64", Unit.VALU, 16, source="gcn: quarter rate"),
    InstructionClass(r"v_pk_\w+_f32", Unit.VALU, 4, beside_mfma=False, source="coissue"),
    InstructionClass(r"v_", Unit.VALU, source="llvm: Write32Bit"),
)

_MATRIX_CYCLES = {(16, 32): 16, (32, 16): 32, (16, 16): 16, (32, 8): 32, (16, 64): 16, (32, 32): 32}
"""(rows, k) of an unscaled instruction → cycles (*llvm*: 4 and 8 passes)."""
_LOAD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def classify(name: str) -> InstructionClass:
    """The class of a mnemonic.

    >>> classify("ds_read_b128").unit
    <Unit.LDS: 'lds'>

    Raises:
        KeyError: no class matches.
    """
    for each in CLASSES:
        if re.match(each.pattern, name):
            return each
    raise KeyError(name)


def matrix_cycles(instruction: Instruction) -> float:
    """Cycles of the matrix core (*tiles*: 16x16x128 32 with fp8 and 16 with fp4 operands)."""
    found = re.search(r"_(\d+)x\d+x(\d+)", instruction.name)
    if found is None:
        raise KeyError(instruction.name)
    rows, k = int(found[1]), int(found[2])
    if "f8f6f4" in instruction.name:
        has_fp8 = min(instruction.integer("cbsz"), instruction.integer("blgp")) < 2
        return (32 if has_fp8 else 16) * (rows // 16)
    return _MATRIX_CYCLES.get((rows, k), 32)


def lane_bytes(name: str) -> int:
    """Bytes that one lane moves with a memory or LDS instruction.

    >>> lane_bytes("buffer_load_dwordx4"), lane_bytes("ds_read2st64_b64")
    (16, 16)
    """
    if name.startswith("ds_"):
        twice = 2 if re.match(r"ds_(read|write)2", name) else 1
        found = re.search(r"_[a-z]+(32|64|96|128)(_|$)", name)
        return (int(found[1]) // 8 if found else 4) * twice
    return _LOAD_BYTES.get(name.replace("_lds", "").split("_")[2], 4)
