"""Modules, states and warm-up over several ranks, on CPU with gloo.

What the ranks do is in the scenarios beside this file.
"""

from __future__ import annotations

from support.ranks import scenario_tests

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


test_two_ranks = scenario_tests(MODULE, ANY_SIZE, 2)
test_four_ranks = scenario_tests(MODULE, ON_FOUR, 4)
