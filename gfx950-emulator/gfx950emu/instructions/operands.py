"""Sources and destinations of vector and scalar instructions, with their modifiers.

Source: AMD Instinct CDNA4 ISA, chapter 6 (vector ALU: operands, SDWA, DPP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..program import Operand
from ..state import LANES, Lanes, WaveState
from .numerics import F16, F32, F64, I16, I32, I64, U16, U32, U64, Array
from .table import Decoding

Reader = Callable[[WaveState], Array]
"""Reads a source of the selected waves: [count, 64], or broadcastable to it."""

LANE = np.arange(LANES)

WIDE = frozenset(("u64", "i64", "f64"))
"""Types of two registers."""
HALF = frozenset(("u16", "i16", "f16"))
"""Types in the low half of a register."""
_FLOATS = frozenset(("f64", "f32", "f16", "b32"))
"""Types that source modifiers apply to; "b32" are 32 bits that may be a float."""


# -- vector sources --------------------------------------------------------------------------------


def words(operand: Operand, dword: int = 0) -> Reader:
    """Reads one dword of an operand as uint32. A constant's upper dword is its sign."""
    register = operand.index + dword
    if operand.kind == "v":
        return lambda state: state.read_vector(register)
    if operand.kind == "s":
        return lambda state: state.read_scalar(register)[:, None]
    bits = np.array([[(operand.index >> 32 * dword) & 0xFFFFFFFF]], U32)
    return lambda state: bits


def typed(decoding: Decoding, operand: Operand, kind: str, raw: Reader | None = None) -> Reader:
    """Reads an operand as the pseudocode's type `kind`, source modifiers applied.

    Args:
        kind: u32, i32, f32, b32, u24, i24, u16, i16, f16, u64, i64, f64, or "mask": a bit a lane.
        raw: reads the dword instead of the register, after SDWA or DPP have moved it.
    """
    if (operand.neg or operand.absolute) and kind not in _FLOATS:
        raise decoding.unknown(f"no float modifier on a source of type {kind}", operand)
    if kind == "mask":
        if operand.kind != "s":
            raise decoding.unknown("a pair of scalar registers as mask", operand)
        return lambda state: state.read_mask(operand.index)
    if kind in WIDE:
        if kind == "f64" and operand.kind == "c":
            operand = _double(decoding, operand)
        return _wide(operand, kind)
    if operand.kind == "c" and operand.count == 0 and kind in HALF:
        operand = replace(operand, index=_inline_half(operand.index), count=1)
    read = _signed(raw or words(operand), operand, 0x8000 if kind in HALF else 0x80000000)
    convert = _CONVERSIONS[kind]
    return read if convert is None else lambda state: convert(read(state))


def _signed(read: Reader, operand: Operand, sign: int) -> Reader:
    """Applies the source modifiers abs, then neg, to the sign bit."""
    bit = U64(sign) if sign >> 32 else U32(sign)
    if operand.absolute and operand.neg:
        return lambda state: read(state) | bit
    if operand.absolute:
        return lambda state: read(state) & ~bit
    if operand.neg:
        return lambda state: read(state) ^ bit
    return read


def _low_half(x: Array) -> Array:
    return (x & U32(0xFFFF)).astype(U16)


_CONVERSIONS: dict[str, Callable[[Array], Array] | None] = {
    "u32": None,
    "b32": None,
    "i32": lambda x: x.view(I32),
    "f32": lambda x: x.view(F32),
    "u24": lambda x: x & U32(0xFFFFFF),
    "i24": lambda x: (x << U32(8)).view(I32) >> I32(8),
    "u16": _low_half,
    "i16": lambda x: _low_half(x).view(I16),
    "f16": lambda x: _low_half(x).view(F16),
}


_INVERSE_TAU = 0x3E22F983, 0x3FC45F306DC9C882
"""The inline constant 1 / (2 pi) as a float32 and as a float64."""


def _inline_half(single: int) -> int:
    """Bits of an inline float where 16 bits are read, from those of the float32."""
    return int(np.array(single, U32).view(F32).astype(F16).view(U16))


