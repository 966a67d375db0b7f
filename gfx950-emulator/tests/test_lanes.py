"""Instructions that move data between lanes, and DPP and SDWA, against plain loops."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gfx950_support.pseudocode import PSEUDOCODE, Lane, Value
from gfx950_support.single import Single
from gfx950_support.text import parse_instruction
from gfx950emu.instructions import UnknownInstructionError
from gfx950emu.program import M0

LANES = 64
PARTIAL = 0xF0F0_1234_8000_0001

# Source lane of a lane in a row of 16, None if there is none; from the manual's chapter on DPP.
CONTROLS = {
    "quad_perm:[3,0,2,1]": lambda lane: lane // 4 * 4 + (3, 0, 2, 1)[lane % 4],
    "row_shl:1": lambda lane: lane + 1 if lane % 16 < 15 else None,
    "row_shl:8": lambda lane: lane + 8 if lane % 16 < 8 else None,
    "row_shr:2": lambda lane: lane - 2 if lane % 16 >= 2 else None,
    "row_shr:15": lambda lane: lane - 15 if lane % 16 >= 15 else None,
    "row_ror:4": lambda lane: lane // 16 * 16 + (lane - 4) % 16,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
    "wave_shr:1": lambda lane: lane - 1 if lane else None,
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
}


@pytest.mark.parametrize("masks", [(15, 15), (10, 15), (15, 3)], ids=["all", "rows", "banks"])
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"], ids=["keep", "zero"])
@pytest.mark.parametrize("control", CONTROLS)
def test_dpp(control: str, bound: str, masks: tuple[int, int]) -> None:
    """v_mov and v_add: lanes without a source keep their value, or read 0 with bound_ctrl."""
    for execution in ((1 << LANES) - 1, PARTIAL):
        single = Single(1)
        single.set_exec([execution])
        suffix = f" {control} row_mask:{masks[0]:#x} bank_mask:{masks[1]:#x}{bound}"
        old = [[int(x) for x in single.state.vector[r, 0]] for r in range(8)]
        single.run(f"v_mov_b32_dpp v1, v2{suffix}")
        single.run(f"v_add_u32_dpp v4, v2, v3{suffix}")
        for lane in range(LANES):
            source = CONTROLS[control](lane)
            live = source is not None and execution >> source & 1
            enabled = execution >> lane & masks[0] >> lane // 16 & masks[1] >> lane // 4 % 4 & 1
            moved, added = old[1][lane], old[4][lane]
            if enabled and (live or bound):
                moved = old[2][source] if live else 0
                added = moved + old[3][lane] & 0xFFFFFFFF
            assert int(single.state.vector[1, 0, lane]) == moved, (lane, control)
            assert int(single.state.vector[4, 0, lane]) == added, (lane, control)


SELECTIONS = {
    "DWORD": (0, 32),
    **{f"BYTE_{k}": (8 * k, 8) for k in range(4)},
    **{f"WORD_{k}": (16 * k, 16) for k in range(2)},
}


def _extended(value: int, selection: str, signed: bool) -> int:
    shift, bits = SELECTIONS[selection]
    part = value >> shift & ((1 << bits) - 1)
    if signed and part >> (bits - 1):
        part |= 0xFFFFFFFF << bits
    return part & 0xFFFFFFFF


@pytest.mark.parametrize("signed", [False, True], ids=["zero", "sext"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_sdwa_source(selection: str, signed: bool) -> None:
    single = Single(1)
    old = single.state.vector[:8, 0].copy()
    form = "sext({})" if signed else "{}"
    sources = f"{form.format('v2')}, {form.format('v3')}"
    tail = f"src0_sel:{selection} src1_sel:WORD_1"
    single.run(f"v_add_u32_sdwa v1, {sources} dst_sel:DWORD dst_unused:UNUSED_PAD {tail}")
    single.run(f"v_cmp_lt_i16_sdwa s[20:21], {sources} {tail}")
    single.run(f"v_or_b32_sdwa v5, s4, v3 dst_sel:DWORD dst_unused:UNUSED_PAD {tail}")
    for lane in range(LANES):
        a = _extended(int(old[2, lane]), selection, signed)
        b = _extended(int(old[3, lane]), "WORD_1", signed)
        assert int(single.state.vector[1, 0, lane]) == a + b & 0xFFFFFFFF
        x, y = ((part & 0xFFFF ^ 0x8000) - 0x8000 for part in (a, b))
        assert (single.state.scalar[20 + lane // 32, 0] >> np.uint32(lane % 32) & 1) == (x < y)
        scalar = _extended(int(single.state.scalar[4, 0]), selection, False)
        plain = _extended(int(old[3, lane]), "WORD_1", False)
        assert int(single.state.vector[5, 0, lane]) == scalar | plain


@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_sdwa_destination(selection: str, unused: str) -> None:
    single = Single(1)
    single.set_exec([PARTIAL])
    old = single.state.vector[:8, 0].copy()
    tail = "src0_sel:DWORD src1_sel:DWORD"
    single.run(f"v_add_u32_sdwa v1, v2, v3 dst_sel:{selection} dst_unused:{unused} {tail}")
    shift, bits = SELECTIONS[selection]
    mask = (1 << bits) - 1 << shift
    for lane in range(LANES):
        want = int(old[1, lane])
        if PARTIAL >> lane & 1:
            rest = want & ~mask if unused == "UNUSED_PRESERVE" else 0
            want = rest | (int(old[2, lane]) + int(old[3, lane])) << shift & mask
        assert int(single.state.vector[1, 0, lane]) == want


def _registers(single: Single, wave: int, *numbers: int) -> dict[int, dict[int, Value]]:
    """VGPR[lane][register] of the pseudocode."""
    return {
        lane: {r: Value("b", 32, int(single.state.vector[r, wave, lane])) for r in numbers}
        for lane in range(LANES)
    }


def _number(value: int) -> Value:
    return Value("u", 32, value)


@pytest.mark.parametrize("name", ["v_permlane16_swap_b32", "v_permlane32_swap_b32"])
def test_swap(name: str) -> None:
    single, before = Single(2), Single(2)
    single.run(f"{name} v1, v2")
    for wave in range(2):
        table = _registers(before, wave, 1, 2)
        Lane({"VGPR": table, "VDST": _number(1), "SRC0": _number(2)}).run(PSEUDOCODE[name])
        for lane in range(LANES):
            for register in (1, 2):
                got = int(single.state.vector[register, wave, lane])
                assert got == table[lane][register].bits


def test_swap_of_inactive_lanes() -> None:
    """Pairs that are inactive stay; a pair with one active lane is refused."""
    single = Single(1)
    old = single.state.vector[:4, 0].copy()
    half = 0x0000_FFFF_0000_FFFF
    single.set_exec([half])
    single.run("v_permlane32_swap_b32 v1, v2")
    inactive = [lane for lane in range(LANES) if not half >> lane & 1]
    np.testing.assert_array_equal(single.state.vector[:4, 0, inactive], old[:, inactive])
    with pytest.raises(UnknownInstructionError, match="both lanes of each pair active"):
        single.run("v_permlane16_swap_b32 v1, v2")


@pytest.mark.parametrize("execution", [(1 << LANES) - 1, PARTIAL, 1 << 63, 0])
def test_read_and_write_lane(execution: int) -> None:
    single, before = Single(3), Single(3)
    single.set_exec([execution] * 3)
    for text in (
        "v_readfirstlane_b32 s10, v1",
        "v_readlane_b32 s11, v1, s12",
        "v_readlane_b32 s13, v1, 5",
        "v_writelane_b32 v2, s14, m0",
        "v_writelane_b32 v2, -3, 7",
    ):
        single.run(text)
    for wave in range(3):
        state = before.state
        table = _registers(before, wave, 1, 2)
        variables: dict[str, Any] = {
            "VGPR": table,
            "EXEC": Value("b", 64, execution),
            "SRC0": _number(1),
            "VDST": _number(2),
            "D0": Value("b", 32, 0),
        }
        run = Lane(dict(variables))
        run.run(PSEUDOCODE["v_readfirstlane_b32"])
        assert int(single.state.scalar[10, wave]) == run.variables["D0"].bits
        for target, lane in ((11, int(state.scalar[12, wave])), (13, 5)):
            run = Lane(variables | {"S1": _number(lane)})
            run.run(PSEUDOCODE["v_readlane_b32"])
            assert int(single.state.scalar[target, wave]) == run.variables["D0"].bits
        for value, lane in (
            (int(state.scalar[14, wave]), int(state.scalar[M0, wave])),
            (0xFFFFFFFD, 7),
        ):
            write = variables | {"S0": _number(value), "S1": _number(lane)}
            Lane(write).run(PSEUDOCODE["v_writelane_b32"])
        got = [int(x) for x in single.state.vector[2, wave]]
        assert got == [table[lane][2].bits for lane in range(LANES)]


@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("name", ["ds_bpermute_b32", "ds_permute_b32"])
def test_permute(name: str, offset: int) -> None:
    single, before = Single(1), Single(1)
    single.set_exec([PARTIAL | 0xFFFF])
    single.run(f"{name} v3, v1, v2 offset:{offset}")
    table = _registers(before, 0, 1, 2, 3)
    run = Lane(
        {
            "VGPR": table,
            "EXEC": Value("b", 64, PARTIAL | 0xFFFF),
            "OFFSET": _number(offset),
            "ADDR": _number(1),
            "DATA0": _number(2),
            "VDST": _number(3),
        }
    )
    # "declare" names the fields of the instruction, which stay as given.
    run.run(PSEUDOCODE[name])
    assert [int(x) for x in single.state.vector[3, 0]] == [table[k][3].bits for k in range(LANES)]
    assert single.loads == [("lgkm", (3,))]


SWIZZLES = {
    "SWAP,16": lambda lane: lane ^ 16,
    "SWAP,1": lambda lane: lane ^ 1,
    "REVERSE,8": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "BROADCAST,4,2": lambda lane: lane // 4 * 4 + 2,
    "QUAD_PERM,1,3,0,2": lambda lane: lane // 4 * 4 + (1, 3, 0, 2)[lane % 4],
}


@pytest.mark.parametrize("pattern", SWIZZLES)
def test_swizzle(pattern: str) -> None:
    """From LLVM's AMDGPUModifierSyntax; inactive lanes give 0."""
    single = Single(1)
    execution = PARTIAL | 0xFFFF
    single.set_exec([execution])
    old = single.state.vector[:4, 0].copy()
    single.run(f"ds_swizzle_b32 v1, v2 offset:swizzle({pattern})")
    for lane in range(LANES):
        source = SWIZZLES[pattern](lane)
        want = int(old[2, source]) if execution >> source & 1 else 0
        if not execution >> lane & 1:
            want = int(old[1, lane])
        assert int(single.state.vector[1, 0, lane]) == want


