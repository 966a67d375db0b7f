"""float16 and float64: halves, mixed types, constants; and kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gfx950emu
from gfx950_support.assembler import compile_kernel
from gfx950_support.pseudocode import PSEUDOCODE, Lane, Value, same
from gfx950_support.single import Single
from gfx950_support.values import FUNCTIONS, make
from gfx950emu.instructions import UnknownInstructionError

LANES = 64
PLACES = (32, 36, 40)
"""Registers of the sources."""


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_double_constants() -> None:
    """A literal is the upper dword of a float64; an inline float is converted."""
    single = Single(1)
    single.state.vector[2:4, 0, 0] = 0, 0x3FF00000
    for text, want in (("0xc1f00000", -(2.0**32)), ("-4.0", -4.0), ("0", 0.0), ("v[2:3]", 1.0)):
        single.state.vector[0:2] = 0
        single.run(f"v_fmac_f64 v[0:1], {text}, v[2:3]")
        low, high = (int(word) for word in single.state.vector[0:2, 0, 0])
        assert np.array(low | high << 32, np.uint64).view(np.float64) == want
    with pytest.raises(UnknownInstructionError, match="inline integer"):
        single.run("v_mul_f64 v[0:1], 5, v[2:3]")


@pytest.mark.parametrize("select", [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)])
def test_half_selection(select: tuple[int, ...]) -> None:
    """v_fma_f16: halves of the sources, and the half that is written; the other one stays."""
    single, before = (Single(1, seed=3, edges="f16") for _ in range(2))
    single.run(f"v_fma_f16 v8, v32, -v36, v40 op_sel:[{','.join(map(str, select))}]")
    registers = before.state.vector[:, 0]
    for lane in range(LANES):
        halves = [
            int(registers[r, lane]) >> 16 * s & 0xFFFF
            for r, s in zip(PLACES, select[:3], strict=True)
        ]
        values = {f"S{k}": Value("b", 32, bits) for k, bits in enumerate(halves)}
        values["S1"] = Value("b", 32, halves[1] ^ 0x8000)
        run = Lane({**values, "D0": Value("b", 32, 0)})
        run.run(PSEUDOCODE["v_fma_f16"])
        got, old = int(single.state.vector[8, 0, lane]), int(registers[8, lane])
        written, kept = 16 * select[3], 16 - 16 * select[3]
        want = run.variables["D0"].bits & 0xFFFF
        assert same("f16", got >> written & 0xFFFF, want), (lane, hex(got), hex(want))
        assert got >> kept & 0xFFFF == old >> kept & 0xFFFF


_MIXES = {"v_fma_mix_f32": None, "v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 1}
"""Half that is written. The manual has the text of v_mad_mix, of the same opcodes."""


@pytest.mark.parametrize("clamp", ["", " clamp"])
@pytest.mark.parametrize("halves", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("name", _MIXES)
def test_mixed_precision(name: str, halves: tuple[int, ...], clamp: str) -> None:
    """Sources are float32 or halves, with signs; a half that is not written stays."""
    single, before = (Single(1, seed=4, edges="f16") for _ in range(2))
    high, registers = (halves[0], 0, halves[2]), before.state.vector[:, 0]
    lists = (
        f"{key}:[{v[0]},{v[1]},{v[2]}]" for key, v in (("op_sel", high), ("op_sel_hi", halves))
    )
    single.run(f"{name} v8, -|v32|, |v36|, v40 {' '.join(lists)}{clamp}")
    for lane in range(LANES):
        numbers = []
        for register, half, upper in zip(PLACES, halves, high, strict=True):
            word = registers[register : register + 1, lane]
            numbers.append(word.view(np.float16)[upper] if half else word.view(np.float32)[0])
        first, second, third = (make("f", 32, float(number)) for number in numbers)
        first, second = FUNCTIONS["abs"](first), FUNCTIONS["abs"](second)
        first = Value("f", 32, first.bits ^ 1 << 31)
        value = FUNCTIONS["fma"](first, second, third).number
        place = _MIXES[name]
        with np.errstate(over="ignore"):
            want = np.float32(value) if place is None else np.float16(value)
        if clamp:
            want = np.clip(np.nan_to_num(want, nan=0.0), 0, 1).astype(want.dtype)
        got, old = int(single.state.vector[8, 0, lane]), int(registers[8, lane])
        if place is None:
            assert same("f32", got, int(want.view(np.uint32))), lane
            continue
        assert same("f16", got >> 16 * place & 0xFFFF, int(want.view(np.uint16))), lane
        assert got >> 16 - 16 * place & 0xFFFF == old >> 16 - 16 * place & 0xFFFF


@triton.jit
def _arithmetic_kernel(out_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Arithmetic, comparison, rounding, conversion. Grid: (1,)."""
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    y = tl.load(y_ptr + place)
    smaller = tl.minimum(x, y)
    total = tl.where(x > y, tl.floor((x * y).to(tl.float32)).to(x.dtype), x + smaller)
    tl.store(out_ptr + place, tl.fma(x, y, total))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_kernels_of_other_widths(dtype: torch.dtype) -> None:
    """Numbers are small, so that each step is exact."""
    x, y = (torch.randint(-16, 17, (256,), generator=draw(k)).to(dtype) / 4 for k in range(2))
    arguments = {"out_ptr": torch.zeros_like(x), "x_ptr": x, "y_ptr": y, "BLOCK": 256}
    width = str(dtype).removeprefix("torch.float")
    types = dict.fromkeys(("out_ptr", "x_ptr", "y_ptr"), f"*fp{width}")
    compiled = compile_kernel(_arithmetic_kernel, types, BLOCK=256)
    report = gfx950emu.run(compiled, (1,), arguments)
    assert any(name.endswith(f"_f{width}") for name in report.counts)
    want = x * y + torch.where(x > y, (x * y).floor(), x + torch.minimum(x, y))
    assert torch.equal(arguments["out_ptr"], want)


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, K: tl.constexpr):
    """A product of 32 x K by K x 32 bytes. Grid: (1,)."""
    row, depth = tl.arange(0, 32), tl.arange(0, K)
    a = tl.load(a_ptr + row[:, None] * K + depth[None, :])
    b = tl.load(b_ptr + depth[:, None] * 32 + row[None, :])
    tl.store(out_ptr + row[:, None] * 32 + row[None, :], tl.dot(a, b))


def test_matrices_of_int8() -> None:
    a = torch.randint(-128, 128, (32, 128), dtype=torch.int8, generator=draw(0))
    b = torch.randint(-128, 128, (128, 32), dtype=torch.int8, generator=draw(1))
    out = torch.zeros(32, 32, dtype=torch.int32)
    arguments = {"out_ptr": out, "a_ptr": a, "b_ptr": b, "K": 128}
    types = {"out_ptr": "*i32", "a_ptr": "*i8", "b_ptr": "*i8"}
    report = gfx950emu.run(compile_kernel(_dot_kernel, types, K=128), (1,), arguments)
    assert any(name.startswith("v_mfma_i32") for name in report.counts)
    assert torch.equal(out, a.int() @ b.int())
