"""make_routing_plan on the reference backend: the sorting contract, its edge cases, its errors."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import mxpert
from mxpert.routing.plan import RoutingPlan
from support.routing import CONTRACT_EXPERTS, random_topk_ids, validate_routing_plan


def routing(num_tokens: int, top_k: int, num_experts: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = random_topk_ids(num_tokens, top_k, num_experts, generator=generator)
    return ids, torch.rand(num_tokens, top_k, generator=generator)


def loop_plan(ids: list[list[int]], experts: int, unit: int, capacity: int) -> tuple[list, ...]:
    """The contract, literally, in Python loops: sorted ids, block experts, slot rows."""
    top_k = len(ids[0])
    padding = top_k << 24 | len(ids)
    rows: list[int] = []
    blocks: list[int] = []
    slot_rows = [[-1] * top_k for _ in ids]
    for expert in range(experts):
        for token, chosen in enumerate(ids):
            for slot, choice in enumerate(chosen):
                if choice == expert:
                    slot_rows[token][slot] = len(rows)
                    rows.append(slot << 24 | token)
        while len(rows) % unit:
            rows.append(padding)
        blocks += [expert] * (len(rows) // unit - len(blocks))
    used = len(rows)
    return (
        rows + [padding] * (capacity - used),
        blocks + [-1] * (capacity // unit - len(blocks)),
        slot_rows,
        [used, len(ids)],
    )


@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, unit",
    [(1, 1, 1, 1), (5, 2, 3, 4), (17, 4, 9, 8), (33, 6, 20, 16)],
)
def test_matches_the_contract_written_as_loops(num_tokens, top_k, num_experts, unit):
    ids, weights = routing(num_tokens, top_k, num_experts)
    plan = mxpert.make_routing_plan(weights, ids, num_experts=num_experts, routing_block_m=unit)
    want = loop_plan(ids.tolist(), num_experts, unit, plan.capacity)
    have = (plan.sorted_token_ids, plan.block_expert_ids, plan.slot_rows, plan.num_valid)
    assert tuple(tensor.tolist() for tensor in have) == want
    rows = plan.slot_rows.long()
    assert torch.equal(plan.sorted_weights[rows], weights)
    assert plan.sorted_weights.count_nonzero() == rows.numel()


@pytest.mark.parametrize("num_experts, top_k", CONTRACT_EXPERTS)
def test_contract_sizes(num_experts, top_k):
    for num_tokens, unit in ((1, 16), (3, 64), (128, 16), (2000, 128)):
        ids, weights = routing(num_tokens, top_k, num_experts, seed=num_tokens)
        plan = mxpert.make_routing_plan(weights, ids, num_experts=num_experts, routing_block_m=unit)
        assert plan.capacity == -(-(num_tokens * top_k + num_experts * unit - top_k) // unit) * unit
        validate_routing_plan(plan, weights, ids, num_experts=num_experts)


@st.composite
def plan_inputs(draw):
    num_tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 6))
    num_experts = draw(st.integers(top_k, 12))
    local = draw(st.integers(1, 12))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    extremes = [-(1 << 31), (1 << 31) - 1]
    if dtype is torch.int64:  # some of them have the low 32 bits of a valid id
        extremes += [1 << 32, (1 << 32) + num_experts - 1, 1 - (1 << 32), -(1 << 63), (1 << 63) - 1]
    expert = st.integers(-3, num_experts + 3) | st.sampled_from(extremes)
    ids = draw(
        st.lists(
            st.lists(expert, min_size=top_k, max_size=top_k),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    entry = st.integers(-2, local + 2)
    expert_map = draw(st.none() | st.lists(entry, min_size=num_experts, max_size=num_experts))
    local_tokens = draw(st.none() | st.integers(-2, num_tokens + 2))
    return (
        torch.tensor(ids, dtype=dtype).view(num_tokens, top_k),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        num_experts,
        local,
        draw(st.sampled_from([1, 2, 3, 8, 16])),
        expert_map,
        local_tokens,
    )


@settings(max_examples=150, deadline=None)
@given(plan_inputs())
def test_invariants_hold_for_any_ids(inputs):
    """Foreign, negative, huge, repeated ids; any map; any number of local tokens; any dtypes."""
    ids, dtype, num_experts, local, unit, entries, local_tokens = inputs
    weights = torch.rand(ids.shape).to(dtype)
    expert_map = None if entries is None else torch.tensor(entries, dtype=torch.int32)
    plan = mxpert.make_routing_plan(
        weights,
        ids,
        num_experts=num_experts,
        routing_block_m=unit,
        expert_map=expert_map,
        num_local_experts=local,
        num_local_tokens=None
        if local_tokens is None
        else torch.tensor([local_tokens], dtype=torch.int32),
    )
    validate_routing_plan(
        plan,
        weights.float(),
        ids,
        num_experts=num_experts,
        expert_map=expert_map,
        num_local_tokens=local_tokens,
    )


def test_weights_are_copied_bit_for_bit():
    weights = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    plan = mxpert.make_routing_plan(weights, ids, num_experts=2, routing_block_m=2)
    have = plan.sorted_weights[plan.slot_rows.long()].view(torch.int32)
    assert torch.equal(have, weights.view(torch.int32))


def broken_plans():
    """A valid plan with one planted error each."""
    ids, weights = routing(9, 2, 4)
    plan = mxpert.make_routing_plan(weights, ids, num_experts=4, routing_block_m=4)
    row = int(plan.slot_rows[0, 0])
    padding_row = int((plan.sorted_token_ids >> 24 == 2).nonzero()[0])
    last_block = int(plan.num_valid[0]) // 4 - 1
    pair = next(
        row
        for row in range(plan.capacity - 1)
        if (plan.sorted_token_ids[row : row + 2] >> 24 < 2).all()
    )
    edits = {
        "weight": ("sorted_weights", row, weights[0, 0] + 2.0**-20),
        "padding-weight": ("sorted_weights", padding_row, 1.0),
        "padding-code": ("sorted_token_ids", padding_row, 2 << 24 | 8),
        "row-twice": ("sorted_token_ids", pair + 1, plan.sorted_token_ids[pair]),
        "row-lost": ("sorted_token_ids", row, 2 << 24 | 9),
        "block-expert": ("block_expert_ids", last_block, 0),
        "unused-block": ("block_expert_ids", last_block + 1, 3),
        "slot-row": ("slot_rows", 0, row + 1),
        "slot-row-lost": ("slot_rows", 1, -1),
        "num-valid-rows": ("num_valid", 0, plan.num_valid[0] + 4),
        "num-valid-tokens": ("num_valid", 1, 8),
    }
    for name, (field, place, value) in edits.items():
        tensors = {
            f: getattr(plan, f).clone()
            for f in (
                "sorted_token_ids",
                "sorted_weights",
                "block_expert_ids",
                "num_valid",
                "slot_rows",
            )
        }
        tensors[field].view(-1)[place] = value
        yield pytest.param(
            RoutingPlan(**tensors, num_tokens=9, top_k=2, num_experts=4, routing_block_m=4),
            ids,
            weights,
            id=name,
        )


@pytest.mark.parametrize("plan, ids, weights", list(broken_plans()))
def test_validator_catches_planted_errors(plan, ids, weights):
    with pytest.raises(ValueError, match="validate_routing_plan: plan"):
        validate_routing_plan(plan, weights, ids, num_experts=4)


IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
WIDE = torch.zeros(1, 128, dtype=torch.int32)
BAD = {
    "ids-dtype": (IDS.short(), WEIGHTS, {}, TypeError, r"need int32 or int64, got int16"),
    "ids-type": ([[0]], WEIGHTS, {}, TypeError, r"topk_ids — need a torch.Tensor, got list"),
    "ids-shape": (IDS[0], WEIGHTS, {}, ValueError, r"topk_ids.shape — need \[\*, \*\], got \[2\]"),
    "weights-dtype": (IDS, WEIGHTS.double(), {}, TypeError, r"topk_weights.dtype — need float32"),
    "weights-shape": (
        IDS,
        WEIGHTS[:3],
        {},
        ValueError,
        r"topk_weights.shape — need \[4, 2\], got \[3, 2\]",
    ),
    "weights-device": (IDS, WEIGHTS.to("meta"), {}, ValueError, r"topk_weights.device — need cpu"),
    "top-k-over-experts": (
        IDS,
        WEIGHTS,
        {"num_experts": 1},
        ValueError,
        r"topk_ids.shape\[1\] — need 1 … 1",
    ),
    "top-k-over-127": (WIDE, WIDE.float(), {"num_experts": 256}, ValueError, r"need 1 … 127"),
    "no-slots": (IDS[:, :0], WEIGHTS[:, :0], {}, ValueError, r"topk_ids.shape\[1\] — need 1"),
    "block-zero": (IDS, WEIGHTS, {"routing_block_m": 0}, ValueError, r"routing_block_m — need 1"),
    "block-type": (IDS, WEIGHTS, {"routing_block_m": 16.0}, TypeError, r"routing_block_m — need a"),
    "too-many-padded-rows": (
        IDS,
        WEIGHTS,
        {"routing_block_m": 1 << 28},
        ValueError,
        r"routing_block_m — need at most 1073741824 padded rows",
    ),
    "experts-zero": (IDS, WEIGHTS, {"num_experts": 0}, ValueError, r"num_experts — need 1 …"),
    "local-experts": (IDS, WEIGHTS, {"num_local_experts": -1}, ValueError, r"num_local_experts —"),
    "map-dtype": (IDS, WEIGHTS, {"expert_map": torch.zeros(8)}, TypeError, r"expert_map.dtype —"),
    "map-shape": (
        IDS,
        WEIGHTS,
        {"expert_map": torch.zeros(7, dtype=torch.int32)},
        ValueError,
        r"expert_map.shape — need \[8\], got \[7\]",
    ),
    "local-tokens": (
        IDS,
        WEIGHTS,
        {"num_local_tokens": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        r"num_local_tokens.shape — need \[1\]",
    ),
    "rows-over-2-to-24": (
        IDS[:1].expand(1 << 23, 2),
        WEIGHTS[:1].expand(1 << 23, 2),
        {},
        ValueError,
        r"fewer than 16777216 routed rows .*got 16777216; split",
    ),
}


@pytest.mark.parametrize("ids, weights, changes, error, match", BAD.values(), ids=BAD)
def test_bad_arguments_are_named(ids, weights, changes, error, match):
    arguments = {"num_experts": 8, "routing_block_m": 16} | changes
    with pytest.raises(error, match=r"^make_routing_plan: .*" + match):
        mxpert.make_routing_plan(weights, ids, **arguments)
