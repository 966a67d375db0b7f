"""Prefill kernel of the cdna4 backend, executed on gfx950 code on the CPU."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import mxpert
from gfx950emu.timing import Execution, LoopReport, model_loop
from mxpert import Combine, GateUpOrder, MoEWeights, ScaleRule
from mxpert.configs import Cdna4Kernel
from mxpert.core.problem import (
    ACTIVATIONS,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    SiLU,
)
from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.cdna4.config import (
    PREFILL_BLOCKS_M,
    layer_configs,
    layer_heuristic,
    prefill_config,
    stage_heuristic,
)
from mxpert.moe.cdna4.layout import CDNA4_FRAGMENT
from mxpert.moe.cdna4.prefill_scales import arrange_scales
from mxpert.testing.gfx950 import MI355X, Emulation, emulate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from support.poison import nan_filled_scratch

FLOAT64 = ReferenceConfig(torch.float64)
SMALL = MoEShape(hidden_size=160, intermediate_size=96, num_experts=3, top_k=2, has_bias=True)
"""Two steps of depth, the second a quarter full, and one: no dimension is a multiple of a tile."""
DEEP = replace(SMALL, hidden_size=1312, num_experts=2, top_k=1)
"""Eleven steps of depth in stage 1; six weight tiles in stage 2."""
KERNEL = "_moe_gemm_prefill_cdna4_kernel"


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    with nan_filled_scratch():
        yield


@dataclass(frozen=True)
class Case:
    """A layer with its options and the rows of a tile."""

    a_format: str
    activation: str
    block_m: int
    combine: Combine = Combine.REDUCE
    shape: MoEShape = SMALL
    order: GateUpOrder = GateUpOrder.INTERLEAVED
    on_input: bool = False
    rule: ScaleRule = ScaleRule.RCEIL
    unit: int = 0
    num_tokens: int = 70

    def __str__(self) -> str:
        deep = "-deep" if self.shape.hidden_size > 1000 else ""
        return f"{self.a_format}-{self.activation}-{self.block_m}{deep}"

    def inputs(self) -> MoEInputs:
        shape = replace(
            self.shape, activation=ACTIVATIONS[self.activation](), gate_up_order=self.order
        )
        return exact_moe_problem(shape, self.num_tokens, apply_router_weight_on_input=self.on_input)

    @property
    def config(self) -> MoEConfig:
        config = prefill_config(self.block_m)
        return MoEConfig(self.unit or self.block_m, config, config)


CASES = (
    Case("mxfp4", "swiglu", 256),
    Case("mxfp8", "silu", 256, order=GateUpOrder.CONCATENATED, combine=Combine.ATOMIC, shape=DEEP),
    Case("mxfp4", "situ_v2", 128, Combine.ATOMIC, DEEP, rule=ScaleRule.EVEN, num_tokens=150),
    Case("mxfp8", "clamped_silu", 128, rule=ScaleRule.FLOOR, unit=256, num_tokens=100),
    Case("mxfp8", "swiglu", 64, shape=DEEP, order=GateUpOrder.INTERLEAVED_16),
    Case("mxfp4", "silu", 64, shape=replace(SMALL, has_bias=False), on_input=True),
    Case("fp8_token", "situ_v2", 64, shape=replace(SMALL, has_bias=False), on_input=True),
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


def assert_bit_identical(inputs: MoEInputs, case: Case, **options: Any) -> Emulation:
    """Compare with the reference, which is exact; return what was executed."""
    weights = inputs.weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    with emulate(**options) as emulation:
        actual = layer(inputs, weights, case, "cdna4", case.config)
    assert_exact(actual, expected, str(case), ignore_zero_sign=True)
    return emulation


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_layer_is_bit_identical(case: Case) -> None:
    emulation = assert_bit_identical(case.inputs(), case)
    assert emulation.kernels[KERNEL].launches == 2


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_the_order_of_waves_changes_nothing(case: Case) -> None:
    assert_bit_identical(case.inputs(), case, schedule="random", seed=3)


def test_experts_without_rows_and_a_full_tile() -> None:
    """Every token at the last expert: others have no block; 130 rows are two tiles of 128."""
    case = replace(CASES[3], num_tokens=130)
    inputs = case.inputs()
    ids = torch.full_like(inputs.topk_ids, inputs.weights.num_experts - 1)
    ids[:, 1:] = -1  # no expert
    assert_bit_identical(replace(inputs, topk_ids=ids), case)


def test_a_token_of_nan_leaves_the_others_alone() -> None:
    """Rows end within a step, and in memory the next row follows at once."""
    case = CASES[4]
    inputs = case.inputs()
    expected = layer(inputs, inputs.weights, case, "reference", FLOAT64)
    inputs.x[5] = float("nan")
    weights = inputs.weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    with emulate():
        actual = layer(inputs, weights, case, "cdna4", case.config)
    assert actual[5].isnan().all()
    others = torch.arange(case.num_tokens) != 5
    assert_exact(actual[others], expected[others], str(case), ignore_zero_sign=True)


# --- what was compiled -----------------------------------------------------------------------


def a_problem(a_format: str, tokens: int, **sizes: int) -> MoEProblem:
    shape = {"top_k": 4, "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880} | sizes
    options = MoEOptions(SiLU(), a_format)
    layout = Layout.CDNA4_FRAGMENT
    return MoEProblem(
        Op.FUSED_MOE, MI355X, num_tokens=tokens, options=options, weight_layout=layout, **shape
    )


@functools.cache
def loop_report(a_format: str, block_m: int) -> tuple[LoopReport, str]:
    """Model of stage 1's loop on one full tile, and the listing."""
    like = next(case for case in CASES if (case.a_format, case.block_m) == (a_format, block_m))
    shape = replace(DEEP, hidden_size=1024, num_experts=1)
    case = replace(like, shape=shape, num_tokens=block_m)  # no further binaries
    emulation = assert_bit_identical(case.inputs(), case, trace=True)
    report = next(each for each in emulation.reports if each.kernel == KERNEL)
    return model_loop(Execution.of(report)), "\n".join(i.text for i in report.program.instructions)


