"""A layer over several ranks: processes on this host, against all experts on one of them.

The reference exchanges over gloo, other executors by stores into shared memory; on GPUs also over
NCCL, if each rank has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mxpert.distributed import Placement
from support.executors import Executor, executors
from support.ranks import Outcomes, run_once
from tests.conformance.cases import exchange as cases
from tests.conformance.cases.exchange import ExchangeCase
from tests.distributed.multi_gpu.environment import gpu_environment

MODULE = "tests.conformance.layer_ranks"
NAMES = {case: name for name, case in cases.ALL.items()}


def outcomes(request: pytest.FixtureRequest, executor: Executor, size: int) -> Outcomes:
    """What `size` ranks did with every case of this kind of executor; they are started once."""
    way = executor.way
    scenarios = [
        f"{name}__{each}"
        for each in executors(emulated=request.config.getoption("--gfx950"))
        for name, case in cases.ALL.items()
        if each.way == way and case.size == size and case.served_by(each.backend)
    ]
    factory = request.getfixturevalue("tmp_path_factory")
    on_gpu = way == "gpu"
    with gpu_environment() if on_gpu else contextlib.nullcontext():
        method = "spawn" if on_gpu else "forkserver"
        options = dict(limit_s=800.0, timeout_s=300.0, method=method, name=f"layers-{way}")
        return run_once(factory, MODULE, scenarios, size, **options)


@pytest.mark.timeout(900)
@pytest.mark.cases(cases.ALL)
def test_layer(case: ExchangeCase, executor: Executor, request: pytest.FixtureRequest) -> None:
    outcomes(request, executor, case.size).check(f"{NAMES[case]}__{executor}")


Planted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PLANTED: dict[str, Planted] = {
    "tokens-exchanged": lambda result, part: result.roll(1, 0),
    "rows-of-a-rank-lost": lambda result, part: result - part,
    "rows-of-a-rank-twice": lambda result, part: result + part,
    "slot-of-another-token": lambda result, part: result[[0, 0, *range(2, len(result))]],
    "rows-of-an-earlier-call": lambda result, part: result - part + part.roll(1, 0),
    "nan": lambda result, part: result.index_fill(0, torch.tensor([len(result) - 1]), torch.nan),
}
"""From the right result, and the part of it that one of the ranks computes."""


@pytest.mark.parametrize("name", ["wire-bf16", "rounded"])
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_the_comparison_catches(plant: Planted, name: str) -> None:
    case = replace(cases.ALL[name], counts=(7,))
    ep = case.ranks(cases.TRANSPORTS[0], None, torch.device("cpu"))
    problem = case.problem()
    given = case.tokens(problem, ep, 0)
    owners = Placement.contiguous(case.shape.num_experts, 2).owners[0][given["topk_ids"].long()]
    parts = [
        case.judge(problem, given | {"topk_ids": given["topk_ids"].masked_fill(owners != rank, -1)})
        for rank in range(2)
    ]
    result, expected = parts[0] + parts[1], case.judge(problem, given)
    case.compare(result, expected)
    with pytest.raises(AssertionError):
        case.compare(plant(result, parts[1]), expected)
