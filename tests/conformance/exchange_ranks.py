"""What the processes of test_exchange_protocol.py do; each function runs on all ranks.

Ranks share memory and have no barrier between epochs. Kernels are interpreted; in ``NAME__ORDER``
they are executed as gfx950 code, with the waves in that order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import ScaleRule
from mxpert.core.target import detect_target
from mxpert.device.exchange_wait import (
    EPOCHS,
    NO_WAIT,
    TAG_BITS,
    TICKS_PER_SECOND,
    TIMEOUT,
    TWO_STREAMS,
)
from mxpert.distributed import DispatchedTokens
from mxpert.distributed.exchange import host
from mxpert.distributed.exchange.schedule import Schedule, Work
from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.errors import PeerLostError
from mxpert.routing.triton import PlanConfig
from mxpert.testing.gfx950 import emulate
from support.exchange import Case, Experts, Tokens, expected, multiply, poison, random_tokens, send
from support.interpreter import install

if os.environ.get("TRITON_INTERPRET") == "1":  # else the kernels are compiled, and emulated
    install()

CPU = torch.device("cpu")
SORTS = (PlanConfig(0, 32, 1), PlanConfig(2, 16, 1), None)
"""A sort that waits: one launch, and two launches. None: dispatch waits, and nothing is sorted."""
DELAY_S = 0.03
ONE_EPOCH = 1 << TAG_BITS.value
KERNELS = {
    "_exchange_dispatch_kernel",
    "_exchange_combine_kernel",
    "_routing_plan_expert_kernel",
    "_routing_plan_count_kernel",
    "_routing_plan_scatter_kernel",
}
"""Of the exchange, and of both sorts that wait."""
INSTRUCTIONS = {
    "global_atomic_swap_x2",
    "global_atomic_cmpswap_x2",
    "global_atomic_add_x2",
    "s_memrealtime",
    "buffer_wbl2",
    "buffer_inv",
}


def rank() -> int:
    return dist.get_rank()


def make(case: Case) -> SymmetricExchange:
    assert SymmetricExchange.unavailable(dist.group.WORLD, CPU) is None
    return SymmetricExchange(dist.group.WORLD, case.spec(rank()), CPU)


@contextlib.contextmanager
def small_schedules() -> Iterator[None]:
    """Few CTAs, of which each has several tiles, rows and column tiles."""

    def few(work: Work, *_: int) -> Schedule:
        return Schedule(ctas=2 if work.bound > 2 else 1, rows=2, block=32, num_warps=4)

    with mock.patch.multiple(host, dispatch_schedule=few, combine_schedule=few):
        yield


def run(
    exchange: SymmetricExchange,
    case: Case,
    epochs: int,
    *,
    delays: Callable[[int, int], float] | None = None,
    bounds: tuple[int, ...] = (),
    count: int | None = None,
    sorts: Sequence[PlanConfig | None] = SORTS,
) -> int:
    """Run epochs and return how many results differ from the exact ones.

    Args:
        delays: seconds to sleep, by rank and step; None draws them.
        bounds: slots a rank of the epochs in turn; () takes max_tokens.
        count: tokens of each rank; None draws them.
        sorts: of the epochs in turn.
    """
    generator, wrong = random.Random(rank()), 0
    experts = Experts(case, rank(), CPU)
    steps = itertools.count()

    def pause() -> None:
        drawn = generator.random() * DELAY_S * (generator.random() < 0.5)
        time.sleep(drawn if delays is None else delays(rank(), next(steps)))

    for epoch in range(epochs):
        bound = bounds[epoch % len(bounds)] if bounds else case.max_tokens
        tokens = random_tokens(replace(case, max_tokens=bound), rank(), epoch, count)
        exchange._sections["partials"].view(torch.uint8).fill_(0xFF)
        pause()
        sort = sorts[epoch % len(sorts)]
        received, arrivals = send(exchange, tokens, bound, waits=sort is None)
        pause()
        if sort is None:
            assert unused_slots(received, case, epoch, bound, count).eq(-1).all()
            rows = multiply(case, experts.factors, received)
        else:
            rows = experts(received, arrivals, sort)
        poison(received)
        pause()
        out = torch.full((tokens.x.shape[0], case.hidden_size), torch.nan)
        exchange.combine(rows, received, out)
        wrong += not torch.equal(out, expected(case, tokens))
    return wrong


def unused_slots(
    received: DispatchedTokens, case: Case, epoch: int, bound: int, count: int | None
) -> torch.Tensor:
    """Received ids of slots that no rank has a token for."""
    slots = received.topk_ids.view(case.size, bound, case.top_k)
    fewer = replace(case, max_tokens=bound)
    counts = [len(random_tokens(fewer, r, epoch, count).x) for r in range(case.size)]
    return torch.cat([ids[used:].flatten() for ids, used in zip(slots, counts, strict=True)])


def cases() -> Iterator[Case]:
    size = dist.get_world_size()
    yield Case(size, wire_format="mxfp8")
    yield Case(size, wire_format="bf16", combine_dtype=torch.bfloat16, num_experts=5, top_k=1)


# ---- the protocol -----------------------------------------------------------------------------


def many_epochs_are_exact() -> None:
    """Changing routing and numbers of tokens and slots, delays on either side, poisoned slots."""
    with small_schedules():
        for case in cases():
            exchange = make(case)
            assert run(exchange, case, 12 // case.size, bounds=(4, 1, 4, 3)) == 0
            exchange.check()
            dist.barrier()
            exchange.close()


def every_kernel_of_the_exchange() -> None:
    """Many epochs, after which each kernel was executed as gfx950 code."""
    with emulate(schedule="random", seed=rank()) as emulation:
        many_epochs_are_exact()
    assert set(emulation.kernels) >= KERNELS, set(emulation.kernels)
    assert set(emulation.counts) >= INSTRUCTIONS


def rows_have_the_bits_of_quantize() -> None:
    """Quantised inside or before, whatever the scale rule; NaN, infinity and zeros as well."""
    case = Case(1, max_tokens=3, hidden_size=96)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[0, 40], x[1, 32:64] = torch.nan, torch.inf, 0
    tokens = random_tokens(case, 0, 3, 3)
    for rule in ScaleRule:
        with mxpert.override(backend="reference"):
            wanted = mxpert.quantize(x, "mxfp8", scale_rule=rule)
        for given in (x, wanted):
            exchange = SymmetricExchange(None, case.spec(0), CPU)
            received = exchange.dispatch(
                given, tokens.weights, tokens.ids, bound=3, scale_rule=rule, out_dtype=torch.float32
            )
            assert torch.equal(received.topk_ids, tokens.ids)
            assert torch.equal(received.x.qdata, wanted.qdata)
            assert torch.equal(received.x.scale, wanted.scale)


def real_schedules_are_exact() -> None:
    case = Case(dist.get_world_size(), max_tokens=3)
    exchange = make(case)
    assert run(exchange, case, 2) == 0
    exchange.check()
    dist.barrier()


def one_rank_is_always_late() -> None:
    """The last rank sleeps before each step, then the others do."""
    case = Case(dist.get_world_size())
    with small_schedules():
        for late in (True, False):
            exchange = make(case)
            last = rank() == dist.get_world_size() - 1
            delays = lambda *_: 2 * DELAY_S * (last is late)  # noqa: B023, E731
            assert run(exchange, case, 3, delays=delays) == 0
            dist.barrier()


def two_exchanges_take_turns() -> None:
    """Both dispatch before either combines."""
    case = Case(dist.get_world_size())
    experts = Experts(case, rank(), CPU)
    with small_schedules():
        pair = [make(case), make(replace(case, seed=1))]
        for epoch in range(2):
            tokens = [random_tokens(case, rank(), 2 * epoch + each) for each in range(2)]
            received = [send(*each, case.max_tokens) for each in zip(pair, tokens, strict=True)]
            for exchange, given, mine in list(zip(pair, received, tokens, strict=True))[::-1]:
                out = torch.full((mine.x.shape[0], case.hidden_size), torch.nan)
                exchange.combine(experts(*given), given[0], out)
                assert torch.equal(out, expected(case, mine))
        dist.barrier()


# ---- lost ranks and misuse ----------------------------------------------------------------------


def killed_rank_is_named() -> None:
    """The last rank is killed behind its third dispatch; the others go on without it."""
    case = Case(dist.get_world_size())
    last = case.size - 1
    with small_schedules():
        exchange = make(case)
        if rank() == last:
            child = os.fork()  # shares the exchange's memory
            if child == 0:
                run(exchange, case, 2)
                send(exchange, one_expert_of(case, 0), case.max_tokens)
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
            dist.barrier()
        else:
            assert run(exchange, case, 2) == 0
            tokens = one_expert_of(case, last)
            received, arrivals = send(exchange, tokens, case.max_tokens)
            rows = Experts(case, rank(), CPU)(received, arrivals)
            dist.barrier()  # the last rank is dead, and the others are as far as this one
            limit_wait(exchange, 3.0)
            out = torch.zeros(4, case.hidden_size)
            exchange.combine(rows, received, out)
            assert out.isnan().all()
            for _ in range(2):
                with pytest.raises(PeerLostError, match=f"rank {last} — need an") as caught:
                    exchange.check()
                assert caught.value.ranks == (last,)
            with pytest.raises(PeerLostError):
                send(exchange, tokens, case.max_tokens)
            _nothing_waits_any_more(exchange, case, tokens)
            _ranks_go_on(replace(case, size=last))
        dist.barrier()


def one_expert_of(case: Case, owner: int) -> Tokens:
    """Four tokens that go to one expert of a rank."""
    expert = case.spec(0).placement.local_experts(owner)[0]
    return Tokens(
        torch.ones(4, case.hidden_size).bfloat16(),
        torch.ones(4, case.top_k),
        torch.full((4, case.top_k), expert, dtype=torch.int32),
    )


def _nothing_waits_any_more(exchange: SymmetricExchange, case: Case, tokens: Tokens) -> None:
    """Later calls of a graph, which does not ask the host, end at once and return NaN."""
    exchange._lost = None
    limit_wait(exchange, 600.0)
    started = time.monotonic()
    for waits in (False, True):
        received, arrivals = send(exchange, tokens, case.max_tokens, waits=waits)
        assert (Experts(case, rank(), CPU)(received, arrivals) == 0).all()  # no row is routed
        assert not waits or (received.topk_ids == -1).all()
        out = torch.zeros(4, case.hidden_size)
        exchange.combine(torch.ones(case.size * 4, case.hidden_size), received, out)
        assert out.isnan().all()
    assert time.monotonic() - started < 60


def _ranks_go_on(case: Case) -> None:
    """The ranks that are left make a group and an exchange."""
    group = dist.new_group(range(case.size), use_local_synchronization=True)
    exchange = SymmetricExchange(group if case.size > 1 else None, case.spec(rank()), CPU)
    assert run(exchange, case, 2) == 0
    exchange.check()


def a_loss_reaches_every_rank() -> None:
    """The last rank never dispatches. Rank 0 loses patience, the others see its poisoned flags."""
    case = Case(dist.get_world_size(), timeout_s=600.0)
    last = case.size - 1
    with small_schedules():
        exchange = make(case)
        if rank() == 0:
            limit_wait(exchange, 4.0)
        dist.barrier()
        if rank() != last:
            tokens = one_expert_of(case, 0)
            for _ in range(2):  # rank 0's second dispatch ends the others' first wait
                received, _ = send(exchange, tokens, case.max_tokens, waits=True)
                theirs = torch.arange(case.size * case.max_tokens) // case.max_tokens != rank()
                assert (received.topk_ids[theirs] == -1).all()
                combine_is_nan(exchange, case, received)
            with pytest.raises(PeerLostError, match=f"rank {last}"):
                exchange.check()
        dist.barrier()


def limit_wait(exchange: SymmetricExchange, seconds: float) -> None:
    exchange._words[TIMEOUT.value] = int(seconds * TICKS_PER_SECOND[detect_target(CPU).kind])


def two_streams_are_seen() -> None:
    """A second dispatch before combine, as from a second stream: nothing plausible comes out."""
    case = Case(dist.get_world_size())
    with small_schedules():
        exchange = make(case)
        tokens = random_tokens(case, rank(), 3, 4)
        send(exchange, tokens, case.max_tokens)
        with pytest.raises(ValueError, match=r"ExpertParallel.dispatch: order — need dispatch and"):
            send(exchange, tokens, case.max_tokens)
        dist.barrier()  # nothing is in flight: only the order of this rank's calls is wrong
        exchange._is_dispatched = False
        received, _ = send(exchange, tokens, case.max_tokens)
        assert int(exchange._words[0]) == TWO_STREAMS.value
        dist.barrier()
        combine_is_nan(exchange, case, received)
        with pytest.raises(ValueError, match="stream — need calls on one stream"):
            exchange.check()
        dist.barrier()


def combine_is_nan(exchange: SymmetricExchange, case: Case, received: DispatchedTokens) -> None:
    out = torch.zeros(4, case.hidden_size)
    exchange.combine(torch.ones(case.size * 4, case.hidden_size), received, out)
    assert out.isnan().all()


def combine_without_a_wait_is_seen() -> None:
    case = Case(dist.get_world_size())
    with small_schedules():
        exchange = make(case)
        tokens = random_tokens(case, rank(), 3, 4)
        received, _ = send(exchange, tokens, case.max_tokens)
        dist.barrier()  # else the other rank's tokens may arrive while combine reads their ids
        combine_is_nan(exchange, case, received)
        assert int(exchange._words[0]) == NO_WAIT.value
        with pytest.raises(ValueError, match="combine without a wait"):
            exchange.check()
        dist.barrier()


def epochs_beyond_32_bits() -> None:
    case = Case(dist.get_world_size())
    with small_schedules():
        exchange = make(case)
        exchange._words[EPOCHS.value :] = ((1 << 40) - 1) * ONE_EPOCH
        exchange._words[0] = ((1 << 40) - 1) * ONE_EPOCH
        dist.barrier()
        assert run(exchange, case, 2, sorts=(None,)) == 0
        exchange.check()
        dist.barrier()


def closed_exchange_refuses() -> None:
    case = Case(dist.get_world_size())
    exchange = make(case)
    exchange.close()
    exchange.close()
    with pytest.raises(ValueError, match="an open ExpertParallel"):
        send(exchange, random_tokens(case, rank(), 3), case.max_tokens)
    dist.barrier()


# ---- gfx950 code --------------------------------------------------------------------------------


def in_order(scenarios: dict[str, Any]) -> Callable[[str], Callable[[], None]]:
    """A module's ``__getattr__`` for ``NAME__ORDER`` of its scenarios."""

    def emulated(name: str, schedule: str) -> None:
        with emulate(schedule=schedule, seed=rank()):  # type: ignore[arg-type]
            scenarios[name]()

    def find(name: str) -> Callable[[], None]:
        scenario, _, schedule = name.rpartition("__")
        if not scenario or schedule not in ("lowest", "random"):
            raise AttributeError(name)
        return functools.partial(emulated, scenario, schedule)

    return find


__getattr__ = in_order(globals())
