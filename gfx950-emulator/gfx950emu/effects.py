"""What an instruction reads and writes, and which unit executes it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum

from .program import EXEC, M0, SCALARS, VCC, Instruction, Operand

_EXEC = frozenset((SCALARS + EXEC, SCALARS + EXEC + 1))
_VCC = frozenset((SCALARS + VCC, SCALARS + VCC + 1))
_M0 = frozenset((SCALARS + M0,))
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32)")
_TWO_RESULTS = re.compile(r"v_(\w+_co_u32|div_scale_\w+|mad_u64_u32|mad_i64_i32)")
_SWAPS = re.compile(r"v_(swap_b32|permlane(16|32)_swap_b32)")
_ACCUMULATES = re.compile(
    r"v_(fmac|mac|pk_fmac|dot\w*c)_\w+|v_fma_mix(lo|hi)_f16|v_writelane_b32|s_(addk|mulk)_i32"
)
_NO_RESULT = re.compile(
    r"s_(cmp|cmpk|bitcmp\d|setreg|barrier|nop|branch|cbranch|endpgm|waitcnt|sleep|setprio)\w*"
    r"|(global|buffer|flat|scratch)_store_\w+|ds_write\w*|buffer_(wbl2|inv)|v_nop"
)


class Unit(Enum):
    """The unit that executes an instruction."""

    VALU = "valu"
    TRANSCENDENTAL = "transcendental"
    MFMA = "mfma"
    SALU = "salu"
    SMEM = "smem"
    VMEM_LOAD = "vmem load"
    VMEM_STORE = "vmem store"
    LDS = "lds"


@dataclass(frozen=True)
class Effects:
    """Registers that an instruction reads and writes, scalar ones from `SCALARS` on.

    Args:
        reads, writes: with the implicit ones (vcc, exec, m0). unit: who executes it.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    unit: Unit

    @functools.cached_property
    def touched(self) -> frozenset[int]:
        """Registers that are read or written."""
        return self.reads | self.writes


def loads_to_lds(instruction: Instruction) -> bool:
    """Whether it copies global memory straight to LDS."""
    return "lds" in instruction.modifiers or instruction.name.startswith("global_load_lds")


_known: dict[tuple[object, ...], Effects] = {}
"""Effects by meaning: kernels consist of few different instructions."""


def effects(instruction: Instruction) -> Effects:
    """Describe what one instruction does to registers."""
    meaning = instruction.meaning
    if meaning not in _known:
        _known[meaning] = _effects(instruction)
    return _known[meaning]


def _effects(instruction: Instruction) -> Effects:
    written, read = _operands(instruction)
    name, unit = instruction.name, _unit(instruction)
    implicit_reads: set[int] = set()
    implicit_writes: set[int] = set()
    if unit not in (Unit.SALU, Unit.SMEM) or "saveexec" in name or "exec" in name:
        implicit_reads |= _EXEC
    if "saveexec" in name or name.startswith("v_cmpx"):
        implicit_writes |= _EXEC
    if name.startswith(("v_div_fmas", "s_cbranch_vcc")):
        implicit_reads |= _VCC
    if loads_to_lds(instruction):
        implicit_reads |= _M0
    return Effects(_registers(read) | implicit_reads, _registers(written) | implicit_writes, unit)


def _operands(instruction: Instruction) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Operands that are written, and operands that are read."""
    name, operands = instruction.name, instruction.operands
    none: tuple[Operand, ...] = ()
    if not operands or loads_to_lds(instruction) or _NO_RESULT.fullmatch(name):
        return none, operands
    if "_atomic_" in name:
        if "sc0" not in instruction.modifiers:
            return none, operands
        return operands[:1], operands if name.startswith("buffer") else operands[1:]
    if name.startswith("ds_") and not name.startswith(("ds_read", "ds_bperm", "ds_perm", "ds_sw")):
        return (operands[:1], operands[1:]) if "_rtn_" in name else (none, operands)
    if _TWO_RESULTS.fullmatch(name):
        return operands[:2], operands[2:]
    if _SWAPS.fullmatch(name):
        return operands[:2], operands[:2]
    keeps = _ACCUMULATES.fullmatch(name) or "d16" in name or instruction.encoding == "dpp"
    if keeps or instruction.modifiers.get("dst_unused") == "UNUSED_PRESERVE":
        return operands[:1], operands
    return operands[:1], operands[1:]


def _registers(operands: tuple[Operand, ...]) -> frozenset[int]:
    return frozenset(register for operand in operands for register in operand.registers)


def _unit(instruction: Instruction) -> Unit:
    name = instruction.name
    if name.startswith(("v_mfma", "v_smfmac")):
        return Unit.MFMA
    if name.startswith("v_"):
        return Unit.TRANSCENDENTAL if _TRANSCENDENTAL.fullmatch(name) else Unit.VALU
    if name.startswith("ds_"):
        return Unit.LDS
    if name.startswith(("global_", "buffer_", "flat_", "scratch_")):
        return Unit.VMEM_LOAD if "_load_" in name else Unit.VMEM_STORE
    if name.startswith(("s_load", "s_buffer_load", "s_store", "s_dcache", "s_mem")):
        return Unit.SMEM
    return Unit.SALU
