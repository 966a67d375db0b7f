"""An experts module that several layers share is converted once and stays shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mxpert
from mxpert.integrations.models.convert import mx_experts, restore
from mxpert.integrations.models.experts import find_experts
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe
from support.mixtral import tiny_mixtral

IDS = torch.arange(12)[None]


def shared(layers: int = 3) -> Any:
    """Layers 0 and 2 share one experts module."""
    torch.manual_seed(0)
    model = tiny_mixtral(num_hidden_layers=layers).eval()
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    return model


def apart(model: Any) -> Any:
    """The same model with a copy in each layer."""
    model = copy.deepcopy(model)
    model.model.layers[2].mlp.experts = copy.deepcopy(model.model.layers[0].mlp.experts)
    return model


def test_it_is_found_once_with_all_its_places() -> None:
    found = find_experts(shared(), "test")
    assert [(entry.name, len(entry.places)) for entry in found] == [
        ("model.layers.0.mlp.experts", 2),
        ("model.layers.1.mlp.experts", 1),
    ]


def test_two_names_in_one_parent_are_two_places() -> None:
    model = shared()
    mlp = model.model.layers[1].mlp
    mlp.same_experts = mlp.experts
    mxpert.convert(model, progress=False)
    assert mlp.same_experts is mlp.experts


def test_the_converted_model_computes_what_separate_copies_compute() -> None:
    model = shared()
    expected = mxpert.convert(apart(model), progress=False)
    mxpert.convert(model, progress=False)
    layers = model.model.layers
    assert layers[0].mlp.experts is layers[2].mlp.experts
    assert len(mx_experts(model)) == 2
    assert_exact(model(IDS).logits, expected(IDS).logits, "logits")
    assert model.state_dict().keys() == expected.state_dict().keys()
    restore(model)
    assert layers[0].mlp.experts is layers[2].mlp.experts
    assert_exact(model(IDS).logits, restore(expected)(IDS).logits, "logits")


def test_training_adds_up_the_gradients_of_both_places() -> None:
    model = mxpert.convert(shared(), recipe=MXFP8Recipe())
    layers = model.model.layers
    assert layers[0].mlp.experts is layers[2].mlp.experts
    expected = mxpert.convert(apart(shared()), recipe=MXFP8Recipe())
    for each in (model, expected):
        each(IDS, labels=IDS).loss.backward()
    separate = [expected.model.layers[i].mlp.experts.down_proj.grad for i in (0, 2)]
    torch.testing.assert_close(layers[0].mlp.experts.down_proj.grad, separate[0] + separate[1])
    mxpert.convert(model, progress=False)
    assert layers[0].mlp.experts is layers[2].mlp.experts


def test_a_refused_conversion_changes_nothing() -> None:
    model = shared()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = float("inf")
    before = model.state_dict()
    with pytest.raises(ValueError, match="need finite weights"):
        mxpert.convert(model, progress=False)
    after = model.state_dict()
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in before.items())
