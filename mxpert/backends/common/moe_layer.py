"""The order of a layer's launches, which backends share: routing plan, stage 1, stage 2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from ...formats.tensor import MXTensor
from ...problem import (
    MoEConfig,
    MoEProblem,
    Op,
    QuantizeProblem,
    RoutingProblem,
    activation_mx_format,
)
from ...routing import RoutingPlan
from ...runtime.launch import CACHED_LAUNCHES
from ...weights import MoEWeights
from .quantize import QUANTIZE
from .routing.host import PLAN, PlanConfig


class TwoStageLayer:
    """FUSED_MOE from a backend's two stages: routing plan, stage 1, stage 2.

    Args:
        gate_up, down: the stages; `gate_up.run` takes the number of rows to allocate.
        choice: the backend's heuristics module (layer_configs, layer_heuristic).
    """

    op = Op.FUSED_MOE

    def __init__(self, gate_up: Any, down: Any, choice: ModuleType) -> None:
        self.backend: str = gate_up.backend
        self._gate_up, self._down, self._choice = gate_up, down, choice

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        reason: str | None = self._gate_up.unsupported(problem)
        return reason

    def configs(self, problem: MoEProblem) -> Iterator[MoEConfig]:
        """Valid configs, including the heuristic's."""
        yield from self._choice.layer_configs(problem)

    def heuristic(self, problem: MoEProblem) -> MoEConfig:
        """The config used if the tuned table has no row for `problem`."""
        config: MoEConfig = self._choice.layer_heuristic(problem)
        return config

    def launch(
        self,
        problem: MoEProblem,
        config: MoEConfig,
        *,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        num_local_tokens: torch.Tensor | None,
        out: torch.Tensor | None = None,
        arrivals: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, H] in ``options.out_dtype``, or `out`; launch nothing if T = 0.

        arrivals: what the sort waits for, if other ranks send the tokens; see `exchange`.
        """
        if problem.num_tokens == 0:
            if out is not None:
                return out
            return torch.empty(
                (0, weights.hidden_size), dtype=problem.options.out_dtype, device=weights.device
            )
        num_global = problem.num_experts if expert_map is None else expert_map.shape[0]
        plan = PLAN.launch(
            *_layer_routing(problem, num_global, config.routing_block_m),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            num_local_tokens=num_local_tokens,
            arrivals=arrivals,
        )
        return self.stages(problem, config, x, weights, plan, out)

    def stages(
        self,
        problem: MoEProblem,
        config: MoEConfig,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run both stages with a given plan; return [T, H], or `out`, which stage 2 writes."""
        shared = self.shared_arguments()
        h = self._gate_up.run(
            problem,
            config.gate_up,
            x=x,
            weights=weights,
            plan=plan,
            num_rows=plan.max_blocks * plan.routing_block_m,
            **shared,
        )
        given = {} if out is None else {"out": out}
        y: torch.Tensor = self._down.launch(
            problem, config.down, h=h, weights=weights, plan=plan, **given, **shared
        )
        return y

    def shared_arguments(self) -> dict[str, Any]:
        """Further arguments of one layer's two stages; a backend may have some."""
        return {}


@functools.lru_cache(CACHED_LAUNCHES)
def _layer_routing(
    problem: MoEProblem, num_global: int, routing_block_m: int
) -> tuple[RoutingProblem, PlanConfig]:
    """Problem and config of the routing plan of a layer."""
    routing = RoutingProblem(
        Op.ROUTING_PLAN,
        problem.target,
        problem.num_tokens,
        problem.top_k,
        num_global,
        problem.num_experts,
        routing_block_m,
    )
    return routing, PLAN.heuristic(routing)


def quantize_rows(problem: MoEProblem, x: torch.Tensor | MXTensor) -> torch.Tensor | MXTensor:
    """Quantise `x` to the layer's MX activation format.

    Return `x` unchanged if it is quantised already or if the layer has no MX activation format.
    """
    format = activation_mx_format(problem.options.activation_format, problem.op.value)
    if format is None or isinstance(x, MXTensor):
        return x
    quantize = QuantizeProblem(
        Op.QUANTIZE, problem.target, tuple(x.shape), -1, x.dtype, format, problem.options.scale_rule
    )
    return QUANTIZE.launch(quantize, QUANTIZE.heuristic(quantize), x=x)
