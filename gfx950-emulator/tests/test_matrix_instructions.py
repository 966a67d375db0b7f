"""Matrix instructions against loops written from the manual: layouts, formats, scales."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest

from gfx950_support.single import Single
from gfx950emu.instructions import TABLE

LANES = 64
A, B, C, D = 0, 16, 256 + 32, 256 + 64
"""First registers of the operands; C and D are accumulator registers, a32 and a64."""

PLAIN = sorted(n for n in TABLE if n.startswith("v_mfma") and "f8f6f4" not in n)
MIXED = sorted(n for n in TABLE if n.startswith("v_mfma") and "f8f6f4" in n)


def decode(code: int, element: str) -> float:
    """A code's value from the definition of its format: sign, exponent with bias, fraction."""
    if element == "i8":
        return float(code - (code >> 7 << 8))
    exponent_bits, fraction_bits, bias = {
        "f32": (8, 23, 127),
        "bf16": (8, 7, 127),
        "f16": (5, 10, 15),
        "fp8": (4, 3, 7),
        "bf8": (5, 2, 15),
        "fp4": (2, 1, 1),
    }[element]
    fraction = code & (1 << fraction_bits) - 1
    exponent = code >> fraction_bits & (1 << exponent_bits) - 1
    sign = -1.0 if code >> (exponent_bits + fraction_bits) & 1 else 1.0
    last = (1 << exponent_bits) - 1
    if element == "fp8" and (exponent, fraction) == (last, 7):
        return math.nan
    if element not in ("fp8", "fp4") and exponent == last:
        return math.nan if fraction else sign * math.inf
    scaled = fraction + (1 << fraction_bits if exponent else 0)
    return sign * math.ldexp(scaled, max(exponent, 1) - bias - fraction_bits)


BITS = {"f32": 32, "bf16": 16, "f16": 16, "i8": 8, "fp8": 8, "bf8": 8, "fp4": 4}


