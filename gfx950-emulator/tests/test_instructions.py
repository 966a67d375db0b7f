"""Vector and scalar instructions against the pseudocode of AMD's manual."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gfx950_support.corrections import CORRECTIONS, Correction, corrected
from gfx950_support.pseudocode import PSEUDOCODE, Lane, Value, same
from gfx950_support.shapes import Shape
from gfx950_support.single import Single
from gfx950emu.instructions import TABLE

LANES = 64
VCC = 106
PARTIAL = 0xF0F0_1234_8000_0001

_ACROSS_LANES = re.compile(r"v_(read|write)(first)?lane_b32|v_permlane\w+|v_mfma\w+")
VECTOR = sorted(
    name
    for name in TABLE
    if name.startswith("v_") and name in PSEUDOCODE and not _ACROSS_LANES.fullmatch(name)
)


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
        operands.append(
            f"v[{DESTINATION}:{DESTINATION + 1}]" if shape.wide_result else f"v{DESTINATION}"
        )
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
        one = {15: 0x3C00, 31: 0x3F800000, 63: 0x3FF << 52}[shape.signs[place]]
        return one if text == "1.0" else int(text, 0) & 0xFFFFFFFF
    sign = 1 << shape.signs[place]
    if "|" in text:
        bits &= ~sign
    return bits ^ sign if text.startswith("-") else bits


def check_vector(
    name: str, sources: list[str], single: Single, *, suffix: str = "", step: int = 1
) -> None:
    """Compare all lanes of an instruction with the pseudocode."""
    text = corrected(name)
    shape = Shape(text)
    before = Single(single.waves, single.seed, single.edges)
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
    single: Single,
    shape: Shape,
    result: dict[str, Any],
    wave: int,
    lane: int,
    text: str,
    suffix: str,
) -> None:
    where = f"{text}: wave {wave}, lane {lane}, " + str(
        {k: hex(v.bits) for k, v in result.items() if k in ("S0", "S1", "S2")}
    )
    if shape.carries:
        flag = (
            result["D1"] if "D1" in result and not shape.flag and "mad" in text else result["VCC"]
        )
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
        kind = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[shape.float]
        upper, bits = want >> 8 * kind().itemsize, f"u{kind().itemsize}"
        number = np.array(want - (upper << 8 * kind().itemsize), bits).view(kind)
        want = int(np.clip(np.nan_to_num(number, nan=0.0), 0, 1).astype(kind).view(bits))
        want |= upper << 8 * kind().itemsize
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


def edges_of(name: str) -> str:
    """The type whose special values registers hold, see `Single`."""
    found = re.search(r"_(f16|f64)", name)
    return found[1] if found else ""


_CLAMPED = re.compile(r"v_(?!cmp|cvt_pk|pack|frexp_exp|cvt_[iu]).*_(f16|f32|f64)|v_cvt_f\d\d_.*")


def variants(name: str) -> list[tuple[list[str], str]]:
    """Sources and output modifiers to try after all-vector sources."""
    shape = Shape(corrected(name))
    vectors = [vector_source(shape, place) for place in range(shape.sources)]
    found = []
    if not shape.literal and not _OPSEL.match(name):
        scalar = list(vectors)
        if not (shape.reads_mask or name == "v_div_fmas_f32"):  # one scalar register at most
            scalar[0] = f"s[{_PLACES[0]}:{_PLACES[0] + 1}]" if shape.wide[0] else f"s{_PLACES[0]}"
        if len(scalar) > 1 and (shape.float == "f64" or not any(shape.wide)):
            is_float = re.search(rf"S{len(scalar) - 1}\.f", corrected(name))
            scalar[-1] = "1.0" if shape.float and is_float else "-5"
        elif len(scalar) > 1 and shape.wide[len(scalar) - 1]:
            scalar[-1] = "0"
        found.append((scalar, ""))
    if not shape.literal and re.search(r"S0\.f(16|32|64)", corrected(name)):
        floats = [k for k in range(shape.sources) if re.search(rf"S{k}\.f", corrected(name))]
        signed = list(vectors)
        patterns = ("-{}",) * 3 if shape.carries else ("-{}", "|{}|", "-|{}|")
        for k, pattern in zip(floats, patterns, strict=False):
            signed[k] = pattern.format(vectors[k])
        clamps = " clamp" if _CLAMPED.fullmatch(name) and not shape.carries else ""
        found.append((signed, clamps))
    return found


_OPSEL = re.compile(r"v_pk_|v_cvt_scalef32|v_bitop3")
"""Tested with their selections below."""


@pytest.mark.parametrize("name", [name for name in VECTOR if not _OPSEL.match(name)])
def test_vector(name: str) -> None:
    shape = Shape(corrected(name))
    edges = edges_of(name)
    single = Single(2, seed=1, edges=edges)
    single.set_exec([(1 << 64) - 1, PARTIAL])
    check_vector(name, [vector_source(shape, k) for k in range(shape.sources)], single)
    for number, (sources, suffix) in enumerate(variants(name)):
        check_vector(name, sources, Single(1, 2 + number, edges), suffix=suffix, step=3)


# -- selections: conversions of small floats, packed math, truth tables ----------------------------


def _opsel(bits: tuple[int, ...]) -> Value:
    return Value("b", 4, sum(bit << k for k, bit in enumerate(bits)))


def _selected(name: str) -> list[tuple[int, ...]]:
    """Selections of a conversion: one for each part of the register that is packed."""
    if name.endswith(("_fp4", "_fp8", "_bf8")):
        return [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)][: 4 if name.endswith("fp4") else 2]
    return [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)][: 4 if "_fp4_" in name else 2]


@pytest.mark.parametrize("saturate", [False, True], ids=["plain", "FP16_OVFL"])
@pytest.mark.parametrize("name", [name for name in VECTOR if name.startswith("v_cvt_scalef32")])
def test_small_floats(name: str, saturate: bool) -> None:
    shape = Shape(PSEUDOCODE[name])
    for number, selection in enumerate(_selected(name)):
        single = Single(1, seed=number)
        single.set_exec([PARTIAL | 0xFFFF])
        single.state.mode[:] |= np.uint32(saturate << 23)
        if "S0" not in PSEUDOCODE[name]:
            shape.sources = 2
        state = single.state
        # Scales near one, so that not all results are zero or infinite.
        scale = state.vector[_PLACES[shape.sources - 1], :, 8:]
        scale[:] = scale % np.uint32(24) + np.uint32(115) << np.uint32(23)
        before = Single(1, seed=number)
        before.state.vector[:], before.state.mode[:] = state.vector, state.mode
        sources = [f"v{_PLACES[k]}" for k in range(shape.sources)]
        # Texts name the sources, then the destination; fp4 has four places whatever the sources.
        named = selection if "fp4" in name else (*selection[: shape.sources], *selection[3:])
        suffix = f" op_sel:[{','.join(map(str, named))}]"
        text = listing(name, shape, sources) + suffix
        single.run(text)
        for lane in np.flatnonzero(state.active[0])[::2]:
            variables = environment(before, shape, sources, 0, int(lane), MASK)
            variables["OPSEL"] = _opsel(selection)
            run = Lane(variables)
            run.run(PSEUDOCODE[name])
            check_lane(single, shape, run.variables, 0, int(lane), text, "")


def _packed_source(name: str, values: Single, place: int, lane: int, part: int, neg: int) -> int:
    register = _PLACES[place]
    if "f32" in name:
        return int(values.state.vector[register + part, 0, lane]) ^ neg << 31
    return int(values.state.vector[register, 0, lane]) >> 16 * part & 0xFFFF ^ neg << 15


@pytest.mark.parametrize("name", [n for n in VECTOR if n.startswith("v_pk_") and "mov" not in n])
def test_packed(name: str) -> None:
    width = 32 if "f32" in name else 16
    count = 3 if "fma" in name else 2
    kind = re.search(r"_([uibf])(16|32)$", name)[1]
    modifiers: list[dict[str, tuple[int, ...]]] = [
        {},
        {"op_sel": (1, 0, 1), "op_sel_hi": (0, 1, 0)},
        {"op_sel_hi": (0, 0, 1)},
        {"neg_lo": (1, 0, 1), "neg_hi": (0, 1, 1)} if kind == "f" else {"op_sel": (0, 1, 0)},
    ]
    for number, given in enumerate(modifiers):
        single, before = (Single(1, seed=number, edges=edges_of(name)) for _ in range(2))
        registers = "v[{0}:{1}]" if width == 32 else "v{0}"
        operands = [registers.format(r, r + 1) for r in (DESTINATION, *_PLACES[:count])]
        suffix = "".join(
            f" {key}:[{','.join(map(str, value[:count]))}]" for key, value in given.items()
        )
        single.run(f"{name} {', '.join(operands)}{suffix}")
        low, high = given.get("op_sel", (0, 0, 0)), given.get("op_sel_hi", (1, 1, 1))
        neg_low, neg_high = given.get("neg_lo", (0, 0, 0)), given.get("neg_hi", (0, 0, 0))
        for lane in range(0, LANES, 3):
            sources = [
                _packed_source(name, before, k, lane, low[k], neg_low[k])
                | _packed_source(name, before, k, lane, high[k], neg_high[k]) << width
                for k in range(count)
            ]
            variables: dict[str, Any] = {"D0": Value("b", 64, 0)}
            variables["WAVE_MODE"] = {"IEEE": Value("u", 1, 1)}
            variables |= {f"S{k}": Value("b", 64, bits) for k, bits in enumerate(sources)}
            run = Lane(variables)
            run.run(PSEUDOCODE[name])
            got = int(single.state.vector[DESTINATION, 0, lane])
            if width == 32:
                got |= int(single.state.vector[DESTINATION + 1, 0, lane]) << 32
            want = run.variables["D0"].bits
            kinds = {"f": f"f{width}"}
            assert same(kinds.get(kind, ""), got, want), (name, suffix, lane)


@pytest.mark.parametrize("selection", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_packed_move(selection: tuple[int, int]) -> None:
    """The destination overlaps a source."""
    single, before = Single(1), Single(1)
    single.run(f"v_pk_mov_b32 v[32:33], v[36:37], v[32:33] op_sel:[{selection[0]},{selection[1]}]")
    for lane in range(LANES):
        values = [
            int(before.state.vector[r, 0, lane]) | int(before.state.vector[r + 1, 0, lane]) << 32
            for r in (36, 32)
        ]
        run = Lane(
            {
                "D0": Value("b", 64, 0),
                "S0": Value("b", 64, values[0]),
                "S1": Value("b", 64, values[1]),
                "OPSEL": _opsel(selection),
            }
        )
        run.run(PSEUDOCODE["v_pk_mov_b32"])
        got = [int(single.state.vector[32 + k, 0, lane]) for k in range(2)]
        assert got[0] | got[1] << 32 == run.variables["D0"].bits


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("table", [0x00, 0xFF, 0x96, 0xE8, 0x1B, 0xC8, 0x78])
def test_truth_table(table: int, bits: int) -> None:
    name = f"v_bitop3_b{bits}"
    single, before = Single(1), Single(1)
    single.run(f"{name} v8, v32, s36, v40 bitop3:{table:#x}")
    shape = Shape(PSEUDOCODE[name])
    for lane in range(0, LANES, 4):
        variables = environment(before, shape, ["v32", "s36", "v40"], 0, lane, MASK)
        fields = {"OMOD": table >> 6, "ABS": table >> 3 & 7, "NEG": table & 7}
        variables["INST"] = {key: Value("b", 3, value) for key, value in fields.items()}
        run = Lane(variables)
        run.run(PSEUDOCODE[name])
        assert int(single.state.vector[8, 0, lane]) == run.variables["D"].bits


# -- corrections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CORRECTIONS.keys() & set(VECTOR)))
def test_correction_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor disagrees with the pseudocode as published."""
    assert CORRECTIONS[name].reason
    monkeypatch.setitem(CORRECTIONS, name, Correction("as published", ()))
    with pytest.raises(AssertionError):
        test_vector(name)


