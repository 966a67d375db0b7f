"""The order of a layer's launches, which backends share: routing plan, stage 1, stage 2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import torch

from ..core.kernel import KernelSpec
from ..core.launch import CACHED_LAUNCHES
from ..core.problem import MoEConfig, MoEProblem, Op, QuantizeProblem, RoutingProblem
from ..formats.tensor import MXTensor, Operand
from ..quantize.inputs import QuantizeInputs
from ..quantize.triton import QUANTIZE
from ..routing.inputs import PlanInputs
from ..routing.plan import RoutingPlan
from ..routing.triton import PLAN, PlanConfig
from .inputs import DownInputs, FusedMoEInputs, GateUpInputs


class FirstStage(Protocol):
    """Stage 1 in a layer. Any: each backend has its own config, and rows between the stages."""

    @property
    def backend(self) -> str: ...

    def unsupported(self, problem: MoEProblem) -> str | None: ...

    def run(self, problem: MoEProblem, config: Any, inputs: GateUpInputs, num_rows: int) -> Any: ...


SecondStage = KernelSpec[MoEProblem, Any, DownInputs, torch.Tensor]
"""Stage 2. Any: each backend has its own config."""


class TwoStageLayer:
    """FUSED_MOE from a backend's two stages: routing plan, stage 1, stage 2.

    Args:
        gate_up, down: the stages; `gate_up.run` takes the number of rows to allocate.
        choice: the backend's heuristics module (layer_configs, layer_heuristic).
    """

    op = Op.FUSED_MOE

    def __init__(self, gate_up: FirstStage, down: SecondStage, choice: ModuleType) -> None:
        self.backend = gate_up.backend
        self._gate_up, self._down, self._choice = gate_up, down, choice

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        return self._gate_up.unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[MoEConfig]:
        """Valid configs, including the heuristic's."""
        yield from self._choice.layer_configs(problem)

    def heuristic(self, problem: MoEProblem) -> MoEConfig:
        """The config used if the tuned table has no row for `problem`."""
        config: MoEConfig = self._choice.layer_heuristic(problem)
        return config

    def launch(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs
    ) -> torch.Tensor:
        """Return [T, H] in ``options.out_dtype``, or `out`; launch nothing if T = 0."""
        weights, expert_map = inputs.weights, inputs.expert_map
        if problem.num_tokens == 0:
            if inputs.out is not None:
                return inputs.out
            return torch.empty(
                (0, weights.hidden_size), dtype=problem.options.out_dtype, device=weights.device
            )
        num_global = problem.num_experts if expert_map is None else expert_map.shape[0]
        routed = PlanInputs(
            inputs.topk_weights,
            inputs.topk_ids,
            expert_map,
            inputs.num_local_tokens,
            inputs.arrivals,
        )
        plan = PLAN.launch(*_layer_routing(problem, num_global, config.routing_block_m), routed)
        return self.stages(problem, config, inputs, plan)

    def stages(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs, plan: RoutingPlan
    ) -> torch.Tensor:
        """Run both stages with a given plan; return [T, H], or `out`, which stage 2 writes."""
        weights, num_rows = inputs.weights, plan.max_blocks * plan.routing_block_m
        first = GateUpInputs(inputs.x, weights, plan)
        h = self._gate_up.run(problem, config.gate_up, first, num_rows)
        second = DownInputs(h, weights, plan, inputs.out)
        return self._down.launch(problem, config.down, second)


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


def quantize_rows(problem: MoEProblem, x: Operand) -> Operand:
    """Quantise `x` to the layer's MX activation format.

    Return `x` unchanged if it is quantised already or if the layer has no MX activation format.
    """
    format = problem.options.mx_format
    if format is None or isinstance(x, MXTensor):
        return x
    quantize = QuantizeProblem(
        Op.QUANTIZE, problem.target, tuple(x.shape), -1, x.dtype, format, problem.options.scale_rule
    )
    return QUANTIZE.launch(quantize, QUANTIZE.heuristic(quantize), QuantizeInputs(x))
