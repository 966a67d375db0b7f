"""One layer's experts in a serving engine, and the compilation of their kernels at load."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ...core.problem import Activation, ActivationFormat, TopKOptions
from ...explain import explain
from ...moe.from_logits import fused_moe_from_logits
from ...moe.op import fused_moe
from ...moe.warm_up import even_routing, warm_up
from ...moe.weights import MoEWeights
from .layer_weights import count_unfolded

_warm: set[tuple[object, ...]] = set()
"""Layers whose kernels this process has compiled, by what their kernels depend on."""


@dataclass
class ServedLayer:
    """What one layer's experts compute with; `weights` are the layer's parameters."""

    weights: MoEWeights
    activation: Activation
    activation_format: ActivationFormat

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        *,
        on_input: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, H] for tokens x [T, H]; ids of other ranks' experts are skipped.

        out: where the result is written; None allocates.
        """
        return fused_moe(
            x.contiguous(),
            self.weights,
            topk_weights,
            topk_ids,
            activation=self.activation,
            activation_format=self.activation_format,
            expert_map=expert_map,
            out_dtype=x.dtype,
            apply_router_weight_on_input=on_input,
            out=out,
        )

    def run_from_logits(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        top_k: int,
        routing: TopKOptions,
        expert_map: torch.Tensor | None,
        *,
        on_input: bool = False,
    ) -> torch.Tensor:
        """Return [T, H] for tokens x [T, H], whose experts the layer chooses from logits [T, E]."""
        return fused_moe_from_logits(
            x.contiguous(),
            self.weights,
            logits,
            top_k,
            activation=self.activation,
            activation_format=self.activation_format,
            routing=routing,
            expert_map=expert_map,
            out_dtype=x.dtype,
            apply_router_weight_on_input=on_input,
        )


def warn_of_unfolded(weights: MoEWeights, prefix: str, logger: logging.Logger) -> None:
    """Log how many experts of the layer `prefix` do not fold into e4m3 exactly, if any."""
    unfolded = count_unfolded(weights)
    if unfolded:
        logger.warning(
            "mxpert: %s: %d of %d experts do not fold into e4m3 exactly, "
            "so that the layer runs on the portable kernels",
            prefix,
            unfolded,
            weights.num_experts,
        )


def warm_up_layer(
    layer: ServedLayer,
    max_tokens: int,
    *,
    top_k: int,
    logger: logging.Logger,
    expert_map: torch.Tensor | None = None,
    on_input: bool = False,
    topk_ids_dtype: torch.dtype = torch.int32,
    router_logits_dtype: torch.dtype | None = None,
    routing: TopKOptions = TopKOptions(),
) -> None:
    """Compile what a server will launch for this layer, once for all layers that share kernels.

    Args:
        layer, top_k, expert_map, on_input, topk_ids_dtype: as in the calls of `ServedLayer.run`.
        router_logits_dtype, routing: as in those of `ServedLayer.run_from_logits`; without a dtype
            the engine routes.
        max_tokens: the largest number of tokens of a call. logger: for progress and the backend.
    """
    weights = layer.weights
    sizes = weights.num_experts, weights.hidden_size, weights.intermediate_size
    biased = weights.gate_up_bias is not None, weights.down_bias is not None
    mapped = None if expert_map is None else tuple(expert_map.shape)
    held = weights.weight_format, weights.layout, weights.gate_up_proj.scale.dtype
    formats = layer.activation, layer.activation_format, *held, topk_ids_dtype, on_input
    choice = (top_k, router_logits_dtype, routing)
    key = (weights.device, sizes, biased, mapped, formats, choice, max_tokens)
    if key in _warm:
        return
    _warm.add(key)

    def report(done: int, total: int, num_tokens: int) -> None:
        if done < total:
            text = "mxpert: compiling kernels, %d of %d (T = %d)"
            logger.info(text, done + 1, total, num_tokens)

    counts = warm_up(
        weights,
        max_tokens,
        top_k=top_k,
        expert_map=expert_map,
        apply_router_weight_on_input=on_input,
        topk_ids_dtype=topk_ids_dtype,
        router_logits_dtype=router_logits_dtype,
        routing=routing,
        progress=report,
        activation=layer.activation,
        activation_format=layer.activation_format,
    )
    num_global = weights.num_experts if expert_map is None else expert_map.shape[0]
    x = torch.zeros(1, weights.hidden_size, dtype=torch.bfloat16, device=weights.device)
    even = even_routing(1, top_k, num_global, weights.device)
    chosen = explain(
        fused_moe,
        x,
        weights,
        *even,
        expert_map=expert_map,
        activation=layer.activation,
        activation_format=layer.activation_format,
    ).resolution
    logger.info("mxpert: backend %s (%s)", chosen.kernel.backend, chosen.source)
    if counts and weights.device.type == "cuda":
        torch.cuda.empty_cache()  # engines count what is reserved as the model's
