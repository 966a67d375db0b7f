"""What atomic operations do to a word of memory or LDS.

CDNA4 ISA, sections 12.12 (DS), 12.13 (MUBUF) and 12.15 (GLOBAL); the last two write ``_x2`` for
64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..state import Lanes, Words
from . import numerics
from .numerics import F32, I32, I64, U32, U64, Array

Compute = Callable[..., Array]


class Atomic(NamedTuple):
    """An atomic operation on one word of each lane.

    Args:
        compute: new content from the old one and from the data. size: bytes of the word.
        values: words of data: two for a comparison and swap, the new content first.
    """

    compute: Compute
    size: int = 4
    values: int = 1

    @property
    def registers(self) -> int:
        """Registers of data a lane."""
        return self.size // 4 * self.values


_SIGNED: dict[Any, Any] = {np.dtype(U32): I32, np.dtype(U64): I64}


def _signed(compute: Compute) -> Compute:
    def computed(old: Array, new: Array) -> Array:
        kind = _SIGNED[old.dtype]
        return compute(old.view(kind), new.view(kind)).view(old.dtype)

    return computed


def _add_halves(decode: Callable[[Array], Array], encode: Callable[[Array], Array]) -> Compute:
    def add(old: Array, new: Array) -> Array:
        low, high = (
            encode(decode((old >> shift) & U32(0xFFFF)) + decode((new >> shift) & U32(0xFFFF)))
            for shift in (U32(0), U32(16))
        )
        return np.asarray(low | high << U32(16))

    return add


def _decrease(old: Array, new: Array) -> Array:
    return np.where((old == 0) | (old > new), new, old - old.dtype.type(1))


def _swapped(old: Array, new: Array) -> Array:
    return new


INTEGERS: dict[str, Compute] = {
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "smin": _signed(np.minimum),
    "smax": _signed(np.maximum),
    "umin": np.minimum,
    "umax": np.maximum,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": lambda old, new: np.where(old >= new, 0, old + old.dtype.type(1)),
    "dec": _decrease,
    "swap": _swapped,
}
"""Those that exist for 32 and 64 bits."""

ATOMICS: dict[str, Atomic] = {
    **{name: Atomic(compute) for name, compute in INTEGERS.items()},
    **{f"{name}_x2": Atomic(compute, 8) for name, compute in INTEGERS.items()},
    **{
        name: Atomic(lambda old, new, expected: np.where(old == expected, new, old), size, 2)
        for name, size in (("cmpswap", 4), ("cmpswap_x2", 8))
    },
    "add_f32": Atomic(lambda old, new: (old.view(F32) + new.view(F32)).view(U32)),
    "pk_add_f16": Atomic(_add_halves(numerics.from_f16, numerics.to_f16)),
    "pk_add_bf16": Atomic(_add_halves(numerics.from_bf16, numerics.to_bf16)),
}
"""Operations on global memory, by the end of their mnemonics."""


def changes_blindly(operation: Atomic) -> bool:
    """Whether the new content does not depend on the old one."""
    return operation.compute is _swapped


def words_of(operation: Atomic, registers: Sequence[Words]) -> list[Array]:
    """Words of data, uint32 or uint64 [count, 64], from the registers that hold them."""
    if operation.size == 4:
        return list(registers)
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [low.astype(U64) | high.astype(U64) << U64(32) for low, high in pairs]


def update(
    memory: Array, offsets: Array, compute: Compute, values: Iterable[Array], lanes: Lanes
) -> Array:
    """Apply an atomic operation lane after lane; returns the old words, [count, 64]."""
    new = [value[lanes] for value in values]
    kind = new[0].dtype
    places, content = offsets[lanes] // kind.itemsize, memory.view(kind)
    order = np.argsort(places, kind="stable")
    position = np.arange(places.size)
    starts = np.ones(places.size, np.bool_)
    starts[1:] = places[order][1:] != places[order][:-1]
    turn = position - np.maximum.accumulate(np.where(starts, position, 0))
    old = np.empty(places.size, kind)
    for number in range(int(turn.max(initial=-1)) + 1):  # lanes with the same address take turns
        now = order[turn == number]
        old[now] = content[places[now]]
        content[places[now]] = compute(old[now], *(value[now] for value in new))
    result = np.zeros(lanes.shape, kind)
    result[lanes] = old
    return result
