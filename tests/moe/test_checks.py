"""Bad arguments of the MoE ops, tensors, weights and overrides: named before anything is launched.

`quantize` has its cases in tests/formats, the router in tests/routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import ClampedSiLU, Combine, GateUpOrder, MoEWeights, MXTensor, SiLU, SiTUv2, SwiGLU
from mxpert.configs import Cdna4GemmConfig, GemmConfig, HopperGemmConfig, MoEConfig, ReferenceConfig
from mxpert.formats import MXFP4, Layout
from mxpert.testing.problems import MoEShape, random_moe_problem

LAYER = random_moe_problem(MoEShape(64, 32, 4, 2, has_bias=True), 5)
X, WEIGHTS, IDS, TOPK_WEIGHTS = LAYER.x, LAYER.weights, LAYER.topk_ids, LAYER.topk_weights
PLAN = mxpert.make_routing_plan(TOPK_WEIGHTS, IDS, num_experts=4, routing_block_m=16)
H = mxpert.moe_gate_up(X, WEIGHTS, PLAN, activation=SiLU())
Q4, Q8 = mxpert.quantize(X, "mxfp4"), mxpert.quantize(X, "mxfp8")
ON_META = replace(
    WEIGHTS,
    gate_up_proj=WEIGHTS.gate_up_proj.to("meta"),
    down_proj=WEIGHTS.down_proj.to("meta"),
    gate_up_bias=None,
    down_bias=None,
)
DOWN = WEIGHTS.down_proj
STRIDED = replace(DOWN, qdata=DOWN.qdata.mT.contiguous().mT)


def fused(
    x: Any = X,
    weights: Any = WEIGHTS,
    ids: Any = IDS,
    topk_weights: Any = TOPK_WEIGHTS,
    **options: Any,
) -> Callable[[], Any]:
    return lambda: mxpert.fused_moe(
        x, weights, topk_weights, ids, **{"activation": SiLU(), **options}
    )


def gate_up(
    x: Any = X, weights: Any = WEIGHTS, plan: Any = PLAN, **options: Any
) -> Callable[[], Any]:
    return lambda: mxpert.moe_gate_up(x, weights, plan, **{"activation": SiLU(), **options})


def down(h: Any = H, weights: Any = WEIGHTS, plan: Any = PLAN, **options: Any) -> Callable[[], Any]:
    return lambda: mxpert.moe_down(h, weights, plan, **options)


def with_plan(**changes: Any) -> Callable[[], Any]:
    return gate_up(plan=replace(PLAN, **changes))


def make_weights(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(WEIGHTS, **changes)


def make_tensor(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(Q4, **changes)


def pinned(**changes: Any) -> Callable[[], Any]:
    def enter() -> None:
        with mxpert.override(**changes):
            raise AssertionError("an override that should have been refused")

    return enter


INT32 = {"dtype": torch.int32}
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "x-type": (fused([1.0]), TypeError, "fused_moe: x — need a torch.Tensor, got list"),
    "x-float16": (fused(X.half()), TypeError, "fused_moe: x.dtype — need bfloat16, got float16"),
    "x-meta": (fused(X.to("meta")), ValueError, "fused_moe: x.device — need cpu, got meta"),
    "x-one-dimension": (fused(X[0]), ValueError, "fused_moe: x — need two dimensions"),
    "x-width": (fused(X[:, :32]), ValueError, r"fused_moe: x.shape — need \[\*, 64\], got \[5, 32"),
    "x-sparse": (fused(X.to_sparse()), TypeError, "fused_moe: x.layout — need torch.strided"),
    "x-csr": (fused(X.to_sparse_csr()), TypeError, "fused_moe: x.layout — need torch.strided"),
    "x-nested": (fused(torch.nested.nested_tensor([X])), TypeError, "x.layout .* a nested tensor"),
    "x-transposed": (fused(X.mT.contiguous().mT), ValueError, r"fused_moe: x — .*\.contiguous\(\)"),
    "x-mx-axis": (
        fused(mxpert.quantize(torch.zeros(32, 64), "mxfp8", axis=0), activation_format="mxfp8"),
        ValueError,
        "x.axis — need -1, got -2",
    ),
    "x-mx-format": (fused(Q8, activation_format="mxfp4"), ValueError, "x.format — need mxfp4"),
    "x-mx-for-bf16": (fused(Q8), ValueError, "x.format — need bf16, got mxfp8_e4m3; pass"),
    "weights-type": (fused(weights=None), TypeError, "fused_moe: weights — need MoEWeights"),
    "weights-meta": (fused(weights=ON_META), ValueError, "x.device — need meta, got cpu"),
    "weights-strided": (
        fused(weights=replace(WEIGHTS, down_proj=STRIDED)),
        ValueError,
        r"down_proj.qdata.stride\(-1\) — need 1",
    ),
    "ids-int16": (fused(ids=IDS.short()), TypeError, "need int32 or int64, got int16"),
    "ids-float": (fused(ids=IDS.float()), TypeError, "need int32 or int64, got float32"),
    "ids-other-tokens": (fused(ids=IDS[:3]), ValueError, r"topk_ids.shape — need \[5, \*\]"),
    "ids-no-slots": (
        fused(ids=IDS[:, :0], topk_weights=TOPK_WEIGHTS[:, :0]),
        ValueError,
        r"topk_ids.shape\[1\] — need 1 to 127",
    ),
    "top-k-over-experts": (
        fused(ids=torch.zeros(5, 5, **INT32), topk_weights=torch.ones(5, 5)),
        ValueError,
        r"topk_ids.shape\[1\] — need at most 4 experts",
    ),
    "topk-weights-dtype": (
        fused(topk_weights=TOPK_WEIGHTS.double()),
        TypeError,
        "topk_weights.dtype — need float32",
    ),
    "activation-name": (fused(activation="geglu"), ValueError, "one of the names .*, got 'geglu'"),
    "activation-class": (fused(activation=SiLU), TypeError, r"; pass mxpert.SiLU\(\)"),
    "format-typo": (fused(activation_format="mxpf8"), ValueError, "activation_format — need one"),
    "format-list": (fused(activation_format=["bf16"]), ValueError, "activation_format — need one"),
    "combine-name": (fused(combine="add"), ValueError, "combine — need a Combine .*, got 'add'"),
    "combine-flat": (fused(combine=Combine.FLAT), ValueError, "FLAT rows need the plan"),
    "rule-name": (fused(scale_rule="up"), ValueError, "scale_rule — need a ScaleRule"),
    "on-input-name": (
        fused(apply_router_weight_on_input="yes"),
        TypeError,
        "apply_router_weight_on_input — need a bool",
    ),
    "out-dtype": (fused(out_dtype=torch.int8), TypeError, "out_dtype — need"),
    "out-type": (fused(out=[0.0]), TypeError, "fused_moe: out — need a torch.Tensor, got list"),
    "out-other-dtype": (fused(out=X.float()), TypeError, "out.dtype — need bfloat16, got float32"),
    "out-shape": (fused(out=X[1:]), ValueError, r"out.shape — need \[5, 64\], got \[4, 64\]"),
    "out-device": (fused(out=X.to("meta")), ValueError, "out.device — need cpu, got meta"),
    "out-strided": (
        fused(out=torch.empty(5, 128, dtype=torch.bfloat16)[:, ::2]),
        ValueError,
        "fused_moe: out — need a contiguous tensor",
    ),
    "out-one-row": (
        fused(out=X[:1].expand(5, 64)),
        ValueError,
        "fused_moe: out — need a contiguous tensor",
    ),
    "map-short": (fused(expert_map=torch.zeros(1, **INT32)), ValueError, "at most 1 experts"),
    "map-int64": (fused(expert_map=torch.arange(4)), TypeError, "expert_map.dtype — need int32"),
    "map-strided": (fused(expert_map=torch.arange(8, **INT32)[::2]), ValueError, "expert_map — "),
    "local-tokens-shape": (
        fused(num_local_tokens=torch.tensor(3, **INT32)),
        ValueError,
        r"num_local_tokens.shape — need \[1\], got \[\]",
    ),
    "plan-type": (gate_up(plan=None), TypeError, "moe_gate_up: plan — need a RoutingPlan"),
    "plan-other-tokens": (gate_up(X[:3]), ValueError, "x.shape.* — need the plan's 5 tokens,"),
    "plan-other-experts": (
        gate_up(
            plan=mxpert.make_routing_plan(TOPK_WEIGHTS, IDS, num_experts=8, routing_block_m=16)
        ),
        ValueError,
        "plan.num_experts — need the weights' 4 experts, got 8",
    ),
    "plan-ids-none": (with_plan(sorted_token_ids=None), TypeError, "plan.sorted_token_ids"),
    "plan-ids-int64": (
        with_plan(sorted_token_ids=PLAN.sorted_token_ids.long()),
        TypeError,
        "plan.sorted_token_ids.dtype — need int32",
    ),
    "plan-weights-short": (
        with_plan(sorted_weights=PLAN.sorted_weights[1:]),
        ValueError,
        "plan.sorted_weights.shape — need",
    ),
    "plan-strided": (
        with_plan(slot_rows=PLAN.slot_rows.mT.contiguous().mT),
        ValueError,
        "plan.slot_rows — need a contiguous tensor",
    ),
    "plan-meta": (
        with_plan(slot_rows=PLAN.slot_rows.to("meta")),
        ValueError,
        "plan.slot_rows.device — need cpu",
    ),
    "plan-block-zero": (with_plan(routing_block_m=0), ValueError, "plan.routing_block_m — need a"),
    "plan-block-float": (with_plan(routing_block_m=16.0), TypeError, "routing_block_m — need an"),
    "h-rows": (down(H[1:]), ValueError, r"moe_down: h.shape\[0\] — need the plan's"),
    "h-width": (down(torch.cat([H, H], 1)), ValueError, r"moe_down: h.shape — need \[\*, 32\]"),
    "h-float32": (down(H.float()), TypeError, "moe_down: h.dtype — need bfloat16"),
    "h-format": (down(activation_format="mxfp8"), ValueError, "moe_down: h — need an MXTensor for"),
    "h-format-mx": (
        down(mxpert.quantize(H, "mxfp8"), activation_format="fp8_token"),
        ValueError,
        "moe_down: h.format — need fp8_token, got mxfp8_e4m3; pass activation_format=",
    ),
    "h-format-typo": (down(activation_format="fp8"), ValueError, "activation_format — need one"),
    "x-format-mx": (
        gate_up(Q8, activation_format="fp8_token"),
        ValueError,
        "moe_gate_up: x.format — need fp8_token",
    ),
    "h-e5m2": (down(mxpert.quantize(H, "mxfp8_e5m2")), ValueError, "moe_down: h.format — need"),
    "alpha-name": (lambda: SwiGLU("1", 7.0), TypeError, "SwiGLU: alpha — need a number, got '1'"),
    "limit-nan": (lambda: SwiGLU(limit=float("nan")), ValueError, "SwiGLU: limit — need a"),
    "limit-none": (lambda: ClampedSiLU(None), TypeError, "ClampedSiLU: limit — need a number"),
    "beta-zero": (lambda: SiTUv2(beta=0.0), ValueError, "SiTUv2: beta — need a number above zero"),
    "tensor-scale": (make_tensor(scale=Q4.scale[:, :1]), ValueError, r"scale — need \[5, 2\], got"),
    "tensor-axis": (make_tensor(axis=None), TypeError, "axis — need a negative int, got None"),
    "tensor-layout": (make_tensor(layout="column_major"), ValueError, "layout — need a Layout"),
    "tensor-unpacked": (make_tensor(layout=Layout.HOPPER_FRAGMENT), ValueError, "reference"),
    "tensor-shape": (make_tensor(logical_shape=(5, 64)), ValueError, "logical_shape — need None"),
    "tensor-index": (lambda: Q4["a"], TypeError, "index — need an int or a slice, got 'a'"),
    "tensor-past-end": (lambda: Q4[5], IndexError, "index — need -5 … 4, got 5"),
    "tensor-device": (lambda: Q4.to("gpu"), ValueError, "MXTensor.to: device — need a device"),
    "tensor-format": (lambda: MXTensor(Q4.qdata, Q4.scale, 4), TypeError, "need an MXFormat"),
    "order-missing": (
        lambda: MoEWeights(WEIGHTS.gate_up_proj, DOWN),
        TypeError,
        "gate_up_order — need a GateUpOrder .*, got None; gpt-oss checkpoints are",
    ),
    "no-features": (
        lambda: MoEWeights(
            MXTensor(
                torch.empty(4, 0, 32, dtype=torch.uint8),
                torch.empty(4, 0, 2, dtype=torch.uint8),
                MXFP4,
            ),
            MXTensor(DOWN.qdata[..., :0], DOWN.scale[..., :0], MXFP4),
            gate_up_order=GateUpOrder.CONCATENATED,
        ),
        ValueError,
        "need E, H and F above zero",
    ),
    "bias-bfloat16": (
        make_weights(down_bias=torch.zeros(4, 64).bfloat16()),
        TypeError,
        "down_bias.dtype — need float32",
    ),
    "prepare-device": (lambda: WEIGHTS.prepare(device="gpu"), ValueError, "prepare: device — need"),
    "prepare-meta": (lambda: WEIGHTS.prepare(device="meta"), ValueError, "a device that holds"),
    "prepare-absent": (
        lambda: WEIGHTS.prepare(device="cuda:63"),
        ValueError,
        "prepare: device — need a GPU of this machine, got 'cuda:63'",
    ),
    "override-backend": (pinned(backend=["triton"]), ValueError, "override: backend — need one of"),
    "override-config": (pinned(config="fast"), TypeError, "override: config — need a GemmConfig"),
    "gemm-float": (lambda: GemmConfig(16.0, 32, 64), TypeError, "GemmConfig: block_m — need an"),
    "gemm-cache": (
        lambda: GemmConfig(16, 32, 64, weight_cache="evict"),
        ValueError,
        "GemmConfig: weight_cache — need one of",
    ),
    "cdna4-persistent": (
        lambda: Cdna4GemmConfig("prefill", 64, 256, persistent=1),
        TypeError,
        "Cdna4GemmConfig: persistent — need a bool, got 1",
    ),
    "cdna4-runs": (
        lambda: Cdna4GemmConfig("prefill", 64, 256, num_runs=0),
        ValueError,
        "Cdna4GemmConfig: num_runs — need an int of at least 1, got 0",
    ),
    "cdna4-cache": (
        lambda: Cdna4GemmConfig("decode", 16, 256, weight_cache=True),
        ValueError,
        "Cdna4GemmConfig: weight_cache — need one of",
    ),
    "cdna4-kernel": (
        lambda: Cdna4GemmConfig("dense", 16, 256),
        ValueError,
        "Cdna4GemmConfig: kernel — need one of",
    ),
    "cdna4-block": (
        lambda: Cdna4GemmConfig("decode", 16, 0),
        ValueError,
        "Cdna4GemmConfig: block_n — need an int of at least 1, got 0",
    ),
    "hopper-kernel": (lambda: HopperGemmConfig("dense", 8, 5), ValueError, "kernel — need one of"),
    "hopper-stages": (
        lambda: HopperGemmConfig("decode", 8, "5"),
        TypeError,
        "HopperGemmConfig: num_stages — need an int",
    ),
    "moe-stage": (lambda: MoEConfig(16, None, None), TypeError, "MoEConfig: gate_up — need a"),
    "moe-block": (lambda: MoEConfig(0, None, None), ValueError, "MoEConfig: routing_block_m"),
    "reference-type": (lambda: ReferenceConfig(torch.int32), TypeError, "accumulate — need"),
    "reference-block": (
        lambda: ReferenceConfig(routing_block_m=0),
        ValueError,
        "ReferenceConfig: routing_block_m — need an int of at least 1",
    ),
    "explain-op": (lambda: mxpert.explain([1]), ValueError, "explain: op — need one of"),
    "explain-missing": (
        lambda: mxpert.explain(mxpert.fused_moe, X, WEIGHTS, TOPK_WEIGHTS, IDS),
        TypeError,
        "fused_moe: activation — need an activation object",
    ),
    "explain-extra": (
        lambda: mxpert.explain(mxpert.moe_down, H, WEIGHTS, PLAN, activation=SiLU()),
        TypeError,
        "explain: arguments — need those of moe_down, got others: got an",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


FOREIGN = {"negative": -(2**31), "past-the-end": 4, "huge": 2**31 - 1}


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_ids_of_no_expert_add_nothing(value: int) -> None:
    ids = IDS.clone()
    ids[:, 1] = value
    alone = fused(ids=IDS[:, :1].contiguous(), topk_weights=TOPK_WEIGHTS[:, :1].contiguous())
    assert torch.equal(fused(ids=ids)(), alone())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: torch.stack([t, t], -1)[..., 0], id="every-other"),
        pytest.param(lambda t: t.mT.contiguous().mT, id="transposed"),
    ],
)
def test_strided_router_output_is_read_by_its_strides(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert torch.equal(fused(ids=make(IDS), topk_weights=make(TOPK_WEIGHTS))(), fused()())
