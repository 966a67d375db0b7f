"""`mxpert.MoE(…, keep_fp8=True)`: who gets an FP8 copy, who keeps one, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert import MoEWeights, modules
from mxpert.distributed import ExpertParallel
from mxpert.formats.tensor import Layout
from mxpert.moe.local_weights import take_experts
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.devices import prepared_for

WEIGHTS = random_moe_problem(MoEShape(96, 160, 4, 2), 4).weights
ROUTER = torch.randn(4, 96)
COPY = Layout.HOPPER_FRAGMENT_FP8


def layer(weights: MoEWeights = WEIGHTS, **options: Any) -> mxpert.MoE:
    return mxpert.MoE(weights, ROUTER, **{"top_k": 2, "activation_format": "a8w4", **options})


def test_the_option_makes_a_copy() -> None:
    with prepared_for("sm_90"):
        wanted = WEIGHTS.prepare(device="cpu", keep_fp8=True)
        found = layer(keep_fp8=True).experts.weights
        assert layer().experts.weights.layout is Layout.HOPPER_FRAGMENT
    assert found.layout is COPY
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(found, name).fp8_codes, getattr(wanted, name).fp8_codes)


def test_weights_with_a_copy_need_no_option() -> None:
    with prepared_for("sm_90"):
        weights = WEIGHTS.prepare(device="cpu", keep_fp8=True)
        for options in ({}, {"keep_fp8": True}):
            assert layer(weights, **options).experts.weights is weights


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_rank_has_the_copy_of_its_experts(is_prepared: bool) -> None:
    """Taken out of all experts of the layer, which are given with the option or with a copy."""
    ranks = ExpertParallel(num_experts=4, top_k=2, hidden_size=96, max_tokens=8)

    def local_weights(op: str, ranks: ExpertParallel, weights: MoEWeights) -> MoEWeights:
        return take_experts(weights.unprepare(), ranks.local_experts)  # as one of several does

    with prepared_for("sm_90"), mock.patch.object(modules, "local_weights", local_weights):
        weights = WEIGHTS.prepare(device="cpu", keep_fp8=True) if is_prepared else WEIGHTS
        moe = layer(weights, expert_parallel=ranks, keep_fp8=not is_prepared)
    assert moe.experts.weights.layout is COPY
    assert moe.experts.weights is not weights


def wide(weights: MoEWeights) -> MoEWeights:
    """Weights of which a block does not fold."""
    scale = weights.down_proj.scale.clone()
    scale[1, 0, 0] += 30
    return replace(weights, down_proj=replace(weights.down_proj, scale=scale))


REFUSED = r"^prepare: keep_fp8 — need weights and a device with such a layout, got ROW_MAJOR on "


@pytest.mark.parametrize(
    "arch, change, got",
    [
        ("sm_90", wide, "sm_90; 1 blocks do not fold; prepare without it$"),
        ("sm_100", replace, "sm_100; 0 blocks do not fold; prepare without it$"),
    ],
)
def test_weights_and_devices_without_a_copy_are_refused(arch: str, change: Any, got: str) -> None:
    weights = change(WEIGHTS)
    with prepared_for(arch):
        for given in (weights, weights.prepare(device="cpu")):
            with pytest.raises(ValueError, match=REFUSED + got):
                layer(given, keep_fp8=True)


def test_prepared_weights_without_a_copy_are_refused() -> None:
    with prepared_for("sm_90"):
        weights = WEIGHTS.prepare(device="cpu")
        with pytest.raises(ValueError, match=r"^prepare: weights.layout — .*; call unprepare"):
            layer(weights, keep_fp8=True)


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^MoE: keep_fp8 — need activations in 8 or .* got 'bf16"):
        layer(activation_format="a16w4", keep_fp8=True)
    with pytest.raises(TypeError, match=r"^MoE: keep_fp8 — need a bool, got 1"):
        layer(keep_fp8=1)
