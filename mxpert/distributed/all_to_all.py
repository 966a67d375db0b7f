"""ALL_TO_ALL: all_to_all_single with one row per (token, rank) pair that has work.

The host reads how many rows go where, once a dispatch: that is the one synchronisation, and the
reason why CUDA graphs cannot capture this transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..core.schema import rebuild
from ..formats.spec import ScaleRule
from ..moe.inputs import LayerKernel
from .calls import Call, require_same
from .groups import Ranks
from .transport import DispatchedTokens, ExchangeSpec, Rows, rows_from_wire, wire_parts


@dataclass(frozen=True, eq=False)
class _Traffic:
    """Rows that one dispatch moves between this rank and the others.

    Args:
        tokens: int64 [S], the token of each row that was sent, by rank and then by token.
        sent, received: rows to and from each rank.
    """

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]


class AllToAllExchange:
    """One row per (token, rank) pair; the shapes depend on the routing."""

    def __init__(
        self, group: dist.ProcessGroup | None, spec: ExchangeSpec, device: torch.device
    ) -> None:
        self._spec, self._ranks = spec, Ranks(group, spec, device)
        owners, local_ids = (
            # column id + 1; what no rank computes goes to "rank" N
            torch.nn.functional.pad(table[spec.rank], (1, 1), value=none).to(device)
            for table, none in (
                (spec.placement.owners.long(), spec.size),
                (spec.placement.local_ids, -1),
            )
        )
        self._owners, self._local_ids = owners, local_ids

    @staticmethod
    def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
        """None: gloo and NCCL have all_to_all_single."""
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
        """Send each token to the ranks that own one of its experts."""
        self._ranks.raise_lost()
        spec = self._spec
        columns = topk_ids.clamp(-1, spec.placement.num_experts).long() + 1
        owners = self._owners[columns]  # int64 [T, k]
        places, traffic = self._plan_traffic(
            owners, (call or Call(bound, scale_rule=scale_rule)).word
        )
        tokens = traffic.tokens
        parts = wire_parts(x, spec.wire_format, scale_rule)
        received = [self._exchange(part[tokens], traffic) for part in parts]
        # [S, 2k] int32: local ids of the receiver, then the bits of the weights
        ids = torch.where(owners[tokens] == places, self._local_ids[columns[tokens]], -1)
        routing = torch.cat([ids, topk_weights[tokens].float().view(torch.int32)], dim=1)
        got = self._exchange(routing, traffic)
        top_k = topk_ids.shape[1]
        return rebuild(
            DispatchedTokens,
            x=rows_from_wire(received, spec.wire_format),
            topk_weights=got[:, top_k:].contiguous().view(torch.float32),
            topk_ids=got[:, :top_k].contiguous(),
            num_tokens=topk_ids.shape[0],
            out_dtype=out_dtype,
            state=traffic,
        )

    def _plan_traffic(self, owners: torch.Tensor, call: int) -> tuple[torch.Tensor, _Traffic]:
        """The rank int64 [S, 1] of each row to send, and the traffic of all rows.

        owners: int64 [T, k], the rank of each id, N for none. call: its word, sent with the counts.

        Raises:
            ValueError: the ranks make different calls.
        """
        size = self._spec.size
        goes = torch.zeros((owners.shape[0], size + 1), dtype=torch.bool, device=owners.device)
        goes = goes.scatter_(1, owners, True)[:, :size].T  # [N, T]
        counts = torch.stack([goes.sum(1), goes.new_full((size,), call, dtype=torch.int64)], 1)
        others = counts
        if size > 1:
            others = torch.empty_like(counts)
            self._ranks.all_to_all("dispatch", others, counts)
        (sent, _), (received, calls) = torch.stack([counts.T, others.T]).tolist()
        require_same("ExpertParallel.dispatch", calls)
        rows = torch.nonzero_static(goes, size=sum(sent))  # [S, 2]: rank, token
        return rows[:, :1], _Traffic(rows[:, 1], sent, received)

    def _exchange(self, rows: torch.Tensor, traffic: _Traffic) -> torch.Tensor:
        """Contiguous [S, W] → [R, W]."""
        return self._all_to_all(rows, traffic.sent, traffic.received, "dispatch")

    def _all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], step: str
    ) -> torch.Tensor:
        if self._spec.size == 1:
            return rows
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        to, data = out.view(torch.uint8), rows.view(torch.uint8)  # any dtype travels as bytes
        self._ranks.all_to_all(step, to, data, received, sent)
        return out

    def send(self, rows: torch.Tensor, dispatched: DispatchedTokens) -> torch.Tensor:
        """Rows [T, W] → [R, W]."""
        traffic: _Traffic = dispatched.state
        return self._exchange(rows[traffic.tokens], traffic)

    def layer_kernel(
        self, kernel: LayerKernel, *, bound: int, out_dtype: torch.dtype, layer: int | None
    ) -> None:
        """None: a local layer is a kernel of its own."""

    def combine(self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor) -> None:
        """Sum the rows that come back in rank order, in float32 (float64 for float64 rows)."""
        traffic: _Traffic = dispatched.state
        back = self._all_to_all(rows.contiguous(), traffic.received, traffic.sent, "combine")
        back = back.to(torch.promote_types(back.dtype, torch.float32))
        total = back.new_zeros(out.shape)
        for tokens, part in zip(
            traffic.tokens.split(traffic.sent), back.split(traffic.sent), strict=True
        ):
            total.index_add_(0, tokens, part)  # a token once at most: one order of the sum
        out.copy_(total)

    def check(self) -> None:
        """Synchronise; raise the error of an earlier call again."""
        self._ranks.check()

    def close(self) -> None:
        """Drop the group that this object made."""
        self._ranks.close()
