"""GATHER and ALL_TO_ALL over gloo with 2 and 4 processes; conformance/test_exchange.py has results.

What the ranks do is in exchange_scenarios.py, group_scenarios.py and calling_scenarios.py.
"""

from __future__ import annotations

from support.ranks import scenario_tests

TWO = ["a_row_travels_once_to_a_rank", "fewer_slots_for_one_call", "two_objects_overlap"]
GROUPS = [
    "meshes_and_groups_are_accepted",
    "ranks_agree_on_the_arguments",
    "an_error_of_one_rank_reaches_all",
    "symmetric_memory_is_asked_for_together",
    "nothing_is_sent_before_the_checks",
    "explain_names_transport_and_kernel",
    "configs_follow_the_rows_that_are_expected",
    "a_transport_that_cannot_run_is_refused_everywhere",
    "memory_that_is_too_small_is_named",
]
CALLERS = [
    "vllm_prepare_and_finalize",
    "torchtitan_token_dispatcher",
    "compiled_without_a_graph_break",
]
FOUR = ["a_row_travels_once_to_a_rank"]


def of(module: str, names: list[str]) -> list[str]:
    return [f"tests.distributed.{module}_scenarios.{name}" for name in names]


DIFFERING = of("differing", ["calls_that_differ_are_named", "layers_in_another_order_are_named"])
ON_TWO = [*of("exchange", TWO), *of("group", GROUPS), *of("calling", CALLERS), *DIFFERING]
ON_FOUR = [*of("exchange", FOUR), *of("group", ["one_dimension_of_a_mesh"]), *DIFFERING]
MODULE = "tests.distributed.exchange_scenarios"


test_two_ranks = scenario_tests(MODULE, ON_TWO, 2)
test_four_ranks = scenario_tests(MODULE, ON_FOUR, 4)
