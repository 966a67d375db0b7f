"""Instructions of a code object, decoded by tinygrad's tables, in the terms of a listing."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from tinygrad.renderer.amd import decode_inst

from gfx950emu.program import Instruction, Operand

Text = tuple[str, list[str], dict[str, Any]]
"""Mnemonic, operands, modifiers that are not their default."""

_SELECTIONS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_FLOATS = {
    **dict(zip(range(240, 248), (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0), strict=True)),
    248: 0.15915494,
}


def decoded(code: bytes) -> Iterator[Any]:
    """tinygrad's instructions, in order."""
    place = 0
    while place < len(code):
        instruction = decode_inst(code[place : place + 16], "cdna")
        yield instruction
        place += instruction.size()


# -- the executor's side ---------------------------------------------------------------------------


def as_text(instruction: Instruction) -> Text:
    """An instruction that the executor has decoded."""
    modifiers: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in instruction.modifiers.items()
    }
    operands = [_operand(operand) for operand in instruction.operands]
    if instruction.target is not None:
        operands = []
    for name, default in (("row_mask", 15), ("bank_mask", 15)):
        if modifiers.get(name) == default:
            del modifiers[name]
    return instruction.name, operands, modifiers


def _operand(operand: Operand) -> str:
    if operand.kind == "off":
        return "off"
    if operand.kind == "c":
        body = str(operand.index & 0xFFFFFFFF)
    else:
        body = f"{operand.kind}{operand.index}"
    body = f"sext({body})" if operand.sext else body
    body = f"|{body}|" if operand.absolute else body
    return f"-{body}" if operand.neg else body


# -- the binary's side -----------------------------------------------------------------------------


def _register(number: int, literal: int | None, accumulator: bool = False) -> str:
    """A source or destination in the encoding of 9 bits."""
    if number >= 256:
        return f"v{number - 256 + 256 * accumulator}"
    if number == 255:
        assert literal is not None
        return str(literal)
    if number in _FLOATS:
        return str(struct.unpack("<I", struct.pack("<f", _FLOATS[number]))[0])
    if number >= 193:
        return str(192 - number & 0xFFFFFFFF)
    return str(number - 128) if number >= 128 else f"s{number}"


def _bits(value: int, count: int) -> list[int]:
    return [value >> k & 1 for k in range(count)]


def _sources(inst: Any) -> list[str]:
    """Names of the source fields that an instruction has."""
    names = ("src0", "src1", "vsrc1", "src2", "ssrc0", "ssrc1")
    return [name for name in names if name in inst.operands]


def _signed(text: str, place: int, neg: int, absolute: int) -> str:
    text = f"|{text}|" if absolute >> place & 1 else text
    return f"-{text}" if neg >> place & 1 else text


