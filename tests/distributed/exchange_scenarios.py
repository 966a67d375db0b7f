"""Results of a layer over several ranks; each function runs on all of them at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import MXTensor
from mxpert.distributed import Placement, Transport
from mxpert.testing.numerics import assert_close_relative, assert_exact
from support.poison import nan_filled_scratch
from tests.distributed.ranked_layer import (
    FLOAT32,
    MAX_TOKENS,
    SHAPE,
    TRANSPORTS,
    UNEVEN,
    Parts,
    check_bf16,
    check_float32,
    judge,
    local_layer,
    make,
    part_of,
    planted,
    rank,
    refused,
    run,
    size,
    tokens,
    whole_layer,
)


def equals_one_rank_with_a_float32_wire() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        mine = part_of(weights, ep)
        for seed in range(3):
            given = tokens(seed=seed)
            parts = Parts.of(ep, weights, given)
            actual = run(ep, mine, given)
            check_float32(actual, parts)
            check_float32(judge(weights, given), parts)
        ep.close()


def equals_one_rank_with_a_bf16_wire() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport, combine_dtype=torch.bfloat16)
        mine = part_of(weights, ep)
        for seed in range(3):
            given = tokens(seed=seed)
            check_bf16(run(ep, mine, given), Parts.of(ep, weights, given))
        ep.close()


def both_checks_see_planted_errors() -> None:
    weights, given = whole_layer(), tokens(5)
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        parts = Parts.of(ep, weights, given)
        actual = run(ep, part_of(weights, ep), given)
        for check in (check_float32, check_bf16):
            check(actual, parts)
            for name, wrong in planted(actual, parts).items():
                try:
                    check(wrong, parts)
                except AssertionError:
                    continue
                raise RuntimeError(f"{check.__name__} does not see: {name}")
        ep.close()


def routings_that_are_special() -> None:
    weights, count = whole_layer(), 5
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        mine, last = part_of(weights, ep), ep.size - 1
        theirs = ep.placement.local_experts(last)[:2]
        plain = tokens(count)
        wide = plain.ids.long()
        wide[0, 0], wide[1, 1], wide[2, 2] = (1 << 32) + 1, -(1 << 32) + 1, SHAPE.num_experts
        cases = {
            "all tokens to one rank": torch.tensor([*theirs, -1]).expand(count, 3).int(),
            "no local expert": torch.where(
                ep.placement.owners[ep.rank][plain.ids.long()] == ep.rank, -1, plain.ids
            ),
            "no expert at all": torch.full_like(plain.ids, -1),
            "foreign ids beyond int32": wide,
            "largest ids": torch.full_like(plain.ids, torch.iinfo(torch.int32).max),
            "strided ids": plain.ids.repeat_interleave(2, 1)[:, ::2],
        }
        for name, ids in cases.items():
            given = replace(plain, ids=ids)
            actual, expected = run(ep, mine, given), judge(weights, given)
            assert_close_relative(actual, expected, FLOAT32, f"{transport.name}: {name}")
        for dtype in (torch.bfloat16, torch.float16):
            given = replace(plain, weights=plain.weights.to(dtype))
            actual, expected = run(ep, mine, given), judge(weights, given)
            assert_close_relative(actual, expected, FLOAT32, f"{transport.name}: {dtype}")
        ep.close()


def one_expert_for_each_token_and_few_experts() -> None:
    """top_k = 1, and top_k larger than the number of a rank's experts."""
    for experts, top_k in ((10, 1), (size(), 2)):
        shape = replace(SHAPE, num_experts=experts, top_k=top_k)
        weights = whole_layer(shape)
        for transport in TRANSPORTS:
            ep = make(shape, transport=transport)
            given = tokens(shape=shape)
            actual, expected = run(ep, part_of(weights, ep), given), judge(weights, given)
            assert_close_relative(actual, expected, FLOAT32, f"{transport.name}, k = {top_k}")
            ep.close()


def only_one_rank_has_tokens() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        for busy in range(ep.size):
            given = tokens(6 if rank() == busy else 0)
            actual = run(ep, part_of(weights, ep), given)
            assert_close_relative(actual, judge(weights, given), FLOAT32, transport.name)
        given = tokens(0)
        assert run(ep, part_of(weights, ep), given).shape == (0, SHAPE.hidden_size)
        ep.close()


def redundant_experts_are_computed_once() -> None:
    """Experts 0 and 1 lie on every rank, the others in descending order of ranks."""
    weights, ranks = whole_layer(), size()
    maps = torch.full((ranks, SHAPE.num_experts), -1, dtype=torch.int32)
    maps[:, 0], maps[:, 1] = 1, 0
    for expert in range(2, SHAPE.num_experts):
        owner = ranks - 1 - expert % ranks
        maps[owner, expert] = maps[owner].max() + 1
    placement = Placement(maps)
    for transport in TRANSPORTS:
        ep = make(transport=transport, placement=placement)
        mine, given = part_of(weights, ep), tokens()
        check_float32(run(ep, mine, given), Parts.of(ep, weights, given))
        ep.close()


