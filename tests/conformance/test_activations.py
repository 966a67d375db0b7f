"""GELU, SwiGLU with other parameters and gate-less ReLU2 on the portable kernels, against float64.

Each case has its planted fault: the same layer with the activation that a mistake would compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mxpert.core.problem import (
    GELU,
    Activation,
    Combine,
    GemmConfig,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    ReLU2,
    SiLU,
    SwiGLU,
)
from mxpert.core.target import detect_target
from mxpert.formats import MXTensor
from mxpert.formats.codec import dequantize_blocks
from mxpert.moe import reference
from mxpert.moe.inputs import DownInputs, FusedMoEInputs, GateUpInputs
from mxpert.moe.weights import GateUpOrder
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.plan import TOKEN_MASK, RoutingPlan
from mxpert.routing.reference import PLAN
from mxpert.testing.numerics import assert_close_relative, assert_exact, stage_tolerance
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.kernels import kernels_of
from support.poison import nan_filled_scratch, plant_exchanged_gate_up, poison_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

REFERENCE, TRITON = kernels_of("reference"), kernels_of("triton")
FLOAT64 = ReferenceConfig(torch.float64)
TILES = MoEConfig(32, GemmConfig(32, 64, 128), GemmConfig(32, 128, 64))
UNIT = TILES.routing_block_m


@dataclass(frozen=True)
class Case:
    """A layer, and the activation that a fault would compute in its place; None: gate for up."""

    activation: Activation
    fault: Activation | None
    a_format: str
    order: GateUpOrder = GateUpOrder.CONCATENATED
    split_k: int = 1
    on_input: bool = False
    has_bias: bool = True

    def __str__(self) -> str:
        return f"{self.activation}-{self.a_format}-{self.order.value}-split{self.split_k}"

    @property
    def inputs(self) -> MoEInputs:
        """H = 160, F = 96 and 5 experts fill no tile."""
        shape = MoEShape(160, 96, 5, 2, self.activation, self.order, self.has_bias)
        return random_moe_problem(shape, 64)

    @property
    def options(self) -> MoEOptions:
        return MoEOptions(
            self.activation, self.a_format, apply_router_weight_on_input=self.on_input
        )

    @property
    def gate_up(self) -> GemmConfig:
        return replace(TILES.gate_up, split_k=self.split_k)


BY_TANH = GELU("tanh")
UNCLAMPED = SwiGLU(limit=None, beta=0.25)
CASES = [
    Case(GELU(), None, "bf16"),
    Case(GELU(), BY_TANH, "mxfp8", GateUpOrder.INTERLEAVED, 2, True),
    Case(BY_TANH, SiLU(), "mxfp4", GateUpOrder.INTERLEAVED_16, 2),
    Case(BY_TANH, None, "fp8_token", GateUpOrder.INTERLEAVED, has_bias=False),
    Case(UNCLAMPED, SwiGLU(limit=None), "bf16", GateUpOrder.INTERLEAVED, 2),
    Case(UNCLAMPED, SwiGLU(limit=None, beta=0.0), "mxfp8"),
    Case(SwiGLU(1.3, 1.0, 2.0), SwiGLU(1.3, None, 2.0), "mxfp4", GateUpOrder.INTERLEAVED_16),
    Case(ReLU2(), None, "bf16"),
    Case(ReLU2(), None, "mxfp8", split_k=2, on_input=True),
    Case(ReLU2(), None, "mxfp4", split_k=2, has_bias=False),
    Case(ReLU2(), None, "fp8_token"),
]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    with nan_filled_scratch():
        yield


def problem_of(op: Op, inputs: MoEInputs, options: MoEOptions, unit: int = UNIT) -> MoEProblem:
    experts, hidden, inner = inputs.weights.down_proj.shape
    target, tokens = detect_target("cpu"), inputs.topk_ids.shape
    layout = inputs.weights.layout
    return MoEProblem(op, target, *tokens, experts, hidden, inner, options, layout, unit)


def plan_of(inputs: MoEInputs) -> RoutingPlan:
    from mxpert.core.problem import RoutingProblem

    experts = inputs.weights.num_experts
    sizes = (*inputs.topk_ids.shape, experts, experts, UNIT)
    problem = RoutingProblem(Op.ROUTING_PLAN, detect_target("cpu"), *sizes)
    return PLAN.launch(
        problem, PLAN.heuristic(problem), PlanInputs(inputs.topk_weights, inputs.topk_ids)
    )


def valid_rows(plan: RoutingPlan) -> torch.Tensor:
    rows, tokens = torch.arange(plan.capacity), plan.sorted_token_ids & TOKEN_MASK
    return rows[(rows < plan.num_valid[0]) & (tokens < plan.num_tokens)]


def stage_one(
    kernels: dict[Op, Any], config: object, inputs: MoEInputs, options: MoEOptions
) -> torch.Tensor:
    """The valid rows of the intermediate, decoded."""
    plan = plan_of(inputs)
    h = kernels[Op.MOE_GATE_UP].launch(
        problem_of(Op.MOE_GATE_UP, inputs, options),
        config,
        GateUpInputs(inputs.x, inputs.weights, plan),
    )
    h = dequantize_blocks(h, torch.float64) if isinstance(h, MXTensor) else h
    return h[valid_rows(plan)]


def tolerance(case: Case, numel: int) -> float:
    h_dtype = torch.bfloat16 if case.a_format in ("bf16", "fp8_token") else None
    return stage_tolerance(case.a_format, h_dtype, 160, numel=numel)


def layer(kernels: dict[Op, Any], config: object, inputs: MoEInputs, options: MoEOptions) -> Any:
    return kernels[Op.FUSED_MOE].launch(
        problem_of(Op.FUSED_MOE, inputs, options, 0),
        config,
        FusedMoEInputs(inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stage_one_matches_float64(case: Case) -> None:
    inputs = case.inputs
    expected = stage_one(REFERENCE, FLOAT64, inputs, case.options)
    found = stage_one(TRITON, case.gate_up, inputs, case.options)
    assert_close_relative(found, expected, tolerance(case, found.numel()), str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_planted_fault_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails for tanh instead of erf, no beta, no clamp, gate and up exchanged,
    and for relu that is not squared."""
    inputs = case.inputs
    expected = stage_one(REFERENCE, FLOAT64, inputs, case.options)
    options = case.options
    if case.fault is not None:
        options = replace(options, activation=case.fault)
    elif case.activation.is_gated:
        inputs = plant_exchanged_gate_up(inputs)
    else:
        monkeypatch.setattr(reference, "activate", lambda activation, gate, up: up.clamp(min=0))
    wrong = stage_one(REFERENCE, FLOAT64, inputs, options)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close_relative(wrong, expected, tolerance(case, wrong.numel()), str(case))


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("activation", [BY_TANH, UNCLAMPED, ReLU2()], ids=str)
def test_the_layer_is_its_stages(activation: Activation, combine: Combine) -> None:
    """A whole layer has the bits of stage 2 on the rows of stage 1."""
    inputs = Case(activation, None, "mxfp8").inputs
    options = MoEOptions(activation, "mxfp8", combine=combine, out_dtype=torch.float32)
    plan = plan_of(inputs)
    h = TRITON[Op.MOE_GATE_UP].launch(
        problem_of(Op.MOE_GATE_UP, inputs, options),
        TILES.gate_up,
        GateUpInputs(inputs.x, inputs.weights, plan),
    )
    expected = REFERENCE[Op.MOE_DOWN].launch(
        problem_of(Op.MOE_DOWN, inputs, replace(options, out_dtype=torch.float64)),
        FLOAT64,
        DownInputs(h, inputs.weights, plan),
    )
    y = layer(TRITON, TILES, inputs, options)
    allowed = stage_tolerance("mxfp8", torch.float32, 96, numel=y.numel())
    assert_close_relative(y, expected, allowed, "layer")


def test_storage_around_weights_without_a_gate_is_never_read() -> None:
    case = Case(ReLU2(), None, "mxfp8")
    inputs = case.inputs
    clean = layer(TRITON, TILES, inputs, case.options)
    poisoned = replace(inputs, weights=poison_weights(inputs.weights))
    assert clean.isfinite().all()
    assert_exact(layer(TRITON, TILES, poisoned, case.options), clean, "strided weights")