def _plain_vector(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """VOP1, VOP2, VOPC and their forms with a literal, DPP or SDWA."""
    kind = type(inst).__name__
    literal = inst._literal
    modifiers: dict[str, Any] = {}
    operands = [_register(getattr(inst, field).offset, literal) for field in _sources(inst)]
    if "DPP" in kind:
        operands[0] = _register(inst.vsrc0.offset, None)
        modifiers = _dpp(inst.dpp)
        modifiers |= {"bound_ctrl": 1} if inst.bc else {}
        masks = (("row_mask", inst.row_mask), ("bank_mask", inst.bank_mask))
        modifiers |= {name: value for name, value in masks if value != 15}
    if "SDWA" in kind:
        modifiers = _sdwa(inst, operands)
    if name in ("v_fmamk_f32", "v_fmaak_f32"):
        operands.insert(1 if name == "v_fmamk_f32" else 2, str(literal))
    if kind.startswith("VOPC"):
        sdst = inst.sdst.offset if "SDWA" in kind and inst.sd else 106
        return [f"s{sdst}", *operands], modifiers
    carry = ["s106"] if "_co_u32" in name else []
    mask = ["s106"] if name.startswith(("v_cndmask", "v_addc", "v_subb")) else []
    scalar = name == "v_readfirstlane_b32"
    destination = f"s{inst.vdst.offset - 256}" if scalar else _register(inst.vdst.offset, None)
    return [destination, *carry, *operands, *mask], modifiers


def _sdwa(inst: Any, operands: list[str]) -> dict[str, Any]:
    registers = [inst.vsrc0.offset, inst.vsrc1.offset if len(operands) > 1 else 0]
    for place in range(min(len(operands), 2)):
        scalar = getattr(inst, f"s{place}")
        number = registers[place] - 256 if scalar else registers[place]
        text = _register(number, None)
        if getattr(inst, f"src{place}_sext"):
            text = f"sext({text})"
        neg, absolute = (getattr(inst, f"src{place}_{kind}") for kind in ("neg", "abs"))
        operands[place] = _signed(text, 0, neg, absolute)
    modifiers: dict[str, Any] = {
        f"src{place}_sel": _SELECTIONS[getattr(inst, f"src{place}_sel")]
        for place in range(len(operands))
    }
    if hasattr(type(inst), "dst_sel"):
        modifiers["dst_sel"] = _SELECTIONS[inst.dst_sel]
        modifiers["dst_unused"] = _UNUSED[inst.dst_unused]
    return modifiers


def _dpp(control: int) -> dict[str, Any]:
    if control < 0x100:
        return {"quad_perm": [control >> 2 * k & 3 for k in range(4)]}
    rows = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror", 0x15: "row_newbcast"}
    if control >> 4 in rows:
        return {rows[control >> 4]: control & 15}
    others: dict[int, dict[str, Any]] = {
        0x130: {"wave_shl": 1},
        0x134: {"wave_rol": 1},
        0x138: {"wave_shr": 1},
        0x13C: {"wave_ror": 1},
        0x140: {"row_mirror": True},
        0x141: {"row_half_mirror": True},
        0x142: {"row_bcast": 15},
        0x143: {"row_bcast": 31},
    }
    return others[control]


def _vop3(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    kind, modifiers = type(inst).__name__, {}
    absolute = getattr(inst, "abs", 0)
    table = name.startswith("v_bitop3")
    operands = [
        _register(getattr(inst, field).offset, None)
        if table
        else _signed(_register(getattr(inst, field).offset, None), place, inst.neg, absolute)
        for place, field in enumerate(_sources(inst))
    ]
    if table:  # the truth table stands where the modifiers are
        modifiers["bitop3"] = inst.omod << 6 | absolute << 3 | inst.neg
    elif inst.clmp:
        modifiers["clamp"] = True
    if getattr(inst, "opsel", 0):
        modifiers["op_sel"] = _bits(inst.opsel, 4)
    scalar = kind == "VOP3_SDST" or name == "v_readlane_b32"
    number = inst.vdst.offset
    first = [f"s{number - 256 if number >= 256 else number}" if scalar else _register(number, None)]
    return first + ([f"s{inst.sdst.offset}"] if kind == "VOP3SD" else []) + operands, modifiers


def _packed(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    count = len(_sources(inst))
    high = inst.opsel_hi | inst.opsel_hi2 << 2
    fields = {
        "op_sel": (inst.opsel, 0),
        "op_sel_hi": (high, 7),
        "neg_lo": (inst.neg, 0),
        "neg_hi": (inst.neg_hi, 0),
    }
    operands = [_register(getattr(inst, field).offset, None) for field in _sources(inst)]
    if "_mix" in name:  # their fields are neg and abs
        fields = {"op_sel": (inst.opsel, 0), "op_sel_hi": (high, 0)}
        signs = inst.neg, inst.neg_hi
        operands = [_signed(text, place, *signs) for place, text in enumerate(operands)]
    modifiers = {
        key: _bits(value, count)
        for key, (value, default) in fields.items()
        if _bits(value, count) != _bits(default, count)
    }
    return [_register(inst.vdst.offset, None), *operands], modifiers


def _matrix(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """VOP3P_MFMA and VOP3PX2; accumulator registers have bits of their own."""
    fields = _sources(inst)
    accumulators = [inst.acc & 1, inst.acc >> 1 & 1, inst.acc_cd]
    operands = [
        _register(getattr(inst, field).offset, None, bool(accumulators[place]))
        for place, field in enumerate(fields)
    ]
    modifiers = {key: getattr(inst, key) for key in ("cbsz", "blgp") if getattr(inst, key)}
    if "_scale_" in name:
        operands += [_register(number, None) for number in (inst.scale_src0, inst.scale_src1)]
        if inst.opsel:
            modifiers["op_sel"] = [*_bits(inst.opsel, 2), 0]
        modifiers["op_sel_hi"] = [*_bits(inst.opsel_hi, 2), 0]
    return [_register(inst.vdst.offset, None, bool(inst.acc_cd)), *operands], modifiers


def _accumulator_move(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """The mnemonic says which operand is an accumulator register."""
    writes, reads = name != "v_accvgpr_read", name != "v_accvgpr_write"
    source = _register(inst.src0.offset, None, reads)
    return [_register(inst.vdst.offset, None, writes), source], {}


def _local(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    wide = re.search(r"ds_(read|write)2", name)
    given = ("offset0", "offset1") if wide else ()
    modifiers: dict[str, Any] = {key: getattr(inst, key) for key in given if getattr(inst, key)}
    if not wide and (offset := inst.offset0 | inst.offset1 << 8):
        modifiers["offset"] = offset
    keys = [key for key in ("vdst", "addr", "data0", "data1") if key in inst.operands]
    if name == "ds_swizzle_b32":
        keys = ["vdst", "addr"]
    data = ("vdst", "data0", "data1")
    return [
        _register(getattr(inst, key).offset, None, bool(inst.acc and key in data)) for key in keys
    ], modifiers


def _global(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    modifiers: dict[str, Any] = {key: True for key in ("sc0", "sc1", "nt") if getattr(inst, key)}
    if inst.offset:
        modifiers["offset"] = (inst.offset ^ 0x1000) - 0x1000
    base = "off" if inst.saddr.offset == 127 else f"s{inst.saddr.offset}"
    address = _register(inst.addr.offset, None)
    if "_lds_" in name:
        return [address, base], modifiers
    acc = bool(inst.acc)
    loaded, data = (_register(field.offset, None, acc) for field in (inst.vdst, inst.data))
    if "_load_" in name:
        return [loaded, address, base], modifiers
    returned = [loaded] if "_atomic_" in name and inst.sc0 else []
    return [*returned, address, data, base], modifiers


def _buffer(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    keys = ("offen", "idxen", "sc0", "sc1", "lds", "nt")
    modifiers: dict[str, Any] = {key: True for key in keys if getattr(inst, key)}
    if name in ("buffer_wbl2", "buffer_inv"):
        return [], modifiers
    if inst.offset:
        modifiers["offset"] = inst.offset
    address = _register(inst.vaddr.offset, None) if inst.offen else "off"
    data = [] if inst.lds else [_register(inst.vdata.offset, None, bool(inst.acc))]
    resource = [f"s{inst.srsrc.offset}", _register(inst.soffset.offset, None)]
    return [*data, address, *resource], modifiers


def _scalar(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    literal = inst._literal
    operands = [_register(getattr(inst, field).offset, literal) for field in _sources(inst)]
    if "sdst" in inst.operands:
        operands.insert(0, f"s{inst.sdst.offset}")
    return operands, {}


def _scalar_constant(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    if "reg" in name:
        numbers = {1: "MODE"}
        field = inst.simm16
        modifiers = {
            "hwreg": numbers[field & 63],
            "hwreg_offset": field >> 6 & 31,
            "hwreg_size": (field >> 11) + 1,
        }
        return [str(inst._literal)], modifiers
    return [f"s{inst.sdst.offset}", str(inst.simm16)], {}


def _program(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    value = inst.simm16
    if name == "s_waitcnt":
        counters = {
            "vmcnt": (value & 15 | value >> 14 << 4, 63),
            "expcnt": (value >> 4 & 7, 7),
            "lgkmcnt": (value >> 8 & 15, 15),
        }
        return [], {key: count for key, (count, most) in counters.items() if count != most}
    plain = name.startswith(("s_branch", "s_cbranch")) or name in ("s_endpgm", "s_barrier")
    return ([] if plain else [str(value)]), {}


def _scalar_memory(inst: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    if name == "s_memrealtime":
        return [f"s{inst.sdata.offset}"], {}
    offset = str(inst.offset) if inst.imm else f"s{inst.soffset.offset}"
    return [f"s{inst.sdata.offset}", f"s{inst.sbase.offset}", offset], {}


_ENCODINGS = (
    ("VOP3PX2", _matrix),
    ("VOP3P_MFMA", _matrix),
    ("VOP3P", _packed),
    ("VOP3", _vop3),
    ("VOP", _plain_vector),
    ("SOPP", _program),
    ("SOPK", _scalar_constant),
    ("SOP", _scalar),
    ("SMEM", _scalar_memory),
    ("DS", _local),
    ("GLOBAL", _global),
    ("MUBUF", _buffer),
)


def from_binary(inst: Any) -> Text:
    """A decoded instruction as a listing would show it."""
    name = re.sub(r"_e(32|64)$", "", inst.op_name.lower())
    name = name.replace("v_mad_mix", "v_fma_mix")  # LLVM's name: one rounding on gfx950
    kind = type(inst).__name__
    describe = next(function for prefix, function in _ENCODINGS if kind.startswith(prefix))
    if name.startswith("v_accvgpr"):
        name = name.removesuffix("_b32")
        return f"{name}_b32", *_accumulator_move(inst, name)
    return name, *describe(inst, name)
