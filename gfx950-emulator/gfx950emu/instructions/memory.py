"""SMEM, MUBUF and GLOBAL: loads, stores, loads straight to LDS, atomics, the clock.

CDNA4 ISA, chapters 8 to 10 and sections 12.6, 12.13, 12.15.

``nt`` steers caches and changes no result. ``sc0`` and ``sc1`` are the scope of an access, which
matters where several workgroups or devices use the same bytes; ``sc0`` of an atomic operation asks
for the old value. Scratch instructions are known and fault: no kernel may spill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..faults import ScratchFault
from ..memory import DEVICE, SYSTEM, Use
from ..program import M0, SCALARS
from ..state import LANES, Lanes, WaveState, Words, spread
from .atomics import ATOMICS, Atomic, changes_blindly, update, words_of
from .numerics import I8, I16, I32, I64, U8, U16, U32, U64, Array
from .operands import LANE, scalar, typed, words
from .table import Binder, Decoding, Run, chapter

# -- bytes and registers ---------------------------------------------------------------------------


class Format(NamedTuple):
    """What a memory instruction moves.

    Args:
        size: bytes a lane. signed: whether bytes and shorts are sign-extended.
        half: "low" or "high" if only this half of the register takes part.
    """

    size: int
    signed: bool = False
    half: str = ""

    @property
    def registers(self) -> int:
        """Registers a lane."""
        return max(1, self.size // 4)


_WIDE: dict[int, Any] = {4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Types as large as an access, to move its bytes at once."""


