"""A converted model computes what Transformers computes with the dequantised weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import mxpert
from mxpert import GateUpOrder, SiLU, SwiGLU
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.testing.numerics import assert_exact, cosine
from mxpert.training import MXFP8Recipe
from tests.integrations.families import FAMILIES, PROMPT, build, greedy, oracle_of, taught_pairs

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
COSINE = 0.9999


@pytest.fixture(scope="module")
def taught(sequence: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    return taught_pairs(sequence)


@torch.no_grad()
def logits(model: Any, sequence: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(sequence[None], **options).logits[0]


@EVERY_FAMILY
def test_logits_are_those_of_the_dequantised_weights(family, taught, sequence) -> None:
    oracle, model = taught[family]
    expected = logits(oracle, sequence)
    assert cosine(logits(model, sequence), expected) >= COSINE
    wrong = copy.deepcopy(model)  # gate and up exchanged: the comparison can fail
    for experts in mx_experts(wrong):
        order = (
            GateUpOrder.CONCATENATED
            if experts.weights.gate_up_order is GateUpOrder.INTERLEAVED
            else GateUpOrder.INTERLEAVED
        )
        experts.weights = replace(experts.weights, gate_up_order=order)
    assert cosine(logits(wrong, sequence), expected) < 0.99


@EVERY_FAMILY
def test_greedy_tokens_are_those_of_the_dequantised_weights(family, taught, sequence) -> None:
    oracle, model = taught[family]
    expected = greedy(oracle, sequence)
    assert torch.equal(expected, sequence), "the head was not taught: margins are unknown"
    assert torch.equal(greedy(model, sequence), expected)


@EVERY_FAMILY
def test_bfloat16_models(family, sequence) -> None:
    """Transformers' own sums round to bfloat16 too: each layer is compared by itself."""
    model = build(family, dtype=torch.bfloat16)
    oracle = oracle_of(model)
    calls = capture(oracle, sequence)
    for experts, (arguments, expected) in zip(
        mx_experts(convert(model, progress=False)), calls, strict=True
    ):
        actual = experts(*arguments)
        assert actual.dtype == torch.bfloat16
        assert cosine(actual, expected) >= COSINE


@EVERY_FAMILY
@pytest.mark.parametrize("activation_format", ["mxfp8", "mxfp4", "fp8_token"])
def test_narrow_activations_are_those_of_fused_moe(
    family, activation_format, taught, sequence
) -> None:
    """Its accuracy is tested where it lives (tests/moe); here, that it is what runs."""
    oracle, model = taught[family]
    narrow = convert(copy.deepcopy(model), activation_format)
    for experts, (arguments, _) in zip(mx_experts(narrow), capture(oracle, sequence), strict=True):
        hidden, topk_ids, topk_weights = arguments
        expected = mxpert.fused_moe(
            hidden.bfloat16(),
            experts.weights,
            topk_weights.float(),
            topk_ids.int(),
            activation=experts.activation,
            activation_format=activation_format,
            out_dtype=hidden.dtype,
        )
        assert_exact(experts(*arguments), expected, "experts")
    assert not torch.equal(logits(narrow, sequence), logits(model, sequence))


