"""The two-stage MoE layer: fused_moe, and its stages moe_gate_up and moe_down.

Each public op checks its arguments and calls a registered leaf; the leaf describes the problem,
resolves a kernel and launches it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..dispatch import Calls, detect_target
from ..formats.spec import ScaleRule
from ..formats.tensor import MXTensor
from ..problem import Activation, Combine, MoEOptions, MoEProblem, Op, SiLU, activation_mx_format
from ..routing import RoutingPlan
from ..weights import MoEWeights
from . import library
from .library import NUM_OPTION_ARGUMENTS, NUM_PLAN_ARGUMENTS, NUM_WEIGHT_ARGUMENTS
from .moe_checks import check_down, check_fused_moe, check_gate_up, moe_options

_FUSED_MOE, _GATE_UP, _DOWN = Calls(), Calls(), Calls()

_kept_problem = functools.lru_cache(8192)(MoEProblem)
"""One object for one problem: the caches below find it by identity."""


def fused_moe(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    activation_format: str = "bf16",
    combine: Combine = Combine.REDUCE,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute a whole MoE layer with MXFP4 weights.

    The op sorts tokens by expert, runs the gate/up GEMM, the activation and the down GEMM, and
    adds each token's rows:

    ``y[t] = Σ_slot w[t, slot] · (act(x[t] · Wgu[e]ᵀ + bgu[e]) · Wd[e]ᵀ + bd[e])`` with
    ``e = ids[t, slot]``.

    For inference: the result has no gradient, even where inputs require one.

    Args:
        x: bfloat16 [T, H], or an MXTensor [T, H] in the format of `activation_format`.
        weights: MoEWeights of the local experts, on the device of `x`.
        topk_weights: float32 [T, k], routing weights.
        topk_ids: int32 [T, k], expert ids; negative and foreign ids are skipped.
        activation: SiLU(), SwiGLU(alpha, limit), ClampedSiLU(limit) or SiTUv2(beta, beta_up).
        activation_format: "bf16" or "a16w4", "mxfp8" or "a8w4", "mxfp4" or "a4w4". The MX formats
            quantise x and the intermediate with 1×32 scales. "fp8_token" quantises each row to e4m3
            with one float32 scale (amax / 448, see mxpert.formats.quantize_token_rows); x is then
            bfloat16.
        combine: REDUCE (deterministic) or ATOMIC.
        scale_rule: how scales of activations in MX formats follow from each block's maximum.
        apply_router_weight_on_input: multiply x by the routing weight, instead of the result.
        expert_map: int32 [E_global], global id to local id or −1 (expert parallelism).
        num_local_tokens: int32 [1] on the device; tokens at or beyond it are skipped.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        [T, H] in `out_dtype`; zero where no local expert was chosen.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Source:
        The fused MoE layers of vLLM and AITER; gpt-oss (arXiv 2508.10925) for MXFP4 experts.

    Example:
        >>> import torch, mxpert
        >>> w = lambda *s: mxpert.quantize(torch.randn(*s), "mxfp4")
        >>> weights = mxpert.MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
        ...                             gate_up_order=mxpert.GateUpOrder.INTERLEAVED)
        >>> topk_weights, topk_ids = mxpert.route_topk(torch.randn(3, 4), top_k=2)
        >>> x = torch.randn(3, 32, dtype=torch.bfloat16)
        >>> mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation=mxpert.SiLU()).shape
        torch.Size([3, 32])
    """
    options = moe_options(
        "fused_moe",
        activation,
        activation_format,
        scale_rule,
        apply_router_weight_on_input,
        combine,
        out_dtype,
    )
    if library.is_unobserved(topk_weights):
        return _call_fused_moe(
            x, topk_weights, topk_ids, expert_map, num_local_tokens, weights, options
        )
    check_fused_moe(x, weights, topk_weights, topk_ids, options, expert_map, num_local_tokens)
    return _fused_moe_op(
        *_flatten_rows(x),
        topk_weights,
        topk_ids,
        expert_map,
        num_local_tokens,
        *library.flatten_weights(weights),
        *library.flatten_options(options),
    )


