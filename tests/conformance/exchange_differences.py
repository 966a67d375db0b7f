"""Ranks of a SYMMETRIC exchange that make other calls, or give up; as in exchange_ranks.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import ScaleRule
from mxpert.core.target import detect_target
from mxpert.device import exchange_wait as wait
from mxpert.distributed import Transport
from mxpert.distributed.exchange import combine, dispatch
from mxpert.moe.local_weights import take_experts
from mxpert.testing.problems import random_moe_problem
from support.exchange import Case, random_tokens, send
from tests.conformance.cases import exchange as cases
from tests.conformance.exchange_planted import planted
from tests.conformance.exchange_ranks import (
    CPU,
    combine_is_nan,
    in_order,
    limit_wait,
    make,
    rank,
    run,
    small_schedules,
)

RCEIL, FLOOR = ScaleRule.RCEIL, ScaleRule.FLOOR
MX_WIRE: dict[str, Any] = dict(shape=cases.FEW, wire="mxfp8", max_tokens=2)


def other_calls_are_named() -> None:
    """Ranks with other slots or another rule: NaN at once, and every rank says in what they differ.

    With as many slots as CTAs take, one rank waits for flags that the other one never sets.
    """
    size = dist.get_world_size()
    for views, rules, said in (
        ((4, 1), (RCEIL, RCEIL), "max_tokens 4 on rank 0, 1 on rank 1"),
        ((4, 4), (RCEIL, FLOOR), "scale_rule RCEIL on rank 0, FLOOR on rank 1"),
    ):
        case = Case(size, hidden_size=4096)
        exchange = make(case)
        bound, rule = views[rank() % 2], rules[rank() % 2]
        tokens = random_tokens(replace(case, max_tokens=1), rank(), 3, 1)
        received = exchange.dispatch(
            tokens.x,
            tokens.weights,
            tokens.ids,
            bound=bound,
            scale_rule=rule,
            out_dtype=torch.float32,
        )
        assert (received.topk_ids == -1).all()
        out = torch.zeros(1, case.hidden_size)
        exchange.combine(torch.ones(size * bound, case.hidden_size), received, out)
        assert out.isnan().all()
        with pytest.raises(ValueError, match=f"calls — need the same call .*{said}"):
            exchange.check()
        dist.barrier()


def layers_in_another_order_are_named() -> None:
    """Two like layers: NaN at once where the last rank calls the second one first."""
    shape = cases.FEW
    weights = random_moe_problem(shape, 0).weights
    last = rank() == dist.get_world_size() - 1
    x = torch.ones(2, shape.hidden_size)
    own = detect_target(CPU).kind == "hip"  # its prepared weights are not the reference's
    for backend in (None,) if own else ("reference", "triton"):
        ep = cases.ExchangeCase(**MX_WIRE).ranks(Transport.SYMMETRIC, dist.group.WORLD, CPU)
        local = take_experts(weights, ep.local_experts)
        router = torch.ones(shape.num_experts, shape.hidden_size)
        options = dict(top_k=shape.top_k, activation=shape.activation, activation_format="mxfp8")
        layers = [mxpert.MoE(local, router, **options, expert_parallel=ep).eval() for _ in range(2)]
        with mxpert.override(backend=backend):
            assert layers[0](x).isfinite().all()
            ep.check()
            dist.barrier()
            assert layers[0 if last else 1](x).isnan().all()
        with pytest.raises(ValueError, match="layer 1 on rank 0, 0 on rank 1"):
            ep.check()
        dist.barrier()


def an_impatient_rank_overwrites_nothing() -> None:
    assert _changed_by_rank_0() == ["arrived", "returned"]


def a_forgotten_loss_is_seen() -> None:
    """Planted: no kernel notes a loss for the next one."""

    def forget(original: Any, *arguments: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        for module in (wait, dispatch, combine):
            stack.enter_context(planted(module, "note_loss", forget))
        changed = _changed_by_rank_0()
    assert {"ids", "rows", "partials"} & set(changed)


def _changed_by_rank_0() -> list[str]:
    """Rank 0 gives up on rank 1, which is late and may still read what rank 0 stored before.

    Returns:
        Sections of rank 1's memory that change after rank 0 has given up, on every rank.
    """
    case, changed = Case(2, wire_format="bf16"), []
    with small_schedules():
        exchange = make(case)
        assert run(exchange, case, 1) == 0
        ids = exchange._sections["ids"]
        dist.barrier()
        if rank() == 0:
            limit_wait(exchange, 0.2)
            for epoch in (1, 2, 3):
                tokens = random_tokens(case, 0, 3 + epoch, case.max_tokens)
                received, _ = send(exchange, tokens, case.max_tokens, waits=True)
                assert (received.topk_ids == -1).all()
                ids.fill_(5)  # a rank that is late writes its own
                assert (received.topk_ids == -1).all()
                if epoch == 1:
                    dist.barrier()  # stored before the loss; rank 1 looks at its memory now
                    dist.barrier()
                combine_is_nan(exchange, case, received)
            dist.barrier()
        else:
            dist.barrier()
            held = {name: part.clone() for name, part in exchange._sections.items()}
            dist.barrier()
            dist.barrier()
            for name, part in exchange._sections.items():
                if not torch.equal(part.view(torch.uint8), held[name].view(torch.uint8)):
                    changed.append(name)
    told = [changed]
    dist.broadcast_object_list(told, src=1)
    return told[0]


__getattr__ = in_order(globals())
