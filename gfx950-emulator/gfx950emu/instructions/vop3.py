"""VOP3: up to three sources, and what only this encoding has. CDNA4 ISA, section 12.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import VCC
from ..state import LANES
from . import numerics
from .numerics import F16, F32, F64, I32, I64, U16, U32, U64, Array, SmallFloat
from .operands import LANE, scalar, typed, words
from .table import Binder, Decoding, Run, chapter
from .vector import FP16_OVFL, clamp, lanes, unsaturated, wide_writer

# -- integers --------------------------------------------------------------------------------------


def _shift(x: Array) -> Array:
    return x & U32(31)


def _product_high(a: Array, b: Array) -> Array:
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def _product_high_signed(a: Array, b: Array) -> Array:
    return ((a.astype(I64) * b.astype(I64)) >> I64(32)).astype(I32)


def extract(x: Array, offset: Array, width: Array) -> Array:
    """A field of `width` bits (0…32) of uint32 values."""
    mask = (U64(1) << width.astype(U64)) - U64(1)
    return ((x >> _shift(offset)) & mask).astype(U32)


def extract_signed(x: Array, offset: Array, width: Array) -> Array:
    """A field of `width` bits (0…32) of int32 values, sign-extended. No bits are 0."""
    field = extract((x.view(I32) >> _shift(offset).view(I32)).view(U32), width * U32(0), width)
    sign = np.where(width > 0, U64(1) << (np.maximum(width, 1) - 1).astype(U64), U64(0)).astype(U32)
    return (field ^ sign) - sign


def _bit_select(table: int, bits: int) -> Callable[..., Array]:
    """v_bitop3: bit by bit, the entry of a truth table of three sources."""
    mask = U32((1 << bits) - 1)

    def compute(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
        for row in range(8):
            if table >> row & 1:
                first, second, third = (
                    source if row & bit else ~source for source, bit in ((a, 4), (b, 2), (c, 1))
                )
                result |= first & second & third
        return result & mask

    return compute


def _bitop3(bits: int) -> Binder:
    """The 16-bit form keeps the upper half: LLVM does not count on zeros there."""

    def bind(decoding: Decoding) -> Run:
        compute = _bit_select(decoding.integer("bitop3"), bits)
        if bits == 32:
            return lanes("u32", "u32 u32 u32", compute)(decoding)
        keep = U32(0xFFFF0000)
        register = decoding.destination()
        old = words(decoding.operands[0])
        sources = [typed(decoding, decoding.operand(1 + k), "u32") for k in range(3)]

        def run(machine: Any) -> None:
            state = machine.state
            value = compute(*[read(state) for read in sources])
            state.write_vector(register, (old(state) & keep) | value)

        return run

    return bind


def _half_result(compute: Callable[..., Array]) -> Binder:
    """v_fma_f16, v_div_fixup_f16: the half that is not written stays."""
    return lambda decoding: _bind_half(decoding, compute)


def _bind_half(decoding: Decoding, compute: Callable[..., Array]) -> Run:
    """OPSEL picks the half of each source, and the half that is written."""
    register, select = decoding.destination(), decoding.integers("op_sel", (0, 0, 0, 0))
    halves = [_half(decoding, 1 + k, select[k]) for k in range(3)]
    sources = [
        typed(decoding, decoding.operand(1 + k), "f16", read) for k, read in enumerate(halves)
    ]
    old, shift = words(decoding.operands[0]), U32(16 * select[3])
    keep = ~(U32(0xFFFF) << shift)
    limit = clamp if decoding.take("clamp", False) else np.asarray

    def run(machine: Any) -> None:
        state = machine.state
        value = limit(compute(*[read(state) for read in sources])).view(U16).astype(U32)
        state.write_vector(register, (old(state) & keep) | value << shift)

    return run


def _half(decoding: Decoding, place: int, high: int) -> Any:
    """Reads a source with the selected half lowest; None for the low one."""
    if not high:
        return None
    if decoding.operands[place].kind == "c":
        raise decoding.unknown("the low half of a constant", "the high half")
    read = words(decoding.operands[place])
    return lambda state: read(state) >> U32(16)


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: each byte of the selector picks a byte of {a, b}, a sign, 0x00 or 0xff."""
    shape = np.broadcast_shapes(a.shape, b.shape, selector.shape)
    pair = np.stack([np.broadcast_to(x, shape) for x in (b, a)], -1)
    data = np.ascontiguousarray(pair).view(np.uint8)  # [..., 8]
    signs = (data[..., 1::2].view(np.int8) >> 7).view(np.uint8)  # of bytes 1, 3, 5, 7
    constants = np.broadcast_to(np.array([0, 255], np.uint8), (*shape, 2))
    choices = np.concatenate((data, signs, constants), -1)  # [..., 14]
    picked = np.ascontiguousarray(np.broadcast_to(selector, shape))[..., None].view(np.uint8)
    result = np.take_along_axis(choices, np.minimum(picked, 13).astype(np.intp), -1)
    return np.ascontiguousarray(result).view(U32)[..., 0]


