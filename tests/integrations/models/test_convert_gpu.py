"""Converted models on a GPU: the same numbers, no sync, memory of one layer, mixed devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mxpert.formats.tensor import Layout
from mxpert.integrations.models.convert import convert, mx_experts
from mxpert.testing.numerics import cosine
from tests.integrations.families import (
    FAMILIES,
    NEW_TOKENS,
    PROMPT,
    build,
    greedy,
    oracle_of,
    taught_pairs,
)
from tests.integrations.models.test_convert_families import capture

pytestmark = pytest.mark.gpu
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def taught(sequence: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    """On the GPU; the model is converted on its way there."""
    pairs = taught_pairs(sequence, device="cuda")
    return {family: (oracle.to("cuda"), model) for family, (oracle, model) in pairs.items()}


@EVERY_FAMILY
def test_logits_and_greedy_tokens(family, taught, sequence) -> None:
    oracle, model = taught[family]
    ids = sequence.to("cuda")
    with torch.no_grad():
        assert cosine(model(ids[None]).logits, oracle(ids[None]).logits) >= 0.9999
    expected = greedy(oracle, ids)
    assert torch.equal(expected.cpu(), sequence), "the head was not taught: margins are unknown"
    assert torch.equal(greedy(model, ids), expected)


@EVERY_FAMILY
def test_bfloat16_layers(family, sequence) -> None:
    model = build(family, dtype=torch.bfloat16).to("cuda")
    calls = capture(oracle_of(model), sequence.to("cuda"))
    for experts, (arguments, expected) in zip(
        mx_experts(convert(model, progress=False)), calls, strict=True
    ):
        assert cosine(experts(*arguments), expected) >= 0.9999


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_static_cache_generation_in_cuda_graphs(family, taught, sequence) -> None:
    """generate() compiles the decode step itself where the cache is static, and replays a graph
    for each token."""
    _, model = taught[family]
    torch._dynamo.reset()
    ids, options = sequence.to("cuda"), {"cache_implementation": "static"}
    expected = greedy(model, ids)
    for _ in range(3):  # compiles, captures, replays
        assert torch.equal(greedy(model, ids, **options), expected)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        greedy(model, ids, **options)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) >= NEW_TOKENS - 1


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY_FAMILY
def test_experts_do_not_synchronise(family, taught, sequence) -> None:
    oracle, model = taught[family]
    calls = capture(oracle, sequence.to("cuda"))
    for experts, (arguments, _) in zip(mx_experts(model), calls, strict=True):
        experts(*arguments)  # compiles
        with no_synchronisation():
            experts(*arguments)


def test_layers_on_different_devices(sequence) -> None:
    model = build("qwen3_moe", dtype=torch.bfloat16).to("cuda")
    ids = sequence[None].to("cuda")
    block = model.model.layers[0].mlp.to("cpu")
    block.register_forward_pre_hook(lambda module, given: (given[0].cpu(),))
    block.register_forward_hook(lambda module, given, result: result.to("cuda"))
    with torch.no_grad():
        expected = oracle_of(copy.deepcopy(model))(ids).logits
        actual = convert(model, progress=False)(ids).logits
    assert [experts.weights.device.type for experts in mx_experts(model)] == ["cpu", "cuda"]
    assert cosine(actual, expected) >= 0.999


def test_moving_prepares_for_the_new_device(taught, sequence) -> None:
    _, model = taught["gpt_oss"]
    ids = sequence[None, :PROMPT]
    on_cpu = copy.deepcopy(model).to("cpu")
    assert {experts.weights.layout for experts in mx_experts(on_cpu)} == {Layout.ROW_MAJOR}
    with torch.no_grad():
        assert cosine(on_cpu(ids).logits, model(ids.to("cuda")).logits.cpu()) >= 0.9999
    saved, moved = model.state_dict(), on_cpu.state_dict()
    assert saved.keys() == moved.keys()
    assert all(torch.equal(saved[name].cpu(), moved[name]) for name in saved)


def test_conversion_to_a_gpu_needs_one_layer_above_the_result() -> None:
    model = build(
        "mixtral",
        dtype=torch.bfloat16,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=6,
    )
    layer = sum(p.nbytes for p in model.model.layers[0].mlp.experts.parameters())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = convert(model, device="cuda", progress=False)
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < held + layer, f"peak {peak}, result {held}, a dense layer {layer}"


def test_cuda_graphs_read_the_weights_where_they_are() -> None:
    """Not through a copy of their inputs, as CUDA graphs would do with tensors that may move."""
    model = build(
        "mixtral",
        dtype=torch.bfloat16,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=1,
    )
    experts = mx_experts(convert(model, device="cuda", progress=False))[0]
    hidden = torch.randn(4, 2048, dtype=torch.bfloat16, device="cuda")
    topk_ids = torch.arange(8, device="cuda").view(4, 2)
    topk_weights = torch.full((4, 2), 0.5, device="cuda")
    with torch.no_grad():
        expected = experts(hidden, topk_ids, topk_weights)
        compiled = torch.compile(experts, mode="reduce-overhead", fullgraph=True)
        before = torch.cuda.memory_allocated()
        for _ in range(4):  # warm-up, recording, replays
            actual = compiled(hidden, topk_ids, topk_weights).clone()
    assert torch.equal(actual, expected)
    grown = torch.cuda.memory_allocated() - before
    assert grown < experts.weights.nbytes / 2, f"{grown} bytes for {experts.weights.nbytes}"
