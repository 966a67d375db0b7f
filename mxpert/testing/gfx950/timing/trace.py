"""What the model replays: the instructions that each wave of a workgroup executed, in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..program import Program


@dataclass(frozen=True)
class WaveTrace:
    """One executed wave.

    A step is the place of an executed instruction in `steps`.

    Args:
        steps: index of each executed instruction in the program.
        bank_cycles: step → cycles that the banks of LDS need for it. Steps without an entry have
            no bank conflict.
        lines: step → 128-byte lines of memory that a load asks for. Steps without an entry ask for
            as many new lines as their bytes need.
    """

    steps: Sequence[int]
    bank_cycles: Mapping[int, int] = field(default_factory=dict)
    lines: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """One executed workgroup of a kernel.

    Args:
        program: of the kernel. waves: in the order of the workgroup.
        vector_registers: allocated to a lane. lds_bytes: allocated to the workgroup.
    """

    program: Program
    waves: Sequence[WaveTrace]
    vector_registers: int
    lds_bytes: int


@dataclass(frozen=True)
class Loop:
    """The hot loop of an execution.

    Args:
        branch: index of the instruction that jumps back.
        steps: per wave the steps of that jump in one run of the loop: `len(steps[0]) - 1` whole
            iterations lie between them.
    """

    branch: int
    steps: Sequence[Sequence[int]]

    @property
    def iterations(self) -> int:
        return len(self.steps[0]) - 1


def find_loop(execution: Execution) -> Loop:
    """The innermost loop with matrix instructions that takes most steps of the first wave.

    Raises:
        ValueError: no such loop runs twice in a row.
    """
    first = execution.waves[0].steps
    matrix = [i.name.startswith(("v_mfma", "v_smfma")) for i in execution.program.instructions]
    best: Loop | None = None
    for branch in {a for a, b in itertools.pairwise(first) if b <= a}:
        runs = [_longest_run(wave.steps, branch) for wave in execution.waves]
        count = min(len(run) for run in runs)
        loop = Loop(branch, [run[:count] for run in runs])
        if count < 2 or not any(matrix[i] for i in first[runs[0][0] + 1 : runs[0][1]]):
            continue
        if best is None or _length(loop) > _length(best):
            best = loop
    if best is None:
        name = execution.program.name
        raise ValueError(
            f"{name}: trace — need a loop with MFMA that runs twice; execute more of k"
        )
    return best


def _length(loop: Loop) -> int:
    return loop.steps[0][-1] - loop.steps[0][0]


def _longest_run(steps: Sequence[int], branch: int) -> list[int]:
    """Steps of the jump back, in the longest stretch without another jump back or forth out."""
    runs: list[list[int]] = [[]]
    for step, (here, following) in enumerate(itertools.pairwise(steps)):
        if here == branch and following <= here:
            if runs[-1] and min(steps[runs[-1][-1] + 1 : step + 1]) < following:
                runs.append([])
            runs[-1].append(step)
        elif following <= here and runs[-1]:
            runs.append([])
    return max(runs, key=len)


def repeat(execution: Execution, loop: Loop, iterations: int) -> tuple[Execution, Loop]:
    """The execution with `iterations` iterations of the loop: the last one again and again.

    Lines of memory continue with the stride between the last two iterations.
    """
    waves, steps = [], []
    for wave, jumps in zip(execution.waves, loop.steps, strict=True):
        new = _repeat_wave(wave, jumps, iterations - loop.iterations)
        waves.append(new)
        length = jumps[-1] - jumps[-2]
        more = range(
            jumps[-1] + length, jumps[-1] + length * (iterations - loop.iterations + 1), length
        )
        steps.append([*jumps, *more])
    longer = Execution(execution.program, waves, execution.vector_registers, execution.lds_bytes)
    return longer, Loop(loop.branch, steps)


def _repeat_wave(wave: WaveTrace, jumps: Sequence[int], more: int) -> WaveTrace:
    """A wave with `more` copies of the iteration before the last jump behind that jump."""
    end, length = jumps[-1] + 1, jumps[-1] - jumps[-2]
    body = list(wave.steps[end - length : end])
    steps = [*wave.steps[:end], *body * more, *wave.steps[end:]]
    banks, lines = {}, {}
    for step, cycles in wave.bank_cycles.items():
        banks[step if step < end else step + more * length] = cycles
    for step, asked in wave.lines.items():
        lines[step if step < end else step + more * length] = asked
    for step in range(end - length, end):
        for copy in range(1, more + 1):
            if step in wave.bank_cycles:
                banks[step + copy * length] = wave.bank_cycles[step]
            if step in wave.lines:
                asked = wave.lines[step]
                stride = asked[0] - wave.lines.get(step - length, asked)[0] if asked else 0
                lines[step + copy * length] = [line + copy * stride for line in asked]
    return WaveTrace(steps, banks, lines)