def _multiply_add(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """v_mad_u64_u32: a * b + c, and the carry."""
    product = a.astype(U64) * b.astype(U64)
    total = product + c
    return total, total < product


def _multiply_add_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """v_mad_i64_i32: a * b + c, and bit 64 of the sum: whether the exact sum is negative."""
    product = a.astype(I64) * b.astype(I64)
    total = product + c
    overflow = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) ^ overflow


def _count_below(first: int) -> Callable[..., Array]:
    """v_mbcnt: how many bits of a mask belong to lower lanes; `first` is the mask's first lane."""
    below = ((1 << np.clip(LANE - first, 0, 32)) - 1).astype(U32)
    return lambda a, b: numerics.count_bits(a & below) + b


# -- lanes -----------------------------------------------------------------------------------------


def _read_lane(decoding: Decoding) -> Run:
    """v_readlane_b32, whatever EXEC says."""
    register, read = decoding.destination(0, "s"), words(decoding.operand(1, "v"))
    lane = scalar(decoding, decoding.operand(2, "sc"), "u32")

    def run(machine: Any) -> None:
        state = machine.state
        number = np.broadcast_to(lane(state) & U32(63), (state.count,))
        state.write_scalar(register, read(state)[np.arange(state.count), number])

    return run


def _write_lane(decoding: Decoding) -> Run:
    """v_writelane_b32, whatever EXEC says."""
    register = decoding.destination()
    value = scalar(decoding, decoding.operand(1, "sc"), "u32")
    lane = scalar(decoding, decoding.operand(2, "sc"), "u32")

    def run(machine: Any) -> None:
        state = machine.state
        number = np.broadcast_to(lane(state) & U32(63), (state.count,))
        written = np.arange(LANES) == number[:, None]
        value_now = np.broadcast_to(value(state)[:, None], written.shape)
        state.write_vector(register, value_now, written)

    return run


# -- scaled conversions of small floats ------------------------------------------------------------


def _scale(decoding: Decoding, place: int) -> Callable[[Any], Array]:
    """Reads a scale, which is the exponent of a float32: float64, NaN for an exponent of 255."""
    read = typed(decoding, decoding.operand(place), "f32")
    return lambda state: numerics.SCALES[numerics.exponent(read(state))]


def _decode(form: SmallFloat, result: str) -> Binder:
    """v_cvt_scalef32_pk_*_fp8, bf8, fp4: two codes times a scale."""
    bits = form.sign.bit_length()
    table = form.values

    def bind(decoding: Decoding) -> Run:
        register, source = decoding.destination(), words(decoding.operand(1))
        selected = decoding.integers("op_sel", (0, 0, 0, 0))
        part = selected[0] if bits == 8 else selected[0] + 2 * selected[1]
        if any(selected[1:] if bits == 8 else selected[2:]):
            raise decoding.unknown("op_sel for the source alone", selected)
        shift, mask = U32(2 * bits * part), U32((1 << bits) - 1)
        scale = _scale(decoding, 2)
        write = wide_writer(register)

        def run(machine: Any) -> None:
            state = machine.state
            codes, factor = source(state) >> shift, scale(state)
            low, high = table[codes & mask] * factor, table[(codes >> U32(bits)) & mask] * factor
            if result == "f32":
                first, second = (x.astype(F32).view(U32).astype(U64) for x in (low, high))
                write(state, first | second << U64(32), None)
            else:
                state.write_vector(register, _pack(result, low, high))

        return run

    return bind


