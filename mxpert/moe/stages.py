"""The host's flow of a layer's two stages: allocation, `multiply`, combine; no synchronisation."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

import torch

from ..core.problem import Combine, MoEOptions, MoEProblem, Op
from ..device.mx_codec import scale_rule_constants
from ..formats.tensor import MXTensor, Operand
from ..formats.token import FP8_TOKEN
from ..routing.plan import RoutingPlan
from .combine import combine_slots
from .inputs import DownInputs, GateUpInputs
from .layer import quantize_rows
from .token_rows import CodedRows, quantize_tokens
from .weights import MoEWeights

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

    def weight(self, weights: MoEWeights) -> MXTensor:
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
        options, weights, plan = problem.options, inputs.weights, inputs.plan
        h = _allocate(options, num_rows, weights)
        epilogue = {
            "out_ptr": h.qdata if isinstance(h, MXTensor) else h,
            "out_scale_ptr": h.scale if isinstance(h, MXTensor) else None,
            "bias_ptr": weights.gate_up_bias,
            **_plan_tensors(plan, options.apply_router_weight_on_input),
        }
        self.multiply(problem, config, plan, inputs.x, weights, epilogue)
        return h


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
            return values.to(options.out_dtype) if out is None else out.copy_(values)
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
    format = options.mx_format
    constants: dict[str, Any] = {"EMAX": 0, "THRESHOLD": 0}
    if format is not None:
        constants = scale_rule_constants(format, options.scale_rule)
    p0, p1 = options.activation.parameters
    return dict(
        p0=float(p0),
        p1=float(p1),
        ACTIVATION=options.activation.name,
        OUT_FORMAT="bf16" if format is None else format.element.name,
        **constants,
    )
