"""Every public function with arguments that are right: what the fuzz starts from."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

import torch
from fuzz_arguments import (
    ACTIVATIONS,
    FLOATS,
    FROM_LOGITS,
    MXFP8_NAMES,
    NAMES,
    accumulate,
    activated,
    backward,
    codes,
    combined,
    gemm,
    groups,
    layer,
    layer_in_float64,
    linear,
    load_state,
    matmul,
    method,
    module,
    moe_weights,
    packed,
    pinned,
    planned,
    prepared,
    randn,
    recipes,
    routed,
    routed_in_float64,
    saved,
    second_stage,
    spanned,
    state,
    wgrad,
    whole_layer,
)
from fuzz_ranks import EXPERT_PARALLEL, RANKS
from fuzz_target import Target
from fuzz_values import PLAN, WEIGHTS
from fuzz_weights import ROUNDED
from special_case import exact_gemm

import mxpert
from mxpert import GateUpOrder, MoEWeights, MXTensor, ScaleRule, ScaleSpan
from mxpert import formats as mx
from mxpert.core.problem import ACTIVATION_FORMATS, TopKOptions
from mxpert.formats.spec import LINE_SPANS
from mxpert.modules import quantize_weights
from mxpert.moe.published_tensors import expert_weights_from, published_expert_tensors
from mxpert.training import MXFP8Recipe, MXGroupedLinear, MXMoE, grouped_linear, grouped_mm
from mxpert.training.activation import gated_activation
from mxpert.training.rows import op as rows

FOLDER = Path(tempfile.mkdtemp(prefix="mxpert-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


FORMATS = [
    Target(
        "quantize",
        mxpert.quantize,
        lambda r: dict(
            x=randn(r, 2, 32, 64, dtype=r.choice(FLOATS)),
            format=r.choice(NAMES),
            axis=r.choice((-1, 2, 1)),
            scale_rule=r.choice(list(ScaleRule)),
            scale_span=r.choice(("block", "square")),
        ),
        lambda a: mx.quantize_blocks(
            a["x"], a["format"], a["axis"], a["scale_rule"], span=a["scale_span"]
        ),
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
            scale_span=r.choice((*LINE_SPANS, (ScaleSpan.ROW, ScaleSpan.BLOCK))),
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
            span=r.choice(list(LINE_SPANS)),
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
        "WeightTensor",
        mx.WeightTensor,
        lambda r: dict(
            qdata=codes(r, 3, 32),
            scale=randn(r, 3, 2, dtype=r.choice(FLOATS)),
            format=r.choice((mx.INT4_G32, "int4_g32")),
            zero_point=r.choice((None, codes(r, 3, 2))),
            row_scale=None,
        ),
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
    Target("fused_moe_from_logits", mxpert.fused_moe_from_logits, *FROM_LOGITS, 0.03),
    Target(
        "warm_up",
        mxpert.warm_up,
        lambda r: dict(
            weights=moe_weights(r, 4, 32, 32), max_tokens=5, top_k=2, activation=mxpert.SiLU()
        ),
    ),
    Target("moe_gate_up", mxpert.moe_gate_up, lambda r: planned(layer(r))),
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
            backend="reference",
            config=r.choice((None, mxpert.configs.ReferenceConfig(torch.float64))),
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
    Target("SwiGLU", mxpert.SwiGLU, lambda r: dict(alpha=1.0, limit=7.0, beta=1.0)),
    Target("GELU", mxpert.GELU, lambda r: dict(approximate="tanh")),
    Target("ClampedSiLU", mxpert.ClampedSiLU, lambda r: dict(limit=7.0)),
    Target("SiTUv2", mxpert.SiTUv2, lambda r: dict(beta=1.0, beta_up=7.0)),
    Target(
        "GemmConfig",
        mxpert.configs.GemmConfig,
        lambda r: dict(
            **dict(block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=1, group_m=1),
            **dict(split_k=1, weight_cache="stream"),
        ),
    ),
    Target(
        "Cdna4GemmConfig",
        mxpert.configs.Cdna4GemmConfig,
        lambda r: dict(
            vars(mxpert.configs.Cdna4GemmConfig(mxpert.configs.Cdna4Kernel.DECODE, 32, 256))
        ),
    ),
    Target(
        "HopperGemmConfig",
        mxpert.configs.HopperGemmConfig,
        lambda r: dict(
            kernel=mxpert.configs.HopperKernel.PREFILL,
            block_m=32,
            num_stages=5,
            consumers=3,
            blocks_per_tile=2,
            k_splits=1,
            hi_lo=False,
        ),
    ),
    Target(
        "MoEConfig",
        mxpert.configs.MoEConfig,
        lambda r: dict(
            routing_block_m=16,
            gate_up=mxpert.configs.GemmConfig(16, 16, 32),
            down=mxpert.configs.GemmConfig(16, 16, 32),
        ),
    ),
    Target(
        "ReferenceConfig",
        mxpert.configs.ReferenceConfig,
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
    Target("grouped_gemm", mxpert.grouped_gemm, gemm, lambda a: exact_gemm(a)[0], 0.02),
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
                group_offsets=torch.tensor([0, 4] + [4] * (made.weight.shape[0] - 1)),
            ),
        ),
        lambda r: dict(
            num_groups=2,
            in_features=32,
            out_features=32,
            bias=r.random() < 0.5,
            group_ids=r.choice((None, [1], (0, 1))),
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
            expert_parallel=r.choice((None, EXPERT_PARALLEL)),
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
            weight_format=r.choice(("mxfp4", "mxfp8", "nvfp4", "int4_g32")),
            scale_rule=r.choice(list(ScaleRule)),
            device=None,
        ),
    ),
]

TARGETS = [*MODULES, *FORMATS, *ROUNDED, *LAYERS, *TRAINING, *RANKS]
