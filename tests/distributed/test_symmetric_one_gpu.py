"""SYMMETRIC on one GPU: two processes that share it, and eight ranks as streams of one process.

The GPU runs processes in turn. What they do is in exchange_ranks.py and expert_parallel_ranks.py of
multi_gpu, and in warm_up_gpu_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mxpert.distributed.exchange import host
from mxpert.distributed.exchange.schedule import Schedule
from mxpert.distributed.symmetric import SymmetricExchange
from support.exchange import (
    Case,
    Experts,
    Tokens,
    exchanges_of_one_process,
    expected,
    random_tokens,
    send,
)
from support.ranks import scenario_tests
from tests.distributed.multi_gpu.environment import gpu_environment
from tests.distributed.multi_gpu.test_symmetric_multi_gpu import (
    ANY_SIZE,
    MODULE,
    ON_GPUS,
    check_a_killed_rank,
)

pytestmark = pytest.mark.timeout(900)

LAYERS = "tests.distributed.multi_gpu.expert_parallel_ranks"
SCENARIOS = (
    *ANY_SIZE,
    f"{LAYERS}.graphs_equal_eager_calls",
    "tests.distributed.warm_up_gpu_ranks.no_kernel_compiles_after_warm_up",
)


test_two_ranks = scenario_tests(MODULE, SCENARIOS, 2, environment=gpu_environment, **ON_GPUS)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    check_a_killed_rank(2, tmp_path)


@pytest.mark.parametrize("wire_format", ["bf16", "mxfp8"])
def test_eight_ranks_as_streams_of_one_process(
    wire_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few CTAs: those of all ranks are resident together."""

    def few(*_: object) -> Schedule:
        return Schedule(ctas=8, rows=2, block=1024, num_warps=4)

    monkeypatch.setattr(host, "dispatch_schedule", few)
    monkeypatch.setattr(host, "combine_schedule", few)
    device = torch.device("cuda", 0)
    case = Case(8, 60, 4, 2880, 32, wire_format, torch.bfloat16, 20.0)
    exchanges = exchanges_of_one_process([case.spec(rank) for rank in range(8)], device)
    experts = [Experts(case, rank, device) for rank in range(8)]
    streams = [torch.cuda.Stream(device) for _ in range(8)]
    sets = [
        [random_tokens(case, rank, epoch).to(device) for rank in range(8)] for epoch in range(5)
    ]
    _epoch(case, exchanges, experts, streams, sets[0], torch.cuda.synchronize)  # compiles
    torch.cuda.synchronize()
    for epoch in range(100):
        tokens = sets[epoch % len(sets)]
        results = _epoch(case, exchanges, experts, streams, tokens, lambda: None)
        for stream, out, mine in zip(streams, results, tokens, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(out, expected(case, mine)), epoch
    for exchange in exchanges:
        exchange.check()


def _epoch(
    case: Case,
    exchanges: list[SymmetricExchange],
    experts: list[Experts],
    streams: list[torch.cuda.Stream],
    tokens: list[Tokens],
    between: object,
) -> list[torch.Tensor]:
    """Each step of all ranks before the next step; `between` runs behind each step but the last."""
    received, rows, results = [], [], []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            received.append(send(exchanges[rank], tokens[rank], case.max_tokens))
    between()  # type: ignore[operator]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            rows.append(experts[rank](*received[rank]))
    between()  # type: ignore[operator]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            out = torch.full(
                (len(tokens[rank].x), case.hidden_size), torch.nan, device=rows[rank].device
            )
            exchanges[rank].combine(rows[rank], received[rank][0], out)
            results.append(out)
    return results
