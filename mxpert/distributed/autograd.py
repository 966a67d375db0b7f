"""Dispatch and combine with gradients: the backward of each is the other.

Rows travel in their own dtype, or as MXFP8 where the ExpertParallel says so. Results, and the
gradients of dispatched rows, return in the wider of their own dtype and `combine_dtype`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from ..core.ambient import Context
from ..core.gradient import differentiable_once, keep_graph
from ..errors import require
from ..formats.spec import ScaleRule
from ..formats.tensor import MXTensor
from ..quantize.op import dequantize
from .calls import Call
from .expert_parallel import ExpertParallel
from .transport import DispatchedTokens, RowExchange


def dispatch_tokens(
    ep: ExpertParallel,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
) -> DispatchedTokens:
    """Send tokens to the ranks of their experts; differentiable in x and the weights.

    The gradient of x [T, H] is the sum over the ranks that got a token of their rows' gradients,
    in float32 where the transport adds them itself. The gradient of a weight comes from the one
    rank that owns its expert. Every rank calls this function and its backward equally often and in
    the same order, with or without tokens.

    Args:
        ep: with transport GATHER or ALL_TO_ALL.
        x: [T, H], a float dtype, sent as it is; with wire_format="mxfp8" quantised first. The
            gradient ignores that rounding.
        topk_weights: [T, k], float32 (float64 for float64).
        topk_ids: integers [T, k], global.
        scale_rule: of the MXFP8 wire.

    Raises:
        ValueError: more tokens than `max_tokens`. PeerLostError: a rank is lost.

    Returns:
        DispatchedTokens with x [R, H] in the dtype of the argument, weights in theirs (0 where the
        id is −1), and local ids.

    Example:
        >>> ep = ExpertParallel(num_experts=2, top_k=1, hidden_size=32, max_tokens=4)
        >>> x = torch.ones(3, 32, requires_grad=True)
        >>> sent = dispatch_tokens(ep, x, torch.ones(3, 1), torch.tensor([[0], [1], [0]]))
        >>> combine_tokens(ep, 2 * sent.x, sent).sum().backward()
        >>> x.grad.unique()
        tensor([2.])
    """
    require(
        x.shape[0] <= ep.max_tokens,
        "dispatch_tokens",
        "x.shape[0]",
        need=f"at most max_tokens = {ep.max_tokens} tokens a rank",
        got=x.shape[0],
        remedy="split the batch, or make ExpertParallel with a larger max_tokens",
    )
    rows, weights, dispatched = _Dispatch.apply(x, topk_weights, topk_ids, ep, scale_rule)
    received: DispatchedTokens = replace(dispatched, x=rows, topk_weights=weights)
    return received


def combine_tokens(
    ep: ExpertParallel, rows: torch.Tensor, dispatched: DispatchedTokens
) -> torch.Tensor:
    """Sum the partial rows of each token over the ranks; differentiable in the rows.

    Args:
        rows: [R, H], zero in rows without a local expert.
        dispatched: of `dispatch_tokens`.

    Returns:
        [T, H] in the dtype of the rows. Backward sends its gradient as x was sent, without MXFP8.
    """
    result: torch.Tensor = _Combine.apply(rows, ep, replace(dispatched, x=rows.new_empty(0)))
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        weights: torch.Tensor,
        topk_ids: torch.Tensor,
        ep: ExpertParallel,
        scale_rule: ScaleRule,
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchedTokens]:
        keep_graph(ctx, x, weights)
        quantised = ep.wire_format == "mxfp8"
        # The wire moves bytes: rows of any other dtype travel as rows of more bfloat16 values.
        sent = x if quantised else x.contiguous().view(torch.bfloat16)
        bound = ep.max_tokens
        call = Call(bound, "MXMoE", scale_rule, sizes=str(x.dtype), layer=ep.layer)
        dispatched = _exchange(ep).dispatch(
            sent,
            weights,
            topk_ids,
            bound=bound,
            scale_rule=scale_rule,
            out_dtype=x.dtype,
            call=call,
        )
        if isinstance(dispatched.x, MXTensor):
            rows = dequantize(dispatched.x, dtype=x.dtype)
        else:
            rows = dispatched.x.view(x.dtype)
        received = dispatched.topk_weights
        if weights.dtype != received.dtype:
            received = _exchange(ep).send(weights, dispatched)
        received = received.masked_fill(dispatched.topk_ids < 0, 0)
        route = replace(dispatched, x=x.new_empty(0), topk_weights=x.new_empty(0))
        ctx.ep, ctx.route = ep, route
        return rows, received, route

    @staticmethod
    @differentiable_once("ExpertParallel.dispatch")
    def backward(
        ctx: Context, grad: torch.Tensor, weight_grad: torch.Tensor, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        need_x, need_weights = ctx.needs_input_grad[:2]
        by_x = _combined(ctx.ep, grad, ctx.route) if need_x else None
        by_weights = _combined(ctx.ep, weight_grad, ctx.route) if need_weights else None
        return by_x, by_weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: torch.Tensor, ep: ExpertParallel, route: DispatchedTokens
    ) -> torch.Tensor:
        keep_graph(ctx, rows)
        ctx.ep, ctx.route = ep, route
        return _combined(ep, rows, route)

    @staticmethod
    @differentiable_once("ExpertParallel.combine")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(ctx.ep).send(grad.contiguous(), ctx.route), None, None


def _exchange(ep: ExpertParallel) -> RowExchange:
    return cast(RowExchange, ep.exchange)


def _combined(ep: ExpertParallel, rows: torch.Tensor, route: DispatchedTokens) -> torch.Tensor:
    """Sum over the ranks of rows [R, W] → [T, W] in their dtype."""
    out = rows.new_empty((route.num_tokens, rows.shape[1]))
    wire = torch.promote_types(rows.dtype, ep.combine_dtype)
    _exchange(ep).combine(rows.to(wire).contiguous(), replace(route, out_dtype=rows.dtype), out)
    return out
