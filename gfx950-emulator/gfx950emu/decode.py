"""Decodes the instruction words of gfx950 code.

Source: AMD Instinct CDNA4 ISA, chapter 12 (encodings); the names of modifiers and the order of
operands are those of LLVM's listings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .decode_vector import long_vector, packed_vector, short_vector
from .opcodes import opcodes
from .program import Instruction, Operand
from .words import LITERAL, Modifiers, Word, flags, made, scalar, source, vector

_HARDWARE_REGISTERS = {
    1: "MODE",
    2: "STATUS",
    3: "TRAPSTS",
    4: "HW_ID",
    5: "GPR_ALLOC",
    6: "LDS_ALLOC",
    7: "IB_STS",
    20: "XCC_ID",
}


BRANCH = re.compile(r"s_branch|s_cbranch_(scc[01]|vccn?z|execn?z|cdbg\w+)")
"""Names of branches, whose constant is a distance in dwords."""


class DecodingError(ValueError):
    """A word that is no instruction of gfx950."""


class Decoded(NamedTuple):
    """An instruction and where it stands.

    Args:
        instruction: its `target` is None. address: in bytes. size: in bytes.
        branch: address that a branch goes to, None for other instructions.
    """

    instruction: Instruction
    address: int
    size: int
    branch: int | None = None


def decode(code: bytes) -> list[Decoded]:
    """Decode a whole text section.

    Raises:
        DecodingError: an encoding or an opcode that gfx950 does not have.
    """
    found, address = [], 0
    while address < len(code):
        found.append(decode_at(code, address))
        address += found[-1].size
    return found


def decode_at(code: bytes, address: int) -> Decoded:
    """Decode the instruction at `address`.

    >>> decode_at(bytes.fromhex("0302027e"), 0).instruction.name
    'v_mov_b32'

    Raises:
        DecodingError: an encoding or an opcode that gfx950 does not have.
    """
    short, long = code[address : address + 4], code[address : address + 8]
    known = _known.get(short) or _known.get(long)
    if known is not None:
        return Decoded(known, address, 4 if short in _known else 8)
    word = Word(int.from_bytes(code[address : address + 16], "little"))
    encoding = _encoding(word)
    if encoding is None:
        raise DecodingError(f"word {word.field(31, 0):#010x} at {address:#x} is no instruction")
    try:
        instruction, size = _READERS[encoding](word)
        branch = _branch_target(instruction, word, address)
        if branch is None and size <= 8:
            _known[code[address : address + size]] = instruction
        return Decoded(instruction, address, size, branch)
    except (KeyError, IndexError) as error:
        raise DecodingError(
            f"word {word.field(31, 0):#010x} at {address:#x}: {encoding} has no {error}"
        ) from error


_known: dict[bytes, Instruction] = {}
"""Instructions by their bytes, without branches: kernels consist of few different ones. The first
four bytes tell how many there are."""


def _branch_target(instruction: Instruction, word: Word, address: int) -> int | None:
    """Address that a branch goes to: a number of dwords after the next instruction."""
    if not BRANCH.fullmatch(instruction.name):
        return None
    distance = word.field(15, 0)
    return address + 4 + 4 * (distance - (distance >> 15 << 16))


def _encoding(word: Word) -> str | None:
    """The encoding, by the highest bits of the first dword; the longest prefix is tried first."""
    for width, prefixes in _PREFIXES:
        found = prefixes.get(word.field(31, 32 - width))
        if found is not None:
            return found
    return None


# -- scalar instructions ---------------------------------------------------------------------------


def _scalar_operation(encoding: str) -> Callable[[Word], tuple[Instruction, int]]:
    """SOP1, SOP2, SOPC: sources at bits 0 and 8, the destination at bit 16."""
    places = {"SOP1": (15, 8), "SOP2": (29, 23), "SOPC": (22, 16)}[encoding]

    def read(word: Word) -> tuple[Instruction, int]:
        entry = opcodes(encoding)[word.field(*places)]
        sizes, operands = list(entry.sizes), []
        if encoding != "SOPC" and entry.name not in _NO_DESTINATION:
            operands.append(scalar(word.field(22, 16), sizes.pop(0)))
        numbers = [word.field(7, 0), word.field(15, 8)][: len(sizes)]
        literal = word.field(63, 32)
        sources = zip(numbers, sizes, strict=True)
        operands += [source(number, size, literal) for number, size in sources]
        return made(entry.name, operands), 8 if LITERAL in numbers else 4

    return read


_NO_DESTINATION = frozenset(
    (
        "s_cbranch_g_fork",
        "s_cbranch_join",
        "s_rfe_b64",
        "s_rfe_restore_b64",
        "s_set_gpr_idx_idx",
        "s_setpc_b64",
    )
)


def _scalar_constant(word: Word) -> tuple[Instruction, int]:
    """SOPK: a constant of 16 bits, or a field of a hardware register."""
    entry = opcodes("SOPK")[word.field(27, 23)]
    constant = word.field(15, 0)
    if "reg" not in entry.name:
        operands = [scalar(word.field(22, 16), entry.sizes[0]), Operand("c", constant)]
        return made(entry.name, operands), 4
    modifiers: Modifiers = {
        "hwreg": _HARDWARE_REGISTERS[constant & 63],
        "hwreg_offset": constant >> 6 & 31,
        "hwreg_size": (constant >> 11) + 1,
    }
    if entry.name == "s_setreg_imm32_b32":
        return made(entry.name, [Operand("c", word.field(63, 32))], modifiers), 8
    return made(entry.name, [scalar(word.field(22, 16), 1)], modifiers), 4


def _program_control(word: Word) -> tuple[Instruction, int]:
    """SOPP."""
    name = opcodes("SOPP")[word.field(22, 16)].name
    constant = word.field(15, 0)
    if name == "s_waitcnt":
        counters = {
            "vmcnt": (constant & 15 | constant >> 14 << 4, 63),
            "expcnt": (constant >> 4 & 7, 7),
            "lgkmcnt": (constant >> 8 & 15, 15),
        }
        waits: Modifiers = {key: count for key, (count, most) in counters.items() if count != most}
        return made(name, [], waits), 4
    plain = BRANCH.fullmatch(name) or name in ("s_endpgm", "s_barrier")
    return made(name, [] if plain else [Operand("c", constant)]), 4


def _scalar_memory(word: Word) -> tuple[Instruction, int]:
    """SMEM: an offset of 21 bits, a register, or their sum."""
    entry = opcodes("SMEM")[word.field(25, 18)]
    if not entry.sizes:
        return made(entry.name, []), 8
    operands = [scalar(word.field(12, 6), entry.sizes[0])]
    if entry.name in ("s_memtime", "s_memrealtime"):
        return made(entry.name, operands), 8
    size = 4 if "_buffer_" in entry.name else 2
    operands.append(scalar(2 * word.field(5, 0), size))
    modifiers: Modifiers = flags(word, {"glc": 16})
    has_constant, has_register = word.flag(17), word.flag(14)
    offset = word.field(52, 32)
    offset -= offset >> 20 << 21
    if has_register or not has_constant:
        operands.append(scalar(word.field(63, 57) if has_register else offset & 127, 1))
        modifiers |= {"offset": offset} if has_constant else {}
    else:
        operands.append(Operand("c", offset))
    return made(entry.name, operands, modifiers), 8


# -- memory ----------------------------------------------------------------------------------------


def _local(word: Word) -> tuple[Instruction, int]:
    """DS."""
    entry = opcodes("DS")[word.field(24, 17)]
    places = {"d": (63, 56), "a": (39, 32), "x": (47, 40), "y": (55, 48)}
    operands = [
        vector(word.field(*places[field]), size, word.flag(25) and field != "a")
        for field, size in zip(entry.fields, entry.sizes, strict=True)
    ]
    modifiers: Modifiers = {}
    if re.match(r"ds_(read|write|wrxchg)2", entry.name):
        given = {"offset0": word.field(7, 0), "offset1": word.field(15, 8)}
        modifiers |= {name: value for name, value in given.items() if value}
    elif offset := word.field(15, 0):
        modifiers["offset"] = offset
    modifiers |= flags(word, {"gds": 16})
    return made(entry.name, operands, modifiers), 8


_CACHE = {"sc0": 16, "nt": 17, "sc1": 25}


def _global(word: Word) -> tuple[Instruction, int]:
    """Global and scratch memory."""
    segment = {1: "SCRATCH", 2: "GLOBAL"}[word.field(15, 14)]
    entry = opcodes(segment)[word.field(24, 18)]
    name = entry.name
    modifiers = flags(word, _CACHE)
    if offset := word.field(12, 0):
        modifiers["offset"] = offset - (offset >> 12 << 13)
    base, acc = word.field(54, 48), word.flag(55)
    saddr = Operand("off") if base == 127 else scalar(base, 2 if segment == "GLOBAL" else 1)
    if segment == "SCRATCH":
        address = vector(word.field(39, 32), 1) if word.flag(13) else Operand("off")
    else:
        address = vector(word.field(39, 32), 2 if base == 127 else 1)
    loaded = vector(word.field(63, 56), entry.sizes[0], acc)
    data = vector(word.field(47, 40), entry.sizes[-1], acc)
    if "_lds_" in name:
        return made(name, [address, saddr], modifiers), 8
    if "_load_" in name:
        return made(name, [loaded, address, saddr], modifiers), 8
    returned = [loaded] if "_atomic_" in name and word.flag(16) else []
    return made(name, [*returned, address, data, saddr], modifiers), 8


_BUFFER = {"offen": 12, "idxen": 13, "sc0": 14, "sc1": 15, "lds": 16, "nt": 17}


def _buffer(word: Word) -> tuple[Instruction, int]:
    """MUBUF."""
    entry = opcodes("MUBUF")[word.field(24, 18)]
    modifiers = flags(word, _BUFFER)
    if entry.name in ("buffer_wbl2", "buffer_inv"):
        return made(entry.name, [], modifiers), 8
    if offset := word.field(11, 0):
        modifiers["offset"] = offset
    parts = word.flag(12) + word.flag(13)
    address = vector(word.field(39, 32), parts) if parts else Operand("off")
    data = [] if word.flag(16) else [vector(word.field(47, 40), entry.sizes[0], word.flag(55))]
    resource = [scalar(4 * word.field(52, 48), 4), source(word.field(63, 56), 1)]
    return made(entry.name, [*data, address, *resource], modifiers), 8


_READERS: Mapping[str, Callable[[Word], tuple[Instruction, int]]] = {
    **{name: _scalar_operation(name) for name in ("SOP1", "SOP2", "SOPC")},
    **{name: short_vector(name) for name in ("VOP1", "VOP2", "VOPC")},
    "SOPK": _scalar_constant,
    "SOPP": _program_control,
    "SMEM": _scalar_memory,
    "VOP3": long_vector,
    "VOP3P": packed_vector,
    "DS": _local,
    "FLAT": _global,
    "MUBUF": _buffer,
}
_PREFIXES: tuple[tuple[int, Mapping[int, str]], ...] = (
    (9, {0b101111101: "SOP1", 0b101111110: "SOPC", 0b101111111: "SOPP", 0b110100111: "VOP3P"}),
    (7, {0b0111111: "VOP1", 0b0111110: "VOPC"}),
    (6, {0b110000: "SMEM", 0b110100: "VOP3", 0b110110: "DS", 0b110111: "FLAT", 0b111000: "MUBUF"}),
    (4, {0b1011: "SOPK"}),
    (2, {0b10: "SOP2"}),
    (1, {0b0: "VOP2"}),
)
"""Highest bits of the first dword by their number, longest first."""
