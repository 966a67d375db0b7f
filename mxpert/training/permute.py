"""The order of rows around the grouped layers: sorted by expert there, summed by token back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.ambient import Context
from ..core.gradient import apply, differentiable_once, keep_graph
from .rows.op import combine_rows, combine_rows_backward

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows [P, H] sorted by expert, and group_offsets int32 [E + 1] → rows [P, H]."""

SortedPairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""order, inverse and group_offsets, as `sort_by_expert` returns them."""


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sort (token, slot) pairs by expert, stable, without a host sync.

    Args:
        topk_ids: integers [T, top_k] in 0 … num_experts − 1.

    Returns:
        order int64 [R]: the pair ``t · top_k + slot`` in each sorted row; its inverse int64 [R];
        group_offsets int32 [E + 1]: where each expert's rows begin.

    Example:
        >>> order, inverse, offsets = sort_by_expert(torch.tensor([[2, 0], [0, 2]]), 3)
        >>> order.tolist(), inverse.tolist(), offsets.tolist()
        ([1, 2, 0, 3], [2, 0, 1, 3], [0, 2, 2, 4])
    """
    ids, order = topk_ids.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    boundaries = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    return order, inverse, torch.searchsorted(ids, boundaries, out_int32=True)


def run_experts(
    experts: Experts,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    pairs: SortedPairs,
    gradient_factor: float = 1.0,
) -> torch.Tensor:
    """Permute tokens to their experts' order, run the experts, and add each token's rows.

    Args:
        tokens: [T, H].
        topk_weights: float32 (float64 for float64) [T, top_k].
        pairs: the sorted (token, slot) pairs. `inverse` may name rows at or beyond the length of
            `order`; such a slot contributes nothing.
        gradient_factor: multiplies every gradient inside of the experts, and no other one.

    Returns:
        [T, H].

    Example:
        >>> pairs = sort_by_expert(torch.tensor([[1, 0]]), 2)
        >>> def add_expert(rows, offsets):  # expert e adds e
        ...     return rows + torch.repeat_interleave(torch.arange(2.0), offsets.diff())[:, None]
        >>> run_experts(add_expert, torch.zeros(1, 1), torch.tensor([[0.25, 0.75]]), pairs)
        tensor([[0.2500]])
    """
    order, inverse, group_offsets = pairs
    rows = apply(PermuteRows, tokens, order, inverse, topk_weights.shape[1], gradient_factor)
    rows = experts(rows, group_offsets)
    row_ids = inverse.view(topk_weights.shape)
    result: torch.Tensor = apply(CombineRows, rows, row_ids, topk_weights, 1 / gradient_factor)
    return result


class PermuteRows(torch.autograd.Function):
    """Token rows [T, H] → sorted rows [R, H]; backward adds each token's rows in slot order.

    Autograd of indexing would scatter with atomics or sort again; the inverse permutation is known.
    Backward multiplies the sum by `gradient_factor`.
    """

    @staticmethod
    def forward(
        ctx: Context,
        tokens: torch.Tensor,
        order: torch.Tensor,
        inverse: torch.Tensor,
        top_k: int,
        gradient_factor: float = 1.0,
    ) -> torch.Tensor:
        keep_graph(ctx, tokens)
        ctx.save_for_backward(inverse)
        ctx.top_k, ctx.gradient_factor = top_k, gradient_factor
        return tokens[order // top_k]

    @staticmethod
    @differentiable_once("permute_rows")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        row_ids, weights = inverse.view(-1, ctx.top_k), None
        if ctx.gradient_factor != 1:
            wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
            weights = torch.full_like(row_ids, ctx.gradient_factor, dtype=wide)
        return combine_rows(grad, row_ids, weights), None, None, None, None


class CombineRows(torch.autograd.Function):
    """Sorted rows [R, H] → token rows [T, H]: each token's rows times their weights, summed.

    Backward keeps the rows in their own dtype, and only the weights [T, top_k] in float32. It
    multiplies the gradient of the rows, and not that of the weights, by `gradient_factor`.
    """

    @staticmethod
    def forward(
        ctx: Context,
        rows: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        gradient_factor: float = 1.0,
    ) -> torch.Tensor:
        keep_graph(ctx, rows, weights)
        ctx.save_for_backward(rows, row_ids, weights)
        ctx.gradient_factor = gradient_factor
        return combine_rows(rows, row_ids, weights)

    @staticmethod
    @differentiable_once("combine_rows")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, row_ids, weights = ctx.saved_tensors
        if ctx.gradient_factor != 1:
            weights = weights * ctx.gradient_factor
        by_row, by_weight = combine_rows_backward(grad, rows, row_ids, weights)
        return by_row, None, by_weight, None
