"""Decodes vector instructions: VOP1, VOP2, VOPC, VOP3, VOP3P. CDNA4 ISA, sections 12.7 to 12.12."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .opcodes import Opcode, opcodes
from .program import VCC, Instruction, Modifier, Operand
from .words import (
    DPP,
    LITERAL,
    SDWA,
    VECTOR,
    Modifiers,
    Word,
    bits,
    flags,
    made,
    scalar,
    source,
    vector,
)

_SELECTIONS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_PROMOTED = (("VOPC", 0), ("VOP2", 0x100), ("VOP1", 0x140))
"""Encodings with a form in VOP3, and the number of their opcode 0 there."""
_MADE_OF_TWO = 0x2C
"""Opcode of VOP3P in the first half of a matrix instruction with scales."""


_CARRIES = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32")
_TAKES_MASK = re.compile(r"v_(cndmask_b32|addc_co_u32|subb_co_u32|subbrev_co_u32)")
_TAKES_CONSTANT = {
    **dict.fromkeys(("v_fmamk_f32", "v_madmk_f16"), 1),
    **dict.fromkeys(("v_fmaak_f32", "v_madak_f16"), 2),
}
"""Place of the literal among the sources."""


def short_vector(encoding: str) -> Callable[[Word], tuple[Instruction, int]]:
    """VOP1, VOP2, VOPC, and their forms with SDWA and DPP."""
    places = {"VOP1": (16, 9), "VOP2": (30, 25), "VOPC": (24, 17)}[encoding]

    def read(word: Word) -> tuple[Instruction, int]:
        entry = opcodes(encoding)[word.field(*places)]
        name, sizes = entry.name, list(entry.sizes)
        if not sizes:
            return made(name, [], encoding="e32"), 4
        number, form, modifiers = word.field(8, 0), "e32", Modifiers()
        mask = Operand("s", VCC, 2)
        first: list[Operand] = [mask]
        if encoding != "VOPC":
            first = [_destination(name, word.field(24, 17), sizes.pop(0))]
            first += [mask] if _CARRIES.fullmatch(name) else []
        extra = word.field(63, 32)
        if number == SDWA:
            form = "sdwa"
            sources, modifiers = _sdwa(word, extra, sizes)
            if encoding == "VOPC":
                first = [scalar(extra >> 8 & 127, 2) if extra >> 15 & 1 else mask]
            else:
                modifiers |= _sdwa_destination(extra)
        else:
            sources, form, modifiers = _plain_sources(entry, word, sizes)
        last = [mask] if encoding == "VOP2" and _TAKES_MASK.fullmatch(name) else []
        is_long = number in (LITERAL, SDWA, DPP) or name in _TAKES_CONSTANT
        return made(name, [*first, *sources, *last], modifiers, form), 8 if is_long else 4

    return read


def _plain_sources(
    entry: Opcode, word: Word, sizes: list[int]
) -> tuple[list[Operand], str, Modifiers]:
    """Sources, form and modifiers of a short instruction with or without DPP."""
    number, extra = word.field(8, 0), word.field(63, 32)
    is_accumulator = entry.name == "v_accvgpr_mov_b32"
    second = [vector(word.field(16, 9), size) for size in sizes[1:2]]
    if number == DPP:
        first = vector(extra & 255, sizes[0])
        neg, absolute = bool(extra >> 20 & 1), bool(extra >> 21 & 1)
        first = Operand("v", first.index, first.count, neg, absolute)
        if second:
            neg, absolute = bool(extra >> 22 & 1), bool(extra >> 23 & 1)
            second = [Operand("v", second[0].index, second[0].count, neg, absolute)]
        return [first, *second], "dpp", _dpp(extra)
    first = source(number, sizes[0], extra, accumulator=is_accumulator)
    sources = [first, *second]
    if entry.name in _TAKES_CONSTANT:
        sources.insert(_TAKES_CONSTANT[entry.name], Operand("c", extra))
    return sources, "e32", {}


def _destination(name: str, number: int, size: int) -> Operand:
    if name in ("v_readfirstlane_b32", "v_readlane_b32"):
        return scalar(number, size)
    return vector(number, size, name in ("v_accvgpr_mov_b32", "v_accvgpr_write_b32"))


def _sdwa(word: Word, extra: int, sizes: list[int]) -> tuple[list[Operand], Modifiers]:
    """Sources that are parts of a register."""
    numbers = (extra & 255, word.field(16, 9))
    operands, modifiers = [], Modifiers()
    for place, size in enumerate(sizes):
        shift = 16 + 8 * place
        part = extra >> shift
        number = numbers[place] + (0 if part >> 7 & 1 else VECTOR)
        neg, absolute = bool(part >> 4 & 1), bool(part >> 5 & 1)
        read = source(number, size, neg=neg, absolute=absolute)
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


def long_vector(word: Word) -> tuple[Instruction, int]:
    """VOP3: its own opcodes, and those of the short encodings."""
    number = word.field(25, 16)
    entry, form = _long_opcode(number)
    name, sizes = entry.name, list(entry.sizes)
    has_scalar_result = number in opcodes("VOP3SD")
    if not sizes:
        return made(name, [], encoding=form), 8
    modifiers: Modifiers = {}
    if form == "e64" and name.startswith("v_cmp"):
        operands = [scalar(word.field(7, 0), 2)]
    else:
        operands = [_destination(name, word.field(7, 0), sizes.pop(0))]
    if has_scalar_result:
        operands.append(scalar(word.field(14, 8), 2))
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
        operands.append(source(numbers[place], size, **signs))
    if word.flag(15):
        modifiers["clamp"] = True
    if not has_scalar_result and (select := word.field(14, 11)):
        modifiers["op_sel"] = bits(select, 4)
    return made(name, operands, modifiers, form), 8


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


def packed_vector(word: Word) -> tuple[Instruction, int]:
    """VOP3P: packed values, matrices, moves of accumulators."""
    number = word.field(22, 16)
    if number == _MADE_OF_TWO:
        return _scaled_matrix(word)
    entry = opcodes("VOP3P")[number]
    if entry.name.startswith("v_accvgpr"):
        writes = entry.name == "v_accvgpr_write"
        moved = source(word.field(40, 32), 1, accumulator=not writes)
        return made(f"{entry.name}_b32", [vector(word.field(7, 0), 1, writes), moved]), 8
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
    signs = [(False, False)] * count
    if entry.name.startswith("v_fma_mix"):  # the fields of negation are neg and abs of each source
        negate, absolute = (bits(fields.pop(name)[0], count) for name in ("neg_lo", "neg_hi"))
        fields["op_sel_hi"] = high, 0
        signs = [(bool(n), bool(a)) for n, a in zip(negate, absolute, strict=True)]
    modifiers: Modifiers = {
        name: bits(value, count)
        for name, (value, default) in fields.items()
        if bits(value, count) != bits(default, count)
    }
    modifiers |= flags(word, {"clamp": 15})
    numbers = word.field(40, 32), word.field(49, 41), word.field(58, 50)
    sources = [
        source(number, size, neg=neg, absolute=absolute)
        for number, size, (neg, absolute) in zip(numbers, entry.sizes[1:], signs, strict=False)
    ]
    return made(entry.name, [vector(word.field(7, 0), entry.sizes[0]), *sources], modifiers), 8


def _matrix(entry: Opcode, word: Word) -> Instruction:
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
        source(number, size, accumulator=accumulator)
        for number, size, accumulator in zip(numbers, sizes[1:], accumulators, strict=True)
    ]
    destination = vector(word.field(7, 0), sizes[0], word.flag(15))
    return made(entry.name, [destination, *sources], modifiers)


_REGISTERS_OF_FORMAT = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}
"""Registers of 32 values in fp8, bf8, fp6, bf6, fp4."""


def _scaled_matrix(word: Word) -> tuple[Instruction, int]:
    """A pair of two VOP3P words: the scales, then the matrices."""
    second = Word(word.value >> 64)
    entry = opcodes("VOP3PX2")[second.field(22, 16)]
    plain = _matrix(entry, second)
    scales = [source(word.field(40, 32), 1), source(word.field(49, 41), 1)]
    select, high = word.field(12, 11), word.field(60, 59)
    modifiers: Modifiers = dict(plain.modifiers)
    modifiers.pop("abid", None)  # a constant of this encoding
    modifiers |= {"op_sel": (*bits(select, 2), 0)} if select else {}
    modifiers["op_sel_hi"] = (*bits(high, 2), 0)
    return made(entry.name, [*plain.operands, *scales], modifiers), 16
