"""The SYMMETRIC protocol with interpreted kernels, 2 and 4 processes and shared memory.

What the ranks do is in exchange_ranks.py. Planted errors show that the checks see an error.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.distributed.symmetric import SymmetricExchange
from support.exchange import Case, random_tokens
from support.ranks import Outcomes, run_once

MODULE = "tests.conformance.exchange_ranks"
TWO = (
    "many_epochs_are_exact",
    "real_schedules_are_exact",
    "one_rank_is_always_late",
    "two_exchanges_take_turns",
    "wrong_slot_is_seen",
    "dropped_dispatch_flag_is_seen",
    "dropped_combine_flag_is_seen",
    "stale_dispatch_flag_is_seen",
    "stale_combine_flag_is_seen",
    "stale_target_is_seen",
    "missing_wait_for_tokens_is_seen",
    "missing_wait_for_partial_rows_is_seen",
    "flag_before_the_rows_is_seen",
    "two_streams_are_seen",
    "combine_without_a_wait_is_seen",
    "epochs_beyond_32_bits",
    "closed_exchange_refuses",
    "layer_equals_one_rank",
    "placements_and_few_experts",
    "killed_rank_is_named",
    "tests.conformance.exchange_differences.other_calls_are_named",
    "tests.conformance.exchange_differences.an_impatient_rank_overwrites_nothing",
    "tests.conformance.exchange_differences.a_forgotten_loss_is_seen",
)
FOUR = ("many_epochs_are_exact", "a_loss_reaches_every_rank", "killed_rank_is_named")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_once(tmp_path_factory, MODULE, TWO, 2, limit_s=400)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_once(tmp_path_factory, MODULE, FOUR, 4, limit_s=400)


@pytest.mark.parametrize("scenario", TWO)
def test_two_ranks(two_ranks: Outcomes, scenario: str) -> None:
    two_ranks.check(scenario)


@pytest.mark.parametrize("scenario", FOUR)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)


@pytest.mark.parametrize("rule", mxpert.ScaleRule)
def test_rows_have_the_bits_of_quantize(rule: mxpert.ScaleRule) -> None:
    """Quantised inside or before, whatever the scale rule; NaN, infinity and zeros as well."""
    case = Case(1, max_tokens=3, hidden_size=96)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[0, 40], x[1, 32:64] = torch.nan, torch.inf, 0
    tokens = replace(random_tokens(case, 0, 3, 3), x=x)
    wanted = mxpert.quantize(x, "mxfp8", scale_rule=rule)
    for given in (x, wanted):
        exchange = SymmetricExchange(None, case.spec(0), torch.device("cpu"))
        received = exchange.dispatch(
            given, tokens.weights, tokens.ids, bound=3, scale_rule=rule, out_dtype=torch.float32
        )
        assert torch.equal(received.topk_ids, tokens.ids)
        assert torch.equal(received.x.qdata, wanted.qdata)
        assert torch.equal(received.x.scale, wanted.scale)
