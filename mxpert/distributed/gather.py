"""GATHER: all-gather and reduce-scatter over any backend of torch.distributed.

Each rank sends `bound` slots, whatever its number of tokens, and gets the slots of all ranks. Ids
travel as ``global id + 1`` clamped to 0 … E + 1, so that the receiver's table maps foreign ids and
unused slots (0) to −1.
"""

from __future__ import annotations

from typing import Any

import torch

from ..formats.spec import ScaleRule
from ..kernel_spec import KernelSpec
from ..ops.schema import rebuild
from .groups import Ranks
from .transport import DispatchedTokens, ExchangeSpec, Rows
from .wire import rows_from_wire, wire_parts


class GatherExchange:
    """All-gather and reduce-scatter; shapes depend on `bound` alone."""

    def __init__(self, group: Any, spec: ExchangeSpec, device: torch.device) -> None:
        self._spec, self._ranks = spec, Ranks(group, spec, device)
        table = spec.placement.received_ids(spec.rank)
        self._local_ids = table.to(device)
        """int32 [N, E + 2]"""

    @staticmethod
    def unavailable(group: Any, device: torch.device) -> str | None:
        """None: every backend gathers."""
        return None

    def dispatch(
        self,
        x: Rows,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        bound: int,
        scale_rule: ScaleRule,
        out_dtype: torch.dtype,
    ) -> DispatchedTokens:
        """Send `bound` slots to every rank."""
        self._ranks.raise_lost()
        spec = self._spec
        parts = wire_parts(x, spec.wire_format, scale_rule)
        received = [self._gather(_padded(part, bound)) for part in parts]
        ids, weights = self._gather_routing(topk_weights, topk_ids, bound)
        return rebuild(
            DispatchedTokens,
            x=rows_from_wire(received, spec.wire_format),
            topk_weights=weights,
            topk_ids=ids,
            num_tokens=topk_ids.shape[0],
            out_dtype=out_dtype,
            state=bound,
        )

    def _gather_routing(
        self, topk_weights: torch.Tensor, topk_ids: torch.Tensor, bound: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Local ids int32 [R, k] and weights float32 [R, k] of all slots."""
        size, experts = self._spec.size, self._spec.placement.num_experts
        tokens, top_k = topk_ids.shape
        # [2, bound, k] int32: ids + 1 (0 in unused slots), then the bits of the weights
        routing = torch.zeros((2, bound, top_k), dtype=torch.int32, device=topk_ids.device)
        routing[0, :tokens] = topk_ids.clamp(-1, experts) + 1
        routing[1, :tokens] = topk_weights.float().view(torch.int32)
        gathered = self._gather(routing).view(size, 2, bound * top_k)
        ids = self._local_ids.gather(1, gathered[:, 0].long())
        weights = gathered[:, 1].contiguous().view(torch.float32)
        return ids.view(size * bound, top_k), weights.view(size * bound, top_k)

    def send(self, rows: torch.Tensor, dispatched: DispatchedTokens) -> torch.Tensor:
        """Rows [T, W] → [R, W]: the slots of all ranks."""
        sent = _padded(rows.contiguous(), dispatched.state)
        return self._gather(sent.view(torch.uint8)).view(rows.dtype)

    def layer_kernel(self, kernel: KernelSpec, *, bound: int, out_dtype: torch.dtype) -> None:
        """None: a local layer is a kernel of its own."""

    def combine(self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor) -> None:
        """Reduce-scatter in the dtype of `rows`; the backend chooses the order of the sum."""
        ranks, bound = self._ranks, dispatched.state
        mine = rows
        if ranks.size > 1:
            mine = rows.new_empty((bound, rows.shape[1]))
            ranks.reduce_scatter(mine, rows)
        out.copy_(mine[: out.shape[0]])

    def _gather(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, …] of each rank → [N · n, …]."""
        if self._ranks.size == 1:
            return slots
        out = slots.new_empty((self._ranks.size * slots.shape[0], *slots.shape[1:]))
        self._ranks.all_gather(out, slots)
        return out

    def check(self) -> None:
        """Synchronise; raise the error of an earlier call again."""
        self._ranks.check()

    def close(self) -> None:
        """Drop the group that this object made."""
        self._ranks.close()


def _padded(rows: torch.Tensor, bound: int) -> torch.Tensor:
    """Contiguous [bound, W] with `rows` in front; other slots stay uninitialised."""
    if rows.shape[0] == bound:
        return rows.contiguous()
    slots = rows.new_empty((bound, rows.shape[1]))
    slots[: rows.shape[0]] = rows
    return slots
