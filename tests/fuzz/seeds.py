"""Cases of consecutive seeds: what they gave, and the command line of a long run."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Report:
    """What the cases gave.

    Args:
        counted: cases of the kind that a run counts. names: how often each choice was drawn.
        wrong: of each seed, what is wrong.
    """

    cases: int = 0
    counted: int = 0
    names: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, str] = field(default_factory=dict)

    def add(self, seed: int, names: list[str], *, counted: bool, wrong: str | None) -> None:
        self.cases += 1
        self.counted += counted
        self.names.update(names)
        if wrong:
            self.wrong[seed] = wrong


def each_seed(one: Callable[[int, Report], None], cases: int, seed: int) -> Report:
    """Every case without its warnings."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(seed, seed + cases):
            one(number, report)
    return report


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--cases", type=int, default=1000)
    made.add_argument("--seed", type=int, default=0)
    return made


def long_run(run: Callable[[], Report], what: str, counted: str) -> None:
    """Print what is wrong and end the process: 1 if anything is."""
    start = time.monotonic()
    report = run()
    for seed, text in list(report.wrong.items())[:40]:
        print(f"seed {seed}: {text}")
    print(
        f"{what}: {report.cases} cases, {report.counted} of them {counted}, "
        f"{len(report.wrong)} wrong, {time.monotonic() - start:.0f} s"
    )
    sys.exit(bool(report.wrong))
