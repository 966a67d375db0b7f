"""One layer in this vLLM: bits of mxpert.fused_moe, padding, parallel modes, memory, reload."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
from serving.vllm_layers import (
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
    routed_experts,
    tokens,
    vllm_config,
)
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as compressed,
)
from vllm.model_executor.layers.quantization.quark import quark_moe
from vllm.v1.worker import workspace

import mxpert
from mxpert.formats import MXFP4, Layout
from mxpert.integrations.serving import layer as shared
from mxpert.integrations.serving import layer_weights
from mxpert.integrations.serving.requantize import requantize_layer_, served_layers
from mxpert.integrations.vllm import _method as served
from support.memory import peak_bytes

METHODS = {
    "gpt_oss": mxfp4.GptOssMxfp4MoEMethod,
    "mxfp4": mxfp4.Mxfp4MoEMethod,
    "compressed-tensors": compressed.CompressedTensorsW4A4Mxfp4MoEMethod,
    "quark": quark_moe.QuarkOCP_MX_MoEMethod,
}
ACTIVATIONS = {
    kind: MoEActivation.SWIGLUOAI if kind == "gpt_oss" else MoEActivation.SILU for kind in METHODS
}
PREPARE = mxpert.MoEWeights.prepare
ROUTED, ROUTING = RoutingMethodType.DeepSeekV3, RoutingMethodType.Renormalize


@pytest.fixture(autouse=True)
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scratch memory, which its modular kernels use; older ones empty a GPU's cache."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(torch.device("cpu"))


def built(
    kind: str, activation_format: str = "a16w4", **changes: Any
) -> tuple[Any, torch.nn.Module, Checkpoint]:
    """A loaded layer: its method, the layer, its checkpoint."""
    gpt_oss = kind == "gpt_oss"
    order = mxpert.GateUpOrder.INTERLEAVED if gpt_oss else mxpert.GateUpOrder.CONCATENATED
    moe = moe_config(activation=ACTIVATIONS[kind], has_bias=gpt_oss, **changes)
    method, layer = make_method(METHODS[kind], moe, activation_format), make_layer(moe)
    checkpoint = Checkpoint.random(order, biased=gpt_oss, experts=moe.num_local_experts)
    load(method, layer, checkpoint)
    return method, layer, checkpoint


def expected(
    kind: str, checkpoint: Checkpoint, x: torch.Tensor, routing: Any, **options: Any
) -> torch.Tensor:
    activation = mxpert.SwiGLU(1.702, 7.0) if kind == "gpt_oss" else mxpert.SiLU()
    weights = checkpoint.weights.prepare(device="cpu")
    return mxpert.fused_moe(x, weights, *routing, activation=activation, **options)


@pytest.mark.parametrize("activation_format", ["a16w4", "a8w4", "a4w4", "fp8_token"])
@pytest.mark.parametrize("kind", METHODS)
def test_behind_vllms_router(kind: str, activation_format: str) -> None:
    method, layer, checkpoint = built(kind, activation_format, routing_method=ROUTED)
    x, logits = tokens()
    routing = mxpert.route_topk(logits, TOP_K)
    y = call(method, layer, x, *routing)
    assert torch.equal(
        y, expected(kind, checkpoint, x, routing, activation_format=activation_format)
    )


@pytest.mark.parametrize("activation_format", ["a16w4", "a8w4"])
@pytest.mark.parametrize("kind", METHODS)
def test_from_the_routers_logits(kind: str, activation_format: str) -> None:
    method, layer, checkpoint = built(kind, activation_format, routing_method=ROUTING)
    assert method.is_monolithic
    x, logits = tokens()
    y = call(method, layer, x, logits)
    routing = mxpert.route_topk(logits, TOP_K)
    assert torch.equal(
        y, expected(kind, checkpoint, x, routing, activation_format=activation_format)
    )


@pytest.mark.parametrize("routing_method", [ROUTED, ROUTING])
def test_weights_on_the_input(routing_method: Any) -> None:
    changes = dict(routing_method=routing_method, experts_per_token=1)
    method, layer, checkpoint = built("mxfp4", **changes)
    layer.apply_router_weight_on_input = True
    x, logits = tokens()
    topk_weights, topk_ids = mxpert.route_topk(logits, 1)
    topk_weights = topk_weights * 0.5
    if method.is_monolithic:
        y = call(method, layer, x, logits)
        routing = mxpert.route_topk(logits, 1)
        options: dict[str, Any] = dict(apply_router_weight_on_input=True)
    else:
        y = call(method, layer, x, topk_weights.bfloat16(), topk_ids)
        x, options = x * topk_weights.bfloat16(), {}
        routing = torch.ones_like(topk_weights), topk_ids
    assert torch.equal(y, expected("mxfp4", checkpoint, x, routing, **options))


def test_grouped_routers_stay_with_vllm() -> None:
    moe = moe_config(routing_method=ROUTING)
    method, layer = make_method(METHODS["mxfp4"], moe), make_layer(moe)
    layer.num_expert_group, layer.topk_group = 4, 2
    load(method, layer, Checkpoint.random(mxpert.GateUpOrder.CONCATENATED))
    assert not method.is_monolithic
    for changes in ({"has_hash_routing": True}, {"require_decomposed_backend": True}):
        if hasattr(moe, next(iter(changes))):
            assert not make_method(
                METHODS["mxfp4"], moe_config(routing_method=ROUTING, **changes)
            ).is_monolithic


def test_foreign_and_negative_ids_and_int64() -> None:
    """Experts 2 and 5 live here; ids of other ranks and the −1 of padding rows are skipped."""
    method, layer, checkpoint = built("gpt_oss", routing_method=ROUTED, num_local_experts=2)
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[torch.tensor([2, 5])] = torch.tensor([0, 1], dtype=torch.int32)
    layer.expert_map = expert_map
    x, logits = tokens()
    topk_weights, topk_ids = mxpert.route_topk(logits, TOP_K)
    topk_ids[-3:] = -1
    want = expected("gpt_oss", checkpoint, x, (topk_weights, topk_ids), expert_map=expert_map)
    assert not want[-3:].any()
    assert torch.equal(call(method, layer, x, topk_weights, topk_ids), want)
    assert torch.equal(call(method, layer, x, topk_weights, topk_ids.long()), want)


def test_the_result_is_written_into_vllms_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind vLLM's router nothing is copied or converted: the op gets vLLM's own tensors."""
    method, layer, checkpoint = built("gpt_oss", routing_method=ROUTED)
    given: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        given.append((*arguments[2:4], options["out"]))
        return mxpert.fused_moe(*arguments, **options)

    monkeypatch.setattr(shared, "fused_moe", noted)
    x, logits = tokens()
    topk_weights, topk_ids = mxpert.route_topk(logits, TOP_K)
    y = call(method, layer, x, topk_weights, topk_ids.long())
    ((weights, ids, out),) = given
    assert (weights.data_ptr(), ids.dtype) == (topk_weights.data_ptr(), torch.int64)
    assert out is not None
    assert torch.equal(out, y)
    assert torch.equal(y, expected("gpt_oss", checkpoint, x, (topk_weights, topk_ids)))


