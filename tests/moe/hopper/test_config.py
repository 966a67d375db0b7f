"""Which tile the Hopper backend chooses for a problem, and which configs it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")


from mxpert.configs import HopperGemmConfig, HopperKernel
from mxpert.core.problem import ACTIVATION_FORMATS, Combine, MoEProblem, Op
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS, HOPPER_GROUPS_FLOAT16
from mxpert.moe.hopper.mainloop import left_columns
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.hopper_launches import Recorder, describe
from tests.moe.hopper.test_kernels_aot import config_of, gemms, shape_of


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture(autouse=True)
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices with every Triton are those of a release that copies no register operands."""
    monkeypatch.setattr(heuristics, "copies_register_operands", lambda: False)


@pytest.mark.parametrize(
    "a_format, num_tokens, tile, with_copies",
    [
        ("mxfp8", 1024, "triple", "narrow"),
        ("mxfp8", 768, "short", "short"),
        ("mxfp8", 2048, "middle", "middle"),
        ("bf16", 1024, "triple", "narrow"),
        ("bf16", 768, "short", "short"),
    ],
)
def test_copies_of_operands_take_two_consumers(
    a_format: str, num_tokens: int, tile: str, with_copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three have no registers for them; tiles with one product of each operand need none."""
    problem = describe(MODEL_SHAPES["qwen3-235b"], num_tokens, a_format)
    assert heuristics.two_stage_heuristic(problem).gate_up == config_of(a_format, tile)
    monkeypatch.setattr(heuristics, "copies_register_operands", lambda: True)
    assert heuristics.two_stage_heuristic(problem).gate_up == config_of(a_format, with_copies)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 128, 256, 512, 1024, 4096, 16384])
@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_the_heuristic_takes_a_tested_tile(a_format: str, model: str, num_tokens: int) -> None:
    problem: MoEProblem = describe(MODEL_SHAPES[model], num_tokens, a_format)
    assert problem.weight_layout is Layout.HOPPER_FRAGMENT
    layer = heuristics.two_stage_heuristic(problem)
    tested = heuristics.tiles(a_format == "bf16").values()
    assert {replace(layer.gate_up, k_splits=1), replace(layer.down, k_splits=1)} <= set(tested)
    for config in (layer.gate_up, layer.down):
        heuristics.require_valid(config, problem)
    assert layer in list(heuristics.layer_configs(problem))


@pytest.mark.parametrize(
    "model, most_tokens",
    [
        ("gpt-oss-120b", 4),
        ("kimi-k2-tp4", 4),
        ("qwen3-next", 2),  # its ten experts a token: 32 slots at most
        ("qwen3-235b", 4),
        ("dsv3-ep8", 4),
    ],
)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_one_launch_is_chosen_where_it_is_the_faster(
    a_format: str, model: str, most_tokens: int
) -> None:
    """Measured on an H200: docs/dev/performance-log.md. fp8_token needs whole rows of features."""
    most_tokens = 0 if a_format == "fp8_token" else most_tokens
    for num_tokens in (1, 2, 4, 8):
        problem: MoEProblem = describe(MODEL_SHAPES[model], num_tokens, a_format)
        layer = heuristics.layer_heuristic(problem)
        assert (layer.gate_up.kernel is HopperKernel.FEW_TOKENS) == (num_tokens <= most_tokens)
        offered = list(heuristics.layer_configs(problem))
        assert layer in offered
        assert heuristics.two_stage_heuristic(problem) in offered
        for each in offered:
            if each.gate_up.kernel is HopperKernel.FEW_TOKENS:
                heuristics.require_few_tokens(each, problem)


@pytest.mark.parametrize("num_sms", [None, 1, 66, 132])
def test_one_launch_is_not_chosen_where_a_call_names_its_sms(num_sms: int | None) -> None:
    """It has no persistent grid, and a layer has the same bits with any number of SMs."""
    problem = describe(MODEL_SHAPES["kimi-k2-tp4"], 1, "mxfp8", num_sms=num_sms)
    resolution = explain_problem(problem).resolution
    assert resolution.kernel.backend == "hopper"
    chosen = HopperKernel.FEW_TOKENS if num_sms is None else HopperKernel.DECODE
    assert heuristics.layer_heuristic(problem).gate_up.kernel is chosen


@pytest.mark.parametrize(
    "weight_format, a_format, rows, tile",
    [
        ("int4_g128", "bf16", 32, "decode32"),
        ("int4_g128", "bf16", 64, "triple"),
        ("int4_g128", "bf16", 128, "wide"),
        ("int4_g128", "mxfp8", 64, "triple"),
        ("int4_g128", "mxfp8", 256, "wide"),
        ("int4_g32", "bf16", 32, "narrow"),
        ("nvfp4", "bf16", 16, "short"),
        ("nvfp4", "mxfp8", 16, "decode32"),
        ("nvfp4", "mxfp8", 256, "wide"),
        ("mxfp8_e4m3", "bf16", 64, "triple"),
        ("mxfp8_e4m3", "bf16", 512, "middle"),
        ("mxfp8_e4m3", "mxfp8", 64, "narrow"),
        ("mxfp8_e4m3", "mxfp8", 16, "decode32"),
    ],
)
def test_rows_of_an_expert_choose_the_tile_of_weights_with_groups(
    weight_format: str, a_format: str, rows: int, tile: str
) -> None:
    shape = MoEShape(2048, 768, 128, 8)
    problem = replace(
        describe(shape, rows * 16, a_format),
        weight_format=weight_format,
        weight_layout=HOPPER_GROUPS,
    )
    layer = heuristics.layer_heuristic(problem)
    assert layer.gate_up == layer.down == heuristics.tiles_of(problem)[tile]


def test_the_tuner_tries_tiles_of_the_stages_apart() -> None:
    """The preferred tile of a stage beside any other of the other one, in a plan for both."""
    problem = describe(MODEL_SHAPES["gpt-oss-20b"], 1024, "mxfp8")
    first, *others = heuristics.layer_configs(problem)
    tiles = set(heuristics.tiles(False).values())
    for stage, other in (("gate_up", "down"), ("down", "gate_up")):
        fixed = [each for each in others if getattr(each, stage) == getattr(first, stage)]
        assert {replace(getattr(each, other), k_splits=1) for each in [first, *fixed]} >= tiles
    for each in others:
        unit = math.lcm(each.gate_up.block_m, each.down.block_m)
        assert each.routing_block_m == unit
        for config in (each.gate_up, each.down):
            heuristics.require_valid(config, problem)


@pytest.mark.parametrize("hi_lo", [False, True])
@pytest.mark.parametrize(
    "weight_format, float16",
    [("mxfp4", False), ("nvfp4", False), ("mxfp8_e4m3", False)]
    + [(f"int4_g{group}", float16) for group in (32, 64, 128) for float16 in (False, True)],
)
def test_buffers_hold_a_quarter_of_a_tiles_outputs(
    weight_format: str, float16: bool, hi_lo: bool
) -> None:
    """`store_subtiles` stores up to four parts of a group of columns, of float32 too."""
    found = heuristics.tiles(hi_lo, weight_format, float16 and hi_lo)
    for name, config in {**found, **heuristics.fp8_tiles()}.items():
        if config.kernel is HopperKernel.DECODE:
            continue
        _, rows = heuristics.output_buffers(config, 64 * 4, weight_format)
        columns = left_columns(config.block_m * config.blocks_per_tile)
        assert columns <= 4 * rows, name


@pytest.mark.parametrize("hi_lo", [False, True])
@pytest.mark.parametrize(
    "weight_format, rows",
    [
        ("mxfp4", (None, torch.float16)),
        ("nvfp4", (torch.float16, torch.float16)),
        ("mxfp8_e4m3", (None, torch.bfloat16)),
        ("int4_g32", (None, None)),
    ],
)
def test_rows_of_prefill_tiles(
    weight_format: str, rows: tuple[torch.dtype | None, torch.dtype | None], hi_lo: bool
) -> None:
    """Rows of 16 bits where the weights need them, with 8-bit activations and with bfloat16.

    The tile of MXFP4 weights with the fewest rows multiplies e4m3."""
    for name, config in heuristics.tiles(hi_lo, weight_format).items():
        wanted = None if config.kernel is HopperKernel.DECODE else rows[hi_lo]
        if (weight_format, name) == ("mxfp4", "short"):
            wanted = None
        assert config.rows_dtype is (wanted or torch.float8_e4m3fn), name
        assert config.hi_lo == (hi_lo and wanted is None), name


@pytest.mark.parametrize(
    "weight_format, rows, tile",
    [
        ("int4_g32", 16, "decode32"),
        ("int4_g32", 32, "short"),
        ("int4_g32", 64, "triple"),
        ("int4_g32", 512, "middle"),
        ("int4_g128", 32, "decode32"),
        ("int4_g128", 64, "triple"),
        ("int4_g128", 128, "middle"),
    ],
)
def test_integers_that_float16_holds_meet_float16_rows(
    weight_format: str, rows: int, tile: str
) -> None:
    """Where activations are bfloat16; those of 8 bits have the tiles of other INT4 weights."""
    for a_format in ("bf16", "mxfp8"):
        found = describe(MoEShape(2048, 768, 128, 8), rows * 16, a_format)
        plain = replace(found, weight_format=weight_format, weight_layout=HOPPER_GROUPS)
        wide = replace(plain, weight_layout=HOPPER_GROUPS_FLOAT16)
        chosen, other = (heuristics.layer_heuristic(each).gate_up for each in (wide, plain))
        assert not other.float16_rows
        if a_format == "bf16":
            assert chosen == heuristics.tiles(True, weight_format, True)[tile]
            assert chosen.float16_rows == (chosen.kernel is HopperKernel.PREFILL)
        else:
            assert chosen == other


EP8 = replace(MODEL_SHAPES["deepseek-v3"], num_experts=32)


@pytest.mark.parametrize(
    "shape, num_tokens, a_format, tile",
    [
        pytest.param(EP8, 64, "mxfp8", "decode32", id="decode"),
        pytest.param(EP8, 128, "mxfp8", "short", id="few_experts"),
        pytest.param(MODEL_SHAPES["qwen3-235b"], 1024, "mxfp8", "triple", id="qwen3"),
        pytest.param(MODEL_SHAPES["qwen3-235b"], 768, "bf16", "short", id="qwen3_few_bf16"),
        pytest.param(MODEL_SHAPES["qwen3-235b"], 1024, "bf16", "triple", id="qwen3_bf16"),
    ],
)
def test_rows_of_an_expert_choose_the_tile(
    shape: MoEShape, num_tokens: int, a_format: str, tile: str
) -> None:
    """The limits were measured beside the other tiles on an H200: docs/dev/performance-log.md."""
    layer = heuristics.layer_heuristic(describe(shape, num_tokens, a_format))
    assert layer.gate_up == layer.down == config_of(a_format, tile)


def test_stages_with_few_weight_rows_take_two_consumers() -> None:
    """1024 weight rows (kimi-k2, TP4) are 16 units of 64: the sixth tile of three has one unit."""
    layer = heuristics.layer_heuristic(describe(MoEShape(7168, 512, 384, 8), 4096, "mxfp8"))
    assert layer.gate_up == config_of("mxfp8", "narrow")
    assert layer.down == config_of("mxfp8", "triple")
    assert layer.routing_block_m == layer.gate_up.block_m == layer.down.block_m


def test_stages_ask_for_few_weights_ahead_where_ctas_are_idle(recorder: Recorder) -> None:
    """Stage 1 of one token loads few stages of weights early; others load all stages."""

    def early(num_tokens: int, stages: int) -> list[int]:
        config = replace(config_of("mxfp8", "decode8"), num_stages=stages)
        problem = describe(MODEL_SHAPES["qwen3-235b"], num_tokens, "mxfp8")
        return [
            gemm.arguments["early_stages"]
            for gemm in gemms(recorder.run(problem, config, has_bias=False))
        ]

    assert early(1, 5) == [3, 5]
    assert early(2, 5) == [5, 5]
    assert early(1, 2) == [2, 2]  # never more than the number of stages


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 24},
        {"kernel": HopperKernel.PREFILL},
        {"consumers": 1},
        {"num_stages": 1},
        {"num_stages": 9},
        {"k_splits": 0},
        {"blocks_per_tile": 2},
        {"hi_lo": False},
    ],
    ids=lambda c: "_".join(f"{k}{v}" for k, v in c.items()),
)
def test_other_tiles_are_refused(change: dict[str, Any]) -> None:
    config = replace(config_of("bf16", "decode16"), **change)
    with pytest.raises(ValueError, match="config — need one of"):
        heuristics.require_valid(config, describe(shape_of(), 64, "bf16"))


def test_prefill_has_no_split() -> None:
    with pytest.raises(ValueError, match="config — need one of"):
        heuristics.require_valid(
            replace(config_of("bf16", "middle"), k_splits=2), describe(shape_of(), 64, "bf16")
        )


def test_rows_that_are_not_summed_have_no_split() -> None:
    """FLAT: a pinned split would be dropped; the heuristic has none either."""
    stage: dict[str, Any] = dict(op=Op.MOE_DOWN, routing_block_m=16)
    layer = describe(shape_of(), 1, "mxfp8")
    split, flat = (
        replace(layer, **stage, options=replace(layer.options, combine=combine))
        for combine in (Combine.REDUCE, Combine.FLAT)
    )
    chosen = heuristics.stage_heuristic(split)
    assert chosen.k_splits > 1
    assert heuristics.stage_heuristic(flat).k_splits == 1
    heuristics.require_valid(chosen, split)
    with pytest.raises(ValueError, match="not for FLAT"):
        heuristics.require_valid(chosen, flat)


def test_explain_says_that_atomic_has_a_fixed_order() -> None:
    for combine, said in ((Combine.REDUCE, False), (Combine.ATOMIC, True)):
        found = explain_problem(describe(shape_of(), 4, "mxfp8", combine=combine))
        assert found.resolution.kernel.backend == "hopper"
        assert ("sums in slot order, as REDUCE does" in str(found)) is said


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(replace(config_of("mxfp8", "decode16"), num_stages=9), id="decode"),
        pytest.param(replace(config_of("mxfp8", "wide"), num_stages=5), id="prefill"),
    ],
)
def test_a_launch_refuses_other_tiles(recorder: Recorder, config: HopperGemmConfig) -> None:
    with pytest.raises(ValueError, match="config — need one of"):
        recorder.run(describe(shape_of(), 2048, "mxfp8"), config, has_bias=False)
    assert not gemms(recorder.launches)
