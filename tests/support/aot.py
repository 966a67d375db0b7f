"""What the binaries of Triton and Gluon kernels contain: see `mxpert.testing.ahead_of_time`."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton

from mxpert.testing.ahead_of_time import TARGETS as EVERY_TARGET
from mxpert.testing.ahead_of_time import Specialization, compile_call, specialize
from support.devices import DEVICES

__all__ = [
    "SHARED_MEMORY_LIMIT",
    "TARGETS",
    "TRITON_RELEASE",
    "CompiledKernel",
    "Metrics",
    "Specialization",
    "compile_for",
    "specialize",
]

TARGETS = MappingProxyType({name: EVERY_TARGET[name] for name in ("sm_90", "sm_100", "gfx950")})
"""Targets that the tests of each kernel compile for; test_targets_aot.py has the others."""

SHARED_MEMORY_LIMIT: Mapping[str, int] = MappingProxyType(
    {name: DEVICES[name].shared_memory for name in EVERY_TARGET}
)
"""Bytes of shared memory (LDS) that one block may use."""

TRITON_RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""As (3, 6): what compilers make of a kernel differs between releases in exact figures."""

_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# The first pattern found names the kernel's matrix instruction; listed strongest first.
_MATRIX_INSTRUCTIONS = {
    "cuda": (
        ("tcgen05.mma.block_scale", r"tcgen05\.mma\S*block_scale"),
        ("tcgen05.mma", r"tcgen05\.mma\."),
        ("wgmma", r"wgmma\.mma_async"),
        ("mma", r"\bmma\.sync"),
    ),
    "hip": (("mfma_scale", r"\bv_mfma_scale_"), ("mfma", r"\bv_mfma_")),
}
_NVIDIA_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_AMD_WIDTHS = {
    "ubyte": 8,
    "sbyte": 8,
    "byte": 8,
    "ushort": 16,
    "sshort": 16,
    "short": 16,
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
}