@torch.no_grad()
def capture(model: Any, sequence: torch.Tensor) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """(arguments, result) of every experts module while a model reads the sequence."""
    calls: list[tuple[tuple[Any, ...], torch.Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, given, result: calls.append((given, result)))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    model(sequence[None])
    for handle in handles:
        handle.remove()
    return calls


def test_gates_and_orders_are_the_models_own(taught) -> None:
    found = {
        family: (experts.activation, experts.weights.gate_up_order)
        for family, (_, model) in taught.items()
        for experts in mx_experts(model)
    }
    concatenated = (SiLU(), GateUpOrder.CONCATENATED)
    assert found == {
        "gpt_oss": (SwiGLU(1.702, 7.0), GateUpOrder.INTERLEAVED),
        "qwen3_moe": concatenated,
        "mixtral": concatenated,
        "deepseek_v3": concatenated,
    }


def test_dense_layers_and_shared_experts_stay(taught) -> None:
    _, model = taught["deepseek_v3"]
    assert len(mx_experts(model)) == 2  # of three layers, the first is dense
    assert model.model.layers[1].mlp.shared_experts.down_proj.weight.is_floating_point()


@EVERY_FAMILY
def test_restored_weights_convert_to_the_same_bits(family, taught, sequence) -> None:
    _, model = taught[family]
    again = convert(restore(copy.deepcopy(model)), progress=False)
    for first, second in zip(mx_experts(model), mx_experts(again), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            assert_exact(
                *(mxpert.dequantize(getattr(experts.weights, name)) for experts in (first, second)),
                name,
            )
    assert_exact(logits(again, sequence), logits(model, sequence), "logits")


def test_concurrent_generation_gives_the_same_tokens(taught, sequence) -> None:
    _, model = taught["gpt_oss"]
    prompts = [sequence[start : start + PROMPT] for start in range(4)]
    alone = [greedy(model, prompt, min_new_tokens=16)[: PROMPT + 16] for prompt in prompts]
    together: list[torch.Tensor | None] = [None] * len(prompts)

    def work(index: int) -> None:
        with torch.no_grad():
            together[index] = greedy(model, prompts[index])[: PROMPT + 16]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert torch.equal(together[index], expected)


def counted_graphs() -> tuple[list[Any], Callable[[Any, Any], Any]]:
    """A backend of torch.compile that runs graphs as they are, and the list that it fills."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return graphs, count


@EVERY_FAMILY
def test_static_cache_decode_compiles_without_breaks(family, taught, sequence) -> None:
    _, model = taught[family]
    graphs, count = counted_graphs()
    step = torch.compile(model.forward, fullgraph=True, backend=count)
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    prompt = sequence[None, :PROMPT]
    with torch.no_grad():
        for cache in caches:
            model(prompt, past_key_values=cache, cache_position=torch.arange(PROMPT))
        for position in range(PROMPT, PROMPT + 3):
            options = {
                "cache_position": torch.tensor([position]),
                "position_ids": torch.tensor([[position]]),
            }
            token = sequence[None, position : position + 1]
            expected = model(token, past_key_values=caches[0], **options).logits
            actual = step(token, past_key_values=caches[1], **options).logits
            assert torch.equal(actual, expected)
    assert len(graphs) <= 2  # one more for gpt-oss: Transformers' sliding cache holds a host int
    for graph in graphs:
        ops = [node for node in graph.graph.nodes if "fused_moe" in str(node.target)]
        assert len(ops) == len(mx_experts(model))


@EVERY_FAMILY
def test_generate_compiles_the_decode_step(family, taught, sequence) -> None:
    """What `generate` does on a GPU: one graph a layer of experts, and the eager tokens."""
    _, model = taught[family]
    graphs, count = counted_graphs()
    config = transformers.CompileConfig(fullgraph=True, backend=count, mode="default")
    config._compile_all_devices = True  # Transformers compiles on a GPU alone without it
    options = dict(cache_implementation="static", compile_config=config)
    assert torch.equal(greedy(model, sequence, **options), greedy(model, sequence))
    compiled = len(graphs)
    assert 1 <= compiled <= 2  # one more for gpt-oss: Transformers' sliding cache holds a host int
    for graph in graphs:
        nodes = list(graph.graph.nodes)
        ops = [node for node in nodes if "fused_moe" in str(node.target)]
        assert len(ops) == len(mx_experts(model))
        for op in ops:  # the router's own ids, not a copy in another dtype
            dtypes = [node.meta["example_value"].dtype for node in op.all_input_nodes]
            assert (dtypes.count(torch.int64), dtypes.count(torch.int32)) == (1, 0)
    greedy(model, sequence, **options)
    assert len(graphs) == compiled, "the second call compiles nothing"


def test_a_gradient_is_refused_not_forgotten(taught, sequence) -> None:
    model = copy.deepcopy(taught["mixtral"][1])
    ids = sequence[None, :PROMPT]
    with pytest.raises(mxpert.UnsupportedError, match=r"training mode.*MXFP8Recipe"):
        model.train()(ids)
    loss = model.eval()(ids, labels=ids).loss  # a forward in evaluation mode is fine
    with pytest.raises(mxpert.UnsupportedError, match="need an inference pass"):
        loss.backward()


@EVERY_FAMILY
def test_training_changes_nothing_but_the_gemms(family, sequence) -> None:
    """Without quantisation, gradients are Transformers' own; with it, the loss stays close."""
    plain = build(family)
    exact, quantised = copy.deepcopy(plain), copy.deepcopy(plain)
    before = dict(exact.named_parameters())
    assert convert(exact, recipe=MXFP8Recipe(enabled=False)) is exact
    convert(quantised, recipe=MXFP8Recipe())
    after = dict(exact.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    losses = [train_step(model, sequence[None, :32]) for model in (plain, exact, quantised)]
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:  # float32 sums in two orders
            torch.testing.assert_close(after[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=0.02)
    assert losses[2] != losses[1]


def train_step(model: Any, ids: torch.Tensor) -> float:
    """Loss of one forward and backward pass in training mode."""
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    return loss.item()


def test_a_recipe_can_be_taken_away_again(sequence) -> None:
    model = build("gpt_oss")
    expected, module = logits(model, sequence), model.model.layers[0].mlp.experts
    convert(model, recipe=MXFP8Recipe())
    assert not torch.equal(logits(model, sequence), expected)
    assert restore(model).model.layers[0].mlp.experts is module
    assert_exact(logits(model, sequence), expected, "logits")


def test_a_trained_model_is_converted_as_it_stands(sequence) -> None:
    model = build("qwen3_moe")
    expected = convert(copy.deepcopy(model), progress=False)
    trained = convert(convert(model, recipe=MXFP8Recipe()), progress=False)
    assert len(mx_experts(trained)) == 2
    assert_exact(logits(trained, sequence), logits(expected, sequence), "logits")
    with pytest.raises(ValueError, match=r"recipe — need .*restore\(model\) first"):
        convert(trained, recipe=MXFP8Recipe())
