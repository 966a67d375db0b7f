"""One layer in this vLLM: bits of mxpert.fused_moe, padding, parallel modes, memory, reload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
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
from mxpert.integrations.vllm import _method as served
from support.memory import peak_bytes
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
    routed_experts,
    tokens,
)

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


def config_of(kind: str, **changes: Any) -> Any:
    return moe_config(activation=ACTIVATIONS[kind], has_bias=kind == "gpt_oss", **changes)


def half_of(total: int, kind: str, rank: int, **changes: Any) -> Any:
    """The config of one of two tensor-parallel ranks: 96 columns are 64 and 32 of them."""
    moe = config_of(
        kind,
        intermediate_size=total,
        intermediate_size_per_partition=total // 2,
        parallel=dict(tp_size=2, tp_rank=rank),
        **changes,
    )
    if kind != "gpt_oss" and not hasattr(moe, "tp_shard_with_padding"):
        pytest.skip("this vLLM cuts inside of a block; refused there")
    return moe


def order_of(kind: str) -> mxpert.GateUpOrder:
    gpt_oss = kind == "gpt_oss"
    return mxpert.GateUpOrder.INTERLEAVED if gpt_oss else mxpert.GateUpOrder.CONCATENATED


def checkpoint_of(kind: str, **changes: Any) -> Checkpoint:
    return Checkpoint.random(order_of(kind), biased=kind == "gpt_oss", **changes)


def built(
    kind: str, activation_format: str = "a16w4", **changes: Any
) -> tuple[Any, torch.nn.Module, Checkpoint]:
    """A loaded layer: its method, the layer, its checkpoint."""
    moe = config_of(kind, **changes)
    method, layer = make_method(METHODS[kind], moe, activation_format), make_layer(moe)
    checkpoint = checkpoint_of(kind, experts=moe.num_local_experts)
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


def test_logits_go_to_the_layer_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows of graphs have NaN logits: their weights are 0."""
    method, layer, checkpoint = built("gpt_oss", routing_method=ROUTING)
    given: list[torch.Tensor] = []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        given.append(arguments[2])
        return mxpert.fused_moe_from_logits(*arguments, **options)

    monkeypatch.setattr(shared, "fused_moe_from_logits", noted)
    x, logits = tokens()
    logits[-2:] = float("nan")
    y = call(method, layer, x, logits)
    assert given[0] is logits
    assert not y[-2:].any()
    routing = mxpert.route_topk(logits, TOP_K, clamp_nan=True)
    assert torch.equal(y, expected("gpt_oss", checkpoint, x, routing))


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
    moe = config_of(kind, intermediate_size=share, intermediate_size_per_partition=share)
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
    checkpoint = checkpoint_of(kind)
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
    moe = half_of(total, "mxfp4", rank)
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
    with for_hopper(), mock.patch.object(served, "prepare_layer", watched):
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


@contextmanager
def for_hopper() -> Iterator[None]:
    """Layers are prepared as on a Hopper GPU; nothing is compiled."""

    def prepare(weights: mxpert.MoEWeights, **options: Any) -> mxpert.MoEWeights:
        return PREPARE(weights, **{**options, "layout": Layout.HOPPER_FRAGMENT})

    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", prepare),
        mock.patch.object(served.ServedMethod, "_warm_up"),
    ):
        yield


@pytest.mark.parametrize("kind", METHODS)
def test_a_model_is_prepared_within_one_more_layer(kind: str) -> None:
    """Peak memory while a loaded model of eight layers is prepared for another layout."""
    size, layers = 256, 8
    sizes = dict(hidden_dim=size, intermediate_size_per_partition=size, intermediate_size=size)
    moe = config_of(kind, **sizes)
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

    with for_hopper():
        peak = peak_bytes(loaded, prepare)
        with mock.patch.object(layer_weights, "_install"):  # planted: nothing replaces the loaded
            planted = peak_bytes(loaded, prepare)
    assert 0 < peak < 2 * layer_bytes  # a prepared layer, and one expert's unpacked codes
    assert planted > layers * layer_bytes


def wide(order: mxpert.GateUpOrder) -> Checkpoint:
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
            load(method, layer, wide(mxpert.GateUpOrder.CONCATENATED))
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
    assert options["activation_format"] == "mxfp8"
    assert options["top_k"] == TOP_K
    assert weights.num_experts == EXPERTS
