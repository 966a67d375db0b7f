"""The order of a layer's launches, which backends share: routing plan, stage 1, stage 2."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..core.kernel import NO_PERSISTENT_GRID, KernelSpec
from ..core.launch import CACHED_LAUNCHES
from ..core.problem import (
    Combine,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    QuantizeProblem,
    RoutingProblem,
    TopKProblem,
    kernel_parameters,
)
from ..core.target import current_device
from ..device.mx_codec import scale_rule_constants
from ..formats.tensor import MXTensor, Operand
from ..formats.token import FP8_TOKEN
from ..formats.weight_tensor import WeightLike
from ..quantize.inputs import QuantizeInputs
from ..quantize.triton import QUANTIZE
from ..routing.inputs import PlanInputs, TopKInputs
from ..routing.plan import RoutingPlan
from ..routing.triton import PLAN, TOPK, PlanConfig, TopKConfig
from .combine import combine_slots
from .inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs
from .token_rows import CodedRows, quantize_tokens
from .weights import MoEWeights


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
        return self._gate_up.unsupported(problem) or _routing_unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[MoEConfig]:
        """Valid configs, including the heuristic's."""
        yield from self._choice.layer_configs(problem)

    def heuristic(self, problem: MoEProblem) -> MoEConfig:
        """The config used if the tuned table has no row for `problem`."""
        config: MoEConfig = self._choice.layer_heuristic(problem)
        return config

    def persistent(self, problem: MoEProblem, config: MoEConfig) -> MoEConfig | str:
        """The config with persistent grids in both stages, or why there is none."""
        stages = []
        for stage, own in ((self._gate_up, config.gate_up), (self._down, config.down)):
            limit = getattr(stage, "persistent", None)
            limited = NO_PERSISTENT_GRID if limit is None else limit(problem, own)
            if isinstance(limited, str):
                return limited
            stages.append(limited)
        return replace(config, gate_up=stages[0], down=stages[1])

    def launch(self, problem: MoEProblem, config: MoEConfig, inputs: LayerInputs) -> torch.Tensor:
        """Return [T, H] in ``options.out_dtype``, or `out`; launch nothing if T = 0."""
        weights, expert_map = inputs.weights, inputs.expert_map
        if problem.num_tokens == 0:
            if inputs.out is not None:
                return inputs.out
            return torch.empty(
                (0, weights.hidden_size), dtype=problem.options.out_dtype, device=weights.device
            )
        num_global = problem.num_experts if expert_map is None else expert_map.shape[0]
        given = routed(problem, inputs)
        to_sort = PlanInputs(
            given.topk_weights, given.topk_ids, expert_map, given.num_local_tokens, given.arrivals
        )
        plan = PLAN.launch(*_layer_routing(problem, num_global, config.routing_block_m), to_sort)
        return self.stages(problem, config, given, plan)

    def stages(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs, plan: RoutingPlan
    ) -> torch.Tensor:
        """Run both stages with a given plan; return [T, H], or `out`, which stage 2 writes."""
        weights, num_rows = inputs.weights, plan.max_blocks * plan.routing_block_m
        first = GateUpInputs(inputs.x, weights, plan)
        h = self._gate_up.run(problem, config.gate_up, first, num_rows)
        second = DownInputs(h, weights, plan, inputs.out)
        return self._down.launch(problem, config.down, second)


def routed(problem: MoEProblem, inputs: LayerInputs) -> FusedMoEInputs:
    """Inputs with ids: as they are, or with those that a top-k launch chooses from the logits."""
    if isinstance(inputs, FusedMoEInputs):
        return inputs
    logits = TopKInputs(inputs.logits, inputs.correction_bias)
    return inputs.with_ids(*TOPK.launch(*_layer_choice(problem), logits))


def _routing_unsupported(problem: MoEProblem) -> str | None:
    """Why the top-k kernel cannot choose the experts of a layer; None if it can or need not."""
    choice = problem.choice
    return None if choice is None else TOPK.unsupported(choice)


@functools.lru_cache(CACHED_LAUNCHES)
def _layer_choice(problem: MoEProblem) -> tuple[TopKProblem, TopKConfig]:
    """Problem and config of the choice of experts of a layer that is given logits."""
    choice = problem.choice
    assert choice is not None  # for the type checker: the layer is given logits
    return choice, TOPK.heuristic(choice)


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


# ---- The host's flow of a layer's two stages: allocation, `multiply`, combine; no synchronisation.

Rows = torch.Tensor | MXTensor | CodedRows
_ConfigT = TypeVar("_ConfigT")


class Stage(abc.ABC, Generic[_ConfigT]):
    """A stage of a layer, which multiplies rows by one of its two weights."""

    op: Op

    @abc.abstractmethod
    def multiply(
        self,
        problem: MoEProblem,
        config: _ConfigT,
        plan: RoutingPlan,
        rows: torch.Tensor | MXTensor,
        weights: MoEWeights,
        epilogue: dict[str, torch.Tensor | None],
    ) -> None:
        """Start the GEMM and, after split-K, the kernel that sums its parts.

        Args:
            rows: tokens in stage 1, sorted rows in stage 2; in bfloat16 they are quantised first.
            epilogue: tensors of the epilogue and of the plan, which both kernels get.

        Raises:
            ValueError: a pinned or tuned config that no kernel implements.
        """

    def weight(self, weights: MoEWeights) -> WeightLike:
        """The weight of this stage."""
        return weights.gate_up_proj if self.op is Op.MOE_GATE_UP else weights.down_proj