def test_fma_rounds_once() -> None:
    """Next to ties of float32, where a float64 sum would be rounded to the tie first."""
    single = Single(1)
    factor = np.float32(1 + 2**-12)  # its square is 1 + 2^-11 and half a step
    for place, sign in enumerate((1, -1)):
        single.state.vector[:2, 0, place] = factor.view(np.uint32)
        single.state.vector[2, 0, place] = np.float32(sign * 2.0**-60).view(np.uint32)
    single.run("v_fma_f32 v3, v0, v1, v2")
    single.run("v_fma_f32 v4, -v0, v1, v2")
    step = 2.0**-23
    upper, lower = 1 + 2**-11 + step, 1 + 2**-11
    got = single.state.vector[3:5, 0, :2].view(np.float32).astype(float)
    np.testing.assert_array_equal(got, [[upper, lower], [-lower, -upper]])


def test_division() -> None:
    """Quotients are correctly rounded with the corrections; this does not use the pseudocode."""
    single = Single(8, seed=5)
    state = single.state
    generator = np.random.default_rng(6)
    numerator, denominator = state.vector[1], state.vector[2]
    with np.errstate(all="ignore"):
        quotients = np.exp2(generator.uniform(-152, -120, numerator[4:].shape))
        close = denominator[4:].view(np.float32).astype(np.float64) * quotients
        numerator[4:] = close.astype(np.float32).view(np.uint32)
        want = numerator.view(np.float32) / denominator.view(np.float32)
    for text in (
        "v_div_scale_f32 v3, s[20:21], v2, v2, v1",
        "v_div_scale_f32 v4, vcc, v1, v2, v1",
        "v_rcp_f32 v5, v3",
        "v_fma_f32 v6, -v3, v5, 1.0",
        "v_fmac_f32 v5, v6, v5",
        "v_mul_f32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4",
        "v_fmac_f32 v6, v7, v5",
        "v_fma_f32 v4, -v3, v6, v4",
        "v_div_fmas_f32 v4, v4, v5, v6",
        "v_div_fixup_f32 v4, v4, v2, v1",
    ):
        single.run(text)
    got = state.vector[4].view(np.float32)
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(want)[finite])
    assert (np.abs(want[finite]) < 2.0**-126).sum() > 50
