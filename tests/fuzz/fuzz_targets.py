"""Every public function with arguments that are right: what the fuzz starts from."""

from __future__ import annotations

import atexit
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_values import PLAN, WEIGHTS

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights, MXTensor, ScaleRule, ScaleSpan, Scoring
from mxpert import formats as mx
from mxpert.modules import quantize_weights
from mxpert.ops import rows
from mxpert.problem import (
    ACTIVATION_FORMAT_ALIASES,
    ACTIVATION_FORMATS,
    TopKOptions,
    parse_activation_format,
)
from mxpert.published import expert_weights_from, published_expert_tensors
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation

FOLDER = Path(tempfile.mkdtemp(prefix="mxpert-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
MXFP8_NAMES = ("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2")
NAMES = ("mxfp4", *MXFP8_NAMES)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (mxpert.SiLU(), mxpert.SwiGLU(), mxpert.ClampedSiLU(), mxpert.SiTUv2())
Arguments = dict[str, Any]


@dataclass
class Target:
    """One function.

    Args:
        name: for reports.
        call: takes the arguments by name.
        arguments: makes right ones.
        expected: the right answer, or None where it does not know it.
        tolerance: relative L2 error of an answer.
        skip: arguments that stay right: objects that other targets make, and indices whose values
            the function documents as not checked.
    """

    name: str
    call: Callable[..., Any]
    arguments: Callable[[random.Random], Arguments]
    expected: Callable[[Arguments], Any] | None = None
    tolerance: float = 0.0
    skip: frozenset[str] = field(default_factory=frozenset)


def randn(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(shape, generator=generator).to(dtype)


def codes(rng: random.Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def packed(rng: random.Random, *shape: int, name: str = "mxfp4") -> MXTensor:
    return mxpert.quantize(randn(rng, *shape), name)


def moe_weights(rng: random.Random, experts: int, hidden: int, inner: int) -> MoEWeights:
    bias = rng.random() < 0.5
    return MoEWeights(
        packed(rng, experts, 2 * inner, hidden),
        packed(rng, experts, hidden, inner),
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
    return dict(
        x=randn(rng, tokens, hidden, dtype=torch.bfloat16),
        weights=weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=rng.choice(ACTIVATIONS),
        activation_format=rng.choice((*ACTIVATION_FORMATS, *ACTIVATION_FORMAT_ALIASES)),
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
    """The definition, one (token, slot) at a time; only for bf16 activations in plain order."""
    if (
        parse_activation_format(a["activation_format"], "") != "bf16"
        or a["apply_router_weight_on_input"]
        or "num_local_tokens" in a
        or "expert_map" in a
    ):
        return None
    weights: MoEWeights = a["weights"]
    gate_rows, up_rows = mxpert.weights.gate_up_rows(
        weights.gate_up_order, weights.intermediate_size
    )
    gate_up, down = (p.dequantize(torch.float64) for p in (weights.gate_up_proj, weights.down_proj))
    x = a["x"].double()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(
        zip(a["topk_ids"].tolist(), a["topk_weights"].double(), strict=True)
    ):
        for expert, factor in zip(ids, factors, strict=True):
            h = gate_up[expert] @ x[token]
            if weights.gate_up_bias is not None:
                h = h + weights.gate_up_bias[expert].double()
            h = rows.activate_rows(torch.cat((h[gate_rows], h[up_rows]))[None], a["activation"])[0]
            out = down[expert] @ h.bfloat16().double()
            if weights.down_bias is not None:
                out = out + weights.down_bias[expert].double()
            y[token] += factor * out
    return y


def planned(rng: random.Random) -> Arguments:
    arguments = layer(rng)
    plan = mxpert.make_routing_plan(
        arguments.pop("topk_weights"),
        arguments.pop("topk_ids"),
        num_experts=arguments["weights"].num_experts,
        routing_block_m=16,
    )
    return arguments | dict(plan=plan)


def second_stage(rng: random.Random) -> Arguments:
    first = planned(rng)
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


def routed(rng: random.Random) -> Arguments:
    return dict(
        logits=randn(rng, rng.choice((0, 1, 6)), 8, dtype=rng.choice(FLOATS)),
        top_k=rng.randint(1, 4),
        normalize=rng.random() < 0.5,
        scoring=rng.choice(list(Scoring)),
        num_groups=(groups := rng.choice((1, 2, 4))),
        top_groups=groups,
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        correction_bias=randn(rng, 8) if rng.random() < 0.5 else None,
    )


def routed_in_float64(a: Arguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    logits = a["logits"].double()
    ties = len(logits.unique()) < logits.numel()
    if ties or a["correction_bias"] is not None or a["num_groups"] > 1:
        return None
    scores = logits.softmax(-1) if a["scoring"] is Scoring.SOFTMAX else logits.sigmoid()
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


def values(operand: torch.Tensor | MXTensor) -> torch.Tensor:
    return operand.dequantize(torch.float64) if isinstance(operand, MXTensor) else operand.double()


def gemm_in_float64(a: Arguments) -> torch.Tensor:
    left, right = values(a["a"]), values(a["b"])
    right = right.mT if a["trans_b"] else right
    out = torch.zeros(left.shape[0], right.shape[-1], dtype=torch.float64)
    offsets = a["group_offsets"].tolist()
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        out[start:end] = left[start:end] @ right[group]
    return out


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
    weights = moe_weights(rng, 2, 32, 32)
    kind = rng.random()
    return (
        weights
        if kind < 0.5
        else weights.prepare(
            device="cpu", layout=mx.Layout.HOPPER_FRAGMENT if kind < 0.75 else None
        )
    )


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


FORMATS = [
    Target(
        "quantize",
        mxpert.quantize,
        lambda r: dict(
            x=randn(r, 2, 32, 64, dtype=r.choice(FLOATS)),
            format=r.choice(NAMES),
            axis=r.choice((-1, 2, 1)),
            scale_rule=r.choice(list(ScaleRule)),
        ),
        lambda a: mx.quantize_blocks(a["x"], a["format"], a["axis"], a["scale_rule"]),
    ),
    Target(
        "dequantize",
        mxpert.dequantize,
        lambda r: dict(tensor=packed(r, 3, 64, name=r.choice(NAMES)), dtype=r.choice(FLOATS)),
        lambda a: mx.dequantize_blocks(a["tensor"], a["dtype"]),
    ),
    Target(
        "quantize_dual",
        mxpert.quantize_dual,
        lambda r: dict(
            x=randn(r, 40, 64, dtype=r.choice(FLOATS)),
            format=r.choice(MXFP8_NAMES),
            group_offsets=torch.tensor([0, 3, 40]),
            scale_rule=r.choice(list(ScaleRule)),
            scale_span=r.choice((*ScaleSpan, (ScaleSpan.ROW, ScaleSpan.BLOCK))),
        ),
        lambda a: (
            (mx.quantize_blocks(a["x"], a["format"], -1, a["scale_rule"]),)
            if a["scale_span"] is ScaleSpan.BLOCK
            else None
        ),
    ),
    Target("rebase", mxpert.rebase, spanned),
    Target("count_wide_blocks", mx.count_wide_blocks, spanned),
    Target(
        "quantize_blocks",
        mx.quantize_blocks,
        lambda r: dict(
            x=randn(r, 32, 64, dtype=r.choice(FLOATS)),
            fmt=r.choice(NAMES),
            axis=r.choice((0, -1)),
            rule=r.choice(list(ScaleRule)),
        ),
    ),
    Target(
        "quantize_spans",
        mx.quantize_spans,
        lambda r: dict(
            x=randn(r, 3, 96, dtype=r.choice(FLOATS)),
            fmt=r.choice(MXFP8_NAMES),
            rule=r.choice(list(ScaleRule)),
            span=r.choice(list(ScaleSpan)),
            group_starts=r.choice((None, torch.tensor([0, 32, 96]))),
        ),
    ),
    Target(
        "quantize_token_rows",
        mx.quantize_token_rows,
        lambda r: dict(x=randn(r, 3, 8, dtype=r.choice(FLOATS))),
    ),
    Target(
        "TokenRows.dequantize",
        lambda x, dtype: mx.quantize_token_rows(x).dequantize(dtype),
        lambda r: dict(x=randn(r, 3, 8), dtype=r.choice((torch.float32, torch.float64))),
    ),
    Target(
        "dequantize_blocks",
        mx.dequantize_blocks,
        lambda r: dict(t=packed(r, 3, 64, name=r.choice(NAMES)), dtype=r.choice(FLOATS)),
    ),
    Target(
        "encode",
        mx.encode,
        lambda r: dict(
            values=randn(r, 3, 5, dtype=r.choice(FLOATS)), element=r.choice((mx.E2M1, mx.E4M3))
        ),
    ),
    Target(
        "decode",
        mx.decode,
        lambda r: dict(
            codes=codes(r, 3, 4), element=r.choice((mx.E2M1, mx.E5M2)), dtype=r.choice(FLOATS)
        ),
    ),
    Target("decode_scale", mx.decode_scale, lambda r: dict(scale=codes(r, 3), dtype=torch.float32)),
    Target(
        "block_scale",
        mx.block_scale,
        lambda r: dict(amax=randn(r, 3, 2), fmt=r.choice(NAMES), rule=r.choice(list(ScaleRule))),
    ),
    Target(
        "pack_codes", mx.pack_codes, lambda r: dict(codes=codes(r, 4, 6), axis=r.choice((0, -1)))
    ),
    Target(
        "unpack_codes",
        mx.unpack_codes,
        lambda r: dict(packed=codes(r, 4, 6), axis=r.choice((0, -1))),
    ),
    Target("fold_certificate", mx.fold_certificate, lambda r: dict(t=packed(r, 2, 3, 64))),
    Target("fold", mx.fold, lambda r: dict(t=packed(r, 2, 3, 64), certificate=None)),
    Target(
        "unfold",
        mx.unfold,
        lambda r: dict(codes=codes(r, 3, 32), reference=codes(r, 3), dtype=torch.float32),
    ),
    Target("get_format", mx.get_format, lambda r: dict(name=r.choice(NAMES))),
    Target(
        "MXTensor",
        MXTensor,
        lambda r: dict(qdata=codes(r, 3, 32), scale=codes(r, 3, 1), format=mx.MXFP8_E4M3, axis=-1),
    ),
    Target(
        "MXTensor.to",
        method("to"),
        lambda r: dict(self=packed(r, 3, 32), device="cpu"),
        skip=frozenset({"self"}),
    ),
    Target(
        "MXTensor[]",
        lambda self, index: self[index],
        lambda r: dict(self=packed(r, 3, 32), index=r.choice((0, -1, slice(1, 3)))),
        skip=frozenset({"self"}),
    ),
    Target(
        "MXTensor.dequantize",
        method("dequantize"),
        lambda r: dict(self=packed(r, 3, 32), dtype=torch.float32),
        skip=frozenset({"self"}),
    ),
]

LAYERS = [
    Target("route_topk", mxpert.route_topk, routed, routed_in_float64, 1e-5),
    Target(
        "make_routing_plan",
        mxpert.make_routing_plan,
        lambda r: (
            (a := layer(r))
            and dict(
                topk_weights=a["topk_weights"],
                topk_ids=a["topk_ids"],
                num_experts=a["weights"].num_experts,
                routing_block_m=r.choice((1, 3, 16)),
                expert_map=None,
                num_local_experts=None,
                num_local_tokens=None,
            )
        ),
    ),
    Target("fused_moe", mxpert.fused_moe, whole_layer, layer_in_float64, 0.03),
    Target(
        "warm_up",
        mxpert.warm_up,
        lambda r: dict(
            weights=moe_weights(r, 4, 32, 32), max_tokens=5, top_k=2, activation=mxpert.SiLU()
        ),
    ),
    Target("moe_gate_up", mxpert.moe_gate_up, planned),
    Target("moe_down", mxpert.moe_down, second_stage),
    Target(
        "explain", lambda **a: mxpert.explain(mxpert.fused_moe, **a).resolution.source, whole_layer
    ),
    Target(
        "explain any",
        lambda op, x: str(mxpert.explain(op, x, "mxfp4")),
        lambda r: dict(op=mxpert.quantize, x=randn(r, 2, 32)),
    ),
    Target("MoEWeights", MoEWeights, lambda r: moe_weights(r, 2, 32, 32).__getstate__()),
    Target(
        "MoEWeights.to",
        method("to"),
        lambda r: dict(self=prepared(r), device="cpu"),
        skip=frozenset({"self"}),
    ),
    Target(
        "MoEWeights.prepare",
        method("prepare"),
        lambda r: dict(self=moe_weights(r, 2, 32, 32), device="cpu", layout=None),
        skip=frozenset({"self"}),
    ),
    Target(
        "MoEWeights.unprepare",
        method("unprepare"),
        lambda r: dict(self=prepared(r)),
        skip=frozenset({"self"}),
    ),
    Target("MoEWeights.from_state_dict", MoEWeights.from_state_dict, state),
    Target(
        "MoEWeights.load_state_dict",
        load_state,
        lambda r: dict(weights=prepared(r)) | state(r),
        skip=frozenset({"weights"}),
    ),
    Target(
        "MoEWeights.save",
        saved,
        lambda r: dict(weights=prepared(r), path=FOLDER / "a.safetensors"),
        skip=frozenset({"weights"}),
    ),
    Target("MoEWeights.load", MoEWeights.load, lambda r: dict(path=str(FOLDER), device="cpu")),
    Target(
        "override",
        pinned,
        lambda r: dict(
            backend="reference", config=r.choice((None, mxpert.ReferenceConfig(torch.float64)))
        ),
    ),
    Target(
        "padded_capacity",
        mxpert.padded_capacity,
        lambda r: dict(num_rows=r.randrange(100), num_groups=r.randrange(9)),
        lambda a: (a["num_rows"] + 31) // 32 * 32 + 32 * a["num_groups"],
    ),
    Target(
        "padded_group_offsets",
        mxpert.padded_group_offsets,
        lambda r: dict(group_offsets=groups(r)[1]),
    ),
    Target("SwiGLU", mxpert.SwiGLU, lambda r: dict(alpha=1.0, limit=7.0)),
    Target("ClampedSiLU", mxpert.ClampedSiLU, lambda r: dict(limit=7.0)),
    Target("SiTUv2", mxpert.SiTUv2, lambda r: dict(beta=1.0, beta_up=7.0)),
    Target(
        "GemmConfig",
        mxpert.GemmConfig,
        lambda r: dict(
            block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=1, group_m=1, split_k=1
        ),
    ),
    Target(
        "MoEConfig",
        mxpert.MoEConfig,
        lambda r: dict(
            routing_block_m=16,
            gate_up=mxpert.GemmConfig(16, 16, 32),
            down=mxpert.GemmConfig(16, 16, 32),
        ),
    ),
    Target(
        "ReferenceConfig",
        mxpert.ReferenceConfig,
        lambda r: dict(accumulate=torch.float64, routing_block_m=16),
    ),
    Target(
        "RoutingPlan",
        lambda **a: mxpert.moe_gate_up(
            torch.zeros(2, 32, dtype=torch.bfloat16),
            WEIGHTS,
            mxpert.RoutingPlan(**a),
            activation=mxpert.SiLU(),
        ),
        lambda r: PLAN.__getstate__(),
    ),
    Target(
        "published_expert_tensors",
        published_expert_tensors,
        lambda r: dict(weights=moe_weights(r, 2, 32, 32), dtype=r.choice(FLOATS)),
    ),
    Target(
        "expert_weights_from",
        expert_weights_from,
        lambda r: dict(tensors=published_expert_tensors(WEIGHTS), order=GateUpOrder.INTERLEAVED),
    ),
    Target(
        "convert",
        mxpert.convert,
        lambda r: dict(
            model=torch.nn.Linear(2, 2),
            activation_format="bf16",
            device=None,
            scale_rule=ScaleRule.RCEIL,
        ),
    ),
]

TRAINING = [
    Target("grouped_gemm", mxpert.grouped_gemm, gemm, gemm_in_float64, 0.02),
    Target("grouped_wgrad", accumulate, wgrad),
    Target("grouped_linear", backward(grouped_linear, "x", "weight", "bias"), linear),
    Target("grouped_mm", backward(grouped_mm, "a", "b"), matmul),
    Target("gated_activation", backward(gated_activation, "gate_up"), activated),
    Target("activate_rows", rows.activate_rows, activated),
    Target(
        "activate_rows_backward",
        rows.activate_rows_backward,
        lambda r: (a := activated(r)) and dict(grad=torch.ones_like(a["gate_up"][:, :4]), **a),
    ),
    Target(
        "combine_rows",
        rows.combine_rows,
        lambda r: combined(r) | dict(out_dtype=r.choice((None, *FLOATS))),
        skip=frozenset({"row_ids"}),
    ),
    Target(
        "combine_rows_backward",
        rows.combine_rows_backward,
        lambda r: (a := combined(r)) and dict(grad=torch.ones(3, 5), **a),
        skip=frozenset({"row_ids"}),
    ),
    Target(
        "MXFP8Recipe",
        MXFP8Recipe,
        lambda r: dict(
            forward_format="mxfp8_e4m3",
            backward_format="mxfp8_e5m2",
            scale_rule=ScaleRule.RCEIL,
            scale_span=None,
            high_precision_wgrad=False,
            enabled=True,
        ),
    ),
    Target(
        "MXGroupedLinear",
        module(
            MXGroupedLinear,
            lambda made: dict(
                x=torch.ones(4, made.in_features),
                group_offsets=torch.tensor([0, 4] + [4] * (made.num_groups - 1)),
            ),
        ),
        lambda r: dict(
            num_groups=2,
            in_features=32,
            out_features=32,
            bias=r.random() < 0.5,
            recipe=recipes(r),
            device=None,
            dtype=None,
        ),
    ),
    Target(
        "MXMoE",
        module(MXMoE, lambda made: dict(x=torch.ones(3, made.hidden_size))),
        lambda r: dict(
            hidden_size=32,
            intermediate_size=32,
            num_experts=3,
            top_k=2,
            activation=r.choice(ACTIVATIONS),
            recipe=recipes(r),
            aux_loss_coef=0.1,
            bias=r.random() < 0.5,
            device=None,
            dtype=None,
        ),
    ),
    Target(
        "MXMoE.forward",
        backward(MXMoE(32, 32, 3, 2), "x"),
        lambda r: dict(x=randn(r, 2, 3, 32, dtype=r.choice(FLOATS))),
    ),
]

MODULES = [
    Target(
        "MoE",
        lambda **a: mxpert.MoE(**a).eval()(torch.ones(3, 32)),
        lambda r: dict(
            weights=moe_weights(r, 3, 32, 32),
            router_weight=randn(r, 3, 32),
            top_k=r.randint(1, 3),
            activation=r.choice(ACTIVATIONS),
            activation_format=r.choice(ACTIVATION_FORMATS),
            router_bias=r.choice((None, torch.zeros(3))),
            correction_bias=None,
            routing=TopKOptions(),
        ),
    ),
    Target(
        "MoE.forward",
        mxpert.MoE(WEIGHTS, torch.ones(2, 32), top_k=1).eval(),
        lambda r: dict(x=randn(r, 2, 3, 32, dtype=r.choice(FLOATS))),
    ),
    Target(
        "quantize_weights",
        quantize_weights,
        lambda r: dict(
            gate_up_proj=randn(r, 2, 64, 32, dtype=r.choice(FLOATS)),
            down_proj=randn(r, 2, 32, 32),
            gate_up_order=GateUpOrder.CONCATENATED,
            gate_up_bias=r.choice((None, randn(r, 2, 64))),
            down_bias=None,
            scale_rule=r.choice(list(ScaleRule)),
            device=None,
        ),
    ),
]

TARGETS = [*MODULES, *FORMATS, *LAYERS, *TRAINING]
