"""A gfx950 kernel's assembly listing as instructions, and the facts of its code object.

Source: the syntax of LLVM's AMDGPU back end (`AMDGPUAsmGFX9`, `AMDGPUModifierSyntax`,
`AMDGPUUsage`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import message

ACCUMULATORS = 256
"""Number of the accumulator register a0 among the vector registers."""

SCALARS = 1000
"""Number of s0 in sets that hold vector and scalar registers."""

VCC, M0, EXEC = 106, 124, 126

Modifier = int | str | bool | tuple[int, ...]

_NAMED_SCALARS = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
_INLINE_FLOATS = {
    "0.5": 0x3F000000,
    "-0.5": 0xBF000000,
    "1.0": 0x3F800000,
    "-1.0": 0xBF800000,
    "2.0": 0x40000000,
    "-2.0": 0xC0000000,
    "4.0": 0x40800000,
    "-4.0": 0xC0800000,
    "0.15915494": 0x3E22F983,
    "0.15915494309189532": 0x3E22F983,
}
_FLAGS = frozenset(
    ("clamp", "high", "idxen", "lds", "nt", "offen", "row_half_mirror", "row_mirror", "sc0", "sc1")
)
"""Modifiers without a value."""

_MNEMONIC = re.compile(r"(\w+?)(?:_(e32|e64|dpp|sdwa|e64_dpp))?")
_REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])")
_LOCATION = re.compile(r"\.loc\s.*;\s*(\S+:\d+)")
_NO_LOCATION = re.compile(r"\.loc\s+\d+\s+0\s")
_SEPARATOR = re.compile(r",\s+(?![^(]*\))")
"""Between operands; numbers in brackets are separated by commas without a space."""
_HARDWARE_REGISTER = re.compile(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)")
_METADATA_ARGUMENT = re.compile(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)\s+\.value_kind:\s*(\w+)")


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
    """One instruction of a listing.

    Args:
        name: mnemonic without the suffix of its encoding.
        encoding: "", "e32", "e64", "dpp" or "sdwa".
        operands: in the order of the listing, the destination first.
        modifiers: value by name: integers, tuples for "[...]", True for flags, else the text.
            Counters of ``s_waitcnt`` and ``hwreg`` ("MODE", with "hwreg_offset", "hwreg_size") are
            modifiers, too.
        target: label of a branch. text: as listed. line: source position, "file.py:12" or "".
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
    """Place of one kernel argument, in bytes; `kind` as in the metadata ("by_value", …)."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Program:
    """A kernel: its instructions and what the loader knows of it.

    Args:
        name: of the kernel. instructions: in the order of the listing.
        labels: index of the instruction after each label.
        arguments: explicit kernel arguments in order. hidden: those of the runtime by kind.
        kernarg_size: bytes of the kernel argument segment.
        descriptor: integers of the ``.amdhsa_`` directives by name without that prefix.
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


def parse_listing(listing: str) -> Program:
    """Parse the amdgcn text of one kernel, as Triton's ``asm["amdgcn"]`` holds it.

    Raises:
        ValueError: the text is no gfx950 listing of one kernel, or has an unknown operand.
    """
    code, _, metadata = listing.partition("\t.amdgpu_metadata")
    body, _, descriptor = code.partition("\t.section\t.rodata")
    name = re.search(r"\.amdhsa_kernel\s+(\S+)", descriptor)
    if name is None or not re.search(r'\.amdgcn_target\s+"[^"]*gfx950', body):
        raise ValueError(
            message("gfx950", "listing", "amdgcn text of a kernel for gfx950", repr(listing[:60]))
        )
    instructions, labels = _parse_body(body)
    arguments = [
        Argument(int(offset), int(size), kind)
        for offset, size, kind in _METADATA_ARGUMENT.findall(metadata)
    ]
    facts = _integers(r"^ +(?:- )?\.(\w+):\s+(\d+)$", metadata)
    return Program(
        name=name[1],
        instructions=tuple(instructions),
        labels=labels,
        arguments=tuple(a for a in arguments if not a.kind.startswith("hidden")),
        hidden={a.kind: a for a in arguments if a.kind.startswith("hidden")},
        kernarg_size=facts.get("kernarg_segment_size", 0),
        descriptor=_integers(r"\.amdhsa_(\w+)\s+(\d+)", descriptor),
        metadata=facts,
    )


def _integers(pattern: str, text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(pattern, text, re.M)}


