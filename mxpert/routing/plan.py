"""Routing plans for the MoE ops, and group offsets for the grouped GEMMs.

A RoutingPlan holds rows sorted by expert and padded to blocks. Its layout is that of other MoE
stacks: token id and top-k slot packed into one int32, experts in ascending order, tokens ascending
within an expert, one expert per block of `routing_block_m` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import message, require_int, require_tensor
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE
from ..formats.tensor import Aggregate

TOKEN_BITS = 24
TOKEN_MASK = (1 << TOKEN_BITS) - 1
MAX_ROUTED_ROWS = 1 << TOKEN_BITS
MAX_TOP_K = 127
"""The slot lives in the upper 8 bits of a signed int32; `top_k` itself marks padding."""
GROUP_OFFSET_DTYPES = (torch.int32, torch.int64)
TOPK_ID_DTYPES = (torch.int32, torch.int64)


def plan_capacity(num_tokens: int, top_k: int, num_experts: int, routing_block_m: int) -> int:
    """Return the largest number of rows that a plan can need, a multiple of `routing_block_m`.

    ``T·k + E·unit − min(k, E)`` rounded up: each expert's padding is at most ``unit − 1`` rows. The
    formula leaves room for ids that appear twice in a token.

    Example:
        >>> plan_capacity(1, 4, 128, 16)
        2048
    """
    rows = num_tokens * top_k + num_experts * routing_block_m - min(top_k, num_experts)
    return -(-rows // routing_block_m) * routing_block_m


@dataclass(frozen=True, eq=False, repr=False)
class RoutingPlan(
    Aggregate,
    tensors=("sorted_token_ids", "sorted_weights", "block_expert_ids", "num_valid", "slot_rows"),
    facts=("num_tokens", "top_k", "num_experts", "routing_block_m"),
):
    """Routed rows sorted by expert and padded to blocks; all tensors are on the device.

    Args:
        sorted_token_ids: int32 [P], ``slot << 24 | token``; padding rows hold ``top_k << 24 | T``
            and follow their expert's rows.
        sorted_weights: float32 [P], the routing weight of each row; 0 in padding rows.
        block_expert_ids: int32 [P / routing_block_m], the local expert of each block; −1 past
            the end.
        num_valid: int32 [2], {padded rows in use, tokens}.
        slot_rows: int32 [T, top_k], the sorted row of each (token, slot); −1 where its expert is
            not local (or its id is invalid). The inverse of `sorted_token_ids`, for REDUCE.
        num_tokens: T.
        top_k: k.
        num_experts: E, the local experts.
        routing_block_m: rows per block.

    Ops check a plan's shapes, not its data, because that would need a synchronisation. Plans of
    `make_routing_plan` are safe for any ids. Check a plan from elsewhere with
    `mxpert.testing.validate.validate_plan`: its row indices are used without a check.

    Source:
        The sorted token ids of vLLM's ``moe_align_block_size`` and AITER's ``moe_sorting``.

    Example:
        >>> import mxpert
        >>> ids = torch.tensor([[1], [0]], dtype=torch.int32)
        >>> plan = mxpert.make_routing_plan(torch.ones(2, 1), ids, num_experts=2, routing_block_m=4)
        >>> plan.capacity, plan.max_blocks, plan.slot_rows.tolist()
        (12, 2, [[4], [0]])
    """

    sorted_token_ids: torch.Tensor
    sorted_weights: torch.Tensor
    block_expert_ids: torch.Tensor
    num_valid: torch.Tensor
    slot_rows: torch.Tensor
    num_tokens: int
    top_k: int
    num_experts: int
    routing_block_m: int

    @property
    def capacity(self) -> int:
        """P, the allocated rows. Only the device knows the rows in use, `num_valid[0]`."""
        return self.sorted_token_ids.shape[0]

    @property
    def max_blocks(self) -> int:
        """Largest number of blocks in use: one for each routed row, or the capacity."""
        return min(self.capacity // self.routing_block_m, self.num_tokens * self.top_k)

    @property
    def device(self) -> torch.device:
        """Device of the plan's tensors."""
        return self.sorted_token_ids.device

    def __repr__(self) -> str:
        return (
            f"RoutingPlan(num_tokens={self.num_tokens}, top_k={self.top_k}, "
            f"num_experts={self.num_experts},\n            "
            f"routing_block_m={self.routing_block_m}, capacity={self.capacity}, "
            f"device='{self.device}')"
        )


