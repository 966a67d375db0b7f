"""Prefill kernel of the cdna4 backend, executed on gfx950 code on the CPU."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import mxpert
from gfx950emu.timing import Execution, LoopReport, model_loop
from mxpert.configs import Cdna4Kernel
from mxpert.core.problem import MoEConfig, MoEOptions, MoEProblem, Op, SiLU
from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.cdna4.config import (
    layer_configs,
    layer_heuristic,
    prefill_blocks,
    prefill_config,
    stage_heuristic,
)
from mxpert.moe.cdna4.layout import CDNA4_FRAGMENT
from mxpert.moe.cdna4.prefill_scales import arrange_scales
from mxpert.testing.gfx950 import MI355X, emulate
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.aot import TRITON_RELEASE
from support.executors import Executor
from support.layers import explain_layer
from tests.conformance.cases.moe import HIGH_TILES, WEIGHTS
from tests.conformance.cases.moe_case import MoECase, Sizes

CDNA4 = Executor("cdna4", "emulated")
KERNEL = "_moe_gemm_prefill_cdna4_kernel"


# --- what was compiled -----------------------------------------------------------------------


def a_problem(a_format: str, tokens: int, w_format: str = "mxfp4", **sizes: int) -> MoEProblem:
    shape = {"top_k": 4, "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880} | sizes
    options = MoEOptions(SiLU(), a_format)
    layout = Layout.CDNA4_FRAGMENT
    return MoEProblem(
        Op.FUSED_MOE,
        MI355X,
        num_tokens=tokens,
        options=options,
        weight_layout=layout,
        weight_format=w_format,
        **shape,
    )


@functools.cache
def loop_report(a_format: str, persistent: bool) -> tuple[LoopReport, str]:
    """Model of stage 1's loop on one full tile of 256 rows, and the listing."""
    names = {"mxfp4": "mxfp4-256", "mxfp8": "mxfp8-256-deep"}
    return model_of(names[a_format], 256, persistent)


def model_of(name: str, rows: int, persistent: bool = False) -> tuple[LoopReport, str]:
    """The same of a case of `HIGH_TILES` or `WEIGHTS`, whose binaries it uses."""
    case = replace(
        (HIGH_TILES | WEIGHTS)[name],
        poisoned=False,
        sizes=Sizes(1024, experts=1, top_k=1, tokens=rows),
    )
    stage = replace(prefill_config(rows), persistent=persistent)
    with emulate(trace=True) as emulation, CDNA4.serving(MoEConfig(rows, stage, stage)):
        case.run(case.given(case.inputs(), CDNA4))
    report = next(each for each in emulation.reports if each.kernel == KERNEL)
    return model_loop(Execution.of(report)), "\n".join(i.text for i in report.program.instructions)


grids = pytest.mark.parametrize("persistent", [False, True], ids=["one-shot", "persistent"])


@grids
@pytest.mark.parametrize(
    ("a_format", "efficiency"), [("mxfp4", 0.94), ("mxfp8", 0.97)], ids=["mxfp4", "mxfp8"]
)
def test_the_loop_of_the_large_tile(a_format: str, efficiency: float, persistent: bool) -> None:
    """Modelled MFMA efficiency; at most four other instructions for each MFMA."""
    report, listing = loop_report(a_format, persistent)
    assert report.mfma_efficiency >= efficiency, str(report)
    assert report.other_per_mfma <= 4, str(report)
    assert report.vector_registers <= 256
    assert report.lds_bytes <= 160 * 1024
    assert not re.search(r"^scratch_|accvgpr|v_writelane", listing, re.MULTILINE)
    # Every LDS access takes the cycles of its bytes: no bank conflicts.
    lds = report.utilisation["lds banks"] * report.cycles
    reads = Counter(re.findall(r"ds_read\w+", listing))
    assert set(reads) <= {"ds_read_b128", "ds_read_b32", "ds_read2_b32", "ds_read2st64_b32"}, reads
    a_read = {"mxfp4": 24, "mxfp8": 32}[a_format] * 4  # b128 of two steps, cycles of a wave
    scales = 2 * {"mxfp4": 5, "mxfp8": 3}[a_format]  # dwords
    assert lds == pytest.approx(8 * (a_read + scales), rel=0.02)


def loop_of(listing: str) -> str:
    first, last = (place(listing, "v_mfma") for place in (str.index, str.rindex))
    return listing[first:last]


@pytest.mark.parametrize("a_format", ["mxfp4", "mxfp8"])
def test_operands_need_no_conversion(a_format: str) -> None:
    _, listing = loop_report(a_format, False)
    loop = loop_of(listing)
    names = Counter(re.findall(r"^\w+", loop, re.MULTILINE))
    assert not [name for name in names if re.match(r"v_cvt|.*_load_(u|s)?(byte|short)", name)]
    loads = re.findall(r"^buffer_load\w+.*", loop, re.MULTILINE)
    assert loads
    assert all(text.endswith("lds") for text in loads)


@pytest.mark.parametrize(("name", "rows"), [("bf16-256-deep", 256), ("bf16-128-deep", 128)])
def test_the_loop_of_bf16_rows(name: str, rows: int) -> None:
    """Modelled MFMA efficiency; the hardware decodes each pair of codes once for each wave's rows.

    The decode kernel with 32 rows is modelled at 42 %.
    """
    report, listing = model_of(name, rows)
    least = 0.95 if TRITON_RELEASE < (3, 9) else 0.75  # 3.9 moves code between the phases
    assert report.mfma_efficiency >= least, str(report)
    assert report.vector_registers <= 256
    assert report.lds_bytes <= 160 * 1024
    multiply, convert = "v_mfma_f32_32x32x16_bf16", "v_cvt_scalef32_pk_bf16_fp4"
    assert report.instructions["mfma"] == report.mnemonics[multiply]
    # 64 rows of a wave are two MFMA of eight elements of depth, four pairs, a lane.
    assert report.mnemonics[convert] == 2 * report.mnemonics[multiply]
    loads = re.findall(r"^buffer_load\w+.*", loop_of(listing), re.MULTILINE)
    assert all(text.endswith("lds") for text in loads)
    assert not re.search(r"^scratch_|accvgpr", listing, re.MULTILINE)


