"""Ranks that do not make the same call: an error on every rank that names the difference."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import ScaleRule
from mxpert.distributed import ExpertParallel
from mxpert.training import MXMoE
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


def _numbered(number: int, step: Step) -> Step:
    return lambda ep: step(ep.with_layer(number))


def _train(ep: ExpertParallel) -> object:
    return _trained(ep)(torch.randn(2, SHAPE.hidden_size))


PAIRS: list[tuple[Step, Step, str]] = [
    (_layer("bf16"), _fewer(_layer("bf16")), r"max_tokens \d+ on rank 0.*, 2 on rank 1"),
    (_layer("bf16"), _layer("mxfp8"), "activation_format bf16 on rank 0.*, mxfp8 on rank 1"),
    (
        _layer("bf16", apply_router_weight_on_input=True),
        _layer("bf16"),
        "apply_router_weight_on_input True on rank 0.*, False on rank 1",
    ),
    (_layer("bf16"), _dispatch(), "the call fused_moe on rank 0.*, dispatch on rank 1"),
    (
        _dispatch(),
        _train,
        "the call dispatch on rank 0.*, MXMoE on rank 1.*; layer none on .*, 0 on",
    ),
    (
        _numbered(3, _layer("bf16")),
        _numbered(4, _layer("bf16")),
        "layer 3 on rank 0.*, 4 on rank 1",
    ),
    (_numbered(0, _dispatch()), _dispatch(), "layer 0 on rank 0.*, none on rank 1"),
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


def layers_in_another_order_are_named() -> None:
    """Odd ranks call the second of two like layers first; modules number themselves."""
    last = dist.get_rank() % 2
    for transport in TRANSPORTS:
        for make_one in (_module, _trained):
            ep = make(transport=transport)
            layers = [make_one(ep) for _ in range(2)]
            x = torch.randn(3, SHAPE.hidden_size)
            for layer in layers:  # in the same order
                layer(x)
            for layer in (layers[last], layers[1 - last]):
                with pytest.raises(ValueError, match=r"layer [01] on rank 0.*, [01] on rank 1"):
                    layer(x)
            copied = copy.deepcopy(layers)
            for layer in copied:
                layer(x)
            dist.barrier()
            ep.close()


def _module(ep: ExpertParallel) -> torch.nn.Module:
    router = torch.ones(SHAPE.num_experts, SHAPE.hidden_size)
    options = dict(top_k=SHAPE.top_k, activation=SHAPE.activation, expert_parallel=ep)
    return mxpert.MoE(whole_layer(), router, **options).eval()


def _trained(ep: ExpertParallel) -> torch.nn.Module:
    sizes = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_experts, SHAPE.top_k
    return MXMoE(*sizes, expert_parallel=ep)
