"""What SMs, clock and memory of a Hopper card change in the choice of tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.configs import HopperKernel
from mxpert.core.problem import ACTIVATION_FORMATS, MoEConfig, MoEProblem, Target
from mxpert.core.registry import explain_problem
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper.tile_limits import balanced_rows
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.devices import HOPPER_CARDS
from support.hopper_launches import H200, Recorder, describe
from tests.moe.hopper.test_kernels_aot import config_of, gemms

TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
H20 = HOPPER_CARDS["H20"]
MXFP4, MXFP8 = 4.25 / 8, 8.25 / 8
"""Bytes of a weight with its scale."""

EVERY_EXPERT = MoEShape(2880, 2880, 8, 8)
"""T tokens are T rows an expert."""

cards = pytest.mark.parametrize("card", HOPPER_CARDS)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)


def on(card: Target, shape: MoEShape, num_tokens: int, a_format: str) -> MoEProblem:
    return replace(describe(shape, num_tokens, a_format), target=card)


def chosen(card: Target, num_tokens: int, a_format: str) -> str:
    """Name of both stages' tile with so many rows an expert."""
    problem = on(card, EVERY_EXPERT, num_tokens, a_format)
    layer = heuristics.two_stage_heuristic(problem)
    names = {tile: name for name, tile in heuristics.tiles_of(problem).items()}
    found = {names[replace(stage, k_splits=1)] for stage in (layer.gate_up, layer.down)}
    assert len(found) == 1
    return found.pop()


@cards
@formats
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_all_models_have_valid_tiles_on_every_card(card: str, a_format: str, model: str) -> None:
    for num_tokens in TOKENS:
        problem = on(HOPPER_CARDS[card], MODEL_SHAPES[model], num_tokens, a_format)
        resolution = explain_problem(problem).resolution
        assert resolution.kernel.backend == "hopper"
        layer = resolution.config
        assert isinstance(layer, MoEConfig)
        if resolution.source == "heuristic":
            assert layer == heuristics.layer_heuristic(problem)
        configs = list(heuristics.layer_configs(problem))
        assert heuristics.layer_heuristic(problem) == configs[0]
        stages = set()
        for config in configs:
            if config.gate_up.kernel is HopperKernel.FEW_TOKENS:
                heuristics.require_few_tokens(config, problem)
            else:
                stages |= {config.gate_up, config.down}
        for stage in stages:
            heuristics.require_valid(stage, problem)


