"""Tests of the SASS scanner: what it reports, and what it accepts."""

from __future__ import annotations

import pytest

from support.sass import overwritten_operands, reused_barriers

LISTING = """
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   QGMMA.64x32x32.F32.E4M3.E4M3 R24, R40, gdesc[UR12], RZ, !UPT ;
        /*0020*/                   QGMMA.64x32x32.F32.E4M3.E4M3 R24, R44, gdesc[UR12], R24, gsb0 ;
{between}
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   LDS.128 R40, [R2] ;
        /*0060*/                   EXIT ;
"""

OVERWRITES = {
    "move": "MOV R47, R3 ;",
    "wide_load": "LDS.128 R36, [R2] ;|LDS.128 R44, [R2+0x10] ;",
    "predicated": "@!P0 IADD3 R40, R1, R2, RZ ;",
    "wide_multiply": "IMAD.WIDE.U32 R42, R1, R2, R4 ;",
    "predicate_result": "LOP3.LUT P0, R41, R1, R2, RZ, 0xc0, !PT ;",
    "accumulator_of_another": "QGMMA.64x64x32.F32.E4M3.E4M3 R16, R60, gdesc[UR12], R16, gsb0 ;",
}
HARMLESS = {
    "nothing": "NOP ;",
    "reads": "FADD R1, R40, R41 ;",
    "store": "STG.E.128 desc[UR4][R40.64], R44 ;",
    "neighbour": "LDS.128 R48, [R2] ;",
    "compare": "ISETP.GE.AND P0, PT, R40, R41, PT ;",
    "uniform": "R2UR UR40, R41 ;",
}


def planted(text: str) -> str:
    lines = [f"        /*0030*/                   {line}" for line in text.split("|")]
    return LISTING.format(between="\n".join(lines))


@pytest.mark.parametrize("text", OVERWRITES.values(), ids=OVERWRITES)
def test_scan_finds_overwritten_operands(text: str) -> None:
    assert len(overwritten_operands(planted(text))) == 1


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_scan_accepts_other_instructions(text: str) -> None:
    assert overwritten_operands(planted(text)) == []


def test_scan_follows_branches_and_groups() -> None:
    """A loop whose wait leaves one group in flight: the next round overwrites its operand."""
    loop = """
.L_x_1:
        /*0000*/                   LDS.128 R40, [R2] ;
        /*0010*/                   QGMMA.64x32x32.F32.E4M3.E4M3 R24, R40, gdesc[UR12], R24, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0030*/              @P0  BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
"""
    assert overwritten_operands(loop.format(left="0x0")) == []
    assert len(overwritten_operands(loop.format(left="0x1"))) == 1


def test_a_barrier_that_shares_its_memory_is_found() -> None:
    """SASS from ptxas: an unused mbarrier shares its memory with the scratch of a conversion."""
    barriers = """
        /*13c70*/                   SYNCS.EXCH.64 URZ, [UR5+0x30c00], UR6 ;
        /*14060*/             @!UP0 SYNCS.EXCH.64 URZ, [UR5+0x30800], UR8 ;
"""
    scratch = "        /*1fb00*/                   STS [R230+0x30800], R229 ;\n"
    assert reused_barriers(barriers + scratch) == [0x30800]
    assert reused_barriers(barriers + scratch.replace("0x30800", "0x30810")) == []
