"""Right arguments of the public functions, and some answers in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from special_case import exact_layer

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights, MXTensor, ScaleRule, ScaleSpan, Scoring
from mxpert import formats as mx
from mxpert.core.problem import FORMAT_OF, TopKOptions, parse_activation_format
from mxpert.routing.op import choose_experts
from mxpert.training import MXFP8Recipe

MXFP8_NAMES = ("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2")
NAMES = ("mxfp4", *MXFP8_NAMES)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (
    mxpert.SiLU(),
    mxpert.SwiGLU(),
    mxpert.SwiGLU(limit=None, beta=0.25),
    mxpert.ClampedSiLU(),
    mxpert.SiTUv2(),
    mxpert.GELU(),
    mxpert.GELU("tanh"),
)
OTHER_WEIGHTS = ("mxfp8", "nvfp4", "int4_g32")
Arguments = dict[str, Any]


def randn(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(shape, generator=generator).to(dtype)


def codes(rng: random.Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def packed(rng: random.Random, *shape: int, name: str = "mxfp4") -> MXTensor:
    return mxpert.quantize(randn(rng, *shape), name)


def moe_weights(rng: random.Random, experts: int, hidden: int, inner: int) -> MoEWeights:
    bias, name = rng.random() < 0.5, rng.choice(("mxfp4", "mxfp4", *OTHER_WEIGHTS))
    made = mxpert.quantize_weights(
        randn(rng, experts, 2 * inner, hidden),
        randn(rng, experts, hidden, inner),
        gate_up_order="concatenated",
        weight_format=name,
    )
    return MoEWeights(
        made.gate_up_proj,
        made.down_proj,
        randn(rng, experts, 2 * inner) if bias else None,
        randn(rng, experts, hidden) if bias else None,
        rng.choice((GateUpOrder.CONCATENATED, GateUpOrder.INTERLEAVED)),
    )


def layer(rng: random.Random) -> Arguments:
    experts, hidden, inner, tokens = (
        rng.choice((1, 3, 4)),
        rng.choice((32, 96)),
        32,
        rng.choice((0, 1, 5)),
    )
    top_k = rng.randint(1, experts)
    weights = moe_weights(rng, experts, hidden, inner)
    topk_weights, topk_ids = mxpert.route_topk(randn(rng, tokens, experts), top_k)
    topk_weights = topk_weights.to(rng.choice(FLOATS))
    topk_ids = topk_ids.to(rng.choice((torch.int32, torch.int64)))
    return dict(
        x=randn(rng, tokens, hidden, dtype=torch.bfloat16),
        weights=weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=rng.choice(ACTIVATIONS),
        activation_format=rng.choice(list(FORMAT_OF)),
        scale_rule=rng.choice(list(ScaleRule)),
    )


def whole_layer(rng: random.Random) -> Arguments:
    arguments = layer(rng) | dict(
        combine=rng.choice((Combine.REDUCE, Combine.ATOMIC)),
        out_dtype=rng.choice(FLOATS),
        apply_router_weight_on_input=rng.random() < 0.3,
    )
    if rng.random() < 0.3:
        experts = arguments["weights"].num_experts
        arguments["expert_map"] = torch.arange(experts, dtype=torch.int32).flip(0).contiguous()
    if rng.random() < 0.3:
        arguments["num_local_tokens"] = torch.tensor([1], dtype=torch.int32)
    return arguments


def layer_in_float64(a: Arguments) -> torch.Tensor | None:
    """The definition; only for bf16 activations in plain order, rounded between the stages."""
    if (
        parse_activation_format(a["activation_format"], "") != "bf16"
        or a["apply_router_weight_on_input"]
        or "num_local_tokens" in a
        or "expert_map" in a
    ):
        return None
    (y,) = exact_layer(a, stored=torch.Tensor.bfloat16)
    return y


def layer_with_logits(rng: random.Random) -> Arguments:
    arguments = whole_layer(rng)
    del arguments["topk_weights"]
    tokens, top_k = arguments.pop("topk_ids").shape
    experts = arguments["weights"].num_experts
    return arguments | dict(
        logits=randn(rng, tokens, experts, dtype=rng.choice(FLOATS)),
        top_k=top_k,
        routing=TopKOptions(
            rng.choice(list(Scoring)),
            normalize=rng.random() < 0.5,
            routed_scaling_factor=rng.choice((1.0, 2.5)),
            clamp_nan=rng.random() < 0.3,
        ),
        correction_bias=randn(rng, experts) if rng.random() < 0.3 else None,
    )


def layer_with_logits_in_float64(a: Arguments) -> torch.Tensor | None:
    """The definition, for the experts that `route_topk` chooses; it has its own definition."""
    choice = a["logits"], a["top_k"], a["routing"], a["correction_bias"]
    weights, ids = choose_experts(*choice)
    return layer_in_float64(a | dict(topk_weights=weights, topk_ids=ids))


FROM_LOGITS = layer_with_logits, layer_with_logits_in_float64


def planned(arguments: Arguments) -> Arguments:
    """Arguments of a layer as those of its first stage."""
    plan = mxpert.make_routing_plan(
        arguments.pop("topk_weights"),
        arguments.pop("topk_ids"),
        num_experts=arguments["weights"].num_experts,
        routing_block_m=16,
    )
    return arguments | dict(plan=plan)


def second_stage(rng: random.Random) -> Arguments:
    first = planned(layer(rng))
    h = mxpert.moe_gate_up(**first)
    for tensor in (h.qdata, h.scale) if isinstance(h, MXTensor) else (h,):
        used = int(first["plan"].num_valid[0])
        tensor[used:] = 0  # rows past the plan's are undefined
    return dict(
        h=h,
        weights=first["weights"],
        plan=first["plan"],
        activation_format=first["activation_format"],
        combine=rng.choice((Combine.REDUCE, Combine.ATOMIC)),
        out_dtype=rng.choice(FLOATS),
    )


def routed(rng: random.Random, width: int = 8, tokens: Sequence[int] = (0, 1, 6)) -> Arguments:
    return dict(
        logits=randn(rng, rng.choice(tokens), width, dtype=rng.choice(FLOATS)),
        top_k=rng.randint(1, 4),
        normalize=rng.random() < 0.5,
        scoring=rng.choice(list(Scoring)),
        num_groups=(groups := rng.choice((1, 2, 4))),
        top_groups=groups,
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        correction_bias=randn(rng, width) if rng.random() < 0.5 else None,
    )


def routed_in_float64(a: Arguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    logits = a["logits"].double()
    ties = len(logits.unique()) < logits.numel()
    if ties or a["correction_bias"] is not None or a["num_groups"] > 1:
        return None
    scores = {
        Scoring.SOFTMAX: lambda: logits.softmax(-1),
        Scoring.SIGMOID: logits.sigmoid,
        Scoring.SQRTSOFTPLUS: lambda: torch.nn.functional.softplus(logits).sqrt(),
    }[a["scoring"]]()
    chosen, ids = scores.topk(a["top_k"])
    if a["normalize"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * a["routed_scaling_factor"], ids.int()


def groups(rng: random.Random) -> tuple[int, torch.Tensor]:
    total, count = rng.choice((0, 4, 32, 40)), rng.choice((1, 2, 3))
    cuts = sorted(rng.randint(0, total) for _ in range(count))
    return total, torch.tensor([0, *cuts], dtype=rng.choice((torch.int32, torch.int64)))


def gemm(rng: random.Random) -> Arguments:
    total, offsets = groups(rng)
    trans_b = rng.random() < 0.7
    a, b = randn(rng, total, 64), randn(rng, len(offsets) - 1, *((32, 64) if trans_b else (64, 32)))
    if rng.random() < 0.5:
        a, b = a.bfloat16(), b.bfloat16()
    else:
        name = rng.choice(MXFP8_NAMES)
        a, b = mxpert.quantize(a, name), mxpert.quantize(b, name, axis=-1 if trans_b else -2)
    return dict(
        a=a,
        b=b,
        group_offsets=offsets,
        trans_b=trans_b,
        out_dtype=rng.choice((*FLOATS, torch.float64)),
    )


def wgrad(rng: random.Random) -> Arguments:
    total, offsets = groups(rng)
    grad, a = randn(rng, total, 32).bfloat16(), randn(rng, total, 64).bfloat16()
    if rng.random() < 0.5:
        grad, a = (mxpert.quantize_dual(x, group_offsets=offsets)[1] for x in (grad, a))
    into = randn(rng, len(offsets) - 1, 32, 64) if rng.random() < 0.3 else None
    return dict(
        grad=grad, a=a, group_offsets=offsets, out_dtype=rng.choice(FLOATS), accumulate_into=into
    )


def accumulate(**arguments: Any) -> torch.Tensor:
    """grouped_wgrad into a copy, so that repeated calls add to the same numbers."""
    into = arguments.get("accumulate_into")
    if isinstance(into, torch.Tensor) and into.layout is torch.strided and not into.is_nested:
        arguments["accumulate_into"] = into.clone(memory_format=torch.preserve_format)
    return mxpert.grouped_wgrad(**arguments)


def recipes(rng: random.Random) -> MXFP8Recipe:
    return rng.choice(
        (
            MXFP8Recipe(),
            MXFP8Recipe.hybrid(),
            MXFP8Recipe(enabled=False),
            MXFP8Recipe(scale_span=ScaleSpan.ROW),
            MXFP8Recipe(high_precision_wgrad=True),
        )
    )


def linear(rng: random.Random) -> Arguments:
    total, offsets = groups(rng)
    count = len(offsets) - 1
    return dict(
        x=randn(rng, total, 32, dtype=rng.choice(FLOATS)),
        weight=randn(rng, count, 64, 32),
        group_offsets=offsets,
        bias=randn(rng, count, 64) if rng.random() < 0.5 else None,
        recipe=recipes(rng),
    )


def backward(function: Callable[..., torch.Tensor], *names: str) -> Callable[..., Any]:
    """The function, and the gradients of the named arguments."""

    def run(**arguments: Any) -> Any:
        leaves = []
        for name in names:
            value = arguments.get(name)
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.layout is torch.strided
                and not value.is_nested
            ):
                arguments[name] = value.detach().requires_grad_()
                leaves.append(arguments[name])
        y = function(**arguments)
        if not leaves or not y.requires_grad:
            return y
        y.backward(torch.ones_like(y))
        return (y.detach(), *(leaf.grad for leaf in leaves))

    return run


def matmul(rng: random.Random) -> Arguments:
    total, offsets = groups(rng)
    dtype = rng.choice(FLOATS)
    offs = offsets[1:].int()
    if rng.random() < 0.5:
        return dict(
            a=randn(rng, total, 32, dtype=dtype),
            b=randn(rng, len(offs), 32, 64, dtype=dtype),
            offs=offs,
            recipe=recipes(rng),
        )
    return dict(
        a=randn(rng, 32, total, dtype=dtype),
        b=randn(rng, total, 64, dtype=dtype),
        offs=offs,
        recipe=recipes(rng),
    )


def module(cls: type, inputs: Callable[..., Arguments]) -> Callable[..., Any]:
    """Make a module of the arguments and call it on the fixed inputs that suit it."""

    def run(**arguments: Any) -> Any:
        torch.manual_seed(0)
        made = cls(**arguments)
        if next(made.parameters()).device.type == "meta":
            return None
        return made(**inputs(made))

    return run


def spanned(rng: random.Random) -> Arguments:
    starts = torch.tensor([0, 32, 96]) if rng.random() < 0.5 else None
    return dict(
        tensor=packed(rng, 3, 96, name=rng.choice(MXFP8_NAMES)),
        span=rng.choice((ScaleSpan.BLOCK, ScaleSpan.SPAN128, ScaleSpan.ROW)),
        group_starts=starts,
    )


def combined(rng: random.Random) -> Arguments:
    return dict(
        rows=randn(rng, 6, 5, dtype=rng.choice(FLOATS)),
        row_ids=torch.randperm(6).view(3, 2),
        weights=randn(rng, 3, 2),
    )


def activated(rng: random.Random) -> Arguments:
    return dict(
        gate_up=randn(rng, 3, 8, dtype=rng.choice((*FLOATS, torch.float64))),
        activation=rng.choice(ACTIVATIONS),
    )


def prepared(rng: random.Random) -> MoEWeights:
    weights, kind = moe_weights(rng, 2, 32, 32), rng.random()
    packs = kind < 0.75 and weights.weight_format == "mxfp4"
    layout = mx.Layout.HOPPER_FRAGMENT if packs else None
    return weights if kind < 0.5 else weights.prepare(device="cpu", layout=layout)


def state(rng: random.Random) -> Arguments:
    state = prepared(rng).state_dict()
    if rng.random() < 0.3:
        state.pop(rng.choice(list(state)))
    elif rng.random() < 0.3:
        state[rng.choice(list(state))] = rng.choice((None, 3, torch.ones(2), "x", {}))
    return dict(state=state)


def load_state(weights: MoEWeights, state: Any) -> Any:
    weights = weights.__class__(**weights.__getstate__())
    weights.load_state_dict(state)
    return weights


def saved(weights: MoEWeights, path: Any) -> Any:
    weights.save(path)
    return MoEWeights.load(path)


def pinned(**arguments: Any) -> None:
    with mxpert.override(**arguments):
        pass


def method(name: str) -> Callable[..., Any]:
    return lambda self, **arguments: getattr(self, name)(**arguments)
