"""The steady state of a kernel's hot loop: cycles an iteration, and the unit that limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .chip import MI355X, Chip
from .classes import Unit
from .costs import Cost, decode
from .execution import Execution, Loop, LoopError, find_loop, repeat
from .loads import LoadPath, requests
from .unit import ComputeUnit, Snapshot

WARM_UP = (2, 8, 1200)
"""Iterations that fill the pipelines before those that count: least, most, and instructions of a
wave that are enough."""
MEASURED = (6, 16, 3000)
"""The same of those that count."""
SATURATED = 0.85
"""A unit that is busy for this share of the time limits the loop."""
TOLERANCE = 0.01
"""Of HBM's load, to which its latency is consistent."""
LIKELY_LOAD = 0.8
"""Share of HBM's best rate with which the search for the load begins."""


@dataclass(frozen=True)
class LoopReport:
    """Modelled, not measured: one compute unit in the steady state of a loop.

    Args:
        kernel: name. workgroups: on the compute unit. waves: of a workgroup.
        cycles: from one iteration of a workgroup to its next.
        instructions: executed by one wave in an iteration, by unit. mnemonics: the same by name.
        loaded_bytes, streamed_bytes: that a workgroup's iteration takes from L2 and HBM.
        utilisation: unit → share of the cycles that it is busy.
        waits: what waves waited for → share of the waves' time.
        limit: the unit that limits the loop, or what most waves wait for.
        vector_registers, lds_bytes: that bound the workgroups of a compute unit.
    """

    kernel: str
    workgroups: int
    waves: int
    cycles: float
    instructions: Mapping[str, int]
    mnemonics: Mapping[str, int]
    loaded_bytes: float
    streamed_bytes: float
    utilisation: Mapping[str, float]
    waits: Mapping[str, float]
    limit: str
    vector_registers: int
    lds_bytes: int

    @property
    def mfma_efficiency(self) -> float:
        """Share of the cycles that the matrix cores are busy."""
        return self.utilisation["mfma"]

    @property
    def other_per_mfma(self) -> float:
        """Instructions beside the MFMAs, for each of them."""
        mfma = self.instructions[Unit.MFMA.value]
        return (sum(self.instructions.values()) - mfma) / mfma

    def terabytes_per_second(self, useful_bytes: float, chip: Chip = MI355X) -> float:
        """Rate of the whole chip, if a workgroup's iteration loads so many useful bytes."""
        return chip.terabytes_per_second(useful_bytes * self.workgroups / self.cycles)

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {name}" for name, count in self.instructions.items())
        busy = ", ".join(f"{name} {share:.0%}" for name, share in self.utilisation.items())
        waits = ", ".join(
            f"{name} {share:.0%}" for name, share in self.waits.items() if share >= 0.005
        )
        return (
            f"{self.kernel} (modelled): {self.cycles:.0f} cycles an iteration, "
            f"{self.workgroups} workgroups of {self.waves} waves on a compute unit "
            f"({self.vector_registers} registers, {self.lds_bytes} bytes of LDS)\n"
            f"  limit: {self.limit}; MFMA efficiency {self.mfma_efficiency:.1%}; "
            f"{self.loaded_bytes:.0f} bytes an iteration, {self.streamed_bytes:.0f} from HBM\n"
            f"  a wave's iteration: {parts}; {self.other_per_mfma:.1f} others an MFMA\n"
            f"  busy: {busy}\n  waits: {waits}"
        )


@dataclass(frozen=True)
class _Replay:
    """The part of a replay in which all workgroups are in the steady state.

    Args:
        cycles: of one iteration of a workgroup. share: of HBM's best rate that is used.
    """

    before: Snapshot
    after: Snapshot
    cycles: float

    @property
    def time(self) -> float:
        return self.after.time - self.before.time

    def load(self, chip: Chip, active_units: int) -> float:
        """Share of HBM's best rate that `active_units` compute units ask for."""
        rate = (self.after.streamed - self.before.streamed) / self.time * active_units
        return rate * chip.clock_hz / chip.stream_bytes_per_second


