"""The SYMMETRIC protocol with 2 and 4 processes and shared memory, without a host barrier.

What the ranks do is in exchange_ranks.py, exchange_planted.py and exchange_differences.py. Planted
errors show that the checks see an error. Kernels are interpreted, or with ``--gfx950`` executed as
code of gfx950, with the waves in the order that the scenario's name ends with.
"""

from __future__ import annotations

import os

import pytest

from support.ranks import scenario_tests

pytestmark = pytest.mark.timeout(600)

MODULE = "tests.conformance.exchange_ranks"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLANTED = (
    "wrong_slot_is_seen",
    "dropped_dispatch_flag_is_seen",
    "dropped_combine_flag_is_seen",
    "stale_dispatch_flag_is_seen",
    "stale_combine_flag_is_seen",
    "stale_target_is_seen",
    "missing_wait_for_tokens_is_seen",
    "missing_wait_for_partial_rows_is_seen",
    "flag_before_the_rows_is_seen",
)
DIFFERENCES = (
    "other_calls_are_named",
    "layers_in_another_order_are_named",
    "an_impatient_rank_overwrites_nothing",
    "a_forgotten_loss_is_seen",
)
TWO: tuple[str, ...] = (
    "many_epochs_are_exact",
    "real_schedules_are_exact",
    "one_rank_is_always_late",
    "two_exchanges_take_turns",
    "rows_have_the_bits_of_quantize",
    "two_streams_are_seen",
    "combine_without_a_wait_is_seen",
    "epochs_beyond_32_bits",
    "closed_exchange_refuses",
    "killed_rank_is_named",
    *(f"tests.conformance.exchange_planted.{name}" for name in PLANTED),
    *(f"tests.conformance.exchange_differences.{name}" for name in DIFFERENCES),
)
FOUR: tuple[str, ...] = (
    "many_epochs_are_exact",
    "a_loss_reaches_every_rank",
    "killed_rank_is_named",
)
if not INTERPRETED:
    TWO = (
        "many_epochs_are_exact__lowest",
        "every_kernel_of_the_exchange__random",
        "real_schedules_are_exact__lowest",
        "one_rank_is_always_late__random",
        "two_exchanges_take_turns__lowest",
        "rows_have_the_bits_of_quantize__lowest",
        "rows_have_the_bits_of_quantize__random",
        "epochs_beyond_32_bits__random",
        "two_streams_are_seen__lowest",
        "combine_without_a_wait_is_seen__random",
        "killed_rank_is_named__random",
        "tests.conformance.exchange_differences.layers_in_another_order_are_named__lowest",
    )
    FOUR = ("many_epochs_are_exact__random", "a_loss_reaches_every_rank__lowest")


test_two_ranks = scenario_tests(MODULE, TWO, 2, limit_s=400)
test_four_ranks = scenario_tests(MODULE, FOUR, 4, limit_s=400)