@pytest.mark.parametrize(
    "text, missing",
    [
        ("v_add_u64 v[0:1], v[2:3], v[4:5]", "v_add_u64"),
        ("v_add_f32 v0, v1, v2 mul:2", "mul"),
        ("v_add_f32 v0, v1, v2 op_sel:[1,0,0]", "op_sel"),
        ("v_add_u32 v0, -v1, v2", "float modifier"),
        ("v_mul_lo_u32 v0, v1, v2 clamp", "clamp"),
        ("v_cmp_eq_u32_dpp vcc, v1, v2 row_shr:1", "DPP"),
        ("v_mov_b32_dpp v0, v1 row_xmask:1", "DPP control"),
        ("v_readlane_b32_sdwa s0, v1, 0", "encoding"),
        ("v_pk_add_f32 v[0:1], v[2:3], 1.0", "high part"),
        ("v_add3_u32 v0, v1, v2", "4 operands"),
        ("v_add_u32 v0, v1, v2, v3", "fewer operands"),
        ("buffer_load_dword v0, v1, s[4:7], 0 idxen", "idxen|kind"),
        ("global_load_dword v0, v[2:3], off slc:1", "slc"),
        ("ds_read_b32 v0, v1 gds:1", "gds"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "FP16_OVFL"),
        ("s_getreg_b32 s0, hwreg(HW_REG_XCC_ID)", "MODE"),
        ("v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3] cbsz:1", "cbsz"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[10:17], v[0:3] cbsz:2", "cbsz"),
        ("ds_swizzle_b32 v0, v1 offset:0xe001", "swizzle"),
    ],
)
def test_unknown(text: str, missing: str) -> None:
    """Nothing that has no semantics is ignored in silence, whatever an assembler may write."""
    with pytest.raises(UnknownInstructionError, match=missing):
        Single(1).run(parse_instruction(text))


def test_mode() -> None:
    """FP16_OVFL is read back; a program that starts in another mode is refused."""
    single = Single(2)
    single.state.scalar[4] = (0, 1)
    single.run("s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s4")
    assert (single.state.mode >> 23 & 1).tolist() == [0, 1]
    single.run("s_getreg_b32 s5, hwreg(HW_REG_MODE, 20, 8)")
    assert single.state.scalar[5].tolist() == [0, 8]
    with pytest.raises(UnknownInstructionError, match="FP16_OVFL"):
        single.run("v_cvt_f16_f32 v0, v1")
    single.run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0")
    assert (single.state.mode >> 23 & 1).tolist() == [0, 0]


def test_messages_name_the_instruction() -> None:
    with pytest.raises(UnknownInstructionError) as error:
        Single(1).run(parse_instruction("v_frob_f32 v0, v1"))
    assert re.match(r"gfx950: v_frob_f32 v0, v1 — need one of \d+ mnemonics", str(error.value))
