"""Layers, configs and checkpoints for the tests of mxpert.integrations.vllm, in any version."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)

import mxpert
from mxpert.integrations.vllm import _configs as configs

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 8, 96, 64, 2, 13


def fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values that a dataclass of this version takes."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    return {name: value for name, value in values.items() if name in known}


def moe_config(*, parallel: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's FusedMoEConfig of a small layer."""
    one = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    zero = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    rest = dict(use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False)
    parallel_config = FusedMoEParallelConfig(
        **fields_of(FusedMoEParallelConfig, {**one, **zero, **rest, **(parallel or {})})
    )
    values: dict[str, Any] = dict(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        intermediate_size_per_partition=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel_config,
        in_dtype=torch.bfloat16,
    )
    return FusedMoEConfig(**fields_of(FusedMoEConfig, values | changes))


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss_mxfp4": {"quant_method": "gpt_oss_mxfp4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "deepseek_v4_fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "ignore": ["re:.*layers.7.mlp.experts.*", "lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                },
            }
        },
    },
    "quark": {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "order"},
        "exclude": ["model.layers.7.mlp.experts"],
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "global_quant_config": {
            "weight": {
                "dtype": "fp4",
                "qscheme": "per_group",
                "group_size": 32,
                "scale_format": "e8m0",
                "is_dynamic": False,
            },
            "input_tensors": None,
            "output_tensors": None,
            "bias": None,
        },
    },
}
"""Quantisation configs of checkpoints, by vLLM's name."""

_MODELOPT = {"quant_method": "modelopt", "ignore": ["model.layers.7.mlp.experts*"]}
_AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "modules_to_not_convert": ["layers.7.mlp"],
}
_GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "dynamic": {r"-:.*layers\.7\.mlp.*": {}},
}
CONFIGS |= {
    "modelopt_fp4": {**_MODELOPT, "quant_algo": "NVFP4"},
    "modelopt_mxfp8": {**_MODELOPT, "quant_algo": "MXFP8"},
    "modelopt_mixed": {
        **_MODELOPT,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}},
    },
    "mxfp8": {"quant_method": "mxfp8", "ignored_layers": ["model.layers.7.mlp.experts"]},
    **dict.fromkeys(("auto_awq", "awq", "awq_marlin"), _AWQ),
    **dict.fromkeys(("auto_gptq", "gptq", "gptq_marlin"), _GPTQ),
}

ENGINE: dict[str, Any] = dict(
    enable_eplb=False,
    lora_config=None,
    enable_expert_parallel=False,
    data_parallel_size=1,
    all2all_backend="allgather_reducescatter",
    cpu_offload_gb=0,
    offload_group_size=0,
    moe_backend="auto",
    dtype=torch.bfloat16,
    quantization="gpt_oss_mxfp4",
    is_moe=True,
    runner_type="generate",
    hf_config=None,
)
"""Options of an engine that mxpert serves."""


def vllm_config(additional_config: object = None, **changes: Any) -> Any:
    """What the plugin reads of vLLM's VllmConfig; `changes` are of ENGINE."""
    assert set(changes) <= set(ENGINE)
    options = SimpleNamespace(**ENGINE | changes)
    options.offload_config = SimpleNamespace(uva=options, prefetch=options)
    options.parallel_config = options.kernel_config = options.model_config = options
    options.additional_config = additional_config
    options.scheduler_config = SimpleNamespace(max_num_batched_tokens=64)
    return options


@contextmanager
def current_config(additional_config: object = None, **changes: Any) -> Iterator[None]:
    """vLLM's current config inside the block."""
    made = vllm_config(additional_config, **changes)
    with mock.patch.object(configs, "get_current_vllm_config", return_value=made):
        yield


def make_layer(moe: Any) -> torch.nn.Module:
    """A module with what vLLM's methods read of the routed experts; it has no parameters yet."""
    layer = torch.nn.Module()
    layer.moe_config, layer.activation = moe, moe.activation
    layer.global_num_experts, layer.expert_map = moe.num_experts, None
    layer.apply_router_weight_on_input = False
    for name in (
        "num_expert_group",
        "topk_group",
        "e_score_correction_bias",
        "routed_scaling_factor",
        "routing_sink",
        "hash_indices_table",
        "swiglu_limit",
    ):
        setattr(layer, name, None)
    return layer


