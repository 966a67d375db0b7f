"""The two-stage MoE layer: fused_moe, and its stages moe_gate_up and moe_down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Never, cast

import torch

from ..core.calls import launch
from ..core.geometry import CachedCall, tensors_of
from ..core.gradient import without_backward
from ..core.ops import OpSpec
from ..core.problem import (
    Activation,
    ActivationFormat,
    ActivationLike,
    Combine,
    CombineLike,
    MoEOptions,
    MoEProblem,
    Op,
    SiLU,
)
from ..core.registry import resolve_cached
from ..core.schema import rebuild_mx
from ..core.target import detect_target
from ..errors import message
from ..formats.spec import ScaleRule, ScaleRuleLike
from ..formats.tensor import MXTensor, Operand
from ..routing.plan import RoutingPlan
from .checks import (
    ReceivedOptions,
    check_down,
    check_fused_moe,
    check_gate_up,
    check_received,
    moe_options,
    refuse_foreign_call,
)
from .inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs
from .local_weights import require_ranks
from .weights import MoEWeights

if TYPE_CHECKING:
    from ..distributed import ExpertParallel

_NO_ACTIVATION = SiLU()
"""Stage 2 applies no activation; its options hold one all the same."""
REQUIRED = cast("Activation", None)
"""Default of an argument that must be given: the error of a call without it is ours."""


def fused_moe(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *others: Never,
    activation: ActivationLike = REQUIRED,
    activation_format: ActivationFormat = "bf16",
    combine: CombineLike = Combine.REDUCE,
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    expert_parallel: ExpertParallel | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """Compute a whole MoE layer with MXFP4 weights.

    Sorts tokens by expert, runs both GEMMs and the activation, and adds each token's rows:

    ``y[t] = Σ_slot w[t, slot] · (act(x[t] · Wgu[e]ᵀ + bgu[e]) · Wd[e]ᵀ + bd[e])`` with
    ``e = ids[t, slot]``. For inference: if x or topk_weights require a gradient, backward raises.

    Args:
        x: bfloat16 [T, H], or an MXTensor [T, H] in the format of `activation_format`.
        weights: MoEWeights of the local experts, on the device of `x`.
        topk_weights: float32, bfloat16 or float16 [T, k], routing weights; used in float32.
        topk_ids: int32 or int64 [T, k], expert ids; negative and foreign ids are skipped.
        others: none.
        activation: SiLU(), SwiGLU(alpha, limit, beta), ClampedSiLU(limit), SiTUv2(beta, beta_up),
            GELU(approximate), ReLU2() for weights without a gate; or a name: "silu", "swiglu" or
            "swigluoai" (SwiGLU(1.702, 7)), "clamped_silu", "situ_v2", "gelu", "gelu_tanh" or
            "gelu_pytorch_tanh" (GELU("tanh")), "relu2". Required.
        activation_format: "bf16" or "a16w4", "mxfp8" or "a8w4", "mxfp4" or "a4w4". The MX formats
            quantise x and the intermediate with 1×32 scales. "fp8_token" or "a8w4-token" quantises
            each row of a bfloat16 x as mxpert.formats.quantize_token_rows: e4m3, one scale each.
        combine: REDUCE (deterministic), ATOMIC, or a name.
        scale_rule: how scales of activations in MX formats follow from each block's maximum.
        apply_router_weight_on_input: multiply x by the routing weight, instead of the result.
        expert_map: int32 [E_global], global id to local id or −1 (expert parallelism).
        num_local_tokens: int32 [1] on the device; tokens at or beyond it are skipped.
        out_dtype: bfloat16, float16 or float32.
        out: contiguous [T, H] in `out_dtype` to write; may be `x` or share its memory, because x is
            read before the first row is written. None allocates.
        expert_parallel: an ExpertParallel; its ranks call together with their experts and tokens.
        num_sms: most SMs that each GEMM occupies, to leave the others to communication beside it; 1
            to those of the device. None is all of them. Every number gives the same bits. The short
            kernels around the GEMMs are not limited. Kernels without a persistent grid refuse it;
            docs/training.md lists them.

    Returns:
        [T, H] in `out_dtype`, or `out`; zero where no local expert was chosen.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value.
        UnsupportedError: a backward pass, or no backend serves this (mxpert.explain says why).
        PeerLostError: with `expert_parallel`: a rank died or did not arrive in time.

    Source:
        The fused MoE layers of vLLM and AITER; gpt-oss (arXiv 2508.10925) for MXFP4 experts.

    Example:
        >>> import torch, mxpert
        >>> weights = mxpert.quantize_weights(torch.randn(4, 64, 32), torch.randn(4, 32, 32),
        ...                                   gate_up_order="concatenated")
        >>> x, topk = torch.randn(3, 32).bfloat16(), mxpert.route_topk(torch.randn(3, 4), top_k=2)
        >>> mxpert.fused_moe(x, weights, *topk, activation="silu").shape
        torch.Size([3, 32])
    """
    if others or activation is REQUIRED:
        refuse_foreign_call((x, weights, topk_weights, topk_ids, *others))
    choices = scale_rule, apply_router_weight_on_input, combine, out_dtype, num_sms
    options = moe_options("fused_moe", activation, activation_format, *choices)
    inputs = FusedMoEInputs(x, weights, topk_weights, topk_ids, expert_map, num_local_tokens, out)
    if expert_parallel is not None:
        y = layer_on_ranks("fused_moe", expert_parallel, options, inputs)
    elif out is None:
        y = _FUSED_MOE(options, inputs)
    else:
        _FUSED_MOE_OUT(options, inputs)
        return out
    guard = torch.is_grad_enabled() and y is not out
    return without_backward("fused_moe", y, x, topk_weights) if guard else y


def fused_moe_received(
    inputs: FusedMoEInputs,
    options: MoEOptions,
    local_top_k: float,
    caller: CachedCall | None = None,
) -> torch.Tensor:
    """Run `fused_moe` on the rows that other ranks sent, with this rank's experts.

    Args:
        inputs: contiguous x [R, H], weights of this rank's experts, topk_weights and local ids
            [R, k]; a row may have more ids than there are local experts, −1 for those that lie
            elsewhere.
        options: of the local layer; `moe_options` makes them.
        local_top_k: expected ids of a row that are not −1; configs follow it, results do not.
        caller: the call of the whole layer, if there is one. It keeps the call of the last local
            layer, so that rows of the same shape are neither checked nor looked up again.

    Returns:
        [R, H] in ``options.out_dtype``: the weighted sum over this rank's experts.
    """
    received = ReceivedOptions(options, local_top_k)
    if caller is None:
        return _FUSED_MOE_RECEIVED(received, inputs)
    call, num_rows = caller.inner, inputs.topk_ids.shape[0]
    known = None if call is None else call.problem
    if call is None or not (isinstance(known, MoEProblem) and known.num_tokens == num_rows):
        call = caller.inner = _FUSED_MOE_RECEIVED.checked_call(received, inputs)
    kernel, config = resolve_cached(call)
    found = tensors_of(_FUSED_MOE_RECEIVED.values(inputs))
    tensors = None if found is None else found[0]
    result: torch.Tensor = launch(kernel, config, call, tensors, inputs)
    return result


_REMEDY_ON_RANKS = {
    "expert_map": "give ExpertParallel a Placement",
    "num_local_tokens": "pass this rank's tokens alone",
}


def layer_on_ranks(
    op: str, ranks: ExpertParallel, options: MoEOptions, inputs: FusedMoEInputs
) -> torch.Tensor:
    """Run a layer on several ranks, which takes neither an expert map nor a number of tokens."""
    require_ranks(op, ranks)
    for name, remedy in _REMEDY_ON_RANKS.items():
        if getattr(inputs, name) is not None:
            raise ValueError(message(op, name, "None with expert_parallel", "a tensor", remedy))
    return ranks.run_layer(options, inputs)


def moe_gate_up(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    plan: RoutingPlan,
    *,
    activation: ActivationLike,
    activation_format: ActivationFormat = "bf16",
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
    num_sms: int | None = None,
) -> torch.Tensor | MXTensor:
    """Compute stage 1 of an MoE layer: gate/up GEMM, bias, activation, quantisation.

    ``h[r] = act(x[token(r)] · Wgu[e]ᵀ + bgu[e])`` for each sorted row r of expert e.

    For inference: where an input requires a gradient, a backward pass raises.

    Args:
        x: bfloat16 [T, H], or an MXTensor [T, H] in the format of `activation_format`.
        weights: MoEWeights of the local experts, on the device of `x`.
        plan: the RoutingPlan of these T tokens.
        activation: as for `fused_moe`.
        activation_format: format of the GEMM's inputs and of the result, as in `fused_moe`.
        scale_rule: how scales of activations in MX formats follow from each block's maximum.
        apply_router_weight_on_input: multiply x by the routing weight here; tell `moe_down` too.
        num_sms: as for `fused_moe`.

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
        "moe_gate_up",
        activation,
        activation_format,
        scale_rule,
        apply_router_weight_on_input,
        num_sms=num_sms,
    )
    h = _GATE_UP(options, GateUpInputs(x, weights, plan))
    return h if isinstance(h, MXTensor) else without_backward("moe_gate_up", h, x)


