"""Public functions on random arguments, with their results by definition in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz_arguments import (
    ACTIVATIONS,
    FLOATS,
    MXFP8_NAMES,
    NAMES,
    groups,
    moe_weights,
    planned,
    randn,
    routed,
)
from special_case import WIDE, Arguments, Case, Experts, Results, exact_layer, wide
from special_grouped import GROUPED

import mxpert
from mxpert import Combine, MoEWeights, MXTensor, ScaleRule, ScaleSpan, Scoring, formats
from mxpert.formats.spec import LINE_SPANS
from mxpert.grouped.reference import pad_groups
from mxpert.routing.plan import TOKEN_MASK

RULES, SPANS = list(ScaleRule), list(LINE_SPANS)


# --- quantisation -------------------------------------------------------------------------------


def _quantised(rng: random.Random, size: int) -> Arguments:
    shape = rng.choice(((3, 64 * size), (64, 5), (2, 32, 3)))
    axis = max(range(len(shape)), key=lambda dim: shape[dim] % 32 == 0)
    return dict(
        x=randn(rng, *shape, dtype=rng.choice(FLOATS)),
        fmt=rng.choice(NAMES),
        axis=axis,
        rule=rng.choice(RULES),
        dtype=rng.choice(FLOATS),
    )


def _quantise(a: Arguments) -> Results:
    q = mxpert.quantize(a["x"], a["fmt"], axis=a["axis"], scale_rule=a["rule"])
    return [mxpert.dequantize(q, dtype=a["dtype"]), wide(q)]


def _coded(rng: random.Random, size: int, names: tuple[str, ...] = NAMES) -> Arguments:
    return dict(
        tensor=mxpert.quantize(randn(rng, 3, 96 * size), rng.choice(names)),
        dtype=rng.choice(FLOATS),
        span=rng.choice((ScaleSpan.SPAN128, ScaleSpan.ROW)),
    )


def _dual(rng: random.Random, size: int) -> Arguments:
    total, offsets = groups(rng)
    grouped = total > 0 and rng.random() < 0.7
    return dict(
        x=randn(rng, total if grouped else 64, 64 * size, dtype=rng.choice(FLOATS)),
        format=rng.choice(MXFP8_NAMES),
        group_offsets=offsets if grouped else None,
        scale_rule=rng.choice(RULES),
        scale_span=(rng.choice(SPANS), rng.choice(SPANS)),
    )


def _exact_dual(a: Arguments) -> Results:
    x = a["x"].double()
    if a["group_offsets"] is None:
        return [x, x.mT]
    inside, padded = pad_groups(x, a["group_offsets"])
    return [inside, padded.mT]


# --- layers -------------------------------------------------------------------------------------


def _layer(rng: random.Random, size: int) -> Arguments:
    experts, hidden, inner = rng.choice((1, 3, 4)), rng.choice((32, 96)) * size, 32 * size
    tokens, top_k = rng.choice((1, 5, 9)), rng.randint(1, experts)
    topk_weights, topk_ids = mxpert.route_topk(randn(rng, tokens, experts), top_k)
    a_format = rng.choice(("bf16", "mxfp8", "mxfp4", "fp8_token"))
    x: torch.Tensor | MXTensor = randn(rng, tokens, hidden, dtype=torch.bfloat16)
    if a_format.startswith("mx") and rng.random() < 0.3:
        x = mxpert.quantize(x, a_format)
    return dict(
        x=x,
        weights=moe_weights(rng, experts, hidden, inner),
        topk_weights=topk_weights.to(rng.choice(FLOATS)),
        topk_ids=topk_ids,
        activation=rng.choice(ACTIVATIONS),
        activation_format=a_format,
        scale_rule=rng.choice(RULES),
        combine=rng.choice((Combine.REDUCE, Combine.ATOMIC)),
        out_dtype=rng.choice(FLOATS),
        apply_router_weight_on_input=rng.random() < 0.3,
    )


def _on_device(weights: MoEWeights) -> MoEWeights:
    return weights.prepare(device=weights.device) if weights.device.type == "cuda" else weights


def _run_layer(a: Arguments) -> Results:
    return [mxpert.fused_moe(**(a | dict(weights=_on_device(a["weights"]))))]


def _valid(plan: mxpert.RoutingPlan) -> list[tuple[int, int, int]]:
    """(row, token, expert) of the rows in use."""
    found = []
    for row, word in enumerate(plan.sorted_token_ids.tolist()[: int(plan.num_valid[0])]):
        token = word & TOKEN_MASK
        if token < plan.num_tokens:
            expert = int(plan.block_expert_ids[row // plan.routing_block_m])
            found.append((row, token, expert))
    return found


_FIRST = ("activation", "activation_format", "scale_rule", "apply_router_weight_on_input")
_SECOND = ("activation_format", "combine", "out_dtype")


def _run_gate_up(a: Arguments) -> Results:
    weights = _on_device(a["weights"])
    h = mxpert.moe_gate_up(a["x"], weights, a["plan"], **{name: a[name] for name in _FIRST})
    used = [row for row, *_ in _valid(a["plan"])]
    return [wide(h)[used]]


def _exact_gate_up(a: Arguments) -> Results:
    experts, x, factors = Experts(a), wide(a["x"]), a["plan"].sorted_weights.double()
    on_input = a["apply_router_weight_on_input"]
    found = [
        experts.hidden(expert, x[token], factors[row] if on_input else 1.0, a["activation"])
        for row, token, expert in _valid(a["plan"])
    ]
    return [torch.stack(found)]


def _second(rng: random.Random, size: int) -> Arguments:
    a = planned(_layer(rng, size))
    h: Any = randn(rng, a["plan"].capacity, a["weights"].intermediate_size, dtype=torch.bfloat16)
    if a["activation_format"].startswith("mx"):
        h = mxpert.quantize(h, a["activation_format"])
    return a | dict(h=h)


def _run_down(a: Arguments) -> Results:
    weights = _on_device(a["weights"])
    y = mxpert.moe_down(a["h"], weights, a["plan"], **{name: a[name] for name in _SECOND})
    return [y]


def _exact_down(a: Arguments) -> Results:
    experts, h, factors = Experts(a), wide(a["h"]), a["plan"].sorted_weights.double()
    y = torch.zeros(a["plan"].num_tokens, a["weights"].hidden_size, dtype=WIDE)
    for row, token, expert in _valid(a["plan"]):
        y[token] += factors[row] * experts.out(expert, h[row])
    return [y]


# --- routing and modules ------------------------------------------------------------------------


def _run_routed(a: Arguments) -> Results:
    weights, ids = mxpert.route_topk(**a)
    assert all(len(set(row)) == len(row) for row in ids.tolist()), "an expert twice"
    assert ids.min() >= 0, "no expert"
    assert ids.max() < a["logits"].shape[1], "no expert"
    return [weights, ids.double()]


def _exact_routed(a: Arguments, ids: torch.Tensor) -> Results:
    """The weights of the experts that were chosen."""
    logits = a["logits"].double()
    if a["scoring"] is Scoring.SOFTMAX:
        chosen = logits.gather(1, ids)
        weights = chosen.softmax(-1) if a["normalize"] else logits.softmax(-1).gather(1, ids)
        return [weights, None]
    score = logits.sigmoid()
    if a["scoring"] is Scoring.SQRTSOFTPLUS:
        score = torch.nn.functional.softplus(logits).sqrt()
    weights = score.gather(1, ids)
    return [weights / (weights.sum(-1, keepdim=True) + 1e-20 if a["normalize"] else 1), None]


def _moe(rng: random.Random, size: int) -> Arguments:
    experts, hidden = 3, 32 * size
    return dict(
        x=randn(rng, 5, hidden, dtype=rng.choice(FLOATS)),
        weights=moe_weights(rng, experts, hidden, 32 * size),
        router_weight=randn(rng, experts, hidden),
        top_k=rng.randint(1, 3),
        activation_format=rng.choice(("bf16", "mxfp8", "mxfp4", "fp8_token")),
    )


def _run_moe(a: Arguments) -> Results:
    options = {name: value for name, value in a.items() if name != "x"}
    return [mxpert.MoE(**options).eval()(a["x"])]


def _exact_moe(a: Arguments) -> Results:
    """A token with a NaN is NaN: so are its logits."""
    lost = a["x"].isnan().any(-1, keepdim=True) | a["router_weight"].isnan().all()
    return [torch.zeros(a["x"].shape, dtype=WIDE).masked_fill(lost, torch.nan)]


CASES = (
    Case("quantize", _quantised, _quantise, lambda a: [a["x"].double()] * 2, ("x",)),
    Case(
        "dequantize",
        _coded,
        lambda a: [mxpert.dequantize(a["tensor"], dtype=a["dtype"])],
        lambda a: [wide(a["tensor"])],
        ("tensor",),
        "tensor",
    ),
    Case(
        "quantize_dual",
        _dual,
        lambda a: [wide(copy) for copy in mxpert.quantize_dual(**a)],
        _exact_dual,
        ("x",),
    ),
    Case(
        "rebase",
        lambda rng, size: _coded(rng, size, MXFP8_NAMES),
        lambda a: [wide(formats.rebase(a["tensor"], a["span"]))],
        lambda a: [wide(a["tensor"])],
        ("tensor",),
        "tensor",
        on_gpu=False,
    ),
    Case(
        "quantize_token_rows",
        lambda rng, size: dict(x=randn(rng, 3, 32 * size, dtype=rng.choice(FLOATS))),
        lambda a: [formats.quantize_token_rows(a["x"]).dequantize()],
        lambda a: [a["x"].double()],
        ("x",),
        "x",
        on_gpu=False,
    ),
    Case("fused_moe", _layer, _run_layer, exact_layer, ("x", "weights", "topk_weights"), "x"),
    Case(
        "moe_gate_up",
        lambda rng, size: planned(_layer(rng, size)),
        _run_gate_up,
        _exact_gate_up,
        ("x", "weights"),
    ),
    Case("moe_down", _second, _run_down, _exact_down, ("h", "weights")),
    *GROUPED,
    Case(
        "route_topk",
        lambda rng, size: routed(rng, 8 * size, (1, 6)),
        _run_routed,
        lambda a: [],
        ("logits", "correction_bias"),
        "logits",
    ),
    Case("MoE", _moe, _run_moe, _exact_moe, ("x", "router_weight")),
)
EXACT_OF_ROUTED = _exact_routed
