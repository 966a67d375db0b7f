"""One layer in this SGLang: registries, refusals, bits of mxpert.fused_moe, padding, memory."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert import UnsupportedError
from mxpert.integrations import sglang as plugin
from mxpert.integrations.models.implementations import IMPLEMENTATIONS
from mxpert.integrations.serving import layer as shared

pytest.importorskip("sglang", reason="needs SGLang's Python: make test-serving")
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.runtime_context import get_flags

from mxpert.integrations.sglang import _method as served
from mxpert.integrations.sglang._refusals import activation_of, refuse_unsupported

pytestmark = pytest.mark.usefixtures("sglang_plugin")
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 8, 96, 64, 2, 13
GPT_OSS = dict(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
KINDS: dict[str, tuple[dict[str, Any], mxpert.Activation, mxpert.GateUpOrder]] = {
    "gpt_oss": (GPT_OSS, mxpert.SwiGLU(1.702, 7.0), mxpert.GateUpOrder.INTERLEAVED),
    "swiglu-concatenated": (
        GPT_OSS | {"gate_up_interleaved": False},
        mxpert.SwiGLU(1.702, 7.0),
        mxpert.GateUpOrder.CONCATENATED,
    ),
    "silu": ({}, mxpert.SiLU(), mxpert.GateUpOrder.CONCATENATED),
    "silu-clamped": (
        {"gemm1_clamp_limit": 5.0},
        mxpert.ClampedSiLU(5.0),
        mxpert.GateUpOrder.CONCATENATED,
    ),
    "deepseek-v4": (
        {"swiglu_limit": 10.0},
        mxpert.ClampedSiLU(10.0),
        mxpert.GateUpOrder.CONCATENATED,
    ),
    "swiglu-beta": (
        GPT_OSS | {"gemm1_beta": 0.0},
        mxpert.SwiGLU(1.702, 7.0, 0.0),
        mxpert.GateUpOrder.INTERLEAVED,
    ),
    "gelu": ({"activation": "gelu"}, mxpert.GELU(), mxpert.GateUpOrder.CONCATENATED),
    "gelu_tanh": (
        {"activation": "gelu_tanh"},
        mxpert.GELU("tanh"),
        mxpert.GateUpOrder.CONCATENATED,
    ),
    "situ": (
        {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 20.0},
        mxpert.SiTUv2(3.0, 20.0),
        mxpert.GateUpOrder.CONCATENATED,
    ),
}
SERVER = dict(
    moe_a2a_backend="none",
    enable_eplb=False,
    enable_lora=None,
    lora_paths=None,
    cpu_offload_gb=0,
    enable_deterministic_inference=False,
    chunked_prefill_size=64,
    max_prefill_tokens=16384,
    dp_size=1,
)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's ServerArgs, as far as the plugin reads them, with the backend chosen."""
    arguments = SimpleNamespace(**SERVER)
    monkeypatch.setattr(served, "get_server_args", lambda: arguments)
    choose("mxpert")
    return arguments


def choose(backend: str) -> None:
    get_flags().moe.runner_backend = resolve_moe_runner_backend(backend)


def config_of(**changes: Any) -> Any:
    values: dict[str, Any] = dict(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        top_k=TOP_K,
        params_dtype=torch.bfloat16,
        inplace=False,
    )
    known = {field.name for field in dataclasses.fields(MoeRunnerConfig)}
    assert set(changes) <= known
    return MoeRunnerConfig(**values | changes)


def experts_layer(config: Any) -> Any:
    """A layer of SGLang's class, without its constructor."""
    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.moe_runner_config, config.layer = config, layer
    return layer


def weights_of(
    order: mxpert.GateUpOrder, inner: int, *, biased: bool, experts: int = EXPERTS, seed: int = 0
) -> mxpert.MoEWeights:
    generator = torch.Generator().manual_seed(inner + seed)

    def projection(rows: int, depth: int) -> mxpert.MXTensor:
        values = torch.randn(experts, rows, depth, generator=generator) / math.sqrt(depth)
        return mxpert.quantize(values, "mxfp4")

    def bias(width: int) -> torch.Tensor | None:
        made = torch.randn(experts, width, generator=generator).bfloat16().float()
        return made if biased else None

    return mxpert.MoEWeights(
        projection(2 * inner, HIDDEN),
        projection(HIDDEN, inner),
        gate_up_bias=bias(2 * inner),
        down_bias=bias(HIDDEN),
        gate_up_order=order,
    )


