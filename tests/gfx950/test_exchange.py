"""The SYMMETRIC exchange on gfx950 code: 2 and 4 processes and shared memory, no host barrier.

What the ranks do is in exchange_ranks.py and conformance/exchange_ranks.py. Problems are exact, so
results must have the interpreter's bits. Each process executes its kernels with all checks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.testing.gfx950 import emulate
from support.exchange import Case, random_tokens
from support.gfx950_suite import SCHEDULES
from support.ranks import Outcomes, run_once

MODULE = "tests.gfx950.exchange_ranks"
TWO = (
    "many_epochs_are_exact__lowest",
    "every_kernel_of_the_exchange__random",
    "real_schedules_are_exact__lowest",
    "one_rank_is_always_late__random",
    "two_exchanges_take_turns__lowest",
    "epochs_beyond_32_bits__random",
    "two_streams_are_seen__lowest",
    "combine_without_a_wait_is_seen__random",
    "layer__lowest",
    "layer__random",
    "killed_rank_is_named__random",
)
FOUR = ("many_epochs_are_exact__random", "a_loss_reaches_every_rank__lowest")


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule", mxpert.ScaleRule)
def test_rows_have_the_bits_of_quantize(rule: mxpert.ScaleRule, schedule: str) -> None:
    """Quantised inside or before, whatever the scale rule; NaN, infinity and zeros as well."""
    case = Case(1, max_tokens=3, hidden_size=96)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[0, 40], x[1, 32:64] = torch.nan, torch.inf, 0
    tokens = replace(random_tokens(case, 0, 3, 3), x=x)
    wanted = mxpert.quantize(x, "mxfp8", scale_rule=rule)
    for given in (x, wanted):
        with emulate(schedule=schedule, seed=5) as emulation:  # type: ignore[arg-type]
            exchange = SymmetricExchange(None, case.spec(0), torch.device("cpu"))
            received = exchange.dispatch(
                given, tokens.weights, tokens.ids, bound=3, scale_rule=rule, out_dtype=torch.float32
            )
        assert list(emulation.kernels) == ["_exchange_dispatch_kernel"]
        assert torch.equal(received.topk_ids, tokens.ids)
        assert torch.equal(received.x.qdata, wanted.qdata)
        assert torch.equal(received.x.scale, wanted.scale)
