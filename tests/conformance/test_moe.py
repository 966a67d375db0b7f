"""The two-stage MoE kernels in Triton's interpreter, against the float64 reference.

Tiles are few and large, since the interpreter's time depends on operations, not on elements. Sizes
are no multiples of the tiles (H = 160 and F = 96, K steps of 128 and 64, 64 features a tile), so
every mask is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from mxpert.core.launch import record_launches
from mxpert.core.problem import (
    ACTIVATIONS,
    Combine,
    GemmConfig,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    RoutingProblem,
    Target,
    activation_mx_format,
)
from mxpert.core.target import detect_target, on_device
from mxpert.formats import MXTensor, ScaleRule, quantize_blocks, quantize_token_rows
from mxpert.moe.inputs import DownInputs, FusedMoEInputs, GateUpInputs
from mxpert.moe.token_rows import quantize_tokens
from mxpert.moe.weights import GateUpOrder
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.plan import TOKEN_MASK, RoutingPlan
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.exact import exact_moe_problem
from support.kernels import kernels_of
from support.poison import PLANTED_ERRORS, nan_filled_scratch, poison_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

REFERENCE = kernels_of("reference")
TRITON = kernels_of("triton")
FLOAT64 = ReferenceConfig(torch.float64)
SHAPE = MoEShape(hidden_size=160, intermediate_size=96, num_experts=5, top_k=2, has_bias=True)
NUM_TOKENS = 64
GFX950 = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)
TILES = MoEConfig(32, GemmConfig(32, 64, 128), GemmConfig(32, 128, 64))


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that results cannot depend on its contents."""
    with nan_filled_scratch():
        yield


@dataclass(frozen=True)
class Case:
    """One combination of options; `split_k` of both stages."""

    a_format: str
    activation: str
    order: GateUpOrder
    combine: Combine
    split_k: int = 1
    on_input: bool = False
    rule: ScaleRule = ScaleRule.RCEIL
    has_bias: bool = True

    def __str__(self) -> str:
        parts = [self.a_format, self.activation, self.order.value, self.combine.value]
        parts += [f"split{self.split_k}"] * (self.split_k > 1) + ["on_input"] * self.on_input
        parts += [self.rule.value] * self.a_format.startswith("mx") + ["bias"] * self.has_bias
        return "-".join(parts)

    @property
    def options(self) -> MoEOptions:
        return MoEOptions(
            ACTIVATIONS[self.activation](), self.a_format, self.rule, self.on_input, self.combine
        )

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            TILES.routing_block_m,
            replace(TILES.gate_up, split_k=self.split_k),
            replace(TILES.down, split_k=self.split_k),
        )


def pairwise() -> list[Case]:
    """Pairwise cases: every format with every activation, order, combine and split_k, and every
    order and combine with every activation. The full product runs on a GPU."""
    orders, combines = list(GateUpOrder), (Combine.REDUCE, Combine.ATOMIC, Combine.FLAT)
    rules = list(ScaleRule)
    cases = []
    for i, a_format in enumerate(("bf16", "mxfp8", "mxfp4", "fp8_token")):
        for j, activation in enumerate(ACTIVATIONS):
            cases.append(
                Case(
                    a_format,
                    activation,
                    orders[(i + j) % 3],
                    combines[(i + 2 * j) % 3],
                    split_k=1 + (i + j) % 2,
                    on_input=j % 4 == i,
                    rule=rules[j],
                    has_bias=j != 3,
                )
            )
    return cases


def problem_of(op: Op, inputs: MoEInputs, options: MoEOptions, routing_block_m: int) -> MoEProblem:
    weights = inputs.weights
    return MoEProblem(
        op,
        detect_target("cpu"),
        *inputs.topk_ids.shape,
        weights.num_experts,
        weights.hidden_size,
        weights.intermediate_size,
        options,
        weights.layout,
        routing_block_m,
    )


