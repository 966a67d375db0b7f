"""Whole workgroups on one compute unit, from their first instruction to their last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..trace import WaveTrace
from .chip import MI355X, Chip
from .classes import Unit
from .costs import Cost, decode
from .execution import Execution
from .loads import LoadPath, requests
from .loop import LIKELY_LOAD, TOLERANCE
from .unit import ComputeUnit, Wave

APART = 1 << 28
"""Half lines between what a workgroup loads and what its successor loads."""
STEPS = 12
"""Most replays until HBM's latency agrees with its load."""


@dataclass(frozen=True)
class TileReport:
    """Modelled, not measured: one compute unit while it computes some workgroups.

    Args:
        kernel: name. workgroups: that run side by side. turns: that follow each other in the place
            of each.
        cycles: from the first instruction of all to the last.
        start: cycles until the first MFMA of all. end: cycles after the last one.
        busy: share of the cycles that the matrix cores are busy.
        streamed_bytes: that all of them take from HBM.
    """

    kernel: str
    workgroups: int
    turns: int
    cycles: float
    start: float
    end: float
    busy: float
    streamed_bytes: int


def model_tiles(
    execution: Execution,
    *,
    workgroups: int | None = None,
    turns: int = 1,
    chip: Chip = MI355X,
    active_units: float | None = None,
) -> TileReport:
    """Model an executed workgroup from start to end, `turns` times in each of the places.

    The latency of HBM depends on its load, so all is replayed until both agree. Compute units drift
    apart: while one is in an epilogue, others take its share of HBM, and give it back.

    Args:
        execution: a workgroup. It needs no loop.
        workgroups: that run side by side; by default as many as registers and LDS admit.
        turns: workgroups that follow each other in one place, and load other lines.
        chip: figures of the hardware.
        active_units: compute units that share HBM, those that take a part of its rate in part; by
            default all.
    """
    waves, units = len(execution.waves), active_units or chip.compute_units
    if workgroups is None:
        workgroups = chip.workgroups(waves, execution.vector_registers, execution.lds_bytes)
    chained = replace(execution, waves=[_chain(wave, turns) for wave in execution.waves])
    costs = decode(execution.program, chip)
    asked = requests(chained, costs, chip)
    rate = chip.stream_bytes_per_cycle * chip.compute_units / units
    low, high, guess = 0.0, 1.0, LIKELY_LOAD if execution.streamed else 0.0
    for _ in range(STEPS):
        path = LoadPath(chip, chip.loaded_latency(guess), rate, lends=True)
        unit = ComputeUnit(chip, costs, chained.waves, workgroups, asked, path)
        now = unit.run(-1, -1)[1]  # both at the end of all
        used = path.streamed / now.time / rate
        if not execution.streamed or abs(used - guess) < TOLERANCE:
            break
        low, high = (guess, high) if used > guess else (low, guess)
        guess = used if low < used < high else (low + high) / 2
    first, last = _matrix_times(unit.waves, costs)
    return TileReport(
        execution.program.name,
        workgroups,
        turns,
        now.time,
        first,
        now.time - last,
        now.busy["mfma"] / now.time,
        path.streamed,
    )


def _chain(wave: WaveTrace, turns: int) -> WaveTrace:
    """A wave, and its successors behind it, whose lines nobody has loaded."""
    length = len(wave.instructions)
    chained = WaveTrace(wave.workgroup, wave.wave, list(wave.instructions) * turns)
    for turn in range(turns):
        for step, cycles in wave.bank_cycles.items():
            chained.bank_cycles[turn * length + step] = cycles
        for step, halves in wave.half_lines.items():
            chained.half_lines[turn * length + step] = halves + turn * APART
    return chained


def _matrix_times(waves: Sequence[Wave], costs: Sequence[Cost]) -> tuple[float, float]:
    """When the first MFMA starts, and when the last one is done; 0 without any."""
    found = [
        (start, start + cost.cycles)
        for wave in waves
        for start, index in zip(wave.issued, wave.trace.instructions, strict=True)
        for cost in [costs[index]]
        if cost.unit is Unit.MFMA
    ]
    starts, ends = zip(*found, strict=True) if found else ((0.0,), (0.0,))
    return min(starts), max(ends)
