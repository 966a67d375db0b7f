"""How `mxpert tune` searches one cell: gate, screen, final, and the rule that picks the winner.

Nothing here knows about devices: a `Trial` runs and times configs, so that tests can play one.
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
"""A candidate this much slower than the fastest after SCREEN_REPEATS replays is dropped."""
SHORT_LIST = 32
"""Up to so many configs are tried in the order in which their kernel lists them."""


class DeviceLostError(ValueError):
    """A candidate's fault has ended the device context: nothing more can run in this process."""


class State(enum.Enum):
    """What became of a candidate.

    WRONG: too far from the float64 reference. FAILED: raised. SLOW: dropped after few replays.
    SCREENED: timed with few replays. TIMED: timed in the final.
    """

    WRONG = "wrong"
    FAILED = "failed"
    SLOW = "slow"
    SCREENED = "screened"
    TIMED = "timed"


@dataclass
class Candidate:
    """One config on its way through the search."""

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
        """Right, and able to run."""
        return self.state not in (State.WRONG, State.FAILED)


class Trial(Protocol):
    """Runs configs of one cell."""

    def error(self, config: MoEConfig) -> float:
        """Relative L2 to the float64 reference; raises what the kernel raises."""

    def times(self, configs: Sequence[MoEConfig], repeats: int,
              failures: dict[MoEConfig, Exception]) -> dict[MoEConfig, Timing]:
        """Timings, the configs taking turns; a config that cannot run goes to `failures`."""


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Args:
        tried: candidates in the order of their trial. valid: how many configs there were.
        winner: None where no candidate was sound. heuristic_us: None if the heuristic's was not.
        spread: relative, the wider band of the two that were compared.
        source: "heuristic" or "search". note: the comparison in words.
        cut_short: time ran out before the first batch was through.
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
    """Settings that differ; the row block, which plan and stages share, counts once."""
    settings = [field.name for field in fields(GemmConfig) if field.name != "block_m"]
    stages = ((config.gate_up, other.gate_up), (config.down, other.down))
    return (config.routing_block_m != other.routing_block_m) + sum(
        getattr(a, name) != getattr(b, name) for a, b in stages for name in settings)


def in_order(heuristic: MoEConfig, configs: Iterable[MoEConfig]) -> list[MoEConfig]:
    """The heuristic's choice, then each other config once: a short list as the kernel gives it, of
    a grid the least different first, so that a budget leaves out what lies far away."""
    others = [config for config in dict.fromkeys(configs) if config != heuristic]
    if len(others) >= SHORT_LIST:
        others.sort(key=lambda config: distance(config, heuristic))
    return [heuristic, *others]


def search(configs: Sequence[MoEConfig], trial: Trial, *, limit: float, deadline: float,
           end: float = math.inf, batch_size: int = BATCH_SIZE,
           clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Find the fastest sound config.

    Batches pass the gate, then a few replays in which the fastest so far takes part, so that each
    comparison is within one run; the best of all batches and the heuristic's choice meet in a final
    of many replays. The first batch may exceed the deadline but not the end; the heuristic's choice
    is always tried.

    Args:
        configs: the heuristic's choice first. trial: runs them.
        limit: largest relative L2 of a sound config.
        deadline: of this cell, and end: of all, on `clock`, in seconds.
        batch_size: configs timed together; each holds its buffers meanwhile.
    """
    tried: list[Candidate] = []
    best: Candidate | None = None
    for start in range(0, len(configs), batch_size):
        batch: list[Candidate] = []
        for config in configs[start:start + batch_size]:
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
    """Run a config once and hold its result to the gate; NaN never passes."""
    try:
        error = trial.error(config)
    except DeviceLostError:
        raise
    except Exception as failure:  # compilers raise types of their own
        return Candidate(config, State.FAILED, reason=_one_line(failure))
    if not error <= limit:
        return Candidate(config, State.WRONG, error,
                         reason=f"relative L2 to float64 is {error:.3e}, at most {limit:.1e}")
    return Candidate(config, State.SCREENED, error)


def _one_line(failure: Exception) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _time(candidates: Sequence[Candidate], repeats: int, trial: Trial, state: State) -> None:
    """Time candidates together; those that fail now are failed."""
    failures: dict[MoEConfig, Exception] = {}
    timings = trial.times([each.config for each in candidates], repeats, failures)
    for each in candidates:
        if each.config in failures:
            each.state, each.reason = State.FAILED, _one_line(failures[each.config])
        else:
            each.timing, each.state = timings[each.config], state


def _screen(batch: Sequence[Candidate], best: Candidate | None, trial: Trial) -> Candidate | None:
    """Time a batch beside the fastest so far; drop what is far behind; the fastest of all."""
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
    """The final: a rival must beat the heuristic's choice by more than the spread."""
    heuristic = tried[0]
    rivals = sorted((each for each in tried[1:] if each.state is State.SCREENED),
                    key=lambda each: each.us)[:FINALISTS - 1]
    finalists = ([heuristic] if heuristic.sound else []) + rivals
    if finalists:
        _time(finalists, FINAL_REPEATS, trial, State.TIMED)
    rivals = sorted((each for each in rivals if each.sound), key=lambda each: each.us)
    if not heuristic.sound:
        winner = rivals[0] if rivals else None
        return Outcome(tuple(tried), valid, winner, None, _spread(winner), "search",
                       f"the heuristic's choice {heuristic.state.value}: {heuristic.reason}")
    if not rivals:
        return Outcome(tuple(tried), valid, heuristic, heuristic.us, _spread(heuristic),
                       "heuristic", "no other sound config")
    rival = rivals[0]
    spread = max(_spread(heuristic), _spread(rival))
    gain = 1 - rival.us / heuristic.us
    if gain > spread:
        return Outcome(tuple(tried), valid, rival, heuristic.us, spread, "search",
                       f"{gain:.1%} faster than the heuristic's choice, spread {spread:.1%}")
    found = f"the best other is {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    return Outcome(tuple(tried), valid, heuristic, heuristic.us, spread, "heuristic",
                   f"{found}, spread {spread:.1%}")


def _spread(candidate: Candidate | None) -> float:
    return 0.0 if candidate is None or candidate.timing is None else candidate.timing.spread
