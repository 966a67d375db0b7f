"""Gemma 4 (GELU, tanh) and Nemotron-H (relu², no gate): a converted layer has the eager numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import GELU, GateUpOrder, ReLU2
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.moe import reference
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    rounding_rms,
    sampling_margin,
)
from tests.integrations.supported import HIDDEN, IDS, INTERMEDIATE, build

MODELS = {"gemma4_text": GELU("tanh"), "nemotron_h": ReLU2()}
LEAST_VALUES = 64
"""Values that carry the energy of a layer's result, at the least: relu² has few large ones."""
TOLERANCE = math.hypot(
    end_to_end_tolerance("bf16", torch.float32, HIDDEN, INTERMEDIATE, top_k=2, numel=LEAST_VALUES),
    sampling_margin(LEAST_VALUES) * rounding_rms(8),
)
"""The float32 sums, and the rounding of the intermediate to bfloat16, which eager experts lack. The
down projection keeps the relative size of both."""

families = pytest.mark.parametrize("family", MODELS)


class Pair:
    """A converted model, and by layer the arguments and float64 results of the eager experts."""

    def __init__(self, family: str) -> None:
        self.model = convert(build(family), progress=False)
        oracle = restore(copy.deepcopy(self.model))
        oracle.set_experts_implementation("eager")
        self.calls: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        for name, module in list(oracle.named_modules()):
            if name.endswith(".experts"):
                module.register_forward_hook(self._keep)
        with torch.no_grad():
            oracle(IDS, use_cache=False)

    def _keep(self, module: torch.nn.Module, given: tuple[Any, ...], result: torch.Tensor) -> None:
        hidden, topk_ids, topk_weights = given
        if hidden.dtype == torch.float64:
            return
        rounded = hidden.bfloat16()
        precise = copy.deepcopy(module).double()
        wanted = precise(rounded.double(), topk_ids, topk_weights.double())
        self.calls.append(((rounded.float(), topk_ids, topk_weights), wanted))

    def compare(self) -> None:
        experts = mx_experts(self.model)
        assert len(experts) == len(self.calls) > 0
        for each, (arguments, wanted) in zip(experts, self.calls, strict=True):
            with torch.no_grad():
                assert_close_relative(each(*arguments), wanted, TOLERANCE, "experts")


@families
def test_layers_have_the_numbers_of_eager_experts(family: str) -> None:
    pair = Pair(family)
    assert {each.activation for each in mx_experts(pair.model)} == {MODELS[family]}
    pair.compare()


def exchange(pair: Pair) -> None:
    """Gate for up."""
    for each in mx_experts(pair.model):
        each.weights = replace(each.weights, gate_up_order=GateUpOrder.INTERLEAVED)


def silu(pair: Pair) -> None:
    """The activation that most families have."""
    for each in mx_experts(pair.model):
        each.activation = mxpert.SiLU()


@pytest.mark.parametrize("fault", [exchange, silu], ids=lambda fault: fault.__name__)
def test_a_fault_in_gemma_is_seen(fault: Callable[[Pair], None]) -> None:
    pair = Pair("gemma4_text")
    fault(pair)
    with pytest.raises(AssertionError, match="relative L2"):
        pair.compare()


def test_relu_that_is_not_squared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("nemotron_h")
    monkeypatch.setattr(reference, "activate", lambda activation, gate, up: up.clamp(min=0))
    with pytest.raises(AssertionError, match="relative L2"):
        pair.compare()


def test_experts_without_a_gate_keep_their_names(tmp_path: Path) -> None:
    """State dict, saved checkpoint and restored module say up_proj; the codes are the same."""
    model = convert(build("nemotron_h"), progress=False)
    experts = mx_experts(model)[0]
    assert sorted(experts.state_dict()) == [
        "down_proj_blocks",
        "down_proj_scales",
        "up_proj_blocks",
        "up_proj_scales",
    ]
    experts.load_state_dict(experts.state_dict())
    model.save_pretrained(tmp_path)
    (_, stored), *_ = load_expert_weights(tmp_path)
    assert not stored.has_gate
    assert_exact(stored.gate_up_proj, experts.weights.gate_up_proj, "up_proj")
    assert_exact(stored.down_proj, experts.weights.down_proj, "down_proj")
    shapes = {name: tuple(each.shape) for name, each in experts.restored().items()}
    assert shapes == {"up_proj": (4, INTERMEDIATE, HIDDEN), "down_proj": (4, HIDDEN, INTERMEDIATE)}
