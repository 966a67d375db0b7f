"""A gfx950 kernel: its instructions, and the facts of its code object."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

ACCUMULATORS = 256
"""Number of the accumulator register a0 among the vector registers."""

SCALARS = 1000
"""Number of s0 in sets that hold vector and scalar registers."""

VCC, M0, EXEC = 106, 124, 126

Modifier = int | str | bool | tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """One operand of an instruction.

    Args:
        kind: "v" vector register, "s" scalar register, "c" constant, "off" no register.
        index: number of the first register (a0 is vector register 256), or the constant's value.
        count: registers in a row. A constant has 1, an inline float 0: its `index` is the bits of
            the float32, which instructions on other types have to convert.
        neg, absolute: source modifiers of float operands. sext: sign extension of SDWA.
    """

    kind: str
    index: int = 0
    count: int = 1
    neg: bool = False
    absolute: bool = False
    sext: bool = False

    @property
    def registers(self) -> range:
        """Registers of the operand, scalar ones from `SCALARS` on."""
        if self.kind not in ("v", "s"):
            return range(0)
        first = self.index + (SCALARS if self.kind == "s" else 0)
        return range(first, first + self.count)


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

    Args:
        name: mnemonic without the suffix of its encoding.
        encoding: "e32", "e64", "dpp" or "sdwa" where a vector instruction has several, else "".
        operands: in the order of listings, the destination first.
        modifiers: value by name, as listings name them: integers, tuples for "[...]", True for
            flags, a name for registers and selections. Defaults are left out, except the masks of
            DPP and ``op_sel_hi`` of matrix instructions with scales. Counters of ``s_waitcnt`` and
            ``hwreg`` ("MODE", with "hwreg_offset", "hwreg_size") are modifiers, too.
        target: label of a branch.
        text: for messages alone. line: source position, "file.py:12" or "".
    """

    name: str
    encoding: str = ""
    operands: tuple[Operand, ...] = ()
    modifiers: Mapping[str, Modifier] = field(default_factory=dict)
    target: str | None = None
    text: str = ""
    line: str = ""

    @functools.cached_property
    def registers(self) -> frozenset[int]:
        """All registers that the operands name, scalar ones from `SCALARS` on."""
        return frozenset(register for operand in self.operands for register in operand.registers)

    @functools.cached_property
    def meaning(self) -> tuple[object, ...]:
        """Equal for instructions that do the same wherever they stand; branches also need a place.

        The order of modifiers counts: texts show it.
        """
        return self.name, self.encoding, self.operands, tuple(self.modifiers.items())

    def integer(self, modifier: str, default: int = 0) -> int:
        """The value of a modifier that is a number."""
        value = self.modifiers.get(modifier, default)
        if not isinstance(value, int):
            raise ValueError(f"{self.text}: {modifier} is {value!r}, not a number")
        return value

    def integers(self, modifier: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The values of a modifier that is a list of numbers."""
        value = self.modifiers.get(modifier, default)
        if not isinstance(value, tuple):
            raise ValueError(f"{self.text}: {modifier} is {value!r}, not a list")
        return value


@dataclass(frozen=True)
class Argument:
    """Place of one kernel argument, in bytes; `kind` as in the metadata ("by_value", …).

    The name is "" where the metadata has none; Triton's has none.
    """

    offset: int
    size: int
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Program:
    """A kernel: its instructions and what the loader knows of it.

    Args:
        name: of the kernel. instructions: in the order of the listing.
        labels: index of the instruction after each label.
        arguments: explicit kernel arguments in order. hidden: those of the runtime by kind.
        kernarg_size: bytes of the kernel argument segment.
        descriptor: fields of the kernel descriptor, see `Kernel`.
        metadata: integers of the code object's note by name.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    arguments: tuple[Argument, ...]
    hidden: Mapping[str, Argument]
    kernarg_size: int
    descriptor: Mapping[str, int] = field(repr=False)
    metadata: Mapping[str, int] = field(repr=False)

    @property
    def kernarg_register(self) -> int:
        """Scalar register pair that holds the address of the kernel arguments."""
        flags = self.descriptor
        return (
            4 * flags.get("user_sgpr_private_segment_buffer", 0)
            + 2 * flags.get("user_sgpr_dispatch_ptr", 0)
            + 2 * flags.get("user_sgpr_queue_ptr", 0)
        )

    @property
    def preloaded_dwords(self) -> int:
        """Dwords of the arguments that stand in the registers after the address at the start."""
        return self.descriptor.get("user_sgpr_kernarg_preload_length", 0)

    @property
    def entry(self) -> int:
        """First instruction. Loaders that preload arguments skip the code that loads them."""
        if not self.preloaded_dwords:
            return 0
        branch = next(i for i in self.instructions if i.name == "s_branch")
        return self.labels[str(branch.target)]

    @property
    def scratch(self) -> int:
        """Bytes of private memory a lane."""
        return self.descriptor.get("private_segment_fixed_size", 0)

    @property
    def lds(self) -> int:
        """Bytes of LDS known at compile time; Triton adds its own at launch."""
        return self.descriptor.get("group_segment_fixed_size", 0)

    @property
    def num_waves(self) -> int:
        """Waves of a workgroup."""
        return self.metadata["max_flat_workgroup_size"] // 64

    @property
    def mode(self) -> int:
        """Initial MODE register: rounding, denormals, DX10_CLAMP, IEEE, FP16_OVFL."""
        flags = self.descriptor
        return (
            flags.get("float_round_mode_32", 0)
            | flags.get("float_round_mode_16_64", 0) << 2
            | flags.get("float_denorm_mode_32", 0) << 4
            | flags.get("float_denorm_mode_16_64", 3) << 6
            | flags.get("dx10_clamp", 1) << 8
            | flags.get("ieee_mode", 1) << 9
            | flags.get("fp16_overflow", 0) << 23
        )