def _pack(kind: str, low: Array, high: Array) -> Array:
    """Two float64 values as f16 or bf16 in a dword."""
    if kind == "bf16":
        first, second = numerics.to_bf16(low.astype(F32)), numerics.to_bf16(high.astype(F32))
    else:
        first, second = (x.astype(F16).view(np.uint16).astype(U32) for x in (low, high))
    return np.asarray(first | second << U32(16))


def _encode(form: SmallFloat, source: str) -> Binder:
    """v_cvt_scalef32_pk_fp8_*, bf8, fp4: two values divided by a scale; other bits are kept."""
    bits = form.sign.bit_length()
    unpack = {"bf16": numerics.from_bf16, "f16": numerics.from_f16}

    def bind(decoding: Decoding) -> Run:
        register, old = decoding.destination(), words(decoding.operands[0])
        selected = decoding.integers("op_sel", (0, 0, 0, 0))
        part = selected[3] if bits == 8 else selected[2] + 2 * selected[3]
        if any(selected[:3] if bits == 8 else selected[:2]):
            raise decoding.unknown("op_sel for the destination alone", selected)
        shift = U32(2 * bits * part)
        keep = ~U32(((1 << 2 * bits) - 1) << int(shift))
        if source == "f32":
            values = [typed(decoding, decoding.operand(1 + k), "f32") for k in range(2)]
        else:
            packed, convert = words(decoding.operand(1)), unpack[source]
            values = [
                lambda state: convert(packed(state) & U32(0xFFFF)),
                lambda state: convert(packed(state) >> U32(16)),
            ]
        scale = _scale(decoding, 1 + (2 if source == "f32" else 1))

        def run(machine: Any) -> None:
            state = machine.state
            factor = scale(state)
            saturate = ((state.mode[state.selected] >> FP16_OVFL) & U32(1) != 0)[:, None]
            low, high = (form.encode(read(state).astype(F64) / factor, saturate) for read in values)
            code = low | high << U32(bits)
            state.write_vector(register, (old(state) & keep) | code << shift)

        return run

    return bind


_SMALL = {"fp8": numerics.E4M3, "bf8": numerics.E5M2, "fp4": numerics.E2M1}

