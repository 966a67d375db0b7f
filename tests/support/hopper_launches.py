"""Recorder of the Hopper backend's launches: both stages run on meta tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mxpert.configs import HopperGemmConfig
from mxpert.core.problem import MoEConfig, MoEOptions, MoEProblem, Op, Target, activation_mx_format
from mxpert.formats import MXFP4, MXTensor
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper import host as moe
from mxpert.moe.inputs import DownInputs, FusedMoEInputs, GateUpInputs
from mxpert.moe.weights import GateUpOrder, MoEWeights
from mxpert.routing.plan import RoutingPlan, plan_capacity
from mxpert.testing.problems import MoEShape
from support.aot import CompiledKernel, compile_for, specialize
from support.launches import RecordedLaunch, recorded_launches

H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def binary(self) -> str:
        """Name of the binary of this launch."""
        return specialize(self.kernel, self.arguments, "sm_90").key

    def compile(self) -> CompiledKernel:
        """Compile the binary of this launch."""
        return compile_for(self.kernel, self.arguments, target="sm_90")


def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def packed(experts: int, num_rows: int, depth: int) -> MXTensor:
    """A HOPPER_FRAGMENT tensor without data."""
    units, steps = -(-num_rows // 64), -(-depth // 128)
    return MXTensor(
        empty(experts, units, steps, 4096),
        empty(experts, units, steps, 256),
        MXFP4,
        -1,
        Layout.HOPPER_FRAGMENT,
        empty(experts, units * 64),
        (experts, num_rows, depth),
    )


def rows_of(num_rows: int, depth: int, a_format: Any, quantised: bool) -> torch.Tensor | MXTensor:
    """Rows without data: bfloat16, or an MXTensor if `a_format` is an MX format."""
    format = activation_mx_format(a_format) if quantised else None
    if format is None:
        return empty(num_rows, depth, dtype=torch.bfloat16)
    return MXTensor(
        empty(num_rows, depth // format.codes_per_byte), empty(num_rows, depth // 32), format
    )


def describe(shape: MoEShape, num_tokens: int, a_format: Any, **options: Any) -> MoEProblem:
    return MoEProblem(
        Op.FUSED_MOE,
        H200,
        num_tokens,
        shape.top_k,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        MoEOptions(shape.activation, a_format, **options),
        Layout.HOPPER_FRAGMENT,
    )


class Recorder:
    """Records the backend's launches and replaces the functions around them by stubs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._recorded: list[RecordedLaunch] = []
        monkeypatch.setattr(moe, "combine_slots", lambda rows, *_args, **_options: rows)
        monkeypatch.setattr(moe, "quantize_rows", lambda problem, x: x)

    @property
    def launches(self) -> list[Launch]:
        """Those of the last run."""
        return [Launch(*each) for each in self._recorded]

    def run(
        self,
        problem: MoEProblem,
        config: HopperGemmConfig,
        *,
        has_bias: bool,
        quantised: bool = False,
    ) -> list[Launch]:
        """Launches of both stages of `problem` with the same config.

        With `quantised`, rows are passed as an MXTensor, as between the separate ops.
        """
        weights, plan = weights_of(problem, has_bias), plan_of(problem, config.block_m)
        a_format = problem.options.activation_format
        num_rows = plan.max_blocks * plan.routing_block_m
        x = rows_of(problem.num_tokens, problem.hidden_size, a_format, quantised)
        h = rows_of(num_rows, problem.intermediate_size, a_format, quantised)
        with recorded_launches() as self._recorded:
            moe.GATE_UP.run(problem, config, GateUpInputs(x, weights, plan), num_rows)
            moe.DOWN.launch(problem, config, DownInputs(weights=weights, plan=plan, h=h))
        return self.launches

    def run_layer(self, problem: MoEProblem, config: HopperGemmConfig) -> list[Launch]:
        """Launches of both stages in a layer."""
        x = rows_of(problem.num_tokens, problem.hidden_size, "bf16", False)
        plan = plan_of(problem, config.block_m)
        weights = weights_of(problem, has_bias=False)
        inputs = FusedMoEInputs(x, weights, plan.sorted_weights, plan.slot_rows)
        layer = MoEConfig(config.block_m, config, config)
        with recorded_launches() as self._recorded:
            moe.FUSED_MOE.stages(problem, layer, inputs, plan)
        return self.launches


def weights_of(problem: MoEProblem, has_bias: bool) -> MoEWeights:
    experts, hidden, inner = (problem.num_experts, problem.hidden_size, problem.intermediate_size)
    return MoEWeights(
        packed(experts, 2 * inner, hidden),
        packed(experts, hidden, inner),
        empty(experts, 2 * inner, dtype=torch.float32) if has_bias else None,
        empty(experts, hidden, dtype=torch.float32) if has_bias else None,
        GateUpOrder.INTERLEAVED,
    )


def plan_of(problem: MoEProblem, unit: int) -> RoutingPlan:
    experts, tokens = problem.num_experts, problem.num_tokens
    capacity = plan_capacity(tokens, problem.top_k, experts, unit)
    return RoutingPlan(
        empty(capacity, dtype=torch.int32),
        empty(capacity, dtype=torch.float32),
        empty(capacity // unit, dtype=torch.int32),
        empty(2, dtype=torch.int32),
        empty(tokens, problem.top_k, dtype=torch.int32),
        tokens,
        problem.top_k,
        experts,
        unit,
    )
