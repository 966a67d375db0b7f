"""MXMoE over several ranks against one rank with all experts: results, gradients, weights, DDP.

What the ranks do is in training_scenarios.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxpert.testing.numerics import is_exact
from mxpert.training import MXFP8Recipe, MXGroupedLinear
from support.ranks import Outcomes, run_scenarios

from .training_scenarios import MANY, build, own_step, parallel, tokens_of

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


@pytest.mark.parametrize(
    "recipe", [MXFP8Recipe(), MXFP8Recipe(enabled=False)], ids=["mxfp8", "bf16"]
)
def test_one_rank_is_the_block_without_exchange(recipe: MXFP8Recipe) -> None:
    x, grad = tokens_of(0, torch.bfloat16, MANY)
    alone, plain = (own_step(build(ep, recipe=recipe), x, grad) for ep in (parallel(), None))
    for name, value in plain.items():
        assert is_exact(alone[name], value), name


@pytest.mark.parametrize(
    "group_ids, error",
    [
        ([1, 0], ValueError),
        ([], ValueError),
        ([0, 4], ValueError),
        ([0, 0], ValueError),
        ([-1, 0], ValueError),
        (1, TypeError),
        ([0.0], TypeError),
        ([True], TypeError),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_are_refused(group_ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="MXGroupedLinear: group_ids — need"):
        MXGroupedLinear(4, 32, 32, group_ids=group_ids)


def test_every_group_in_its_order_is_the_whole_layer() -> None:
    torch.manual_seed(0)
    whole = MXGroupedLinear(4, 32, 32, bias=True)
    torch.manual_seed(0)
    same = MXGroupedLinear(4, 32, 32, bias=True, group_ids=range(4))
    for name, value in whole.state_dict().items():
        assert is_exact(same.state_dict()[name], value)
    assert "group_ids=[0, 1, 2, 3]" in repr(same)
