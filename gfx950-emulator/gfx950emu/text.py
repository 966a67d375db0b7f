"""The text of a decoded instruction, as LLVM's listings have it."""

from __future__ import annotations

import struct

from .program import ACCUMULATORS, EXEC, M0, VCC, Instruction, Modifier, Operand

_PAIRS = {VCC: "vcc", EXEC: "exec"}
_NAMES = {102: "flat_scratch", 104: "xnack_mask", **_PAIRS}
_BARE = {"hwreg", "hwreg_offset", "hwreg_size"}


def as_text(instruction: Instruction) -> str:
    """The text of an instruction; a branch names its target.

    >>> from .decode import decode_at
    >>> as_text(decode_at(bytes.fromhex("0302027e"), 0).instruction)
    'v_mov_b32_e32 v1, s3'
    """
    name, modifiers = instruction.name, dict(instruction.modifiers)
    form = f"_{instruction.encoding}" if instruction.encoding else ""
    if name == "s_waitcnt":
        waits = [f"{counter}({count})" for counter, count in modifiers.items()]
        return " ".join((name, *(waits or ["vmcnt(63)"])))
    parts = [_operand(each) for each in instruction.operands]
    if "hwreg" in modifiers:
        known = (f"HW_REG_{modifiers['hwreg']}", modifiers["hwreg_offset"], modifiers["hwreg_size"])
        hardware = f"hwreg({known[0]}, {known[1]}, {known[2]})"
        parts.insert(0 if name.startswith("s_setreg") else len(parts), hardware)
    if instruction.target is not None:
        parts.append(instruction.target)
    selected = instruction.integers("op_sel", ())
    if len(selected) == 4:  # of the sources, then the destination
        modifiers["op_sel"] = (*selected[: len(parts) - 1], selected[3])
    shown = [key for key in modifiers if key not in _BARE]
    shown.sort(key=lambda key: (not key.startswith("dst"), key == "lds"))
    words = [_modifier(key, modifiers[key]) for key in shown]
    return " ".join(filter(None, (name + form, ", ".join(parts), *words)))


def _operand(operand: Operand) -> str:
    if operand.kind == "off":
        return "off"
    text = _constant(operand) if operand.kind == "c" else _registers(operand)
    text = f"sext({text})" if operand.sext else text
    text = f"|{text}|" if operand.absolute else text
    return f"-{text}" if operand.neg else text


def _constant(operand: Operand) -> str:
    if operand.count == 0:  # an inline float
        return f"{struct.unpack('<f', struct.pack('<I', operand.index))[0]:.8}"
    return str(operand.index) if -16 <= operand.index <= 64 else f"{operand.index:#x}"


def _registers(operand: Operand) -> str:
    first, count = operand.index, operand.count
    if operand.kind == "s" and first >= 102:
        if first == M0:
            return "m0"
        whole = _NAMES[first & ~1]
        return whole if count == 2 else f"{whole}_{'hi' if first & 1 else 'lo'}"
    bank = operand.kind
    if bank == "v" and first >= ACCUMULATORS:
        bank, first = "a", first - ACCUMULATORS
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def _modifier(name: str, value: Modifier) -> str:
    if value is True:
        return name
    if isinstance(value, tuple):
        return f"{name}:[{','.join(map(str, value))}]"
    return f"{name}:{value:#x}" if name.endswith("_mask") else f"{name}:{value}"
