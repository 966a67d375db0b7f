"""A rank that holds a part of the experts takes the configs of the rows that these will get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.core import tables
from mxpert.core.backend import BACKENDS
from mxpert.core.describe import describe
from mxpert.core.problem import (
    ACTIVATION_FORMATS,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    SiLU,
    Target,
)
from mxpert.formats.tensor import Layout
from mxpert.testing.gfx950 import MI355X
from mxpert.testing.problems import MoEShape, random_moe_problem

H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
CASES = [
    pytest.param("hopper", H200, Layout.ROW_MAJOR, id="hopper"),
    pytest.param("triton", H200, Layout.ROW_MAJOR, id="triton"),
    pytest.param("cdna4", MI355X, Layout.CDNA4_FRAGMENT, id="cdna4"),
]
TOKENS = (1, 3, 16, 32, 100, 128, 512, 1000, 4096, 20000)


def config_of(backend: str, problem: MoEProblem) -> MoEConfig:
    found: MoEConfig = BACKENDS[backend].load(problem.op).heuristic(problem)
    return found


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
@pytest.mark.parametrize("backend, target, layout", CASES)
def test_the_row_blocks_are_those_of_the_whole_layer(
    backend: str, target: Target, layout: Layout, a_format: str
) -> None:
    """DeepSeek-V3 over eight ranks: 32 of 256 experts, and one of a token's eight."""
    options = MoEOptions(SiLU(), a_format)
    sizes = 256, 7168, 2048
    for num_tokens in TOKENS:
        whole = MoEProblem(Op.FUSED_MOE, target, num_tokens, 8, *sizes, options, layout)
        part = replace(whole, num_experts=32, local_top_k=1.0)
        assert part.rows_per_expert == whole.rows_per_expert
        configs = config_of(backend, part), config_of(backend, whole)
        assert configs[0].routing_block_m == configs[1].routing_block_m
        blocks = [(each.gate_up.block_m, each.down.block_m) for each in configs]
        assert blocks[0] == blocks[1]


@pytest.mark.parametrize("backend, target, layout", CASES)
def test_a_part_takes_fewer_rows_than_if_all_ids_were_local(
    backend: str, target: Target, layout: Layout
) -> None:
    """512 tokens: 16 rows an expert, where 128 would come if all ids named the 32 experts."""
    options = MoEOptions(SiLU(), "mxfp8")
    all_local = MoEProblem(Op.FUSED_MOE, target, 512, 8, 32, 7168, 2048, options, layout)
    part = replace(all_local, local_top_k=1.0)
    assert config_of(backend, part).gate_up.block_m < config_of(backend, all_local).gate_up.block_m


def test_expectations_of_few_tokens() -> None:
    options = MoEOptions(SiLU())
    layer = MoEProblem(Op.FUSED_MOE, H200, 1, 4, 64, 2880, 2880, options, Layout.ROW_MAJOR)
    assert (layer.routed_rows, layer.hit_experts, layer.rows_per_expert) == (4, 4, 1)
    half = replace(layer, local_top_k=2.0)
    assert (half.routed_rows, half.hit_experts, half.rows_per_expert) == (2, 2, 1)
    few = replace(layer, local_top_k=0.5)
    assert (few.routed_rows, few.hit_experts, few.rows_per_expert) == (0.5, 1, 0.5)
    none = replace(layer, num_tokens=0)
    assert (none.routed_rows, none.hit_experts, none.rows_per_expert) == (0, 1, 0)


def test_an_expert_map_says_how_many_ids_are_local() -> None:
    inputs = random_moe_problem(MoEShape(64, 64, 4, 2), 5)
    arguments = inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids

    def local_top_k(num_global: int | None) -> float | None:
        expert_map = None
        if num_global is not None:
            expert_map = torch.full((num_global,), -1, dtype=torch.int32)
            expert_map[: min(4, num_global)] = torch.arange(min(4, num_global), dtype=torch.int32)
        options = dict(activation=SiLU(), expert_map=expert_map)
        problem = describe(mxpert.fused_moe, *arguments, **options)
        assert isinstance(problem, MoEProblem)
        return problem.local_top_k

    assert [local_top_k(n) for n in (None, 2, 4, 8, 12)] == [None, None, None, 1.0, 2 / 3]


def test_tables_answer_for_the_rows_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for 32 experts whose ids are all local serves a rank that gets as many rows."""
    options = MoEOptions(SiLU(), "mxfp8")
    problem = MoEProblem(Op.FUSED_MOE, H200, 64, 8, 32, 7168, 2048, options, Layout.ROW_MAJOR)

    class Row:
        num_tokens = 64

    found = {tables.problem_key(problem, "hopper"): [Row]}
    monkeypatch.setattr(tables, "_rows_by_shape", lambda _: (found, {}))
    part = replace(problem, num_tokens=512, local_top_k=1.0)
    assert tables.tuned_row(problem, "hopper") is tables.tuned_row(part, "hopper") is Row
    assert tables.tuned_row(replace(part, num_tokens=64), "hopper") is None
