"""Decode kernels of the cdna4 backend, executed on gfx950 code on the CPU."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine, MoEWeights, RoutingPlan
from mxpert.configs import Cdna4GemmConfig
from mxpert.core.problem import MoEConfig, MoEOptions, MoEProblem, Op, OwnFormat, SiLU
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.cdna4.config import prefill_config, require_valid
from mxpert.routing.plan import TOKEN_MASK
from mxpert.testing.gfx950 import MI355X, Emulation, emulate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.exact import exact_moe_problem
from support.executors import Executor
from support.kernels import kernels_of
from support.layers import explain_layer, plan_of
from tests.conformance.cases.moe_case import MoECase, Sizes
from tests.conformance.cases.moe_tiles import decode

pytestmark = pytest.mark.usefixtures("nan_scratch")

SMALL = MoEShape(hidden_size=160, intermediate_size=96, num_experts=3, top_k=2)
CDNA4 = Executor("cdna4", "emulated")


FOUR_WAVES = decode()


def prepared(weights: MoEWeights) -> MoEWeights:
    return weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)


def valid_rows(plan: RoutingPlan) -> torch.Tensor:
    rows = torch.arange(plan.capacity)
    real = (plan.sorted_token_ids & TOKEN_MASK) < plan.num_tokens
    return rows[real & (rows < plan.num_valid[0])]


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor:
    return (h.dequantize() if isinstance(h, MXTensor) else h)[rows]


def test_a_nan_scale_stays_in_its_output() -> None:
    case = MoECase("bf16", SiLU(), has_bias=False, sizes=Sizes(experts=1, top_k=1))
    inputs = case.inputs()
    inputs.weights.down_proj.scale[0, 7, 1] = 255
    with emulate(), CDNA4.serving():
        y = case.run(replace(inputs, weights=prepared(inputs.weights)))
    assert torch.equal(y.isnan().all(0), torch.arange(y.shape[1]) == 7)
    assert y.isnan().sum() == len(y)


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
    inputs = exact_moe_problem(SMALL, 20)
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
    inputs = random_moe_problem(SMALL, 4)
    with emulate():
        chosen = explain_layer(inputs, weights=prepared(inputs.weights))
        plain = explain_layer(inputs)
    assert chosen.resolution.kernel.backend == "cdna4"
    assert "kernel=decode block_m=16" in str(chosen)
    assert plain.resolution.kernel.backend == "triton"
    assert "call weights.prepare" in plain.resolution.slower


def test_refusals() -> None:
    assert LAYER.unsupported(problem(1)) is LAYER.unsupported(problem(1 << 20)) is None
    for changed, reason in (
        (dict(target=replace(MI355X, arch="gfx942")), "needs gfx950, not gfx942"),
        (dict(weight_layout=Layout.ROW_MAJOR), "CDNA4_FRAGMENT"),
        (dict(options=MoEOptions(SiLU(), out_dtype=torch.float64)), "float64"),
        (dict(routing_block_m=8), "a multiple of 16"),
        (dict(num_tokens=1 << 20, op=Op.MOE_DOWN), "fewer than 536870912 activations in a stage"),
    ):
        assert reason in (LAYER.unsupported(replace(problem(1), **changed)) or "")


@pytest.mark.parametrize(
    "config",
    [
        replace(FOUR_WAVES, block_m=8),
        replace(FOUR_WAVES, block_n=128),
        replace(FOUR_WAVES, num_stages=3),
        replace(FOUR_WAVES, num_warps=3, block_n=192),
    ],
    ids=["rows", "weight_rows", "stages", "warps"],
)
def test_tiles_that_no_kernel_has_are_refused(config: Cdna4GemmConfig) -> None:
    case = MoECase("bf16")
    inputs = case.inputs()
    with (
        emulate(),
        CDNA4.serving(MoEConfig(48, config, config)),
        pytest.raises(ValueError, match=r"fused_moe: config — need .* configs\(\)"),
    ):
        case.run(replace(inputs, weights=prepared(inputs.weights)))


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


@pytest.mark.parametrize("a_format", ["mxfp8", "mxfp4"])
def test_nothing_runs_between_the_stages(
    a_format: OwnFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three scales are no whole words; the kernels read them as they are."""

    def refuse(*_: object) -> None:
        raise AssertionError("scales are copied")

    case = MoECase(a_format, poisoned=True)
    inputs = case.inputs()
    expected, given = case.expected(inputs), case.given(inputs, CDNA4)
    monkeypatch.setattr(torch.nn.functional, "pad", refuse)
    with emulate(trace=True) as emulation, CDNA4.serving(case.config(CDNA4)):
        case.compare(case.run(given), inputs, expected)
    names = [report.kernel for report in emulation.reports]
    first = names.index("_moe_gemm_decode_cdna4_kernel")
    assert names[first + 1] == names[first], names
