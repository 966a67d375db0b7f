"""VOP2 and VOPC: two sources. CDNA4 ISA, sections 12.7 and 12.9."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import numerics
from .numerics import I64, U32, Array
from .table import Binder, chapter
from .vector import lanes, unsaturated


def _shift(x: Array) -> Array:
    """Shift counts are the lowest five bits."""
    return x & U32(31)


def _carry(compute: Callable[..., Array], sources: str) -> Binder:
    """A sum or difference, and whether it left the range of uint32."""

    def exact(*values: Array) -> tuple[Array, Array]:
        total = compute(*(value.astype(I64) for value in values))
        return (total & 0xFFFFFFFF).astype(U32), (total < 0) | (total > 0xFFFFFFFF)

    return lanes("u32 mask", sources, exact)


def _add(a: Array, b: Array) -> Array:
    return a + b


def _subtract(a: Array, b: Array) -> Array:
    return a - b


def _subtract_reversed(a: Array, b: Array) -> Array:
    return b - a


chapter(
    {
        "v_cndmask_b32": lanes("b32", "b32 b32 mask", lambda a, b, mask: np.where(mask, b, a)),
        # -- float32
        "v_add_f32": lanes("f32", "f32 f32", _add),
        "v_sub_f32": lanes("f32", "f32 f32", _subtract),
        "v_subrev_f32": lanes("f32", "f32 f32", _subtract_reversed),
        "v_mul_f32": lanes("f32", "f32 f32", np.multiply),
        "v_min_f32": lanes("f32", "f32 f32", numerics.minimum),
        "v_max_f32": lanes("f32", "f32 f32", numerics.maximum),
        "v_fmac_f32": lanes("f32", "f32 f32 f32", numerics.fma, accumulates=True),
        "v_fmamk_f32": lanes("f32", "f32 f32 f32", numerics.fma),
        "v_fmaak_f32": lanes("f32", "f32 f32 f32", numerics.fma),
        # -- float16
        "v_add_f16": unsaturated(lanes("f16", "f16 f16", _add)),
        "v_sub_f16": unsaturated(lanes("f16", "f16 f16", _subtract)),
        "v_subrev_f16": unsaturated(lanes("f16", "f16 f16", _subtract_reversed)),
        "v_mul_f16": unsaturated(lanes("f16", "f16 f16", np.multiply)),
        "v_min_f16": lanes("f16", "f16 f16", numerics.minimum),
        "v_max_f16": lanes("f16", "f16 f16", numerics.maximum),
        # -- float64
        "v_fmac_f64": lanes("f64", "f64 f64 f64", numerics.fma_double, accumulates=True),
        # -- 32-bit integers
        "v_add_u32": lanes("u32", "u32 u32", _add, saturates=True),
        "v_sub_u32": lanes("u32", "u32 u32", _subtract, saturates=True),
        "v_subrev_u32": lanes("u32", "u32 u32", _subtract_reversed, saturates=True),
        "v_add_co_u32": _carry(_add, "u32 u32"),
        "v_sub_co_u32": _carry(_subtract, "u32 u32"),
        "v_subrev_co_u32": _carry(_subtract_reversed, "u32 u32"),
        "v_addc_co_u32": _carry(lambda a, b, c: a + b + c, "u32 u32 mask"),
        "v_subb_co_u32": _carry(lambda a, b, c: a - b - c, "u32 u32 mask"),
        "v_subbrev_co_u32": _carry(lambda a, b, c: b - a - c, "u32 u32 mask"),
        "v_mul_u32_u24": lanes("u32", "u24 u24", np.multiply),
        "v_mul_i32_i24": lanes("i32", "i24 i24", np.multiply),
        "v_min_i32": lanes("i32", "i32 i32", np.minimum),
        "v_max_i32": lanes("i32", "i32 i32", np.maximum),
        "v_min_u32": lanes("u32", "u32 u32", np.minimum),
        "v_max_u32": lanes("u32", "u32 u32", np.maximum),
        "v_and_b32": lanes("u32", "u32 u32", np.bitwise_and),
        "v_or_b32": lanes("u32", "u32 u32", np.bitwise_or),
        "v_xor_b32": lanes("u32", "u32 u32", np.bitwise_xor),
        "v_xnor_b32": lanes("u32", "u32 u32", lambda a, b: ~(a ^ b)),
        "v_lshlrev_b32": lanes("u32", "u32 u32", lambda a, b: b << _shift(a)),
        "v_lshrrev_b32": lanes("u32", "u32 u32", lambda a, b: b >> _shift(a)),
        "v_ashrrev_i32": lanes("i32", "i32 i32", lambda a, b: b >> (a & 31)),
        # -- 16-bit integers
        "v_add_u16": lanes("u16", "u16 u16", _add, saturates=True),
        "v_sub_u16": lanes("u16", "u16 u16", _subtract, saturates=True),
        "v_subrev_u16": lanes("u16", "u16 u16", _subtract_reversed, saturates=True),
        "v_mul_lo_u16": lanes("u16", "u16 u16", np.multiply),
        "v_min_u16": lanes("u16", "u16 u16", np.minimum),
        "v_max_u16": lanes("u16", "u16 u16", np.maximum),
        "v_min_i16": lanes("i16", "i16 i16", np.minimum),
        "v_max_i16": lanes("i16", "i16 i16", np.maximum),
        "v_lshlrev_b16": lanes("u16", "u16 u16", lambda a, b: b << (a & 15)),
        "v_lshrrev_b16": lanes("u16", "u16 u16", lambda a, b: b >> (a & 15)),
        "v_ashrrev_i16": lanes("i16", "i16 i16", lambda a, b: b >> (a & 15)),
    }
)

# -- VOPC: comparisons, one bit a lane -------------------------------------------------------------

Comparison = Callable[[Array, Array], Array]

INTEGERS: dict[str, Comparison] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
}

_FLOATS: dict[str, Comparison] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}


def _classify(x: Array, classes: Array) -> Array:
    """v_cmp_class: whether a value is in one of the classes whose bits are set."""
    unsigned, quiet = numerics.QUIET[x.dtype.type]
    negative, denormal = np.signbit(x), np.abs(x) < np.finfo(x.dtype).tiny
    number = np.select(
        [np.isnan(x), np.isinf(x), x == 0, denormal],
        [
            (x.view(unsigned) & quiet != 0).astype(U32),
            np.where(negative, 2, 9),
            np.where(negative, 5, 6),
            np.where(negative, 4, 7),
        ],
        np.where(negative, 3, 8),
    ).astype(U32)
    return ((classes >> number) & U32(1)).astype(np.bool_)


chapter(
    {
        f"v_cmp_{name}_{kind}": lanes("mask", f"{kind} {kind}", compare)
        for kinds, comparisons in (
            (("i16", "u16", "i32", "u32", "i64", "u64"), INTEGERS),
            (("f64", "f32", "f16"), _FLOATS),
        )
        for kind in kinds
        for name, compare in comparisons.items()
    }
)
chapter(
    {
        f"v_cmp_class_{kind}": lanes("mask", f"{kind} u32", _classify)
        for kind in ("f64", "f32", "f16")
    }
)
