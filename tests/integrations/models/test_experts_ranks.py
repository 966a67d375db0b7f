"""Transformers models whose experts lie on several ranks, against the same model on one rank.

What the ranks do is in transformers_scenarios.py.
"""

from __future__ import annotations

import pytest

from support.ranks import scenario_tests

pytest.importorskip("transformers")

MODULE = "tests.distributed.transformers_scenarios"
SCENARIOS = (
    "generate_gives_the_tokens_of_one_rank",
    "ranks_may_generate_from_different_prompts",
    "every_family_computes_what_one_rank_does",
    "a_rank_holds_its_experts_alone",
    "training_frees_foreign_experts_layer_by_layer",
    "mxfp4_checkpoints_are_read_in_part",
    "bf16_checkpoints_are_read_in_part",
    "containers_are_read_in_part",
    "bf16_checkpoints_load_as_they_convert",
    "missing_tensors_of_experts_are_named",
    "other_checkpoints_are_loaded_as_a_whole",
    "weights_that_are_not_finite_are_refused",
    "states_are_local_and_load_whole",
    "training_gives_the_gradients_of_one_rank",
    "what_does_not_fit_is_refused",
)


test_two_ranks = scenario_tests(MODULE, SCENARIOS, 2)