@dataclass(frozen=True)
class Metrics:
    """Figures read from one binary.

    Args:
        registers: per thread; on gfx950 the sum of vector and accumulator registers.
        spills: instructions that touch local memory (NVIDIA), or spilled registers (AMD).
        shared_memory: bytes per block. scratch: bytes of stack or private segment per thread.
        matrix_instruction: "wgmma", "tcgen05.mma", "tcgen05.mma.block_scale", "mma", "mfma",
            "mfma_scale", or None.
        instructions: count by full mnemonic ("LDG.E.128", "buffer_load_dwordx4").
        global_loads, global_stores: count by width in bits, asynchronous copies to shared memory
            among the loads; TMA transfers in neither.
    """

    registers: int
    spills: int
    shared_memory: int
    scratch: int
    matrix_instruction: str | None
    instructions: Mapping[str, int] = field(repr=False)
    global_loads: Mapping[int, int]
    global_stores: Mapping[int, int]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one target.

    Args:
        name: the function's name. target: key of `TARGETS`.
        asm: text by stage: "ttir", "ttgir", "llir", then "ptx" and "sass", or "amdgcn".
        metrics: figures of the binary.
    """

    name: str
    target: str
    asm: Mapping[str, str] = field(repr=False)
    metrics: Metrics

    @property
    def listing(self) -> str:
        """Instructions of the binary: SASS or amdgcn."""
        return self.asm["sass" if "sass" in self.asm else "amdgcn"]

    def count(self, pattern: str, stage: str | None = None) -> int:
        """How many lines of the listing (or of another stage's text) match a regular expression."""
        text = self.listing if stage is None else self.asm[stage]
        return sum(1 for line in text.splitlines() if re.search(pattern, line))


def compile_for(fn: Any, arguments: Mapping[str, Any], *, target: str) -> CompiledKernel:
    """Compile the binary that ``fn[grid](**arguments)`` would run on a target.

    Arguments and errors are those of `specialize`. The same binary is the same object.
    """
    call = specialize(fn, arguments, target)
    key = (fn, target, call.key)
    if key not in _compiled:
        _compiled[key] = _compile(fn, call, target)
    return _compiled[key]


_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def _compile(fn: Any, call: Specialization, target: str) -> CompiledKernel:
    kernel = compile_call(fn, call, target)
    asm = {stage: text for stage, text in kernel.asm.items() if isinstance(text, str)}
    if EVERY_TARGET[target].backend == "cuda":
        asm["sass"], usage = _disassemble(kernel.asm["cubin"])
        metrics = _nvidia_metrics(asm, usage, kernel.metadata.shared)
    else:
        metrics = _amd_metrics(asm, kernel.metadata.shared)
    return CompiledKernel(fn.__name__, target, MappingProxyType(asm), metrics)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """SASS and the resource usage report of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (["nvdisasm", "-c"], ["cuobjdump", "--dump-resource-usage"])
        sass, usage = (
            subprocess.run(
                [_NVIDIA_TOOLS / tool, option, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for tool, option in commands
        )
    return sass, usage


def _nvidia_metrics(asm: Mapping[str, str], usage: str, shared: int) -> Metrics:
    resources = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    # "        /*0050*/                   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
    mnemonics = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", asm["sass"], re.M
    )
    instructions = collections.Counter(mnemonics)
    return Metrics(
        registers=resources["REG"],
        # Triton kernels have no local arrays: whatever is in local memory was spilled.
        spills=sum(n for name, n in instructions.items() if re.match(r"(STL|LDL)\b", name)),
        shared_memory=shared,
        scratch=resources["STACK"] + resources["LOCAL"],
        matrix_instruction=_matrix_instruction("cuda", asm["ptx"]),
        instructions=MappingProxyType(instructions),
        global_loads=_widths(instructions, r"(?:LDG|LDGSTS)\b(.*)", _nvidia_width),
        global_stores=_widths(instructions, r"STG\b(.*)", _nvidia_width),
    )


def _amd_metrics(asm: Mapping[str, str], shared: int) -> Metrics:
    text = asm["amdgcn"]
    code, _, notes = text.partition(".amdgpu_metadata")

    def note(name: str) -> int:
        """A figure of the kernel's metadata note, which the assembler encodes into the binary."""
        found = re.search(rf"\.{name}:\s+(\d+)", notes)
        return int(found[1]) if found else 0

    instructions = collections.Counter(
        re.findall(r"^\s+((?:v|s|ds|buffer|global|flat|scratch)_\w+)", code, re.M)
    )
    return Metrics(
        registers=note("vgpr_count"),
        spills=note("vgpr_spill_count") + note("sgpr_spill_count"),
        shared_memory=max(shared, note("group_segment_fixed_size")),
        scratch=note("private_segment_fixed_size"),
        matrix_instruction=_matrix_instruction("hip", code),
        instructions=MappingProxyType(instructions),
        global_loads=_widths(
            instructions, r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)", _amd_width
        ),
        global_stores=_widths(instructions, r"(?:global|buffer|flat)_store_(\w+)", _amd_width),
    )


def _matrix_instruction(backend: str, text: str) -> str | None:
    return next(
        (name for name, pattern in _MATRIX_INSTRUCTIONS[backend] if re.search(pattern, text)), None
    )


def _widths(instructions: Mapping[str, int], pattern: str, width: Any) -> Mapping[int, int]:
    found: collections.Counter[int] = collections.Counter()
    for name, count in instructions.items():
        if match := re.fullmatch(pattern, name):
            found[width(match[1])] += count
    return MappingProxyType(dict(sorted(found.items())))


@functools.cache
def _nvidia_width(modifiers: str) -> int:
    """Bits of ".E.128.CONSTANT"; without a width an access has 32."""
    widths = [_NVIDIA_WIDTHS[part] for part in modifiers.split(".") if part in _NVIDIA_WIDTHS]
    return max(widths, default=32)


@functools.cache
def _amd_width(suffix: str) -> int:
    """Bits of "dwordx4" or "short_d16_hi"."""
    return _AMD_WIDTHS[suffix.split("_")[0]]
