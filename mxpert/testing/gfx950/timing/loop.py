"""The steady state of a kernel's hot loop: cycles an iteration, and the unit that limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .chip import MI355X, Chip
from .classes import Unit
from .costs import Cost, decode
from .trace import Execution, Loop, find_loop, repeat
from .unit import ComputeUnit, Snapshot

WARM_UP = 8
"""Iterations that fill the pipelines before those that count."""
MEASURED = 16
SATURATED = 0.85
"""A unit that is busy for this share of the time limits the loop."""


@dataclass(frozen=True)
class LoopReport:
    """Modelled, not measured: one compute unit in the steady state of a loop.

    Args:
        kernel: name. workgroups: on the compute unit. waves: of a workgroup.
        cycles: from one iteration of a workgroup to its next.
        instructions: executed by one wave in an iteration, by unit.
        bytes_per_iteration: of 128-byte lines that a workgroup asks of L2.
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
    bytes_per_iteration: float
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
        waits = ", ".join(f"{name} {share:.0%}" for name, share in self.waits.items())
        return (
            f"{self.kernel} (modelled): {self.cycles:.0f} cycles an iteration, "
            f"{self.workgroups} workgroups of {self.waves} waves on a compute unit "
            f"({self.vector_registers} registers, {self.lds_bytes} bytes of LDS)\n"
            f"  limit: {self.limit}; MFMA efficiency {self.mfma_efficiency:.1%}\n"
            f"  a wave's iteration: {parts}; {self.other_per_mfma:.1f} others an MFMA\n"
            f"  busy: {busy}\n  waits: {waits}"
        )


def model_loop(
    execution: Execution,
    *,
    workgroups: int | None = None,
    chip: Chip = MI355X,
    streamed_bytes: float = 0.0,
) -> LoopReport:
    """Model the hot loop of an executed workgroup on one compute unit.

    Args:
        execution: a workgroup whose loop ran four times or more.
        workgroups: on the compute unit; by default as many as registers and LDS admit.
        chip: figures of the hardware.
        streamed_bytes: bytes that an iteration of a workgroup takes from HBM, the rest being in
            L2. With 0 everything is in L2.

    Raises:
        ValueError: the trace has no loop with MFMA that runs twice.
    """
    loop = find_loop(execution)
    execution, loop = repeat(execution, loop, WARM_UP + MEASURED + 2)
    waves = len(execution.waves)
    if workgroups is None:
        workgroups = chip.workgroups(waves, execution.vector_registers, execution.lds_bytes)
    costs = decode(execution.program, chip)
    rate = chip.memory_bytes_per_cycle
    replay = _replay(execution, loop, costs, chip, workgroups, rate)
    if streamed_bytes:
        share = streamed_bytes / max(replay.bytes, streamed_bytes)
        rate = min(rate, chip.stream_bytes_per_cycle / share)
        replay = _replay(execution, loop, costs, chip, workgroups, rate)
    jumps = loop.steps[0]
    body = execution.waves[0].steps[jumps[-2] + 1 : jumps[-1] + 1]
    utilisation = _utilisation(replay, chip)
    waits = _waits(replay, workgroups * waves)
    busiest = max(utilisation, key=lambda name: utilisation[name])
    longest = max(waits, key=lambda name: waits[name])
    return LoopReport(
        kernel=execution.program.name,
        workgroups=workgroups,
        waves=waves,
        cycles=replay.cycles,
        instructions=dict(Counter(costs[index].unit.value for index in body)),
        bytes_per_iteration=replay.bytes,
        utilisation=utilisation,
        waits=waits,
        limit=busiest if utilisation[busiest] >= SATURATED else longest,
        vector_registers=execution.vector_registers,
        lds_bytes=execution.lds_bytes,
    )


@dataclass(frozen=True)
class Replay:
    """The part of a replay in which all workgroups are in the steady state.

    Args:
        cycles: of one iteration of a workgroup. bytes: that it asks of L2.
    """

    before: Snapshot
    after: Snapshot
    cycles: float
    bytes: float


def _replay(
    execution: Execution,
    loop: Loop,
    costs: Sequence[Cost],
    chip: Chip,
    workgroups: int,
    rate: float,
) -> Replay:
    unit = ComputeUnit(chip, costs, execution.waves, workgroups, rate)
    jumps = loop.steps[0]
    first, last = jumps[WARM_UP], jumps[WARM_UP + MEASURED]
    before, after, _ = unit.run((first, last))
    leaders = unit.waves[:: len(execution.waves)]
    begin = max(wave.issued[first] for wave in leaders)
    end = min(wave.issued[last] for wave in leaders)
    done = sum(begin < wave.issued[jump] <= end for wave in leaders for jump in jumps)
    cycles = (end - begin) * workgroups / done
    return Replay(
        before,
        after,
        cycles,
        (after.loaded - before.loaded) / (after.time - before.time) * cycles / workgroups,
    )


def _utilisation(replay: Replay, chip: Chip) -> dict[str, float]:
    """Unit → share of the cycles that it was busy."""
    before, after = replay.before, replay.after
    cycles = after.time - before.time
    copies = {"mfma": chip.simds, "valu": chip.simds, "lds bus": chip.simds // 2}
    return {
        name: (after.busy[name] - before.busy[name]) / cycles / copies.get(name, 1)
        for name in after.busy
    }


def _waits(replay: Replay, waves: int) -> dict[str, float]:
    """What waves waited for → share of their time; the rest is issue."""
    before, after = replay.before, replay.after
    total = (after.time - before.time) * waves
    shares = {
        name: (cycles - before.waits.get(name, 0.0)) / total for name, cycles in after.waits.items()
    }
    shares["issue"] = max(0.0, 1 - sum(shares.values()))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