def model_loop(
    execution: Execution,
    *,
    workgroups: int | None = None,
    chip: Chip = MI355X,
    active_units: int | None = None,
    likely_load: float = LIKELY_LOAD,
) -> LoopReport:
    """Model the hot loop of an executed workgroup on one compute unit.

    The latency of HBM depends on its load, so the loop is replayed until both agree.

    Args:
        execution: a workgroup whose hot loop jumped back three times or more.
        workgroups: on the compute unit; by default as many as registers and LDS admit.
        chip: figures of the hardware.
        active_units: compute units that share HBM; by default all.
        likely_load: share of HBM's best rate with which the search for the load begins.

    Raises:
        LoopError: there is no loop with MFMA, or it was executed too few times.
    """
    loop = find_loop(execution)
    execution, loop = repeat(execution, loop, _window(loop)[1] + 2)
    waves = len(execution.waves)
    if workgroups is None:
        workgroups = chip.workgroups(waves, execution.vector_registers, execution.lds_bytes)
    costs = decode(execution.program, chip)
    units = active_units or chip.compute_units
    replay = _settle(execution, loop, costs, chip, workgroups, units, likely_load)
    jumps = loop.steps[0]
    body = execution.waves[0].instructions[jumps[-2] + 1 : jumps[-1] + 1]
    before, after, share = replay.before, replay.after, replay.cycles / replay.time / workgroups
    utilisation = {
        name: (after.busy[name] - before.busy[name]) / replay.time for name in after.busy
    }
    waits = _waits(replay, workgroups * waves)
    busiest = max(utilisation, key=lambda name: utilisation[name])
    return LoopReport(
        kernel=execution.program.name,
        workgroups=workgroups,
        waves=waves,
        cycles=replay.cycles,
        instructions=dict(Counter(costs[index].unit.value for index in body)),
        mnemonics=dict(Counter(execution.program.instructions[index].name for index in body)),
        loaded_bytes=(after.loaded - before.loaded) * share,
        streamed_bytes=(after.streamed - before.streamed) * share,
        utilisation=utilisation,
        waits=waits,
        limit=busiest if utilisation[busiest] >= SATURATED else next(iter(waits)),
        vector_registers=execution.vector_registers,
        lds_bytes=execution.lds_bytes,
    )


def _window(loop: Loop) -> tuple[int, int]:
    """First and last of the jumps between which the loop is measured."""
    length = loop.steps[0][1] - loop.steps[0][0]
    warm_up, measured = (
        min(max(enough // length, least), most) for least, most, enough in (WARM_UP, MEASURED)
    )
    return warm_up, warm_up + measured


def _settle(
    execution: Execution,
    loop: Loop,
    costs: Sequence[Cost],
    chip: Chip,
    workgroups: int,
    active_units: int,
    guess: float,
) -> _Replay:
    """Replay with the latency of HBM that belongs to its load, by interval halving and secants."""
    rate = chip.stream_bytes_per_cycle * chip.compute_units / active_units
    asked = requests(execution, costs, chip)

    def replay(load: float) -> _Replay:
        path = LoadPath(chip, chip.loaded_latency(load), rate)
        unit = ComputeUnit(chip, costs, execution.waves, workgroups, asked, path)
        return _replay(execution, loop, unit)

    if not execution.streamed:
        return replay(0.0)
    low, high = 0.0, 1.0
    while True:
        result = replay(guess)
        excess = result.load(chip, active_units) - guess
        if abs(excess) < TOLERANCE or high - low < TOLERANCE:
            return result
        if excess > 0:
            low = guess
        else:
            high = guess
        step = guess + excess / 2
        guess = step if low < step < high else (low + high) / 2


def _replay(execution: Execution, loop: Loop, unit: ComputeUnit) -> _Replay:
    """Replay, and measure while all workgroups are between two jumps of the loop."""
    jumps = loop.steps[0]
    before, after = unit.run(*(jumps[place] for place in _window(loop)))
    leaders = unit.waves[:: len(execution.waves)]
    turns = np.arange(len(jumps))
    window = (before.time, after.time)
    done = 0.0
    for wave in leaders:
        start, end = np.interp(window, [wave.issued[jump] for jump in jumps], turns)
        done += float(end - start)
    if done <= 0:
        name = execution.program.name
        raise LoopError(f"model_loop: {name} — need workgroups that run side by side")
    return _Replay(before, after, (after.time - before.time) * len(leaders) / done)


def _waits(replay: _Replay, waves: int) -> dict[str, float]:
    """What waves waited for → share of their time, the longest first; the rest is issue."""
    before, after = replay.before.waits, replay.after.waits
    total = replay.time * waves
    shares = {name: (cycles - before.get(name, 0.0)) / total for name, cycles in after.items()}
    shares["issue"] = max(0.0, 1 - sum(shares.values()))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
