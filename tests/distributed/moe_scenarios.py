"""What ranks do with mxpert.MoE; each function runs on all of them at the same time.

The judge is the module with all experts in this process, which gets the same tokens.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import MoEWeights, Scoring
from mxpert.core.problem import TopKOptions
from mxpert.distributed import ExpertParallel, Placement, Transport
from mxpert.modules import PreparedExperts
from mxpert.testing.numerics import assert_close_relative, assert_exact, is_exact
from mxpert.training import full_state_dict, local_expert_parameters
from tests.distributed.ranked_layer import (
    FLOAT32,
    MAX_TOKENS,
    SHAPE,
    TRANSPORTS,
    UNEVEN,
    make,
    part_of,
    rank,
    refused,
    size,
    whole_layer,
)

E, H = SHAPE.num_experts, SHAPE.hidden_size
ROUTINGS = ({}, {"routing": TopKOptions(scoring=Scoring.SIGMOID, routed_scaling_factor=2.5)})


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(weights: MoEWeights, ep: ExpertParallel | None, **options: Any) -> mxpert.MoE:
    """The same layer on every rank: biased router, and a correction bias."""
    given: dict[str, Any] = dict(
        top_k=SHAPE.top_k,
        activation=SHAPE.activation,
        router_bias=drawn(E, seed=2),
        correction_bias=drawn(E, seed=3) / 10,
        expert_parallel=ep,
    )
    return mxpert.MoE(weights, drawn(E, H, seed=1), **given | options).eval()


def tokens() -> torch.Tensor:
    """Float32 [1, T, H] of this rank; T differs, and rank 1 has none."""
    return drawn(1, UNEVEN[rank()], H, seed=10 + rank())


def equals_one_rank() -> None:
    weights, x = whole_layer(), tokens()
    for routing in ROUTINGS:
        wanted = module(weights, None, **routing)(x)
        for transport in TRANSPORTS:
            ep = make(transport=transport)
            for given in (weights, weights.prepare(device="cpu"), part_of(weights, ep)):
                moe = module(given, ep, **routing)
                assert moe.experts.weights.num_experts == ep.num_local_experts
                found = moe(x)
                assert found.shape == x.shape
                assert_close_relative(found, wanted, FLOAT32, transport.name)
            wrong = module(flipped(weights), ep, **routing)(x)
            if x.numel():
                with pytest.raises(AssertionError):
                    assert_close_relative(wrong, wanted, FLOAT32, "planted")


def flipped(weights: MoEWeights) -> MoEWeights:
    """A layer whose outputs have other places."""
    down = weights.down_proj
    return replace(
        weights, down_proj=replace(down, qdata=down.qdata.flip(1), scale=down.scale.flip(1))
    )


def any_placement_and_wire() -> None:
    """Experts in turn, the first one on every rank; MXFP8 rows give the same bits."""
    maps = torch.full((size(), E), -1, dtype=torch.int32)
    for owner in range(size()):
        held = sorted({0, *range(owner, E, size())})
        maps[owner, held] = torch.arange(len(held), dtype=torch.int32)
    weights, x = whole_layer(), tokens().bfloat16()
    for wire in ("bf16", "mxfp8"):
        ep = make(placement=Placement(maps), wire_format=wire)
        moe = module(weights, ep, activation_format="mxfp8")
        wanted = module(weights, None, activation_format="mxfp8")(x)
        assert_close_relative(moe(x), wanted, 2.0**-8, wire)  # bf16 results, rounded once


def states_are_local_and_load_whole() -> None:
    weights = whole_layer()
    whole = module(weights, None)
    ep = make()
    moe, index = module(weights, ep), list(ep.local_experts)
    state = whole.state_dict()
    own = moe.state_dict()
    assert own.keys() == state.keys()
    for name, value in own.items():
        assert is_exact(value, state[name][index] if "experts." in name else state[name]), name
    for loaded in (state, own):
        other = module(flipped(weights), ep)
        assert not any(other.load_state_dict(loaded))
        assert_exact(other(tokens()), moe(tokens()), "loaded")
    gathered = full_state_dict(moe, ep)
    assert gathered.keys() == state.keys()
    assert all(is_exact(value, state[name]) for name, value in gathered.items())
    assert not any(whole.load_state_dict(gathered))
    cut = {name: value[:1] if "experts." in name else value for name, value in own.items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        moe.load_state_dict(cut)
    assert not local_expert_parameters(moe)  # nothing here trains


def copies_compiled_and_shown() -> None:
    weights, ep, x = whole_layer(), make(), tokens()
    moe = module(weights, ep)
    wanted = moe(x)
    again = copy.deepcopy(moe)
    assert again.experts.expert_parallel is ep
    assert_exact(again(x), wanted, "a copy")
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert_exact(compiled(x), wanted, "compiled")
    assert f"ExpertParallel(rank {rank()} of {size()}" in repr(moe)
    assert f"num_experts={ep.num_local_experts}" in repr(moe)
    fewer = module(weights, ep.with_max_tokens(5))
    assert_exact(fewer(x[:, :5]), moe(x[:, :5]), "fewer slots")


def nothing_is_sent_before_the_checks() -> None:
    weights, ep = whole_layer(), make()
    moe = module(weights, ep)
    with refused(f"at most max_tokens = {MAX_TOKENS} tokens a rank, got {MAX_TOKENS + 1}"):
        moe(torch.zeros(MAX_TOKENS + 1, H))
    with refused(r"x.shape — need \[..., 64\]"):
        moe(torch.zeros(1, 32))
    moe.experts.activation_format = "mxfp4"
    moe(tokens())  # a bf16 wire serves every format
    narrow = make(wire_format="mxfp8")
    with refused("activation_format — need 'mxfp8' with wire_format='mxfp8', got 'bf16'"):
        module(weights, narrow)
    late = module(weights, narrow, activation_format="mxfp8")
    late.experts.activation_format = "bf16"
    with refused("activation_format"):
        late(tokens())
    for given, text in (
        (make(top_k=2), "MoE: top_k — need 2, got 3"),
        (make(hidden_size=32), "weights.hidden_size — need 32, as expert_parallel has, got 64"),
        (make(num_experts=12), "weights.num_experts — need the .* experts of rank .*, or all 12"),
    ):
        with refused(text):
            module(weights, given)
    with refused("expert_parallel — need ExpertParallel, got 'ep'", TypeError):
        module(weights, "ep")  # type: ignore[arg-type]
    with refused("weights.num_experts — need .*, as expert_parallel has, got 10"):
        PreparedExperts(weights, SHAPE.activation, expert_parallel=ep)
    maps = torch.arange(E, dtype=torch.int32).flip(0).expand(size(), -1).contiguous()
    with refused("placement — need ascending experts on a rank that has all of them"):
        module(weights, make(placement=Placement(maps), transport=Transport.GATHER))
    flags = [None] * size()
    dist.all_gather_object(flags, "in step")  # nobody waits in an exchange
    assert_exact(moe(tokens()), moe(tokens()), "the exchange is clean")
