"""What a gfx950 listing does in its hot loop, and how many of its waves fit on a SIMD.

Works on the amdgcn text of any compiled kernel; independent of the executor's parser. `hot_loop`
finds the loop, `check_native` has the rules of native kernels, `check_figures` keeps those of the
portable ones from getting worse.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from support.aot import TRITON_RELEASE, CompiledKernel

LDS_BYTES, LDS_GRANULE = 160 * 1024, 1280
"""LDS of a CU, and the unit in which workgroups get it."""
VECTOR_REGISTERS, REGISTER_GRANULE = 512, 8
"""Vector registers of a SIMD by lane, accumulators included, and the unit of their allocation."""
SIMDS, MOST_WAVES = 4, 8
"""SIMDs of a CU; waves that one SIMD holds at most."""

CLASSES = {
    "mfma": r"v_mfma_",
    "waits": r"s_(waitcnt|barrier|nop|sleep)",
    "vmem": r"(buffer|global|flat|scratch)_",
    "lds": r"ds_",
    "salu": r"s_",
    "valu": r"v_",
}
"""Class → pattern of the mnemonics; the first that matches counts."""

_BYTE_LOAD = re.compile(r"(?:buffer|global|flat)_load_[us]byte|ds_read_[iu]8")
_GLOBAL_LOAD = re.compile(r"(?:buffer|global|flat)_load_")


def classify(text: str) -> str:
    """Class of an instruction: a key of `CLASSES`.

    Raises:
        ValueError: no instruction of gfx950.
    """
    for name, pattern in CLASSES.items():
        if re.match(pattern, text):
            return name
    raise ValueError(f"classify: text — need an instruction of gfx950, got {text!r}")


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop in the order of the listing."""

    instructions: tuple[str, ...]

    def count(self, kind: str) -> int:
        """Number of instructions of a class."""
        return sum(classify(text) == kind for text in self.instructions)

    @property
    def counts(self) -> Counter[str]:
        """Number of instructions by class."""
        return Counter(map(classify, self.instructions))

    @property
    def overhead(self) -> float:
        """Instructions other than MFMA by MFMA."""
        matrix = self.count("mfma")
        return (len(self.instructions) - matrix) / matrix

    @property
    def byte_loads(self) -> list[str]:
        """Loads of single bytes from memory or LDS."""
        return [text for text in self.instructions if _BYTE_LOAD.match(text)]

    @property
    def global_loads(self) -> list[str]:
        """Loads from memory, those straight into LDS included."""
        return [text for text in self.instructions if _GLOBAL_LOAD.match(text)]

    @property
    def direct_to_lds(self) -> list[str]:
        """Loads that write LDS without passing registers."""
        return [text for text in self.global_loads if re.search(r"\blds\b", text)]

    @property
    def non_temporal(self) -> list[str]:
        """Loads with the non-temporal hint: their lines leave the caches first."""
        return [text for text in self.global_loads if re.search(r"\bnt\b", text)]

    @property
    def accumulator_moves(self) -> int:
        """Moves between vector registers and accumulators."""
        return sum(text.startswith("v_accvgpr_") for text in self.instructions)


def instructions_of(listing: str) -> tuple[list[str], dict[str, int]]:
    """Instructions of a listing, and the index of the instruction after each label."""
    code = listing.partition("\t.section\t.rodata")[0]
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        text = line.partition(";")[0].strip()
        label = re.fullmatch(r"([.\w$]+):", text)
        if label:
            labels[label[1]] = len(instructions)
        elif text and not text.startswith("."):
            instructions.append(" ".join(text.split()))
    return instructions, labels