def moe_down(
    h: torch.Tensor | MXTensor,
    weights: MoEWeights,
    plan: RoutingPlan,
    *,
    activation_format: ActivationFormat | None = None,
    combine: CombineLike = Combine.REDUCE,
    apply_router_weight_on_input: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
) -> torch.Tensor:
    """Compute stage 2 of an MoE layer: down GEMM, bias, routing weight, combine.

    ``y[t] = Σ_slot w[t, slot] · (h[row(t, slot)] · Wd[e]ᵀ + bd[e])``.

    For inference: where an input requires a gradient, a backward pass raises.

    Args:
        h: the result of `moe_gate_up`: [P, F] in sorted order, bfloat16 or an MXTensor.
        weights: MoEWeights of the local experts, on the device of `h`.
        plan: the RoutingPlan that stage 1 used.
        activation_format: None takes the format of `h`. "fp8_token" quantises bfloat16 rows to
            e4m3 with one float32 scale each.
        combine: REDUCE, ATOMIC, or FLAT for the weighted rows [P, H] in sorted order; or its name.
        apply_router_weight_on_input: True if stage 1 has applied the routing weight.
        out_dtype: bfloat16, float16 or float32.
        num_sms: as for `fused_moe`.

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
    options = moe_options(
        "moe_down",
        _NO_ACTIVATION,
        _rows_format(h, activation_format),
        ScaleRule.RCEIL,
        apply_router_weight_on_input,
        combine,
        out_dtype,
        num_sms,
    )
    return without_backward("moe_down", _DOWN(options, DownInputs(h, weights, plan)), h)


def _problem_with_ids(options: MoEOptions, inputs: FusedMoEInputs) -> MoEProblem:
    return layer_problem(options, inputs, inputs.topk_ids.shape[1])


def layer_problem(options: MoEOptions, inputs: LayerInputs, top_k: int) -> MoEProblem:
    """The problem of a layer of one rank, without its choice of experts."""
    weights, expert_map, local_top_k = inputs.weights, inputs.expert_map, None
    if expert_map is not None and expert_map.shape[0] > weights.num_experts:
        local_top_k = top_k * weights.num_experts / expert_map.shape[0]
    tokens = inputs.x.shape[0], top_k
    return moe_problem(Op.FUSED_MOE, options, weights, *tokens, local_top_k=local_top_k)


def _received_problem(options: ReceivedOptions, inputs: FusedMoEInputs) -> MoEProblem:
    (layer, local_top_k), weights = options, inputs.weights
    num_rows, top_k = inputs.topk_ids.shape
    return moe_problem(Op.FUSED_MOE, layer, weights, num_rows, top_k, local_top_k=local_top_k)


def _gate_up_problem(options: MoEOptions, inputs: GateUpInputs) -> MoEProblem:
    plan = inputs.plan
    sizes = plan.num_tokens, plan.top_k, plan.routing_block_m
    return moe_problem(Op.MOE_GATE_UP, options, inputs.weights, *sizes)


def _down_problem(options: MoEOptions, inputs: DownInputs) -> MoEProblem:
    plan = inputs.plan
    sizes = plan.num_tokens, plan.top_k, plan.routing_block_m
    return moe_problem(Op.MOE_DOWN, options, inputs.weights, *sizes)


def moe_problem(
    op: Op,
    options: MoEOptions,
    weights: MoEWeights,
    num_tokens: int,
    top_k: int,
    routing_block_m: int = 0,
    local_top_k: float | None = None,
) -> MoEProblem:
    """The problem of a layer or a stage with these weights, on their device."""
    experts, hidden, intermediate = weights.down_proj.shape
    return MoEProblem(
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
        local_top_k,
        weights.weight_format,
    )


def _rows_format(rows: Operand, named: str | None) -> str:
    """The `activation_format` that was named, else what `rows` are: "bf16", "mxfp8" or "mxfp4"."""
    if named is not None:
        return named
    return rows.format.name.split("_")[0] if isinstance(rows, MXTensor) else "bf16"


def fake_layer(options: MoEOptions, inputs: LayerInputs) -> torch.Tensor:
    """An empty result of a layer, on one rank or several."""
    like = inputs.topk_ids if isinstance(inputs, FusedMoEInputs) else inputs.logits
    shape = like.shape[0], inputs.weights.hidden_size
    return like.new_empty(shape, dtype=options.out_dtype)


def _fake_gate_up(options: MoEOptions, inputs: GateUpInputs) -> list[torch.Tensor]:
    rows, features = inputs.plan.capacity, inputs.weights.intermediate_size
    format, new = options.mx_format, inputs.plan.sorted_token_ids.new_empty
    if format is None:
        return [new((rows, features), dtype=torch.bfloat16)]
    widths = features // format.codes_per_byte, features // format.block_size
    return [new((rows, width), dtype=torch.uint8) for width in widths]


def _build_gate_up(
    tensors: Sequence[torch.Tensor], options: MoEOptions, inputs: GateUpInputs
) -> Operand:
    format = options.mx_format
    return tensors[0] if format is None else rebuild_mx(tensors[0], tensors[1], format.name)


def _fake_down(options: MoEOptions, inputs: DownInputs) -> torch.Tensor:
    rows = inputs.h.shape[0] if options.combine is Combine.FLAT else inputs.plan.num_tokens
    shape = rows, inputs.weights.hidden_size
    return inputs.plan.sorted_weights.new_empty(shape, dtype=options.out_dtype)


_FUSED_MOE: OpSpec[MoEOptions, FusedMoEInputs, torch.Tensor] = OpSpec(
    "fused_moe",
    check=check_fused_moe,
    describe=_problem_with_ids,
    fake=fake_layer,
    absent=("out", "arrivals"),
)
_FUSED_MOE_OUT: OpSpec[MoEOptions, FusedMoEInputs, None] = OpSpec(
    "fused_moe_out",
    check=check_fused_moe,
    describe=_problem_with_ids,
    fake=fake_layer,
    absent=("arrivals",),
    returns="()",
    mutates="out",
    is_public=False,
)
_FUSED_MOE_RECEIVED: OpSpec[ReceivedOptions, FusedMoEInputs, torch.Tensor] = OpSpec(
    "fused_moe_received",
    check=check_received,
    describe=_received_problem,
    fake=lambda received, inputs: fake_layer(received.options, inputs),
    absent=("out", "arrivals"),
    is_public=False,
)
_GATE_UP: OpSpec[MoEOptions, GateUpInputs, Operand] = OpSpec(
    "moe_gate_up",
    check=check_gate_up,
    describe=_gate_up_problem,
    fake=_fake_gate_up,
    returns="Tensor[]",
    build=_build_gate_up,
)
_DOWN: OpSpec[MoEOptions, DownInputs, torch.Tensor] = OpSpec(
    "moe_down", check=check_down, describe=_down_problem, fake=_fake_down, absent=("out",)
)
