"""Other weights in loaded layers of this vLLM: reloads, what a checkpoint lacks, a trainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
import mxpert
from mxpert.integrations.serving import layer_weights
from mxpert.integrations.serving.requantize import requantize_layer_, served_layers
from mxpert.integrations.vllm import _method as served
from mxpert.integrations.vllm._layer_formats import mxfp4_experts
from mxpert.integrations.vllm.options import Options
from tests.integrations.serving.test_vllm_layers import (
    METHODS,
    ROUTED,
    built,
    checkpoint_of,
    config_of,
    expected,
    for_hopper,
    half_of,
    order_of,
    wide,
    workspaces,
)
from tests.integrations.serving.vllm_layers import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    Checkpoint,
    call,
    create_weights,
    load,
    make_layer,
    make_method,
    moe_config,
    tokens,
    vllm_config,
)

__all__ = ["workspaces"]  # a fixture of every test


@pytest.mark.parametrize("kind", METHODS)
def test_reload_keeps_the_tensors(kind: str) -> None:
    """vLLM's layer-wise reload: other weights, the same addresses, so that graphs stay valid."""
    method, layer, first = built(kind, routing_method=ROUTED)
    x, logits = tokens()
    routing = mxpert.route_topk(logits, TOP_K)
    assert torch.equal(call(method, layer, x, *routing), expected(kind, first, x, routing))
    held = dict(layer.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in held.items()}
    second = checkpoint_of(kind, seed=9)
    reload(method, layer, second)
    for name, parameter in held.items():  # then it copies the result into what it kept
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)
    assert torch.equal(call(method, layer, x, *routing), expected(kind, second, x, routing))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


def reload(method: Any, layer: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """vLLM puts fresh parameters in place and loads into them."""
    for name in dict(layer.named_parameters()):
        delattr(layer, name)
    load(method, layer, checkpoint)


def materialised(layer: torch.nn.Module, held: dict[str, torch.nn.Parameter], fill: int) -> None:
    """Fresh parameters as in vLLM's reload: uninitialised, here with `fill` in each byte."""
    for name, parameter in held.items():
        fresh = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
        fresh.data.view(torch.uint8).fill_(fill)
        fresh.__dict__.update(parameter.__dict__)
        if hasattr(layer, name):
            delattr(layer, name)
        layer.register_parameter(name, fresh)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["gpt_oss", "mxfp4"])
def test_reload_clears_the_padding_of_each_rank(kind: str, rank: int) -> None:
    """TP2 of 96 columns: 64 on rank 0, 32 and 32 of padding on rank 1, which is NaN before."""
    moe = half_of(96, kind, rank, routing_method=ROUTED)
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    create_weights(method, layer)
    created = dict(layer.named_parameters())
    mine = 64 if rank == 0 else 32
    for seed in (0, 9):
        materialised(layer, created, 0xFF)
        checkpoint = checkpoint_of(kind, seed=seed)
        layer_weights.clear_padding(checkpoint.weights, mine)
        filled(layer, checkpoint, order_of(kind), mine)
        method.process_weights_after_loading(layer)
        x, logits = tokens()
        routing = mxpert.route_topk(logits, TOP_K)
        y = call(method, layer, x, *routing)
        assert torch.equal(y, expected(kind, checkpoint, x, routing))


