"""VOPC: comparisons, one bit a lane. CDNA4 ISA, section 12.9."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import numerics
from .numerics import U32, Array
from .table import chapter
from .vector import lanes

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
    """v_cmp_class_f32: whether a value is in one of the classes whose bits are set."""
    bits, negative = x.view(U32), np.signbit(x)
    number = np.select(
        [np.isnan(x), np.isinf(x), x == 0, numerics.is_denormal(x)],
        [
            (bits >> U32(22)) & U32(1),
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
            (("f32", "f16"), _FLOATS),
        )
        for kind in kinds
        for name, compare in comparisons.items()
    }
)
chapter({"v_cmp_class_f32": lanes("mask", "f32 u32", _classify)})
