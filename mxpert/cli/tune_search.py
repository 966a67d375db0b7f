"""The search of `mxpert tune` for one cell: correctness gate, screening, final, choice of winner.

This module is independent of devices. A `Trial` runs and times the configs; tests replace it.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from ..problem import GemmConfig, MoEConfig
from ..testing.timing import Timing

BATCH_SIZE = 8
SCREEN_REPEATS = 3
FINAL_REPEATS = 30
FINALISTS = 6
PRUNE_RATIO = 1.5
"""A candidate is dropped if its screening time exceeds the fastest one's by this factor."""
SHORT_LIST = 32
"""Shorter lists of configs keep their kernel's order; longer ones are sorted by distance."""


class DeviceLostError(ValueError):
    """A config's fault destroyed the device context; this process cannot use the device again."""


class State(enum.Enum):
    """How far a candidate got in the search.

    WRONG: its error to the float64 reference is too large. FAILED: it raised an exception.
    SLOW: dropped after screening. SCREENED: timed with few replays. TIMED: timed in the final.
    """

    WRONG = "wrong"
    FAILED = "failed"
    SLOW = "slow"
    SCREENED = "screened"
    TIMED = "timed"


@dataclass
class Candidate:
    """A config, with its state, error and timing so far."""

    config: MoEConfig
    state: State = State.SCREENED
    rel_l2: float | None = None
    timing: Timing | None = None
    reason: str = ""

    @property
    def us(self) -> float:
        """Median microseconds of its last timing; infinite before the first."""
        return math.inf if self.timing is None else self.timing.us

    @property
    def sound(self) -> bool:
        """Whether the config runs and its result passed the gate."""
        return self.state not in (State.WRONG, State.FAILED)


class Trial(Protocol):
    """What a search needs from a device: the error and the time of configs of one cell."""

    def error(self, config: MoEConfig) -> float:
        """The config's relative L2 error to the float64 reference. Passes on kernel exceptions."""

    def times(
        self, configs: Sequence[MoEConfig], repeats: int, failures: dict[MoEConfig, Exception]
    ) -> dict[MoEConfig, Timing]:
        """Time the configs in turns; exceptions of configs that fail go to `failures`."""


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Args:
        tried: the candidates in the order in which they were tried.
        valid: number of configs that the kernel offers.
        winner: the fastest candidate, None if none is sound.
        heuristic_us: time of the heuristic's choice, None if it is not sound.
        spread: wider 10–90 % band of the two compared candidates, relative to the median.
        source: "heuristic" or "search". note: the comparison in words.
        cut_short: time ran out before the first batch was finished.
    """

    tried: tuple[Candidate, ...]
    valid: int
    winner: Candidate | None
    heuristic_us: float | None
    spread: float
    source: str
    note: str
    cut_short: bool = False


def distance(config: MoEConfig, other: MoEConfig) -> int:
    """Number of settings that differ. The row block, shared by both stages, counts once."""
    settings = [field.name for field in fields(GemmConfig) if field.name != "block_m"]
    stages = ((config.gate_up, other.gate_up), (config.down, other.down))
    return (config.routing_block_m != other.routing_block_m) + sum(
        getattr(a, name) != getattr(b, name) for a, b in stages for name in settings
    )


def in_order(heuristic: MoEConfig, configs: Iterable[MoEConfig]) -> list[MoEConfig]:
    """The heuristic's choice first, then every other config once.

    A list of SHORT_LIST or more is sorted by distance from the heuristic's choice, so that a short
    time budget tries the most similar configs.
    """
    others = [config for config in dict.fromkeys(configs) if config != heuristic]
    if len(others) >= SHORT_LIST:
        others.sort(key=lambda config: distance(config, heuristic))
    return [heuristic, *others]


def search(
    configs: Sequence[MoEConfig],
    trial: Trial,
    *,
    limit: float,
    deadline: float,
    end: float = math.inf,
    batch_size: int = BATCH_SIZE,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the fastest sound config.

    Configs are tried in batches. Each config of a batch runs once and must pass the gate. The batch
    is then screened: timed with few replays together with the fastest config so far, so that only
    times of the same run are compared. The fastest of all batches and the heuristic's choice are
    timed with many replays in a final.

    The heuristic's choice is always tried. The first batch may exceed `deadline` but not `end`.

    Args:
        configs: the heuristic's choice first.
        trial: runs and times them.
        limit: largest relative L2 error of a sound config.
        deadline: when to stop this cell. end: when to stop the run. Seconds on `clock`.
        batch_size: configs timed together; each keeps its buffers during that time.
    """
    tried: list[Candidate] = []
    best: Candidate | None = None
    for start in range(0, len(configs), batch_size):
        batch: list[Candidate] = []
        for config in configs[start : start + batch_size]:
            if (start or batch) and clock() >= (deadline if start else end):
                break
            batch.append(_gated(config, trial, limit))
        tried += batch
        best = _screen(batch, best, trial)
        if clock() >= deadline:
            break
    outcome = _decide(tried, len(configs), trial)
    return replace(outcome, cut_short=len(tried) < min(len(configs), batch_size))


