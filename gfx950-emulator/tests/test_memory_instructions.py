"""Loads, stores and atomic operations against AMD's pseudocode, lane after lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gfx950_support.pseudocode import PSEUDOCODE, Lane, Value, same
from gfx950_support.single import BASE, CLOCK, Single
from gfx950emu.faults import ScratchFault
from gfx950emu.instructions import TABLE

LANES = 64
PARTIAL = 0xF0F0_1234_8000_0001
ADDRESS, DATA, DATA2, TARGET = 2, 8, 12, 16

_LDS = re.compile(r"ds_(read|write)(2st64|2)?_[bui](\d+)(_d16)?(_hi)?")
_VECTOR = re.compile(
    r"(global|buffer)_(load|store)_(?:[us]?byte|[us]?short|dword(?:x(\d))?)(_d16)?(_hi)?"
)
_ATOMIC = re.compile(r"(global|buffer)_atomic_\w+|ds_(?!read|write|b?permute|swizzle)\w+")


def _named(pattern: re.Pattern[str]) -> list[str]:
    return sorted(name for name in TABLE if pattern.fullmatch(name) and name in PSEUDOCODE)


class Memory(dict):  # type: ignore[type-arg]
    """``MEM[address]`` of the pseudocode: sixteen bytes from an address on."""

    def __init__(self, content: np.ndarray) -> None:
        super().__init__()
        self.content = content

    def __getitem__(self, address: int) -> Value:
        data = self.content[address : address + 16].tobytes()
        return Value("b", 128, int.from_bytes(data, "little"))

    def __setitem__(self, address: int, value: Value) -> None:
        data = np.frombuffer(value.bits.to_bytes(16, "little"), np.uint8)
        self.content[address : address + 16] = data


def _range(first: int, count: int) -> str:
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def _registers(single: Single, first: int, count: int, wave: int, lane: int) -> Value:
    words = [int(single.state.vector[first + k, wave, lane]) for k in range(count)]
    return Value("b", 32 * count, sum(word << 32 * k for k, word in enumerate(words)))


def _pair(addresses: np.ndarray) -> tuple[Single, Single]:
    """A machine to execute on, and an equal one that keeps what was before."""
    machines = []
    for _ in range(2):
        single = Single(2, seed=3)
        single.state.vector[ADDRESS] = addresses
        single.set_exec([(1 << LANES) - 1, PARTIAL])
        machines.append(single)
    return machines[0], machines[1]


def _compare(
    name: str,
    single: Single,
    before: Single,
    memory: Memory,
    address: Callable[[int, int], int],
    result: str,
    count: int,
    results: int,
    variables: dict[str, Any],
) -> None:
    """Run the pseudocode for the active lanes in order; compare the registers that were loaded.

    Args:
        address: of a wave and lane. result: name of the loaded data. count, results: registers
            that are stored and loaded. variables: what else the text reads.
    """
    for wave in range(single.waves):
        for lane in range(LANES):
            old = _registers(before, TARGET, max(results, 1), wave, lane)
            want = old
            if before.state.active[wave, lane]:
                data = _registers(before, DATA, count, wave, lane)
                place = Value("u", 64, address(wave, lane))
                run = Lane(
                    {
                        **{
                            key: Value("u", 32, 0) for key in ("SADDR", "VADDR", "SRSRC", "SOFFSET")
                        },
                        **{key: Value("u", 32, 0) for key in ("OFFSET", "OFFSET0", "OFFSET1")},
                        "MEM": memory,
                        "ADDR": place,
                        "DATA": data,
                        "DATA2": _registers(before, DATA2, count, wave, lane),
                        "VDATA": old if results else data,
                        "RETURN_DATA": old,
                        "CalcDsAddr": lambda a, *_: a,
                        "CalcGlobalAddr": lambda *_, a=place: a,
                        "CalcBufferAddr": lambda *_, a=place: a,
                        **variables,
                    }
                )
                run.run(PSEUDOCODE[name])
                want = run.variables[result]
            if results:
                got = _registers(single, TARGET, results, wave, lane)
                expected = want.bits & ((1 << 32 * results) - 1)
                assert same(_float(name), got.bits, expected), (name, wave, lane)


def _float(name: str) -> str:
    """The type of a floating-point atomic operation."""
    found = re.search(r"_(f32|f16|bf16)$", name)
    return found[1] if found else ""


@pytest.mark.parametrize("name", _named(_LDS))
def test_lds(name: str) -> None:
    verb, two, bits, _, _ = _LDS.fullmatch(name).groups()
    size, count = int(bits) // 8, max(1, int(bits) // 32)
    lanes = np.arange(2 * LANES).reshape(2, LANES)
    if verb == "read":
        places = np.random.default_rng(1).integers(0, 200, lanes.shape) * size
        results = count * (2 if two else 1)
        operands = f"{_range(TARGET, results)}, v{ADDRESS}"
    else:  # no two lanes store to one place
        places, results = lanes * (size if two == "2st64" else 64), 0
        operands = f"v{ADDRESS}, {_range(DATA, count)}"
        operands += f", {_range(DATA2, count)}" if two else ""
    single, before = _pair(places)
    offset = 12 * size
    single.run(f"{name} {operands}" + (" offset0:3 offset1:5" if two else f" offset:{offset}"))
    calculated = "CalcDsAddr" in PSEUDOCODE[name]
    given = {"OFFSET": offset, "OFFSET0": 3, "OFFSET1": 5}
    _compare(
        name,
        single,
        before,
        Memory(before.lds.bytes),
        lambda wave, lane: int(places[wave, lane]) + (0 if calculated else offset),
        "RETURN_DATA",
        count,
        results,
        {key: Value("u", 32, value) for key, value in given.items()},
    )
    np.testing.assert_array_equal(single.lds.bytes, before.lds.bytes)
    assert single.loads == [("lgkm", tuple(range(TARGET, TARGET + results)))]


def _place_globally(single: Single, form: str, addresses: np.ndarray) -> tuple[str, str]:
    """Puts addresses into registers; returns the operands around the data."""
    state, wide = single.state, addresses.astype(np.uint64) + np.uint64(BASE)
    if form == "off":
        state.vector[ADDRESS], state.vector[ADDRESS + 1] = wide & 0xFFFFFFFF, wide >> np.uint64(32)
        return f"v[{ADDRESS}:{ADDRESS + 1}]", "off"
    state.vector[ADDRESS] = addresses
    state.scalar[4], state.scalar[5] = BASE & 0xFFFFFFFF, BASE >> 32
    if form == "saddr":
        return f"v{ADDRESS}", "s[4:5]"
    state.scalar[6], state.scalar[7] = 1 << 31, 0x27000
    state.scalar[9] = 256
    return f"v{ADDRESS}", "s[4:7], s9 offen"


FORMS = {"off": 0, "saddr": 0, "offen": 256}
"""Ways to give an address, and the scalar offset that adds to it."""


def _forms(name: str) -> list[str]:
    return ["offen"] if name.startswith("buffer") else ["off", "saddr"]


@pytest.mark.parametrize("name", _named(_VECTOR))
def test_global_and_buffer(name: str) -> None:
    family, verb, dwords, _half, _ = _VECTOR.fullmatch(name).groups()
    count = int(dwords or 1)
    lanes = np.arange(2 * LANES).reshape(2, LANES)
    for form in _forms(name):
        places = lanes * 64 if verb == "store" else np.random.default_rng(2).permuted(lanes) * 32
        single, before = _pair(places)
        address, base = _place_globally(single, form, places)
        results = count if verb == "load" else 0
        data = _range(TARGET if results else DATA, count)
        first, second = (address, data) if family == "global" and not results else (data, address)
        single.run(f"{name} {first}, {second}, {base} offset:16 nt")
        extra = 16 + FORMS[form]
        _compare(
            name,
            single,
            before,
            Memory(before.memory.bytes),
            lambda wave, lane, p=places, e=extra: int(p[wave, lane]) + e,
            "VDATA",
            count,
            results,
            {},
        )
        np.testing.assert_array_equal(single.memory.bytes, before.memory.bytes)
        assert single.loads == [("vm", tuple(range(TARGET, TARGET + results)))]


@pytest.mark.parametrize("name", _named(_ATOMIC))
def test_atomic(name: str) -> None:
    """Several lanes share an address: each sees what the lane before has left."""
    words = 2 if name.endswith("_x2") else 1
    count = words * (2 if "cmpswap" in name else 1)
    places = np.random.default_rng(4).integers(0, 24, (2, LANES)) * 4 * words
    local = name.startswith("ds_")
    for returns in ["_rtn_" in name] if local else [False, True]:
        for form in ["lds"] if local else _forms(name):
            single, before = _pair(places)
            extra = 16 + FORMS.get(form, 0)
            for each in (single, before):
                _hit_half(each, places + extra, words, count)
                # the third operand of buffers is result and data
                each.state.vector[TARGET : TARGET + count] = each.state.vector[DATA : DATA + count]
            if local:
                target = f"v{TARGET}, " if returns else ""
                text = f"{name} {target}v{ADDRESS}, v{DATA} offset:16"
            else:
                address, base = _place_globally(single, form, places)
                target = f"{_range(TARGET, words)}, " if returns else ""
                if name.startswith("buffer"):
                    text = f"{name} {_range(TARGET, count)}, {address}, {base} offset:16"
                else:
                    text = f"{name} {target}{address}, {_range(DATA, count)}, {base} offset:16"
                text += " sc0" if returns else ""
            single.run(text)
            content = before.lds.bytes if local else before.memory.bytes
            _compare(
                name,
                single,
                before,
                Memory(content),
                lambda wave, lane, e=extra: int(places[wave, lane]) + e,
                "RETURN_DATA",
                count,
                words if returns else 0,
                {},
            )
            got = single.lds.bytes if local else single.memory.bytes
            np.testing.assert_array_equal(_without_nan(got, name), _without_nan(content, name))
            counter = "lgkm" if local else "vm"
            loaded = tuple(range(TARGET, TARGET + words)) if returns else ()
            assert single.loads == [(counter, loaded)]


def _hit_half(single: Single, places: np.ndarray, words: int, count: int) -> None:
    """Of a comparison and swap: let every other lane expect what memory holds."""
    memory = single.memory.bytes.view(np.uint32)
    for k in range(words, count):
        expected = memory[places // 4 + k - words]
        single.state.vector[DATA + k, :, ::2] = expected[:, ::2]


def _without_nan(content: np.ndarray, name: str) -> np.ndarray:
    """Content with one NaN for all, where the operation is on floats."""
    kind = _float(name)
    if not kind:
        return content
    if kind == "f32":
        values = content.view(np.float32).copy()
        values[np.isnan(values)] = np.nan
        return values
    bits = content.view(np.uint16).copy()
    largest = 0x7C00 if kind == "f16" else 0x7F80
    bits[(bits & 0x7FFF) > largest] = 0x7FFF
    return bits


def test_buffer_bounds() -> None:
    """Each dword beyond num_records reads 0 or is dropped; the scalar offset does not count."""
    for records in (64, 40, 4, 0):
        single, before = Single(1), Single(1)
        places = np.arange(LANES, dtype=np.int64) * 4
        address, base = _place_globally(single, "offen", places[None])
        single.state.scalar[6] = records
        single.run(f"buffer_load_dwordx4 v[16:19], {address}, {base} offset:8")
        single.run(f"buffer_load_ubyte v20, {address}, {base} offset:8")
        single.run(f"buffer_store_dwordx2 v[8:9], {address}, {base} offset:8")
        memory = before.memory.bytes.view(np.uint32)
        stored = memory.copy()
        for lane in range(LANES):
            start = 4 * lane + 8
            for k in range(4):
                inside = start + 4 * k + 4 <= records
                want = memory[(256 + start) // 4 + k] if inside else 0
                assert single.state.vector[16 + k, 0, lane] == want
            byte = before.memory.bytes[256 + start] if start + 1 <= records else 0
            assert single.state.vector[20, 0, lane] == byte
            for k in range(2):
                if start + 4 * k + 4 <= records:
                    stored[(256 + start) // 4 + k] = before.state.vector[8 + k, 0, lane]
        written = single.memory.bytes.view(np.uint32) != memory
        assert (np.flatnonzero(written) >= 66).all()
        outside = slice((256 + max(records, 8)) // 4, None)
        np.testing.assert_array_equal(single.memory.bytes.view(np.uint32)[outside], stored[outside])


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("family", ["global", "buffer"])
def test_direct_to_lds(family: str, size: int) -> None:
    """Lane l of a load to LDS writes at M0 + offset + size * l; out of bounds it writes zeros."""
    single, before = Single(1), Single(1)
    single.set_exec([PARTIAL])
    single.state.scalar[124] = 4096
    places = np.random.default_rng(5).permutation(LANES)[None] * 16
    suffix = "dword" if size == 4 else "dwordx4"
    records = 900
    if family == "global":
        address, base = _place_globally(single, "off", places)
        single.run(f"global_load_lds_{suffix} {address}, {base} offset:32 nt")
        start, limit = 32, 1 << 30
    else:
        address, base = _place_globally(single, "offen", places)
        single.state.scalar[6] = records
        single.run(f"buffer_load_{suffix} {address}, {base} offset:32 lds")
        start, limit = 32 + 256, records
    lds = before.lds.bytes.copy()
    for lane in range(LANES):
        if PARTIAL >> lane & 1:
            for byte in range(size):
                inside = places[0, lane] + 32 + byte // 4 * 4 + 4 <= limit
                value = before.memory.bytes[places[0, lane] + start + byte] if inside else 0
                lds[4096 + 32 + size * lane + byte] = value
    np.testing.assert_array_equal(single.lds.bytes, lds)
    assert single.loads == [("vm", ())]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_read(bits: int) -> None:
    """Sixteen lanes read a matrix of 64-bit rows, in two halves, and get its columns.

    Lanes i and i + 1 of a 16-bit read hold neighbouring columns: of n = 64 / bits elements a row,
    lane i gets column i % n, rows i / n, i / n + 16 / n, … of the sixteen.
    """
    single, before = Single(1), Single(1)
    single.state.vector[ADDRESS] = np.random.default_rng(6).permutation(LANES) * 8
    single.run(f"ds_read_b64_tr_b{bits} v[16:17], v{ADDRESS} offset:64")
    rows = []
    for lane in range(LANES):
        place = int(single.state.vector[ADDRESS, 0, lane]) + 64
        rows.append(int.from_bytes(before.lds.bytes[place : place + 8].tobytes(), "little"))
    per_row = 64 // bits
    for lane in range(LANES):
        group, within = lane // 16 * 16, lane % 16
        column, first = within % per_row, within // per_row
        want = 0
        for element in range(per_row):
            row = rows[group + first + element * (16 // per_row)]
            want |= (row >> column * bits & ((1 << bits) - 1)) << element * bits
        got = _registers(single, 16, 2, 0, lane).bits
        assert got == want, lane


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_load(count: int) -> None:
    name = f"s_load_dword{'' if count == 1 else f'x{count}'}"
    single, before = Single(3), Single(3)
    base = np.array([64, 128, 4096], np.uint64) + np.uint64(BASE)
    single.state.scalar[4], single.state.scalar[5] = base & 0xFFFFFFFF, base >> np.uint64(32)
    single.run(f"{name} s[16:{15 + count}], s[4:5], 0x20")
    for wave in range(3):
        run = Lane(
            {
                "SDATA": Value("b", 32 * count, 0),
                "MEM": Memory(before.memory.bytes),
                "CalcScalarGlobalAddr": lambda *_, w=wave: Value(
                    "u", 64, int(base[w]) - BASE + 0x20
                ),
                **{key: Value("u", 32, 0) for key in ("SBASE", "SOFFSET", "OFFSET")},
            }
        )
        run.run(PSEUDOCODE[name])
        words = [int(single.state.scalar[16 + k, wave]) for k in range(count)]
        assert sum(word << 32 * k for k, word in enumerate(words)) == run.variables["SDATA"].bits
    assert single.loads == [("smem", tuple(range(1016, 1016 + count)))]


def test_real_time() -> None:
    """The clock's 64 bits, the same for all waves; lgkmcnt(0) says that they are there."""
    single = Single(3)
    single.run("s_memrealtime s[16:17]")
    assert single.state.read_scalar64(16).tolist() == [CLOCK] * 3
    assert single.loads == [("smem", (1016, 1017))]


def test_waits_and_barriers() -> None:
    single = Single(1)
    single.run("s_waitcnt vmcnt(3) lgkmcnt(0)")
    assert single.waited == (3, 0)
    single.run("s_waitcnt vmcnt(0)")
    assert single.waited == (0, None)
    for text in ("s_nop 4", "s_setprio 3", "s_sleep 1", "buffer_inv sc1"):
        assert single.run(text) is None
    assert single.loads == []
    single.run("buffer_wbl2 sc0 sc1")  # counted by vmcnt
    single.run("buffer_inv sc0 sc1")
    assert single.loads == [("vm", ()), ("invalidate", ())]
    assert single.run("s_barrier") == -1
    assert single.run("s_endpgm") == -1


def test_scratch_faults() -> None:
    single = Single(1)
    single.fault = _fault  # type: ignore[attr-defined]
    for text in (
        "scratch_load_dwordx4 v[0:3], off, s2",
        "scratch_store_dword off, v1, off offset:4",
    ):
        with pytest.raises(RuntimeError, match="ScratchFault"):
            single.run(text)


def _fault(kind: type, what: str) -> None:
    assert kind is ScratchFault
    raise RuntimeError(f"{kind.__name__}: {what}")
