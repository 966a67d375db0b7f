"""DS: LDS, and exchange between lanes. CDNA4 ISA, chapter 11 and section 12.12."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..state import LANES
from .atomics import ATOMICS, Atomic, update
from .memory import Format, load_words, store_words, stored_words, write_loaded
from .numerics import I64, U8, U16, U32, Array
from .operands import LANE, words
from .table import Binder, Decoding, Run, chapter

_READS = {
    "u8": Format(1),
    "i8": Format(1, signed=True),
    "u16": Format(2),
    "i16": Format(2, signed=True),
    "b32": Format(4),
    "b64": Format(8),
    "b96": Format(12),
    "b128": Format(16),
    "u8_d16": Format(1, half="low"),
    "u8_d16_hi": Format(1, half="high"),
    "i8_d16": Format(1, True, "low"),
    "i8_d16_hi": Format(1, True, "high"),
    "u16_d16": Format(2, half="low"),
    "u16_d16_hi": Format(2, half="high"),
}
_WRITES = {
    "b8": Format(1),
    "b8_d16_hi": Format(1, half="high"),
    "b16": Format(2),
    "b16_d16_hi": Format(2, half="high"),
    "b32": Format(4),
    "b64": Format(8),
    "b96": Format(12),
    "b128": Format(16),
}


def _offsets(decoding: Decoding, form: Format, count: int, stride: int) -> list[np.uint32]:
    """Byte offsets of an instruction's one or two accesses."""
    if count == 1:
        return [U32(decoding.integer("offset"))]
    return [U32(decoding.integer(f"offset{k}") * form.size * stride) for k in range(2)]


def _read(form: Format, count: int = 1, stride: int = 1) -> Binder:
    """Reads one place, or two that are multiples of `stride` elements away."""

    def bind(decoding: Decoding) -> Run:
        register, address = decoding.destination(), words(decoding.operand(1, "v"))
        offsets = _offsets(decoding, form, count, stride)
        registers = range(register, register + count * form.registers)

        def run(machine: Any) -> None:
            state = machine.state
            base = address(state)
            values = []
            for offset in offsets:
                places = machine.lds_access(base + offset, form.size)
                values += load_words(machine.lds.bytes, places, form)
            write_loaded(state, register, form, values)
            machine.issue_load("lgkm", registers)

        return run

    return bind


def _write(form: Format, count: int = 1, stride: int = 1) -> Binder:
    """Writes one place, or two that are multiples of `stride` elements away."""

    def bind(decoding: Decoding) -> Run:
        address = words(decoding.operand(0, "v"))
        data = [decoding.destination(1 + k) for k in range(count)]
        offsets = _offsets(decoding, form, count, stride)

        def run(machine: Any) -> None:
            state = machine.state
            base = address(state)
            for register, offset in zip(data, offsets, strict=True):
                values = stored_words(state, register, form)
                places = machine.lds_access(base + offset, form.size, write=True, words=values)
                store_words(machine.lds.bytes, places, form, values, state.active)
                machine.lds_stored(places, form.size, values)
            machine.issue_store("lgkm")

        return run

    return bind


def _atomic(operation: Atomic, returns: bool) -> Binder:
    def bind(decoding: Decoding) -> Run:
        first = 1 if returns else 0
        target = decoding.destination() if returns else None
        address = words(decoding.operand(first, "v"))
        data = words(decoding.operand(first + 1, "v"))
        offset = U32(decoding.integer("offset"))

        def run(machine: Any) -> None:
            state = machine.state
            places = machine.lds_access(address(state) + offset, 4, write=True, atomic=True)
            values = [np.broadcast_to(data(state), state.active.shape)]
            old = update(machine.lds.bytes, places, operation.compute, values, state.active)
            if target is None:
                machine.issue_store("lgkm")
            else:
                state.write_vector(target, old)
                machine.issue_load("lgkm", (target,))

        return run

    return bind


def _read_transposed(bits: int) -> Binder:
    """ds_read_b64_tr_b16, b8, b4: 16 lanes read 16 x 64 bits and exchange elements.

    Element j of lane i of the 16 is element i % n of the row that lane i / n + j * 16 / n has read,
    n = 64 / bits elements a row: each lane gets a column of elements for a matrix instruction.
    """
    elements = 64 // bits
    row, lane = LANE & ~15, LANE & 15
    source = row[:, None] + lane[:, None] // elements + np.arange(elements) * (16 // elements)
    place = np.broadcast_to((lane % elements)[:, None], source.shape)

    def bind(decoding: Decoding) -> Run:
        register, address = decoding.destination(), words(decoding.operand(1, "v"))
        offset = U32(decoding.integer("offset"))
        form = Format(8)

        def run(machine: Any) -> None:
            state = machine.state
            active = state.active.reshape(state.count, -1, 16)
            if (active != active[..., :1]).any():
                raise decoding.unknown("all 16 lanes of a row active, or none", "some")
            places = machine.lds_access(address(state) + offset, 8)
            pair = np.stack(load_words(machine.lds.bytes, places, form), -1)
            picked = _elements(pair, bits)[:, source, place]
            result = _joined(picked, bits)
            for k in range(2):
                state.write_vector(register + k, result[..., k])
            machine.issue_load("lgkm", (register, register + 1))

        return run

    return bind