def moe_gate_up(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    plan: RoutingPlan,
    *,
    activation: Activation,
    activation_format: str = "bf16",
    scale_rule: ScaleRule = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor | MXTensor:
    """Compute stage 1 of an MoE layer: gate/up GEMM, bias, activation, quantisation.

    ``h[r] = act(x[token(r)] · Wgu[e]ᵀ + bgu[e])`` for each sorted row r of expert e.

    For inference: the result has no gradient, even where inputs require one.

    Args:
        x: bfloat16 [T, H], or an MXTensor [T, H] in the format of `activation_format`.
        weights: MoEWeights of the local experts, on the device of `x`.
        plan: the RoutingPlan of these T tokens.
        activation: SiLU(), SwiGLU(alpha, limit), ClampedSiLU(limit) or SiTUv2(beta, beta_up).
        activation_format: format of the GEMM's inputs and of the result, as in `fused_moe`.
        scale_rule: how scales of activations in MX formats follow from each block's maximum.
        apply_router_weight_on_input: multiply x by the routing weight here; tell `moe_down` too.

    Returns:
        The intermediate [P, F] in sorted order: an MXTensor in an MX `activation_format`, bfloat16
        for "bf16" and "fp8_token" (`moe_down` quantises the rows then, given the same format).
        Padding rows are undefined.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Source:
        Stage 1 of AITER's two-stage fused MoE.

    Example:
        >>> import torch, mxpert
        >>> w = lambda *s: mxpert.quantize(torch.randn(*s), "mxfp4")
        >>> weights = mxpert.MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
        ...                             gate_up_order=mxpert.GateUpOrder.CONCATENATED)
        >>> topk_weights, topk_ids = mxpert.route_topk(torch.randn(3, 4), top_k=2)
        >>> plan = mxpert.make_routing_plan(topk_weights, topk_ids, num_experts=4,
        ...                                 routing_block_m=16)
        >>> x = torch.randn(3, 32, dtype=torch.bfloat16)
        >>> h = mxpert.moe_gate_up(x, weights, plan, activation=mxpert.SiLU())
        >>> mxpert.moe_down(h, weights, plan).shape
        torch.Size([3, 32])
    """
    options = moe_options(
        "moe_gate_up", activation, activation_format, scale_rule, apply_router_weight_on_input
    )
    if _is_unobserved(plan):
        return _call_gate_up(x, weights, plan, options)
    check_gate_up(x, weights, plan, options)
    h, h_scale = _gate_up_op(
        *_flatten_rows(x),
        *library.flatten_weights(weights),
        *library.flatten_plan(plan),
        *library.flatten_options(options),
    )
    format = activation_mx_format(options.activation_format, "moe_gate_up")
    return h if format is None else library.rebuild_mx(h, h_scale, format.name)


def moe_down(
    h: torch.Tensor | MXTensor,
    weights: MoEWeights,
    plan: RoutingPlan,
    *,
    activation_format: str | None = None,
    combine: Combine = Combine.REDUCE,
    apply_router_weight_on_input: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute stage 2 of an MoE layer: down GEMM, bias, routing weight, combine.

    ``y[t] = Σ_slot w[t, slot] · (h[row(t, slot)] · Wd[e]ᵀ + bd[e])``.

    For inference: the result has no gradient, even where inputs require one.

    Args:
        h: the result of `moe_gate_up`: [P, F] in sorted order, bfloat16 or an MXTensor.
        weights: MoEWeights of the local experts, on the device of `h`.
        plan: the RoutingPlan that stage 1 used.
        activation_format: None takes the format of `h`. "fp8_token" quantises bfloat16 rows to
            e4m3 with one float32 scale each.
        combine: REDUCE, ATOMIC, or FLAT for the weighted rows [P, H] in sorted order.
        apply_router_weight_on_input: True if stage 1 has applied the routing weight.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        [T, H]; for FLAT [P, H], whose padding rows are undefined.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Source:
        Stage 2 of AITER's two-stage fused MoE.

    Example:
        >>> import torch, mxpert
        >>> w = lambda *s: mxpert.quantize(torch.randn(*s), "mxfp4")
        >>> weights = mxpert.MoEWeights(gate_up_proj=w(2, 64, 32), down_proj=w(2, 32, 32),
        ...                             gate_up_order=mxpert.GateUpOrder.CONCATENATED)
        >>> topk_ids = torch.tensor([[1]], dtype=torch.int32)
        >>> plan = mxpert.make_routing_plan(torch.ones(1, 1), topk_ids, num_experts=2,
        ...                                 routing_block_m=16)
        >>> h = torch.zeros(plan.capacity, 32, dtype=torch.bfloat16)
        >>> mxpert.moe_down(h, weights, plan, combine=mxpert.Combine.FLAT).shape
        torch.Size([32, 32])
    """
    # Stage 2 applies no activation; its options hold one all the same.
    options = moe_options(
        "moe_down",
        SiLU(),
        _rows_format(h, activation_format),
        ScaleRule.RCEIL,
        apply_router_weight_on_input,
        combine,
        out_dtype,
    )
    if _is_unobserved(plan):
        return _call_down(h, weights, plan, options)
    check_down(h, weights, plan, options)
    return _down_op(
        *_flatten_rows(h),
        *library.flatten_weights(weights),
        *library.flatten_plan(plan),
        *library.flatten_options(options),
    )


def describe_fused_moe(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    **options: Any,
) -> MoEProblem:
    """The problem that `fused_moe` resolves for the same arguments."""
    return _fused_moe_problem(
        x,
        weights,
        topk_weights,
        topk_ids,
        moe_options("fused_moe", **options),
        expert_map,
        num_local_tokens,
    )


def describe_gate_up(
    x: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, **options: Any
) -> MoEProblem:
    """The problem that `moe_gate_up` resolves for the same arguments."""
    return _gate_up_problem(x, weights, plan, moe_options("moe_gate_up", **options))


def describe_down(
    h: torch.Tensor | MXTensor,
    weights: MoEWeights,
    plan: RoutingPlan,
    *,
    activation_format: str | None = None,
    **options: Any,
) -> MoEProblem:
    """The problem that `moe_down` resolves for the same arguments."""
    chosen = moe_options("moe_down", SiLU(), _rows_format(h, activation_format), **options)
    return _down_problem(h, weights, plan, chosen)


def _fused_moe_problem(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    options: MoEOptions,
    expert_map: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
) -> MoEProblem:
    check_fused_moe(x, weights, topk_weights, topk_ids, options, expert_map, num_local_tokens)
    num_tokens, top_k = topk_ids.shape
    return _problem(Op.FUSED_MOE, weights, num_tokens, top_k, options)


def _gate_up_problem(
    x: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions
) -> MoEProblem:
    check_gate_up(x, weights, plan, options)
    return _problem(
        Op.MOE_GATE_UP, weights, plan.num_tokens, plan.top_k, options, plan.routing_block_m
    )


def _down_problem(
    h: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions
) -> MoEProblem:
    check_down(h, weights, plan, options)
    return _problem(
        Op.MOE_DOWN, weights, plan.num_tokens, plan.top_k, options, plan.routing_block_m
    )


def _problem(
    op: Op,
    weights: MoEWeights,
    num_tokens: int,
    top_k: int,
    options: MoEOptions,
    routing_block_m: int = 0,
) -> MoEProblem:
    experts, hidden, intermediate = weights.down_proj.shape
    return _kept_problem(
        op,
        detect_target(weights.device),
        num_tokens,
        top_k,
        experts,
        hidden,
        intermediate,
        options,
        weights.layout,
        routing_block_m,
    )


def _is_unobserved(plan: RoutingPlan) -> bool:
    return isinstance(plan, RoutingPlan) and library.is_unobserved(plan.sorted_weights)


def _rows_format(rows: torch.Tensor | MXTensor, named: str | None) -> str:
    """The `activation_format` that was named, else what `rows` are: "bf16", "mxfp8" or "mxfp4"."""
    if named is not None:
        return named
    return rows.format.name.split("_")[0] if isinstance(rows, MXTensor) else "bf16"


def _flatten_rows(rows: torch.Tensor | MXTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (rows.qdata, rows.scale) if isinstance(rows, MXTensor) else (rows, None)


def _rebuild_rows(
    data: torch.Tensor, scale: torch.Tensor | None, options: MoEOptions
) -> torch.Tensor | MXTensor:
    if scale is None:
        return data
    return library.rebuild_mx(
        data, scale, {"mxfp8": "mxfp8_e4m3"}.get(options.activation_format, "mxfp4")
    )


def _call_fused_moe(
    x: torch.Tensor | MXTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
    weights: MoEWeights,
    options: MoEOptions,
) -> torch.Tensor:
    y: torch.Tensor = _FUSED_MOE.launch(
        options,
        (),
        dict(
            x=x,
            weights=weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            num_local_tokens=num_local_tokens,
        ),
        lambda: _fused_moe_problem(
            x, weights, topk_weights, topk_ids, options, expert_map, num_local_tokens
        ),
    )
    return y


def _run_fused_moe(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
    *flat: Any,
) -> torch.Tensor:
    weights = library.rebuild_weights(flat[:NUM_WEIGHT_ARGUMENTS])
    options = library.rebuild_options("fused_moe", flat[NUM_WEIGHT_ARGUMENTS:])
    return _call_fused_moe(
        _rebuild_rows(x, x_scale, options),
        topk_weights,
        topk_ids,
        expert_map,
        num_local_tokens,
        weights,
        options,
    )


def _fake_fused_moe(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
    *flat: Any,
) -> torch.Tensor:
    hidden_size, out_dtype = flat[NUM_WEIGHT_ARGUMENTS - 2], flat[-1]
    return x.new_empty((topk_ids.shape[0], hidden_size), dtype=out_dtype)


def _stage_arguments(op: str, flat: tuple[Any, ...]) -> tuple[MoEWeights, RoutingPlan, MoEOptions]:
    plan_end = NUM_WEIGHT_ARGUMENTS + NUM_PLAN_ARGUMENTS
    return (
        library.rebuild_weights(flat[:NUM_WEIGHT_ARGUMENTS]),
        library.rebuild_plan(flat[NUM_WEIGHT_ARGUMENTS:plan_end]),
        library.rebuild_options(op, flat[plan_end : plan_end + NUM_OPTION_ARGUMENTS]),
    )


def _call_gate_up(
    x: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions
) -> torch.Tensor | MXTensor:
    h: torch.Tensor | MXTensor = _GATE_UP.launch(
        options,
        (),
        dict(x=x, weights=weights, plan=plan),
        lambda: _gate_up_problem(x, weights, plan, options),
    )
    return h


def _run_gate_up(
    x: torch.Tensor, x_scale: torch.Tensor | None, *flat: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, plan, options = _stage_arguments("moe_gate_up", flat)
    h = _call_gate_up(_rebuild_rows(x, x_scale, options), weights, plan, options)
    return (h.qdata, h.scale) if isinstance(h, MXTensor) else (h, h.new_empty(0))


def _fake_gate_up(
    x: torch.Tensor, x_scale: torch.Tensor | None, *flat: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, plan, options = _stage_arguments("moe_gate_up", flat)
    rows, features = plan.sorted_token_ids.shape[0], weights.intermediate_size
    format = activation_mx_format(options.activation_format, "moe_gate_up")
    if format is None:
        h = x.new_empty((rows, features), dtype=torch.bfloat16)
        return h, h.new_empty(0)
    return (
        x.new_empty((rows, features // format.codes_per_byte), dtype=torch.uint8),
        x.new_empty((rows, features // format.block_size), dtype=torch.uint8),
    )


def _call_down(
    h: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions
) -> torch.Tensor:
    y: torch.Tensor = _DOWN.launch(
        options,
        (),
        dict(h=h, weights=weights, plan=plan),
        lambda: _down_problem(h, weights, plan, options),
    )
    return y


def _run_down(h: torch.Tensor, h_scale: torch.Tensor | None, *flat: Any) -> torch.Tensor:
    weights, plan, options = _stage_arguments("moe_down", flat)
    return _call_down(_rebuild_rows(h, h_scale, options), weights, plan, options)


def _fake_down(h: torch.Tensor, h_scale: torch.Tensor | None, *flat: Any) -> torch.Tensor:
    weights, plan, options = _stage_arguments("moe_down", flat)
    rows = h.shape[0] if options.combine is Combine.FLAT else plan.num_tokens
    return h.new_empty((rows, weights.hidden_size), dtype=options.out_dtype)


_STAGE_SCHEMA = f"{library.WEIGHTS_SCHEMA}, {library.PLAN_SCHEMA}, {library.OPTIONS_SCHEMA}"
_fused_moe_op = library.register(
    "fused_moe(Tensor x, Tensor? x_scale, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, Tensor? num_local_tokens, "
    f"{library.WEIGHTS_SCHEMA}, {library.OPTIONS_SCHEMA}) -> Tensor",
    _run_fused_moe,
    _fake_fused_moe,
)
_gate_up_op = library.register(
    f"moe_gate_up(Tensor x, Tensor? x_scale, {_STAGE_SCHEMA}) -> (Tensor, Tensor)",
    _run_gate_up,
    _fake_gate_up,
)
_down_op = library.register(
    f"moe_down(Tensor h, Tensor? h_scale, {_STAGE_SCHEMA}) -> Tensor", _run_down, _fake_down
)