def every_copy_at_once_is_seen() -> None:
    """A transport that ignores which copy a rank sends to fails the check."""
    weights = whole_layer()
    maps = torch.arange(SHAPE.num_experts, dtype=torch.int32).expand(size(), -1).contiguous()

    class EveryCopy(Placement):
        def received_ids(self, rank: int) -> torch.Tensor:
            return torch.nn.functional.pad(self.expert_maps, (1, 1), value=-1)

    ep = make(transport=Transport.GATHER, placement=EveryCopy(maps))
    given = tokens(5)
    with pytest.raises(AssertionError):
        check_float32(run(ep, part_of(weights, ep), given), Parts.of(ep, weights, given))
    ep.close()


def mxfp8_rows_give_the_same_bits() -> None:
    """Quantised before the wire or inside; within float32 rounding of one rank."""
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport, wire_format="mxfp8")
        mine = part_of(weights, ep)
        for rule in (mxpert.ScaleRule.RCEIL, mxpert.ScaleRule.FLOOR):
            for on_input in (False, True):
                options: dict[str, Any] = dict(activation_format="mxfp8", scale_rule=rule)
                options["apply_router_weight_on_input"] = on_input
                given = tokens()
                quantised = replace(given, x=mxpert.quantize(given.x, "mxfp8", scale_rule=rule))
                inside = run(ep, mine, given, **options)
                before = run(ep, mine, quantised, **options)
                assert_exact(before, inside, f"{transport.name}: rows quantised before the wire")
                expected = judge(weights, given, **options)
                assert_close_relative(inside, expected, FLOAT32, transport.name)
        ep.close()


def bf16_wire_serves_every_activation_format() -> None:
    weights = whole_layer()
    ep = make(transport=Transport.GATHER)
    for name in ("mxfp8", "mxfp4", "fp8_token"):
        given = tokens()
        actual = run(ep, part_of(weights, ep), given, activation_format=name)
        expected = judge(weights, given, activation_format=name)
        assert_close_relative(actual, expected, FLOAT32, name)
    ep.close()


def options_of_the_layer_hold() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        mine, given = part_of(weights, ep), tokens()
        on_input = dict(apply_router_weight_on_input=True)
        actual, expected = run(ep, mine, given, **on_input), judge(weights, given, **on_input)
        assert_close_relative(actual, expected, FLOAT32, "apply_router_weight_on_input")
        out = torch.full((given.ids.shape[0], SHAPE.hidden_size), torch.nan)
        plain = run(ep, mine, given)
        assert run(ep, mine, given, out=out) is out
        assert_exact(out, plain, "out=")
        into_x = given.x.clone()
        rounded = run(ep, mine, given, out_dtype=torch.bfloat16)
        run(ep, mine, replace(given, x=into_x), out=into_x, out_dtype=torch.bfloat16)
        assert_exact(into_x, rounded, "out=x")
        assert_exact(rounded, plain.bfloat16(), "out_dtype")
        ep.close()


# ---- determinism, slots, objects ------------------------------------------------------------


def repeats_give_the_same_bits() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        for combine_dtype in (torch.float32, torch.bfloat16):
            ep = make(transport=transport, combine_dtype=combine_dtype)
            mine, given = part_of(weights, ep), tokens()
            first = run(ep, mine, given)
            for _ in range(3):
                run(ep, mine, tokens(seed=9))
                assert_exact(run(ep, mine, given), first, f"{transport.name} {combine_dtype}")
            ep.close()


def unused_slots_never_reach_a_result() -> None:
    """Buffers start as NaN; the slots that no token uses still hold NaN when they arrive."""
    weights = whole_layer()
    for wire, format in (("bf16", "bf16"), ("mxfp8", "mxfp8")):
        ep = make(transport=Transport.GATHER, wire_format=wire)
        mine, given = part_of(weights, ep), tokens()
        clean = run(ep, mine, given, activation_format=format)
        with nan_filled_scratch():
            poisoned = run(ep, mine, given, activation_format=format)
            dispatched = ep.dispatch(given.x, given.weights, given.ids)
        assert_exact(poisoned, clean, f"{wire} with poisoned slots")
        rows = dispatched.x
        values = rows.dequantize() if isinstance(rows, MXTensor) else rows
        used = torch.arange(MAX_TOKENS) < torch.tensor(UNEVEN[: ep.size])[:, None]
        assert values[~used.flatten()].isnan().all(), "the slots were not poisoned"
        assert values[used.flatten()].isfinite().all()
        assert (dispatched.topk_ids[~used.flatten()] == -1).all()
        ep.close()
    ep = make(transport=Transport.ALL_TO_ALL)
    mine, given = part_of(weights, ep), tokens()
    clean = run(ep, mine, given)
    with nan_filled_scratch():
        assert_exact(run(ep, mine, given), clean, "ALL_TO_ALL with poisoned memory")
    ep.close()


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