def _elements(pair: Array, bits: int) -> Array:
    """Dwords [..., 2] as elements [..., 64 / bits]."""
    if bits != 4:
        return pair.view({8: U8, 16: U16}[bits])
    octets = pair.view(U8)
    return np.stack((octets & U8(15), octets >> U8(4)), -1).reshape(*pair.shape[:-1], -1)


def _joined(elements: Array, bits: int) -> Array:
    """Elements [..., 64 / bits] as dwords [..., 2]."""
    if bits == 4:
        elements = elements[..., ::2] | elements[..., 1::2] << U8(4)
    return np.ascontiguousarray(elements).view(U32)


# -- exchange between lanes ------------------------------------------------------------------------


def _permute_backward(decoding: Decoding) -> Run:
    """ds_bpermute_b32: a lane reads the lane that its address / 4 names; inactive lanes give 0."""
    register = decoding.destination()
    address, data = words(decoding.operand(1, "v")), words(decoding.operand(2, "v"))
    offset = U32(decoding.integer("offset"))

    def run(machine: Any) -> None:
        state = machine.state
        source = ((address(state) + offset) >> U32(2)) & U32(LANES - 1)
        visible = np.where(state.active, data(state), U32(0))
        state.write_vector(register, np.take_along_axis(visible, source.astype(np.intp), 1))
        machine.issue_load("lgkm", (register,))

    return run


def _permute_forward(decoding: Decoding) -> Run:
    """ds_permute_b32: a lane writes the lane that its address / 4 names; the highest one wins."""
    register = decoding.destination()
    address, data = words(decoding.operand(1, "v")), words(decoding.operand(2, "v"))
    offset = U32(decoding.integer("offset"))

    def run(machine: Any) -> None:
        state = machine.state
        target = (((address(state) + offset) >> U32(2)) & U32(LANES - 1)).astype(I64)
        values, result = data(state), np.zeros((state.count, LANES), U32)
        waves = np.arange(state.count)
        for lane in range(LANES):
            now = state.active[:, lane]
            result[waves[now], target[now, lane]] = values[now, lane]
        state.write_vector(register, result)
        machine.issue_load("lgkm", (register,))

    return run


def _swizzle(decoding: Decoding) -> Run:
    """ds_swizzle_b32: lanes read a fixed pattern of lanes; inactive lanes give 0."""
    pattern = decoding.integer("offset")
    if pattern >> 14 == 3:
        raise decoding.unknown("a swizzle of four lanes, or by masks", f"offset {pattern:#x}")
    if pattern >> 15:
        source = (LANE & ~3) | (pattern >> 2 * (LANE & 3)) & 3
    else:
        kept, added, flipped = (pattern >> 5 * k & 31 for k in range(3))
        source = (LANE & 32) | ((LANE & kept) | added) ^ flipped
    register, data = decoding.destination(), words(decoding.operand(1, "v"))

    def run(machine: Any) -> None:
        state = machine.state
        visible = np.where(state.active, data(state), U32(0))
        state.write_vector(register, visible[:, source])
        machine.issue_load("lgkm", (register,))

    return run


_ATOMIC_NAMES = {
    "add_u32": "add",
    "sub_u32": "sub",
    "min_i32": "smin",
    "max_i32": "smax",
    "min_u32": "umin",
    "max_u32": "umax",
    "and_b32": "and",
    "or_b32": "or",
    "xor_b32": "xor",
    "add_f32": "add_f32",
    "pk_add_f16": "pk_add_f16",
    "pk_add_bf16": "pk_add_bf16",
}


def _returning(name: str) -> str:
    """The form that returns the old value: add_u32 as add_rtn_u32."""
    operation, kind = name.rsplit("_", 1)
    return f"{operation}_rtn_{kind}"


chapter({f"ds_read_{name}": _read(form) for name, form in _READS.items()})
chapter({f"ds_write_{name}": _write(form) for name, form in _WRITES.items()})
for _kind in ("b32", "b64"):
    for _infix, _stride in (("2", 1), ("2st64", 64)):
        chapter({f"ds_read{_infix}_{_kind}": _read(_READS[_kind], 2, _stride)})
        chapter({f"ds_write{_infix}_{_kind}": _write(_WRITES[_kind], 2, _stride)})
for _name, _operation in _ATOMIC_NAMES.items():
    chapter({f"ds_{_name}": _atomic(ATOMICS[_operation], False)})
    chapter({f"ds_{_returning(_name)}": _atomic(ATOMICS[_operation], True)})
chapter({f"ds_read_b64_tr_b{bits}": _read_transposed(bits) for bits in (16, 8, 4)})
chapter(
    {
        "ds_wrxchg_rtn_b32": _atomic(ATOMICS["swap"], True),
        "ds_bpermute_b32": _permute_backward,
        "ds_permute_b32": _permute_forward,
        "ds_swizzle_b32": _swizzle,
    }
)
