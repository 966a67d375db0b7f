"""What a transport promises beside results; each function runs on all ranks at the same time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mxpert.distributed import Transport
from mxpert.testing.numerics import assert_close_relative, assert_exact
from tests.distributed.ranked_layer import (
    FLOAT32,
    SHAPE,
    TRANSPORTS,
    judge,
    local_layer,
    make,
    part_of,
    refused,
    run,
    tokens,
    whole_layer,
)


def a_row_travels_once_to_a_rank() -> None:
    weights = whole_layer()
    ep = make(transport=Transport.ALL_TO_ALL)
    given = tokens()
    dispatched = ep.dispatch(given.x, given.weights, given.ids)
    everyone: list[Any] = [None] * ep.size
    dist.all_gather_object(everyone, (given.x, given.ids))
    wanted = [
        row
        for source, (x, ids) in enumerate(everyone)
        for row, chosen in zip(x, ids, strict=True)
        if (ep.placement.owners[source][chosen.long()] == ep.rank).any()
    ]
    expected = torch.stack(wanted) if wanted else given.x[:0]
    assert isinstance(dispatched.x, torch.Tensor)
    assert_exact(dispatched.x, expected, "rows that arrive, by source and token")
    assert ((dispatched.topk_ids >= 0).sum(1) >= 1).all()
    rows = torch.zeros(dispatched.x.shape)
    assert not ep.combine(rows, dispatched).any()
    assert part_of(weights, ep).num_experts == ep.num_local_experts
    ep.close()


def fewer_slots_for_one_call() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        view = ep.with_max_tokens(3)
        mine, given = part_of(weights, ep), tokens(3)
        if transport is Transport.GATHER:
            sent = view.dispatch(given.x, given.weights, given.ids)
            assert sent.topk_ids.shape == (3 * ep.size, SHAPE.top_k)
            view.combine(torch.zeros(3 * ep.size, SHAPE.hidden_size), sent)
        for each in (ep, view, ep):
            actual = run(each, mine, given)
            assert_close_relative(actual, judge(weights, given), FLOAT32, repr(each))
        with refused("at most max_tokens = 3 tokens a rank, got 4"):
            run(view, mine, tokens(4))
        ep.close()


def two_objects_overlap() -> None:
    """Two micro-batches: both are sent before either returns."""
    weights = whole_layer()
    for transport in TRANSPORTS:
        first, second = make(transport=transport), make(transport=transport)
        batches = [tokens(seed=seed) for seed in (1, 2)]
        mine = part_of(weights, first)
        sent = [
            ep.dispatch(each.x, each.weights, each.ids, out_dtype=torch.float32)
            for ep, each in zip((first, second), batches, strict=True)
        ]
        rows = [local_layer(each, mine) for each in sent]
        results = [
            ep.combine(each, way)
            for ep, each, way in zip((second, first), rows[::-1], sent[::-1], strict=True)
        ][::-1]
        for actual, each in zip(results, batches, strict=True):
            assert_close_relative(actual, judge(weights, each), FLOAT32, transport.name)
        first.close()
        second.close()