def tensors_of(weights: mxpert.MoEWeights) -> dict[str, torch.Tensor | None]:
    """A layer's checkpoint, by the names of SGLang's parameters."""
    return {
        "w13_weight": weights.gate_up_proj.qdata,
        "w13_weight_scale": weights.gate_up_proj.scale,
        "w13_weight_bias": weights.gate_up_bias,
        "w2_weight": weights.down_proj.qdata,
        "w2_weight_scale": weights.down_proj.scale,
        "w2_weight_bias": weights.down_bias,
    }


def copy_all(
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str | None,
    expert_id: int | None = None,
) -> None:
    """SGLang's loader of tensors with all experts."""
    param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)


def built(
    kind: str, backend: str = "mxpert", *, experts: int = EXPERTS, **changes: Any
) -> tuple[Any, Any, mxpert.MoEWeights]:
    """What SGLang does with a layer at start-up: method, parameters, runner, loaded weights."""
    choose(backend)
    options, _, order = KINDS[kind]
    config = config_of(**options, **changes)
    layer = experts_layer(config)
    quantization = QUANTIZATION_METHODS["mxfp4"](is_checkpoint_mxfp4_serialized=True)
    layer.quant_method = method = quantization.get_quant_method(layer, "model.layers.0.experts")
    biased = kind == "gpt_oss"
    method.create_weights(
        layer=layer,
        num_experts=config.num_local_experts,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        with_bias=biased,
        weight_loader=copy_all,
        moe_intermediate_size=INTERMEDIATE,
    )
    method.create_moe_runner(layer, config)
    weights = weights_of(order, INTERMEDIATE, biased=biased, experts=experts)
    for name, tensor in tensors_of(weights).items():
        assert hasattr(layer, name) == (tensor is not None), name
        if tensor is not None:
            parameter = getattr(layer, name)
            assert callable(parameter.weight_loader)
            parameter.data.copy_(tensor)
    method.process_weights_after_loading(layer)
    return method, layer, weights


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return x, *mxpert.route_topk(torch.randn(TOKENS, EXPERTS, generator=generator), TOP_K)


def call(method: Any, layer: Any, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    output = StandardDispatchOutput(x, None, StandardTopKOutput(*routing, None))
    result: torch.Tensor = method.apply(layer, output).hidden_states
    return result


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_bits_of_fused_moe(kind: str, backend: str) -> None:
    method, layer, weights = built(kind, backend)
    x, *routing = tokens()
    want = mxpert.fused_moe(
        x, weights, *routing, activation=KINDS[kind][1], activation_format=plugin.BACKENDS[backend]
    )
    assert torch.equal(call(method, layer, x, *routing), want)
    assert method.runner.runner_backend.value == backend
    assert want.any()


def test_the_input_is_overwritten_where_sglang_allows_it() -> None:
    method, layer, _ = built("gpt_oss")
    inplace, other, _ = built("gpt_oss", inplace=True)
    x, *routing = tokens()
    want = call(method, layer, x, *routing)
    assert call(inplace, other, x, *routing).data_ptr() == x.data_ptr()
    assert torch.equal(x, want)


def test_foreign_experts_and_padding_rows_are_skipped() -> None:
    """SGLang's dispatcher hands over local ids, −1 for experts of other ranks and padding."""
    method, layer, weights = built("gpt_oss")
    x, topk_weights, topk_ids = tokens()
    topk_ids[:, 0] = -1
    topk_ids[-2:] = -1
    y = call(method, layer, x, topk_weights, topk_ids)
    want = mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation=KINDS["gpt_oss"][1])
    assert torch.equal(y, want)
    assert not y[-2:].any()


