"""Executes single instructions on chosen registers, without a program around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gfx950_support.assembler import read_instruction
from gfx950emu.instructions import bind
from gfx950emu.program import Instruction, Program
from gfx950emu.state import WaveState

BASE = 0x7_0000_0000
CLOCK = 0x1234_5678_9ABC_DEF0
_USED = 48
"""Registers with data; the others hold garbage."""
DEFAULT_MODE = {"float_denorm_mode_32": 3}

F32_EDGES = (
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x40000000, 0xC0490FDB),
    *(0x00000001, 0x807FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF),  # denormal, largest
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x4B800001),  # inf, NaN
    *(0x5F800000, 0x1F800000, 0x7E000001, 0x01000000, 0x7EFFFFFF, 0x0B800000),  # large, small
    *(0xC3000000, 0xC3140000, 0x42FE0000),  # exponents near the ends of the range
)
F16_EDGES = (
    *(0, 0x8000, 0x3C00, 0xBC00, 0x4000, 0xC248, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF),
    *(0x7C00, 0xFC00, 0x7E00, 0xFE12, 0x7D01, 0x3800, 0x6801, 0x4300, 0x4500),
)
F64_EDGES = (
    *(0, 1 << 63, 0x3FF << 52, 0xBFF << 52, 0x4000 << 48, 0xC009_21FB_5444_2D18),
    *(1, 0x800F_FFFF_FFFF_FFFF, 1 << 52, 0x7FEF_FFFF_FFFF_FFFF, 0xFFEF_FFFF_FFFF_FFFF),
    *(0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 0xFFF8_0000_1234_5678, 0x7FF0_0000_0000_0001),
    *(0x3FE << 52, 0x4004 << 48, 0x41DF_FFFF_FFC0_0000, 0xC1E0_0000_0010_0000, 0x380F << 48),
    *(0x7E80_0000_0000_0433, 0x0123_4567_0000_0600, 0x7FD1_2345_FFFF_FB00, 0x7ED0_0000_FFFF_FA00),
)
INTEGER_EDGES = (
    *(0, 1, 2, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF),
    *(0x10000, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF),
    *(0x01020304, 0x0C0D0B0A, 0x00200010, 0x55555555),
)


@dataclass
class Single:
    """A machine without a program: registers, memory and LDS of `waves` waves.

    Args:
        seed: of registers and memory. edges: "f16" or "f64": special values of that type in most
            lanes, instead of those of float32 and integers.
    """

    waves: int
    seed: int = 0
    edges: str = ""
    state: WaveState = field(init=False)
    memory: Any = field(init=False)
    lds: Any = field(init=False)
    loads: list[Any] = field(default_factory=list)
    waited: tuple[int | None, int | None] | None = None

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        self.state = WaveState(self.waves, generator, 0xF0)
        state, edges = self.state, np.array(F32_EDGES + INTEGER_EDGES, np.uint32)
        for registers in (state.vector[:_USED], state.scalar[:_USED]):
            random = generator.integers(0, 1 << 32, registers.shape, np.uint32)
            near = generator.standard_normal(registers.shape).astype(np.float32).view(np.uint32)
            picked = edges[generator.integers(0, edges.size, registers.shape)]
            kind = generator.integers(0, 4, registers.shape)
            registers[:] = np.choose(kind, (random, near, picked, picked))
        for register in range(_USED):  # lanes 0 to 3: zeros of both signs in all combinations
            signs = np.arange(4, dtype=np.uint32) >> np.uint32(register // 4 % 2) & np.uint32(1)
            state.vector[register, :, :4] = signs << np.uint32(31)
        if self.edges:
            self._write_edges(generator)
        content = generator.integers(0, 256, 1 << 16, np.uint8)
        self.memory = SimpleNamespace(bytes=content)
        self.lds = SimpleNamespace(bytes=content[::-1].copy())

    def _write_edges(self, generator: np.random.Generator) -> None:
        """float16 in both halves of registers, or float64 in pairs from even registers on."""
        vector, lanes = self.state.vector[:_USED], slice(4, 44)
        if self.edges == "f16":
            halves = np.array(F16_EDGES, np.uint32)
            picked = halves[generator.integers(0, halves.size, (2, _USED, self.waves, 40))]
            vector[:, :, lanes] = picked[0] | picked[1] << np.uint32(16)
            return
        doubles = np.array(F64_EDGES, np.uint64)
        pairs = doubles[generator.integers(0, doubles.size, (_USED // 2, self.waves, 40))]
        vector[0::2, :, lanes] = pairs.astype(np.uint32)
        vector[1::2, :, lanes] = (pairs >> np.uint64(32)).astype(np.uint32)

    def set_exec(self, masks: list[int]) -> None:
        """EXEC of each wave."""
        self.state.write_exec(np.array(masks, np.uint64))

    def run(self, what: str | Instruction, labels: dict[str, int] | None = None) -> int | None:
        """Execute one instruction for all waves; a text is assembled and decoded first."""
        instruction = read_instruction(what) if isinstance(what, str) else what
        program = Program("test", (), labels or {}, (), {}, 0, DEFAULT_MODE, {})
        with np.errstate(all="ignore"):
            machine: Any = self
            return bind(instruction, program)(machine)

    # -- what instructions call on a machine -------------------------------------------------------

    def global_access(self, address: Any, size: int, use: Any, lanes: Any = None) -> Any:
        lanes = self.state.active if lanes is None else lanes
        offsets = np.broadcast_to(address, lanes.shape).astype(np.int64) - BASE
        return np.where(lanes, offsets, 0)

    def scalar_access(self, address: Any, size: int) -> Any:
        return address.astype(np.int64) - BASE

    def stored(self, *_: Any) -> None:
        """No other process looks at the memory."""

    def updated(self, *_: Any) -> None:
        """No other process looks at the memory."""

    def write_back(self) -> None:
        self.loads.append(("vm", ()))

    def invalidate(self) -> None:
        self.loads.append(("invalidate", ()))

    def clock(self) -> int:
        return CLOCK

    def lds_access(self, address: Any, size: int, *, lanes: Any = None, **_: Any) -> Any:
        lanes = self.state.active if lanes is None else lanes
        return np.where(lanes, np.broadcast_to(address, lanes.shape).astype(np.int64), 0)

    def lds_stored(self, *_: Any) -> None:
        """Nothing to check."""

    def issue_load(self, counter: str, registers: Any) -> None:
        self.loads.append((counter, tuple(registers)))

    def issue_store(self, counter: str) -> None:
        self.loads.append((counter, ()))

    def wait(self, vmcnt: int | None, lgkmcnt: int | None) -> None:
        self.waited = (vmcnt, lgkmcnt)

    def branch(self, taken: Any, target: int) -> Any:
        return np.where(taken, target, -1)

    def barrier(self) -> int:
        return -1

    def end(self) -> int:
        return -1
