"""SYMMETRIC on GPUs: 2 processes, 4 processes, and 8 ranks as streams of one process.

Processes share GPUs where there are fewer, down to one. What they do is in exchange_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multi_gpu.environment import gpu_environment
from mxpert.backends.common.exchange import host
from mxpert.backends.common.exchange.schedule import Schedule
from mxpert.distributed.symmetric import SymmetricExchange
from support.exchange import Case, Experts, Tokens, expected, random_tokens
from support.exchange import dispatch as send
from support.ranks import Outcomes, run_scenarios

pytestmark = [pytest.mark.multi_gpu(1), pytest.mark.timeout(1800)]

MODULE = "multi_gpu.exchange_ranks"
ANY_SIZE = ("many_epochs_are_exact", "graphs_of_exact_problems")
TWO = (
    *ANY_SIZE,
    "two_objects_on_two_streams",
    "equals_one_rank_and_gather",
    "quantised_rows_give_the_same_bits",
)
KILL = "a_killed_rank_is_named"


def started(scenarios: tuple[str, ...], size: int, folder: Path) -> Outcomes:
    with gpu_environment():
        return run_scenarios(
            MODULE, scenarios, size, folder, limit_s=900, timeout_s=300, method="spawn"
        )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return started(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return started(ANY_SIZE, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("scenario", TWO)
def test_two_ranks(two_ranks: Outcomes, scenario: str) -> None:
    two_ranks.check(scenario)


@pytest.mark.parametrize("scenario", ANY_SIZE)
def test_four_ranks(four_ranks: Outcomes, scenario: str) -> None:
    four_ranks.check(scenario)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named(size: int, tmp_path: Path) -> None:
    outcomes = started((KILL,), size, tmp_path)
    outcomes.check(KILL, ranks=range(size - 1))
    with pytest.raises(AssertionError, match="did not finish"):
        outcomes.check(KILL)


@pytest.mark.parametrize("wire_format", ["bf16", "mxfp8"])
def test_eight_ranks_as_streams_of_one_process(
    wire_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few CTAs: those of all ranks are resident together."""

    def few(bound: int, hidden_size: int) -> Schedule:
        return Schedule(ctas=8, rows=2, block=1024, num_warps=4, rounds=2)

    monkeypatch.setattr(host, "dispatch_schedule", few)
    monkeypatch.setattr(host, "combine_schedule", few)
    device = torch.device("cuda", 0)
    case = Case(8, 60, 4, 2880, 32, wire_format, torch.bfloat16, 20.0)
    exchanges = SymmetricExchange.virtual([case.spec(rank) for rank in range(8)], device)
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
            rows.append(experts[rank](received[rank]))
    between()  # type: ignore[operator]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            out = torch.full(
                (len(tokens[rank].x), case.hidden_size), torch.nan, device=rows[rank].device
            )
            exchanges[rank].combine(rows[rank], received[rank], out)
            results.append(out)
    return results
