"""Mutants of the GEMMs and of the exchange: how many of them the executor notices.

`mutants.json` records them by kernel and kind, and each survivor by its place. Scale bytes,
operands and LDS offsets that are exchanged give a wrong result or a fault. A wait, barrier, cache
control or scope that is dropped or weakened survives where something else orders what it orders, or
where nothing of other devices depends on it, and a store to LDS may go elsewhere if it stores what
is already there: then the bits are the same in all schedules of `Trial.judge`, with all checks on,
and the record has the reason, which follows from a run of the kernel as it is (`gfx950_support`:
`orders`, `caches`).

By default the reasons of all recorded survivors are checked and a mutant of each kind is judged,
with ``--gfx950-all`` all that the record judges: every mutant of a kernel, or of kernels that run
long a fixed sample of each kind (`judged_of_each_kind`).
"""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path

import pytest
import triton

from gfx950_support import caches, orders
from support.gfx950_mutants import OF_CACHES, SOME_SURVIVE, Trial, digest, sample, tally
from support.scripts import load_script

_PATH = Path(__file__).with_name("mutation_cases.py")
cases = load_script(_PATH)

RECORD = json.loads(cases.RECORD.read_text("utf-8"))
EACH_KIND = 1
"""Mutants of each kind that are judged by default, of those that the record judges."""
PROOFS = (*orders.PROOFS, *caches.PROOFS)
AGAIN = f"record it again: python tests/gfx950/{_PATH.name}"


@pytest.fixture(scope="module", params=cases.CASES)
def name(request: pytest.FixtureRequest) -> str:
    """A case; tests that share its launch follow each other."""
    return str(request.param)


@functools.lru_cache(maxsize=1)
def trial_of(name: str) -> Trial:
    return Trial(cases.launch_of(cases.CASES[name]))


def is_recorded(name: str) -> bool:
    """Whether the listing is the recorded one; it must be with the same Triton."""
    row, found = RECORD[name], digest(trial_of(name).launch.code.executable)
    if found == row["digest"]:
        return True
    assert triton.__version__ != row["triton"], f"{name}: the kernel has changed; {AGAIN}"
    warnings.warn(
        f"{name}: Triton {triton.__version__} compiles another listing than {row['triton']}, with "
        "which survivors were recorded, so only their kinds and reasons are checked",
        stacklevel=2,
    )
    return False


def test_the_record_has_all_cases() -> None:
    assert list(RECORD) == list(cases.CASES)


def test_the_page_shows_the_record() -> None:
    again = f"render it again: python tests/gfx950/{_PATH.name} --page"
    assert cases.shown(RECORD) in cases.PAGE.read_text("utf-8"), again
    rows = [row for each in RECORD.values() for row in each["counts"].values()]
    caught = sum(row["fault"] + row["wrong"] for row in rows)
    assert f"\n{caught:,} of " in cases.shown(RECORD)


def test_the_record_is_complete(name: str) -> None:
    """Of each kind some mutants are caught, and each survivor has its place and reason.

    A kernel may have cache controls that are all redundant; those of another one are not.
    """
    counts, survivors = RECORD[name]["counts"], RECORD[name]["survivors"]
    assert len({each["label"] for each in survivors}) == len(survivors)
    for kind, row in counts.items():
        assert row["fault"] + row["wrong"] > 0 or kind in OF_CACHES
        assert row["survived"] == sum(each["kind"] == kind for each in survivors)
    for each in survivors:
        assert each["kind"] in SOME_SURVIVE
        assert each["reason"], each["label"]


@pytest.mark.parametrize("kind", OF_CACHES)
def test_cache_controls_are_caught(kind: str) -> None:
    assert any(row["counts"].get(kind, {}).get("fault") for row in RECORD.values())


def test_survivors_have_the_recorded_reasons(name: str) -> None:
    """All survivors, by place; and no mutant that changes nothing is recorded as caught."""
    trial = trial_of(name)
    if not is_recorded(name):
        return
    recorded = {each["label"]: each["reason"] for each in RECORD[name]["survivors"]}
    judged = sample(trial.mutants, RECORD[name]["judged_of_each_kind"])
    reasons = {mutant.label: trial.reason(mutant) for mutant in judged}
    assert {label: reasons[label] for label in recorded} == recorded
    assert {label for label, reason in reasons.items() if reason in PROOFS} <= set(recorded)


def test_mutants_are_caught(name: str, request: pytest.FixtureRequest) -> None:
    """Exactly the recorded ones survive; of another listing, only such as have a reason."""
    trial, row = trial_of(name), RECORD[name]
    assert trial.launch.name == row["kernel"]
    everything = request.config.getoption("--gfx950-all")
    recorded = sample(trial.mutants, row["judged_of_each_kind"])
    chosen = recorded if everything else sample(recorded, EACH_KIND)
    judged = [(mutant, trial.judge(mutant)) for mutant in chosen]
    survivors = [mutant for mutant, verdict in judged if verdict == "survived"]
    if is_recorded(name):
        expected = {each["label"] for each in row["survivors"]}
        labels = {mutant.label for mutant in chosen}
        assert {mutant.label for mutant in survivors} == expected & labels, AGAIN
        if everything:
            assert expected <= labels
            assert tally((mutant.kind, verdict) for mutant, verdict in judged) == row["counts"]
        return
    assert {mutant.kind for mutant in survivors} <= {each["kind"] for each in row["survivors"]}
    for mutant in survivors:
        assert trial.reason(mutant) is not None, mutant.label
