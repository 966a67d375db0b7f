"""Recorder of the Hopper backend's launches: both stages run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import mxpert
from mxpert.configs import HopperGemmConfig
from mxpert.core.cuda_kernel import CudaKernel
from mxpert.core.problem import MoEConfig, MoEProblem, Target, activation_mx_format
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.hopper import host as moe
from mxpert.moe.inputs import DownInputs, FusedMoEInputs, GateUpInputs
from mxpert.testing.problems import MoEShape
from support.aot import CompiledKernel, compile_for, specialize
from support.launches import RecordedLaunch, recorded_launches
from support.without_data import empty, layer_of, packed, packed_fp8, plan_of, rows_of, weights_of

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
        if isinstance(self.kernel, CudaKernel):
            return repr(self.kernel.macros(self.arguments))
        return specialize(self.kernel, self.arguments, "sm_90").key

    def compile(self) -> CompiledKernel:
        """Compile the binary of this launch."""
        return compile_for(self.kernel, self.arguments, target="sm_90")


def describe(
    shape: MoEShape, num_tokens: int, a_format: Any, *, fp8: bool = False, **options: Any
) -> MoEProblem:
    """A layer on an H200; fp8: its weights have an FP8 copy."""
    layout = Layout.HOPPER_FRAGMENT_FP8 if fp8 else Layout.HOPPER_FRAGMENT
    return layer_of(shape, num_tokens, H200, layout, a_format, **options)


def _projection(problem: MoEProblem) -> Callable[[int, int, int], WeightLike]:
    return packed_fp8 if problem.weight_layout.has_fp8_codes else packed


def served(shape: MoEShape, num_tokens: int, a_format: Any) -> list[Launch]:
    """Launches of the public functions from router logits to the layer's output."""
    problem = describe(shape, num_tokens, a_format)
    weights = weights_of(problem, packed, shape.has_bias)
    x, logits = (
        empty(num_tokens, width, dtype=torch.bfloat16)
        for width in (shape.hidden_size, shape.num_experts)
    )
    with on_device(H200), recorded_launches() as recorded:
        routed = mxpert.route_topk(logits, shape.top_k)
        mxpert.fused_moe(
            x, weights, *routed, activation=shape.activation, activation_format=a_format
        )
    return [Launch(*each) for each in recorded]


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
        weights = weights_of(problem, _projection(problem), has_bias)
        plan = plan_of(problem, config.block_m)
        format = activation_mx_format(problem.options.activation_format) if quantised else None
        num_rows = plan.max_blocks * plan.routing_block_m
        x = rows_of(problem.num_tokens, problem.hidden_size, format)
        h = rows_of(num_rows, problem.intermediate_size, format)
        with recorded_launches() as self._recorded:
            moe.GATE_UP.run(problem, config, GateUpInputs(x, weights, plan), num_rows)
            moe.DOWN.launch(problem, config, DownInputs(weights=weights, plan=plan, h=h))
        return self.launches

    def run_layer(self, problem: MoEProblem, config: HopperGemmConfig) -> list[Launch]:
        """Launches of both stages in a layer."""
        x = rows_of(problem.num_tokens, problem.hidden_size, None)
        plan = plan_of(problem, config.block_m)
        weights = weights_of(problem, _projection(problem), has_bias=False)
        inputs = FusedMoEInputs(x, weights, plan.sorted_weights, plan.slot_rows)
        layer = MoEConfig(config.block_m, config, config)
        with recorded_launches() as self._recorded:
            moe.FUSED_MOE.stages(problem, layer, inputs, plan)
        return self.launches
