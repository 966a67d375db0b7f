"""vLLM's two expert interfaces over `mxpert.fused_moe` and `mxpert.fused_moe_from_logits`.

`RoutedExperts` runs behind vLLM's router, in every parallel mode. `RoutingExperts` takes the
router's logits and chooses the experts itself, where mxpert has that choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ...core.problem import TopKOptions
from ..serving.layer import ServedLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

SOFTMAX_OVER_CHOSEN = (RoutingMethodType.Renormalize, RoutingMethodType.RenormalizeNaive)
"""Two names of one choice: the largest logits, weighed by a softmax over them."""

ROUTING = TopKOptions(clamp_nan=True)
"""Padding rows of graphs have NaN logits, which vLLM's own routers clamp as well."""


class _Common:
    """Answers to vLLM that both interfaces share. `layer` is set once the weights are prepared."""

    layer: ServedLayer

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(config: FusedMoEParallelConfig) -> bool:
        return True

    def supports_expert_map(self) -> bool:  # abstract in vLLM 0.20
        return True


class RoutedExperts(_Common, mk.FusedMoEExpertsModular):
    """Experts behind vLLM's router and its prepare and finalize steps."""

    def moe_problem_size(
        self, x: torch.Tensor, _gate_up: torch.Tensor, _down: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        weights = self.layer.weights
        columns = 2 * weights.intermediate_size
        return weights.num_experts, x.shape[0], columns, weights.hidden_size, topk_ids.shape[1]

    def workspace_shapes(self, M: int, N: int, K: int, *_: object, **__: object) -> object:  # noqa: N803
        return (0, 0), (0, 0), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_: object,
    ) -> None:
        """Write the layer's result into `output` [T, H]."""
        if apply_router_weight_on_input:  # vLLM's prepare step has applied the weights
            topk_weights = torch.ones_like(topk_weights)
        self.layer.run(hidden_states, topk_weights, topk_ids, expert_map, out=output)


class RoutingExperts(_Common, mk.FusedMoEExpertsMonolithic):
    """Experts that choose from the router's logits themselves."""

    @staticmethod
    def serves(moe: FusedMoEConfig, vllm_config: VllmConfig) -> bool:
        """Whether these experts may replace vLLM's router in a layer.

        Not where tokens of several ranks meet, and not where vLLM changes or records the choice.
        """
        parallel = moe.moe_parallel_config
        return (
            moe.routing_method in SOFTMAX_OVER_CHOSEN
            and not parallel.use_all2all_kernels
            and parallel.dp_size <= 1
            and not getattr(moe, "has_hash_routing", False)
            and not getattr(moe, "require_decomposed_backend", False)
            and not getattr(vllm_config.model_config, "enable_return_routed_experts", False)
        )

    @staticmethod
    def serves_router_of(layer: torch.nn.Module) -> bool:
        """Whether a layer's router has neither groups nor a bias nor a scaling factor."""
        return (
            getattr(layer, "num_expert_group", None) in (None, 0, 1)
            and getattr(layer, "e_score_correction_bias", None) is None
            and getattr(layer, "custom_routing_function", None) is None
            and getattr(layer, "routed_scaling_factor", None) in (None, 1.0)
        )

    @staticmethod
    def _supports_routing_method(
        method: RoutingMethodType, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return method in SOFTMAX_OVER_CHOSEN

    @staticmethod
    def _supports_router_logits_dtype(dtype: torch.dtype | None, method: RoutingMethodType) -> bool:
        return True

    def apply(
        self,
        hidden_states: torch.Tensor,
        *,
        router_logits: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_: object,
    ) -> torch.Tensor:
        """Return the layer's result [T, H]."""
        top_k, on_input = self.moe_config.experts_per_token, apply_router_weight_on_input
        return self.layer.run_from_logits(
            hidden_states, router_logits, top_k, ROUTING, expert_map, on_input=on_input
        )
