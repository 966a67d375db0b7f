"""fused_moe_from_logits: the MoE layer that chooses its experts from the router's logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core.gradient import without_backward
from ..core.ops import OpSpec
from ..core.problem import (
    ActivationFormat,
    ActivationLike,
    Combine,
    CombineLike,
    MoEProblem,
    TopKOptions,
)
from ..errors import Checks
from ..formats.spec import FLOAT_DTYPES, ScaleRule, ScaleRuleLike
from ..formats.tensor import MXTensor
from ..routing.op import choose_experts
from .checks import LogitsOptions, check_from_logits, moe_options
from .inputs import LogitsInputs
from .local_weights import require_ranks
from .op import fake_layer, layer_on_ranks, layer_problem
from .weights import MoEWeights

if TYPE_CHECKING:
    from ..distributed import ExpertParallel

_OP = "fused_moe_from_logits"


def fused_moe_from_logits(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    logits: torch.Tensor,
    top_k: int,
    *,
    activation: ActivationLike,
    activation_format: ActivationFormat = "bf16",
    routing: TopKOptions = TopKOptions(),
    correction_bias: torch.Tensor | None = None,
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
    """Choose the experts of each token and compute the MoE layer, in one call.

    The result has the bits of ``fused_moe(x, weights, *route_topk(logits, top_k, …), …)``. One call
    takes less time on the host, and a kernel may choose the experts in the launch of the layer. For
    inference: if x, logits or correction_bias require a gradient, backward raises.

    Args:
        x: bfloat16 [T, H], or an MXTensor [T, H] in the format of `activation_format`.
        weights: MoEWeights of the local experts, on the device of `x`.
        logits: float32, bfloat16 or float16 [T, E], of the router; E is the number of experts, with
            `expert_map` its length, with `expert_parallel` the experts of all ranks.
        top_k: experts per token, at most 127 and E.
        activation: as for `fused_moe`. Required.
        activation_format: as for `fused_moe`.
        routing: mxpert.TopKOptions: scoring, normalisation, groups, scaling, as for `route_topk`.
        correction_bias: float32 [E], added to the scores for the choice only, or None.
        combine: REDUCE (deterministic), ATOMIC, or a name.
        scale_rule: how scales of activations in MX formats follow from each block's maximum.
        apply_router_weight_on_input: multiply x by the routing weight, instead of the result.
        expert_map: int32 [E], global id to local id or −1 (expert parallelism).
        num_local_tokens: int32 [1] on the device; tokens at or beyond it are skipped.
        out_dtype: bfloat16, float16 or float32.
        out: as for `fused_moe`.
        expert_parallel: as for `fused_moe`; the experts are then chosen in a launch of their own.
        num_sms: as for `fused_moe`.

    Returns:
        [T, H] in `out_dtype`, or `out`; zero where no local expert was chosen.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value.
        UnsupportedError: a backward pass, or no backend serves this (mxpert.explain says why).
        PeerLostError: with `expert_parallel`: a rank died or did not arrive in time.

    Source:
        The monolithic expert interfaces of vLLM and FlashInfer, which take the router's logits.

    Example:
        >>> import torch, mxpert
        >>> weights = mxpert.quantize_weights(torch.randn(4, 64, 32), torch.randn(4, 32, 32),
        ...                                   gate_up_order="concatenated")
        >>> x, logits = torch.randn(3, 32).bfloat16(), torch.randn(3, 4)
        >>> y = mxpert.fused_moe_from_logits(x, weights, logits, top_k=2, activation="silu")
        >>> topk = mxpert.route_topk(logits, top_k=2)
        >>> torch.equal(y, mxpert.fused_moe(x, weights, *topk, activation="silu"))
        True
    """
    if not isinstance(routing, TopKOptions):
        raise Checks(_OP).type_error("routing", "an mxpert.TopKOptions", repr(routing))
    choices = scale_rule, apply_router_weight_on_input, combine, out_dtype, num_sms
    options = LogitsOptions(
        moe_options(_OP, activation, activation_format, *choices),
        top_k,
        routing.scoring,
        routing.normalize,
        routing.num_groups,
        routing.top_groups,
        routing.routed_scaling_factor,
        routing.group_score,
        routing.clamp_nan,
    )
    inputs = LogitsInputs(x, weights, logits, correction_bias, expert_map, num_local_tokens, out)
    if expert_parallel is not None:
        y = _on_ranks(expert_parallel, options, inputs)
    elif out is None:
        y = _FROM_LOGITS(options, inputs)
    else:
        _FROM_LOGITS_OUT(options, inputs)
        return out
    guard = torch.is_grad_enabled() and y is not out
    return without_backward(_OP, y, x, logits, correction_bias) if guard else y


def _on_ranks(ranks: ExpertParallel, options: LogitsOptions, inputs: LogitsInputs) -> torch.Tensor:
    """Choose the experts of this rank's tokens, then run the layer on all ranks."""
    require_ranks(_OP, ranks)
    logits, shape = inputs.logits, (None, ranks.placement.num_experts)
    Checks(_OP).tensor(logits, "logits", dtype=FLOAT_DTYPES, shape=shape)
    routed = choose_experts(logits, options.top_k, options.routing, inputs.correction_bias)
    return layer_on_ranks(_OP, ranks, options.options, inputs.with_ids(*routed))


def _describe(options: LogitsOptions, inputs: LogitsInputs) -> MoEProblem:
    layer = layer_problem(options.options, inputs, options.top_k)
    return replace(layer, routing=options.routing, num_routed=inputs.logits.shape[1])


def _fake(options: LogitsOptions, inputs: LogitsInputs) -> torch.Tensor:
    return fake_layer(options.options, inputs)


_FROM_LOGITS: OpSpec[LogitsOptions, LogitsInputs, torch.Tensor] = OpSpec(
    _OP, check=check_from_logits, describe=_describe, fake=_fake, absent=("out",)
)
_FROM_LOGITS_OUT: OpSpec[LogitsOptions, LogitsInputs, None] = OpSpec(
    f"{_OP}_out",
    check=check_from_logits,
    describe=_describe,
    fake=_fake,
    returns="()",
    mutates="out",
    is_public=False,
)
