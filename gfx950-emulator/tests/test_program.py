"""Listings: operands, modifiers, labels, source lines, and the facts of a code object."""

from __future__ import annotations

import pytest

from gfx950_support.assembler import assemble, read_instruction
from gfx950_support.listings import listing, program_of
from gfx950emu.effects import Unit, effects
from gfx950emu.listing import read_program
from gfx950emu.program import EXEC, M0, SCALARS, VCC, Operand

OPERANDS = {
    "v_mov_b32_e32 v7, v3": (Operand("v", 7), Operand("v", 3)),
    "v_accvgpr_read_b32 v1, a0": (Operand("v", 1), Operand("v", 256)),
    "ds_write_b128 v4, a[12:15]": (Operand("v", 4), Operand("v", 268, 4)),
    "s_mov_b64 s[2:3], vcc": (Operand("s", 2, 2), Operand("s", 106, 2)),
    "s_mov_b32 m0, exec_hi": (Operand("s", 124), Operand("s", 127)),
    "v_add_f32_e64 v0, -v3, |v1|": (
        Operand("v", 0),
        Operand("v", 3, neg=True),
        Operand("v", 1, absolute=True),
    ),
    "v_mul_f32_e64 v0, -|s4|, -4.0": (
        Operand("v", 0),
        Operand("s", 4, neg=True, absolute=True),
        Operand("c", 0xC0800000, 0),
    ),
    "v_or_b32_e32 v0, -16, v1": (Operand("v", 0), Operand("c", -16), Operand("v", 1)),
    "v_or_b32_e32 v0, 0xffff0000, v1": (Operand("v", 0), Operand("c", 0xFFFF0000), Operand("v", 1)),
    "buffer_load_dword v1, off, s[4:7], 0": (
        Operand("v", 1),
        Operand("off"),
        Operand("s", 4, 4),
        Operand("c", 0),
    ),
}


@pytest.mark.parametrize("text", OPERANDS)
def test_operands(text: str) -> None:
    assert read_instruction(text).operands == OPERANDS[text]


def test_modifiers() -> None:
    mfma = read_instruction(
        "v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[2:9], v[10:13], a[0:3], v1, v14 "
        "op_sel:[0,1,0] op_sel_hi:[1,0,0] blgp:4"
    )
    assert mfma.integers("op_sel", ()) == (0, 1, 0)
    assert mfma.integers("op_sel_hi", ()) == (1, 0, 0)
    assert (mfma.integer("cbsz"), mfma.integer("blgp")) == (0, 4)
    load = read_instruction("buffer_load_dwordx4 v1, s[4:7], s3 offen offset:4095 nt lds")
    assert [operand.kind for operand in load.operands] == ["v", "s", "s"]
    assert load.modifiers == {"offen": True, "offset": 4095, "lds": True, "nt": True}
    moved = read_instruction("v_mov_b32_dpp v1, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    assert (moved.encoding, moved.integers("quad_perm", ())) == ("dpp", (1, 0, 3, 2))
    swap = read_instruction("ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,16)")
    assert swap.modifiers == {"offset": 0x401F}
    mode = read_instruction("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1")
    assert mode.modifiers == {"hwreg": "MODE", "hwreg_offset": 23, "hwreg_size": 1}
    assert mode.operands == (Operand("c", 1),)
    wait = read_instruction("s_waitcnt vmcnt(3) lgkmcnt(0)")
    assert wait.modifiers == {"vmcnt": 3, "lgkmcnt": 0}
    assert read_instruction("buffer_wbl2 sc1").modifiers == {"sc1": True}


@pytest.mark.parametrize(
    "text", ["v_mov_b32 v0, v[3:", "s_waitcnt foo(3)", "v_mov_b32 v0, v1 strange"]
)
def test_what_cannot_be_assembled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="gfx950"):
        read_instruction(text)


