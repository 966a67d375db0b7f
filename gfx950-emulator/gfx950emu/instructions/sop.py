"""Scalar instructions: SOP2, SOPK, SOP1, SOPC, SOPP. CDNA4 ISA, sections 12.1 to 12.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import EXEC, VCC
from ..state import Lanes, WaveState
from .numerics import I32, I64, U32, U64, Array, count_bits
from .operands import WIDE, Reader, scalar
from .table import Binder, Decoding, Run, chapter
from .vector import FP16_OVFL
from .vop1 import reverse_bits
from .vop2 import INTEGERS
from .vop3 import extract, extract_signed

Flag = Callable[..., Array]
"""The new SCC from the result and the sources."""


def _not_zero(result: Array, *_: Array) -> Array:
    return np.asarray(result != 0)


def _write(decoding: Decoding, kind: str) -> Callable[[WaveState, Array], None]:
    register = decoding.destination(0, "s")
    if kind in WIDE:
        return lambda state, value: state.write_scalar64(register, value.view(U64))
    return lambda state, value: state.write_scalar(register, value.view(U32))


def scalars(
    result: str, sources: str, compute: Callable[..., Any], flag: Flag | None = None
) -> Binder:
    """An entry of the table: a function of scalars.

    Args:
        result: type of the destination. sources: types of what is read, as in `operands.scalar`;
            "scc" is the old SCC as uint32, "imm" the 16-bit constant of SOPK, sign-extended, and
            "d" the destination.
        compute: arrays [count] or [1] to an array. flag: new SCC of the result and the sources;
            None leaves SCC alone.
    """

    def bind(decoding: Decoding) -> Run:
        write = _write(decoding, result)
        readers = _readers(decoding, 1, sources)

        def run(machine: Any) -> None:
            state = machine.state
            values = [read(state) for read in readers]
            value = np.asarray(compute(*values))
            scc = None if flag is None else flag(value, *values)
            write(state, value)  # after the flag: sources are views of the registers
            if scc is not None:
                state.write_scc(scc)

        return run

    return bind


def _compare(sources: str, compute: Callable[..., Array]) -> Binder:
    """An entry that sets SCC."""

    def bind(decoding: Decoding) -> Run:
        readers = _readers(decoding, 0, sources)

        def run(machine: Any) -> None:
            state = machine.state
            state.write_scc(compute(*[read(state) for read in readers]))

        return run

    return bind


def _readers(decoding: Decoding, first: int, sources: str) -> list[Reader]:
    readers: list[Reader] = []
    place = first
    for kind in sources.split():
        if kind == "scc":
            readers.append(lambda state: state.read_scc().astype(U32))
        elif kind == "d":
            readers.append(scalar(decoding, decoding.operands[0], "u32"))
        elif kind == "imm":
            readers.append(_immediate(decoding, place))
            place += 1
        else:
            readers.append(scalar(decoding, decoding.operand(place, "sc"), kind))
            place += 1
    return readers


def _immediate(decoding: Decoding, place: int) -> Reader:
    """The constant of SOPK, 16 bits with sign, as uint32."""
    value = decoding.operand(place, "c").index & 0xFFFF
    constant = np.array([(value ^ 0x8000) - 0x8000 & 0xFFFFFFFF], U32)
    return lambda state: constant


# -- arithmetic ------------------------------------------------------------------------------------


def _carry(compute: Callable[..., Array], sources: str) -> Binder:
    """uint32 sums and differences; SCC says that they leave the range."""

    def exact(*values: Array) -> Array:
        return np.asarray(compute(*(value.astype(I64) for value in values)))

    def wrapped(*values: Array) -> Array:
        return (exact(*values) & 0xFFFFFFFF).astype(U32)

    def flag(_: Array, *values: Array) -> Array:
        total = exact(*values)
        return np.asarray((total < 0) | (total > 0xFFFFFFFF))

    return scalars("u32", sources, wrapped, flag)


def _overflow(compute: Callable[[Array, Array], Array], sources: str) -> Binder:
    """int32 sums and differences; SCC says that they leave the range."""

    def flag(_: Array, a: Array, b: Array) -> Array:
        total = compute(a.view(I32).astype(I64), b.view(I32).astype(I64))
        return np.asarray((total < -0x80000000) | (total > 0x7FFFFFFF))

    return scalars("u32", sources, compute, flag)


def _bits(kind: str, compute: Callable[..., Array]) -> Binder:
    """A bitwise operation of two sources; SCC says that a bit is set."""
    return scalars(kind, f"{kind} {kind}", compute, _not_zero)


def _shift(kind: str, compute: Callable[[Array, Array], Array]) -> Binder:
    """A shift by the lowest five or six bits of the second source."""
    mask = U32(63 if kind in WIDE else 31)
    dtype = np.dtype({"u32": U32, "i32": I32, "u64": U64, "i64": I64}[kind])

    def shifted(a: Array, b: Array) -> Array:
        return compute(a, (b & mask).astype(dtype))

    return scalars(kind, f"{kind} u32", shifted, _not_zero)


def _field_width(x: Array) -> Array:
    """Bits of a field in S1[22:16]; 32 and more are all."""
    return np.asarray(np.minimum((x >> U32(16)) & U32(127), U32(32)))


def _lowest_bit(x: Array) -> Array:
    """Number of the lowest set bit, -1 without one."""
    wide = x.astype(U64)
    below = (wide & (~wide + U64(1))) - U64(1)
    return np.where(wide == 0, -1, count_bits(below).view(I32)).astype(I32)


def _sign_extend(bits: int) -> Callable[[Array], Array]:
    shift = I32(32 - bits)
    return lambda a: (a << shift) >> shift


def _saveexec(compute: Callable[[Array, Array], Array]) -> Binder:
    """D = EXEC, then EXEC = compute(source, EXEC); SCC says that a lane is left."""

    def bind(decoding: Decoding) -> Run:
        register = decoding.destination(0, "s")
        source = scalar(decoding, decoding.operand(1), "u64")

        def run(machine: Any) -> None:
            state = machine.state
            old = state.read_scalar64(EXEC)
            new = compute(source(state), old)
            state.write_scalar64(register, old)
            state.write_exec(new)
            state.write_scc(new != 0)

        return run

    return bind


# -- program control -------------------------------------------------------------------------------


def _branch(taken: Callable[[WaveState], Lanes] | None) -> Binder:
    def bind(decoding: Decoding) -> Run:
        target = decoding.program.labels.get(str(decoding.instruction.target))
        if target is None:
            raise decoding.unknown("a label of the listing", decoding.instruction.target)
        if taken is None:
            return lambda machine: target
        return lambda machine: machine.branch(taken(machine.state), target)

    return bind


def _vcc_zero(state: WaveState) -> Lanes:
    return np.asarray((state.read_scalar(VCC) | state.read_scalar(VCC + 1)) == 0)


def _exec_zero(state: WaveState) -> Lanes:
    return np.asarray(~state.active.any(1))


def _wait(decoding: Decoding) -> Run:
    """s_waitcnt. Exports, which expcnt counts, do not exist."""
    given = decoding.instruction.modifiers
    vmcnt, lgkmcnt = (
        decoding.integer(name) if name in given else None for name in ("vmcnt", "lgkmcnt")
    )
    decoding.ignore("expcnt")
    return lambda machine: machine.wait(vmcnt, lgkmcnt)


def _no_operation(decoding: Decoding) -> Run:
    """Instructions that change time alone."""
    for place in range(len(decoding.operands)):
        decoding.operand(place)
    return lambda machine: None


def _hardware_register(decoding: Decoding) -> tuple[np.uint32, np.uint32]:
    """Shift and mask of the field of MODE that s_getreg and s_setreg name."""
    name = decoding.take("hwreg", "")
    shift, size = decoding.integer("hwreg_offset"), decoding.integer("hwreg_size", 32)
    if name != "MODE":
        raise decoding.unknown("the hardware register MODE", name)
    return U32(shift), U32((1 << size) - 1)


def _set_register(decoding: Decoding) -> Run:
    """s_setreg: rounding to nearest even and denormals cannot be changed, FP16_OVFL can."""
    shift, mask = _hardware_register(decoding)
    if int(mask) << int(shift) != 1 << int(FP16_OVFL):
        raise decoding.unknown("writes to FP16_OVFL (MODE bit 23) alone", decoding.name)
    source = scalar(decoding, decoding.operand(0, "sc"), "u32")

    def run(machine: Any) -> None:
        state = machine.state
        kept = state.mode[state.selected] & ~(mask << shift)
        state.mode[state.selected] = kept | (source(state) & mask) << shift

    return run


def _get_register(decoding: Decoding) -> Run:
    register = decoding.destination(0, "s")
    shift, mask = _hardware_register(decoding)

    def run(machine: Any) -> None:
        state = machine.state
        state.write_scalar(register, (state.mode[state.selected] >> shift) & mask)

    return run


chapter(
    {
        # -- SOP2, section 12.1
        "s_add_u32": _carry(lambda a, b: a + b, "u32 u32"),
        "s_sub_u32": _carry(lambda a, b: a - b, "u32 u32"),
        "s_addc_u32": _carry(lambda a, b, c: a + b + c, "u32 u32 scc"),
        "s_subb_u32": _carry(lambda a, b, c: a - b - c, "u32 u32 scc"),
        "s_add_i32": _overflow(lambda a, b: a + b, "u32 u32"),
        "s_sub_i32": _overflow(lambda a, b: a - b, "u32 u32"),
        **{
            f"s_lshl{k}_add_u32": _carry(lambda a, b, k=k: (a << k) + b, "u32 u32")
            for k in range(1, 5)
        },
        "s_min_i32": scalars("i32", "i32 i32", np.minimum, lambda _, a, b: a < b),
        "s_min_u32": scalars("u32", "u32 u32", np.minimum, lambda _, a, b: a < b),
        "s_max_i32": scalars("i32", "i32 i32", np.maximum, lambda _, a, b: a >= b),
        "s_max_u32": scalars("u32", "u32 u32", np.maximum, lambda _, a, b: a >= b),
        "s_mul_i32": scalars("u32", "u32 u32", np.multiply),
        "s_mul_hi_u32": scalars(
            "u32", "u32 u32", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32)
        ),
        "s_mul_hi_i32": scalars(
            "i32", "i32 i32", lambda a, b: (a.astype(I64) * b >> I64(32)).astype(I32)
        ),
        "s_cselect_b32": scalars("u32", "u32 u32 scc", lambda a, b, c: np.where(c, a, b)),
        "s_cselect_b64": scalars("u64", "u64 u64 scc", lambda a, b, c: np.where(c, a, b)),
        **{
            f"s_{name}_b{bits}": _bits(f"u{bits}", compute)
            for bits in (32, 64)
            for name, compute in (
                ("and", lambda a, b: a & b),
                ("or", lambda a, b: a | b),
                ("xor", lambda a, b: a ^ b),
                ("andn2", lambda a, b: a & ~b),
                ("orn2", lambda a, b: a | ~b),
                ("nand", lambda a, b: ~(a & b)),
                ("nor", lambda a, b: ~(a | b)),
                ("xnor", lambda a, b: ~(a ^ b)),
            )
        },
        **{
            f"s_{name}_{letter}{bits}": _shift(f"{kind}{bits}", compute)
            for bits in (32, 64)
            for name, letter, kind, compute in (
                ("lshl", "b", "u", np.left_shift),
                ("lshr", "b", "u", np.right_shift),
            )
        },
        "s_ashr_i32": _shift("i32", np.right_shift),
        "s_ashr_i64": _shift("i64", np.right_shift),
        "s_bfe_u32": scalars(
            "u32", "u32 u32", lambda a, b: extract(a, b, _field_width(b)), _not_zero
        ),
        "s_bfe_i32": scalars(
            "u32", "u32 u32", lambda a, b: extract_signed(a, b, _field_width(b)), _not_zero
        ),
        "s_bfm_b32": scalars(
            "u32", "u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))
        ),
        # -- SOPK, section 12.2
        "s_movk_i32": scalars("u32", "imm", lambda a: a),
        "s_addk_i32": _overflow(lambda a, b: a + b, "d imm"),
        "s_mulk_i32": scalars("u32", "d imm", np.multiply),
        **{
            f"s_cmpk_{'lg' if name == 'ne' else name}_i32": _compare(
                "i32 imm", lambda a, b, f=compare: f(a, b.view(I32))
            )
            for name, compare in INTEGERS.items()
        },
        **{
            f"s_cmpk_{'lg' if name == 'ne' else name}_u32": _compare(
                "u32 imm", lambda a, b, f=compare: f(a, b & U32(0xFFFF))
            )
            for name, compare in INTEGERS.items()
        },
        "s_setreg_b32": _set_register,
        "s_setreg_imm32_b32": _set_register,
        "s_getreg_b32": _get_register,
        # -- SOP1, section 12.3
        "s_mov_b32": scalars("u32", "u32", lambda a: a),
        "s_mov_b64": scalars("u64", "u64", lambda a: a),
        "s_not_b32": scalars("u32", "u32", np.invert, _not_zero),
        "s_not_b64": scalars("u64", "u64", np.invert, _not_zero),
        "s_brev_b32": scalars("u32", "u32", reverse_bits),
        "s_abs_i32": scalars("i32", "i32", np.abs, _not_zero),
        "s_sext_i32_i8": scalars("i32", "i32", _sign_extend(8)),
        "s_sext_i32_i16": scalars("i32", "i32", _sign_extend(16)),
        "s_bcnt1_i32_b32": scalars("u32", "u32", count_bits, _not_zero),
        "s_bcnt1_i32_b64": scalars("u32", "u64", count_bits, _not_zero),
        "s_ff1_i32_b32": scalars("i32", "u32", _lowest_bit),
        "s_ff1_i32_b64": scalars("i32", "u64", _lowest_bit),
        "s_and_saveexec_b64": _saveexec(lambda a, e: a & e),
        "s_or_saveexec_b64": _saveexec(lambda a, e: a | e),
        "s_xor_saveexec_b64": _saveexec(lambda a, e: a ^ e),
        "s_andn2_saveexec_b64": _saveexec(lambda a, e: a & ~e),
        # -- SOPC, section 12.4
        **{
            f"s_cmp_{'lg' if name == 'ne' else name}_{kind}": _compare(f"{kind} {kind}", compare)
            for kind in ("i32", "u32")
            for name, compare in INTEGERS.items()
        },
        "s_cmp_eq_u64": _compare("u64 u64", np.equal),
        "s_cmp_lg_u64": _compare("u64 u64", np.not_equal),
        "s_bitcmp0_b32": _compare("u32 u32", lambda a, b: (a >> (b & U32(31))) & U32(1) == 0),
        "s_bitcmp1_b32": _compare("u32 u32", lambda a, b: (a >> (b & U32(31))) & U32(1) == 1),
        # -- SOPP, section 12.5
        "s_branch": _branch(None),
        "s_cbranch_scc0": _branch(lambda state: ~state.read_scc()),
        "s_cbranch_scc1": _branch(lambda state: state.read_scc()),
        "s_cbranch_vccz": _branch(_vcc_zero),
        "s_cbranch_vccnz": _branch(lambda state: ~_vcc_zero(state)),
        "s_cbranch_execz": _branch(_exec_zero),
        "s_cbranch_execnz": _branch(lambda state: ~_exec_zero(state)),
        "s_waitcnt": _wait,
        "s_barrier": lambda decoding: lambda machine: machine.barrier(),
        "s_endpgm": lambda decoding: lambda machine: machine.end(),
        "s_nop": _no_operation,
        "s_sleep": _no_operation,
        "s_setprio": _no_operation,
    }
)
