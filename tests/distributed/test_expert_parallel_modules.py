"""Modules, states and warm-up over several ranks, on CPU with gloo.

What the ranks do is in the scenarios beside this file.
"""

from __future__ import annotations

import pytest

from support.ranks import Outcomes, run_once

MODULE = "tests.distributed.moe_scenarios"


def of(module: str, names: list[str]) -> list[str]:
    return [f"tests.distributed.{module}_scenarios.{name}" for name in names]


ANY_SIZE = of(
    "moe",
    [
        "equals_one_rank",
        "any_placement_and_wire",
        "states_are_local_and_load_whole",
        "copies_compiled_and_shown",
        "nothing_is_sent_before_the_checks",
    ],
) + of(
    "warm_up",
    [
        "ranks_run_the_same_counts",
        "views_are_warmed_up",
        "slow_compilation_loses_nobody",
        "ranks_end_together",
        "nothing_is_sent_before_the_checks",
        "errors_reach_every_rank",
    ],
)
ON_FOUR = ANY_SIZE + of(
    "state",
    [
        "shards_are_gathered",
        "a_whole_state_loads_into_shards",
        "it_loads_into_any_number_of_ranks",
        "ddp_keeps_its_names",
        "what_does_not_fit_is_refused",
    ],
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_once(tmp_path_factory, MODULE, ANY_SIZE, 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_once(tmp_path_factory, MODULE, ON_FOUR, 4)


def short(scenario: str) -> str:
    return scenario.removeprefix("tests.distributed.").replace("_scenarios", "")


@pytest.mark.parametrize("scenario", ANY_SIZE, ids=short)
def test_two_ranks(two_ranks: Outcomes, scenario: str) -> None:
    two_ranks.check(scenario)


@pytest.mark.parametrize("scenario", ON_FOUR, ids=short)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)