class TwoRanks:
    """vLLM's expert group of two data-parallel ranks, of which this process plays one."""

    def __init__(self, rank: int, other: tuple[torch.Tensor, ...]) -> None:
        self.rank, self.other, self.world_size = rank, other, 2
        self.device_communicator = SimpleNamespace(all2all_manager=self)
        self.dp_world_size, self.computed = 2, torch.empty(0)

    def dispatch(self, *mine: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        pairs = zip(mine, self.other, strict=True)
        return tuple(torch.cat([a, b] if self.rank == 0 else [b, a]) for a, b in pairs)

    def allocate_combine_input(self, *_: Any, **__: Any) -> None:
        return None

    def combine(self, rows: torch.Tensor, **_: Any) -> torch.Tensor:
        self.computed = rows.clone()
        return rows.chunk(2)[self.rank].clone()

    def combine_into_output(self, rows: torch.Tensor, output: torch.Tensor, **_: Any) -> None:
        output.copy_(self.combine(rows))


@pytest.mark.parametrize("rank", [0, 1])
def test_data_parallel_with_expert_parallel(rank: int) -> None:
    """Through vLLM's prepare and finalize steps: tokens of both ranks, experts of this one."""
    (x0, logits0), (x1, logits1) = tokens(6, seed=1), tokens(6, seed=2)
    batches = [(x, *mxpert.route_topk(each, TOP_K)) for x, each in ((x0, logits0), (x1, logits1))]
    group = TwoRanks(rank, batches[1 - rank])
    parallel = dict(use_ep=True, dp_size=2, dp_rank=rank, ep_size=2, ep_rank=rank)
    with (
        mock.patch.object(all2all_utils, "get_ep_group", return_value=group),
        mock.patch.object(naive_dp_ep, "get_ep_group", return_value=group),
    ):
        method, layer, checkpoint = built(
            "mxfp4", routing_method=ROUTING, parallel=parallel, num_local_experts=EXPERTS // 2
        )
        assert not method.is_monolithic  # tokens of two ranks meet
        half = torch.arange(EXPERTS // 2, dtype=torch.int32)
        absent = torch.full_like(half, -1)
        layer.expert_map = torch.cat([half, absent] if rank == 0 else [absent, half])
        call(method, layer, *batches[rank])
    x, *routing = (torch.cat(pair) for pair in zip(*batches, strict=True))
    want = expected("mxfp4", checkpoint, x, routing, expert_map=layer.expert_map)
    assert torch.equal(group.computed, want)


@pytest.mark.parametrize("kind", METHODS)
def test_sizes_of_a_rank_are_padded_with_zero_blocks(kind: str) -> None:
    """48 columns a rank become 64: the layer computes what the 48 compute."""
    share = 48
    gpt_oss = kind == "gpt_oss"
    moe = moe_config(
        intermediate_size=share,
        intermediate_size_per_partition=share,
        activation=ACTIVATIONS[kind],
        has_bias=gpt_oss,
    )
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    plain = moe_config(intermediate_size=share, intermediate_size_per_partition=share)
    if not hasattr(plain, "tp_shard_with_padding"):  # gpt-oss's method for another model
        other = make_method(METHODS["gpt_oss"], plain)
        with pytest.raises(mxpert.UnsupportedError, match="--tensor-parallel-size"):
            other.maybe_roundup_sizes(HIDDEN, share, torch.bfloat16, plain.moe_parallel_config)
    if not gpt_oss and not hasattr(moe, "tp_shard_with_padding"):
        with pytest.raises(mxpert.UnsupportedError, match=r"--tensor-parallel-size.*48; pass"):
            method.maybe_roundup_sizes(HIDDEN, share, torch.bfloat16, moe.moe_parallel_config)
        return
    assert method.maybe_roundup_sizes(HIDDEN, share, torch.bfloat16, moe.moe_parallel_config) == (
        HIDDEN,
        INTERMEDIATE,
    )
    assert gpt_oss or moe.tp_shard_with_padding
    order = mxpert.GateUpOrder.INTERLEAVED if gpt_oss else mxpert.GateUpOrder.CONCATENATED
    checkpoint = Checkpoint.random(order, biased=gpt_oss)
    full = checkpoint.weights
    gate_up = torch.zeros(2 * INTERMEDIATE, dtype=torch.bool)
    gate_up[: 2 * share] = True
    if not gpt_oss:
        gate_up = torch.zeros(2, INTERMEDIATE, dtype=torch.bool)
        gate_up[:, :share] = True
        gate_up = gate_up.flatten()
    full.gate_up_proj.qdata[:, ~gate_up] = 0
    full.down_proj.qdata[:, :, share // 2 :] = 0
    if full.gate_up_bias is not None:
        full.gate_up_bias[:, ~gate_up] = 0
    load(method, layer, checkpoint)
    x, logits = tokens()
    routing = mxpert.route_topk(logits, TOP_K)
    assert torch.equal(call(method, layer, x, *routing), expected(kind, checkpoint, x, routing))
    dense = full.down_proj.dequantize()
    assert dense[..., :share].any()
    assert not dense[..., share:].any()


@pytest.mark.parametrize("rank", [0, 1])
def test_vllms_loader_cuts_between_blocks(rank: int) -> None:
    """96 columns on two ranks: 64 on the first, 32 and a zero block on the second."""
    total, padded = 96, 64
    parallel = dict(tp_size=2, tp_rank=rank)
    moe = moe_config(
        intermediate_size=total, intermediate_size_per_partition=total // 2, parallel=parallel
    )
    if not hasattr(moe, "tp_shard_with_padding"):
        pytest.skip("this vLLM cuts inside of a block; refused there")
    method, layer = make_method(METHODS["mxfp4"], moe), routed_experts(moe)
    sizes = method.maybe_roundup_sizes(
        HIDDEN, moe.intermediate_size_per_partition, torch.bfloat16, moe.moe_parallel_config
    )
    moe.intermediate_size_per_partition = sizes[1]
    method.create_weights(layer, EXPERTS, *sizes, torch.bfloat16, weight_loader=lambda *_: None)
    normal = torch.Generator().manual_seed(4)
    gate, up, down = (
        mxpert.quantize(torch.randn(*size, generator=normal), "mxfp4")
        for size in ((total, HIDDEN), (total, HIDDEN), (HIDDEN, total))
    )
    for shard, full, name in (("w1", gate, "w13"), ("w3", up, "w13"), ("w2", down, "w2")):
        for tensor, suffix in ((full.qdata, "weight"), (full.scale, "weight_scale")):
            layer._load_model_weight_or_group_weight_scale(
                shard_dim=int(shard == "w2"),
                expert_data=getattr(layer, f"{name}_{suffix}").data[2],
                shard_id=shard,
                loaded_weight=tensor,
                tp_rank=rank,
            )

    def loaded(name: str) -> torch.Tensor:
        codes, scale = (getattr(layer, f"{name}_{s}").data[2] for s in ("weight", "weight_scale"))
        return mxpert.MXTensor(codes, scale, MXFP4).dequantize()

    mine = slice(rank * padded, (rank + 1) * padded)
    for found, full in (
        (loaded("w13")[:padded], gate.dequantize()),
        (loaded("w13")[padded:], up.dequantize()),
        (loaded("w2").T, down.dequantize().T),
    ):
        want = torch.zeros(padded, HIDDEN)
        want[: len(full[mine])] = full[mine]
        assert torch.equal(found, want)


@pytest.mark.parametrize("kind", METHODS)
def test_nothing_is_held_twice(kind: str) -> None:
    """The loaded tensors are freed, and the layer's parameters are the prepared ones."""
    before: list[StorageWeakRef] = []

    def watched(layer: torch.nn.Module, *rest: Any, **options: Any) -> mxpert.MoEWeights:
        before.extend(StorageWeakRef(p.data.untyped_storage()) for p in layer.parameters())
        return prepare_layer(layer, *rest, **options)

    prepare_layer = served.prepare_layer
    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", for_hopper),
        mock.patch.object(served, "prepare_layer", watched),
        mock.patch.object(served.ServedMethod, "_warm_up"),
    ):
        method, layer, _ = built(kind)
    assert len(before) == (6 if kind == "gpt_oss" else 4)
    assert all(storage.expired() for storage in before)
    weights = method.moe_kernel.fused_experts.layer.weights
    assert weights.layout is Layout.HOPPER_FRAGMENT
    assert layer.w13_weight.shape[0] == EXPERTS
    for name, tensor in {
        "w13_weight": weights.gate_up_proj.qdata,
        "w13_weight_scale": weights.gate_up_proj.scale,
        "w2_weight": weights.down_proj.qdata,
        "w2_weight_scale": weights.down_proj.scale,
    }.items():
        parameter = getattr(layer, name)
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.data_ptr() == tensor.data_ptr()
    assert not hasattr(layer, "w13_weight_packed")


def for_hopper(weights: mxpert.MoEWeights, **options: Any) -> mxpert.MoEWeights:
    return PREPARE(weights, **{**options, "layout": Layout.HOPPER_FRAGMENT})


@pytest.mark.parametrize("kind", METHODS)
def test_a_model_is_prepared_within_one_more_layer(kind: str) -> None:
    """Peak memory while a loaded model of eight layers is prepared for another layout."""
    size, layers = 256, 8
    sizes = dict(hidden_dim=size, intermediate_size_per_partition=size, intermediate_size=size)
    moe = moe_config(activation=ACTIVATIONS[kind], has_bias=kind == "gpt_oss", **sizes)
    matrices = 3 * EXPERTS * size * size  # of a layer
    layer_bytes = matrices // 2 + matrices // 32

    def loaded() -> list[tuple[Any, torch.nn.Module]]:
        made = [(make_method(METHODS[kind], moe), make_layer(moe)) for _ in range(layers)]
        for method, layer in made:
            create_weights(method, layer)
            for parameter in layer.parameters():
                parameter.data.fill_(127)  # scales of 1
        return made

    def prepare(made: list[tuple[Any, torch.nn.Module]]) -> None:
        for method, layer in made:
            method.process_weights_after_loading(layer)
            assert method.moe_kernel.fused_experts.layer.weights.layout is Layout.HOPPER_FRAGMENT

    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", for_hopper),
        mock.patch.object(served.ServedMethod, "_warm_up"),
    ):
        peak = peak_bytes(loaded, prepare)
        with mock.patch.object(layer_weights, "_install"):  # planted: nothing replaces the loaded
            planted = peak_bytes(loaded, prepare)
    assert 0 < peak < 2 * layer_bytes  # a prepared layer, and one expert's unpacked codes
    assert planted > layers * layer_bytes


@pytest.mark.parametrize("kind", METHODS)
def test_reload_keeps_the_tensors(kind: str) -> None:
    """vLLM's layer-wise reload: other weights, the same addresses, so that graphs stay valid."""
    method, layer, first = built(kind, routing_method=ROUTED)
    x, logits = tokens()
    routing = mxpert.route_topk(logits, TOP_K)
    assert torch.equal(call(method, layer, x, *routing), expected(kind, first, x, routing))
    held = dict(layer.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in held.items()}
    order = first.weights.gate_up_order
    assert order is not None
    second = Checkpoint.random(order, biased=kind == "gpt_oss", seed=9)
    for name in list(held):  # vLLM puts fresh parameters in place and loads into them
        delattr(layer, name)
    load(method, layer, second)
    for name, parameter in held.items():  # then it copies the result into what it kept
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)
    assert torch.equal(call(method, layer, x, *routing), expected(kind, second, x, routing))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses


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
    gpt_oss, total, share = kind == "gpt_oss", 96, 48
    moe = moe_config(
        intermediate_size=total,
        intermediate_size_per_partition=share,
        activation=ACTIVATIONS[kind],
        has_bias=gpt_oss,
        parallel=dict(tp_size=2, tp_rank=rank),
        routing_method=ROUTED,
    )
    if not gpt_oss and not hasattr(moe, "tp_shard_with_padding"):
        pytest.skip("this vLLM cuts inside of a block; refused there")
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    create_weights(method, layer)
    created = dict(layer.named_parameters())
    mine = 64 if rank == 0 else 32
    order = mxpert.GateUpOrder.INTERLEAVED if gpt_oss else mxpert.GateUpOrder.CONCATENATED
    for seed in (0, 9):
        materialised(layer, created, 0xFF)
        checkpoint = Checkpoint.random(order, biased=gpt_oss, seed=seed)
        layer_weights.clear_padding(checkpoint.weights, mine)
        filled(layer, checkpoint, order, mine)
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
    moe = moe_config(activation=ACTIVATIONS[kind])
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
    moe = moe_config(activation=ACTIVATIONS["gpt_oss"], has_bias=True)
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
    for_layout = mock.patch.object(mxpert.MoEWeights, "prepare", for_hopper)
    with for_layout, mock.patch.object(served.ServedMethod, "_warm_up"):
        moe = moe_config(routing_method=ROUTED)
        kind = served.served_method(METHODS["mxfp4"])
        methods = [kind(moe, "a16w4", f"layers.{i}", options) for i in range(2)]
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

        def reload(index: int, checkpoint: Checkpoint) -> None:
            for name in [name for name, _ in layers[index].named_parameters()]:
                delattr(layers[index], name)
            load(methods[index], layers[index], checkpoint)

        before = result(other)
        reload(0, Checkpoint.random(order, seed=9))
        with pytest.raises(ValueError, match="reloaded weights"):
            reload(1, _wide(order))
        for method in methods:
            assert not result(method).isfinite().any()
        assert torch.equal(result(other), before)  # another model
        good = Checkpoint.random(order, seed=9)
        for index, method in enumerate(methods):  # a whole reload makes it well
            reload(index, good)
            assert torch.equal(result(method), layer_of(good.weights))


