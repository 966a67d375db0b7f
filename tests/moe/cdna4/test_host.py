"""Layers with more activations than offsets of buffers reach, computed in parts of the tokens."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import Combine, UnsupportedError
from mxpert.moe.cdna4 import config, host
from mxpert.moe.inputs import FusedMoEInputs
from mxpert.testing.gfx950 import emulate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from support.poison import nan_filled_scratch

SHAPE = MoEShape(hidden_size=160, intermediate_size=96, num_experts=3, top_k=2)
TOKENS = 20
MOST_BYTES = 8 * 160 * 4
"""Limit of these tests: seven tokens, so that twenty are three parts, the last one smaller."""


def layer(inputs: MoEInputs, **options: object) -> tuple[torch.Tensor, int]:
    """The layer's output on gfx950 code, and how often stage 2 was launched."""
    weights = inputs.weights.prepare(device="cpu", layout="cdna4_fragment")
    given = {"activation": inputs.activation, "activation_format": "mxfp8"} | options
    with emulate() as emulation, nan_filled_scratch(), mxpert.override(backend="cdna4"):
        x = given.pop("x", inputs.x)
        y = mxpert.fused_moe(x, weights, inputs.topk_weights, inputs.topk_ids, **given)
    plans = sum(n.launches for name, n in emulation.kernels.items() if "decode" in name)
    return y, plans // 2


CASES = {
    "reduce": {},
    "atomic": {"combine": Combine.ATOMIC},
    "float32": {"out_dtype": torch.float32},
    "local tokens": {"num_local_tokens": torch.tensor([9], dtype=torch.int32)},
    "no local tokens": {"num_local_tokens": torch.tensor([0], dtype=torch.int32)},
    "other experts": {"expert_map": torch.tensor([1, -1, 0, 2], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = exact_moe_problem(SHAPE, TOKENS), dict(CASES[name])
    expected, once = layer(inputs, **options)
    monkeypatch.setattr(config, "_MOST_BYTES", MOST_BYTES)
    found, often = layer(inputs, **options)
    assert (once, often) == (1, 3)
    assert_exact(found, expected, name)


def test_parts_of_quantised_tokens_write_the_given_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = exact_moe_problem(SHAPE, TOKENS)
    x, out = mxpert.quantize(inputs.x, "mxfp8"), torch.full_like(inputs.x, torch.nan)
    expected, _ = layer(inputs, x=x)
    monkeypatch.setattr(config, "_MOST_BYTES", MOST_BYTES)
    found, often = layer(inputs, x=x, out=out)
    assert (found.data_ptr(), often) == (out.data_ptr(), 3)
    assert_exact(out, expected, "out")


def test_parts_share_one_choice_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits become ids before the tokens are split."""
    inputs = exact_moe_problem(SHAPE, TOKENS)
    weights = inputs.weights.prepare(device="cpu", layout="cdna4_fragment")
    logits = torch.randn(TOKENS, SHAPE.num_experts, generator=torch.Generator().manual_seed(0))
    options = {"activation": inputs.activation, "activation_format": "mxfp8"}
    monkeypatch.setattr(config, "_MOST_BYTES", MOST_BYTES)
    with emulate() as emulation, nan_filled_scratch(), mxpert.override(backend="cdna4"):
        y = mxpert.fused_moe_from_logits(inputs.x, weights, logits, SHAPE.top_k, **options)
        launches = {name: each.launches for name, each in emulation.kernels.items()}
        with mxpert.override(backend="triton"):
            topk = mxpert.route_topk(logits, SHAPE.top_k)
        expected = mxpert.fused_moe(inputs.x, weights, *topk, **options)
    (choices,) = (count for name, count in launches.items() if "route_topk" in name)
    assert choices == 1
    assert_exact(y, expected, "y")


def test_tokens_of_other_ranks_are_not_split() -> None:
    """Their sort waits for all of them."""
    inputs = exact_moe_problem(SHAPE, TOKENS)
    given = FusedMoEInputs(
        inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids, arrivals=torch.zeros(1)
    )
    with pytest.raises(UnsupportedError, match=r"expert_parallel — .*; lower max_tokens"):
        host._part_of(given, slice(0, 7), inputs.x[:7])