def _double(decoding: Decoding, operand: Operand) -> Operand:
    """A constant where float64 is read: a literal is the upper dword."""
    if operand.count == 0 or operand.index == 0:
        return operand
    if operand.index <= _LAST_INLINE:
        raise decoding.unknown("no inline integer as float64", operand)
    return replace(operand, index=operand.index << 32)


_LAST_INLINE = 64
"""The largest integer of inline constants."""


def _inline_double(single: int) -> int:
    """Bits of an inline float where 64 bits are read, from those of the float32."""
    if single == _INVERSE_TAU[0]:
        return _INVERSE_TAU[1]
    return int(np.array(single, U32).view(F32).astype(F64).view(U64))


def _wide(operand: Operand, kind: str) -> Reader:
    """Reads 64 bits. A 32-bit literal is sign-extended if the type is signed; a float is double."""
    convert = _WIDE_TYPES[kind]
    if operand.kind == "c":
        value = operand.index
        if operand.count == 0:
            value = _inline_double(value)
        elif kind == "i64" and value > 0x7FFFFFFF:
            value -= 1 << 32
        constant = np.array([[value & 0xFFFFFFFFFFFFFFFF]], U64)
        signed = _signed(lambda state: constant, operand, 1 << 63)
        return lambda state: signed(state).view(convert)
    low, high = words(operand, 0), words(operand, 1)

    def read(state: WaveState) -> Array:
        return low(state).astype(U64) | high(state).astype(U64) << U64(32)

    signed = _signed(read, operand, 1 << 63)
    return lambda state: signed(state).view(convert)


_WIDE_TYPES = {"u64": U64, "i64": I64, "f64": F64}


# -- SDWA ------------------------------------------------------------------------------------------

_SELECTIONS = {
    "DWORD": (0, 32),
    **{f"BYTE_{k}": (8 * k, 8) for k in range(4)},
    **{f"WORD_{k}": (16 * k, 16) for k in range(2)},
}
"""First bit and number of bits of an SDWA selection."""


def sdwa_source(decoding: Decoding, place: int, operand: Operand) -> Reader:
    """Reads the byte or word that ``src0_sel`` or ``src1_sel`` picks, extended to 32 bits."""
    selection = str(decoding.take(f"src{place}_sel", "DWORD"))
    if selection not in _SELECTIONS:
        raise decoding.unknown("an SDWA selection", selection)
    shift, bits = _SELECTIONS[selection]
    read = words(operand)
    up, down = U32(32 - bits - shift), 32 - bits
    if bits == 32:
        return read
    if operand.sext:
        return lambda state: ((read(state) << up).view(I32) >> I32(down)).view(U32)
    return lambda state: (read(state) << up) >> U32(down)


def sdwa_destination(decoding: Decoding, register: int) -> Callable[[WaveState, Array], Array]:
    """Merges a result of 32 bits into the part of the register that ``dst_sel`` picks."""
    selection = str(decoding.take("dst_sel", "DWORD"))
    unused = str(decoding.take("dst_unused", "UNUSED_PAD"))
    if selection not in _SELECTIONS:
        raise decoding.unknown("an SDWA selection", selection)
    shift, bits = _SELECTIONS[selection]
    if bits == 32:
        return lambda state, value: value
    mask, place = U32((1 << bits) - 1), U32(shift)
    if unused == "UNUSED_PAD":
        return lambda state, value: (value & mask) << place
    if unused == "UNUSED_PRESERVE":
        keep = ~(mask << place)
        return lambda state, value: (state.read_vector(register) & keep) | ((value & mask) << place)
    raise decoding.unknown("dst_unused UNUSED_PAD or UNUSED_PRESERVE", unused)


# -- DPP -------------------------------------------------------------------------------------------