@grids
def test_the_loop_of_mxfp8_weights(persistent: bool) -> None:
    """e4m3 weights are an operand of scaled MFMA, copied straight to LDS."""
    report, listing = model_of("mxfp8-mxfp8-128", 128, persistent)
    assert report.mfma_efficiency >= 0.75, str(report)
    assert report.vector_registers <= 256
    assert report.lds_bytes <= 160 * 1024
    multiply = "v_mfma_scale_f32_16x16x128_f8f6f4"
    assert report.instructions["mfma"] == report.mnemonics[multiply] == 32
    assert not re.search(r"^(scratch_|v_cvt)|accvgpr", loop_of(listing), re.MULTILINE)
    loads = re.findall(r"^buffer_load\w+.*", loop_of(listing), re.MULTILINE)
    assert loads
    assert all(text.endswith("lds") for text in loads)


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
    [
        ("mxfp8", 16384, 256),
        ("mxfp4", 16384, 256),
        ("bf16", 16384, 256),
        ("mxfp8", 512, 64),
        ("mxfp4", 800, 128),
        ("bf16", 512, 128),
    ],
)
def test_tiles_follow_the_rows_of_an_expert(a_format: str, tokens: int, block_m: int) -> None:
    config = layer_heuristic(a_problem(a_format, tokens))
    stage = prefill_config(block_m, config.gate_up.weight_cache)  # type: ignore[attr-defined]
    assert config == MoEConfig(block_m, stage, stage)


@pytest.mark.parametrize("a_format", ["mxfp8", "bf16"])
def test_few_rows_go_to_the_decode_kernel(a_format: str) -> None:
    config = layer_heuristic(a_problem(a_format, 64))
    assert config.gate_up.kernel is Cdna4Kernel.DECODE  # type: ignore[union-attr]


def test_tiles_of_mxfp8_weights() -> None:
    """Prefill with 128 rows for 8-bit rows; other rows have the decode kernel, as few rows do."""
    stage = prefill_config(128)
    for a_format in ("mxfp8", "fp8_token"):
        config = layer_heuristic(a_problem(a_format, 4096, "mxfp8_e4m3"))
        assert config == MoEConfig(128, stage, stage)
    for a_format, tokens in (("bf16", 4096), ("mxfp4", 4096), ("mxfp8", 64)):
        config = layer_heuristic(a_problem(a_format, tokens, "mxfp8_e4m3"))
        assert config.gate_up.kernel is Cdna4Kernel.DECODE  # type: ignore[union-attr]
        tried = layer_configs(a_problem(a_format, tokens, "mxfp8_e4m3"))
        rows = {
            config.gate_up.block_m
            for config in tried
            if config.gate_up.kernel is Cdna4Kernel.PREFILL  # type: ignore[union-attr]
        }
        assert rows == ({128} if a_format == "mxfp8" else set())


@pytest.mark.parametrize("a_format", ["mxfp8", "bf16"])
def test_the_tuner_tries_every_tile(a_format: str) -> None:
    tried = {
        config.gate_up.block_m
        for config in layer_configs(a_problem(a_format, 4096))
        if config.gate_up.kernel is Cdna4Kernel.PREFILL  # type: ignore[union-attr]
    }
    assert tried == set(prefill_blocks(a_problem(a_format, 4096)))


def test_explain_names_the_kernel_of_many_bf16_rows() -> None:
    inputs = random_moe_problem(MoEShape(160, 96, 1, 1), 256)
    weights = inputs.weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    with emulate():
        assert "kernel=prefill block_m=128" in str(explain_layer(inputs, weights=weights))


def test_a_stage_takes_a_tile_that_divides_the_plan() -> None:
    problem = replace(a_problem("mxfp8", 16384), op=Op.MOE_DOWN)
    assert stage_heuristic(replace(problem, routing_block_m=128)) == prefill_config(128)
    assert stage_heuristic(replace(problem, routing_block_m=32)).kernel is Cdna4Kernel.DECODE


def test_a_tile_that_the_kernel_lacks_is_refused() -> None:
    wrong, too_low = replace(prefill_config(128), num_warps=4), prefill_config(64)
    for a_format, config, said in (
        ("mxfp4", wrong, "take one from the kernel's configs"),
        ("bf16", too_low, "with bf16 activations the tile of one of"),
    ):
        case = MoECase(a_format)
        given = case.given(case.inputs(), CDNA4)
        with (
            emulate(),
            CDNA4.serving(MoEConfig(config.block_m, config, config)),
            pytest.raises(ValueError, match=said),
        ):
            case.run(given)


# --- between the stages -------------------------------------------------------------------------


@pytest.mark.parametrize("a_format", ["mxfp8", "mxfp4"])
def test_nothing_runs_between_the_stages(a_format: str) -> None:
    """Stage 1 stores scales as stage 2 reads them: those of x are the only ones arranged."""
    case = HIGH_TILES[f"{a_format}-256-deep" if a_format == "mxfp8" else f"{a_format}-256"]
    with emulate(trace=True) as emulation:
        case.check(CDNA4)
    names = [report.kernel for report in emulation.reports]
    first = names.index(KERNEL)
    assert names[first + 1] == KERNEL, names
    assert names.count("_arrange_scales_cdna4_kernel") == 1, names