def plan_of(inputs: MoEInputs, routing_block_m: int) -> RoutingPlan:
    experts = inputs.weights.num_experts
    problem = RoutingProblem(
        Op.ROUTING_PLAN,
        detect_target("cpu"),
        *inputs.topk_ids.shape,
        experts,
        experts,
        routing_block_m,
    )
    return REFERENCE[Op.ROUTING_PLAN].launch(
        problem, None, PlanInputs(topk_ids=inputs.topk_ids, topk_weights=inputs.topk_weights)
    )


def valid_rows(plan: RoutingPlan) -> torch.Tensor:
    rows = torch.arange(plan.capacity)
    tokens = plan.sorted_token_ids & TOKEN_MASK
    return rows[(rows < plan.num_valid[0]) & (tokens < plan.num_tokens)]


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def layer(
    kernels: dict[Op, object],
    config: object,
    inputs: MoEInputs,
    options: MoEOptions,
    **routing: torch.Tensor | None,
) -> torch.Tensor:
    """fused_moe of one backend."""
    arguments = {"expert_map": None, "num_local_tokens": None, **routing}
    return kernels[Op.FUSED_MOE].launch(  # type: ignore[attr-defined]
        problem_of(Op.FUSED_MOE, inputs, options, 0),
        config,
        FusedMoEInputs(
            x=inputs.x,
            weights=inputs.weights,
            topk_ids=inputs.topk_ids,
            topk_weights=inputs.topk_weights,
            **arguments,
        ),
    )


def cancellation(inputs: MoEInputs, options: MoEOptions) -> float:
    """``√Σ‖row‖² / ‖Σ row‖`` of the weighted rows that REDUCE rounds, at least 1."""
    single = replace(options, combine=Combine.FLAT, out_dtype=torch.float64)
    plan = plan_of(inputs, 16)
    h = REFERENCE[Op.MOE_GATE_UP].launch(
        problem_of(Op.MOE_GATE_UP, inputs, options, 16),
        FLOAT64,
        GateUpInputs(x=inputs.x, weights=inputs.weights, plan=plan),
    )
    rows = REFERENCE[Op.MOE_DOWN].launch(
        problem_of(Op.MOE_DOWN, inputs, single, 16),
        FLOAT64,
        DownInputs(h=h, weights=inputs.weights, plan=plan),
    )[valid_rows(plan)]
    tokens = (plan.sorted_token_ids[valid_rows(plan)] & TOKEN_MASK).long()
    total = torch.zeros(plan.num_tokens, rows.shape[1], dtype=rows.dtype).index_add(0, tokens, rows)
    return max(1.0, (rows.norm() / total.norm()).item())


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_each_stage_matches_float64(case: Case) -> None:
    shape = replace(
        SHAPE,
        activation=ACTIVATIONS[case.activation](),
        gate_up_order=case.order,
        has_bias=case.has_bias,
    )
    inputs, options, config = random_moe_problem(shape, NUM_TOKENS), case.options, case.config
    unit = config.routing_block_m
    plan = plan_of(inputs, unit)
    rows = valid_rows(plan)
    gate_up = problem_of(Op.MOE_GATE_UP, inputs, options, unit)
    arguments = {"weights": inputs.weights, "plan": plan}
    expected_h = REFERENCE[Op.MOE_GATE_UP].launch(
        gate_up, FLOAT64, GateUpInputs(x=inputs.x, **arguments)
    )
    h = TRITON[Op.MOE_GATE_UP].launch(
        gate_up, config.gate_up, GateUpInputs(x=inputs.x, **arguments)
    )
    h_dtype = torch.bfloat16 if case.a_format in ("bf16", "fp8_token") else None
    assert_close_relative(
        take(h, rows),
        take(expected_h, rows),
        stage_tolerance(
            case.a_format, h_dtype, shape.hidden_size, numel=len(rows) * shape.intermediate_size
        ),
        "stage 1",
    )

    # REDUCE rounds every row. Compare in float32, where the tolerance is the accumulator's.
    out_dtype = torch.float32 if case.combine is Combine.REDUCE else torch.bfloat16
    down = problem_of(Op.MOE_DOWN, inputs, replace(options, out_dtype=out_dtype), unit)
    exact = replace(down, options=replace(options, out_dtype=torch.float64))
    expected = REFERENCE[Op.MOE_DOWN].launch(exact, FLOAT64, DownInputs(h=expected_h, **arguments))
    y = TRITON[Op.MOE_DOWN].launch(down, config.down, DownInputs(h=expected_h, **arguments))
    if case.combine is Combine.FLAT:
        y, expected = y[rows], expected[rows]
    top_k = shape.top_k if case.combine is Combine.REDUCE else 1
    assert y.dtype == out_dtype
    assert_close_relative(
        y,
        expected,
        stage_tolerance(
            case.a_format,
            out_dtype,
            shape.intermediate_size,
            top_k=top_k,
            numel=y.numel(),
            cancellation=cancellation(inputs, options),
        ),
        "stage 2",
    )