def filled(
    layer: torch.nn.Module, checkpoint: Checkpoint, order: mxpert.GateUpOrder, columns: int
) -> None:
    """Copy into the parameters what a loader copies: the first `columns` of 64."""
    weights, index = checkpoint.weights, torch.arange(2 * INTERMEDIATE)
    interleaved = order is mxpert.GateUpOrder.INTERLEAVED
    rows = (index // 2 if interleaved else index % INTERMEDIATE) < columns
    for name, tensor in (
        ("w13_weight", weights.gate_up_proj.qdata),
        ("w13_weight_scale", weights.gate_up_proj.scale),
        ("w13_bias", weights.gate_up_bias),
    ):
        if tensor is not None:
            getattr(layer, name).data[:, rows] = tensor[:, rows].to(getattr(layer, name).dtype)
    if weights.down_bias is not None:
        layer.w2_bias.data.copy_(weights.down_bias)  # type: ignore[union-attr]
    codes, scale = weights.down_proj.qdata, weights.down_proj.scale
    layer.w2_weight.data[..., : columns // 2] = codes[..., : columns // 2]  # type: ignore[index]
    blocks = columns // 32
    layer.w2_weight_scale.data[..., :blocks] = scale[..., :blocks]  # type: ignore[index]


NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def loaded_through(layer: torch.nn.Module, without: set[tuple[str, int, str]]) -> None:
    """Call each parameter's loader as vLLM does, but for `without`: name, expert, shard."""
    present = dict(layer.named_parameters())
    for each in NAMES:
        name = each if each in present else f"{each}_packed"
        for expert in range(EXPERTS):
            for shard in ("w1", "w3") if each.startswith("w13") else ("w2",):
                if (each, expert, shard) not in without:
                    present[name].weight_loader(  # type: ignore[operator]
                        present[name], torch.zeros(1), each, shard_id=shard, expert_id=expert
                    )


@pytest.mark.parametrize("kind", ["mxfp4", "compressed-tensors", "quark"])
def test_tensors_that_a_checkpoint_lacks_are_named(kind: str) -> None:
    moe = config_of(kind)
    whole = {(each, e, s) for each in ("w2_weight",) for e in range(EXPERTS) for s in ("w2",)}
    for without, said in (
        ({("w13_weight", 3, "w3")}, r"w13_weight(_packed)?\[3\] \(w3\)"),
        ({("w2_weight_scale", 5, "w2")}, r"w2_weight_scale\[5\]"),
        (whole, r"none for layers\.0\.w2_weight(_packed)?;"),
    ):
        method, layer = make_method(METHODS[kind], moe), make_layer(moe)
        create_weights(method, layer)
        loaded_through(layer, without)
        with pytest.raises(ValueError, match=said) as error:
            method.process_weights_after_loading(layer)
        assert "\n" not in str(error.value)
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    create_weights(method, layer)
    loaded_through(layer, set())
    method.process_weights_after_loading(layer)


def test_a_checkpoint_without_a_layer_is_refused() -> None:
    """No loader was called: an error for checkpoints, and none for weights made otherwise."""
    method, layer, _ = built("mxfp4")
    for load_format, fails in (("auto", True), ("safetensors", True), ("dummy", False)):
        method.load_format = load_format
        if fails:
            with pytest.raises(ValueError, match="all tensors of the experts"):
                method._require_loaded(layer)
        else:
            method._require_loaded(layer)


def test_one_tensor_of_all_experts_is_enough() -> None:
    moe = config_of("gpt_oss")
    method, layer = make_method(METHODS["gpt_oss"], moe), make_layer(moe)
    create_weights(method, layer)
    present = dict(layer.named_parameters())
    for name, parameter in present.items():
        if name != "w2_bias":
            parameter.weight_loader(  # type: ignore[operator]
                parameter, torch.zeros(1), weight_name=name, shard_id=None, expert_id=None
            )
    with pytest.raises(ValueError, match=r"none for layers\.0\.w2_bias;"):
        method._require_loaded(layer)


def test_a_refused_reload_leaves_no_plausible_result() -> None:
    """Two layers of one model: the second is refused, and neither computes numbers afterwards."""
    order, options = mxpert.GateUpOrder.CONCATENATED, vllm_config(None)
    with for_hopper():
        moe = moe_config(routing_method=ROUTED)
        experts = mxfp4_experts(SimpleNamespace(moe_config=moe), METHODS["mxfp4"])
        kind = served.served_method(experts.method)
        methods = [kind(moe, Options("bf16"), f"layers.{i}", options, experts) for i in range(2)]
        layers = [make_layer(moe) for _ in methods]
        for method, layer in zip(methods, layers, strict=True):
            load(method, layer, Checkpoint.random(order))
        other, _, _ = built("mxfp4", routing_method=ROUTED)
        x, logits = tokens()
        routing = mxpert.route_topk(logits, TOP_K)

        def layer_of(weights: mxpert.MoEWeights) -> torch.Tensor:
            return mxpert.fused_moe(x, weights, *routing, activation=mxpert.SiLU())

        def result(method: Any) -> torch.Tensor:
            return layer_of(method.moe_kernel.fused_experts.layer.weights.unprepare())

        before = result(other)
        reload(methods[0], layers[0], Checkpoint.random(order, seed=9))
        with pytest.raises(ValueError, match="reloaded weights"):
            reload(methods[1], layers[1], wide(order))
        for method in methods:
            assert not result(method).isfinite().any()
        assert torch.equal(result(other), before)  # another model
        good = Checkpoint.random(order, seed=9)
        for method, layer in zip(methods, layers, strict=True):  # a whole reload makes it well
            reload(method, layer, good)
            assert torch.equal(result(method), layer_of(good.weights))


def test_reloaded_weights_that_do_not_fold_are_refused() -> None:
    order = mxpert.GateUpOrder.CONCATENATED
    with for_hopper():
        method, layer, _ = built("mxfp4")
        with pytest.raises(ValueError, match=r"reloaded weights.*restart the server") as error:
            reload(method, layer, wide(order))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["gpt_oss", "mxfp4"])
def test_a_trainers_experts_are_quantised_in_place(kind: str, rank: int) -> None:
    """TP2 of 96 columns and experts 1, 4 and 6: what a checkpoint of these experts would give."""
    gpt_oss, total = kind == "gpt_oss", 96
    moe = half_of(total, kind, rank, routing_method=ROUTED, num_local_experts=3)
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    layer.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    layer.expert_map[[1, 4, 6]] = torch.arange(3, dtype=torch.int32)
    load(method, layer, checkpoint_of(kind, experts=3))
    layer.quant_method = method
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), layer)
    assert served_layers(model) == {"1": layer}
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    gate_up, down = normal(EXPERTS, 2 * total, HIDDEN), normal(EXPERTS, HIDDEN, total)
    biases = (normal(EXPERTS, 2 * total), normal(EXPERTS, HIDDEN)) if gpt_oss else (None, None)
    requantize_layer_(layer, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1])
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
    found = method.moe_kernel.fused_experts.layer.weights.unprepare()
    mine = torch.arange(64 * rank, min(64 * rank + 64, total))
    pairs = torch.stack([2 * mine, 2 * mine + 1], 1).flatten()
    rows = pairs if gpt_oss else torch.cat([mine, total + mine])
    held = torch.arange(len(mine))
    places = torch.arange(2 * len(mine)) if gpt_oss else torch.cat([held, INTERMEDIATE + held])
    wanted = mxpert.quantize(gate_up[[1, 4, 6]][:, rows], "mxfp4")
    assert torch.equal(found.gate_up_proj.qdata[:, places], wanted.qdata)
    assert torch.equal(found.gate_up_proj.scale[:, places], wanted.scale)
    dense = found.down_proj.dequantize()
    assert torch.equal(
        dense[..., : len(mine)], mxpert.quantize(down[[1, 4, 6]][..., mine], "mxfp4").dequantize()
    )
    assert not dense[..., len(mine) :].any()
    if found.gate_up_bias is not None and found.down_bias is not None:
        assert torch.equal(found.gate_up_bias[:, places], biases[0][[1, 4, 6]][:, rows].float())
        assert torch.equal(found.down_bias, biases[1][[1, 4, 6]].float() * (rank == 0))
