"""MXMoE over several ranks against one rank with all experts: results, gradients, weights, DDP.

What the ranks do is in training_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mxpert.distributed import ExpertParallel
from mxpert.testing.numerics import is_exact
from mxpert.training import MXGroupedLinear, MXMoE
from support.ranks import Outcomes, run_scenarios

MODULE = "distributed.training_scenarios"
TWO = (
    "gather_equals_one_rank_in_float64",
    "all_to_all_equals_one_rank_in_float64",
    "one_rank_gets_every_token",
    "unused_slots_are_not_read",
    "float32_keeps_the_contract",
    "bf16_and_mxfp8_keep_their_floors",
    "mxfp8_wire_gives_the_same_results",
    "the_comparison_sees_planted_errors",
    "first_weights_are_a_slice",
    "state_dicts_load_whole_or_local",
    "repeats_checkpoints_and_main_grad_give_the_same_bits",
    "what_does_not_fit_is_refused",
)
FOUR = (
    "any_placement_gives_the_same",
    "ddp_averages_each_gradient_over_its_ranks",
    "ddp_alone_would_mix_experts",
    "fsdp2_averages_each_gradient_over_its_ranks",
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_scenarios(MODULE, TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_scenarios(MODULE, FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("scenario", TWO)
def test_two_ranks(two_ranks: Outcomes, scenario: str) -> None:
    two_ranks.check(scenario)


@pytest.mark.parametrize("scenario", FOUR)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)