@pytest.mark.parametrize("rank", [0, 1])
def test_expert_parallel_ranks_compute_their_own(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through SGLang's own dispatcher, which maps global ids to those of a rank."""
    ranks = SimpleNamespace(moe_ep_size=2, moe_ep_rank=rank)
    monkeypatch.setattr(standard, "get_parallel", lambda: ranks)
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")
    monkeypatch.setattr(standard, "should_use_flashinfer_cutlass_moe_fp4_allgather", lambda: False)
    if hasattr(standard, "get_lora"):
        no_lora = SimpleNamespace(enable_lora=False, lora_paths=None)
        monkeypatch.setattr(standard, "get_lora", lambda: no_lora)
    local = EXPERTS // 2
    method, layer, weights = built("gpt_oss", experts=local, num_local_experts=local)
    config = method.runner.config
    config.num_fused_shared_experts = 0
    if hasattr(config, "runner_backend"):
        config.runner_backend = method.runner.runner_backend
    x, topk_weights, topk_ids = tokens()
    routing = StandardTopKOutput(topk_weights, topk_ids, None)
    output = standard.StandardDispatcher(config).dispatch(x, routing)
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
    want = mxpert.fused_moe(
        x, weights, topk_weights, topk_ids, activation=KINDS["gpt_oss"][1], expert_map=expert_map
    )
    assert torch.equal(method.apply(layer, output).hidden_states, want)
    assert want.any()


def test_weights_on_the_input_and_a_scaling_factor() -> None:
    x, *routing = tokens()
    method, layer, weights = built("silu", apply_router_weight_on_input=True)
    options = dict(activation=mxpert.SiLU(), apply_router_weight_on_input=True)
    want = mxpert.fused_moe(x, weights, *routing, **options)
    assert torch.equal(call(method, layer, x, *routing), want)
    scaled, layer, weights = built("silu", routed_scaling_factor=2.5)
    want = mxpert.fused_moe(x, weights, *routing, activation=mxpert.SiLU()) * 2.5
    assert torch.equal(call(scaled, layer, x, *routing), want)


def test_ragged_shares_are_padded_with_zero_blocks() -> None:
    """48 columns a rank: the loader fills 48 of 64, and the rest adds nothing."""
    choose("mxpert")
    config = config_of(intermediate_size_per_partition=48, **GPT_OSS)
    layer = experts_layer(config)
    layer.quant_method = method = served.ServedMethod("a16w4", "layers.0")
    method.create_weights(layer, EXPERTS, HIDDEN, 48, torch.bfloat16, weight_loader=None)
    method.create_moe_runner(layer, config)
    assert layer.w13_weight.shape == (EXPERTS, 128, HIDDEN // 2)
    whole = weights_of(mxpert.GateUpOrder.INTERLEAVED, 64, biased=False)
    gate_up, down = whole.gate_up_proj, whole.down_proj
    layer.w13_weight.data[:, :96] = gate_up.qdata[:, :96]
    layer.w13_weight_scale.data[:, :96] = gate_up.scale[:, :96]
    layer.w2_weight.data[:, :, :24] = down.qdata[:, :, :24]
    layer.w2_weight_scale.data.copy_(down.scale)
    method.process_weights_after_loading(layer)
    x, *routing = tokens()
    down.qdata[:, :, 24:] = 0
    want = mxpert.fused_moe(x, whole, *routing, activation=KINDS["gpt_oss"][1])
    assert torch.equal(call(method, layer, x, *routing), want)


def test_nothing_is_held_twice() -> None:
    _, layer, _ = built("gpt_oss")
    weights = layer.quant_method.info.layer.weights
    for name, tensor in {
        "w13_weight": weights.gate_up_proj.qdata,
        "w13_weight_scale": weights.gate_up_proj.scale,
        "w13_weight_bias": weights.gate_up_bias,
        "w2_weight": weights.down_proj.qdata,
        "w2_weight_scale": weights.down_proj.scale,
        "w2_weight_bias": weights.down_bias,
    }.items():
        assert getattr(layer, name).data_ptr() == tensor.data_ptr(), name
    assert len(list(layer.parameters())) == 6


def test_kernels_are_compiled_once_for_layers_of_one_shape() -> None:
    calls: list[Any] = []
    with (
        mock.patch.object(shared, "_warm", set()),
        mock.patch.object(shared, "warm_up", lambda *a, **o: calls.append((a, o)) or (1,)),
    ):
        for _ in range(3):
            built("gpt_oss", "mxpert_a8w4")
        built("silu", "mxpert_a8w4")
    assert len(calls) == 2
    (_, most), options = calls[0]
    assert (most, options["activation_format"], options["top_k"]) == (64, "mxfp8", TOP_K)


@pytest.mark.parametrize(
    "changes, most",
    [
        ({}, 64),
        ({"chunked_prefill_size": -1}, 16384),
        ({"chunked_prefill_size": None, "max_prefill_tokens": None}, 8192),
        ({"dp_size": 4}, 256),
        ({"attn_dp_size": 4}, 256),
        ({"_resolved_overrides": [("device memory", {"chunked_prefill_size": 32})]}, 32),
    ],
)
def test_the_largest_batch_follows_sglangs_limits(changes: dict[str, Any], most: int) -> None:
    assert served.max_tokens(SimpleNamespace(**SERVER | changes)) == most


REFUSED = {
    "a2a": ({"moe_a2a_backend": "deepep"}, {}, "--moe-a2a-backend — .* got 'deepep'; remove"),
    "eplb": ({"enable_eplb": True}, {}, "--enable-eplb"),
    "lora": ({"enable_lora": True}, {}, "--enable-lora"),
    "lora-paths": ({"lora_paths": ["a"]}, {}, "--enable-lora"),
    "offload": ({"cpu_offload_gb": 8}, {}, "--cpu-offload-gb — .* got 8"),
    "offload-group": ({"offload_group_size": 2}, {}, "--offload-group-size — .* got 2"),
    "deterministic": ({"enable_deterministic_inference": True}, {}, "--enable-deterministic"),
    "float16": ({}, {"params_dtype": torch.float16}, "--dtype — need bfloat16"),
    "no-combine": ({}, {"no_combine": True}, "the layer — need gated experts"),
    "not-gated": ({}, {"is_gated": False}, "the layer — need gated experts"),
    "hidden": ({}, {"hidden_size": 100}, "hidden_size — need a multiple of 32, got 100"),
    "tp": ({}, {"intermediate_size_per_partition": 48}, "--tp-size — .* got 48; .*--ep-size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_in_one_line(name: str) -> None:
    arguments, changes, text = REFUSED[name]
    config = config_of(**changes)
    with pytest.raises(UnsupportedError, match=text) as error:
        refuse_unsupported(config, SimpleNamespace(**SERVER | arguments))
    assert "\n" not in str(error.value)
    refuse_unsupported(config_of(), SimpleNamespace(**SERVER))


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "relu2"},
        {"activation": "gelu", "swiglu_limit": 7.0},
        {"activation": "situ"},
        {"gemm1_alpha": 1.0},
    ],
)
def test_other_activations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="the experts' activation — need silu"):
        activation_of(config_of(**changes))


