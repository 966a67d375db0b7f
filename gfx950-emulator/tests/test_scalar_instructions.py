"""Scalar instructions and branches against AMD's pseudocode: each wave has its own scalars."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gfx950_support.corrections import corrected
from gfx950_support.pseudocode import PSEUDOCODE, Lane, Value
from gfx950_support.shapes import Shape
from gfx950_support.single import Single
from gfx950emu.instructions import TABLE

VCC = 106
_PLACES = (32, 36)

_CONTROL = re.compile(
    r"s_(load_\w+|nop|sleep|waitcnt|barrier|endpgm|setprio|[gs]etreg\w+|c?branch\w*)"
)
SCALAR = sorted(
    name
    for name in TABLE
    if name.startswith("s_") and name in PSEUDOCODE and not _CONTROL.fullmatch(name)
)
BRANCHES = sorted(name for name in TABLE if re.match(r"s_c?branch", name))

WAVES = 24
_IMMEDIATES = (0, 5, 0x7FFF, 0x8001)


def _scalar_variables(before: Single, wave: int, sources: dict[str, int]) -> dict[str, Any]:
    state = before.state
    return {
        "D0": Value("b", 64, int(state.scalar[8, wave]) | int(state.scalar[9, wave]) << 32),
        "SCC": Value("u", 1, int(state.scc[wave])),
        "EXEC": Value("b", 64, int(state.read_scalar64(126)[wave])),
        **{key: Value("b", 64, bits) for key, bits in sources.items()},
    }


def _scalar_forms(name: str, shape: Shape) -> list[list[tuple[str, int | None]]]:
    """Operand texts with the register of each source, None for constants."""
    vector = [
        (f"s[{r}:{r + 1}]" if shape.wide[k] else f"s{r}", r)
        for k, r in enumerate(_PLACES[: shape.sources])
    ]
    if re.match(r"s_(movk|addk|mulk)", name):
        return [[(hex(value), None)] for value in _IMMEDIATES]
    if name.startswith("s_cmpk"):
        return [[vector[0], (hex(value), None)] for value in _IMMEDIATES]
    constant = [*vector[:-1], ("-5" if "64" in name else "0x20005", None)]
    return [vector, constant]


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name: str) -> None:
    text = corrected(name)
    shape = Shape(text)
    has_result = bool(re.search(r"\bD0\b", text))
    wide = bool(re.search(r"D0\.[uib]64", text)) and not name.startswith("s_bcnt1_i32")
    for number, form in enumerate(_scalar_forms(name, shape)):
        single, before = Single(WAVES, seed=number), Single(WAVES, seed=number)
        for each in (single, before):
            each.state.scc[:] = np.arange(WAVES) % 2
            each.state.scalar[126] ^= np.uint32(0xF0F0) * (np.arange(WAVES, dtype=np.uint32) % 3)
            each.state.write_scalar(126, each.state.scalar[126])
        destination = ["s[8:9]" if wide else "s8"] if has_result else []
        single.run(f"{name} {', '.join(destination + [operand for operand, _ in form])}")
        for wave in range(WAVES):
            sources = {
                f"S{k}": int(before.state.scalar[r, wave])
                | (int(before.state.scalar[r + 1, wave]) << 32 if shape.wide[k] else 0)
                if r is not None
                else int(operand, 0) & 0xFFFFFFFFFFFFFFFF
                for k, (operand, r) in enumerate(form)
            }
            run = Lane(_scalar_variables(before, wave, sources))
            run.run(text)
            where = (name, wave, form, {k: hex(v) for k, v in sources.items()})
            result = run.variables
            assert int(single.state.scc[wave]) == result["SCC"].bits & 1, where
            assert int(single.state.read_scalar64(126)[wave]) == result["EXEC"].bits, where
            if has_result:
                want = result["D0"].bits & (0xFFFFFFFFFFFFFFFF if wide else 0xFFFFFFFF)
                got = int(single.state.scalar[8, wave])
                got |= int(single.state.scalar[9, wave]) << 32 if wide else 0
                assert got == want, (*where, hex(got), hex(want))


@pytest.mark.parametrize("name", BRANCHES)
def test_branch(name: str) -> None:
    """A branch is taken where the program counter of the pseudocode is not the next one."""
    single = Single(8)
    state = single.state
    state.scc[:] = np.arange(8) % 2
    state.scalar[VCC], state.scalar[VCC + 1] = np.arange(8) // 2 % 2, 0
    single.set_exec([wave // 4 << 40 for wave in range(8)])
    taken = np.broadcast_to(single.run(f"{name} .LBB0_1", {".LBB0_1": 7}), (8,))
    for wave in range(8):
        run = Lane(
            {
                "PC": Value("i", 64, 100),
                "SIMM16": Value("b", 16, 9),
                "SCC": Value("u", 1, wave % 2),
                "VCCZ": Value("u", 1, not wave // 2 % 2),
                "EXECZ": Value("u", 1, not wave // 4),
            }
        )
        run.run(PSEUDOCODE[name])
        jumps = run.variables["PC"].bits != 104
        assert taken[wave] == (7 if jumps else -1)
