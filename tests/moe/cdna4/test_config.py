"""Choice of the cdna4 backend's configs: rules of the heuristic, and what the tuner tries."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from mxpert.configs import WeightCache
from mxpert.core.problem import MoEOptions, MoEProblem, Op, SiLU
from mxpert.core.registry import explain_problem
from mxpert.core.stage_configs import other_weight_caches
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4.config import require_valid
from mxpert.testing.gfx950 import MI355X
from support.kernels import kernels_of

KERNELS = kernels_of("cdna4")
LAYER = KERNELS[Op.FUSED_MOE]
STAGES = (Op.MOE_GATE_UP, Op.MOE_DOWN)


def layer(tokens: int, a_format: str = "mxfp8", **sizes: int) -> MoEProblem:
    """gpt-oss-120b, unless sizes say otherwise."""
    shape = {"top_k": 4, "num_experts": 128, "hidden_size": 2880, "intermediate_size": 2880} | sizes
    options, layout = MoEOptions(SiLU(), a_format), Layout.CDNA4_FRAGMENT
    return MoEProblem(Op.FUSED_MOE, MI355X, tokens, options=options, weight_layout=layout, **shape)


# --- streamed or cached weights ---------------------------------------------------------------


@pytest.mark.parametrize("a_format", ["mxfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "cache"),
    [
        pytest.param(1, "stream", id="1 row"),
        pytest.param(512, "stream", id="16 rows"),
        pytest.param(1024, "stream", id="32 rows: the last of the reference that streams"),
        pytest.param(65536, "keep", id="2048 rows"),
    ],
)
def test_weights_stream_up_to_one_row_block_an_expert(
    a_format: str, tokens: int, cache: str
) -> None:
    """In both stages, for the layer and for a stage on its own."""
    chosen = LAYER.heuristic(layer(tokens, a_format))
    for op, config in zip(STAGES, (chosen.gate_up, chosen.down), strict=True):
        assert config.weight_cache.value == cache
        alone = replace(layer(tokens, a_format), op=op, routing_block_m=chosen.routing_block_m)
        assert KERNELS[op].heuristic(alone) == config


@pytest.mark.parametrize("tokens", [2048, 2049, 8192, 8193])
def test_the_rule_goes_by_the_tile_that_is_chosen(tokens: int) -> None:
    """Prefill tiles of 64 to 256 rows: 64 rows an expert stream from one, 65 are kept in two."""
    problem = layer(tokens)
    stage = LAYER.heuristic(problem).gate_up
    fits = problem.rows_per_expert <= stage.block_m
    assert stage.kernel.value == "prefill"
    assert stage.weight_cache is (WeightCache.STREAM if fits else WeightCache.KEEP)


@pytest.mark.parametrize("tokens", [1, 512, 4096, 65536])
def test_the_other_policy_is_tried(tokens: int) -> None:
    problem = layer(tokens)
    first, *others = LAYER.configs(problem)
    assert set(other_weight_caches(first)) <= set(others)
    for each in others:
        for op, config in zip(STAGES, (each.gate_up, each.down), strict=True):
            require_valid(config, replace(problem, op=op))
    for op in STAGES:
        alone = replace(problem, op=op, routing_block_m=first.routing_block_m)
        stage, *rest = KERNELS[op].configs(alone)
        assert replace(stage, weight_cache=stage.weight_cache.other) in rest


def test_explain_names_the_policy() -> None:
    assert str(explain_problem(layer(1024))).count("weight_cache=stream") == 2
    assert str(explain_problem(layer(65536))).count("weight_cache=keep") == 2


# --- tiles of the two stages ------------------------------------------------------------------

TWENTY = {"num_experts": 32}
"""gpt-oss-20b."""


def test_stages_get_tiles_apart_where_the_last_round_is_half_empty() -> None:
    """Of 32 experts with 256 rows stage 2 has 384 tiles of 256, two rounds on 256 CUs, and 768 of
    128, three rounds of half the cycles."""
    problem = layer(2048, **TWENTY)
    chosen = LAYER.heuristic(problem)
    assert (chosen.gate_up.block_m, chosen.down.block_m, chosen.routing_block_m) == (256, 128, 256)
    assert [each.weight_cache.value for each in (chosen.gate_up, chosen.down)] == ["stream", "keep"]
    for op, config in zip(STAGES, (chosen.gate_up, chosen.down), strict=True):
        alone = replace(problem, op=op, routing_block_m=256)
        assert KERNELS[op].heuristic(alone) == config
    assert "down: kernel=prefill block_m=128" in str(explain_problem(problem))


@pytest.mark.parametrize("tokens", [512, 1024, 4096, 8192, 16384])
def test_stages_share_a_tile_within_the_residual_of_the_model(tokens: int) -> None:
    """At 1024 tokens other tiles would save 2.5 % of the modelled cycles."""
    chosen = LAYER.heuristic(layer(tokens, **TWENTY))
    assert chosen.gate_up.block_m == chosen.down.block_m == chosen.routing_block_m


def test_the_tuner_tries_every_pair_of_row_blocks() -> None:
    """And a plan of their least common multiple. bf16 activations have no tile of 64 rows."""
    for a_format, blocks in (("mxfp4", (16, 32, 64, 128, 256)), ("bf16", (16, 32, 128, 256))):
        found = {
            (each.gate_up.block_m, each.down.block_m): each.routing_block_m
            for each in LAYER.configs(layer(4096, a_format))
        }
        assert found == {pair: max(pair) for pair in itertools.product(blocks, repeat=2)}


# --- order of tiles and grid ------------------------------------------------------------------

DEEPSEEK = {"num_experts": 256, "top_k": 8, "hidden_size": 7168, "intermediate_size": 2048}


@pytest.mark.parametrize("a_format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize(
    ("tokens", "sizes", "wanted"),
    [
        pytest.param(4096, DEEPSEEK, True, id="deepseek-v3"),
        pytest.param(16384, DEEPSEEK | {"num_experts": 384}, True, id="kimi-k2"),
        pytest.param(4095, DEEPSEEK, False, id="fewer tokens"),
        pytest.param(4096, DEEPSEEK | {"num_experts": 32}, False, id="a rank of eight"),
        pytest.param(4096, DEEPSEEK | {"intermediate_size": 4096}, False, id="large experts"),
        pytest.param(16384, {}, False, id="gpt-oss"),
    ],
)
def test_stage_2_of_many_small_experts_is_persistent(
    a_format: str, tokens: int, sizes: dict[str, int], wanted: bool
) -> None:
    problem = layer(tokens, a_format, **sizes)
    chosen = LAYER.heuristic(problem)
    assert (chosen.gate_up.persistent, chosen.down.persistent) == (False, wanted)
    alone = replace(problem, op=Op.MOE_DOWN, routing_block_m=chosen.routing_block_m)
    assert KERNELS[Op.MOE_DOWN].heuristic(alone) == chosen.down
    said = f"down: kernel=prefill block_m={chosen.down.block_m} .* persistent={wanted}"
    assert re.search(said, str(explain_problem(problem)))


def test_orders_and_grids_are_tried_in_each_stage() -> None:
    problem = layer(16384)
    first, *others = LAYER.configs(problem)
    assert (first.gate_up.group_m, first.gate_up.num_runs) == (8, 8)
    for stage, other in (("gate_up", "down"), ("down", "gate_up")):
        fixed = [each for each in others if getattr(each, other) == getattr(first, other)]
        own, found = getattr(first, stage), {getattr(each, stage) for each in fixed}
        assert replace(own, persistent=True) in found
        assert replace(own, group_m=2, num_runs=4) in found  # of the reference's stage 2


@pytest.mark.parametrize("change", [{"group_m": 8}, {"num_runs": 1}, {"persistent": True}], ids=str)
def test_decode_has_one_order_and_one_grid(change: dict[str, int]) -> None:
    """And refuses what it would ignore."""
    problem = replace(layer(1), op=Op.MOE_DOWN)
    config = replace(LAYER.heuristic(layer(1)).down, **change)
    with pytest.raises(ValueError, match="group_m = 1, num_runs = 8, and not persistent"):
        require_valid(config, problem)


@pytest.mark.parametrize("group_m", [1, 3, 1000])
@pytest.mark.parametrize("num_runs", [1, 7, 8])
def test_any_order_is_valid(group_m: int, num_runs: int) -> None:
    config = LAYER.heuristic(layer(16384)).down
    config = replace(config, group_m=group_m, num_runs=num_runs, persistent=True)
    require_valid(config, replace(layer(16384), op=Op.MOE_DOWN))