def load_words(memory: Array, offsets: Array, form: Format) -> list[Words]:
    """Dwords of each lane, as a load puts them into registers: uint32 [count, 64]."""
    size = form.size
    if size in _WIDE and not (offsets & (size - 1)).any():
        whole = memory.view(_WIDE[size])[offsets // size]
        parts = whole.view(U32).reshape(*offsets.shape, -1)
        return [parts[..., k] for k in range(form.registers)]
    if size >= 4:
        bytes_ = memory[offsets[..., None] + np.arange(size)]
        parts = bytes_.view(U32)
        return [parts[..., k] for k in range(form.registers)]
    if size == 1:
        value = memory[offsets]
        return [value.view(I8).astype(I32).view(U32) if form.signed else value.astype(U32)]
    short = memory[offsets].astype(U16) | memory[offsets + 1].astype(U16) << U16(8)
    return [short.view(I16).astype(I32).view(U32) if form.signed else short.astype(U32)]


def store_words(
    memory: Array, offsets: Array, form: Format, values: Sequence[Array], lanes: Lanes
) -> None:
    """Write the dwords of the given lanes; of a half, as `stored_words` has shifted it."""
    places, size = offsets[lanes], form.size
    picked = np.stack([spread(value, lanes.shape)[lanes] for value in values], -1)
    if size in _WIDE and not (places & (size - 1)).any():
        memory.view(_WIDE[size])[places // size] = picked.view(_WIDE[size])[:, 0]
    else:
        memory[places[:, None] + np.arange(size)] = picked.view(U8)[:, :size]


def stored_words(state: WaveState, register: int, form: Format) -> list[Words]:
    """The dwords that a store takes from registers."""
    if form.half == "high":
        return [state.read_vector(register) >> U32(16)]
    return [state.read_vector(register + k) for k in range(form.registers)]


def write_loaded(state: WaveState, register: int, form: Format, values: Sequence[Array]) -> None:
    """Write what was loaded to the registers of the active lanes."""
    if form.half:
        old, new = state.read_vector(register), values[0] & U32(0xFFFF)
        values = [
            (old & U32(0xFFFF)) | new << U32(16)
            if form.half == "high"
            else (old & U32(0xFFFF0000)) | new
        ]
    for k, value in enumerate(values):
        state.write_vector(register + k, value)


# -- SMEM ------------------------------------------------------------------------------------------


def _scalar_load(count: int) -> Binder:
    def bind(decoding: Decoding) -> Run:
        register = decoding.destination(0, "s")
        base = scalar(decoding, decoding.operand(1, "s"), "u64")
        offset = scalar(decoding, decoding.operand(2, "sc"), "u32")
        registers = range(SCALARS + register, SCALARS + register + count)

        def run(machine: Any) -> None:
            state = machine.state
            offsets = machine.scalar_access(base(state) + offset(state), 4 * count)
            content = machine.memory.bytes.view(U32)
            for k in range(count):
                state.write_scalar(register + k, content[(offsets >> 2) + k])
            machine.issue_load("smem", registers)

        return run

    return bind


def _real_time(decoding: Decoding) -> Run:
    """The real-time clock, 64 bits. It ticks at 100 MHz."""
    register = decoding.destination(0, "s")
    registers = range(SCALARS + register, SCALARS + register + 2)

    def run(machine: Any) -> None:
        ticks = np.full(machine.state.count, machine.clock(), U64)
        machine.state.write_scalar64(register, ticks)
        machine.issue_load("smem", registers)

    return run


# -- addresses -------------------------------------------------------------------------------------


class Access(NamedTuple):
    """Part of an access: offsets into memory, the lanes that take part, and the dwords moved."""

    offsets: Array
    lanes: Lanes
    first: int
    dwords: int


Place = Callable[[Any, Format, Use], Iterator[Access]]
"""Checks an access of a machine: what it moves, and how it uses memory."""


def _global_place(decoding: Decoding, vector: int, base: int) -> Place:
    """Address vaddr [+ saddr] + offset; with a scalar base the vector part is an unsigned dword."""
    offset = I64(decoding.integer("offset"))
    address, saddr = decoding.operand(vector, "v"), decoding.operand(base, "so")
    if saddr.kind == "off":
        wide = typed(decoding, address, "i64")
    else:
        low, pair = words(address), saddr.index

        def wide(state: WaveState) -> Array:
            return state.read_scalar64(pair)[:, None].view(I64) + low(state)

    def place(machine: Any, form: Format, use: Use) -> Iterator[Access]:
        state = machine.state
        offsets = machine.global_access(wide(state) + offset, form.size, use)
        yield Access(offsets, state.active, 0, form.registers)

    return place


def _buffer_place(decoding: Decoding, vector: int) -> Place:
    """Base of the resource + voffset + soffset + offset.

    Dwords at or beyond num_records read 0 and are not written, each by itself, those of an atomic
    operation together. soffset does not count for that check. Resources with a structure (swizzled)
    are refused.
    """
    offset = decoding.integer("offset")
    resource = decoding.operand(vector + 1, "s").index
    soffset = scalar(decoding, decoding.operand(vector + 2, "sc"), "u32")
    if decoding.take("offen", False):
        voffset = words(decoding.operand(vector, "v"))
    else:
        decoding.operand(vector, "o")

        def voffset(state: WaveState) -> Array:
            return np.zeros((1, 1), U32)

    def place(machine: Any, form: Format, use: Use) -> Iterator[Access]:
        state = machine.state
        low, high, records = (state.read_scalar(resource + k).astype(I64) for k in range(3))
        if (high >> 31).any():
            raise decoding.unknown("a buffer resource without swizzle", "swizzled")
        inner = voffset(state).astype(I64) + offset
        base = (low | (high & 0xFFFF) << 32) + soffset(state)
        start = spread(inner, (state.count, LANES))
        dword = min(form.size, 4)

        def inside(k: int) -> Lanes:
            """Lanes whose dword k, and so all before it, lies within the buffer."""
            found: Lanes = state.active & (start + (4 * k + dword) <= records[:, None])
            return found

        lanes = inside(form.registers - 1)
        if use.atomic or form.registers == 1 or (inside(0) == lanes).all():
            address = base[:, None] + start
            offsets = machine.global_access(address, form.size, use, lanes)
            yield Access(offsets, lanes, 0, form.registers)
            return
        for k in range(form.registers):
            lanes = inside(k)
            address = base[:, None] + start + 4 * k
            offsets = machine.global_access(address, dword, use, lanes)
            yield Access(offsets, lanes, k, 1)

    return place


# -- loads, stores, atomics ------------------------------------------------------------------------


def _scope(decoding: Decoding) -> int:
    """The scope of a load or store."""
    decoding.ignore("nt")
    return int(bool(decoding.take("sc0", False))) + 2 * int(bool(decoding.take("sc1", False)))


def _gather(machine: Any, place: Place, form: Format, use: Use) -> list[Array]:
    """What a load reads; lanes out of bounds read 0."""
    values: list[Array] = []
    for access in place(machine, form, use):
        part = form if access.dwords == form.registers else Format(4)
        loaded = load_words(machine.memory.bytes, access.offsets, part)
        if access.lanes is not machine.state.active:
            loaded = [np.where(access.lanes, value, U32(0)) for value in loaded]
        values += loaded
    return values


def _load(form: Format, family: str) -> Binder:
    def bind(decoding: Decoding) -> Run:
        use = Use(scope=_scope(decoding))
        if decoding.take("lds", False):
            return _direct(decoding, _buffer_place(decoding, 0), form, use)
        register = decoding.destination()
        place = _PLACES[family](decoding, 1, 2)
        registers = range(register, register + form.registers)

        def run(machine: Any) -> None:
            write_loaded(machine.state, register, form, _gather(machine, place, form, use))
            machine.issue_load("vm", registers)

        return run

    return bind


_DROPPED = 0x7FFFFFFF
"""M0 of waves whose copy is redundant (Triton 3.9): LDS drops writes beyond its end."""


def _load_to_lds(form: Format) -> Binder:
    def bind(decoding: Decoding) -> Run:
        use = Use(scope=_scope(decoding))
        lds_offset = decoding.instruction.integer("offset")
        return _direct(decoding, _global_place(decoding, 0, 1), form, use, lds_offset)

    return bind


def _direct(
    decoding: Decoding, place: Place, form: Format, use: Use, offset: int | None = None
) -> Run:
    """A load straight to LDS: lane l writes at M0 + offset + size * l; out of bounds it writes 0.

    The instruction's offset counts for both addresses.
    """
    start = decoding.instruction.integer("offset") if offset is None else offset
    size = max(form.size, 4)
    whole = Format(size)
    steps = start + LANE * size

    def run(machine: Any) -> None:
        state = machine.state
        values = _gather(machine, place, form, use)
        base = state.read_scalar(M0).astype(I64)[:, None]
        lanes = state.active & (base != _DROPPED)
        offsets = machine.lds_access(
            base + steps, size, write=True, direct=True, lanes=lanes, words=values
        )
        store_words(machine.lds.bytes, offsets, whole, values, lanes)
        machine.issue_store("vm")

    return run


def _store(form: Format, family: str) -> Binder:
    vector, data, base = _STORE_OPERANDS[family]

    def bind(decoding: Decoding) -> Run:
        use = Use(read=False, write=True, scope=_scope(decoding))
        register = decoding.destination(data)
        place = _PLACES[family](decoding, vector, base)

        def run(machine: Any) -> None:
            values = stored_words(machine.state, register, form)
            for access in place(machine, form, use):
                part = form if access.dwords == form.registers else Format(4)
                picked = values[access.first : access.first + access.dwords]
                store_words(machine.memory.bytes, access.offsets, part, picked, access.lanes)
                machine.stored(access.offsets, part.size, access.lanes)
            machine.issue_store("vm")

        return run

    return bind


def _atomic(operation: Atomic, family: str) -> Binder:
    """An atomic operation. Data of 64 bits take two registers; so does a comparison, after them."""
    form, blind = Format(operation.size), changes_blindly(operation)

    def bind(decoding: Decoding) -> Run:
        returns = bool(decoding.take("sc0", False))
        scope = SYSTEM if decoding.take("sc1", False) else DEVICE
        decoding.ignore("nt")
        use = Use(returns, True, True, scope)
        vector, data, base = _STORE_OPERANDS[family]
        if family == "global" and returns:
            vector, data, base = vector + 1, data + 1, base + 1
        register = decoding.destination(data)
        target = decoding.destination(0) if returns else None
        place = _PLACES[family](decoding, vector, base)
        registers = range(register, register + operation.registers)

        def run(machine: Any) -> None:
            state = machine.state
            values = words_of(operation, [state.read_vector(each) for each in registers])
            (access,) = place(machine, form, use)
            memory = machine.memory.bytes
            old = update(memory, access.offsets, operation.compute, values, access.lanes)
            machine.updated(access.offsets, old, access.lanes, blind)
            if target is None:
                machine.issue_store("vm")
            else:
                written = old.view(U32).reshape(*old.shape, -1)
                for k in range(form.registers):
                    state.write_vector(target + k, written[..., k])
                machine.issue_load("vm", range(target, target + form.registers))

        return run

    return bind


_PLACES: dict[str, Callable[[Decoding, int, int], Place]] = {
    "global": _global_place,
    "buffer": lambda decoding, vector, _: _buffer_place(decoding, vector),
}
_STORE_OPERANDS = {"global": (0, 1, 2), "buffer": (1, 0, 2)}
"""Places of address, data and scalar base in a store without result."""


def _scratch(decoding: Decoding) -> Run:
    decoding.ignore("offset", "nt", "sc0", "sc1")
    for place in range(len(decoding.operands)):
        decoding.operand(place, "vsco")
    return lambda machine: machine.fault(ScratchFault, "registers are spilled to scratch memory")


def _write_back(decoding: Decoding) -> Run:
    """Writes the L2 cache back; vmcnt counts it. `coherence.find_unordered` reads its scope."""
    decoding.ignore("sc0", "sc1")
    return lambda machine: machine.write_back()


def _invalidate(decoding: Decoding) -> Run:
    """Invalidates caches; other devices' data only with the scope of the system."""
    whole = _scope(decoding) == SYSTEM
    return lambda machine: machine.invalidate() if whole else None


LOADS = {
    "ubyte": Format(1),
    "sbyte": Format(1, signed=True),
    "ushort": Format(2),
    "sshort": Format(2, signed=True),
    "dword": Format(4),
    "dwordx2": Format(8),
    "dwordx3": Format(12),
    "dwordx4": Format(16),
    "ubyte_d16": Format(1, half="low"),
    "ubyte_d16_hi": Format(1, half="high"),
    "sbyte_d16": Format(1, True, "low"),
    "sbyte_d16_hi": Format(1, True, "high"),
    "short_d16": Format(2, half="low"),
    "short_d16_hi": Format(2, half="high"),
}
STORES = {
    "byte": Format(1),
    "byte_d16_hi": Format(1, half="high"),
    "short": Format(2),
    "short_d16_hi": Format(2, half="high"),
    "dword": Format(4),
    "dwordx2": Format(8),
    "dwordx3": Format(12),
    "dwordx4": Format(16),
}

chapter(
    {
        f"s_load_dword{'' if count == 1 else f'x{count}'}": _scalar_load(count)
        for count in (1, 2, 4, 8, 16)
    }
)
for _family in ("global", "buffer"):
    chapter({f"{_family}_load_{name}": _load(form, _family) for name, form in LOADS.items()})
    chapter({f"{_family}_store_{name}": _store(form, _family) for name, form in STORES.items()})
    chapter(
        {
            f"{_family}_atomic_{name}": _atomic(operation, _family)
            for name, operation in ATOMICS.items()
        }
    )
chapter(
    {f"global_load_lds_{name}": _load_to_lds(LOADS[name]) for name in ("dword", "dwordx4")}
    | {f"scratch_load_{name}": _scratch for name in LOADS}
    | {f"scratch_store_{name}": _scratch for name in STORES}
    | {"buffer_wbl2": _write_back, "buffer_inv": _invalidate, "s_memrealtime": _real_time}
)
