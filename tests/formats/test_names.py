"""One list of activation formats: every way into the library takes every name."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import mxpert
from mxpert.cli.options import parse_formats
from mxpert.distributed import ExpertParallel
from mxpert.distributed.planner import LINKS, ExpertLayer, plan_layer
from mxpert.formats.names import (
    ACTIVATION_FORMATS,
    FORMAT_OF,
    SHORT_NAMES,
    ActivationFormat,
    OwnFormat,
    parse_activation_format,
)
from mxpert.integrations import sglang
from mxpert.integrations.models import evaluation
from mxpert.integrations.models.implementations import IMPLEMENTATIONS
from mxpert.integrations.vllm.options import requested_options
from mxpert.modules import PreparedExperts
from mxpert.testing.problems import MoEShape, random_moe_problem

LAYER = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
ROUTED = (LAYER.topk_weights, LAYER.topk_ids)


def test_the_types_hold_the_list() -> None:
    assert set(get_args(ActivationFormat)) == set(FORMAT_OF)
    assert get_args(OwnFormat) == ACTIVATION_FORMATS
    assert set(SHORT_NAMES) == set(ACTIVATION_FORMATS) == set(FORMAT_OF.values())
    assert {"fp8_token", "a8w4-token", "a8w4_token"} < set(FORMAT_OF)


@pytest.mark.parametrize("name", FORMAT_OF)
def test_every_way_in_takes_every_name(name: Any) -> None:
    own = FORMAT_OF[name]
    assert parse_activation_format(name, "op") == own
    assert parse_formats(name, "bench", "--format") == [own]
    assert evaluation.parse_formats([name], "evaluate") == [SHORT_NAMES[own]]
    assert IMPLEMENTATIONS[f"mxpert_{name}"] == own
    assert sglang.BACKENDS[f"mxpert_{name}"] == own
    options = requested_options({"mxpert": name})
    assert options is not None
    assert options.activation_format == own
    assert PreparedExperts(LAYER.weights, "silu", activation_format=name).activation_format == own
    module = mxpert.MoE(LAYER.weights, torch.ones(4, 64), top_k=2, activation_format=name)
    assert module.experts.activation_format == own
    warm = dict(top_k=2, activation="silu", activation_format=name)
    assert mxpert.warm_up(LAYER.weights, 2, **warm) == ()
    plan = plan_layer(
        ExpertLayer("gpt-oss-120b", 128, 4, 2880, 2880),
        num_ranks=2,
        num_tokens=16,
        link=LINKS["nvlink4"],
        activation_format=name,
    )
    assert plan.us > 0


@pytest.mark.parametrize("name", [name for name in FORMAT_OF if name not in ACTIVATION_FORMATS])
def test_a_layer_over_ranks_takes_it(name: Any) -> None:
    ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=64, max_tokens=8, transport="gather")
    y = [
        mxpert.fused_moe(
            LAYER.x,
            LAYER.weights,
            *ROUTED,
            activation="silu",
            activation_format=spelled,
            expert_parallel=ep,
        )
        for spelled in (name, FORMAT_OF[name])
    ]
    assert torch.equal(*y)


@pytest.mark.parametrize("name", ["a8w4-Token", "mxfp9", "", None, 8, ["bf16"]])
def test_a_wrong_name_lists_the_right_ones(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^fused_moe: activation_format — need one of") as error:
        parse_activation_format(name, "fused_moe")
    assert all(repr(each) in str(error.value) for each in (*SHORT_NAMES, *SHORT_NAMES.values()))
