"""Decodes the instruction words of gfx950 code.

Source: AMD Instinct CDNA4 ISA, chapter 12 (encodings); the names of modifiers and the order of
operands are those of LLVM's listings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .opcodes import Opcode, opcodes
from .program import ACCUMULATORS, EXEC, M0, VCC, Instruction, Modifier, Operand

_LITERAL, _SDWA, _DPP = 255, 249, 250
"""Values of a 9-bit source: a dword follows, which is a constant or describes the source."""
_VECTOR = 256
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
_SELECTIONS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
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
_PROMOTED = (("VOPC", 0), ("VOP2", 0x100), ("VOP1", 0x140))
"""Encodings with a form in VOP3, and the number of their opcode 0 there."""
_MADE_OF_TWO = 0x2C
"""Opcode of VOP3P in the first half of a matrix instruction with scales."""

Modifiers = dict[str, Modifier]


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


@dataclass(frozen=True)
class _Word:
    """The bits of an instruction, the first dword lowest."""

    bits: int

    def field(self, high: int, low: int) -> int:
        return self.bits >> low & ((1 << high - low + 1) - 1)

    def flag(self, place: int) -> bool:
        return bool(self.bits >> place & 1)


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
    word = _Word(int.from_bytes(code[address : address + 16], "little"))
    encoding = _encoding(word)
    if encoding is None:
        raise DecodingError(f"word {word.field(31, 0):#010x} at {address:#x} is no instruction")
    try:
        instruction, size = _READERS[encoding](word)
        branch = _branch_target(instruction, word, address)
        return Decoded(instruction, address, size, branch)
    except (KeyError, IndexError) as error:
        raise DecodingError(
            f"word {word.field(31, 0):#010x} at {address:#x}: {encoding} has no {error}"
        ) from error


def _branch_target(instruction: Instruction, word: _Word, address: int) -> int | None:
    """Address that a branch goes to: a number of dwords after the next instruction."""
    if not re.match(r"s_c?branch", instruction.name):
        return None
    distance = word.field(15, 0)
    return address + 4 + 4 * (distance - (distance >> 15 << 16))


def _encoding(word: _Word) -> str | None:
    """The encoding, by the highest bits of the first dword; the longest prefix is tried first."""
    for width, prefixes in _PREFIXES:
        found = prefixes.get(word.field(31, 32 - width))
        if found is not None:
            return found
    return None


# -- operands --------------------------------------------------------------------------------------


def _scalar(number: int, size: int) -> Operand:
    if number not in _SCALARS:
        raise KeyError(f"scalar register {number}")
    return Operand("s", number, size)


def _vector(number: int, size: int, accumulator: bool = False) -> Operand:
    return Operand("v", number + ACCUMULATORS * accumulator, size)


def _source(
    number: int,
    size: int,
    literal: int | None = None,
    *,
    neg: bool = False,
    absolute: bool = False,
    accumulator: bool = False,
) -> Operand:
    """A source of 9 bits: a register, an inline constant, or the literal that follows."""
    if number >= _VECTOR:
        index = number - _VECTOR + ACCUMULATORS * accumulator
        return Operand("v", index, size, neg, absolute)
    if number in _SCALARS:
        return Operand("s", number, size, neg, absolute)
    if 128 <= number <= 208:
        return Operand("c", number - 128 if number <= 192 else 192 - number, 1, neg, absolute)
    if number in _INLINE_FLOATS:
        return Operand("c", _INLINE_FLOATS[number], 0, neg, absolute)
    if number == _LITERAL and literal is not None:
        return Operand("c", literal, 1, neg, absolute)
    raise KeyError(f"source {number}")


def _made(
    name: str, operands: list[Operand], modifiers: Modifiers | None = None, encoding: str = ""
) -> Instruction:
    return Instruction(name, encoding, tuple(operands), modifiers or {})


def _flags(word: _Word, places: Mapping[str, int]) -> Modifiers:
    return {name: True for name, place in places.items() if word.flag(place)}


def _bits(value: int, count: int) -> tuple[int, ...]:
    return tuple(value >> k & 1 for k in range(count))


# -- scalar instructions ---------------------------------------------------------------------------


def _scalar_operation(encoding: str) -> Callable[[_Word], tuple[Instruction, int]]:
    """SOP1, SOP2, SOPC: sources at bits 0 and 8, the destination at bit 16."""
    places = {"SOP1": (15, 8), "SOP2": (29, 23), "SOPC": (22, 16)}[encoding]

    def read(word: _Word) -> tuple[Instruction, int]:
        entry = opcodes(encoding)[word.field(*places)]
        sizes, operands = list(entry.sizes), []
        if encoding != "SOPC" and entry.name not in _NO_DESTINATION:
            operands.append(_scalar(word.field(22, 16), sizes.pop(0)))
        numbers = [word.field(7, 0), word.field(15, 8)][: len(sizes)]
        literal = word.field(63, 32)
        sources = zip(numbers, sizes, strict=True)
        operands += [_source(number, size, literal) for number, size in sources]
        return _made(entry.name, operands), 8 if _LITERAL in numbers else 4

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


def _scalar_constant(word: _Word) -> tuple[Instruction, int]:
    """SOPK: a constant of 16 bits, or a field of a hardware register."""
    entry = opcodes("SOPK")[word.field(27, 23)]
    constant = word.field(15, 0)
    if "reg" not in entry.name:
        operands = [_scalar(word.field(22, 16), 1), Operand("c", constant)]
        return _made(entry.name, operands), 4
    modifiers: Modifiers = {
        "hwreg": _HARDWARE_REGISTERS[constant & 63],
        "hwreg_offset": constant >> 6 & 31,
        "hwreg_size": (constant >> 11) + 1,
    }
    if entry.name == "s_setreg_imm32_b32":
        return _made(entry.name, [Operand("c", word.field(63, 32))], modifiers), 8
    return _made(entry.name, [_scalar(word.field(22, 16), 1)], modifiers), 4


def _program_control(word: _Word) -> tuple[Instruction, int]:
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
        return _made(name, [], waits), 4
    plain = re.match(r"s_c?branch", name) or name in ("s_endpgm", "s_barrier")
    return _made(name, [] if plain else [Operand("c", constant)]), 4


def _scalar_memory(word: _Word) -> tuple[Instruction, int]:
    """SMEM: an offset of 21 bits, a register, or their sum."""
    entry = opcodes("SMEM")[word.field(25, 18)]
    if not entry.sizes:
        return _made(entry.name, []), 8
    operands = [_scalar(word.field(12, 6), entry.sizes[0])]
    if entry.name in ("s_memtime", "s_memrealtime"):
        return _made(entry.name, operands), 8
    size = 4 if "_buffer_" in entry.name else 2
    operands.append(_scalar(2 * word.field(5, 0), size))
    modifiers: Modifiers = _flags(word, {"glc": 16})
    has_constant, has_register = word.flag(17), word.flag(14)
    offset = word.field(52, 32)
    offset -= offset >> 20 << 21
    if has_register or not has_constant:
        operands.append(_scalar(word.field(63, 57) if has_register else offset & 127, 1))
        modifiers |= {"offset": offset} if has_constant else {}
    else:
        operands.append(Operand("c", offset))
    return _made(entry.name, operands, modifiers), 8


# -- vector instructions ---------------------------------------------------------------------------

_CARRIES = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32")
_TAKES_MASK = re.compile(r"v_(cndmask_b32|addc_co_u32|subb_co_u32|subbrev_co_u32)")
_TAKES_CONSTANT = {"v_fmamk_f32": 1, "v_fmaak_f32": 2, "v_madmk_f32": 1, "v_madak_f32": 2}
"""Place of the literal among the sources."""


def _short_vector(encoding: str) -> Callable[[_Word], tuple[Instruction, int]]:
    """VOP1, VOP2, VOPC, and their forms with SDWA and DPP."""
    places = {"VOP1": (16, 9), "VOP2": (30, 25), "VOPC": (24, 17)}[encoding]

    def read(word: _Word) -> tuple[Instruction, int]:
        entry = opcodes(encoding)[word.field(*places)]
        name, sizes = entry.name, list(entry.sizes)
        if not sizes:
            return _made(name, [], encoding="e32"), 4
        number, form, modifiers = word.field(8, 0), "e32", Modifiers()
        mask = Operand("s", VCC, 2)
        first: list[Operand] = [mask]
        if encoding != "VOPC":
            first = [_destination(name, word.field(24, 17), sizes.pop(0))]
            first += [mask] if _CARRIES.fullmatch(name) else []
        extra = word.field(63, 32)
        if number == _SDWA:
            form = "sdwa"
            sources, modifiers = _sdwa(word, extra, sizes)
            if encoding == "VOPC":
                first = [_scalar(extra >> 8 & 127, 2) if extra >> 15 & 1 else mask]
            else:
                modifiers |= _sdwa_destination(extra)
        else:
            sources, form, modifiers = _plain_sources(entry, word, sizes)
        last = [mask] if encoding == "VOP2" and _TAKES_MASK.fullmatch(name) else []
        is_long = number in (_LITERAL, _SDWA, _DPP) or name in _TAKES_CONSTANT
        return _made(name, [*first, *sources, *last], modifiers, form), 8 if is_long else 4

    return read


def _plain_sources(
    entry: Opcode, word: _Word, sizes: list[int]
) -> tuple[list[Operand], str, Modifiers]:
    """Sources, form and modifiers of a short instruction with or without DPP."""
    number, extra = word.field(8, 0), word.field(63, 32)
    is_accumulator = entry.name == "v_accvgpr_mov_b32"
    second = [_vector(word.field(16, 9), size) for size in sizes[1:2]]
    if number == _DPP:
        first = _vector(extra & 255, sizes[0])
        neg, absolute = bool(extra >> 20 & 1), bool(extra >> 21 & 1)
        first = Operand("v", first.index, first.count, neg, absolute)
        if second:
            neg, absolute = bool(extra >> 22 & 1), bool(extra >> 23 & 1)
            second = [Operand("v", second[0].index, second[0].count, neg, absolute)]
        return [first, *second], "dpp", _dpp(extra)
    first = _source(number, sizes[0], extra, accumulator=is_accumulator)
    sources = [first, *second]
    if entry.name in _TAKES_CONSTANT:
        sources.insert(_TAKES_CONSTANT[entry.name], Operand("c", extra))
    return sources, "e32", {}


def _destination(name: str, number: int, size: int) -> Operand:
    if name in ("v_readfirstlane_b32", "v_readlane_b32"):
        return _scalar(number, size)
    return _vector(number, size, name in ("v_accvgpr_mov_b32", "v_accvgpr_write_b32"))


def _sdwa(word: _Word, extra: int, sizes: list[int]) -> tuple[list[Operand], Modifiers]:
    """Sources that are parts of a register."""
    numbers = (extra & 255, word.field(16, 9))
    operands, modifiers = [], Modifiers()
    for place, size in enumerate(sizes):
        shift = 16 + 8 * place
        part = extra >> shift
        number = numbers[place] + (0 if part >> 7 & 1 else _VECTOR)
        neg, absolute = bool(part >> 4 & 1), bool(part >> 5 & 1)
        read = _source(number, size, neg=neg, absolute=absolute)
        sext = bool(part >> 3 & 1)
        operands.append(Operand(read.kind, read.index, read.count, neg, absolute, sext))
        modifiers[f"src{place}_sel"] = _SELECTIONS[part & 7]
    return operands, modifiers


def _sdwa_destination(extra: int) -> Modifiers:
    modifiers: Modifiers = {
        "dst_sel": _SELECTIONS[extra >> 8 & 7],
        "dst_unused": _UNUSED[extra >> 11 & 3],
    }
    if extra >> 13 & 1:
        modifiers["clamp"] = True
    return modifiers | _output(extra >> 14 & 3)


def _output(omod: int) -> Modifiers:
    """The output modifier: the result times 2 or 4, or halved."""
    choices: tuple[Modifiers, ...] = ({}, {"mul": 2}, {"mul": 4}, {"div": 2})
    return choices[omod]


_DPP_ROWS = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror", 0x15: "row_newbcast"}
_DPP_CONTROLS: Mapping[int, tuple[str, Modifier]] = {
    0x130: ("wave_shl", 1),
    0x134: ("wave_rol", 1),
    0x138: ("wave_shr", 1),
    0x13C: ("wave_ror", 1),
    0x140: ("row_mirror", True),
    0x141: ("row_half_mirror", True),
    0x142: ("row_bcast", 15),
    0x143: ("row_bcast", 31),
}


def _dpp(extra: int) -> Modifiers:
    """Control, masks and whether lanes outside give 0."""
    control = extra >> 8 & 0x1FF
    modifiers: Modifiers = {}
    if control < 0x100:
        modifiers["quad_perm"] = tuple(control >> 2 * k & 3 for k in range(4))
    elif control >> 4 in _DPP_ROWS:
        modifiers[_DPP_ROWS[control >> 4]] = control & 15
    else:
        name, value = _DPP_CONTROLS[control]
        modifiers[name] = value
    modifiers |= {"row_mask": extra >> 28 & 15, "bank_mask": extra >> 24 & 15}
    return modifiers | ({"bound_ctrl": 1} if extra >> 19 & 1 else {})


def _long_vector(word: _Word) -> tuple[Instruction, int]:
    """VOP3: its own opcodes, and those of the short encodings."""
    number = word.field(25, 16)
    entry, form = _long_opcode(number)
    name, sizes = entry.name, list(entry.sizes)
    has_scalar_result = number in opcodes("VOP3SD")
    if not sizes:
        return _made(name, [], encoding=form), 8
    modifiers: Modifiers = {}
    if form == "e64" and name.startswith("v_cmp"):
        operands = [_scalar(word.field(7, 0), 2)]
    else:
        operands = [_destination(name, word.field(7, 0), sizes.pop(0))]
    if has_scalar_result:
        operands.append(_scalar(word.field(14, 8), 2))
    neg, absolute = word.field(63, 61), 0 if has_scalar_result else word.field(10, 8)
    numbers = word.field(40, 32), word.field(49, 41), word.field(58, 50)
    is_table = name.startswith("v_bitop3")
    if is_table:  # the truth table stands where source modifiers are
        modifiers["bitop3"] = word.field(60, 59) << 6 | absolute << 3 | neg
        neg = absolute = 0
    elif omod := word.field(60, 59):
        modifiers |= _output(omod)
    for place, size in enumerate(sizes):
        signs = dict(neg=bool(neg >> place & 1), absolute=bool(absolute >> place & 1))
        operands.append(_source(numbers[place], size, **signs))
    if word.flag(15):
        modifiers["clamp"] = True
    if not has_scalar_result and (select := word.field(14, 11)):
        modifiers["op_sel"] = _bits(select, 4)
    return _made(name, operands, modifiers, form), 8


def _long_opcode(number: int) -> tuple[Opcode, str]:
    """The entry of a VOP3 opcode, and its form: "e64" for those that have a short one."""
    for table in ("VOP3", "VOP3SD"):
        if number in opcodes(table):
            entry = opcodes(table)[number]
            return entry, "e64" if _CARRIES.fullmatch(entry.name) else ""
    for encoding, first in reversed(_PROMOTED):
        if number >= first:
            entry = opcodes(encoding)[number - first]
            sizes = entry.sizes + ((2,) if entry.name == "v_cndmask_b32" else ())
            return Opcode(entry.name, sizes), "e64"
    raise KeyError(number)


def _packed_vector(word: _Word) -> tuple[Instruction, int]:
    """VOP3P: packed values, matrices, moves of accumulators."""
    number = word.field(22, 16)
    if number == _MADE_OF_TWO:
        return _scaled_matrix(word)
    entry = opcodes("VOP3P")[number]
    if entry.name.startswith("v_accvgpr"):
        writes = entry.name == "v_accvgpr_write"
        source = _source(word.field(40, 32), 1, accumulator=not writes)
        return _made(f"{entry.name}_b32", [_vector(word.field(7, 0), 1, writes), source]), 8
    if entry.name.startswith(("v_mfma", "v_smfmac")):
        return _matrix(entry, word), 8
    count = len(entry.sizes) - 1
    high = word.field(60, 59) | word.field(14, 14) << 2
    fields = {
        "op_sel": (word.field(13, 11), 0),
        "op_sel_hi": (high, 7),
        "neg_lo": (word.field(63, 61), 0),
        "neg_hi": (word.field(10, 8), 0),
    }
    modifiers: Modifiers = {
        name: _bits(value, count)
        for name, (value, default) in fields.items()
        if _bits(value, count) != _bits(default, count)
    }
    modifiers |= _flags(word, {"clamp": 15})
    numbers = word.field(40, 32), word.field(49, 41), word.field(58, 50)
    sources = [_source(*each) for each in zip(numbers, entry.sizes[1:], strict=False)]
    return _made(entry.name, [_vector(word.field(7, 0), entry.sizes[0]), *sources], modifiers), 8


def _matrix(entry: Opcode, word: _Word) -> Instruction:
    """A matrix instruction without scales; accumulators have bits of their own."""
    accumulators = word.flag(59), word.flag(60), word.flag(15)
    modifiers: Modifiers = {
        name: value
        for name, value in (
            ("cbsz", word.field(10, 8)),
            ("abid", word.field(14, 11)),
            ("blgp", word.field(63, 61)),
        )
        if value
    }
    sizes = list(entry.sizes)
    if entry.name.endswith("_f8f6f4"):
        sizes[1], sizes[2] = (
            _REGISTERS_OF_FORMAT[word.field(*place)] for place in ((10, 8), (63, 61))
        )
    numbers = word.field(40, 32), word.field(49, 41), word.field(58, 50)
    sources = [
        _source(number, size, accumulator=accumulator)
        for number, size, accumulator in zip(numbers, sizes[1:], accumulators, strict=True)
    ]
    destination = _vector(word.field(7, 0), sizes[0], word.flag(15))
    return _made(entry.name, [destination, *sources], modifiers)


_REGISTERS_OF_FORMAT = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}
"""Registers of 32 values in fp8, bf8, fp6, bf6, fp4."""


def _scaled_matrix(word: _Word) -> tuple[Instruction, int]:
    """A pair of two VOP3P words: the scales, then the matrices."""
    second = _Word(word.bits >> 64)
    entry = opcodes("VOP3PX2")[second.field(22, 16)]
    plain = _matrix(entry, second)
    scales = [_source(word.field(40, 32), 1), _source(word.field(49, 41), 1)]
    select, high = word.field(12, 11), word.field(60, 59)
    modifiers: Modifiers = dict(plain.modifiers)
    modifiers.pop("abid", None)  # a constant of this encoding
    modifiers |= {"op_sel": (*_bits(select, 2), 0)} if select else {}
    modifiers["op_sel_hi"] = (*_bits(high, 2), 0)
    return _made(entry.name, [*plain.operands, *scales], modifiers), 16


# -- memory ----------------------------------------------------------------------------------------


def _local(word: _Word) -> tuple[Instruction, int]:
    """DS."""
    entry = opcodes("DS")[word.field(24, 17)]
    places = {"d": (63, 56), "a": (39, 32), "x": (47, 40), "y": (55, 48)}
    operands = [
        _vector(word.field(*places[field]), size, word.flag(25) and field != "a")
        for field, size in zip(entry.fields, entry.sizes, strict=True)
    ]
    modifiers: Modifiers = {}
    if re.match(r"ds_(read|write|wrxchg)2", entry.name):
        given = {"offset0": word.field(7, 0), "offset1": word.field(15, 8)}
        modifiers |= {name: value for name, value in given.items() if value}
    elif offset := word.field(15, 0):
        modifiers["offset"] = offset
    modifiers |= _flags(word, {"gds": 16})
    return _made(entry.name, operands, modifiers), 8


_CACHE = {"sc0": 16, "nt": 17, "sc1": 25}


def _global(word: _Word) -> tuple[Instruction, int]:
    """Global and scratch memory."""
    segment = {1: "SCRATCH", 2: "GLOBAL"}[word.field(15, 14)]
    entry = opcodes(segment)[word.field(24, 18)]
    name = entry.name
    modifiers = _flags(word, _CACHE)
    if offset := word.field(12, 0):
        modifiers["offset"] = offset - (offset >> 12 << 13)
    base, acc = word.field(54, 48), word.flag(55)
    saddr = Operand("off") if base == 127 else _scalar(base, 2 if segment == "GLOBAL" else 1)
    if segment == "SCRATCH":
        address = _vector(word.field(39, 32), 1) if word.flag(13) else Operand("off")
    else:
        address = _vector(word.field(39, 32), 2 if base == 127 else 1)
    loaded = _vector(word.field(63, 56), entry.sizes[0], acc)
    data = _vector(word.field(47, 40), entry.sizes[-1], acc)
    if "_lds_" in name:
        return _made(name, [address, saddr], modifiers), 8
    if "_load_" in name:
        return _made(name, [loaded, address, saddr], modifiers), 8
    returned = [loaded] if "_atomic_" in name and word.flag(16) else []
    return _made(name, [*returned, address, data, saddr], modifiers), 8


def _buffer(word: _Word) -> tuple[Instruction, int]:
    """MUBUF."""
    entry = opcodes("MUBUF")[word.field(24, 18)]
    flags = {"offen": 12, "idxen": 13, "sc0": 14, "sc1": 15, "lds": 16, "nt": 17}
    modifiers = _flags(word, flags)
    if entry.name in ("buffer_wbl2", "buffer_inv"):
        return _made(entry.name, [], modifiers), 8
    if offset := word.field(11, 0):
        modifiers["offset"] = offset
    parts = word.flag(12) + word.flag(13)
    address = _vector(word.field(39, 32), parts) if parts else Operand("off")
    data = [] if word.flag(16) else [_vector(word.field(47, 40), entry.sizes[0], word.flag(55))]
    resource = [_scalar(4 * word.field(52, 48), 4), _source(word.field(63, 56), 1)]
    return _made(entry.name, [*data, address, *resource], modifiers), 8


_READERS: Mapping[str, Callable[[_Word], tuple[Instruction, int]]] = {
    **{name: _scalar_operation(name) for name in ("SOP1", "SOP2", "SOPC")},
    **{name: _short_vector(name) for name in ("VOP1", "VOP2", "VOPC")},
    "SOPK": _scalar_constant,
    "SOPP": _program_control,
    "SMEM": _scalar_memory,
    "VOP3": _long_vector,
    "VOP3P": _packed_vector,
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