def test_reloaded_weights_that_do_not_fold_are_refused() -> None:
    order = mxpert.GateUpOrder.CONCATENATED
    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", for_hopper),
        mock.patch.object(served.ServedMethod, "_warm_up"),
    ):
        method, layer, _ = built("mxfp4")
        for name in [name for name, _ in layer.named_parameters()]:
            delattr(layer, name)
        with pytest.raises(ValueError, match=r"reloaded weights.*restart the server") as error:
            load(method, layer, _wide(order))
    assert "\n" not in str(error.value)


def _wide(order: mxpert.GateUpOrder) -> Checkpoint:
    """Weights of which one row of experts 1 and 4 spans more than 15 binades."""
    checkpoint = Checkpoint.random(order)
    scale = checkpoint.weights.gate_up_proj.scale.clone()
    scale[1, 3, 0] += 30
    down = checkpoint.weights.down_proj.scale.clone()
    down[4, 0, 0] += 30
    weights = checkpoint.weights
    return Checkpoint(
        replace(
            weights,
            gate_up_proj=replace(weights.gate_up_proj, scale=scale),
            down_proj=replace(weights.down_proj, scale=down),
        )
    )


def test_experts_that_do_not_fold_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    moe = moe_config()
    method, layer = make_method(METHODS["mxfp4"], moe), make_layer(moe)
    logger = logging.getLogger("vllm.mxpert")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.mxpert"):
            load(method, layer, _wide(mxpert.GateUpOrder.CONCATENATED))
    finally:
        logger.removeHandler(caplog.handler)
    assert f"layers.0: 2 of {EXPERTS} experts do not fold" in caplog.text


