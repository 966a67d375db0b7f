"""GATHER: all-gather and reduce-scatter over any backend of torch.distributed.

Each rank sends `bound` slots, whatever its number of tokens, and gets the slots of all ranks. Ids
travel as ``global id + 1`` clamped to 0 … E + 1, so that the receiver's table maps foreign ids and
unused slots (0) to −1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..core.schema import rebuild
from ..formats.spec import ScaleRule
from ..moe.inputs import LayerKernel
from .calls import Call, require_same, without_layer
from .groups import Ranks
from .transport import DispatchedTokens, ExchangeSpec, Rows, rows_from_wire, wire_parts


class GatherExchange:
    """All-gather and reduce-scatter; shapes depend on `bound` alone."""

    def __init__(
        self, group: dist.ProcessGroup | None, spec: ExchangeSpec, device: torch.device
    ) -> None:
        self._spec, self._ranks = spec, Ranks(group, spec, device)
        table = spec.placement.received_ids(spec.rank)
        self._local_ids = table.to(device)
        """int32 [N, E + 2]"""
        self._device, self._last = device, 0
        self._words: dict[int, torch.Tensor] = {}
        self._differ = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros(spec.size, dtype=torch.int64, device=device)
        """The calls of all ranks where they differed first."""

    @staticmethod
    def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
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
        call: Call | None = None,
    ) -> DispatchedTokens:
        """Send `bound` slots to every rank."""
        self._ranks.raise_lost()
        self._compare((call or Call(bound, scale_rule=scale_rule)).word)
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

    def _compare(self, word: int) -> None:
        """Compare the calls of all ranks, before shapes depend on them.

        With NCCL the host waits only where its own call is another one than before, or of a layer
        that it has not called yet. Else a difference turns results into NaN, and `check` says what
        it is.

        Raises:
            ValueError: the ranks make different calls.
        """
        if self._ranks.size == 1:
            return
        own, plain = self._words.get(word), without_layer(word)
        is_new, self._last = own is None or plain != self._last, plain
        if own is None:
            own = torch.tensor([word], dtype=torch.int64, device=self._device)
            self._words[word] = own
        calls = self._gather(own)
        on_gpu = self._device.type != "cpu"
        if not on_gpu or (is_new and not torch.cuda.is_current_stream_capturing()):
            require_same("ExpertParallel.dispatch", calls.tolist())
        if on_gpu:
            differ = (calls != own).any()
            self._seen.copy_(torch.where(differ & ~self._differ, calls, self._seen))
            self._differ |= differ

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

    def layer_kernel(
        self, kernel: LayerKernel, *, bound: int, out_dtype: torch.dtype, layer: int | None
    ) -> None:
        """None: a local layer is a kernel of its own."""

    def combine(self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor) -> None:
        """Reduce-scatter in the dtype of `rows`; the backend chooses the order of the sum."""
        ranks, bound = self._ranks, dispatched.state
        mine = rows
        if ranks.size > 1:
            mine = rows.new_empty((bound, rows.shape[1]))
            ranks.reduce_scatter(mine, rows)
        out.copy_(mine[: out.shape[0]])
        if ranks.size > 1 and self._device.type != "cpu":
            out.masked_fill_(self._differ, float("nan"))

    def _gather(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, …] of each rank → [N · n, …]."""
        if self._ranks.size == 1:
            return slots
        out = slots.new_empty((self._ranks.size * slots.shape[0], *slots.shape[1:]))
        self._ranks.all_gather(out, slots)
        return out

    def check(self) -> None:
        """Synchronise; raise the error of an earlier call again, or for calls that differed."""
        self._ranks.check()
        if self._differ.item():
            require_same("ExpertParallel.check", self._seen.tolist())

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
