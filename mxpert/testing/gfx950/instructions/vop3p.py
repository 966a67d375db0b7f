"""VOP3P: two results at once, of float32 pairs or 16-bit halves. CDNA4 ISA, section 12.10.

``op_sel`` picks the part of each source for the low result, ``op_sel_hi`` that for the high one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numerics
from .numerics import F32, I16, U16, U32, Array
from .operands import Reader, words
from .table import Binder, Decoding, Run, chapter

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
    """An entry for two results of type `kind`: f32, u16 or i16."""
    wide = kind == "f32"
    dtype = {"f32": F32, "u16": U16, "i16": I16}[kind]

    def source(decoding: Decoding, place: int, part: int, negate: int) -> Reader:
        read = _selected(decoding, place, part, wide)
        if wide:
            sign = U32(negate << 31)
            return lambda state: (read(state) ^ sign).view(F32)
        if negate:
            raise decoding.unknown("no negation of integers", decoding.name)
        return lambda state: read(state).astype(U16).view(dtype)

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


chapter(
    {
        "v_pk_mov_b32": _move,
        "v_pk_add_f32": _packed("f32", 2, np.add),
        "v_pk_mul_f32": _packed("f32", 2, np.multiply),
        "v_pk_fma_f32": _packed("f32", 3, numerics.fma),
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
