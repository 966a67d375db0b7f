"""Mutants of the MoE GEMM kernels: how many of them the executor notices.

`mutants.json` records all of them by kernel and kind. Scale bytes, operands and LDS offsets that
are exchanged give a wrong result or a fault. A dropped or weakened wait or barrier may survive
where something else orders the accesses: then the bits are the same in the lowest schedule and in
`RANDOM_RUNS` random ones, with all checks on, and the record lists the instruction.

By default a few mutants of each kind are judged, with ``--gfx950-all`` all of them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from support.gfx950_mutants import SOME_SURVIVE, Trial, sample, tally

_PATH = Path(__file__).with_name("mutation_cases.py")
_spec = importlib.util.spec_from_file_location("mutation_cases", _PATH)
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
sys.modules["mutation_cases"] = cases
_spec.loader.exec_module(cases)

RECORD = json.loads(cases.RECORD.read_text("utf-8"))
EACH_KIND = 1
"""Mutants of each kind that are judged by default."""
MOST_UNUSED = 0.05
"""Share of the mutants of other kinds that may survive: LDS words on which no output depends."""
LEAST_CAUGHT = 0.85
"""Share of all mutants of a kernel that must be caught; the record has 0.89 to 0.97."""


def test_the_record_has_all_cases() -> None:
    assert list(RECORD) == list(cases.CASES)


@pytest.mark.parametrize("name", cases.CASES)
def test_the_record_is_complete(name: str) -> None:
    """Of each kind some mutants are caught, most of all, and survivors are listed."""
    counts, survivors = RECORD[name]["counts"], RECORD[name]["survivors"]
    caught = sum(row["fault"] + row["wrong"] for row in counts.values())
    survived = sum(row["survived"] for row in counts.values())
    assert caught >= LEAST_CAUGHT * (caught + survived)
    for kind, row in counts.items():
        assert row["fault"] + row["wrong"] > 0
        assert bool(row["survived"]) is any(text.startswith(f"{kind}: ") for text in survivors)
        if kind not in SOME_SURVIVE:
            assert row["survived"] <= MOST_UNUSED * sum(row.values())


@pytest.mark.parametrize("name", cases.CASES)
def test_mutants_are_caught(name: str, request: pytest.FixtureRequest) -> None:
    """Survivors are among the recorded ones; of all mutants as many as recorded are caught."""
    launch = cases.launch_of(cases.CASES[name])
    assert launch.name == RECORD[name]["kernel"]
    trial = Trial(launch)
    everything = request.config.getoption("--gfx950-all")
    chosen = trial.mutants if everything else sample(trial.mutants, EACH_KIND)
    judged = [(mutant, trial.judge(mutant)) for mutant in chosen]
    survivors = {mutant.label for mutant, verdict in judged if verdict == "survived"}
    new = survivors - set(RECORD[name]["survivors"])
    assert not new, f"record them with {_PATH.name}, or strengthen the checks"
    if everything:
        assert tally(judged) == RECORD[name]["counts"]
