"""Decode kernels of the cdna4 backend, executed on gfx950 code on the CPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights, RoutingPlan, ScaleRule
from mxpert.configs import Cdna4GemmConfig
from mxpert.core.problem import (
    ACTIVATIONS,
    GELU,
    Activation,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    SiLU,
    SwiGLU,
)
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.cdna4.config import prefill_config, require_valid
from mxpert.moe.cdna4.layout import CDNA4_FRAGMENT
from mxpert.routing.plan import TOKEN_MASK
from mxpert.testing.gfx950 import MI355X, Emulation, emulate
from mxpert.testing.numerics import assert_close_relative, assert_exact, stage_tolerance
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.exact import exact_moe_problem
from support.kernels import kernels_of
from support.poison import nan_filled_scratch

FLOAT64 = ReferenceConfig(torch.float64)
SMALL = MoEShape(hidden_size=160, intermediate_size=96, num_experts=3, top_k=2, has_bias=True)
DEEP = replace(SMALL, hidden_size=2336, num_experts=2, top_k=1)
"""73 blocks of depth: more than one copy of activations, and a last unit that is a quarter full."""


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    with nan_filled_scratch():
        yield


def tile(
    block_m: int = 16, k_slices: int = 1, k_splits: int = 1, num_stages: int = 4, num_warps: int = 4
) -> Cdna4GemmConfig:
    block_n = 64 * num_warps // k_slices
    return Cdna4GemmConfig("decode", block_m, block_n, num_warps, num_stages, k_splits, k_slices)


FOUR_WAVES = tile()


@dataclass(frozen=True)
class Case:
    """A layer with its options and one tile for both stages."""

    a_format: str
    activation: Activation | str
    tile: Cdna4GemmConfig = FOUR_WAVES
    combine: Combine = Combine.REDUCE
    shape: MoEShape = SMALL
    order: GateUpOrder = GateUpOrder.INTERLEAVED
    on_input: bool = False
    rule: ScaleRule = ScaleRule.RCEIL
    unit: int = 0
    num_tokens: int = 20

    def __str__(self) -> str:
        deep = "-deep" if self.shape.hidden_size > 1000 else ""
        shared = f"x{self.tile.k_splits}" if self.tile.k_splits > 1 else ""
        return f"{self.a_format}-{self.activation}-{self.tile.block_m}{shared}{deep}"

    @property
    def made(self) -> Activation:
        given = self.activation
        return ACTIVATIONS[given]() if isinstance(given, str) else given

    def inputs(self) -> MoEInputs:
        shape = replace(self.shape, activation=self.made, gate_up_order=self.order)
        return exact_moe_problem(shape, self.num_tokens, apply_router_weight_on_input=self.on_input)


CASES = (
    Case("mxfp4", "swiglu"),
    Case("mxfp8", "silu", order=GateUpOrder.CONCATENATED, combine=Combine.ATOMIC),
    Case("bf16", "clamped_silu", shape=DEEP, order=GateUpOrder.INTERLEAVED_16),
    Case("fp8_token", "situ_v2", unit=32, on_input=True, shape=replace(SMALL, has_bias=False)),
    Case("mxfp4", "situ_v2", tile(32, k_slices=4), Combine.ATOMIC, DEEP, num_tokens=40),
    Case("mxfp8", "swiglu", tile(32, k_splits=3), shape=DEEP, num_tokens=40),
    Case("bf16", "swiglu", tile(32, 2, 2, num_stages=2), Combine.ATOMIC, DEEP),
    Case("mxfp8", "silu", tile(num_stages=2), shape=DEEP, rule=ScaleRule.FLOOR),
    Case("bf16", "silu", tile(k_splits=2, num_warps=1), num_tokens=3, on_input=True),
    Case("mxfp4", "silu", tile(num_warps=8), rule=ScaleRule.EVEN),
    Case("mxfp8", GELU()),
    Case("bf16", GELU("tanh"), order=GateUpOrder.CONCATENATED),
    Case("mxfp4", SwiGLU(beta=0.0), order=GateUpOrder.CONCATENATED),
)


def layer(
    inputs: MoEInputs, weights: MoEWeights, case: Case, backend: str, config: object
) -> torch.Tensor:
    with mxpert.override(backend=backend, config=config):  # type: ignore[arg-type]
        return mxpert.fused_moe(
            inputs.x,
            weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            activation_format=case.a_format,
            scale_rule=case.rule,
            combine=case.combine,
            apply_router_weight_on_input=case.on_input,
        )


def prepared(weights: MoEWeights) -> MoEWeights:
    return weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_layer_is_bit_identical(case: Case) -> None:
    inputs = case.inputs()
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    config = MoEConfig(case.unit or case.tile.block_m, case.tile, case.tile)
    with emulate() as emulation:
        actual = layer(inputs, prepared(inputs.weights), case, "cdna4", config)
    assert_exact(actual, expected, str(case), ignore_zero_sign=True)
    assert any(name.startswith("v_mfma") for name in emulation.counts)


@pytest.mark.parametrize("case", CASES[4:6], ids=str)
def test_the_order_of_waves_changes_nothing(case: Case) -> None:
    """A random schedule gives the bits of the fixed one, which are the exact ones."""
    inputs = case.inputs()
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    config = MoEConfig(32, case.tile, case.tile)
    with emulate(schedule="random", seed=1):
        actual = layer(inputs, prepared(inputs.weights), case, "cdna4", config)
    assert_exact(actual, expected, str(case), ignore_zero_sign=True)


def plan_of(inputs: MoEInputs, unit: int) -> RoutingPlan:
    experts = inputs.weights.num_experts
    return mxpert.make_routing_plan(
        inputs.topk_weights, inputs.topk_ids, num_experts=experts, routing_block_m=unit
    )


def valid_rows(plan: RoutingPlan) -> torch.Tensor:
    rows = torch.arange(plan.capacity)
    real = (plan.sorted_token_ids & TOKEN_MASK) < plan.num_tokens
    return rows[real & (rows < plan.num_valid[0])]


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor:
    return (h.dequantize() if isinstance(h, MXTensor) else h)[rows]


@pytest.mark.parametrize("a_format", ["mxfp4", "bf16"])
def test_each_stage_is_as_near_to_float64_as_its_formats_allow(a_format: str) -> None:
    inputs = random_moe_problem(SMALL, 20)
    plan, weights = plan_of(inputs, 16), prepared(inputs.weights)
    rows = valid_rows(plan)
    gate_up = {"activation": inputs.activation, "activation_format": a_format}
    down = {"combine": Combine.FLAT, "out_dtype": torch.float32, "activation_format": a_format}
    with mxpert.override(backend="reference", config=FLOAT64):
        expected_h = mxpert.moe_gate_up(inputs.x, inputs.weights, plan, **gate_up)
        expected = mxpert.moe_down(expected_h, inputs.weights, plan, **down)
    with emulate(), mxpert.override(backend="cdna4"):
        h = mxpert.moe_gate_up(inputs.x, weights, plan, **gate_up)
        y = mxpert.moe_down(expected_h, weights, plan, **down)
    h_dtype = torch.bfloat16 if a_format == "bf16" else None
    size = len(rows) * SMALL.intermediate_size
    tolerance = stage_tolerance(a_format, h_dtype, SMALL.hidden_size, numel=size)
    assert_close_relative(take(h, rows), take(expected_h, rows), tolerance, "stage 1")
    tolerance = stage_tolerance(
        a_format, torch.float32, SMALL.intermediate_size, top_k=1, numel=y[rows].numel()
    )
    assert_close_relative(y[rows], expected[rows], tolerance, "stage 2")


def _with_padding(tensor: MXTensor) -> MXTensor:
    """A prepared tensor with padding that may not reach a result.

    Rows beyond the last one are NaN. Depth beyond the last element has the largest codes: there
    activations are zeros.
    """
    experts, num_rows, depth = tensor.shape
    whole = (experts, tensor.qdata.shape[1] * 64, tensor.qdata.shape[2] * 128)
    plain = CDNA4_FRAGMENT.unpack(replace(tensor, logical_shape=whole))
    plain.qdata[:, :, depth // 2 :] = 0x77
    plain.qdata[:, num_rows:], plain.scale[:, num_rows:] = 0x77, 255
    return replace(CDNA4_FRAGMENT.pack(plain), logical_shape=tuple(tensor.shape))


@pytest.mark.parametrize("a_format", ["mxfp8", "bf16"])
def test_padded_weights_reach_no_result(a_format: str) -> None:
    """Without the mask of depth, MXFP8 rows would be read beyond their end."""
    case = Case(a_format, "silu")
    inputs = case.inputs()
    weights = prepared(inputs.weights)
    poisoned = replace(
        weights,
        gate_up_proj=_with_padding(weights.gate_up_proj),
        down_proj=_with_padding(weights.down_proj),
    )
    config = MoEConfig(16, case.tile, case.tile)
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    with emulate():
        actual = layer(inputs, poisoned, case, "cdna4", config)
    assert_exact(actual, expected, a_format, ignore_zero_sign=True)


def test_nan_stays_in_its_token_and_its_output() -> None:
    """A NaN activation makes its token NaN; a NaN weight scale its output of each token."""
    case = Case("bf16", "silu", shape=replace(SMALL, num_experts=1, top_k=1, has_bias=False))
    inputs = case.inputs()
    inputs.x[3, 5] = float("nan")
    inputs.weights.down_proj.scale[0, 7, 1] = 255
    with emulate():
        y = layer(inputs, prepared(inputs.weights), case, "cdna4", None)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("routing", [Routing.ONE_EXPERT, Routing.UNIFORM], ids=lambda r: r.value)
def test_routing_of_any_kind(routing: Routing) -> None:
    """Experts without rows, experts of other ranks, several row blocks of one expert."""
    shape = replace(SMALL, num_experts=6)
    inputs = exact_moe_problem(shape, 20, routing=routing)
    local = torch.tensor([2, -1, 0, -1, 1, 3], dtype=torch.int32)
    weights = MoEWeights(
        *(
            MXTensor(part.qdata[[2, 4, 0, 5]], part.scale[[2, 4, 0, 5]], part.format)
            for part in (inputs.weights.gate_up_proj, inputs.weights.down_proj)
        ),
        gate_up_order=inputs.weights.gate_up_order,
    )
    arguments = dict(activation=inputs.activation, activation_format="mxfp4", expert_map=local)
    operands = (inputs.topk_weights, inputs.topk_ids)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = mxpert.fused_moe(inputs.x, weights, *operands, **arguments)
    with emulate(), mxpert.override(backend="cdna4"):
        actual = mxpert.fused_moe(inputs.x, prepared(weights), *operands, **arguments)
    assert_exact(actual, expected, routing.value, ignore_zero_sign=True)


def test_activations_that_are_views_are_read() -> None:
    """Rows that do not start at a multiple of 16 bytes, and rows with gaps."""
    case = Case("bf16", "silu")
    inputs = case.inputs()
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    for offset, gap in ((1, 0), (0, 3), (0, 8)):
        wide = torch.full((20, 160 + offset + gap), float("nan"), dtype=torch.bfloat16)
        view = wide[:, offset : offset + 160]
        view.copy_(inputs.x)
        with emulate():
            actual = layer(replace(inputs, x=view), prepared(inputs.weights), case, "cdna4", None)
        assert_exact(actual, expected, f"{offset} {gap}", ignore_zero_sign=True)


def spread(near: MXTensor, places: torch.Tensor, emulation: Emulation) -> MXTensor:
    """Prepared weights whose experts stand at `places` of a tensor that is else untouched zeros."""
    count, parts = int(places[-1]) + 1, []
    for name, part in (("codes", near.qdata), ("scales", near.scale)):
        memory = mmap.mmap(-1, count * part[0].numel())
        far = torch.frombuffer(memory, dtype=torch.uint8).view(count, *part.shape[1:])
        far[places] = part
        # Memory that others share is read access by access, and never copied as a whole.
        emulation.reach(name, far, shared=True)
        parts.append(far)
    shape = (count, *near.shape[1:])
    return MXTensor(*parts, near.format, -1, near.layout, logical_shape=shape)


@pytest.mark.parametrize(
    "unit, config", [(16, FOUR_WAVES), (64, prefill_config(64))], ids=["decode", "prefill"]
)
def test_weights_beyond_2_gib(unit: int, config: Cdna4GemmConfig) -> None:
    """Both stages give the same bits when experts stand far apart: the last one beyond 2 GiB."""
    inputs = exact_moe_problem(replace(SMALL, has_bias=False), 20)
    plan, near = plan_of(inputs, unit), prepared(inputs.weights)
    places = torch.tensor([0, 60_000, 180_000])
    experts = plan.block_expert_ids
    moved = torch.where(experts < 0, -1, places[experts.clamp(0).long()]).int()
    far_plan = replace(plan, block_expert_ids=moved, num_experts=int(places[-1]) + 1)
    rows, results = valid_rows(plan), []
    # The checks keep a state of each word of memory that is shared.
    with emulate(checks=False) as emulation, mxpert.override(backend="cdna4", config=config):
        parts = [spread(part, places, emulation) for part in (near.gate_up_proj, near.down_proj)]
        assert all(part.qdata[-1:].data_ptr() - part.qdata.data_ptr() > 1 << 31 for part in parts)
        far = replace(near, gate_up_proj=parts[0], down_proj=parts[1])
        for weights, blocks in ((near, plan), (far, far_plan)):
            options = {"activation_format": "mxfp4"}
            h = mxpert.moe_gate_up(
                inputs.x, weights, blocks, activation=inputs.activation, **options
            )
            y = mxpert.moe_down(h, weights, blocks, combine=Combine.FLAT, **options)
            results.append((take(h, rows), y[rows]))
    for name, ours, expected in zip(("gate_up", "down"), *results[::-1], strict=True):
        assert expected.abs().max() > 0
        assert_exact(ours, expected, name)


# --- choice -------------------------------------------------------------------------------------

LAYER = kernels_of("cdna4")[Op.FUSED_MOE]
GATE_UP = kernels_of("cdna4")[Op.MOE_GATE_UP]


def problem(num_tokens: int, a_format: str = "mxfp4", **changes: object) -> MoEProblem:
    shape = (4, 128, 2880, 2880)
    options = MoEOptions(SiLU(), a_format)
    made = MoEProblem(Op.FUSED_MOE, MI355X, num_tokens, *shape, options, Layout.CDNA4_FRAGMENT)
    return replace(made, **changes)


def test_gfx950_chooses_cdna4_and_says_why_not() -> None:
    inputs = SMALL_INPUTS
    arguments = (inputs.topk_weights, inputs.topk_ids)
    with emulate():
        chosen = mxpert.explain(
            mxpert.fused_moe, inputs.x, prepared(inputs.weights), *arguments, activation=SiLU()
        )
        plain = mxpert.explain(
            mxpert.fused_moe, inputs.x, inputs.weights, *arguments, activation=SiLU()
        )
    assert chosen.resolution.kernel.backend == "cdna4"
    assert "kernel=decode block_m=16" in str(chosen)
    assert plain.resolution.kernel.backend == "triton"
    assert "call weights.prepare" in plain.resolution.slower


SMALL_INPUTS = random_moe_problem(SMALL, 4)


def test_refusals() -> None:
    assert LAYER.unsupported(problem(1)) is None
    for changed, reason in (
        (dict(target=replace(MI355X, arch="gfx942")), "needs gfx950, not gfx942"),
        (dict(weight_layout=Layout.ROW_MAJOR), "CDNA4_FRAGMENT"),
        (dict(options=MoEOptions(SiLU(), out_dtype=torch.float64)), "float64"),
        (dict(routing_block_m=8), "a multiple of 16"),
        (dict(num_tokens=1 << 20), "fewer than 536870912 activations"),
    ):
        assert reason in (LAYER.unsupported(replace(problem(1), **changed)) or "")


@pytest.mark.parametrize(
    "config",
    [
        replace(tile(), block_m=8),
        replace(tile(), block_n=128),
        replace(tile(), num_stages=3),
        replace(tile(), num_warps=3, block_n=192),
    ],
    ids=["rows", "weight_rows", "stages", "warps"],
)
def test_tiles_that_no_kernel_has_are_refused(config: Cdna4GemmConfig) -> None:
    inputs = SMALL_INPUTS
    with emulate(), pytest.raises(ValueError, match=r"fused_moe: config — need .* configs\(\)"):
        layer(
            inputs,
            prepared(inputs.weights),
            Case("bf16", "silu"),
            "cdna4",
            MoEConfig(48, config, config),
        )


def test_every_offered_config_is_one_that_a_kernel_has() -> None:
    for num_tokens in (1, 4, 64, 256):
        configs = list(LAYER.configs(problem(num_tokens)))
        assert configs[0] == LAYER.heuristic(problem(num_tokens))
        assert len(configs) == len(set(configs))
        for config in configs:
            for stage, op in ((config.gate_up, Op.MOE_GATE_UP), (config.down, Op.MOE_DOWN)):
                require_valid(stage, problem(num_tokens, op=op))


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16])
def test_few_tokens_keep_enough_bytes_in_flight(num_tokens: int) -> None:
    """Waves must hide 2,000 cycles of latency at 11.9 bytes a cycle and CU, the chip's 7.3 TB/s."""
    config = LAYER.heuristic(problem(num_tokens))
    for stage, row_units in ((config.gate_up, 90), (config.down, 45)):
        waves = 4 * num_tokens * row_units * stage.k_slices * stage.k_splits
        assert waves * stage.num_stages * (4096 + 256) >= 2000 * 11.9 * 256
        assert 23 // (stage.k_slices * stage.k_splits) >= 4