def test_kernels_are_compiled_once_for_layers_of_one_shape() -> None:
    calls: list[tuple[Any, ...]] = []
    with (
        mock.patch.object(shared, "_warm", set()),
        mock.patch.object(
            shared, "warm_up", lambda *a, **options: calls.append((*a, options)) or (1, 4)
        ),
    ):
        for _ in range(3):
            built("gpt_oss", "a8w4")
        built("mxfp4", "a8w4")
    assert len(calls) == 2
    weights, max_tokens, options = calls[0]
    assert max_tokens == 64
    assert options["activation_format"] == "a8w4"
    assert options["top_k"] == TOP_K
    assert weights.num_experts == EXPERTS


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["gpt_oss", "mxfp4"])
def test_a_trainers_experts_are_quantised_in_place(kind: str, rank: int) -> None:
    """TP2 of 96 columns and experts 1, 4 and 6: what a checkpoint of these experts would give."""
    gpt_oss, total, share = kind == "gpt_oss", 96, 48
    moe = moe_config(
        intermediate_size=total,
        intermediate_size_per_partition=share,
        activation=ACTIVATIONS[kind],
        has_bias=gpt_oss,
        parallel=dict(tp_size=2, tp_rank=rank),
        routing_method=ROUTED,
        num_local_experts=3,
    )
    if not gpt_oss and not hasattr(moe, "tp_shard_with_padding"):
        pytest.skip("this vLLM cuts inside of a block; refused there")
    order = mxpert.GateUpOrder.INTERLEAVED if gpt_oss else mxpert.GateUpOrder.CONCATENATED
    method, layer = make_method(METHODS[kind], moe), make_layer(moe)
    layer.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    layer.expert_map[[1, 4, 6]] = torch.arange(3, dtype=torch.int32)
    load(method, layer, Checkpoint.random(order, biased=gpt_oss, experts=3))
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
