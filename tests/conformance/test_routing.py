"""route_topk and make_routing_plan of every executor: plans bit by bit, weights against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.executors import Executor
from tests.conformance.cases import routing as cases
from tests.conformance.cases.routing import PlanCase, TopKCase


@pytest.mark.cases(every=cases.PLANS, foreign_ids=cases.PLANS_OF_FOREIGN_IDS)
def test_plan(case: PlanCase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.cases(every=cases.TOPK, other_shapes=cases.TOPK_SHAPES, ties_and_nan=cases.TOPK_TIES)
def test_topk(case: TopKCase, executor: Executor) -> None:
    case.check(executor)


Result = tuple[torch.Tensor, torch.Tensor]
PLANTED: dict[str, Callable[[torch.Tensor, torch.Tensor], Result]] = {
    "weights-exchanged": lambda weights, ids: (weights.flip(1), ids),
    "ids-exchanged": lambda weights, ids: (weights, ids.flip(1)),
    "not-scaled": lambda weights, ids: (weights / 2.5, ids),
    "token-off": lambda weights, ids: (weights.roll(1, 0), ids.roll(1, 0)),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_the_comparison_catches(plant: Callable[[torch.Tensor, torch.Tensor], Result]) -> None:
    case = cases.TOPK["deepseek-v3-9x4of100"]
    logits = case.logits()
    case.compare(logits, *case.run(logits))
    with pytest.raises(AssertionError):
        case.compare(logits, *plant(*case.run(logits)))
