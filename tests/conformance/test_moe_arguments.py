"""fused_moe of the Triton kernels in the interpreter: a given output, a router's own dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import Combine
from mxpert.configs import GemmConfig, MoEConfig
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from support.poison import nan_filled_scratch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

SHAPE = MoEShape(hidden_size=160, intermediate_size=96, num_experts=3, top_k=2)
TILES = {
    "whole": MoEConfig(16, GemmConfig(16, 64, 128), GemmConfig(16, 128, 128)),
    "split-k": MoEConfig(
        32, GemmConfig(32, 128, 64, split_k=2), GemmConfig(32, 256, 64, split_k=2)
    ),
}


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    with nan_filled_scratch():
        yield


def run(inputs: MoEInputs, config: MoEConfig, **options: Any) -> torch.Tensor:
    with mxpert.override(backend="triton", config=config):
        return mxpert.fused_moe(
            inputs.x,
            inputs.weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            **options,
        )


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
def test_out_gets_the_same_bits(combine: Combine, out_dtype: torch.dtype, tiles: str) -> None:
    """Sums are exact, so that ATOMIC has one result too."""
    inputs, config = exact_moe_problem(SHAPE, 33), TILES[tiles]
    options = {"combine": combine, "out_dtype": out_dtype}
    want = run(inputs, config, **options)
    out = torch.empty_like(want)
    assert run(inputs, config, out=out, **options) is out
    assert_exact(out, want, "out", ignore_zero_sign=True)
    if out_dtype is torch.bfloat16:  # x is read before the first row is written
        x = inputs.x.clone()
        run(replace(inputs, x=x), config, out=x, **options)
        assert_exact(x, want, "x as out", ignore_zero_sign=True)


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_map", [False, True], ids=["all-experts", "expert-map"])
def test_the_routers_dtypes_change_no_bit(has_map: bool, weights_dtype: torch.dtype) -> None:
    inputs = exact_moe_problem(SHAPE, 33)
    narrow = inputs.topk_weights.to(weights_dtype)
    assert torch.equal(narrow.float(), inputs.topk_weights)  # powers of two
    ids = inputs.topk_ids.clone()
    ids[0, 0], ids[1] = -1, SHAPE.num_experts
    options: dict[str, Any] = {}
    if has_map:
        options["expert_map"] = torch.tensor([2, -1, 0], dtype=torch.int32)
    want = run(replace(inputs, topk_ids=ids), TILES["whole"], **options)
    routed = replace(inputs, topk_weights=narrow, topk_ids=ids.long())
    assert_exact(run(routed, TILES["whole"], **options), want, "int64 ids")
