"""Tile choice: the heuristic's configs and all configs of the tuner's grid are valid."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mxpert.core.problem import ACTIVATION_FORMATS, GemmConfig, MoEProblem, Op, Target, WeightCache
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from mxpert.moe.triton import config as heuristics
from mxpert.moe.triton.host import DOWN, FUSED_MOE, GATE_UP
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.devices import DEVICES
from support.without_data import layer_of

H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
MI355X = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)
SERVED = [target for arch, target in DEVICES.items() if arch != "gfx942"]


def describe(
    target: Target,
    shape: MoEShape,
    num_tokens: int,
    a_format: str = "bf16",
    op: Op = Op.FUSED_MOE,
    routing_block_m: int = 0,
) -> MoEProblem:
    layer = layer_of(shape, num_tokens, target, Layout.ROW_MAJOR, a_format)
    return replace(layer, op=op, routing_block_m=routing_block_m)


@pytest.mark.parametrize("target", SERVED, ids=lambda target: target.arch)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_heuristic_is_valid_for_every_model(a_format: str, target: Target) -> None:
    for shape, num_tokens in itertools.product(MODEL_SHAPES.values(), (1, 16, 128, 1024, 32768)):
        problem = describe(target, shape, num_tokens, a_format)
        config = FUSED_MOE.heuristic(problem)
        for op, stage in ((Op.MOE_GATE_UP, config.gate_up), (Op.MOE_DOWN, config.down)):
            assert heuristics.invalid(target, op, a_format, stage) is None


@pytest.mark.parametrize("unit", [16, 48, 64, 128, 256])
def test_stage_block_divides_the_plans_unit(unit: int) -> None:
    for num_tokens in (1, 1024, 32768):
        problem = describe(
            H200, MODEL_SHAPES["gpt-oss-20b"], num_tokens, op=Op.MOE_DOWN, routing_block_m=unit
        )
        assert unit % DOWN.heuristic(problem).block_m == 0


def test_few_tokens_split_k_and_many_do_not() -> None:
    shape = MODEL_SHAPES["kimi-k2-tp4"]
    assert FUSED_MOE.heuristic(describe(H200, shape, 1)).gate_up.split_k > 1
    assert FUSED_MOE.heuristic(describe(H200, shape, 512)).gate_up.split_k == 1


def test_weights_stream_only_where_they_are_read_once() -> None:
    shape = MODEL_SHAPES["gpt-oss-20b"]
    assert FUSED_MOE.heuristic(describe(H200, shape, 64)).gate_up.group_m == 1
    assert FUSED_MOE.heuristic(describe(H200, shape, 8192)).gate_up.group_m > 1


def test_streamed_weights_are_tried_and_never_chosen() -> None:
    """In either stage and in both; a stage on its own has the other policy too."""
    problem = describe(MI355X, MODEL_SHAPES["gpt-oss-20b"], 16)
    first, *others = FUSED_MOE.configs(problem)
    assert first.gate_up.weight_cache is first.down.weight_cache is WeightCache.KEEP
    for stages in ({"gate_up"}, {"down"}, {"gate_up", "down"}):
        streamed = {
            name: replace(getattr(first, name), weight_cache=WeightCache.STREAM) for name in stages
        }
        assert replace(first, **streamed) in others
    for kernel in (GATE_UP, DOWN):
        stage, *others = kernel.configs(replace(problem, op=kernel.op, routing_block_m=64))
        assert replace(stage, weight_cache=WeightCache.STREAM) in others


def test_nvidia_refuses_to_stream_weights() -> None:
    """Its asynchronous copies would drop the hint."""
    problem = describe(H200, MODEL_SHAPES["gpt-oss-20b"], 16, op=Op.MOE_DOWN, routing_block_m=64)
    config = replace(DOWN.heuristic(problem), weight_cache="stream")
    with pytest.raises(ValueError, match="weight_cache stream needs an AMD GPU: set it to keep"):
        heuristics.require_valid(H200, Op.MOE_DOWN, "bf16", config)
    assert all(each.weight_cache is WeightCache.KEEP for each in DOWN.configs(problem))


def test_the_tuner_tries_row_blocks_of_the_stages_apart() -> None:
    problem = describe(MI355X, MODEL_SHAPES["gpt-oss-20b"], 2048, "mxfp8")
    found = {
        (each.gate_up.block_m, each.down.block_m): each.routing_block_m
        for each in FUSED_MOE.configs(problem)
    }
    pairs = itertools.product(heuristics.BLOCKS_M, repeat=2)
    assert found == {pair: max(pair) for pair in pairs}  # powers of two


@pytest.mark.parametrize("kernel", [GATE_UP, DOWN], ids=lambda kernel: kernel.op.value)
def test_tuner_space_is_valid_and_holds_the_heuristic(kernel: object) -> None:
    op = kernel.op  # type: ignore[attr-defined]
    problem = describe(H200, MODEL_SHAPES["gpt-oss-20b"], 256, "mxfp8", op, 64)
    configs = list(kernel.configs(problem))  # type: ignore[attr-defined]
    assert configs[0] == kernel.heuristic(problem)  # type: ignore[attr-defined]
    assert len(set(configs[1:])) == len(configs) - 1 > 50
    assert {config.block_m for config in configs} == {16, 32, 64}
    assert all(heuristics.invalid(H200, op, "mxfp8", config) is None for config in configs)


def test_layer_space_varies_one_stage_at_a_time() -> None:
    problem = describe(H200, MODEL_SHAPES["qwen3-next"], 256, "mxfp4")
    first, *rest = itertools.islice(FUSED_MOE.configs(problem), 200)
    assert first == FUSED_MOE.heuristic(problem)
    assert len({config.gate_up for config in rest}) > 50


INVALID = {
    "block_n_48": (GemmConfig(16, 48, 128), "power of two"),
    "block_m_8": (GemmConfig(8, 64, 128), "block_m"),
    "block_k_32": (GemmConfig(16, 64, 32), "block_k"),
    "three_warps": (GemmConfig(16, 64, 128, num_warps=3), "num_warps"),
    "no_split": (GemmConfig(16, 64, 128, split_k=0), "split_k"),
    "accumulators": (GemmConfig(128, 256, 128, num_warps=4), "accumulators"),
    "shared_memory": (GemmConfig(128, 128, 256, 8, 5), "shared memory"),
    "thin_tile": (GemmConfig(16, 64, 64, 8), "activations a thread"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_config_says_why(name: str) -> None:
    config, reason = INVALID[name]
    a_format = "mxfp4" if name == "thin_tile" else "bf16"
    assert reason in (heuristics.invalid(H200, Op.MOE_DOWN, a_format, config) or "")
    with pytest.raises(ValueError, match=r"moe_down: config — need a config that this device"):
        heuristics.require_valid(H200, Op.MOE_DOWN, a_format, config)


NO_SCALED_MFMA = {
    "low_and_short": (GemmConfig(16, 64, 64, 4), "set block_k to 128 or block_m to 32"),
    "one_warp": (GemmConfig(32, 64, 128, 1), "set num_warps to 2"),
}


@pytest.mark.parametrize("name", NO_SCALED_MFMA)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_amd_refuses_mx_tiles_without_scaled_mfma(a_format: str, name: str) -> None:
    """Only where activations are MX or fp8: bf16 ones are multiplied by bf16 MFMA in any tile."""
    config, remedy = NO_SCALED_MFMA[name]
    assert heuristics.invalid(H200, Op.MOE_DOWN, "mxfp8", replace(config, num_warps=4)) is None
    if a_format == "bf16":
        heuristics.require_valid(MI355X, Op.MOE_DOWN, a_format, config)
        return
    with pytest.raises(ValueError, match=rf"moe_down: config — need .*as bf16.*{remedy}"):
        heuristics.require_valid(MI355X, Op.MOE_DOWN, a_format, config)


def test_amd_tuner_offers_no_mx_tile_without_scaled_mfma() -> None:
    problem = describe(MI355X, MODEL_SHAPES["gpt-oss-20b"], 64, "mxfp4", Op.MOE_DOWN, 64)
    configs = list(DOWN.configs(problem))
    assert {config.block_k for config in configs if config.block_m > 16} == {64, 128, 256}
    assert {config.block_k for config in configs if config.block_m == 16} == {128, 256}


def test_unsupported_problems_say_why() -> None:
    problem = describe(H200, MODEL_SHAPES["gpt-oss-20b"], 4)
    assert heuristics.unsupported(problem) is None
    for target, reason in (
        (Target("cpu", "cpu", "x86_64", 2, 0), "TRITON_INTERPRET=1"),
        (Target("hip", "gfx942", "MI300X", 304, 65536), "gfx950"),
        (Target("cuda", "sm_75", "T4", 40, 65536), "sm_80"),
    ):
        assert reason in (heuristics.unsupported(replace(problem, target=target)) or "")
    double = replace(problem, options=replace(problem.options, out_dtype=torch.float64))
    assert "float64" in (heuristics.unsupported(double) or "")
    assert "16" in (heuristics.unsupported(replace(problem, routing_block_m=24)) or "")


def test_an_explanation_names_every_field_of_a_config() -> None:
    problem = replace(
        describe(H200, MODEL_SHAPES["gpt-oss-20b"], 1, "fp8_token"),  # two stages
        weight_layout=Layout.HOPPER_FRAGMENT,
    )
    shown = str(explain_problem(problem)).splitlines()
    assert shown[1] == "  formats: fp8_tokenxmxfp4"
    assert shown[3] == "  config:  routing_block_m=8"
    for line, stage, k_splits in ((shown[4], "gate_up", 1), (shown[5], "down", 2)):
        assert line == (
            f"    {stage}: kernel=decode block_m=8 num_stages=5 consumers=2 blocks_per_tile=1 "
            f"k_splits={k_splits} hi_lo=False bfloat16_rows=False float16_rows=False"
        )
