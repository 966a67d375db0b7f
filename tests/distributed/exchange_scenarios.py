"""What ranks do in test_exchange.py; each function runs on all of them at the same time.

The judge is one process with all experts, which runs the tokens of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mxpert
from mxpert import GateUpOrder, MoEWeights, MXTensor, SwiGLU
from mxpert.distributed import DispatchedTokens, ExpertParallel, Placement, Transport, choice
from mxpert.distributed.groups import Ranks
from mxpert.testing.numerics import assert_close_relative, assert_exact, is_exact
from mxpert.testing.problems import MoEShape, random_moe_problem, random_tokens
from support.poison import nan_filled_scratch

SHAPE = MoEShape(64, 32, 10, 3, SwiGLU(), GateUpOrder.INTERLEAVED, True)
"""Ten experts divide by neither 4 nor 3."""

UNEVEN = (3, 0, 7, 1)
"""Tokens of each rank: they differ, and rank 1 has none."""

MAX_TOKENS = 7
FLOAT32 = 1e-6
"""The contract of a float32 wire: float32 sums of a few terms in another order."""

BF16_UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""

TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)


@dataclass(frozen=True)
class Tokens:
    """Arguments of one rank's call."""

    x: torch.Tensor | MXTensor
    weights: torch.Tensor
    ids: torch.Tensor


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def whole_layer(shape: MoEShape = SHAPE) -> MoEWeights:
    """The weights of all experts; the same on every rank."""
    return random_moe_problem(shape, 0).weights


def part_of(weights: MoEWeights, ep: ExpertParallel) -> MoEWeights:
    """The experts of this rank, in the order of their local ids."""
    index = torch.tensor(ep.local_experts)

    def rows(tensor: MXTensor) -> MXTensor:
        return replace(tensor, qdata=tensor.qdata[index], scale=tensor.scale[index])

    return replace(
        weights,
        gate_up_proj=rows(weights.gate_up_proj),
        down_proj=rows(weights.down_proj),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[index],
        down_bias=None if weights.down_bias is None else weights.down_bias[index],
    )


def make(shape: MoEShape = SHAPE, group: Any = None, **changes: Any) -> ExpertParallel:
    options: dict[str, Any] = dict(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        max_tokens=MAX_TOKENS,
        combine_dtype=torch.float32,
        timeout_s=30,
    )
    return ExpertParallel(group, **options | changes)


def tokens(count: int | None = None, *, shape: MoEShape = SHAPE, seed: int = 0) -> Tokens:
    """Random tokens, others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank())
    return Tokens(*random_tokens(shape, UNEVEN[rank()] if count is None else count, generator))


def run(ep: ExpertParallel, weights: MoEWeights, given: Tokens, **options: Any) -> torch.Tensor:
    """This rank's part of the layer."""
    options = dict(activation=SHAPE.activation, out_dtype=torch.float32) | options
    return mxpert.fused_moe(
        given.x, weights, given.weights, given.ids, expert_parallel=ep, **options
    )


def judge(weights: MoEWeights, given: Tokens, **options: Any) -> torch.Tensor:
    """The same tokens with all experts on one rank."""
    options = dict(activation=SHAPE.activation, out_dtype=torch.float32) | options
    ids = given.ids.clone()
    ids[(ids < 0) | (ids >= weights.num_experts)] = -1
    return mxpert.fused_moe(given.x, weights, given.weights, ids, **options)


@dataclass(frozen=True)
class Parts:
    """What a rank's result is the sum of, each computed by itself.

    Args:
        slots: float32 [k, T, H], of each slot.
        ranks: float32 [N, T, H], of each rank.
    """

    slots: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, ep: ExpertParallel, weights: MoEWeights, given: Tokens) -> Parts:
        owners = ep.placement.owners[ep.rank][given.ids.long()]
        slots = torch.arange(given.ids.shape[1]).expand_as(given.ids)

        def alone(places: torch.Tensor, count: int) -> torch.Tensor:
            return torch.stack(
                [
                    judge(weights, replace(given, ids=given.ids.masked_fill(places != each, -1)))
                    for each in range(count)
                ]
            )

        return cls(alone(slots, slots.shape[1]), alone(owners, ep.size))


def check_float32(actual: torch.Tensor, parts: Parts) -> None:
    """A float32 wire: float32 rounding alone."""
    assert_close_relative(actual, parts.slots.sum(0), FLOAT32, "float32 wire")