def test_a_listing() -> None:
    body = """
    s_branch .LBB0_1
    v_nop
    .LBB0_1:
    s_mov_b32 s4, 0
    .loc\t1 9 3                          ; other.py:9:3
    s_cbranch_scc0 .LBB0_1
    """
    program = program_of(listing(body, arguments=2, waves=4, lds=512, preload=3))
    assert program.name == "written"
    assert [each.name for each in program.instructions] == [
        "s_branch",
        "v_nop",
        "s_mov_b32",
        "s_cbranch_scc0",
        "s_endpgm",
    ]
    assert program.labels[".LBB0_1"] == 2
    assert [each.line for each in program.instructions[::3]] == ["written.py:7:0", "other.py:9:3"]
    assert [(each.offset, each.size) for each in program.arguments] == [(0, 8), (8, 8)]
    assert (program.num_waves, program.lds, program.kernarg_size) == (4, 512, 16)
    # A loader that preloads arguments starts behind the code that would load them.
    assert (program.preloaded_dwords, program.entry) == (3, 2)
    assert program.mode == 0b11_1111_0000


def test_what_is_no_code_object_is_refused() -> None:
    code = assemble(listing("s_nop 0"))
    for content in (b"; PTX", code[:48] + b"\x4c" + code[49:]):
        with pytest.raises(ValueError, match="need an ELF file for gfx950"):
            read_program(content)
    with pytest.raises(ValueError, match="need s_sleep 1, got"):
        read_program(code, listing("s_sleep 1"))


_EXEC = {SCALARS + EXEC, SCALARS + EXEC + 1}
EFFECTS = {
    "v_add_u32_e32 v1, s3, v2": (_EXEC | {2, SCALARS + 3}, {1}, Unit.VALU),
    "v_exp_f32_e32 v1, v2": (_EXEC | {2}, {1}, Unit.TRANSCENDENTAL),
    "v_fmac_f32_e32 v1, v2, v3": (_EXEC | {1, 2, 3}, {1}, Unit.VALU),
    "v_mov_b32_dpp v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf": (_EXEC | {1, 2}, {1}, Unit.VALU),
    "v_div_fmas_f32 v0, v1, v2, v3": (
        _EXEC | {1, 2, 3, SCALARS + VCC, SCALARS + VCC + 1},
        {0},
        Unit.VALU,
    ),
    "v_mad_u64_u32 v[0:1], s[4:5], v2, v3, v[6:7]": (
        _EXEC | {2, 3, 6, 7},
        {0, 1, SCALARS + 4, SCALARS + 5},
        Unit.VALU,
    ),
    "v_permlane32_swap_b32 v1, v2": (_EXEC | {1, 2}, {1, 2}, Unit.VALU),
    "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[4:7]": (
        _EXEC | {0, 1, 2, 3, 260, 261, 262, 263},
        {256, 257, 258, 259},
        Unit.MFMA,
    ),
    "s_and_saveexec_b64 s[2:3], vcc": (
        _EXEC | {SCALARS + VCC, SCALARS + VCC + 1},
        _EXEC | {SCALARS + 2, SCALARS + 3},
        Unit.SALU,
    ),
    "s_cmp_lt_i32 s2, s3": ({SCALARS + 2, SCALARS + 3}, set(), Unit.SALU),
    "s_load_dwordx2 s[4:5], s[0:1], 0x8": (
        {SCALARS, SCALARS + 1},
        {SCALARS + 4, SCALARS + 5},
        Unit.SMEM,
    ),
    "global_store_dwordx2 v1, v[2:3], s[4:5]": (
        _EXEC | {1, 2, 3, SCALARS + 4, SCALARS + 5},
        set(),
        Unit.VMEM_STORE,
    ),
    "global_atomic_add v0, v1, v2, s[4:5] sc0": (
        _EXEC | {1, 2, SCALARS + 4, SCALARS + 5},
        {0},
        Unit.VMEM_STORE,
    ),
    "buffer_load_dword v1, s[4:7], 0 offen lds": (
        _EXEC | {1, SCALARS + 4, SCALARS + 5, SCALARS + 6, SCALARS + 7, SCALARS + M0},
        set(),
        Unit.VMEM_LOAD,
    ),
    "ds_read_b64 v[2:3], v1": (_EXEC | {1}, {2, 3}, Unit.LDS),
    "ds_write2_b32 v1, v2, v3 offset1:1": (_EXEC | {1, 2, 3}, set(), Unit.LDS),
    "ds_add_rtn_u32 v4, v1, v2": (_EXEC | {1, 2}, {4}, Unit.LDS),
}


@pytest.mark.parametrize("text", EFFECTS)
def test_registers_and_unit_of_an_instruction(text: str) -> None:
    reads, writes, unit = EFFECTS[text]
    found = effects(read_instruction(text))
    assert (found.reads, found.writes, found.unit) == (reads, writes, unit)