def _blocks(listing: str) -> tuple[list[str], dict[int, int], dict[int, set[int]]]:
    """Instructions, end of each basic block by its first instruction, and the blocks after it."""
    instructions, labels = instructions_of(listing)
    branches = {
        place: re.match(r"s_(c?)branch\w* (\S+)|s_endpgm", text)
        for place, text in enumerate(instructions)
    }
    jumps = {place: match for place, match in branches.items() if match}
    firsts = sorted({0, *labels.values(), *(place + 1 for place in jumps)} - {len(instructions)})
    ends = dict(zip(firsts, [*firsts[1:], len(instructions)], strict=True))
    after: dict[int, set[int]] = {}
    for first, end in ends.items():
        jump = jumps.get(end - 1)
        falls = jump is None or jump[1] == "c"
        after[first] = {end} & ends.keys() if falls else set()
        if jump and jump[2]:
            after[first].add(labels[jump[2]])
    return instructions, ends, after


def _reachable(start: int, after: dict[int, set[int]], inside: set[int]) -> set[int]:
    """Blocks of `inside` that a path of at least one step reaches from `start`."""
    found: set[int] = set()
    pending = [start]
    while pending:
        new = (after[pending.pop()] & inside) - found
        found |= new
        pending += new
    return found


def _cycles(after: dict[int, set[int]], inside: set[int]) -> list[set[int]]:
    """Blocks of each loop and of the loops in it: strongly connected parts, without their first
    block again."""
    reach = {block: _reachable(block, after, inside) for block in inside}
    found: list[set[int]] = []
    remaining = {block for block in inside if block in reach[block]}
    while remaining:
        first = min(remaining)
        cycle = {block for block in reach[first] if first in reach[block]}
        found += [cycle, *_cycles(after, cycle - {first})]
        remaining -= cycle
    return found


def hot_loop(listing: str) -> Loop:
    """The innermost loop with MFMA; of several the one with the most MFMA.

    Raises:
        ValueError: no loop has an MFMA.
    """
    instructions, ends, after = _blocks(listing)
    multiplying: list[tuple[set[int], Loop]] = []
    for cycle in _cycles(after, set(ends)):
        texts = [text for first in sorted(cycle) for text in instructions[first : ends[first]]]
        loop = Loop(tuple(texts))
        if loop.count("mfma"):
            multiplying.append((cycle, loop))
    if not multiplying:
        raise ValueError("hot_loop: listing — need a loop with MFMA, got none")
    inner = [
        loop for cycle, loop in multiplying if not any(other < cycle for other, _ in multiplying)
    ]
    return max(inner, key=lambda loop: loop.count("mfma"))


@dataclass(frozen=True)
class Occupancy:
    """Waves that a SIMD holds of a kernel, by what limits them.

    Args:
        waves: the smallest of the others.
        by_registers: that the vector registers allow, in whole waves.
        by_lds: that the LDS of the CU allows, an average over its SIMDs.
    """

    waves: float
    by_registers: int
    by_lds: float