chapter(
    {
        # -- float32
        "v_fma_f32": lanes("f32", "f32 f32 f32", numerics.fma),
        "v_min3_f32": lanes(
            "f32", "f32 f32 f32", lambda a, b, c: numerics.minimum(numerics.minimum(a, b), c)
        ),
        "v_max3_f32": lanes(
            "f32", "f32 f32 f32", lambda a, b, c: numerics.maximum(numerics.maximum(a, b), c)
        ),
        "v_med3_f32": lanes("f32", "f32 f32 f32", numerics.median),
        "v_ldexp_f32": lanes("f32", "f32 i32", numerics.ldexp),
        "v_div_scale_f32": lanes("f32 mask", "f32 f32 f32", numerics.div_scale),
        "v_div_fmas_f32": lanes("f32", "f32 f32 f32 mask", numerics.div_fmas, implicit=VCC),
        "v_div_fixup_f32": lanes("f32", "f32 f32 f32", numerics.div_fixup),
        "v_cvt_pk_bf16_f32": lanes(
            "u32", "f32 f32", lambda a, b: numerics.to_bf16(a) | numerics.to_bf16(b) << U32(16)
        ),
        "v_cvt_pk_f16_f32": unsaturated(
            lanes("u32", "f32 f32", lambda a, b: numerics.to_f16(a) | numerics.to_f16(b) << U32(16))
        ),
        "v_pack_b32_f16": lanes(
            "u32",
            "f16 f16",
            lambda a, b: a.view(U16).astype(U32) | b.view(U16).astype(U32) << U32(16),
        ),
        # -- float64
        "v_add_f64": lanes("f64", "f64 f64", np.add),
        "v_mul_f64": lanes("f64", "f64 f64", np.multiply),
        "v_min_f64": lanes("f64", "f64 f64", numerics.minimum),
        "v_max_f64": lanes("f64", "f64 f64", numerics.maximum),
        "v_fma_f64": lanes("f64", "f64 f64 f64", numerics.fma_double),
        "v_ldexp_f64": lanes("f64", "f64 i32", np.ldexp),
        # -- float16
        "v_fma_f16": unsaturated(_half_result(numerics.fma_half)),
        "v_div_fixup_f16": _half_result(numerics.div_fixup_half),
        # -- integers
        "v_mad_legacy_u16": lanes("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
        "v_mad_legacy_i16": lanes("i16", "i16 i16 i16", lambda a, b, c: a * b + c),
        "v_add3_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
        "v_lshl_add_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a << _shift(b)) + c),
        "v_add_lshl_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a + b) << _shift(c)),
        "v_lshl_or_b32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a << _shift(b)) | c),
        "v_and_or_b32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a & b) | c),
        "v_or3_b32": lanes("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
        "v_xad_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
        "v_bfi_b32": lanes("u32", "u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
        "v_bfe_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: extract(a, b, _shift(c))),
        "v_bfe_i32": lanes("u32", "u32 u32 u32", lambda a, b, c: extract_signed(a, b, _shift(c))),
        "v_bfm_b32": lanes("u32", "u32 u32", lambda a, b: ((U32(1) << _shift(a)) - 1) << _shift(b)),
        "v_alignbit_b32": lanes(
            "u32",
            "u32 u32 u32",
            lambda a, b, c: (
                (b.astype(U64) | a.astype(U64) << U64(32)) >> _shift(c).astype(U64)
            ).astype(U32),
        ),
        "v_perm_b32": lanes("u32", "u32 u32 u32", _permute_bytes),
        "v_bitop3_b32": _bitop3(32),
        "v_bitop3_b16": _bitop3(16),
        "v_bcnt_u32_b32": lanes("u32", "u32 u32", lambda a, b: numerics.count_bits(a) + b),
        "v_mbcnt_lo_u32_b32": lanes("u32", "u32 u32", _count_below(0)),
        "v_mbcnt_hi_u32_b32": lanes("u32", "u32 u32", _count_below(32)),
        "v_min3_i32": lanes("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
        "v_max3_i32": lanes("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
        "v_min3_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
        "v_max3_u32": lanes("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
        "v_med3_i32": lanes(
            "i32", "i32 i32 i32", lambda *x: np.sort(np.broadcast_arrays(*x), 0)[1]
        ),
        "v_med3_u32": lanes(
            "u32", "u32 u32 u32", lambda *x: np.sort(np.broadcast_arrays(*x), 0)[1]
        ),
        "v_mul_lo_u32": lanes("u32", "u32 u32", np.multiply),
        "v_mul_hi_u32": lanes("u32", "u32 u32", _product_high),
        "v_mul_hi_i32": lanes("i32", "i32 i32", _product_high_signed),
        "v_mad_u32_u24": lanes("u32", "u24 u24 u32", lambda a, b, c: a * b + c),
        "v_mad_i32_i24": lanes("i32", "i24 i24 i32", lambda a, b, c: a * b + c),
        "v_mad_u64_u32": lanes("u64 mask", "u32 u32 u64", _multiply_add),
        "v_mad_i64_i32": lanes("i64 mask", "i32 i32 i64", _multiply_add_signed),
        "v_lshl_add_u64": lanes(
            "u64", "u64 u32 u64", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c
        ),
        "v_lshlrev_b64": lanes("u64", "u32 u64", lambda a, b: b << (a & U32(63)).astype(U64)),
        "v_lshrrev_b64": lanes("u64", "u32 u64", lambda a, b: b >> (a & U32(63)).astype(U64)),
        "v_ashrrev_i64": lanes("i64", "u32 i64", lambda a, b: b >> (a & U32(63)).astype(I64)),
        # -- lanes
        "v_readlane_b32": _read_lane,
        "v_writelane_b32": _write_lane,
    }
)
chapter(
    {
        f"v_cvt_scalef32_pk_{wide}_{name}": _decode(form, wide)
        for name, form in _SMALL.items()
        for wide in ("f32", "f16", "bf16")
    }
)
chapter(
    {
        f"v_cvt_scalef32_pk_{name}_{wide}": _encode(form, wide)
        for name, form in _SMALL.items()
        for wide in ("f32", "f16", "bf16")
    }
)
