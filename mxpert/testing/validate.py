"""Checks of tensor data for debugging and tests. They are slow: each copies a tensor to the host.

The ops check shapes, dtypes and devices, but never data, since that needs a synchronisation. They
skip ids out of range and stay inside memory; duplicate ids and NaN are computed with. These
functions raise for such data.
"""

from __future__ import annotations

import torch

from ..errors import require, require_tensor
from ..formats.spec import E8M0_NAN
from ..formats.tensor import MXTensor
from ..moe.weights import MoEWeights
from ..routing.plan import (
    GROUP_OFFSET_DTYPES,
    TOKEN_BITS,
    TOKEN_MASK,
    RoutingPlan,
    check_plan_shapes,
    require_ids,
    require_topk,
)


def validate_routing(
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    allow_skipped: bool = False,
) -> None:
    """Check that ids are in range and distinct per token, and that weights are finite.

    Args:
        topk_weights: float [T, k], or None. topk_ids: int32 or int64 [T, k].
        num_experts: global number of experts. allow_skipped: let −1 stand for "no expert".

    Raises:
        ValueError: the message names the first wrong id or weight.

    Example:
        >>> validate_routing(None, torch.tensor([[0, 3]], dtype=torch.int32), num_experts=4)
    """
    op = "validate_routing"
    require_ids(topk_ids, op)
    skipped = (topk_ids == -1) if allow_skipped else torch.zeros_like(topk_ids, dtype=torch.bool)
    bad = ((topk_ids < 0) | (topk_ids >= num_experts)) & ~skipped
    _require_none(
        bad,
        op,
        "topk_ids",
        f"ids from 0 to {num_experts - 1}",
        topk_ids,
        "the ops skip such ids: their share of the output is missing",
    )
    ordered, order = topk_ids.sort(dim=-1, stable=True)
    equal = torch.zeros_like(skipped)
    equal[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & ~skipped.gather(1, order)[:, 1:]
    _require_none(
        equal,
        op,
        "topk_ids",
        "distinct experts per token",
        ordered,
        "a router's top-k never chooses an expert twice",
    )
    if topk_weights is not None:
        require_topk(topk_weights, topk_ids, op)
        _require_none(
            ~topk_weights.isfinite(),
            op,
            "topk_weights",
            "finite weights",
            topk_weights,
            "look for NaN or infinity in the router's logits",
        )


def validate_plan(plan: RoutingPlan) -> None:
    """Check the invariants of a routing plan.

    - Blocks in use hold experts in ascending order; all other blocks hold −1.
    - Padding rows and rows past ``num_valid[0]`` hold ``top_k << 24 | T`` and weight 0.
    - The padding of an expert comes after its rows, and tokens ascend within an expert.
    - `slot_rows` is the inverse of `sorted_token_ids`.

    Raises:
        ValueError: the message names the first wrong row or block.
    """
    op, unit = "validate_plan", plan.routing_block_m
    check_plan_shapes(plan, op)
    used, tokens = plan.num_valid.tolist()
    require(
        used % unit == 0 and 0 <= used <= plan.capacity,
        op,
        "plan.num_valid[0]",
        got=used,
        need=f"a multiple of {unit} up to {plan.capacity}",
    )
    require(
        0 <= tokens <= plan.num_tokens,
        op,
        "plan.num_valid[1]",
        got=tokens,
        need=f"0 to {plan.num_tokens} tokens",
    )
    blocks = plan.block_expert_ids.long()
    inside = torch.arange(len(blocks), device=plan.device) < used // unit
    wrong = torch.where(inside, (blocks < 0) | (blocks >= plan.num_experts), blocks != -1)
    wrong[1:] |= inside[1:] & (blocks[1:] < blocks[:-1])
    _require_none(
        wrong,
        op,
        "plan.block_expert_ids",
        got=blocks,
        need=f"ascending experts in {used // unit} blocks, then -1",
    )
    _validate_rows(plan, used, tokens, op)


def _validate_rows(plan: RoutingPlan, used: int, tokens: int, op: str) -> None:
    """Check the rows: padding, ascending tokens, and `slot_rows` as the inverse."""
    rows, top_k = torch.arange(plan.capacity, device=plan.device), plan.top_k
    token, slot = plan.sorted_token_ids & TOKEN_MASK, plan.sorted_token_ids >> TOKEN_BITS
    padding = plan.sorted_token_ids == (top_k << TOKEN_BITS | plan.num_tokens)
    wrong = ~padding & ((token >= tokens) | (slot < 0) | (slot >= top_k) | (rows >= used))
    _require_none(
        wrong,
        op,
        "plan.sorted_token_ids",
        got=plan.sorted_token_ids,
        need=f"slot << 24 | token below {top_k} and {tokens} in the first {used} rows, "
        "else top_k << 24 | T",
    )
    _require_none(
        padding & (plan.sorted_weights != 0),
        op,
        "plan.sorted_weights",
        "0 in padding rows",
        plan.sorted_weights,
    )
    expert = plan.block_expert_ids.repeat_interleave(plan.routing_block_m)
    same = expert[1:] == expert[:-1]
    wrong = torch.zeros_like(padding)
    wrong[1:] = (
        same
        & (expert[1:] >= 0)
        & torch.where(padding[1:], False, padding[:-1] | (token[1:] <= token[:-1]))
    )
    _require_none(
        wrong,
        op,
        "plan.sorted_token_ids",
        got=token,
        need="tokens ascending within an expert, its padding last",
    )
    real = (~padding).nonzero().squeeze(1)
    inverse = torch.full((plan.num_tokens, top_k), -1, dtype=torch.int32, device=plan.device)
    inverse[token[real].long(), slot[real].long()] = real.to(torch.int32)
    _require_none(
        inverse != plan.slot_rows,
        op,
        "plan.slot_rows",
        got=plan.slot_rows,
        need="the row of each (token, slot), -1 where it has none",
    )


def validate_group_offsets(group_offsets: torch.Tensor, num_rows: int) -> None:
    """Check group offsets: the first is 0, they do not decrease, the last is at most `num_rows`.

    Args:
        group_offsets: int32 or int64 [G + 1]. num_rows: M, rows of the grouped operand.

    Raises:
        ValueError: the message names the first wrong offset.

    Example:
        >>> validate_group_offsets(torch.tensor([0, 3, 3, 5]), num_rows=8)
    """
    op = "validate_group_offsets"
    require_tensor(group_offsets, op, "group_offsets", dtype=GROUP_OFFSET_DTYPES, shape=(None,))
    require(
        len(group_offsets) > 1,
        op,
        "group_offsets.shape",
        need="[G + 1], one group at least",
        got=list(group_offsets.shape),
    )
    least = torch.cat([group_offsets.new_zeros(1), group_offsets[:-1]])
    _require_none(
        (group_offsets < least) | (group_offsets > num_rows),
        op,
        "group_offsets",
        f"offsets from 0 to {num_rows} that do not decrease",
        group_offsets,
        "the ops clamp such offsets: rows are missing or in the wrong group",
    )
    _require_none(
        group_offsets[:1] != 0,
        op,
        "group_offsets",
        "0 first",
        group_offsets,
        "rows before the first group are left out",
    )


def validate_weights(weights: MoEWeights) -> None:
    """Check that scales are no NaN and keep values within float32, and that biases are finite.

    Raises:
        ValueError: the message names the first wrong scale or bias.
    """
    op = "validate_weights"
    for name in ("gate_up_proj", "down_proj"):
        _validate_scales(getattr(weights, name), op, f"weights.{name}.scale")
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(weights, name)
        if bias is not None:
            _require_none(~bias.isfinite(), op, f"weights.{name}", "finite values", bias)


def _validate_scales(tensor: MXTensor, op: str, argument: str) -> None:
    _require_none(
        tensor.scale == E8M0_NAN,
        op,
        argument,
        "no NaN scale (byte 255)",
        tensor.scale,
        "look for NaN in the tensor that was quantised",
    )
    largest = E8M0_NAN - 1 - tensor.format.element.emax
    _require_none(
        tensor.scale > largest,
        op,
        argument,
        got=tensor.scale,
        need=f"bytes up to {largest}, beyond which values exceed float32",
    )


def _require_none(
    bad: torch.Tensor, op: str, argument: str, need: str, got: torch.Tensor, remedy: str = ""
) -> None:
    """Raise if any element of `bad` is true; the message shows the first."""
    found = bad.nonzero()
    if len(found):
        at = tuple(found[0].tolist())
        require(
            False,
            op,
            f"{argument}{list(at)}",
            need=need,
            remedy=remedy,
            got=f"{got[at].item()} ({len(found)} such)",
        )
