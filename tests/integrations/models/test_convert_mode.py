"""train → `eval()` → `convert` gives experts in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxpert
from mxpert.integrations.models.convert import restore
from mxpert.training import MXFP8Recipe
from support.mixtral import tiny_mixtral

IDS = torch.arange(12)[None]


def trained() -> Any:
    model = tiny_mixtral()
    model = mxpert.convert(model.train(), recipe=MXFP8Recipe())
    model(IDS, labels=IDS).loss.backward()
    return model


@pytest.mark.parametrize("back", ["convert", "restore", "recipe"])
@pytest.mark.parametrize("training", [False, True])
def test_the_experts_keep_the_models_mode(back: str, training: bool) -> None:
    model = trained().train(training)
    match back:
        case "convert":
            mxpert.convert(model, progress=False)
        case "restore":
            restore(model)
        case _:
            mxpert.convert(model, recipe=MXFP8Recipe.hybrid())
    assert {module.training for module in model.modules()} == {training}


def test_forward_runs_where_a_gradient_could_be_asked_for() -> None:
    model = mxpert.convert(trained().eval(), progress=False)
    assert torch.is_grad_enabled()
    assert model(IDS, labels=IDS).loss.isfinite()