@pytest.mark.parametrize(
    "out_dtype",
    [torch.bfloat16, torch.float16, torch.float32],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
def test_layer_matches_float64(a_format: str, out_dtype: torch.dtype) -> None:
    inputs = random_moe_problem(SHAPE, NUM_TOKENS, seed=1)
    options = MoEOptions(inputs.activation, a_format, out_dtype=out_dtype)
    expected = layer(REFERENCE, FLOAT64, inputs, replace(options, out_dtype=torch.float64))
    y = layer(TRITON, TILES, inputs, options)
    assert y.dtype == out_dtype
    assert_close_relative(
        y,
        expected,
        end_to_end_tolerance(
            a_format,
            out_dtype,
            SHAPE.hidden_size,
            SHAPE.intermediate_size,
            top_k=SHAPE.top_k,
            numel=y.numel(),
            cancellation=cancellation(inputs, options),
        ),
        "layer",
    )


EXACT_TILES = {
    "one_unit": MoEConfig(16, GemmConfig(16, 64, 128), GemmConfig(16, 128, 128)),
    "small_blocks_in_large_units": MoEConfig(64, GemmConfig(16, 32, 128), GemmConfig(32, 64, 64)),
    "split_k": MoEConfig(
        32,
        GemmConfig(32, 128, 64, split_k=2, group_m=4),
        GemmConfig(32, 256, 64, split_k=2, group_m=2),
    ),
    "more_splits_than_steps": MoEConfig(
        64, GemmConfig(64, 64, 128, split_k=4), GemmConfig(64, 128, 128, split_k=4)
    ),
}


@pytest.mark.parametrize(
    "target, tiles",
    [*((None, tiles) for tiles in EXACT_TILES), (GFX950, "split_k")],
    ids=lambda value: getattr(value, "arch", value or "here"),
)
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8", "mxfp4"])
def test_exact_problem_is_bit_identical(a_format: str, tiles: str, target: Target | None) -> None:
    """Exact sums: every tile config and combine returns the same bits. On AMD the kernels load
    scales in the step that multiplies them, on other targets one step ahead."""
    index = list(EXACT_TILES).index(tiles)
    activation = list(ACTIVATIONS.values())[index]()
    order = list(GateUpOrder)[index % 3]
    shape = MoEShape(160, 96, 3, 2, activation, order, has_bias=index % 2 == 0)
    inputs = exact_moe_problem(shape, 33, apply_router_weight_on_input=index == 1)
    combine = (Combine.REDUCE, Combine.ATOMIC)[(index + len(a_format)) % 2]  # bf16 against the rest
    options = MoEOptions(
        inputs.activation, a_format, combine=combine, apply_router_weight_on_input=index == 1
    )
    with on_device(target), record_launches() as records:
        expected = layer(REFERENCE, FLOAT64, inputs, options)
        actual = layer(TRITON, EXACT_TILES[tiles], inputs, options)
        kind = detect_target("cpu").kind
    assert_exact(actual, expected, combine.value, ignore_zero_sign=True)
    ahead = [
        record.launch.constants["PREFETCH_SCALES"]
        for record in records
        if "PREFETCH_SCALES" in record.launch.constants
    ]
    assert ahead == [kind != "hip"] * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp4"])
def test_few_tokens(a_format: str, num_tokens: int) -> None:
    inputs = exact_moe_problem(SHAPE, num_tokens)
    options = MoEOptions(inputs.activation, a_format)
    problem = problem_of(Op.FUSED_MOE, inputs, options, 0)
    y = layer(TRITON, TRITON[Op.FUSED_MOE].heuristic(problem), inputs, options)
    assert y.shape == (num_tokens, SHAPE.hidden_size)
    assert_exact(y, layer(REFERENCE, FLOAT64, inputs, options), "layer", ignore_zero_sign=True)


def test_stages_without_tokens() -> None:
    inputs = exact_moe_problem(SHAPE, 0)
    options = MoEOptions(inputs.activation, "mxfp8")
    plan = plan_of(inputs, 16)
    h = TRITON[Op.MOE_GATE_UP].launch(
        problem_of(Op.MOE_GATE_UP, inputs, options, 16),
        TILES.down,
        GateUpInputs(x=inputs.x, weights=inputs.weights, plan=plan),
    )
    assert tuple(h.shape) == (plan.capacity, SHAPE.intermediate_size)
    for combine, rows in ((Combine.REDUCE, 0), (Combine.ATOMIC, 0), (Combine.FLAT, plan.capacity)):
        y = TRITON[Op.MOE_DOWN].launch(
            problem_of(Op.MOE_DOWN, inputs, replace(options, combine=combine), 16),
            TILES.down,
            DownInputs(h=h, weights=inputs.weights, plan=plan),
        )
        assert tuple(y.shape) == (rows, SHAPE.hidden_size)


@pytest.mark.parametrize("routing", list(Routing), ids=lambda routing: routing.value)
def test_uneven_routing(routing: Routing) -> None:
    """Experts without rows, one with all rows, many row blocks for one expert."""
    inputs = exact_moe_problem(replace(SHAPE, num_experts=7, top_k=3), 45, routing=routing)
    options = MoEOptions(inputs.activation, "mxfp8")
    tiles = MoEConfig(16, GemmConfig(16, 64, 128, group_m=2), GemmConfig(16, 128, 128, group_m=2))
    assert_exact(
        layer(TRITON, tiles, inputs, options),
        layer(REFERENCE, FLOAT64, inputs, options),
        routing.value,
        ignore_zero_sign=True,
    )


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
def test_foreign_experts_and_tokens_add_nothing(combine: Combine) -> None:
    inputs = exact_moe_problem(SHAPE, 20)
    inputs.topk_ids[3, 0], inputs.topk_ids[4] = -1, 99  # no such experts
    local = replace(
        inputs.weights,
        gate_up_proj=inputs.weights.gate_up_proj[:2],
        down_proj=inputs.weights.down_proj[:2],
        gate_up_bias=inputs.weights.gate_up_bias[:2],  # type: ignore[index]
        down_bias=inputs.weights.down_bias[:2],
    )  # type: ignore[index]
    inputs = replace(inputs, weights=local)
    routing = {
        "expert_map": torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32),
        "num_local_tokens": torch.tensor([17], dtype=torch.int32),
    }
    options = MoEOptions(inputs.activation, "bf16", combine=combine)
    y = layer(TRITON, TILES, inputs, options, **routing)
    assert_exact(
        y, layer(REFERENCE, FLOAT64, inputs, options, **routing), "layer", ignore_zero_sign=True
    )
    assert not y[17:].any()
    assert not y[4].any()


