"""SiTUv2's results do not depend on the tile or on split-K."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert.core.problem import SiTUv2
from mxpert.testing.numerics import assert_exact
from support.exact import exact_moe_problem
from support.layers import plan_of, take
from tests.moe.hopper.problems import CASES, FLOAT64, prepared, tiles_of

SMALL = 2.0**-18
"""With gates of 2^-11 and ups of 2^-18, ``2 sigmoid(2 x) - 1`` loses bits that bfloat16 has."""
NUM_TOKENS, UNIT = 333, 128


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
def test_tiles_and_splits_agree(a_format: str, device: torch.device) -> None:
    """Sums are exact in any order, so only the activation can differ."""
    inputs = exact_moe_problem(CASES["situ"][0], NUM_TOKENS, device=device)
    x, weights, options = inputs.x * SMALL, inputs.weights, dict(activation=SiTUv2())
    plan = plan_of(inputs, UNIT)
    places = plan.slot_rows.flatten().long()
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = mxpert.moe_gate_up(x, weights, plan, **options)[places].double()
    assert expected.count_nonzero() > expected.numel() // 4
    if a_format == "mxfp8":
        x = mxpert.quantize(x, "mxfp8")
    packed, first = prepared(weights), None
    for name, config in tiles_of(a_format).items():
        if UNIT % config.routing_block_m:
            continue
        with mxpert.override(backend="hopper", config=config):
            h = mxpert.moe_gate_up(x, packed, plan, activation_format=a_format, **options)
        rows = take(h, places)
        first = rows if first is None else first
        assert_exact(rows, first, name)
    if isinstance(first, torch.Tensor):  # both were rounded to bfloat16 once
        assert ((first.double() - expected).abs() <= 2.0**-7 * expected.abs()).all()
