"""Activations and their names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import mxpert
from mxpert.core.activations import (
    ACTIVATIONS,
    NAMED_ACTIVATIONS,
    Activation,
    ActivationLike,
    activation_from,
    kernel_parameters,
    parse_activation,
)
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.training import MXMoE
from mxpert.training.activation import gated_activation

MEANING = {
    "silu": mxpert.SiLU(),
    "swiglu": mxpert.SwiGLU(1.702, 7.0),
    "swigluoai": mxpert.SwiGLU(1.702, 7.0),
    "clamped_silu": mxpert.ClampedSiLU(10.0),
    "situ_v2": mxpert.SiTUv2(4.0, 25.0),
    "gelu": mxpert.GELU("none"),
    "gelu_tanh": mxpert.GELU("tanh"),
    "gelu_pytorch_tanh": mxpert.GELU("tanh"),
    "relu2": mxpert.ReLU2(),
}


def test_names_mean_what_the_documentation_says() -> None:
    assert NAMED_ACTIVATIONS == MEANING
    assert set(ACTIVATIONS) <= set(MEANING)
    (names,) = (get_args(each) for each in get_args(ActivationLike) if get_args(each))
    assert set(names) == set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_a_name_is_its_object(name: Any) -> None:
    activation = MEANING[name]
    layer = random_moe_problem(MoEShape(64, 32, 4, 2, activation), 5)
    assert parse_activation(name, "op") == parse_activation(activation, "op") == activation
    routed = layer.x, layer.weights, layer.topk_weights, layer.topk_ids
    y = [mxpert.fused_moe(*routed, activation=each) for each in (name, activation)]
    assert torch.equal(*y)
    problems = [
        mxpert.explain(mxpert.fused_moe, *routed, activation=each).problem
        for each in (name, activation)
    ]
    assert problems[0] == problems[1]
    plan = mxpert.make_routing_plan(*routed[2:], num_experts=4, routing_block_m=16)
    h = [
        mxpert.moe_gate_up(layer.x, layer.weights, plan, activation=each)
        for each in (name, activation)
    ]
    assert torch.equal(*[mxpert.moe_down(each, layer.weights, plan) for each in h])
    router = torch.ones(4, 64)
    assert mxpert.MoE(layer.weights, router, top_k=2, activation=name).experts.activation == (
        activation
    )
    if activation.is_gated:
        assert MXMoE(64, 32, 4, 2, activation=name).activation == activation


@pytest.mark.parametrize("activation", [*MEANING.values(), mxpert.SwiGLU(1.3, None, 0.25)], ids=str)
def test_schemas_and_kernels_get_what_an_activation_is(activation: Activation) -> None:
    assert activation_from(activation.name, list(activation.parameters)) == activation
    third = 0.25 if activation == mxpert.SwiGLU(1.3, None, 0.25) else None
    assert kernel_parameters(activation)["p2"] == third


def test_no_limit_is_an_infinite_limit() -> None:
    assert mxpert.SwiGLU(limit=None) == mxpert.SwiGLU(limit=math.inf)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: mxpert.GELU("erf"), ValueError, "GELU: approximate — need 'none' or 'tanh'"),
        (lambda: mxpert.GELU(None), TypeError, "GELU: approximate — need 'none' or 'tanh'"),
        (lambda: mxpert.SwiGLU(beta=math.inf), ValueError, "SwiGLU: beta — need"),
        (lambda: mxpert.SwiGLU(beta=None), TypeError, "SwiGLU: beta — need a number"),
        (lambda: MXMoE(64, 32, 4, 2, activation="relu2"), mxpert.UnsupportedError, "got ReLU2"),
        (
            lambda: gated_activation(torch.ones(2, 64), mxpert.ReLU2()),
            mxpert.UnsupportedError,
            "need one that joins gate and up, got ReLU2",
        ),
    ],
)
def test_others_are_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()