def test_padded_weight_storage_is_never_read() -> None:
    inputs = random_moe_problem(SHAPE, 20)
    options = MoEOptions(inputs.activation, "mxfp8")
    clean = layer(TRITON, TILES, inputs, options)
    strided = layer(TRITON, TILES, replace(inputs, weights=poison_weights(inputs.weights)), options)
    assert clean.isfinite().all()
    assert_exact(strided, clean, "strided weights")


def test_padding_rows_of_the_intermediate_are_never_read() -> None:
    inputs = random_moe_problem(SHAPE, 20)
    plan = plan_of(inputs, 32)
    options = MoEOptions(inputs.activation, combine=Combine.FLAT)
    problem = problem_of(Op.MOE_DOWN, inputs, options, 32)
    rows = valid_rows(plan)
    h = torch.full((plan.capacity, SHAPE.intermediate_size), torch.nan, dtype=torch.bfloat16)
    h[rows] = torch.randn(len(rows), SHAPE.intermediate_size).to(torch.bfloat16)
    y = TRITON[Op.MOE_DOWN].launch(
        problem, TILES.down, DownInputs(h=h, weights=inputs.weights, plan=plan)
    )
    assert y[rows].isfinite().all()
    padding = torch.ones(plan.capacity, dtype=torch.bool).index_fill(0, rows, False)
    assert y[padding].isnan().all()  # padding rows are not stored: still uninitialised


