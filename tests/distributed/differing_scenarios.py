"""Ranks that do not make the same call: an error on every rank that names the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from mxpert import ScaleRule
from mxpert.distributed import ExpertParallel
from mxpert.training import MXFP8Recipe, MXMoE
from tests.distributed.ranked_layer import (
    SHAPE,
    TRANSPORTS,
    make,
    part_of,
    run,
    tokens,
    whole_layer,
)

Step = Callable[[ExpertParallel], object]


def _layer(activation_format: str, **options: object) -> Step:
    def call(ep: ExpertParallel) -> object:
        weights = part_of(whole_layer(), ep)
        options_of = dict(activation_format=activation_format) | options
        return run(ep, weights, tokens(2), **options_of)

    return call


def _dispatch(rule: ScaleRule = ScaleRule.RCEIL) -> Step:
    def call(ep: ExpertParallel) -> object:
        given = tokens(2)
        return ep.dispatch(given.x, given.weights, given.ids, scale_rule=rule)

    return call


def _fewer(step: Step) -> Step:
    return lambda ep: step(ep.with_max_tokens(2))


def _train(ep: ExpertParallel) -> object:
    recipe = MXFP8Recipe()
    layer = MXMoE(
        SHAPE.hidden_size,
        SHAPE.intermediate_size,
        SHAPE.num_experts,
        SHAPE.top_k,
        recipe=recipe,
        expert_parallel=ep,
    )
    return layer(torch.randn(2, SHAPE.hidden_size))


PAIRS: list[tuple[Step, Step, str]] = [
    (_layer("bf16"), _fewer(_layer("bf16")), r"max_tokens \d+ on rank 0.*, 2 on rank 1"),
    (_layer("bf16"), _layer("mxfp8"), "activation_format bf16 on rank 0.*, mxfp8 on rank 1"),
    (
        _layer("bf16", apply_router_weight_on_input=True),
        _layer("bf16"),
        "apply_router_weight_on_input True on rank 0.*, False on rank 1",
    ),
    (_layer("bf16"), _dispatch(), "the call fused_moe on rank 0.*, dispatch on rank 1"),
    (_dispatch(), _train, "the call dispatch on rank 0.*, MXMoE on rank 1"),
    (_dispatch(ScaleRule.FLOOR), _dispatch(), "scale_rule FLOOR on rank 0.*, RCEIL on rank 1"),
]
"""What ranks 0, 2 … call, what ranks 1, 3 … call, and what all of them hear."""


def calls_that_differ_are_named() -> None:
    """Also in the other order; then all ranks go on with the same object."""
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        for even, odd, said in PAIRS:
            with pytest.raises(ValueError, match=f"calls — need the same call .*{said}") as error:
                (odd if dist.get_rank() % 2 else even)(ep)
            assert "\n" not in str(error.value)
            _layer("bf16")(ep)
        dist.barrier()
        ep.close()