class Dpp(NamedTuple):
    """Data-parallel primitive: where lanes read, and which of them are written.

    Args:
        source: lane that each lane reads. valid: whether there is one. enabled: by ``row_mask``
            and ``bank_mask``. zero: invalid sources read 0; otherwise their lanes are not written.
    """

    source: Array
    valid: Lanes
    enabled: Lanes
    zero: bool

    def live(self, state: WaveState) -> Lanes:
        """Lanes with a source that is active: [count, 64]."""
        return self.valid & state.active[:, self.source]

    def lanes(self, state: WaveState) -> Lanes:
        """Lanes to write: [count, 64]."""
        lanes = state.active & self.enabled
        return lanes if self.zero else lanes & self.live(state)

    def read(self, words: Reader) -> Reader:
        """The permuted source."""

        def permuted(state: WaveState) -> Array:
            value = np.broadcast_to(words(state), (state.count, LANES))[:, self.source]
            return np.where(self.live(state), value, U32(0)) if self.zero else value

        return permuted


_ROW, _IN_ROW = LANE & ~15, LANE & 15


def _within_row(place: Array) -> Array:
    return np.where((place >= 0) & (place < 16), _ROW + place, -1)


_DPP_CONTROLS: dict[str, Callable[[tuple[int, ...]], Array]] = {
    "quad_perm": lambda v: (LANE & ~3) + np.array(v)[LANE & 3],
    "row_shl": lambda v: _within_row(_IN_ROW + v[0]),
    "row_shr": lambda v: _within_row(_IN_ROW - v[0]),
    "row_ror": lambda v: _ROW + (_IN_ROW - v[0]) % 16,
    "row_mirror": lambda v: _ROW + 15 - _IN_ROW,
    "row_half_mirror": lambda v: (LANE & ~7) + 7 - (LANE & 7),
    "row_newbcast": lambda v: _ROW + v[0],
    "wave_shl": lambda v: np.where(LANE + v[0] < LANES, LANE + v[0], -1),
    "wave_shr": lambda v: np.where(LANE - v[0] >= 0, LANE - v[0], -1),
    "wave_rol": lambda v: (LANE + v[0]) % LANES,
    "wave_ror": lambda v: (LANE - v[0]) % LANES,
    "row_bcast": lambda v: np.where(LANE // (v[0] + 1) > 0, (LANE & ~v[0]) - 1, -1),
}
"""Lane that each lane reads, -1 for none. ``row_bcast:15`` reads the last lane of the row before,
``row_bcast:31`` lane 31."""


def dpp(decoding: Decoding) -> Dpp:
    """The DPP control of an instruction."""
    given = [name for name in _DPP_CONTROLS if name in decoding.instruction.modifiers]
    if len(given) != 1:
        raise decoding.unknown("one DPP control", given or sorted(decoding.instruction.modifiers))
    value = decoding.take(given[0], 0)
    source = _DPP_CONTROLS[given[0]](value if isinstance(value, tuple) else (int(value),))
    rows, banks = decoding.integer("row_mask", 15), decoding.integer("bank_mask", 15)
    enabled = ((rows >> (LANE >> 4)) & (banks >> ((LANE >> 2) & 3)) & 1).astype(np.bool_)
    zero = bool(decoding.integer("bound_ctrl", 0))
    return Dpp(np.maximum(source, 0), source >= 0, enabled, zero)


# -- scalars ---------------------------------------------------------------------------------------


def scalar(decoding: Decoding, operand: Operand, kind: str) -> Reader:
    """Reads a scalar source, [count] or [1]: u32, i32, u64 or i64."""
    if operand.neg or operand.absolute:
        raise decoding.unknown("no float modifier on a scalar source", operand)
    signed = kind[0] == "i"
    register = operand.index
    if operand.kind == "s":
        if kind in WIDE:
            return lambda state: (
                state.read_scalar64(register).view(I64) if signed else state.read_scalar64(register)
            )
        return lambda state: (
            state.read_scalar(register).view(I32) if signed else state.read_scalar(register)
        )
    wide = _wide(operand, kind) if kind in WIDE else typed(decoding, operand, kind)
    return lambda state: wide(state)[0]