@cards
@formats
def test_split_tiles_have_a_cta_each_and_more_than_half_of_them(card: str, a_format: str) -> None:
    """One more part would not fit, unless the depth has no more steps."""
    for shape in MODEL_SHAPES.values():
        for num_tokens in (1, 2, 4, 8):
            problem = on(HOPPER_CARDS[card], shape, num_tokens, a_format)
            layer, ctas = heuristics.two_stage_heuristic(problem), 2 * HOPPER_CARDS[card].num_sms
            for op, stage in zip(heuristics.STAGE_OPS, (layer.gate_up, layer.down), strict=True):
                tiles, steps = heuristics._tiles_and_steps(problem, op)
                tiles *= problem.hit_experts
                most = max(1, steps // 2)
                assert stage.k_splits == 1 or tiles * stage.k_splits <= ctas
                assert stage.k_splits == most or tiles * (stage.k_splits + 1) > ctas


@cards
@pytest.mark.parametrize("tile, per_sm", [("decode32", 2), ("narrow", 1)])
def test_grids_fill_every_card_with_the_binaries_of_an_h200(
    card: str, tile: str, per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All CTAs are resident: what an SM holds is the same on all cards, and so is the binary."""
    shape, config, target = (
        MODEL_SHAPES["gpt-oss-20b"],
        config_of("mxfp8", tile),
        HOPPER_CARDS[card],
    )
    recorder = Recorder(monkeypatch)
    here = gemms(recorder.run_layer(on(target, shape, 1024, "mxfp8"), config))
    there = gemms(recorder.run_layer(on(H200, shape, 1024, "mxfp8"), config))
    assert [launch.grid for launch in here] == [(per_sm * target.num_sms,)] * 2
    assert [launch.binary for launch in here] == [launch.binary for launch in there]


@cards
@formats
def test_only_an_h20_leaves_the_measured_tiles(card: str, a_format: str) -> None:
    """Choices of an H200 as it was measured: of a card whose rates are not known."""
    target = HOPPER_CARDS[card]
    measured = replace(target, clock=0.0, bandwidth=0.0)
    same = []
    for shape in MODEL_SHAPES.values():
        for num_tokens in TOKENS:
            here, there = (
                heuristics.two_stage_heuristic(on(each, shape, num_tokens, a_format))
                for each in (target, replace(measured, name="NVIDIA H200"))
            )
            same.append(here == there)
    assert all(same) is (card != "H20")


def test_choices_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were before a card's rates were known."""
    monkeypatch.setattr(heuristics, "copies_register_operands", lambda: False)
    rows = (1, 8, 26, 27, 56, 57, 88, 89, 104, 105, 192, 193, 2000)
    measured = HOPPER_CARDS["H200"]
    names = [chosen(measured, count, "mxfp8") for count in rows]
    assert names == [
        *("decode8", "decode32", "decode32", "short", "short", "triple", "triple"),
        *("narrow", "narrow", "middle", "middle", "wide", "wide"),
    ]
    rows = (26, 27, 56, 57, 84, 85, 110, 111, 2000)
    names = [chosen(measured, count, "bf16") for count in rows]
    assert names == [
        *("decode32", "short", "short", "triple", "triple", "narrow", "narrow"),
        *("middle", "middle"),
    ]


def test_an_h20_keeps_narrow_tiles_longer() -> None:
    """Where 32 rows take longer to multiply than to read, the fewest added columns count."""
    rows = (1, 8, 27, 200, 201, 320, 321)
    for a_format, widest in (("mxfp8", "wide"), ("bf16", "middle")):
        assert [chosen(H20, count, a_format) for count in rows] == [
            "decode8",
            *["decode32"] * 3,
            *["narrow"] * 2,
            widest,
        ]


@pytest.mark.parametrize(
    "card, fp8, bf16", [("H200", 116, 58), ("H100 PCIe", 213, 107), ("H20", 19.5, 9.8)]
)
def test_rows_that_balance_multiplying_and_reading(card: str, fp8: float, bf16: float) -> None:
    found = [balanced_rows(HOPPER_CARDS[card], hi_lo, MXFP4) for hi_lo in (False, True)]
    assert found == pytest.approx([fp8, bf16], rel=0.01)


def test_rates_that_the_driver_does_not_tell() -> None:
    """The data sheet stands in for an H20's memory; other cards are taken as measured."""
    unknown = replace(H20, bandwidth=0.0)
    assert balanced_rows(unknown, False, MXFP4) == pytest.approx(19.7, rel=0.01)
    assert balanced_rows(H200, False, MXFP4) == math.inf
    assert balanced_rows(replace(HOPPER_CARDS["H200"], clock=0.0), False, MXFP4) == math.inf
    assert balanced_rows(replace(H20, name="NVIDIA H20-3e"), True, MXFP4) < 10


def test_weights_of_8_bits_keep_the_measured_tiles_with_8_bit_activations() -> None:
    """An H20 reads them for longer than it multiplies 32 rows; with hi and lo it does not."""
    assert balanced_rows(H20, False, MXFP8) > 32 > balanced_rows(H20, True, MXFP8)
    layers = {}
    for a_format in ("mxfp8", "bf16"):
        problem = replace(on(H20, EVERY_EXPERT, 64, a_format), weight_format="mxfp8_e4m3")
        layers[a_format] = heuristics.two_stage_heuristic(problem)
    assert layers["mxfp8"].gate_up.kernel is HopperKernel.PREFILL
    assert layers["bf16"].gate_up.kernel is HopperKernel.DECODE