def element_of(
    single: Single, first: int, rows: int, row: int, k: int, depth: int, kind: str
) -> float:
    """Element k of a row of A, or of a column of B.

    A lane of group g holds depth / groups elements. They are consecutive, but fp8 and bf8 operands
    of the f8f6f4 instructions come in runs of 16: runs go round the groups.
    """
    groups, bits = LANES // rows, BITS[kind]
    if depth * 4 > 64 * groups and bits == 8 and depth // groups == 32:
        run, within = divmod(k, 16)
        group, place = run % groups, run // groups * 16 + within
    else:
        group, place = divmod(k, depth // groups)
    register, shift = divmod(place * bits, 32)
    word = int(single.state.vector[first + register, 0, group * rows + row])
    return decode(word >> shift & (1 << bits) - 1, kind)


def scale_of(single: Single, register: int, rows: int, row: int, k: int, byte: int) -> float:
    """The scale of the 32-block of k: in the lane of group k / 32, in the byte of op_sel."""
    word = int(single.state.vector[register, 0, k // 32 * rows + row])
    code = word >> 8 * byte & 255
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


def place_in_result(rows: int, row: int, column: int) -> tuple[int, int]:
    """Register and lane of an element of C and D."""
    groups = LANES // rows
    block, within = divmod(row, 4 * groups)
    return block * 4 + within % 4, within // 4 * rows + column


def total(products: list[tuple[float, ...]], addend: float) -> float:
    """The exact sum of products and addend as float32."""
    if not all(math.isfinite(factor) for product in products for factor in product):
        return float(np.float32(sum(map(math.prod, products)) + addend))  # infinite or NaN
    exact = sum((math.prod(map(Fraction, product)) for product in products), Fraction(addend))
    return float(np.float32(float(exact)))


def total_of_integers(products: list[tuple[float, ...]], addend: int) -> int:
    """The sum as int32, which wraps around."""
    exact = sum(int(first) * int(second) for first, second in products) + addend
    return (exact + (1 << 31)) % (1 << 32) - (1 << 31)


def prepare(rows: int, elements: list[str], seed: int, *, special: bool = False) -> Single:
    """Operands whose products and partial sums are exact in float64, and some NaN if `special`."""
    single = Single(1, seed=seed)
    generator = np.random.default_rng(seed)
    vector = single.state.vector
    for first, element in zip((A, B), elements, strict=True):
        shape = (16, 1, LANES)
        if element in ("f32", "bf16", "f16"):
            values = generator.integers(-64, 65, (*shape, 2)).astype(np.float32) / 8
            if element == "f32":
                vector[first : first + 16] = values[..., 0].view(np.uint32)
            elif element == "f16":
                vector[first : first + 16] = values.astype(np.float16).view(np.uint32)[..., 0]
            else:
                halves = values.view(np.uint32) >> np.uint32(16)
                vector[first : first + 16] = halves[..., 0] | halves[..., 1] << np.uint32(16)
        else:
            codes = generator.integers(0, 256, (*shape, 4)).astype(np.uint8)
            if element not in ("fp4", "i8") and not special:  # no NaN, no infinity
                codes = codes & np.uint8(0xBF) | np.uint8(0x20)
                codes[generator.random(codes.shape) < 0.2] &= np.uint8(0x83)  # zeros, denormals
            vector[first : first + 16] = codes.view(np.uint32)[..., 0]
    sums = generator.integers(-1024, 1024, (16, 1, LANES)).astype(np.float32) / 4
    vector[C : C + 16] = sums.view(np.uint32)
    if elements[0] == "i8":  # near the ends of the range, where sums wrap around
        vector[C : C + 16] = sums.astype(np.int32).view(np.uint32) + np.uint32(1 << 31)
    vector[40 + 8 : 40 + 10] = (
        generator.integers(120, 135, (2, 1, LANES, 4)).astype(np.uint8).view(np.uint32)[..., 0]
    )
    return single


def shape_of(name: str) -> tuple[int, int, int, list[str]]:
    rows, _, depth, kinds = re.search(r"_(\d+)x(\d+)x(\d+)_(\w+)", name).groups()
    elements = kinds.split("_")
    return int(rows), int(depth), int(rows) ** 2 // LANES, (elements * 2)[:2]


def compare(
    single: Single, name: str, text: str, elements: list[str], scaled: tuple[int, ...]
) -> None:
    """Execute, and compare a part of the result with sums of fractions."""
    rows, depth, count, _ = shape_of(name)
    old = single.state.vector.copy()
    single.run(text)
    got = single.state.vector[D : D + count, 0].view(np.float32)
    single.state.vector[:D] = old[:D]
    for row in range(0, rows, 3):
        for column in range(0, rows, 5):
            products = []
            for k in range(depth):
                factors = [
                    element_of(single, A, rows, row, k, depth, elements[0]),
                    element_of(single, B, rows, column, k, depth, elements[1]),
                ]
                if scaled:
                    factors.append(scale_of(single, 48, rows, row, k, scaled[0]))
                    factors.append(scale_of(single, 49, rows, column, k, scaled[1]))
                products.append(tuple(factors))
            register, lane = place_in_result(rows, row, column)
            if elements[0] == "i8":
                whole = int(old[C + register, 0, lane].view(np.int32))
                got_whole = int(single.state.vector[D + register, 0, lane].view(np.int32))
                assert got_whole == total_of_integers(products, whole), (row, column)
                continue
            addend = float(old[C + register, 0, lane].view(np.float32))
            np.testing.assert_equal(
                float(got[register, lane]), total(products, addend), str((row, column))
            )


def registers(elements: list[str], depth: int, rows: int, count: int) -> str:
    """Operands D, A, B and C of an instruction."""
    sizes = [depth * rows // LANES * BITS[element] // 32 for element in elements]
    ranges = [
        f"v[{first}:{first + size - 1}]" if size > 1 else f"v{first}"
        for first, size in zip((A, B), sizes, strict=True)
    ]
    c, d = (f"a[{first - 256}:{first - 256 + count - 1}]" for first in (C, D))
    return f"{d}, {ranges[0]}, {ranges[1]}, {c}"


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    rows, depth, count, elements = shape_of(name)
    single = prepare(rows, elements, seed=1)
    single.set_exec([0x1234])  # plays no part
    compare(single, name, f"{name} {registers(elements, depth, rows, count)}", elements, ())


FORMATS = {"fp8": 0, "bf8": 1, "fp4": 4}


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("name", MIXED)
def test_mixed(name: str, a: str, b: str) -> None:
    rows, depth, count, _ = shape_of(name)
    elements = [a, b]
    single = prepare(rows, elements, seed=FORMATS[a] * 8 + FORMATS[b])
    text = f"{name} {registers(elements, depth, rows, count)}"
    scaled: tuple[int, ...] = ()
    if "_scale_" in name:
        scaled = (FORMATS[a] % 3 + 1, 2 - FORMATS[b] % 2)
        low, high = ([byte >> k & 1 for byte in scaled] for k in range(2))
        text += f", v48, v49 op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0]"
    compare(single, name, f"{text} cbsz:{FORMATS[a]} blgp:{FORMATS[b]}", elements, scaled)


def test_special_codes_and_scales() -> None:
    """NaN, infinity, the scales 2^-127 and NaN (255), and an inline constant as C."""
    name = "v_mfma_scale_f32_16x16x128_f8f6f4"
    single = prepare(16, ["fp4", "bf8"], seed=3, special=True)
    codes = single.state.vector[B : B + 16].view(np.uint8)
    codes[codes % 128 > 0x7B] = 0x11
    codes[0, 0, :8] = (0x7C, 0x7F, 0xFC, 0x11, 0x80, 0, 1, 0x7B)  # columns 0 and 1
    codes[2, 0, 20], codes[1, 0, 40] = 0x7C, 0xFC  # columns 5 and 10
    single.state.vector[48, 0, 3], single.state.vector[48, 0, 21] = 0xFF, 0x00
    single.state.vector[49, 0, 4] = 0xFF
    operands = registers(["fp4", "bf8"], 128, 16, 4)
    text = f"{name} {operands}, v48, v49 op_sel_hi:[0,0,0] cbsz:4 blgp:1"
    compare(single, name, text, ["fp4", "bf8"], (0, 0))
    constant = text.replace("a[32:35]", "1.0")
    single.state.vector[C : C + 4] = 0x3F800000
    compare(single, name, constant, ["fp4", "bf8"], (0, 0))


def test_accumulator_moves() -> None:
    """v_accvgpr_*: copies between the two halves of the register file, where lanes are active."""
    single, before = Single(1), Single(1)
    single.set_exec([0xFF])
    single.run("v_accvgpr_write_b32 a1, v2")
    single.run("v_accvgpr_write_b32 a2, 1.0")
    single.run("v_accvgpr_mov_b32 a3, a1")
    single.run("v_accvgpr_read_b32 v4, a3")
    for register in (257, 259, 4):
        np.testing.assert_array_equal(
            single.state.vector[register, 0, :8], before.state.vector[2, 0, :8]
        )
        np.testing.assert_array_equal(
            single.state.vector[register, 0, 8:], before.state.vector[register, 0, 8:]
        )
    assert (single.state.vector[258, 0, :8] == 0x3F800000).all()
