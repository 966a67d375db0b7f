"""mxpert.warm_up(expert_parallel=): every binary of the layer, compiled without the other ranks.

How ranks meet in it is in tests/distributed; here one rank stands for each of them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert.distributed import ExpertParallel, Placement, Transport, symmetric
from mxpert.distributed.transport import ExchangeSpec
from mxpert.formats import Layout
from mxpert.moe import warm_up as module
from mxpert.moe.warm_up import even_routing
from mxpert.testing.problems import MoEShape, random_moe_problem
from tests.integrations.serving.test_warm_up import SHAPES, launched_binaries, unwritten

SLOTS = 300


def parallel(shape: str, transport: Transport, wire: str = "bf16") -> ExpertParallel:
    experts, top_k, hidden, _ = SHAPES[shape]
    return ExpertParallel(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        max_tokens=SLOTS,
        transport=transport,
        wire_format=wire,
        device="cpu",
    )


@pytest.mark.parametrize("max_tokens", [SLOTS, 7])
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("transport", list(Transport)[1:], ids=lambda each: each.name)
def test_no_kernel_is_left_to_compile(transport: Transport, wire: str, max_tokens: int) -> None:
    experts, top_k, hidden, inner = SHAPES["gpt-oss-20b"]
    weights = unwritten(experts, hidden, inner, Layout.HOPPER_FRAGMENT)
    with launched_binaries() as binaries:
        ep = parallel("gpt-oss-20b", transport, wire)
        options: dict[str, Any] = dict(
            activation=mxpert.SiLU(), activation_format="mxfp8", expert_parallel=ep
        )
        with mock.patch.object(module, "run_together") as together:
            counts = mxpert.warm_up(weights, max_tokens, top_k=top_k, **options)
        assert together.call_count == 1
        warm = set(binaries)  # of what each rank does alone
        for num_tokens in (*range(min(34, max_tokens)), *range(34, max_tokens, 13), max_tokens):
            x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
            routing = even_routing(num_tokens, top_k, experts, x.device)
            mxpert.fused_moe(x, weights, *routing, **options)
            assert binaries == warm, f"{num_tokens} tokens launch another binary than {counts}"
    assert (counts[0], counts[-1]) == (0, max_tokens)


def test_another_number_of_slots_may_need_other_kernels() -> None:
    """Why each view is warmed up: received rows follow from the slots."""
    experts, top_k, hidden, inner = SHAPES["gpt-oss-20b"]
    weights = unwritten(experts, hidden, inner, Layout.HOPPER_FRAGMENT)
    with launched_binaries() as binaries:
        ep = parallel("gpt-oss-20b", Transport.SYMMETRIC)
        options: dict[str, Any] = dict(top_k=top_k, activation=mxpert.SiLU())
        mxpert.warm_up(weights, 1, expert_parallel=ep, **options)
        warm = set(binaries)
        mxpert.warm_up(weights, 1, expert_parallel=ep.with_max_tokens(1), **options)
        assert binaries > warm


def test_kernels_are_compiled_without_an_exchange() -> None:
    """The first pass over SYMMETRIC's kernels launches none of them, the second all."""
    pytest.importorskip("triton")
    from mxpert.core.target import on_device
    from support.launches import H200, Recorder

    experts, top_k, hidden, inner = SHAPES["gpt-oss-20b"]
    weights = unwritten(experts, hidden, inner, Layout.HOPPER_FRAGMENT)
    passes: list[bool] = []

    class Passes(Recorder):
        def execute(self, *launch: Any, warmup: bool) -> None:
            passes.append(warmup)

    with on_device(H200, Passes()):
        ep = parallel("gpt-oss-20b", Transport.SYMMETRIC)
        steps: list[tuple[int, ...]] = []
        counts = mxpert.warm_up(
            weights,
            8,
            top_k=top_k,
            activation=mxpert.SiLU(),
            expert_parallel=ep,
            progress=lambda *step: steps.append(step),
        )
    half = len(passes) // 2
    assert passes == [True] * half + [False] * half
    assert half > 4 * len(counts)
    total = 2 * len(counts)
    wanted = [*counts, *counts, counts[-1]]
    assert steps == [(done, total, count) for done, count in enumerate(wanted)]


def test_compile_only_compiles_and_launches_nothing() -> None:
    """On the mock driver: the launch after the block finds the binary that the block compiled."""
    pytest.importorskip("triton")
    from mxpert.core.compilation import compile_only
    from mxpert.distributed.exchange import host
    from support.launches import H200, without_device

    placement = Placement.contiguous(3, 1)
    spec = ExchangeSpec("", 0, placement, 3, 96, 5, "bf16", torch.bfloat16, 1.0)
    launch = host.combine_launch(host.Rank(symmetric.layout_of(spec), 0, 3, H200, 128), 5, 5)
    rows, words = torch.zeros(5, 96, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int64)
    tensors = dict.fromkeys(("out", "rows", "partials"), rows)
    tensors |= dict.fromkeys(("state", "table", "returned", "destinations"), words)
    tensors["topk_ids"] = torch.zeros(5, 3, dtype=torch.int32)
    caches = launch.kernel.device_caches
    with without_device() as launched:
        caches.clear()
        with compile_only():
            launch(**tensors)
        assert not launched
        assert [len(cache[0]) for cache in caches.values()] == [1]
        launch(**tensors)
        assert len(launched) == 1
        assert [len(cache[0]) for cache in caches.values()] == [1]


def test_a_layer_is_replayed_after_warm_up() -> None:
    """Compiling without a launch leaves the host's fast path as the first call would."""
    pytest.importorskip("triton")
    from mxpert.core.target import on_device
    from support.launches import H200, without_device
    from support.replays import watched_replays

    shape = MoEShape(256, 128, 8, 2, mxpert.SiLU(), mxpert.GateUpOrder.CONCATENATED, True)
    options: dict[str, Any] = dict(activation=shape.activation, activation_format="mxfp8")
    with without_device() as launched, on_device(H200):
        ep = ExpertParallel(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden_size,
            max_tokens=8,
            transport=Transport.SYMMETRIC,
            wire_format="mxfp8",
            device="cpu",
        )
        given = random_moe_problem(shape, 4, device=torch.device("cpu"))
        weights = given.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
        for _ in range(2):
            launched.clear()
            counts = mxpert.warm_up(weights, 4, top_k=2, **options, expert_parallel=ep)
            assert counts == (0, 1, 2, 4)
        kernels = len(launched) // len(counts)
        assert len(launched) == kernels * len(counts)
        assert kernels > 2
        launched.clear()
        with watched_replays() as seen:
            routed = given.x, weights, given.topk_weights, given.topk_ids
            mxpert.fused_moe(*routed, **options, expert_parallel=ep)
        assert len(launched) == kernels
        assert len(seen) == 1
