"""The Hopper GEMMs for INT4 and MXFP8 weights, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.core.problem import MoEProblem, SiLU, SwiGLU
from mxpert.formats import MXFP8_E4M3, MXTensor, WeightTensor
from mxpert.formats.layouts import WeightLayout
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS, HOPPER_GROUPS_FLOAT16, group_weights
from mxpert.testing.problems import MoEShape
from support import hopper_launches
from support.aot import TRITON_RELEASE
from support.hopper_launches import H200, Recorder
from support.pairwise import latin
from support.without_data import empty, layer_of
from tests.moe.hopper.test_kernels_aot import check_gemm_of_any_format, gemms

FORMATS = ("int4_g32", "int4_g64", "int4_g128", "nvfp4", "mxfp8_e4m3")
SCALES = (torch.bfloat16, torch.float32, torch.int32)
"""int32: with zero points."""
SHAPE = MoEShape(2816, 1408, 128, 4)
"""Depths of 22 and 11 units of 128."""

MOST_SPILLS = 155 if TRITON_RELEASE >= (3, 9) else 100
"""Local-memory instructions of a GEMM, most of them between tiles and in epilogues."""
MOST_SPILLS_OF_16 = 200 if TRITON_RELEASE >= (3, 9) else 140
"""The same of NVFP4: its two operands for a k32 step need twice the registers."""
MOST_LOOP_SPILLS = {"decode32": 122 if TRITON_RELEASE >= (3, 9) else 64}
"""How many of these may be in the main loop, if not 8: few registers are left beside 64 columns."""

EVERY_TILE = [
    ("int4_g128", a_format, tile)
    for a_format in ("bf16", "mxfp8")
    for tile in heuristics.tiles(a_format == "bf16", "int4_g128")
]
MOST_REGISTERS = [
    (name, *rows_and_tile)
    for name in FORMATS
    if name != "int4_g128"
    for rows_and_tile in (
        ("bf16", "decode32"),
        ("bf16", [*heuristics.tiles(True, name)][-1]),
        ("mxfp8", [*heuristics.tiles(False, name)][-1]),
    )
]
CASES = {
    "-".join(case): (*case, place % 2) for place, case in enumerate([*EVERY_TILE, *MOST_REGISTERS])
}
"""Every tile once, and those that need most registers with each of the other formats; one stage of
each, in turns."""


def packed(
    name: str, scale_dtype: torch.dtype, layout: WeightLayout = HOPPER_GROUPS
) -> Callable[[int, int, int], WeightLike]:
    """A maker of projections in HOPPER_GROUPS, or in HOPPER_GROUPS_FLOAT16."""
    known = group_weights(name)
    assert known is not None

    def projection(experts: int, num_rows: int, depth: int) -> WeightLike:
        units = experts, -(-num_rows // 64), -(-depth // 128)
        codes, shape = empty(*units, known.code_rows * 128), (experts, num_rows, depth)
        scales = *units, known.groups * 64
        if known.codes == "e4m3":
            return MXTensor(codes, empty(*scales), MXFP8_E4M3, -1, HOPPER_GROUPS, None, shape)
        factors = None
        scale = empty(*scales, dtype=scale_dtype)
        if known.codes == "e2m1":
            scale = empty(*scales)
            factors = empty(experts, units[1] * 64, dtype=torch.float32)
        return WeightTensor(codes, scale, name, None, factors, layout, shape)

    return projection


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def problem_of(name: str, a_format: str, tokens: int = 64, *, biased: bool = True) -> MoEProblem:
    shape = replace(SHAPE, activation=SwiGLU() if biased else SiLU())
    found = layer_of(shape, tokens, H200, HOPPER_GROUPS, a_format)
    return replace(found, weight_format=name)


@pytest.mark.parametrize("case", CASES)
def test_gemms(case: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 wgmma with A in registers, 16-byte loads of codes, and bounded spills in the main loop.

    One stage of each tile, with another dtype of scales: registers follow from the tile.
    """
    name, a_format, tile, stage = CASES[case]
    scales = SCALES[list(CASES).index(case) % 3]
    monkeypatch.setattr(hopper_launches, "packed", packed(name, scales))
    config = heuristics.tiles(a_format == "bf16", name)[tile]
    launches = recorder.run(problem_of(name, a_format), config, has_bias=True)
    both = gemms(launches)
    assert len(both) == 2
    most = MOST_SPILLS_OF_16 if name == "nvfp4" else MOST_SPILLS
    in_loop, rows = MOST_LOOP_SPILLS.get(tile, 8), config.rows_dtype
    check_gemm_of_any_format(both[stage].compile(), tile, most, in_loop, rows=rows)


FLOAT16_CASES = [
    *(("int4_g32", tile) for tile in heuristics.prefill_shapes(True, "int4_g32", float16=True)),
    ("int4_g64", "wide"),
    ("int4_g128", "wide"),
]


@pytest.mark.parametrize("name, tile", FLOAT16_CASES)
def test_gemms_with_float16_rows(
    name: str, tile: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = HOPPER_GROUPS_FLOAT16
    monkeypatch.setattr(hopper_launches, "packed", packed(name, torch.bfloat16, layout))
    config = heuristics.tiles(True, name, True)[tile]
    problem = replace(problem_of(name, "bf16"), weight_layout=layout)
    gate_up, down = gemms(recorder.run(problem, config, has_bias=True))
    chosen = gate_up if FLOAT16_CASES.index((name, tile)) % 2 else down
    check_gemm_of_any_format(chosen.compile(), tile, MOST_SPILLS, 8, rows=torch.float16)


@pytest.mark.parametrize(
    "a_format, hidden, quantised",
    latin(("bf16", "mxfp8", "mxfp4", "fp8_token"), (512, 7168), (False, True)),
)
def test_row_kernels(
    a_format: str, hidden: int, quantised: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that keep the order of K are stored 16 bytes at a time, without spills."""
    monkeypatch.setattr(hopper_launches, "packed", packed("int4_g128", torch.bfloat16))
    problem = replace(
        problem_of("int4_g128", a_format), hidden_size=hidden, intermediate_size=hidden
    )
    config = heuristics.tiles(a_format == "bf16", "int4_g128")["decode8"]
    quantised &= a_format.startswith("mx")  # others travel as bfloat16
    launches = recorder.run(problem, config, has_bias=True, quantised=quantised)
    rows = [launch for launch in launches if "rows" in launch.name]
    assert len(rows) == 2
    for launch in rows:
        assert launch.arguments["STEPS"].in_order
        metrics = launch.compile().metrics
        assert metrics.spills == 0
        assert metrics.global_stores.get(128, 0) >= 2
        assert not metrics.global_stores.keys() & {8, 16}


@pytest.mark.parametrize("tokens", [1, 16, 8192])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_heuristic_chooses_a_tile_that_is_there(name: str, a_format: str, tokens: int) -> None:
    chosen = heuristics.two_stage_heuristic(problem_of(name, a_format, tokens))
    for stage in (chosen.gate_up, chosen.down):
        heuristics.require_valid(stage, problem_of(name, a_format, tokens))
        assert stage.kernel == ("prefill" if tokens == 8192 else "decode")
