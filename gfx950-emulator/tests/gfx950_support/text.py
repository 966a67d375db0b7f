"""Instructions as their text says, read without an assembler: the other way to decode them.

Source: the syntax of LLVM's AMDGPU back end (`AMDGPUAsmGFX9`, `AMDGPUModifierSyntax`). Where a text
leaves something out, LLVM's assembler decides: its defaults are those of this module.
"""

from __future__ import annotations

import functools
import re

from gfx950emu.opcodes import opcodes
from gfx950emu.program import ACCUMULATORS, EXEC, M0, VCC, Instruction, Modifier, Operand

_NAMED_SCALARS = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
_INLINE_FLOATS = {
    "0.5": 0x3F000000,
    "-0.5": 0xBF000000,
    "1.0": 0x3F800000,
    "-1.0": 0xBF800000,
    "2.0": 0x40000000,
    "-2.0": 0xC0000000,
    "4.0": 0x40800000,
    "-4.0": 0xC0800000,
    "0.15915494": 0x3E22F983,
    "0.15915494309189532": 0x3E22F983,
}
_FLAGS = frozenset(
    ("clamp", "high", "idxen", "lds", "nt", "offen", "row_half_mirror", "row_mirror", "sc0", "sc1")
)
"""Modifiers without a value."""

_MNEMONIC = re.compile(r"(\w+?)(?:_(e32|e64|dpp|sdwa|e64_dpp))?")
_REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])")
_SEPARATOR = re.compile(r",\s+(?![^(]*\))")
"""Between operands; numbers in brackets are separated by commas without a space."""
_HARDWARE_REGISTER = re.compile(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)")


def parse_instruction(text: str, line: str = "") -> Instruction:
    """Parse one line of a listing.

    >>> add = parse_instruction("v_add_f32_e64 v1, |v2|, -s3 clamp")
    >>> add.name, add.encoding, add.operands[2].neg, add.modifiers["clamp"]
    ('v_add_f32', 'e64', True, True)

    Raises:
        ValueError: an operand is not known.
    """
    mnemonic, _, rest = text.partition(" ")
    found = _MNEMONIC.fullmatch(mnemonic)
    if found is None:
        raise ValueError(f"{text}: no instruction")
    name, encoding = found[1], (found[2] or "").removeprefix("e64_")
    if name == "s_waitcnt":
        return Instruction(name, "", (), _waits(text, rest), None, text, line)
    if re.match(r"s_c?branch", name):
        return Instruction(name, "", (), {}, rest.strip(), text, line)
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}
    parts = _SEPARATOR.split(rest.strip()) if rest.strip() else []
    try:
        for place, part in enumerate(parts):
            tokens = part.split()
            if hardware := _HARDWARE_REGISTER.fullmatch(part):
                modifiers["hwreg"] = hardware[1].removeprefix("HW_REG_")
                modifiers["hwreg_offset"] = int(hardware[2] or 0)
                modifiers["hwreg_size"] = int(hardware[3] or 32)
                continue
            if not _is_modifier(tokens[0]):
                operands.append(parse_operand(tokens.pop(0)))
            if tokens and place + 1 < len(parts):
                raise ValueError(f"modifier {tokens} before the last operand")
            modifiers.update(_modifier(token) for token in tokens)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    modifiers = _assembled(name, encoding, modifiers)
    return Instruction(name, encoding, tuple(operands), modifiers, None, text, line)


def _assembled(name: str, encoding: str, modifiers: dict[str, Modifier]) -> dict[str, Modifier]:
    """What LLVM's assembler makes of what is written and of what is left out."""
    if encoding == "dpp":
        modifiers = {"row_mask": 15, "bank_mask": 15, **modifiers}
        if "bound_ctrl" in modifiers:  # the older syntax says 0 for the bit that is set
            modifiers["bound_ctrl"] = 1
    if name.startswith("v_mfma_scale_"):
        modifiers.setdefault("op_sel_hi", (0, 0, 0))
    selected = modifiers.get("op_sel")
    if isinstance(selected, tuple) and not _is_packed(name):  # sources, then the destination
        modifiers["op_sel"] = (*selected[:-1], *[0] * (4 - len(selected)), selected[-1])
    if name == "ds_swizzle_b32" and isinstance(offset := modifiers.get("offset"), str):
        modifiers["offset"] = _swizzle(offset)
    return modifiers


def _is_packed(name: str) -> bool:
    return name.startswith("v_mfma_scale_") or any(
        entry.name == name for entry in opcodes("VOP3P").values()
    )


def _swizzle(macro: str) -> int:
    """The pattern of a macro, for example "swizzle(SWAP,16)"."""
    kind, *numbers = macro.removeprefix("swizzle(").removesuffix(")").split(",")
    first, *others = map(int, numbers)
    if kind == "QUAD_PERM":
        return 1 << 15 | sum(lane << 2 * place for place, lane in enumerate((first, *others)))
    if kind == "BROADCAST":
        return 31 & ~(first - 1) | others[0] << 5
    flipped = {"SWAP": first, "REVERSE": first - 1}[kind]
    return 31 | flipped << 10


_MOST = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}
"""Counts that wait for nothing."""


def _waits(text: str, rest: str) -> dict[str, Modifier]:
    counters: dict[str, Modifier] = {
        name: int(count) for name, count in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", rest)
    }
    if not counters or re.sub(r"\w+\(\d+\)|[\s&,]", "", rest):
        raise ValueError(f"{text}: no counters")
    return {name: count for name, count in counters.items() if count != _MOST[name]}


@functools.lru_cache(maxsize=4096)
def parse_operand(text: str) -> Operand:
    """Parse one operand, for example "v[2:3]", "-|s4|", "sext(v1)", "0x3f", "-4.0" or "vcc"."""
    sext = neg = absolute = False
    if found := re.fullmatch(r"sext\((.*)\)", text):
        sext, text = True, found[1]
    if re.match(r"-[|vas]", text):
        neg, text = True, text[1:]
    elif found := re.fullmatch(r"neg\((.*)\)", text):
        neg, text = True, found[1]
    if found := re.fullmatch(r"\|(.*)\||abs\((.*)\)", text):
        absolute, text = True, found[1] or found[2]
    if found := re.fullmatch(r"lit\((.*)\)", text):
        text = found[1]
    if found := _REGISTER.fullmatch(text):
        bank, single, first, last = found.groups()
        index = int(single or first)
        count = 1 if single else int(last) - index + 1
        kind = "s" if bank == "s" else "v"
        return Operand(kind, index + ACCUMULATORS * (bank == "a"), count, neg, absolute, sext)
    if text in _NAMED_SCALARS:
        return Operand("s", *_NAMED_SCALARS[text], neg, absolute, sext)
    if text == "off":
        return Operand("off")
    if text in _INLINE_FLOATS:
        return Operand("c", _INLINE_FLOATS[text], 0, neg, absolute, sext)
    try:
        return Operand("c", int(text, 0), 1, neg, absolute, sext)
    except ValueError:
        raise ValueError(f"operand {text!r} is not known") from None


def _is_modifier(token: str) -> bool:
    return token in _FLAGS or re.match(r"[a-z]\w*:", token) is not None


def _modifier(token: str) -> tuple[str, Modifier]:
    name, colon, value = token.partition(":")
    if not colon:
        if name not in _FLAGS:
            raise ValueError(f"modifier {token!r} is not known")
        return name, True
    if value.startswith("["):
        return name, tuple(int(part, 0) for part in value[1:-1].split(","))
    try:
        return name, int(value, 0)
    except ValueError:
        return name, value