def test_x_may_arrive_quantised_or_strided() -> None:
    inputs = random_moe_problem(SHAPE, 20)
    options = MoEOptions(inputs.activation, "mxfp4", ScaleRule.EVEN)
    fmt = activation_mx_format("mxfp4")
    y = layer(TRITON, TILES, inputs, options)
    quantised = replace(inputs, x=quantize_blocks(inputs.x, fmt, -1, ScaleRule.EVEN))
    assert_exact(layer(TRITON, TILES, quantised, options), y, "quantised x")
    wide = torch.full((20, 200), torch.nan, dtype=torch.bfloat16)
    wide[:, :160] = inputs.x
    options = replace(options, activation_format="bf16")
    assert_exact(
        layer(TRITON, TILES, replace(inputs, x=wide[:, :160]), options),
        layer(TRITON, TILES, inputs, options),
        "strided x",
    )


@pytest.mark.parametrize("width", [32, 160, 2880])
def test_token_rows_equal_the_oracle(width: int) -> None:
    """Codes and scales are bit-exact: strided rows, zeros, tiny values, NaN, infinity."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(9, 2 * width, generator=generator).bfloat16()[:, :width]
    x[1], x[2] = 0, x[2] * 2.0**-125
    x[3, 7] *= 2.0**90
    x[4, 5], x[5, 31] = torch.nan, -torch.inf
    found, expected = quantize_tokens(x), quantize_token_rows(x)
    assert_exact(found.scale, expected.scale, "scale")
    good = expected.scale.isfinite()
    assert good.sum() == 7
    assert_exact(found.qdata[good], expected.qdata[good], "codes")
    assert found.block_scale.eq(127).all()


@pytest.mark.parametrize("name", PLANTED_ERRORS)
def test_a_planted_error_is_seen(name: str) -> None:
    """The layer test's tolerance, on the same kind of problem, catches every planted error."""
    inputs = random_moe_problem(SHAPE, 20)
    options = MoEOptions(inputs.activation, out_dtype=torch.float32)
    wrong = layer(TRITON, TILES, PLANTED_ERRORS[name](inputs), options)
    tolerance = end_to_end_tolerance(
        "bf16",
        torch.float32,
        SHAPE.hidden_size,
        SHAPE.intermediate_size,
        top_k=SHAPE.top_k,
        numel=wrong.numel(),
        cancellation=cancellation(inputs, options),
    )
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close_relative(wrong, layer(REFERENCE, FLOAT64, inputs, options), tolerance, name)


def test_a_config_that_cannot_run_is_refused() -> None:
    inputs = random_moe_problem(SHAPE, 2)
    options = MoEOptions(inputs.activation)
    with pytest.raises(ValueError, match=r"moe_gate_up: config — need .*power of two"):
        layer(TRITON, MoEConfig(32, GemmConfig(16, 48, 128), TILES.down), inputs, options)