class GateUpStage(Stage[_ConfigT]):
    """Stage 1: gather, gate/up GEMM, bias, activation, requantisation."""

    op = Op.MOE_GATE_UP

    def launch(self, problem: MoEProblem, config: _ConfigT, inputs: GateUpInputs) -> Operand:
        """Return the intermediate [P, F] in sorted order; padding rows are uninitialised."""
        return self.run(problem, config, inputs, inputs.plan.capacity)

    def run(
        self, problem: MoEProblem, config: _ConfigT, inputs: GateUpInputs, num_rows: int
    ) -> Operand:
        """As `launch`, but allocate `num_rows` rows."""
        h = _allocate(problem.options, num_rows, inputs.weights)
        parts = (h.qdata, h.scale) if isinstance(h, MXTensor) else (h, None)
        self.store(problem, config, inputs, *parts)
        return h

    def store(
        self,
        problem: MoEProblem,
        config: _ConfigT,
        inputs: GateUpInputs,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
    ) -> None:
        """Run the stage and store its rows to `out`, and their scales to `out_scale`."""
        weights, plan = inputs.weights, inputs.plan
        epilogue = {
            "out_ptr": out,
            "out_scale_ptr": out_scale,
            "bias_ptr": weights.gate_up_bias,
            **_plan_tensors(plan, problem.options.apply_router_weight_on_input),
        }
        self.multiply(problem, config, plan, inputs.x, weights, epilogue)


class DownStage(Stage[_ConfigT]):
    """Stage 2: down GEMM, bias, routing weight, combine."""

    op = Op.MOE_DOWN

    def launch(self, problem: MoEProblem, config: _ConfigT, inputs: DownInputs) -> torch.Tensor:
        """Return [T, H] (`out`, if given), or with FLAT [P, H] whose padding is uninitialised."""
        weights, plan, out = inputs.weights, inputs.plan, inputs.out
        options, combine = problem.options, problem.options.combine
        num_rows, dtype = plan.max_blocks * plan.routing_block_m, options.out_dtype
        if combine is Combine.FLAT:
            num_rows = plan.capacity
        elif combine is Combine.ATOMIC:
            num_rows, dtype = plan.num_tokens, torch.float32
        values = weights.down_proj.qdata.new_empty((num_rows, problem.hidden_size), dtype=dtype)
        if combine is Combine.ATOMIC:
            values.zero_()
        epilogue = {
            "out_ptr": values,
            "bias_ptr": weights.down_bias,
            **_plan_tensors(plan, not options.apply_router_weight_on_input),
        }
        self.multiply(problem, config, plan, inputs.h, weights, epilogue)
        if combine is not Combine.REDUCE:
            if out is None:
                return values.to(options.out_dtype)
            # Where launches only compile, there are no values yet, and `out` may be x.
            return out if current_device().compiles_only else out.copy_(values)
        if plan.num_tokens == 0:
            return values.new_empty((0, problem.hidden_size))
        return combine_slots(values, plan.slot_rows, problem.target, out=out)


def _plan_tensors(plan: RoutingPlan, weighted: bool) -> dict[str, torch.Tensor | None]:
    return {
        "sorted_token_ids_ptr": plan.sorted_token_ids,
        "sorted_weights_ptr": plan.sorted_weights if weighted else None,
        "block_expert_ids_ptr": plan.block_expert_ids,
        "num_valid_ptr": plan.num_valid,
    }


def _allocate(options: MoEOptions, num_rows: int, weights: MoEWeights) -> torch.Tensor | MXTensor:
    """Uninitialised rows [num_rows, F] in the format that stage 1 stores."""
    features, empty = weights.intermediate_size, weights.gate_up_proj.qdata.new_empty
    format = options.mx_format
    if format is None:
        return empty((num_rows, features), dtype=torch.bfloat16)
    return MXTensor(
        empty((num_rows, features // format.codes_per_byte)),
        empty((num_rows, features // format.block_size)),
        format,
    )


def gemm_rows(problem: MoEProblem, rows: torch.Tensor | MXTensor) -> Rows:
    """Convert `rows` to the layer's activation format, if they are not in it."""
    if problem.options.activation_format == FP8_TOKEN and isinstance(rows, torch.Tensor):
        return quantize_tokens(rows)
    return quantize_rows(problem, rows)


def gate_up_epilogue_arguments(options: MoEOptions) -> dict[str, Any]:
    """Numbers and constants of stage 1's epilogue: the activation and the format of its output."""
    return dict(
        **kernel_parameters(options.activation),
        ACTIVATION=options.activation.name,
        **up_epilogue_arguments(options),
    )


def up_epilogue_arguments(options: MoEOptions) -> dict[str, Any]:
    """Constants of stage 1's epilogue without a gate, where ReLU2 is the activation."""
    format = options.mx_format
    constants: dict[str, Any] = {"EMAX": 0, "THRESHOLD": 0}
    if format is not None:
        constants = scale_rule_constants(format, options.scale_rule)
    return dict(OUT_FORMAT="bf16" if format is None else format.element.name, **constants)