def _gated(config: MoEConfig, trial: Trial, limit: float) -> Candidate:
    """Run a config once and compare its error with the gate; NaN never passes."""
    try:
        error = trial.error(config)
    except DeviceLostError:
        raise
    except Exception as failure:  # compilers raise types of their own
        return Candidate(config, State.FAILED, reason=_one_line(failure))
    if not error <= limit:
        return Candidate(
            config,
            State.WRONG,
            error,
            reason=f"relative L2 to float64 is {error:.3e}, at most {limit:.1e}",
        )
    return Candidate(config, State.SCREENED, error)


def _one_line(failure: Exception) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _time(candidates: Sequence[Candidate], repeats: int, trial: Trial, state: State) -> None:
    """Time candidates together and set their state; those that raise become FAILED."""
    failures: dict[MoEConfig, Exception] = {}
    timings = trial.times([each.config for each in candidates], repeats, failures)
    for each in candidates:
        if each.config in failures:
            each.state, each.reason = State.FAILED, _one_line(failures[each.config])
        else:
            each.timing, each.state = timings[each.config], state


def _screen(batch: Sequence[Candidate], best: Candidate | None, trial: Trial) -> Candidate | None:
    """Time a batch together with the fastest so far, drop slow candidates, return the fastest."""
    entrants = [each for each in batch if each.sound] + ([best] if best else [])
    if not entrants:
        return None
    _time(entrants, SCREEN_REPEATS, trial, State.SCREENED)
    sound = [each for each in entrants if each.sound]
    if not sound:
        return None
    fastest = min(sound, key=lambda each: each.us)
    for each in sound:
        if each.us > PRUNE_RATIO * fastest.us:
            each.state = State.SLOW
            each.reason = f"{each.us / fastest.us:.2f} × the fastest after {SCREEN_REPEATS} replays"
    return fastest


def _decide(tried: Sequence[Candidate], valid: int, trial: Trial) -> Outcome:
    """Run the final. A rival wins if it beats the heuristic's choice by more than the spread."""
    heuristic = tried[0]
    rivals = sorted(
        (each for each in tried[1:] if each.state is State.SCREENED), key=lambda each: each.us
    )[: FINALISTS - 1]
    finalists = ([heuristic] if heuristic.sound else []) + rivals
    if finalists:
        _time(finalists, FINAL_REPEATS, trial, State.TIMED)
    rivals = sorted((each for each in rivals if each.sound), key=lambda each: each.us)
    if not heuristic.sound:
        winner = rivals[0] if rivals else None
        return Outcome(
            tuple(tried),
            valid,
            winner,
            None,
            _spread(winner),
            "search",
            f"the heuristic's choice {heuristic.state.value}: {heuristic.reason}",
        )
    if not rivals:
        return Outcome(
            tuple(tried),
            valid,
            heuristic,
            heuristic.us,
            _spread(heuristic),
            "heuristic",
            "no other sound config",
        )
    rival = rivals[0]
    spread = max(_spread(heuristic), _spread(rival))
    gain = 1 - rival.us / heuristic.us
    if gain > spread:
        return Outcome(
            tuple(tried),
            valid,
            rival,
            heuristic.us,
            spread,
            "search",
            f"{gain:.1%} faster than the heuristic's choice, spread {spread:.1%}",
        )
    found = f"the best other is {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    return Outcome(
        tuple(tried),
        valid,
        heuristic,
        heuristic.us,
        spread,
        "heuristic",
        f"{found}, spread {spread:.1%}",
    )


def _spread(candidate: Candidate | None) -> float:
    return 0.0 if candidate is None or candidate.timing is None else candidate.timing.spread
