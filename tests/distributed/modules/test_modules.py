"""Modules, states and warm-up over several ranks, on CPU with gloo.

What the ranks do is in the scenarios beside this file.
"""

from __future__ import annotations

import pytest

from support.ranks import Outcomes, run_once

STATES = "distributed.modules.state_scenarios"
ON_FOUR = [
    f"{STATES}.shards_are_gathered",
    f"{STATES}.a_whole_state_loads_into_shards",
    f"{STATES}.it_loads_into_any_number_of_ranks",
    f"{STATES}.ddp_keeps_its_names",
    f"{STATES}.what_does_not_fit_is_refused",
]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_once(tmp_path_factory, STATES, ON_FOUR, 4)


def short(scenario: str) -> str:
    return scenario.rpartition(".")[2]


@pytest.mark.parametrize("scenario", ON_FOUR, ids=short)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)
