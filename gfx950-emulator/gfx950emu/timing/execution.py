"""What the model replays: one executed workgroup, and the hot loop in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import require
from ..launcher import Report
from ..memory import Offsets
from ..program import Program
from ..trace import WaveTrace
from .classes import Unit, classify

HALF_LINE = 64
"""Bytes of half a cache line."""
SPACE = 1 << 32
"""Half lines between the allocations of an execution."""
TURNS = 3
"""Jumps back that a trace must have: two whole iterations, which show the strides of loads."""
FRESH = 1 << 20
"""Half lines between two lines of a row, if the loop is repeated."""


class LoopError(ValueError):
    """A trace has no hot loop that could be modelled."""


@dataclass(frozen=True)
class Execution:
    """One executed workgroup of a kernel.

    Args:
        program: of the kernel. waves: in the order of the workgroup.
        vector_registers: allocated to a lane. lds_bytes: allocated to the workgroup.
        streamed: ranges of 64-byte half lines that come from HBM; the rest is in L2.
    """

    program: Program
    waves: Sequence[WaveTrace]
    vector_registers: int
    lds_bytes: int
    streamed: Sequence[range] = ()

    @classmethod
    def of(cls, report: Report, streamed: Sequence[str] = (), workgroup: int = 0) -> Execution:
        """One workgroup of a traced launch.

        Args:
            report: of `run` or `emulate` with ``trace=True``.
            streamed: parameters of the kernel whose tensors come from HBM.
            workgroup: number in the launch.

        Raises:
            ValueError: the launch was not traced, or has no such parameter.
        """
        waves = [trace for trace in report.traces if trace.workgroup == workgroup]
        require(
            bool(waves),
            "Execution.of",
            "report",
            need=f"a trace of workgroup {workgroup}",
            got=f"{len(report.traces)} traced waves",
            remedy="execute with trace=True",
        )
        unknown = [name for name in streamed if name not in report.regions]
        require(
            not unknown,
            "Execution.of",
            "streamed",
            need=f"names out of {list(report.regions)}",
            got=unknown,
        )
        places = {name: place for place, name in enumerate(report.regions)}
        return cls(
            report.program,
            [_apart(wave, list(report.regions.values())) for wave in waves],
            report.registers,
            report.lds,
            [range(SPACE * places[name], SPACE * (places[name] + 1)) for name in streamed],
        )

    def is_streamed(self, half_line: int) -> bool:
        """Whether a half line comes from HBM."""
        return any(half_line in each for each in self.streamed)


def _apart(wave: WaveTrace, regions: Sequence[range]) -> WaveTrace:
    """A wave as if each allocation started with a line, and `SPACE` behind the one before.

    On a CPU some start with the second half of a line; a loop that is repeated may need more memory
    than was allocated.
    """
    starts = np.array([region.start // HALF_LINE for region in regions])
    half_lines = {}
    for step, halves in wave.half_lines.items():
        places = np.searchsorted(starts, halves, "right") - 1
        half_lines[step] = halves - starts[places] + SPACE * places
    return replace(wave, half_lines=half_lines)


@dataclass(frozen=True)
class Loop:
    """The hot loop of an execution.

    Args:
        branch: index of the instruction that jumps back.
        steps: per wave the steps of that jump: one iteration lies between two of them.
    """

    branch: int
    steps: Sequence[Sequence[int]]

    @property
    def iterations(self) -> int:
        return len(self.steps[0]) - 1


def find_loop(execution: Execution) -> Loop:
    """The outermost loop with matrix instructions and without stores.

    A loop that stores is over tiles, not over k.

    Raises:
        LoopError: it has not turned as often as the model needs.
    """
    program, first = execution.program, execution.waves[0].instructions
    units = [classify(each.name).unit for each in program.instructions]
    executed = {place for place in first if units[place] is Unit.MFMA}
    found = [
        (head, branch)
        for head, branch in _natural_loops(program)
        if Unit.STORE not in units[head : branch + 1]
        and any(head <= place <= branch for place in executed)
    ]
    if found:
        head, branch = max(found, key=lambda loop: loop[1] - loop[0])
        runs = [_longest_run(wave.instructions, head, branch) for wave in execution.waves]
        count = min(len(run) for run in runs)
        if count >= TURNS:
            return Loop(branch, [run[:count] for run in runs])
    need = f"need a loop with MFMA that jumps back {TURNS} times; execute more of k"
    raise LoopError(f"model_loop: trace of {program.name} — {need}")


def _natural_loops(program: Program) -> Iterator[tuple[int, int]]:
    """First instruction and jump back of each loop in the listing."""
    for place, each in enumerate(program.instructions):
        if each.target is not None and program.labels.get(each.target, place + 1) <= place:
            yield program.labels[each.target], place


def _longest_run(path: Sequence[int], head: int, branch: int) -> list[int]:
    """Steps of a jump back, in the longest stretch that does not leave the loop."""
    runs: list[list[int]] = [[]]
    for step, (here, following) in enumerate(itertools.pairwise(path)):
        if here == branch and following == head:
            runs[-1].append(step)
        elif not head <= following <= branch and runs[-1]:
            runs.append([])
    return max(runs, key=len)


def repeat(execution: Execution, loop: Loop, iterations: int) -> tuple[Execution, Loop]:
    """The execution with `iterations` iterations of the loop or more: copies of the last one.

    Memory continues with the stride between the last two iterations.
    """
    more = max(0, iterations - loop.iterations)
    waves = [
        _repeat_wave(wave, jumps, more)
        for wave, jumps in zip(execution.waves, loop.steps, strict=True)
    ]
    steps = [
        [*jumps, *(jumps[-1] + (jumps[-1] - jumps[-2]) * k for k in range(1, more + 1))]
        for jumps in loop.steps
    ]
    return replace(execution, waves=waves), Loop(loop.branch, steps)


def _repeat_wave(wave: WaveTrace, jumps: Sequence[int], more: int) -> WaveTrace:
    """A wave with `more` copies of the iteration ahead of the last jump behind that jump."""
    end, length = jumps[-1] + 1, jumps[-1] - jumps[-2]
    path, tail = wave.instructions, more * length
    result = WaveTrace(wave.workgroup, wave.wave)
    result.instructions = [*path[:end], *path[end - length : end] * more, *path[end:]]
    for step, cycles in wave.bank_cycles.items():
        result.bank_cycles[step if step < end else step + tail] = cycles
    for step, halves in wave.half_lines.items():
        result.half_lines[step if step < end else step + tail] = halves
    for step in range(end - length, end):
        for copy in range(1, more + 1):
            if step in wave.bank_cycles:
                result.bank_cycles[step + copy * length] = wave.bank_cycles[step]
            if step in wave.half_lines:
                halves = wave.half_lines[step]
                before = wave.half_lines.get(step - length, halves)
                stride = int(halves[0] - before[0]) if len(halves) and len(before) else 0
                result.half_lines[step + copy * length] = _later(halves, copy * stride)
    return result


def _later(halves: Offsets, distance: int) -> Offsets:
    """Half lines a distance behind, in lines that no other row of the tensor has.

    In a tensor as small as the executed one they would be those of the next row.
    """
    place = halves % 2 + distance
    return halves - halves % 2 + place % 2 + place // 2 * FRESH
