"""What the binaries of Triton and Gluon kernels contain: see `mxpert.testing.ahead_of_time`."""

from __future__ import annotations

import collections
import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import triton
from triton.runtime.cache import get_cache_manager

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
    "let_specialize",
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
_MNEMONICS = {
    # "        /*0050*/                   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
    "cuda": r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)",
    "hip": r"^\s+((?:v|s|ds|buffer|global|flat|scratch)_\w+)",
}
_LOADS = {"cuda": r"(?:LDG|LDGSTS)\b(.*)", "hip": r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)"}
_STORES = {"cuda": r"STG\b(.*)", "hip": r"(?:global|buffer|flat)_store_(\w+)"}
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
        backend: "cuda" or "hip". text: returns the listing.
        registers: per thread; on gfx950 the sum of vector and accumulator registers.
        shared_memory: bytes per block. scratch: bytes of stack or private segment per thread.
        matrix_instruction: "wgmma", "tcgen05.mma", "tcgen05.mma.block_scale", "mma", "mfma",
            "mfma_scale", or None.
        spilled: number of registers in memory, where the binary says so.
    """

    backend: str
    text: Callable[[], str] = field(repr=False)
    registers: int
    shared_memory: int
    scratch: int
    matrix_instruction: str | None
    spilled: int | None = None

    @functools.cached_property
    def instructions(self) -> Mapping[str, int]:
        """Count by full mnemonic ("LDG.E.128", "buffer_load_dwordx4")."""
        found = re.findall(_MNEMONICS[self.backend], self.text(), re.M)
        return MappingProxyType(collections.Counter(found))

    @property
    def spills(self) -> int:
        """Instructions that touch local memory (NVIDIA), or spilled registers (AMD).

        Triton kernels have no local arrays: what is in local memory was spilled, and without any
        the listing need not be made.
        """
        if self.spilled is not None or not self.scratch:
            return self.spilled or 0
        return sum(n for name, n in self.instructions.items() if re.match(r"(STL|LDL)\b", name))

    @property
    def global_loads(self) -> Mapping[int, int]:
        """Count by width in bits, with asynchronous copies to shared memory, without TMA."""
        return self._widths(_LOADS[self.backend])

    @property
    def global_stores(self) -> Mapping[int, int]:
        """Count by width in bits, without TMA."""
        return self._widths(_STORES[self.backend])

    def _widths(self, pattern: str) -> Mapping[int, int]:
        width = _nvidia_width if self.backend == "cuda" else _amd_width
        found: collections.Counter[int] = collections.Counter()
        for name, count in self.instructions.items():
            if match := re.fullmatch(pattern, name):
                found[width(match[1])] += count
        return MappingProxyType(dict(sorted(found.items())))


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one target.

    Args:
        name: the function's name. target: key of `TARGETS`.
        asm: text by stage: "ttir", "ttgir", "llir", then "ptx", or "amdgcn".
        metrics: figures of the binary.
    """

    name: str
    target: str
    asm: Mapping[str, str] = field(repr=False)
    metrics: Metrics

    @property
    def listing(self) -> str:
        """Instructions of the binary: SASS or amdgcn."""
        return self.metrics.text()

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


def let_specialize(monkeypatch: pytest.MonkeyPatch, fn: Any, name: str) -> None:
    """Let Triton specialise on a parameter of a kernel that has it excluded."""
    parameter = next(each for each in fn.params if each.name == name)
    rules = {"do_not_specialize": False, "do_not_specialize_on_alignment": False}
    monkeypatch.setattr(parameter, "__dict__", parameter.__dict__ | rules)


_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def _compile(fn: Any, call: Specialization, target: str) -> CompiledKernel:
    kernel = compile_call(fn, call, target)
    asm = {stage: text for stage, text in kernel.asm.items() if isinstance(text, str)}
    measure = _nvidia_metrics if EVERY_TARGET[target].backend == "cuda" else _amd_metrics
    return CompiledKernel(fn.__name__, target, MappingProxyType(asm), measure(kernel))


def _tool(cubin: bytes, tool: str, option: str) -> str:
    """What a tool of CUDA prints about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_NVIDIA_TOOLS / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _disassembler() -> bytes:
    """What tells one release of nvdisasm from another."""
    return hashlib.sha256((_NVIDIA_TOOLS / "nvdisasm").read_bytes()).digest()


def disassembled(cubin: bytes) -> str:
    """The listing of a cubin. Triton's cache keeps it, as it keeps the cubin."""
    kept = get_cache_manager(hashlib.sha256(_disassembler() + cubin).hexdigest())
    path = kept.get_file("listing.sass")
    if path is None:
        path = kept.put(_tool(cubin, "nvdisasm", "-c"), "listing.sass", binary=False)
    return Path(path).read_text("utf-8")


def _nvidia_metrics(kernel: Any) -> Metrics:
    """The listing is made when a test asks for it: it costs up to half as much as compilation."""
    cubin: bytes = kernel.asm["cubin"]
    usage = _tool(cubin, "cuobjdump", "--dump-resource-usage")
    resources = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    return Metrics(
        "cuda",
        functools.cache(lambda: disassembled(cubin)),
        registers=resources["REG"],
        shared_memory=kernel.metadata.shared,
        scratch=resources["STACK"] + resources["LOCAL"],
        matrix_instruction=_matrix_instruction("cuda", kernel.asm["ptx"]),
    )


def _amd_metrics(kernel: Any) -> Metrics:
    text: str = kernel.asm["amdgcn"]
    code, _, notes = text.partition(".amdgpu_metadata")

    def note(name: str) -> int:
        """A figure of the kernel's metadata note, which the assembler encodes into the binary."""
        found = re.search(rf"\.{name}:\s+(\d+)", notes)
        return int(found[1]) if found else 0

    return Metrics(
        "hip",
        lambda: text,
        registers=note("vgpr_count"),
        shared_memory=max(kernel.metadata.shared, note("group_segment_fixed_size")),
        scratch=note("private_segment_fixed_size"),
        matrix_instruction=_matrix_instruction("hip", code),
        spilled=note("vgpr_spill_count") + note("sgpr_spill_count"),
    )


def _matrix_instruction(backend: str, text: str) -> str | None:
    return next(
        (name for name, pattern in _MATRIX_INSTRUCTIONS[backend] if re.search(pattern, text)), None
    )


@functools.cache
def _nvidia_width(modifiers: str) -> int:
    """Bits of ".E.128.CONSTANT"; without a width an access has 32."""
    widths = [_NVIDIA_WIDTHS[part] for part in modifiers.split(".") if part in _NVIDIA_WIDTHS]
    return max(widths, default=32)


@functools.cache
def _amd_width(suffix: str) -> int:
    """Bits of "dwordx4" or "short_d16_hi"."""
    return _AMD_WIDTHS[suffix.split("_")[0]]
