"""VOP3P: two results at once, of float32 pairs or 16-bit halves. CDNA4 ISA, section 12.10.

``op_sel`` picks the part of each source for the low result, ``op_sel_hi`` that for the high one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numerics
from .numerics import F16, F32, I16, U16, U32, Array
from .operands import Reader, typed, words
from .table import Binder, Decoding, Run, chapter
from .vector import clamp, unsaturated

Convert = Callable[[Array], Array]


def _selected(decoding: Decoding, place: int, part: int, wide: bool) -> Reader:
    """Reads a source's low or high part as uint32: a dword of a pair, or a half of a dword."""
    operand = decoding.operand(place)
    if operand.neg or operand.absolute:
        raise decoding.unknown("neg_lo and neg_hi alone", operand)
    if operand.kind == "c" and part:
        raise decoding.unknown("the low part of a constant", "the high part")
    if wide:
        return words(operand, part)
    if operand.kind == "c" and operand.count == 0:
        raise decoding.unknown("no inline float in a packed 16-bit operation", operand)
    read, shift = words(operand), U32(16 * part)
    return lambda state: (read(state) >> shift) & U32(0xFFFF)


def _packed(kind: str, sources: int, compute: Callable[..., Array]) -> Binder:
    """An entry for two results of type `kind`: f32, f16, u16 or i16."""
    wide = kind == "f32"
    dtype = {"f32": F32, "f16": F16, "u16": U16, "i16": I16}[kind]

    def source(decoding: Decoding, place: int, part: int, negate: int) -> Reader:
        read = _selected(decoding, place, part, wide)
        if wide:
            sign = U32(negate << 31)
            return lambda state: (read(state) ^ sign).view(F32)
        if negate and kind != "f16":
            raise decoding.unknown("no negation of integers", decoding.name)
        half_sign = U16(negate << 15)
        return lambda state: (read(state).astype(U16) ^ half_sign).view(dtype)

    def bind(decoding: Decoding) -> Run:
        register = decoding.destination()
        zeros, ones = (0,) * sources, (1,) * sources
        readers = [
            [source(decoding, 1 + k, select[k], negate[k]) for k in range(sources)]
            for select, negate in (
                (decoding.integers("op_sel", zeros), decoding.integers("neg_lo", zeros)),
                (decoding.integers("op_sel_hi", ones), decoding.integers("neg_hi", zeros)),
            )
        ]

        def run(machine: Any) -> None:
            state = machine.state
            low, high = (
                np.asarray(compute(*[read(state) for read in part])).view(U32 if wide else U16)
                for part in readers
            )
            if wide:
                state.write_vector(register, low)
                state.write_vector(register + 1, high)
            else:
                state.write_vector(register, low.astype(U32) | high.astype(U32) << U32(16))

        return run

    return bind


def _move(decoding: Decoding) -> Run:
    """v_pk_mov_b32: OPSEL[0] picks the dword of the first source, OPSEL[1] that of the second.

    OPSEL_HI plays no part.
    """
    register = decoding.destination()
    select = decoding.integers("op_sel", (0, 0))
    decoding.ignore("op_sel_hi")
    first, second = (_selected(decoding, 1 + k, select[k], True) for k in range(2))

    def run(machine: Any) -> None:
        state = machine.state
        low, high = first(state).copy(), second(state).copy()
        state.write_vector(register, low)
        state.write_vector(register + 1, high)

    return run


def _mixed(decoding: Decoding, place: int, part: int, is_half: int) -> Reader:
    """A source of v_fma_mix as float32: a float32, or the half of a register that `part` picks."""
    operand = decoding.operand(place)
    if not is_half and part:
        raise decoding.unknown("op_sel of float16 sources alone", operand)
    read = words(operand)
    if is_half and operand.kind == "c":
        raise decoding.unknown("a register as float16", operand)
    if is_half and part:
        dword = read
        read = lambda state: dword(state) >> U32(16)  # noqa: E731
    value = typed(decoding, operand, "f16" if is_half else "f32", read)
    return (lambda state: value(state).astype(F32)) if is_half else value


def _fma_mix(half: int | None) -> Binder:
    """v_fma_mix_f32, and v_fma_mixlo_f16, v_fma_mixhi_f16, which write one `half`.

    ``op_sel_hi`` says which sources are float16, ``op_sel`` which half. The sum is rounded to
    float32, then to float16: LLVM selects these instructions for both roundings.
    """

    def bind(decoding: Decoding) -> Run:
        register, zeros = decoding.destination(), (0, 0, 0)
        part = decoding.integers("op_sel", zeros)
        is_half = decoding.integers("op_sel_hi", zeros)
        sources = [_mixed(decoding, 1 + k, part[k], is_half[k]) for k in range(3)]
        limit = clamp if decoding.take("clamp", False) else np.asarray
        old, shift = words(decoding.operands[0]), U32(16 * (half or 0))
        keep = ~(U32(0xFFFF) << shift)

        def run(machine: Any) -> None:
            state = machine.state
            value = numerics.fma(*[read(state) for read in sources])
            if half is None:
                state.write_vector(register, limit(value).view(U32))
            else:
                bits = limit(value.astype(F16)).view(U16).astype(U32)
                state.write_vector(register, (old(state) & keep) | bits << shift)

        return run

    return bind


chapter(
    {
        "v_fma_mix_f32": _fma_mix(None),
        "v_fma_mixlo_f16": unsaturated(_fma_mix(0)),
        "v_fma_mixhi_f16": unsaturated(_fma_mix(1)),
        "v_pk_mov_b32": _move,
        "v_pk_add_f32": _packed("f32", 2, np.add),
        "v_pk_mul_f32": _packed("f32", 2, np.multiply),
        "v_pk_fma_f32": _packed("f32", 3, numerics.fma),
        "v_pk_add_f16": unsaturated(_packed("f16", 2, np.add)),
        "v_pk_mul_f16": unsaturated(_packed("f16", 2, np.multiply)),
        "v_pk_fma_f16": unsaturated(_packed("f16", 3, numerics.fma_half)),
        "v_pk_min_f16": _packed("f16", 2, numerics.minimum),
        "v_pk_max_f16": _packed("f16", 2, numerics.maximum),
        "v_pk_add_u16": _packed("u16", 2, np.add),
        "v_pk_sub_u16": _packed("u16", 2, np.subtract),
        "v_pk_mul_lo_u16": _packed("u16", 2, np.multiply),
        "v_pk_min_u16": _packed("u16", 2, np.minimum),
        "v_pk_max_u16": _packed("u16", 2, np.maximum),
        "v_pk_min_i16": _packed("i16", 2, np.minimum),
        "v_pk_max_i16": _packed("i16", 2, np.maximum),
        "v_pk_lshlrev_b16": _packed("u16", 2, lambda a, b: b << (a & 15)),
        "v_pk_lshrrev_b16": _packed("u16", 2, lambda a, b: b >> (a & 15)),
        "v_pk_ashrrev_i16": _packed("i16", 2, lambda a, b: b >> (a & 15)),
    }
)