def check_bf16(actual: torch.Tensor, parts: Parts) -> None:
    """A bfloat16 wire: the row of each slot is rounded, the sum of a rank, and N − 1 more sums.

    N + 1 roundings of relative error u give at most ``((1 + u)^(N + 1) − 1) · Σ |slots|`` for an
    element. FLOAT32 covers the float32 arithmetic of both sides.
    """
    magnitude, roundings = parts.slots.double().abs().sum(0), parts.ranks.shape[0] + 1
    bound = ((1 + BF16_UNIT) ** roundings - 1 + FLOAT32) * magnitude
    error = (actual.double() - parts.slots.double().sum(0)).abs()
    excess = (error - bound).max().item() if error.numel() else 0.0
    assert excess <= 0, f"bf16 wire: error exceeds its bound by {excess:.3e}"


def planted(actual: torch.Tensor, parts: Parts) -> dict[str, torch.Tensor]:
    """Results that imitate real errors of an exchange; each must fail a check."""
    most = parts.ranks.square().sum((1, 2)).argmax()
    nan = actual.clone()
    nan[-1, -1] = torch.nan
    return {
        "tokens exchanged": actual.roll(1, 0),
        "a rank's rows lost": actual - parts.ranks[most],
        "a rank's rows added twice": actual + parts.ranks[most],
        "slot of another token": torch.cat([actual[:1], actual[:1], actual[2:]]),
        "a rank's rows of an earlier call": actual + parts.ranks[most].roll(1, 0),
        "NaN": nan,
    }


@contextlib.contextmanager
def refused(text: str, error: type[Exception] = ValueError) -> Iterator[None]:
    with pytest.raises(error, match=text):
        yield


# ---- results --------------------------------------------------------------------------------


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
    weights, options = whole_layer(), dict(activation_format="mxfp8")
    for transport in TRANSPORTS:
        ep = make(transport=transport, wire_format="mxfp8")
        mine = part_of(weights, ep)
        for rule in (mxpert.ScaleRule.RCEIL, mxpert.ScaleRule.FLOOR):
            given = tokens()
            quantised = replace(given, x=mxpert.quantize(given.x, "mxfp8", scale_rule=rule))
            inside = run(ep, mine, given, scale_rule=rule, **options)
            before = run(ep, mine, quantised, scale_rule=rule, **options)
            assert_exact(before, inside, f"{transport.name}: rows quantised before the wire")
            expected = judge(weights, given, scale_rule=rule, **options)
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


def local_layer(
    dispatched: DispatchedTokens, mine: MoEWeights, *, format: str = "bf16"
) -> torch.Tensor:
    """This rank's experts on the rows that arrived: float32 [R, H]."""
    routed = dispatched.topk_weights, dispatched.topk_ids
    whole = torch.arange(mine.num_experts, dtype=torch.int32)
    slots = torch.nn.functional.pad(whole, (0, SHAPE.top_k), value=-1)  # more ids than experts
    return mxpert.fused_moe(
        dispatched.x,
        mine,
        *routed,
        activation=SHAPE.activation,
        activation_format=format,
        expert_map=slots,
        out_dtype=torch.float32,
    )


# ---- groups, agreement, checks --------------------------------------------------------------


def meshes_and_groups_are_accepted() -> None:
    weights = whole_layer()
    mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("ep",))
    for group in (mesh, mesh.get_group(), dist.group.WORLD):
        ep = make(group=group)
        given = tokens()
        assert (ep.rank, ep.size) == (rank(), size())
        assert ep.transport is Transport.GATHER
        actual = run(ep, part_of(weights, ep), given)
        assert_close_relative(actual, judge(weights, given), FLOAT32, repr(group))
        ep.close()