def _parse_body(body: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line = ""
    for raw in body.splitlines():
        if ".loc" in raw and (found := _LOCATION.search(raw)):
            line = "" if _NO_LOCATION.search(raw) else found[1]
        text = raw.partition(";")[0].strip()
        if label := re.fullmatch(r"([\w.$]+):", text):
            labels[label[1]] = len(instructions)
        elif text and not text.startswith("."):
            instructions.append(parse_instruction(text, line))
    return instructions, labels


def parse_instruction(text: str, line: str = "") -> Instruction:
    """Parse one line of a listing.

    >>> add = parse_instruction("v_add_f32_e64 v1, |v2|, -s3 clamp")
    >>> add.name, add.encoding, add.operands[2].neg, add.modifiers["clamp"]
    ('v_add_f32', 'e64', True, True)

    Raises:
        ValueError: an operand is not known.
    """
    mnemonic, _, rest = text.partition(" ")
    found = _MNEMONIC.fullmatch(mnemonic)
    if found is None:
        raise ValueError(f"{text}: no instruction")
    name, encoding = found[1], (found[2] or "").removeprefix("e64_")
    if name == "s_waitcnt":
        return Instruction(name, "", (), _waits(text, rest), None, text, line)
    if re.match(r"s_c?branch", name):
        return Instruction(name, "", (), {}, rest.strip(), text, line)
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}
    parts = _SEPARATOR.split(rest.strip()) if rest.strip() else []
    try:
        for place, part in enumerate(parts):
            tokens = part.split()
            if hardware := _HARDWARE_REGISTER.fullmatch(part):
                modifiers["hwreg"] = hardware[1].removeprefix("HW_REG_")
                modifiers["hwreg_offset"] = int(hardware[2] or 0)
                modifiers["hwreg_size"] = int(hardware[3] or 32)
                continue
            if not _is_modifier(tokens[0]):
                operands.append(parse_operand(tokens.pop(0)))
            if tokens and place + 1 < len(parts):
                raise ValueError(f"modifier {tokens} before the last operand")
            modifiers.update(_modifier(token) for token in tokens)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    return Instruction(name, encoding, tuple(operands), modifiers, None, text, line)


def _waits(text: str, rest: str) -> dict[str, Modifier]:
    counters: dict[str, Modifier] = {
        name: int(count) for name, count in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", rest)
    }
    if not counters or re.sub(r"\w+\(\d+\)|[\s&,]", "", rest):
        raise ValueError(f"{text}: no counters")
    return counters


@functools.lru_cache(maxsize=4096)
def parse_operand(text: str) -> Operand:
    """Parse one operand, for example "v[2:3]", "-|s4|", "sext(v1)", "0x3f", "-4.0" or "vcc"."""
    sext = neg = absolute = False
    if found := re.fullmatch(r"sext\((.*)\)", text):
        sext, text = True, found[1]
    if re.match(r"-[|vas]", text):
        neg, text = True, text[1:]
    elif found := re.fullmatch(r"neg\((.*)\)", text):
        neg, text = True, found[1]
    if found := re.fullmatch(r"\|(.*)\||abs\((.*)\)", text):
        absolute, text = True, found[1] or found[2]
    if found := re.fullmatch(r"lit\((.*)\)", text):
        text = found[1]
    if found := _REGISTER.fullmatch(text):
        bank, single, first, last = found.groups()
        index = int(single or first)
        count = 1 if single else int(last) - index + 1
        kind = "s" if bank == "s" else "v"
        return Operand(kind, index + ACCUMULATORS * (bank == "a"), count, neg, absolute, sext)
    if text in _NAMED_SCALARS:
        return Operand("s", *_NAMED_SCALARS[text], neg, absolute, sext)
    if text == "off":
        return Operand("off")
    if text in _INLINE_FLOATS:
        return Operand("c", _INLINE_FLOATS[text], 0, neg, absolute, sext)
    try:
        return Operand("c", int(text, 0), 1, neg, absolute, sext)
    except ValueError:
        raise ValueError(f"operand {text!r} is not known") from None


def _is_modifier(token: str) -> bool:
    return token in _FLAGS or re.match(r"[a-z]\w*:", token) is not None


def _modifier(token: str) -> tuple[str, Modifier]:
    name, colon, value = token.partition(":")
    if not colon:
        if name not in _FLAGS:
            raise ValueError(f"modifier {token!r} is not known")
        return name, True
    if value.startswith("["):
        return name, tuple(int(part, 0) for part in value[1:-1].split(","))
    try:
        return name, int(value, 0)
    except ValueError:
        return name, value