def routed_experts(moe: Any = None) -> Any:
    """A layer of vLLM's class, without its constructor."""
    from vllm.model_executor.layers import fused_moe

    kind = getattr(fused_moe, "RoutedExperts", None) or fused_moe.FusedMoE
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.moe_config = moe_config() if moe is None else moe
    for role in ("gate", "up", "down"):
        setattr(layer, f"ckpt_{role}_proj_name", f"{role}_proj")
    return layer


@dataclasses.dataclass
class Checkpoint:
    """One layer's quantised weights, as mxpert holds them."""

    weights: mxpert.MoEWeights

    @classmethod
    def random(
        cls,
        order: mxpert.GateUpOrder,
        *,
        biased: bool = False,
        seed: int = 0,
        experts: int = EXPERTS,
    ) -> Checkpoint:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        def projection(rows: int, depth: int) -> mxpert.MXTensor:
            return mxpert.quantize(normal(experts, rows, depth) / math.sqrt(depth), "mxfp4")

        def bias(width: int) -> torch.Tensor | None:
            return normal(experts, width).bfloat16().float() if biased else None

        return cls(
            mxpert.MoEWeights(
                projection(2 * INTERMEDIATE, HIDDEN),
                projection(HIDDEN, INTERMEDIATE),
                gate_up_bias=bias(2 * INTERMEDIATE),
                down_bias=bias(HIDDEN),
                gate_up_order=order,
            )
        )

    def load(self, layer: torch.nn.Module) -> None:
        """Copy the weights into the parameters that vLLM's method created."""
        tensors = {
            "w13_weight": self.weights.gate_up_proj.qdata,
            "w13_weight_scale": self.weights.gate_up_proj.scale,
            "w2_weight": self.weights.down_proj.qdata,
            "w2_weight_scale": self.weights.down_proj.scale,
            "w13_bias": self.weights.gate_up_bias,
            "w2_bias": self.weights.down_bias,
        }
        for name, tensor in tensors.items():
            parameter = getattr(layer, f"{name}_packed", None)
            parameter = getattr(layer, name, None) if parameter is None else parameter
            assert (parameter is None) == (tensor is None), name
            if parameter is not None and tensor is not None:
                rows = tuple(slice(size) for size in tensor.shape)
                parameter.data[rows].copy_(tensor)


def make_method(base: type, moe: Any, activation_format: str = "a16w4", **changes: Any) -> Any:
    """mxpert's method over `base`, a method of this vLLM."""
    from mxpert.integrations.vllm._layer_formats import mxfp4_experts
    from mxpert.integrations.vllm._method import served_method
    from mxpert.integrations.vllm.options import requested_options

    experts, asked = mxfp4_experts(SimpleNamespace(moe_config=moe), base), activation_format
    options, engine = requested_options({"mxpert": asked}), vllm_config(None, **changes)
    return served_method(base)(moe, options, "layers.0", engine, experts)


def no_loader(
    param: Any,
    loaded_weight: Any,
    weight_name: str = "",
    shard_id: Any = None,
    expert_id: Any = None,
    return_success: bool = False,
) -> None:
    """A loader of vLLM's signature that copies nothing."""


def create_weights(method: Any, layer: torch.nn.Module) -> None:
    """The layer's parameters, as vLLM creates them."""
    moe = method.moe
    sizes = method.maybe_roundup_sizes(
        moe.hidden_dim, moe.intermediate_size_per_partition, torch.bfloat16, moe.moe_parallel_config
    )
    method.create_weights(
        layer=layer,
        num_experts=moe.num_local_experts,
        hidden_size=sizes[0],
        intermediate_size_per_partition=sizes[1],
        params_dtype=torch.bfloat16,
        weight_loader=no_loader,
    )


def load(method: Any, layer: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """What vLLM does with a layer at load time."""
    create_weights(method, layer)
    checkpoint.load(layer)
    method.process_weights_after_loading(layer)


def tokens(count: int = TOKENS, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and router logits [T, E], bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(count, width, generator=generator) for width in (HIDDEN, EXPERTS))
    x, logits = (each.bfloat16() for each in made)
    return x, logits


def call(method: Any, layer: torch.nn.Module, x: torch.Tensor, *routing: torch.Tensor) -> Any:
    """Run the layer as vLLM's runner does: logits, or (topk_weights, topk_ids)."""
    if method.is_monolithic:
        return method.apply_monolithic(layer, x, *routing)
    names = method.apply.__code__.co_varnames[: method.apply.__code__.co_argcount]
    shared = {name: None for name in ("shared_experts", "shared_experts_input") if name in names}
    return method.apply(layer, x, *routing, **shared)