def one_dimension_of_a_mesh() -> None:
    """Four ranks as 2 × 2: two groups of two, at the same time."""
    weights = whole_layer()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with refused(r'2 dimensions.*; pass one of them, for example mesh\["dp"\]'):
        make(group=mesh)
    for name in ("ep", "dp"):
        ep = make(group=mesh[name])
        assert ep.size == 2
        given = tokens()
        actual = run(ep, part_of(weights, ep), given)
        assert_close_relative(actual, judge(weights, given), FLOAT32, name)
        ep.close()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with refused("a group that this process is in"):
        make(group=pair[1 - rank() // 2])


def ranks_agree_on_the_arguments() -> None:
    other = rank() == 1
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "num_experts": lambda: dict(num_experts=12 if other else 10),
        "top_k": lambda: dict(top_k=2 if other else 3),
        "max_tokens": lambda: dict(max_tokens=8 if other else 7),
        "wire_format": lambda: dict(wire_format="mxfp8" if other else "bf16"),
        "combine_dtype": lambda: dict(combine_dtype=torch.bfloat16 if other else torch.float32),
        "timeout_s": lambda: dict(timeout_s=20.0 if other else 30.0),
        "transport": lambda: dict(transport=TRANSPORTS[other]),
    }
    for name, changes in own.items():
        with refused(rf"ExpertParallel: {name} — need the same on every rank, got .* on rank 0"):
            make(**changes())
    placements = [Placement.contiguous(10, size()).expert_maps for _ in range(2)]
    placements[1] = placements[1].flip(1)
    with refused("placement — need the same on every rank"):
        make(placement=Placement(placements[other].contiguous()))


def an_error_of_one_rank_reaches_all() -> None:
    error, text = (TypeError, "top_k") if rank() == 1 else (ValueError, "rank 1 — .*top_k")
    with refused(text, error):
        make(top_k="two" if rank() == 1 else 3)
    assert make().size == size()  # the group still works


def nothing_is_sent_before_the_checks() -> None:
    weights, given = whole_layer(), tokens(3)
    ep = make()
    mine = part_of(weights, ep)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("something was sent")

    patch = pytest.MonkeyPatch()
    patch.setattr(Ranks, "_run", fail)
    try:
        with refused("x.shape\\[0\\] — need at most max_tokens = 7 tokens a rank, got 8"):
            run(ep, mine, tokens(8))
        with refused("x.shape"):
            run(ep, mine, replace(given, x=given.x[:, :32]))
        with refused("x.dtype", TypeError):
            run(ep, mine, replace(given, x=given.x.float()))
        with refused("topk_ids.shape\\[1\\] — need 3, got 2"):
            run(ep, mine, replace(given, ids=given.ids[:, :2], weights=given.weights[:, :2]))
        with refused("topk_ids.dtype", TypeError):
            run(ep, mine, replace(given, ids=given.ids.short()))
        with refused("topk_weights.shape"):
            run(ep, mine, replace(given, weights=given.weights[:1]))
        with refused("topk_weights.dtype", TypeError):
            run(ep, mine, replace(given, weights=given.weights.double()))
        with refused(f"weights — need the {ep.num_local_experts} experts of rank {ep.rank}"):
            run(ep, weights, given)
        with refused("an MXTensor mxfp8_e4m3; make ExpertParallel with wire_format='mxfp8'"):
            quantised = mxpert.quantize(given.x, "mxfp8")
            run(ep, mine, replace(given, x=quantised), activation_format="mxfp8")
        with refused("expert_map — need None with expert_parallel"):
            run(ep, mine, given, expert_map=ep.expert_map)
        with refused("num_local_tokens — need None"):
            run(ep, mine, given, num_local_tokens=torch.tensor([1], dtype=torch.int32))
        with refused("out.shape"):
            run(ep, mine, given, out=torch.empty(4, SHAPE.hidden_size))
        with refused("out.dtype", TypeError):
            run(ep, mine, given, out=torch.empty(3, SHAPE.hidden_size, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="something was sent"):
            ep.dispatch(given.x, given.weights, given.ids)
    finally:
        patch.undo()
    dist.barrier()
    assert is_exact(ep.expert_map, ep.placement.expert_map(ep.rank))


def explain_names_transport_and_kernel() -> None:
    weights, given = whole_layer(), tokens()
    ep = make(transport=Transport.ALL_TO_ALL)
    text = str(
        mxpert.explain(
            mxpert.fused_moe,
            given.x,
            part_of(weights, ep),
            given.weights,
            given.ids,
            activation=SHAPE.activation,
            expert_parallel=ep,
        )
    )
    assert "backend: reference" in text
    assert "transport: all_to_all (asked for by name)" in text
    assert f"rank {rank()} of {size()}: {ep.num_local_experts} of 10 experts" in text
    ep.close()


def a_transport_that_cannot_run_is_refused_everywhere() -> None:
    """One rank cannot: no rank takes it."""
    patch = pytest.MonkeyPatch()
    reason = "has no peer access" if rank() == 1 else None
    patch.setattr(choice, "unavailable", lambda *_: reason)
    try:
        with refused("SYMMETRIC: has no peer access \\(rank 1\\)", mxpert.UnsupportedError):
            make(transport=Transport.SYMMETRIC)
        ep = make()
        assert ep.transport is Transport.GATHER
        assert "not symmetric: has no peer access (rank 1)" in ep.explain()
        ep.close()
    finally:
        patch.undo()