@pytest.mark.parametrize("kind", KINDS)
def test_activations_and_orders(kind: str) -> None:
    options, activation, order = KINDS[kind]
    assert activation_of(config_of(**options)) == (activation, order)


def test_the_choices_are_registered() -> None:
    assert set(plugin.BACKENDS) <= set(MOE_RUNNER_BACKEND_CHOICES)
    config = QUANTIZATION_METHODS["mxfp4"]
    assert issubclass(config, Mxfp4Config)
    assert config is not Mxfp4Config
    assert config.get_name() == "mxfp4"


def test_other_backends_get_sglangs_own_method() -> None:
    choose("triton")
    config = QUANTIZATION_METHODS["mxfp4"](is_checkpoint_mxfp4_serialized=True)
    with mock.patch.object(Mxfp4Config, "get_quant_method", return_value="in-tree") as own:
        assert config.get_quant_method(experts_layer(config_of()), "layers.0") == "in-tree"
        choose("mxpert")
        assert config.get_quant_method(torch.nn.Linear(1, 1), "head") == "in-tree"
    assert own.call_count == 2


def test_weights_that_sglang_would_quantise_are_refused() -> None:
    config = QUANTIZATION_METHODS["mxfp4"](is_checkpoint_mxfp4_serialized=False)
    with pytest.raises(UnsupportedError, match="need a checkpoint with MXFP4 experts"):
        config.get_quant_method(experts_layer(config_of()), "layers.0")


def test_experts_of_other_methods_are_refused_at_start_up() -> None:
    config = config_of()
    layer = experts_layer(config)
    layer.quant_method = object()
    with pytest.raises(UnsupportedError, match=r"need experts in MXFP4.* got object"):
        MoeRunner(resolve_moe_runner_backend("mxpert"), config)


def test_experts_that_do_not_fold_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch.object(shared, "count_unfolded", return_value=2),
        caplog.at_level(logging.WARNING, logger="sglang.srt.mxpert"),
    ):
        built("silu")
    assert f"experts: 2 of {EXPERTS} experts do not fold" in caplog.text


def test_registration_imports_no_more_than_sglangs_model_config() -> None:
    """Run in a process of its own: the modules loaded after register(), besides SGLang's."""
    text = """
import sys
from tests.integrations.serving import conftest
import mxpert
import sglang.srt.configs.model_config, sglang.srt.plugins
before = set(sys.modules)
from mxpert.integrations.sglang import register
register()
new = {name for name in set(sys.modules) - before if not name.startswith("mxpert")}
assert not new, new
assert "mxpert.integrations.sglang._method" not in sys.modules
print("light")
"""
    paths = [*map(str, Path(__file__).parents[2:4]), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.stdout.strip().endswith("light"), done.stderr[-2000:]