def check_plan_shapes(plan: RoutingPlan, op: str) -> None:
    """Check shapes and dtypes of a plan, not its data."""
    for name in ("num_tokens", "top_k", "num_experts", "routing_block_m"):
        value = getattr(plan, name)
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(message(op, f"plan.{name}", "an int", repr(value)))
    require_tensor(plan.sorted_token_ids, op, "plan.sorted_token_ids", shape=(None,))
    rows, unit = plan.capacity, plan.routing_block_m
    if unit < 1 or rows % unit != 0:
        raise ValueError(
            message(op, "plan.routing_block_m", f"a divisor of the {rows} sorted rows", unit)
        )
    device = plan.device
    for name, tensor, dtype, shape in (
        ("plan.sorted_token_ids", plan.sorted_token_ids, torch.int32, (rows,)),
        ("plan.sorted_weights", plan.sorted_weights, torch.float32, (rows,)),
        ("plan.block_expert_ids", plan.block_expert_ids, torch.int32, (rows // unit,)),
        ("plan.num_valid", plan.num_valid, torch.int32, (2,)),
        ("plan.slot_rows", plan.slot_rows, torch.int32, (plan.num_tokens, plan.top_k)),
    ):
        require_tensor(tensor, op, name, dtype=dtype, shape=shape, device=device, contiguous=True)


def require_topk(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    op: str,
    *,
    num_tokens: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Check a router's output: float weights and integer ids, both [T, top_k], on one device.

    Raises:
        TypeError: wrong type or dtype; ids of a floating dtype are reported as swapped arguments.
        ValueError: wrong shape or device.
    """
    require_ids(topk_ids, op, num_tokens=num_tokens, device=device)
    require_tensor(
        topk_weights,
        op,
        "topk_weights",
        dtype=FLOAT_DTYPES,
        shape=tuple(topk_ids.shape),
        device=topk_ids.device,
    )


def require_ids(
    topk_ids: torch.Tensor,
    op: str,
    *,
    num_tokens: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Check a router's expert ids alone: int32 or int64 [T, top_k]."""
    if isinstance(topk_ids, torch.Tensor) and topk_ids.is_floating_point():
        raise TypeError(
            message(
                op,
                "topk_ids.dtype",
                "int32 or int64",
                str(topk_ids.dtype).removeprefix("torch."),
                "this looks swapped: topk_weights come before topk_ids, as route_topk returns them",
            )
        )
    require_tensor(
        topk_ids, op, "topk_ids", dtype=TOPK_ID_DTYPES, shape=(num_tokens, None), device=device
    )


def padded_capacity(num_rows: int, num_groups: int) -> int:
    """Return the columns that M rows in G groups can need once each group is padded to 32.

    ``round_up(M, 32) + 32 G``: each group's padding is at most 31. It is known on the host without
    the groups' sizes.

    Args:
        num_rows: M, at least 0.
        num_groups: G, at least 0.

    Returns:
        The number of columns P of a columnwise copy.

    Raises:
        TypeError: an argument that is no int.
        ValueError: a negative number.

    Source:
        The grouped layout of Primus-Turbo's MXFP8 grouped GEMM.

    Example:
        >>> padded_capacity(100, 3)
        224
    """
    require_int(num_rows, "padded_capacity", "num_rows")
    require_int(num_groups, "padded_capacity", "num_groups")
    return -(-num_rows // MX_BLOCK_SIZE) * MX_BLOCK_SIZE + MX_BLOCK_SIZE * num_groups


def padded_group_offsets(group_offsets: torch.Tensor) -> torch.Tensor:
    """Return where each group starts once every group is padded to a multiple of 32.

    ``padded[g] = Σ_{i < g} round_up(offsets[i + 1] − offsets[i], 32)``.

    Args:
        group_offsets: int32 or int64 [G + 1], not decreasing.

    Returns:
        int32 [G + 1] on the same device; the last is the number of columns in use.

    Raises:
        TypeError: another dtype.
        ValueError: another number of dimensions.

    Source:
        The grouped layout of Primus-Turbo's MXFP8 grouped GEMM.

    Example:
        >>> padded_group_offsets(torch.tensor([0, 1, 1, 34])).tolist()
        [0, 32, 32, 96]
    """
    require_tensor(
        group_offsets,
        "padded_group_offsets",
        "group_offsets",
        shape=(None,),
        dtype=GROUP_OFFSET_DTYPES,
    )
    sizes = group_offsets.diff().clamp(min=0)
    blocks = (sizes + (MX_BLOCK_SIZE - 1)) // MX_BLOCK_SIZE
    ends = (blocks * MX_BLOCK_SIZE).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def group_bounds(group_offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return group offsets as int32, clamped to 0 … M and made non-decreasing.

    Valid offsets are unchanged. Padded groups of any result fit `padded_capacity`.

    Example:
        >>> group_bounds(torch.tensor([0, 7, 3, 99]), 8).tolist()
        [0, 7, 7, 8]
    """
    bounds = group_offsets.clamp(0, num_rows).cummax(0)[0]
    return bounds if bounds.dtype is torch.int32 else bounds.to(torch.int32)
