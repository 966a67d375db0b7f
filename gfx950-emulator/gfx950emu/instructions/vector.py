"""Binds an instruction that computes each lane by itself: VOP1, VOP2, VOP3 and VOPC.

An entry of these chapters is a function of arrays and its types, as in the manual's pseudocode::

    "v_add_u32": lanes("u32", "u32 u32", lambda a, b: a + b)      # D0.u32 = S0.u32 + S1.u32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..state import LANES, Lanes, WaveState
from .numerics import I64, U16, U32, U64, Array
from .operands import HALF, WIDE, Reader, dpp, sdwa_destination, sdwa_source, typed, words
from .table import Binder, Decoding, Run

if TYPE_CHECKING:
    from ..machine import Machine

FP16_OVFL = U32(23)
"""Bit of MODE that makes conversions to fp8, bf8 and float16 saturate."""

Write = Callable[[WaveState, Array, "Lanes | None"], None]


def lanes(
    results: str,
    sources: str,
    compute: Callable[..., Any],
    *,
    accumulates: bool = False,
    saturates: bool = False,
    implicit: int | None = None,
) -> Binder:
    """An entry of the table: a function of each lane.

    Args:
        results: types of what is written ("f32", "u32 mask"), which come first in the listing.
        sources: types of what is read. Types are those of `operands.typed`.
        compute: arrays to an array, or to a tuple of arrays if there are several results. It
            broadcasts; results of type "mask" are bool.
        accumulates: the destination is the last source, too.
        saturates: ``clamp`` is supported on integers: the exact result, within the type's range.
        implicit: scalar register pair that is the last source, a "mask" that no listing shows.
    """
    written, read = results.split(), sources.split()

    def bind(decoding: Decoding) -> Run:
        encoding = decoding.encoding
        writes = [_destination(decoding, place, kind) for place, kind in enumerate(written)]
        if encoding == "dpp" and "mask" in written:
            raise decoding.unknown("a result that DPP can write", "a mask")
        readers, mask = _sources(decoding, len(written), read)
        if accumulates:
            readers.append(typed(decoding, decoding.operands[0], read[-1]))
        if implicit is not None:
            readers.append(lambda state: state.read_mask(implicit))
        if len(readers) != len(read):
            raise decoding.unknown(f"{len(written) + len(read)} operands", len(decoding.operands))
        function = _clamped(decoding, compute, written[0], saturates)
        if len(writes) > 1:
            return _run_several(function, readers, writes)
        return _run_one(function, readers, writes[0], mask)

    return bind


def _run_one(
    compute: Callable[..., Any],
    readers: list[Reader],
    write: Write,
    mask: Callable[[WaveState], Lanes] | None,
) -> Run:
    if mask is None and len(readers) == 2:
        first, second = readers

        def run_two(machine: Any) -> None:
            state = machine.state
            write(state, compute(first(state), second(state)), None)

        return run_two

    def run(machine: Any) -> None:
        state = machine.state
        value = compute(*[read(state) for read in readers])
        write(state, value, None if mask is None else mask(state))

    return run


def _run_several(compute: Callable[..., Any], readers: list[Reader], writes: list[Write]) -> Run:
    def run(machine: Any) -> None:
        state = machine.state
        values = compute(*[read(state) for read in readers])
        for write, value in zip(writes, values, strict=True):
            write(state, value, None)

    return run


def _sources(
    decoding: Decoding, first: int, kinds: list[str]
) -> tuple[list[Reader], Callable[[WaveState], Lanes] | None]:
    """Readers of the sources, and the lanes to write if DPP restricts them."""
    listed = len(decoding.operands) - first
    operands = [decoding.operand(first + k) for k in range(min(listed, len(kinds)))]
    raw: list[Reader | None] = [None] * len(operands)
    mask = None
    if decoding.instruction.encoding == "sdwa":
        for place, operand in enumerate(operands[:2]):
            raw[place] = sdwa_source(decoding, place, operand)
    elif any(operand.sext for operand in operands):
        raise decoding.unknown("sext with SDWA alone", decoding.instruction.encoding)
    if decoding.instruction.encoding == "dpp":
        control = dpp(decoding)
        raw[0], mask = control.read(words(operands[0])), control.lanes
    readers = [
        typed(decoding, operand, kind, reader)
        for operand, kind, reader in zip(operands, kinds, raw, strict=False)
    ]
    return readers, mask


# -- results ---------------------------------------------------------------------------------------


def _destination(decoding: Decoding, place: int, kind: str) -> Write:
    """Writes a result of the pseudocode's type `kind`."""
    if kind == "mask":
        register = decoding.destination(place, "s")
        return lambda state, value, _: state.write_mask(
            register, np.broadcast_to(value, (state.count, LANES))
        )
    register = decoding.destination(place)
    if kind in WIDE:
        return wide_writer(register)
    if kind in HALF:  # GFX9 clears the upper half
        return _words_writer(decoding, register, lambda value: value.view(U16).astype(U32))
    return _words_writer(decoding, register, _bits)


def _bits(value: Array) -> Array:
    return value.view(U32)


def _words_writer(decoding: Decoding, register: int, convert: Callable[[Array], Array]) -> Write:
    if decoding.instruction.encoding == "sdwa":
        merge = sdwa_destination(decoding, register)
        return lambda state, value, mask: state.write_vector(
            register, merge(state, convert(np.asarray(value))), mask
        )
    return lambda state, value, mask: state.write_vector(register, convert(np.asarray(value)), mask)


def wide_writer(register: int) -> Write:
    """Writes 64 bits to two registers."""

    def write(state: WaveState, value: Array, mask: Lanes | None) -> None:
        bits = value.view(U64)
        state.write_vector(register, bits.astype(U32), mask)
        state.write_vector(register + 1, (bits >> U64(32)).astype(U32), mask)

    return write


_RANGES = {"u32": (U32, 0, (1 << 32) - 1), "u16": (U16, 0, (1 << 16) - 1)}


def _clamped(
    decoding: Decoding, compute: Callable[..., Any], result: str, saturates: bool
) -> Callable[..., Any]:
    """Applies the output modifier ``clamp``.

    ``omod`` is not served: hardware ignores it while denormals are on, as they are here.
    """
    if not decoding.take("clamp", False):
        return compute
    if result in ("f64", "f32", "f16"):
        # DX10_CLAMP is set: NaN becomes 0.
        return lambda *values: clamp(np.asarray(compute(*values)))
    if saturates and result in _RANGES:
        dtype, low, high = _RANGES[result]
        return lambda *values: np.clip(
            compute(*(value.astype(I64) for value in values)), low, high
        ).astype(dtype)
    raise decoding.unknown("no clamp", result)


def unsaturated(binder: Binder) -> Binder:
    """Refuses to convert to float16 under FP16_OVFL, which would make results saturate."""

    def bind(decoding: Decoding) -> Run:
        convert = binder(decoding)

        def run(machine: Machine) -> int | None:
            if (machine.state.mode[machine.state.selected] >> FP16_OVFL & U32(1)).any():
                raise decoding.unknown("MODE without FP16_OVFL", decoding.name)
            return convert(machine)

        return run

    return bind


def clamp(x: Array) -> Array:
    """Values within 0…1, NaN as 0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.clip(np.where(np.isnan(x), zero, x), zero, one)
