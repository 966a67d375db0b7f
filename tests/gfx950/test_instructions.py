"""Vector and scalar instructions against the pseudocode of AMD's manual."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.gfx950.corrections import CORRECTIONS, corrected
from support.gfx950.pseudocode import PSEUDOCODE, Lane, Value
from support.gfx950.single import Single

from mxpert.testing.gfx950.instructions import TABLE

LANES = 64
VCC = 106
PARTIAL = 0xF0F0_1234_8000_0001

_ACROSS_LANES = re.compile(r"v_(read|write)(first)?lane_b32|v_permlane\w+|v_mfma\w+")
VECTOR = sorted(
    name
    for name in TABLE
    if name.startswith("v_") and name in PSEUDOCODE and not _ACROSS_LANES.fullmatch(name)
)
_CONTROL = re.compile(r"s_(load_\w+|nop|sleep|waitcnt|barrier|endpgm|setprio|[gs]etreg\w+|c?branch\w*)")
SCALAR = sorted(
    name
    for name in TABLE
    if name.startswith("s_") and name in PSEUDOCODE and not _CONTROL.fullmatch(name)
)
BRANCHES = sorted(name for name in TABLE if re.match(r"s_c?branch", name))


class Shape:
    """Operands that a pseudocode text reads and writes."""

    def __init__(self, text: str) -> None:
        left = re.sub(r"=(?!=)[^\n]*", "=", text)
        self.wide = [
            bool(re.search(rf"S{k}(\.[uibf]64\b|\[63 : 32\]|\.u32\[OPSEL)", text)) for k in range(3)
        ]
        self.sources = max((k + 1 for k in range(3) if re.search(rf"\bS{k}\b", text)), default=0)
        self.literal = "SIMM32" in text
        self.mask_result = "D0.u64[laneId] =" in left
        self.flag = bool(re.search(r"VCC = 0x", text))
        self.carries = self.flag or "VCC.u64[laneId] =" in left or "D1" in left
        self.reads_mask = bool(re.search(r"VCC\.u64\[laneId\](?! =)", text))
        wide = r"D0(\.[uib]64\b|\[63 : 32\]|\.u32\[63 : 32\])"
        self.wide_result = bool(re.search(wide, left)) and not self.mask_result
        found = re.search(r"\.(bf16|f16|f32) =", left)
        self.float = found[1] if found else ""


def same(kind: str, got: int, want: int) -> bool:
    """Equal bits; NaN equals NaN in results of a float type."""
    if got == want:
        return True
    width, exponent = {"f32": (32, 0x7F800000), "bf16": (16, 0x7F80), "f16": (16, 0x7C00)}.get(
        kind, (0, 0)
    )
    if not width:
        return False
    for place in range(0, 64, width):
        x, y = (value >> place & ((1 << width) - 1) for value in (got, want))
        magnitude = (1 << (width - 1)) - 1
        if x != y and not (x & magnitude > exponent and y & magnitude > exponent):
            return False
    return True


# -- vector instructions ---------------------------------------------------------------------------

DESTINATION, SDST, MASK = 8, 20, 24
_PLACES = (32, 36, 40)
"""Registers of the operands: pairs are even."""


def listing(name: str, shape: Shape, sources: list[str]) -> str:
    """The instruction with these sources."""
    operands = []
    if shape.mask_result:
        operands.append(f"s[{SDST}:{SDST + 1}]")
    else:
        operands.append(f"v[{DESTINATION}:{DESTINATION + 1}]" if shape.wide_result else f"v{DESTINATION}")
    if shape.carries:
        operands.append(f"s[{SDST}:{SDST + 1}]")
    if shape.literal:
        sources = [sources[0], "0x40490fdb", sources[1]]
        if name == "v_fmaak_f32":
            sources = [sources[0], sources[2], sources[1]]
    operands += sources
    if shape.reads_mask and name != "v_div_fmas_f32":
        operands.append(f"s[{MASK}:{MASK + 1}]")
    return f"{name} {', '.join(operands)}"


def vector_source(shape: Shape, place: int) -> str:
    register = _PLACES[place]
    return f"v[{register}:{register + 1}]" if shape.wide[place] else f"v{register}"


def source_bits(single: Single, shape: Shape, place: int, wave: int, lane: int, text: str) -> int:
    """Bits of a source operand, source modifiers applied."""
    state = single.state
    inner = text.strip("-|")
    if found := re.fullmatch(r"([vs])(?:(\d+)|\[(\d+):\d+\])", inner):
        register = int(found[2] or found[3])
        read = (
            (lambda k: int(state.vector[register + k, wave, lane]))
            if found[1] == "v"
            else (lambda k: int(state.scalar[register + k, wave]))
        )
        bits = read(0) | (read(1) << 32 if shape.wide[place] else 0)
    else:
        return {"1.0": 0x3F800000}.get(text) or int(text, 0) & 0xFFFFFFFF
    if "|" in text:
        bits &= 0x7FFFFFFF
    return bits ^ 0x80000000 if text.startswith("-") else bits


def check_vector(
    name: str, sources: list[str], single: Single, *, suffix: str = "", step: int = 1
) -> None:
    """Compare all lanes of an instruction with the pseudocode."""
    text = corrected(name)
    shape = Shape(text)
    before = Single(single.waves, single.seed)
    before.set_exec([int(x) for x in single.state.read_scalar64(126)])
    before.state.mode[:] = single.state.mode
    instruction = listing(name, shape, sources) + suffix
    single.run(instruction)
    mask_register = VCC if name == "v_div_fmas_f32" else MASK
    for wave in range(single.waves):
        for lane in range(0, LANES, step):
            if not before.state.active[wave, lane]:
                check_inactive(single, before, shape, wave, lane)
                continue
            variables = environment(before, shape, sources, wave, lane, mask_register)
            run = Lane(variables)
            run.run(text)
            check_lane(single, shape, run.variables, wave, lane, instruction, suffix)


def environment(
    single: Single, shape: Shape, sources: list[str], wave: int, lane: int, mask_register: int
) -> dict[str, Any]:
    state = single.state
    pair = int(state.scalar[mask_register, wave]) | int(state.scalar[mask_register + 1, wave]) << 32
    old = [int(state.vector[DESTINATION + k, wave, lane]) for k in range(2)]
    registers = {
        0: Value("b", 32, old[0]),
        1: Value("b", 32, int(state.vector[_PLACES[0], wave, lane])),
    }
    variables = {
        "D0": Value("b", 64, old[0] | old[1] << 32 if shape.wide_result else old[0]),
        "D": Value("b", 32, old[0]),
        "D1": Value("b", 64, 0),
        "VCC": Value("b", 64, pair),
        "laneId": Value("u", 32, lane),
        "SIMM32": Value("b", 32, 0x40490FDB),
        "WAVE_MODE": {"IEEE": Value("u", 1, 1)},
        "FP16_OVFL": bool(state.mode[wave] >> 23 & 1),
        "ROUND_MODE": Value("u", 2, 0),
        "ROUND_NEAREST_EVEN": Value("u", 2, 0),
        "VGPR": {lane: registers},
        "VDST": Value("u", 32, 0),
        "SRC0": Value("u", 32, 1),
        "OPSEL": Value("b", 4, 0),
    }
    for place, source in enumerate(sources):
        bits = source_bits(single, shape, place, wave, lane, source)
        variables[f"S{place}"] = Value("b", 64 if shape.wide[place] else 32, bits)
    return variables


def check_inactive(single: Single, before: Single, shape: Shape, wave: int, lane: int) -> None:
    for register in range(DESTINATION, DESTINATION + 2):
        kept = before.state.vector[register, wave, lane]
        assert single.state.vector[register, wave, lane] == kept, "an inactive lane is written"
    if shape.mask_result or shape.carries:
        assert not _bit(single, wave, lane), "an inactive lane's bit is set"


def _bit(single: Single, wave: int, lane: int) -> bool:
    return bool(single.state.scalar[SDST + lane // 32, wave] >> np.uint32(lane % 32) & 1)


def check_lane(
    single: Single, shape: Shape, result: dict[str, Any], wave: int, lane: int, text: str, suffix: str
) -> None:
    where = f"{text}: wave {wave}, lane {lane}, " + str(
        {k: hex(v.bits) for k, v in result.items() if k in ("S0", "S1", "S2")}
    )
    if shape.carries:
        flag = result["D1"] if "D1" in result and not shape.flag and "mad" in text else result["VCC"]
        want = bool(flag.bits) if shape.flag or "mad" in text else bool(flag.bits >> lane & 1)
        assert _bit(single, wave, lane) == want, where
    if shape.mask_result:
        assert _bit(single, wave, lane) == bool(result["D0"].bits >> lane & 1), where
        return
    got = int(single.state.vector[DESTINATION, wave, lane])
    if shape.wide_result:
        got |= int(single.state.vector[DESTINATION + 1, wave, lane]) << 32
    want = written(result, shape)
    if "clamp" in suffix:
        number = np.array(want, np.uint32).view(np.float32)
        want = int(np.clip(np.nan_to_num(number, nan=0.0), 0, 1).astype(np.float32).view(np.uint32))
    assert same(shape.float, got, want), f"{where}: {got:#x}, not {want:#x}"


def written(result: dict[str, Any], shape: Shape) -> int:
    """The destination after the pseudocode has run."""
    for name in ("D", "VGPR"):
        touched = result[name] if name == "D" else next(iter(result["VGPR"].values()))[0]
        if name == "D" and "TTBL" in result:
            return int(touched.bits & 0xFFFFFFFF)
        if name == "VGPR" and ("dstword" in result or "dstbyte" in result):
            return int(touched.bits)
    return int(result["D0"].bits) & ((1 << (64 if shape.wide_result else 32)) - 1)


def variants(name: str) -> list[tuple[list[str], str]]:
    """Sources and output modifiers to try after all-vector sources."""
    shape = Shape(corrected(name))
    vectors = [vector_source(shape, place) for place in range(shape.sources)]
    found = []
    if not shape.literal and not _OPSEL.match(name):
        scalar = list(vectors)
        scalar[0] = f"s[{_PLACES[0]}:{_PLACES[0] + 1}]" if shape.wide[0] else f"s{_PLACES[0]}"
        if len(scalar) > 1 and not any(shape.wide):
            scalar[-1] = "1.0" if shape.float == "f32" else "-5"
        found.append((scalar, ""))
    if "f32" in name and re.search(r"S0\.f32", corrected(name)):
        floats = [k for k in range(shape.sources) if re.search(rf"S{k}\.f32", corrected(name))]
        signed = list(vectors)
        for k, pattern in zip(floats, ("-{}", "|{}|", "-|{}|"), strict=False):
            signed[k] = pattern.format(vectors[k])
        clamps = " clamp" if shape.float == "f32" and not shape.carries else ""
        found.append((signed, clamps))
    return found


_OPSEL = re.compile(r"v_pk_|v_cvt_scalef32|v_bitop3")
"""Tested with their selections below."""


@pytest.mark.parametrize("name", [name for name in VECTOR if not _OPSEL.match(name)])
def test_vector(name: str) -> None:
    shape = Shape(corrected(name))
    single = Single(2, seed=1)
    single.set_exec([(1 << 64) - 1, PARTIAL])
    check_vector(name, [vector_source(shape, k) for k in range(shape.sources)], single)
    for number, (sources, suffix) in enumerate(variants(name)):
        check_vector(name, sources, Single(1, seed=2 + number), suffix=suffix, step=3)