def occupancy(registers: int, shared_memory: int, num_warps: int) -> Occupancy:
    """Occupancy of a kernel.

    Args:
        registers: vector registers and accumulators of a lane.
        shared_memory: bytes of LDS of a workgroup. num_warps: its waves.
    """
    allocated = -(-max(registers, 1) // REGISTER_GRANULE) * REGISTER_GRANULE
    by_registers = min(MOST_WAVES, VECTOR_REGISTERS // allocated)
    workgroups = SIMDS * by_registers // num_warps
    by_lds = float(MOST_WAVES)
    if shared_memory:
        fitting = LDS_BYTES // (-(-shared_memory // LDS_GRANULE) * LDS_GRANULE)
        by_lds = min(by_lds, fitting * num_warps / SIMDS)
        workgroups = min(workgroups, fitting)
    return Occupancy(workgroups * num_warps / SIMDS, by_registers, by_lds)


def byte_accesses(loop: Loop) -> list[str]:
    """Byte loads and byte stores to LDS in a loop: block scales that are moved one by one."""
    stores = [text for text in loop.instructions if text.startswith("ds_write_b8")]
    return [*loop.byte_loads, *stores]


def check_native(
    compiled: CompiledKernel,
    num_warps: int,
    *,
    most_overhead: float,
    least_waves: float = 1,
    least_direct: int = 0,
    least_non_temporal: int = 0,
) -> Loop:
    """Check the rules of a native kernel and return its hot loop.

    No spills, no scratch, no byte accesses in the hot loop.

    Args:
        compiled: the kernel, compiled for gfx950. num_warps: waves of a workgroup.
        most_overhead: instructions other than MFMA by MFMA.
        least_waves: waves by SIMD. least_direct: loads straight into LDS.
        least_non_temporal: loads with the non-temporal hint.

    Raises:
        AssertionError: names every rule that is broken, with the figures.
    """
    loop, metrics = hot_loop(compiled.listing), compiled.metrics
    waves = occupancy(metrics.registers, metrics.shared_memory, num_warps).waves
    moved, direct, streamed = byte_accesses(loop), loop.direct_to_lds, loop.non_temporal
    rules = (
        (metrics.spills == 0, f"{metrics.spills} registers are spilled"),
        (metrics.scratch == 0, f"{metrics.scratch} bytes of scratch a lane"),
        (not moved, f"bytes are moved one by one in the hot loop: {moved}"),
        (
            loop.overhead <= most_overhead,
            f"{loop.overhead:.1f} other instructions by MFMA, at most {most_overhead}: "
            f"{dict(loop.counts)}",
        ),
        (waves >= least_waves, f"{waves} waves by SIMD, at least {least_waves}"),
        (len(direct) >= least_direct, f"direct loads to LDS {direct}, at least {least_direct}"),
        (
            len(streamed) >= least_non_temporal,
            f"non-temporal loads {streamed}, at least {least_non_temporal}",
        ),
    )
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise AssertionError(f"{compiled.name}: " + "; ".join(broken))
    return loop


class Figures(TypedDict):
    """Figures of a kernel; see `MAY_NOT_GROW` and `MAY_NOT_SHRINK` for what is better."""

    instructions_per_mfma: float
    byte_accesses: int
    accumulator_moves: int
    registers: int
    spills: int
    direct_loads: int
    non_temporal_loads: int
    waves: float


MAY_NOT_GROW = (
    "instructions_per_mfma",
    "byte_accesses",
    "accumulator_moves",
    "registers",
    "spills",
)
MAY_NOT_SHRINK = ("direct_loads", "non_temporal_loads", "waves")

FIGURES = Path(__file__).with_name("gfx950_figures.json")
"""Recorded figures of the portable kernels: Triton release → kernel → `Figures`."""


def figures_of(compiled: CompiledKernel, num_warps: int) -> Figures:
    """Figures of a kernel with MFMA in a loop."""
    loop, metrics = hot_loop(compiled.listing), compiled.metrics
    return Figures(
        instructions_per_mfma=round(loop.overhead, 1),
        byte_accesses=len(byte_accesses(loop)),
        accumulator_moves=loop.accumulator_moves,
        registers=metrics.registers,
        spills=metrics.spills,
        direct_loads=len(loop.direct_to_lds),
        non_temporal_loads=len(loop.non_temporal),
        waves=occupancy(metrics.registers, metrics.shared_memory, num_warps).waves,
    )


def check_figures(name: str, compiled: CompiledKernel, num_warps: int) -> None:
    """Check that no figure of a kernel is worse than recorded in `FIGURES`.

    Raises:
        AssertionError: a figure is worse, or the kernel or Triton's release is not recorded; it has
            the line to record.
    """
    release = ".".join(map(str, TRITON_RELEASE))
    found = figures_of(compiled, num_warps)
    recorded = json.loads(FIGURES.read_text("utf-8")).get(release, {}).get(name)
    line = f'Triton {release}: "{name}": {json.dumps(found)}'
    if recorded is None:
        raise AssertionError(f"{FIGURES.name} has no figures of this kernel; measured {line}")
    worse = [key for key in MAY_NOT_GROW if found[key] > recorded[key]]  # type: ignore[literal-required]
    worse += [key for key in MAY_NOT_SHRINK if found[key] < recorded[key]]  # type: ignore[literal-required]
    if worse:
        raise AssertionError(f"{worse} are worse than recorded: {recorded}; measured {line}")
