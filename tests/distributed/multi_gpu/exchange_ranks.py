"""What the processes of test_symmetric_multi_gpu.py do; each function runs on all ranks.

Ranks share GPUs if there are more ranks than GPUs.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.errors import PeerLostError
from support.exchange import Case, Experts, Tokens, expected, poison, send
from support.exchange import random_tokens as exact_tokens
from support.gpu_delays import spin
from tests.distributed.multi_gpu.environment import share_one_gpu

TIMEOUT_S = 120.0
"""Compiling takes long where four processes share two cores."""

share_one_gpu()


def rank() -> int:
    return dist.get_rank()


def device() -> torch.device:
    chosen = torch.device("cuda", rank() % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def make(case: Case) -> SymmetricExchange:
    reason = SymmetricExchange.unavailable(dist.group.WORLD, device())
    assert reason is None, reason
    return SymmetricExchange(dist.group.WORLD, case.spec(rank()), device())


def cases() -> Iterator[Case]:
    common: dict[str, Any] = dict(size=dist.get_world_size(), timeout_s=TIMEOUT_S, top_k=4)
    yield Case(**common, num_experts=13, hidden_size=2880, max_tokens=64)
    yield Case(
        **common,
        num_experts=8,
        hidden_size=256,
        max_tokens=2048,
        wire_format="bf16",
        combine_dtype=torch.bfloat16,
    )
    yield Case(**common, num_experts=16, hidden_size=7168, max_tokens=1024)


def layer(
    exchange: Any, experts: Experts, tokens: Tokens, bound: int, *, waits: bool = False
) -> torch.Tensor:
    """One epoch, with slots poisoned as early as that is allowed; dispatch or the sort waits."""
    exchange._sections["partials"].view(torch.uint8).fill_(0xFF)
    received, arrivals = send(exchange, tokens, bound, waits=waits)
    rows = experts(received, arrivals)
    poison(received)
    out = torch.full((tokens.x.shape[0], rows.shape[1]), torch.nan, device=rows.device)
    exchange.combine(rows, received, out)
    return out


def settled() -> None:
    torch.cuda.synchronize()
    dist.barrier()


# ---- exact problems -----------------------------------------------------------------------------


def many_epochs_are_exact() -> None:
    """Changing routing, numbers of tokens and slots, and delays of up to 200 µs on either side."""
    for case in cases():
        exchange, experts = make(case), Experts(case, rank(), device())
        generator = torch.Generator().manual_seed(rank())
        for epoch in range(60):
            bound = (case.max_tokens, case.max_tokens, 7, 1)[epoch % 4]
            tokens = exact_tokens(replace(case, max_tokens=bound), rank(), epoch).to(device())
            spin(torch.randint(0, 200_000, (1,), generator=generator).to(device()))
            out = layer(exchange, experts, tokens, bound, waits=epoch % 5 == 0)
            assert torch.equal(out, expected(case, tokens)), (case, epoch)
        exchange.check()
        settled()
        exchange.close()


def graphs_of_exact_problems() -> None:
    """Replays with changing routing, in between eager calls of the same object."""
    for case in cases():
        exchange, experts = make(case), Experts(case, rank(), device())
        count = case.max_tokens - rank()
        static = exact_tokens(case, rank(), 3, count).to(device())
        delay = torch.zeros(1, dtype=torch.int64, device=device())
        run = functools.partial(layer, exchange, experts, static, case.max_tokens)
        run()
        graph, out = _captured(run, delay)
        generator = torch.Generator().manual_seed(rank())
        for epoch in range(40):
            tokens = exact_tokens(case, rank(), epoch, count).to(device())
            for name, tensor in vars(static).items():
                tensor.copy_(getattr(tokens, name))
            delay.copy_(torch.randint(0, 100_000, (1,), generator=generator))
            if epoch % 5:
                graph.replay()
                assert torch.equal(out, expected(case, tokens)), (case, epoch)
            else:
                eager = layer(exchange, experts, tokens, case.max_tokens)
                assert torch.equal(eager, expected(case, tokens)), (case, epoch)
        exchange.check()
        settled()


def _captured(run: Any, delay: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    settled()
    graph = torch.cuda.CUDAGraph()
    spin(delay)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        spin(delay)
        out = run()
    return graph, out


def two_objects_on_two_streams() -> None:
    """Two micro-batches that overlap: each object has a stream of its own."""
    case = next(cases())
    pair = [make(replace(case, seed=seed)) for seed in range(2)]
    experts = Experts(case, rank(), device())
    tokens = [exact_tokens(case, rank(), epoch).to(device()) for epoch in (3, 4)]
    for exchange, mine in zip(pair, tokens, strict=True):  # compile
        layer(exchange, experts, mine, case.max_tokens)
    settled()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        results = []
        for stream, exchange, mine in zip(streams, pair, tokens, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer(exchange, experts, mine, case.max_tokens))
        torch.cuda.synchronize()
        for out, mine in zip(results, tokens, strict=True):
            assert torch.equal(out, expected(case, mine))
    settled()


# ---- a rank that dies ---------------------------------------------------------------------------


def a_killed_rank_is_named() -> None:
    """The last rank dies between dispatch and combine; the others go on without it."""
    case = replace(next(cases()), timeout_s=5.0)
    last, experts = case.size - 1, Experts(case, rank(), device())
    exchange = make(replace(case, timeout_s=TIMEOUT_S))
    tokens = exact_tokens(case, rank(), 3, 8).to(device())
    tokens.ids.fill_(case.num_experts - 1)  # an expert of the last rank
    layer(exchange, experts, tokens, case.max_tokens)
    settled()
    exchange = make(case)
    assert torch.equal(layer(exchange, experts, tokens, 64), expected(case, tokens))
    settled()
    received, arrivals = send(exchange, tokens, case.max_tokens)
    rows = experts(received, arrivals)
    settled()
    if rank() == last:
        os.kill(os.getpid(), signal.SIGKILL)
    out = torch.zeros(8, case.hidden_size, device=device())
    exchange.combine(rows, received, out)
    assert out.isnan().all()
    with pytest.raises(PeerLostError, match=f"rank {last} — need an answer") as caught:
        exchange.check()
    assert caught.value.ranks == (last,)
    exchange._lost = None  # as under a graph
    assert layer(exchange, experts, tokens, case.max_tokens).isnan().all()
    smaller = replace(case, size=last)
    group = dist.new_group(range(last), use_local_synchronization=True) if last > 1 else None
    after = SymmetricExchange(group, smaller.spec(rank()), device())
    tokens = exact_tokens(smaller, rank(), 4).to(device())
    out = layer(after, Experts(smaller, rank(), device()), tokens, smaller.max_tokens)
    assert torch.equal(out, expected(smaller, tokens))
    after.check()
