"""VOP1: one source. CDNA4 ISA, section 12.8."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import numerics
from .numerics import F16, F32, F64, I16, I32, U16, U32, Array
from .operands import LANE, words
from .table import Decoding, Run, chapter
from .vector import lanes, unsaturated


def _copy(x: Array) -> Array:
    return x


def reverse_bits(x: Array) -> Array:
    """The bits of uint32 values in reverse order."""
    x = ((x & U32(0x55555555)) << U32(1)) | ((x >> U32(1)) & U32(0x55555555))
    x = ((x & U32(0x33333333)) << U32(2)) | ((x >> U32(2)) & U32(0x33333333))
    x = ((x & U32(0x0F0F0F0F)) << U32(4)) | ((x >> U32(4)) & U32(0x0F0F0F0F))
    return x.byteswap()


def _unsigned(x: Array) -> Array:
    return numerics.to_integer(x, 0, 0xFFFFFFFF).astype(U32)


def _signed(x: Array) -> Array:
    return numerics.to_integer(x, -0x80000000, 0x7FFFFFFF).astype(I32)


def _byte(number: int) -> Any:
    shift = U32(8 * number)
    return lambda x: ((x >> shift) & U32(255)).astype(F32)


_reciprocal = numerics.transcendental(lambda x: 1.0 / x)
_HALF_FUNCTIONS = {
    "rcp": lambda x: 1.0 / x,
    "rsq": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "exp": np.exp2,
    "log": np.log2,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rndne": np.rint,
}


def _sign_bits(x: Array) -> Array:
    """Position of the first bit that differs from the sign, from the top; all ones if none."""
    flipped = np.where(x < 0, ~x, x).view(U32)
    return numerics.leading_zeros(flipped).view(I32)


def _trailing_zeros(x: Array) -> Array:
    """Zeros below the lowest set bit; all ones where no bit is set."""
    lowest = (x & (~x + U32(1))).astype(np.float64)
    return np.where(x == 0, U32(0xFFFFFFFF), (np.frexp(lowest)[1] - 1).astype(U32))


def _half_integer(low: int, high: int, kind: Any) -> Any:
    return lambda x: numerics.to_integer(x, low, high).astype(kind)


def _read_first_lane(decoding: Decoding) -> Run:
    """v_readfirstlane_b32: the lowest active lane, lane 0 if none is active."""
    register, read = decoding.destination(0, "s"), words(decoding.operand(1))

    def run(machine: Any) -> None:
        state = machine.state
        value = np.broadcast_to(read(state), state.active.shape)
        state.write_scalar(register, value[np.arange(state.count), state.active.argmax(1)])

    return run


def _swap_lanes(distance: int) -> Any:
    """v_permlane16_swap_b32, v_permlane32_swap_b32.

    Upper lanes of the first register change places with the lanes `distance` below of the second.
    EXEC: the pseudocode ignores it, the encoding has a flag for inactive lanes. Pairs of which one
    lane is active are therefore refused; inactive pairs stay.
    """
    upper = (LANE & distance) != 0

    def bind(decoding: Decoding) -> Run:
        first, second = decoding.destination(0), decoding.destination(1)

        def run(machine: Any) -> None:
            state = machine.state
            lower_active, upper_active = state.active[:, ~upper], state.active[:, upper]
            if (lower_active != upper_active).any():
                raise decoding.unknown("both lanes of each pair active, or neither", "one active")
            x, y = state.read_vector(first).copy(), state.read_vector(second).copy()
            x[:, upper], y[:, ~upper] = y[:, ~upper], x[:, upper]
            state.write_vector(first, x)
            state.write_vector(second, y)

        return run

    return bind


chapter(
    {
        "v_mov_b32": lanes("b32", "b32", _copy),
        "v_mov_b64": lanes("u64", "u64", _copy),
        "v_accvgpr_read_b32": lanes("b32", "b32", _copy),  # VOP3P opcode space
        "v_accvgpr_write_b32": lanes("b32", "b32", _copy),
        "v_accvgpr_mov_b32": lanes("b32", "b32", _copy),
        "v_not_b32": lanes("u32", "u32", np.invert),
        "v_bfrev_b32": lanes("u32", "u32", reverse_bits),
        "v_cvt_f32_u32": lanes("f32", "u32", lambda a: a.astype(F32)),
        "v_cvt_f32_i32": lanes("f32", "i32", lambda a: a.astype(F32)),
        "v_cvt_u32_f32": lanes("u32", "f32", _unsigned),
        "v_cvt_i32_f32": lanes("i32", "f32", _signed),
        "v_cvt_f32_f16": lanes("f32", "f16", lambda a: a.astype(F32)),
        "v_cvt_f16_f32": unsaturated(lanes("f16", "f32", lambda a: a.astype(F16))),
        "v_cvt_f32_ubyte0": lanes("f32", "u32", _byte(0)),
        "v_cvt_f32_ubyte1": lanes("f32", "u32", _byte(1)),
        "v_cvt_f32_ubyte2": lanes("f32", "u32", _byte(2)),
        "v_cvt_f32_ubyte3": lanes("f32", "u32", _byte(3)),
        "v_cvt_f16_u16": unsaturated(lanes("f16", "u16", lambda a: a.astype(F16))),
        "v_cvt_f16_i16": lanes("f16", "i16", lambda a: a.astype(F16)),
        "v_cvt_u16_f16": lanes("u16", "f16", _half_integer(0, 0xFFFF, U16)),
        "v_cvt_i16_f16": lanes("i16", "f16", _half_integer(-0x8000, 0x7FFF, I16)),
        "v_cvt_f64_f32": lanes("f64", "f32", lambda a: a.astype(F64)),
        "v_cvt_f32_f64": lanes("f32", "f64", lambda a: a.astype(F32)),
        "v_cvt_f64_i32": lanes("f64", "i32", lambda a: a.astype(F64)),
        "v_cvt_f64_u32": lanes("f64", "u32", lambda a: a.astype(F64)),
        "v_cvt_i32_f64": lanes("i32", "f64", _signed),
        "v_cvt_u32_f64": lanes("u32", "f64", _unsigned),
        "v_rndne_f64": lanes("f64", "f64", np.rint),
        "v_trunc_f64": lanes("f64", "f64", np.trunc),
        "v_floor_f64": lanes("f64", "f64", np.floor),
        "v_ceil_f64": lanes("f64", "f64", np.ceil),
        "v_frexp_exp_i32_f64": lanes("i32", "f64", numerics.exponent_of),
        "v_frexp_exp_i32_f32": lanes("i32", "f32", numerics.exponent_of),
        "v_frexp_mant_f64": lanes("f64", "f64", numerics.mantissa_of),
        "v_frexp_mant_f32": lanes("f32", "f32", numerics.mantissa_of),
        "v_rndne_f32": lanes("f32", "f32", np.rint),
        "v_trunc_f32": lanes("f32", "f32", np.trunc),
        "v_floor_f32": lanes("f32", "f32", np.floor),
        "v_ceil_f32": lanes("f32", "f32", np.ceil),
        "v_exp_f32": lanes("f32", "f32", numerics.transcendental(np.exp2)),
        "v_log_f32": lanes("f32", "f32", numerics.transcendental(np.log2)),
        "v_rcp_f32": lanes("f32", "f32", _reciprocal),
        "v_rsq_f32": lanes("f32", "f32", numerics.transcendental(lambda x: 1.0 / np.sqrt(x))),
        "v_ffbh_u32": lanes("u32", "u32", numerics.leading_zeros),
        "v_ffbh_i32": lanes("i32", "i32", _sign_bits),
        "v_ffbl_b32": lanes("u32", "u32", _trailing_zeros),
        "v_rcp_iflag_f32": lanes("f32", "f32", _reciprocal),
        "v_sqrt_f32": lanes("f32", "f32", numerics.transcendental(np.sqrt)),
        "v_readfirstlane_b32": _read_first_lane,
        "v_permlane16_swap_b32": _swap_lanes(16),
        "v_permlane32_swap_b32": _swap_lanes(32),
    }
)
chapter(
    {
        f"v_{name}_f16": unsaturated(lanes("f16", "f16", numerics.half(function)))
        for name, function in _HALF_FUNCTIONS.items()
    }
)