@pytest.mark.parametrize(
    ("a_format", "efficiency"), [("mxfp4", 0.94), ("mxfp8", 0.97)], ids=["mxfp4", "mxfp8"]
)
def test_the_loop_of_the_large_tile(a_format: str, efficiency: float) -> None:
    """Modelled MFMA efficiency; at most four other instructions for each MFMA."""
    report, listing = loop_report(a_format, 256)
    assert report.mfma_efficiency >= efficiency, str(report)
    assert report.other_per_mfma <= 4, str(report)
    assert report.vector_registers <= 256
    assert report.lds_bytes <= 160 * 1024
    # Every LDS access takes the cycles of its bytes: no bank conflicts.
    lds = report.utilisation["lds banks"] * report.cycles
    reads = Counter(re.findall(r"ds_read\w+", listing))
    assert set(reads) <= {"ds_read_b128", "ds_read_b32", "ds_read2_b32", "ds_read2st64_b32"}, reads
    a_read = {"mxfp4": 24, "mxfp8": 32}[a_format] * 4  # b128 of two steps, cycles of a wave
    scales = 2 * {"mxfp4": 5, "mxfp8": 3}[a_format]  # dwords
    assert lds == pytest.approx(8 * (a_read + scales), rel=0.02)


@pytest.mark.parametrize("a_format", ["mxfp4", "mxfp8"])
def test_operands_need_no_conversion(a_format: str) -> None:
    _, listing = loop_report(a_format, 256)
    first, last = (place(listing, "v_mfma") for place in (str.index, str.rindex))
    loop = listing[first:last]
    names = Counter(re.findall(r"^\w+", loop, re.MULTILINE))
    assert not [name for name in names if re.match(r"v_cvt|.*_load_(u|s)?(byte|short)", name)]
    loads = re.findall(r"^buffer_load\w+.*", loop, re.MULTILINE)
    assert loads
    assert all(text.endswith("lds") for text in loads)
    assert not re.search(r"^scratch_|accvgpr", listing, re.MULTILINE)


def test_scales_are_arranged_like_those_of_weights() -> None:
    scale = torch.randint(0, 255, (64, 5), dtype=torch.uint8)
    plan = mxpert.make_routing_plan(
        torch.ones(64, 1), torch.zeros(64, 1, dtype=torch.int32), num_experts=1, routing_block_m=64
    )
    codes = torch.zeros(1, 64, 80, dtype=torch.uint8)
    expected = CDNA4_FRAGMENT.pack(MXTensor(codes, scale[None], MXFP4)).scale
    with emulate():
        for gather in (False, True):
            arranged = arrange_scales(scale, plan, 160, 1, gather=gather, wide=False)
            assert torch.equal(arranged, expected[0])
        ones = arrange_scales(None, plan, 160, 1, gather=False, wide=True)
    assert torch.equal(ones, torch.full_like(ones, 127))


# --- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a_format", "tokens", "block_m"),
    [("mxfp8", 16384, 256), ("mxfp4", 16384, 256), ("mxfp8", 512, 64), ("mxfp4", 800, 128)],
)
def test_tiles_follow_the_rows_of_an_expert(a_format: str, tokens: int, block_m: int) -> None:
    config = layer_heuristic(a_problem(a_format, tokens))
    assert config == MoEConfig(block_m, prefill_config(block_m), prefill_config(block_m))


@pytest.mark.parametrize(("a_format", "tokens"), [("mxfp8", 64), ("bf16", 16384)])
def test_few_rows_and_bf16_go_to_the_decode_kernel(a_format: str, tokens: int) -> None:
    config = layer_heuristic(a_problem(a_format, tokens))
    assert config.gate_up.kernel is Cdna4Kernel.DECODE  # type: ignore[union-attr]


def test_the_tuner_tries_every_tile() -> None:
    tried = {
        config.gate_up.block_m
        for config in layer_configs(a_problem("mxfp8", 4096))
        if config.gate_up.kernel is Cdna4Kernel.PREFILL  # type: ignore[union-attr]
    }
    assert tried == set(PREFILL_BLOCKS_M)


def test_a_stage_takes_a_tile_that_divides_the_plan() -> None:
    problem = replace(a_problem("mxfp8", 16384), op=Op.MOE_DOWN)
    assert stage_heuristic(replace(problem, routing_block_m=128)) == prefill_config(128)
    assert stage_heuristic(replace(problem, routing_block_m=32)).kernel is Cdna4Kernel.DECODE


def test_a_tile_that_the_kernel_lacks_is_refused() -> None:
    case = CASES[0]
    wrong = replace(prefill_config(128), num_warps=4)
    inputs = case.inputs()
    weights = inputs.weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    with emulate(), pytest.raises(ValueError, match="take one from the kernel's configs"):
        layer(inputs, weights, case, "cdna4", MoEConfig(128, wrong, wrong))
    config = prefill_config(128)
    bf16 = replace(case, a_format="bf16")
    with emulate(), pytest.raises(ValueError, match="MX activations"):
        layer(inputs, weights, bf16, "cdna4", MoEConfig(128, config, config))
