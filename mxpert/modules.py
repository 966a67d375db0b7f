"""Inference modules: `MoE`, a whole MoE layer, beside `PreparedExperts`, its experts alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .core.ambient import isolated
from .core.problem import (
    ActivationFormat,
    ActivationLike,
    SiLU,
    TopKOptions,
    parse_activation,
    parse_activation_format,
)
from .distributed import ExpertParallel
from .errors import message, require, require_tensor
from .formats.spec import FLOAT_DTYPES
from .formats.tensor import Layout
from .moe.checks import check_weight_on_input
from .moe.local_weights import local_weights
from .moe.prepared_experts import PreparedExperts as PreparedExperts
from .moe.prepared_weights import check_keep_fp8
from .moe.requantize import requantize_ as requantize_
from .moe.stacked import quantize_weights as quantize_weights
from .moe.weights import MoEWeights
from .routing.op import check_route_topk, choose_experts

_has_global_hooks: Callable[[], object] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", lambda: True
)
"""Whether hooks of all modules are set; it is not public."""
_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class MoE(torch.nn.Module):
    """An MoE layer for inference: router, MXFP4 experts, activation.

    ``y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`` over the `top_k` experts that
    `route_topk` chooses by ``x · router_weightᵀ + router_bias``. The router computes in the dtype
    of its weight.

    The state dict holds ``router.weight``, ``router.bias``, ``correction_bias`` and, below
    ``experts.``, the published MXFP4 tensors: the names of gpt-oss's layers. ``.to(device)``
    prepares the experts for the new device. ``.to(dtype)`` leaves float32 routing parameters
    alone: rounding them would choose other experts.

    With `expert_parallel` the experts lie on several ranks, and the router is whole on each. Every
    rank calls the module at the same time with its own tokens, also with none, and gets their
    results. ``state_dict`` has the rank's experts; ``load_state_dict`` takes these, or all experts,
    of which it takes its part. `mxpert.training.full_state_dict` collects all of them.

    Args:
        weights: MoEWeights, from a checkpoint or from `quantize_weights`; prepared or not. With
            `expert_parallel`: this rank's experts in the order of ``ep.local_experts``, or all E of
            the layer, of which the module keeps a copy of this rank's.
        router_weight: bfloat16, float16 or float32 [E, H], on the device of `weights`.
        top_k: experts per token.
        activation: SiLU(), SwiGLU(), … or a name, as `fused_moe` takes it.
        activation_format: "bf16" or "a16w4", "mxfp8" or "a8w4", "mxfp4" or "a4w4", "fp8_token" or
            "a8w4-token"; see `fused_moe`.
        router_bias: [E] in the dtype of `router_weight`, added to the logits, or None.
        correction_bias: float32 [E], added to the scores for the choice only, or None.
        routing: mxpert.TopKOptions: scoring, groups and scaling, as for `route_topk`.
        apply_router_weight_on_input: multiply x by the routing weight, instead of the experts'
            result; with ``top_k=1`` alone. Llama 4 does, and scores by an unnormalised sigmoid.
        expert_parallel: a mxpert.distributed.ExpertParallel with the layer's sizes, on the device
            of `weights`; None for all experts in this process.
        num_sms: most SMs that each GEMM of the experts occupies, as for `fused_moe`.
        keep_fp8: keep an e4m3 copy of MXFP4 weights, as `MoEWeights.prepare` takes it. Weights that
            are prepared with one keep theirs. Not in the state dict: `load_state_dict` makes it
            again. ``.to("cpu")`` drops it.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; a call with
            more tokens than ``ep.max_tokens``, before anything is sent; `keep_fp8` with bfloat16
            activations, or for weights or a device without such a copy.
        UnsupportedError: a call in training mode whose input requires a gradient.
        PeerLostError: a rank of `expert_parallel` died or did not arrive in time.

    Example:
        >>> import torch, mxpert
        >>> from mxpert.distributed import ExpertParallel
        >>> weights = mxpert.quantize_weights(torch.randn(4, 64, 32), torch.randn(4, 32, 32),
        ...                                   gate_up_order="concatenated")
        >>> moe = mxpert.MoE(weights, torch.randn(4, 32), top_k=2).eval()
        >>> moe(torch.randn(2, 5, 32, dtype=torch.bfloat16)).shape
        torch.Size([2, 5, 32])
        >>> sorted(moe.state_dict())[-2:]
        ['experts.gate_up_proj_scales', 'router.weight']
        >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=16)
        >>> ranks = mxpert.MoE(weights, torch.randn(4, 32), top_k=2, expert_parallel=ep).eval()
        >>> ranks.load_state_dict(moe.state_dict())  # under torchrun: this rank's part
        <All keys matched successfully>
    """

    if TYPE_CHECKING:

        def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def __init__(
        self,
        weights: MoEWeights,
        router_weight: torch.Tensor,
        *,
        top_k: int,
        activation: ActivationLike = SiLU(),
        activation_format: ActivationFormat = "bf16",
        router_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        routing: TopKOptions = TopKOptions(),
        apply_router_weight_on_input: bool = False,
        expert_parallel: ExpertParallel | None = None,
        num_sms: int | None = None,
        keep_fp8: bool = False,
    ) -> None:
        super().__init__()
        op = "MoE"
        check_keep_fp8(keep_fp8, parse_activation_format(activation_format, op), op)
        ranks = expert_parallel
        for name, value, kind in (
            ("weights", weights, MoEWeights),
            ("routing", routing, TopKOptions),
            *([] if ranks is None else [("expert_parallel", ranks, ExpertParallel)]),
        ):
            if not isinstance(value, kind):
                raise TypeError(message(op, name, kind.__name__, repr(value)))
        activation = parse_activation(activation, op)
        keep_fp8 = keep_fp8 or weights.layout.has_fp8_codes
        if ranks is not None:
            require(ranks.top_k == top_k, op, "top_k", need=ranks.top_k, got=top_k)
            weights = local_weights(op, ranks, weights)
        experts = weights.num_experts if ranks is None else ranks.placement.num_experts
        shape = experts, weights.hidden_size
        _check_router(op, router_weight, router_bias, shape, weights.device)
        check_route_topk(router_weight.new_empty(0, experts), top_k, routing, correction_bias, op)
        check_weight_on_input(op, apply_router_weight_on_input, top_k)
        self.top_k, self.routing = top_k, routing
        self.router = torch.nn.Linear(
            weights.hidden_size, experts, device="meta", bias=router_bias is not None
        )
        self.router.weight = torch.nn.Parameter(router_weight.detach(), requires_grad=False)
        if router_bias is not None:
            self.router.bias = torch.nn.Parameter(router_bias.detach(), requires_grad=False)
        self.register_buffer("correction_bias", correction_bias)
        is_prepared = (
            weights.layout is not Layout.ROW_MAJOR or weights.fold_certificates is not None
        )
        if not is_prepared or (keep_fp8 and not weights.layout.has_fp8_codes):
            weights = weights.prepare(device=weights.device, keep_fp8=keep_fp8)
        self.experts = PreparedExperts(
            weights,
            activation,
            activation_format=activation_format,
            apply_router_weight_on_input=apply_router_weight_on_input,
            expert_parallel=ranks,
            num_sms=num_sms,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., H], bfloat16, float16 or float32 → the shape and dtype of x."""
        router, experts = self.router, self.experts
        weight, hidden_size = router.weight, router.in_features
        require_tensor(x, "MoE", "x", dtype=FLOAT_DTYPES, device=weight.device)
        if x.dim() == 0 or x.shape[-1] != hidden_size:
            raise ValueError(message("MoE", "x.shape", f"[..., {hidden_size}]", list(x.shape)))
        is_flat = x.dim() == 2
        rows = x if is_flat else x.reshape(-1, hidden_size)
        rows = rows.contiguous()  # the router rounds alike for any strides
        options, correction = self.routing, self._buffers["correction_bias"]
        without_grad = torch.no_grad() if torch.is_grad_enabled() else _NOTHING
        with without_grad, isolated(rows.device.type):  # autocast would choose other experts
            logits = router(_as(rows, weight.dtype))
        correction = None if correction is None else _as(correction, torch.float32)
        if _is_forward_alone(experts):
            result = experts.from_logits(
                rows, logits, self.top_k, routing=options, correction_bias=correction
            )
            return result if is_flat else result.view(x.shape)
        result = experts(rows, *choose_experts(logits, self.top_k, options, correction))
        return result if is_flat else result.view(x.shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoE:
        """`to`, `half` and `bfloat16` leave float32 routing parameters: they choose the experts."""
        super()._apply(lambda tensor: _float32_kept(tensor, fn(tensor)), recurse)
        return self

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, routing={self.routing}"


def _is_forward_alone(experts: torch.nn.Module) -> bool:
    """Whether a call of `experts` is `PreparedExperts.forward` of one rank and nothing else.

    Hooks and wrappers get routing weights and ids, and so do other ranks.
    """
    return (
        type(experts) is PreparedExperts
        and experts.expert_parallel is None
        and "forward" not in experts.__dict__
        and experts._compiled_call_impl is None
        and not (
            experts._forward_hooks
            or experts._forward_pre_hooks
            or experts._backward_hooks
            or experts._backward_pre_hooks
            or _has_global_hooks()
        )
    )


def _check_router(
    op: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
) -> None:
    """Check a router of E experts for rows of H values: weight [E, H], bias [E] or None."""
    require_tensor(weight, op, "router_weight", dtype=FLOAT_DTYPES, shape=shape, device=device)
    if bias is not None:
        size = shape[:1]
        require_tensor(bias, op, "router_bias", dtype=weight.dtype, shape=size, device=device)


def _float32_kept(before: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """A float32 tensor in float32 on the device of `moved`; any other as it was moved."""
    changed = before.dtype == torch.float32 != moved.dtype
    return before.to(moved.device) if changed else moved


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`; a call of `to` that changes nothing takes as long as an allocation."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
