"""The interface of a transport, and the DispatchedTokens that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..errors import message, require, require_dtype, require_int
from ..formats.spec import MX_BLOCK_SIZE, ScaleRule, ValueEnum, get_format
from ..formats.tensor import MXTensor
from ..moe.inputs import LayerKernel, LayerLaunch
from ..quantize.op import quantize
from ..routing.plan import MAX_ROUTED_ROWS, MAX_TOP_K
from .calls import Call
from .placement import Placement

Rows = torch.Tensor | MXTensor

WireFormat = Literal["bf16", "mxfp8"]
WIRE_FORMATS = ("bf16", "mxfp8")
COMBINE_DTYPES = (torch.bfloat16, torch.float32)
MAX_TIMEOUT_S = 1e9
"""Kernels count nanoseconds in int64."""


class Transport(ValueEnum):
    """How tokens travel between ranks.

    AUTO: SYMMETRIC where it runs, else GATHER.
    GATHER: all-gather and reduce-scatter of any torch.distributed backend. Each rank gets every
        token. Its shapes are fixed, so that CUDA graphs capture it with NCCL.
    ALL_TO_ALL: all_to_all_single with one row per (token, rank) pair. The host waits for the counts
        once a dispatch, so CUDA graphs cannot capture it. For training and several nodes.
    SYMMETRIC: one-sided stores into the memory of the other GPUs of one host. Captured by CUDA
        graphs, without a host synchronisation.

    Source:
        vLLM's all-gather and reduce-scatter, torchtitan's token dispatcher, and FlashInfer's
        one-sided MoE all-to-all, in this order.

    Example:
        >>> Transport("gather") is Transport.GATHER
        True
    """

    AUTO = "auto"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    SYMMETRIC = "symmetric"


TransportLike = Transport | Literal["auto", "gather", "all_to_all", "symmetric"]
"""A Transport or its name."""


@dataclass(frozen=True, eq=False)
class DispatchedTokens:
    """The rows that a rank received, with what its experts need to compute them.

    R is the number of rows: ``N · bound`` with GATHER and SYMMETRIC, where row
    ``source · bound + t`` is token t of rank `source` and bound is the object's `max_tokens`; with
    ALL_TO_ALL the number of rows that arrived. Rows without a local expert have undefined contents,
    and all their ids are −1.

    Args:
        x: bfloat16 [R, H], or an MXFP8 MXTensor [R, H] with wire_format="mxfp8".
        topk_weights: float32 [R, k], routing weights of the senders.
        topk_ids: int32 [R, k], local expert ids; −1 for what another rank computes, for foreign
            ids, and in slots that no token uses.
        num_tokens: T, the tokens of this rank, which `combine` returns.
        out_dtype: dtype of the result of `combine`.
        state: what the transport keeps for `combine`.

    Example:
        >>> from mxpert.distributed import ExpertParallel
        >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=3)
        >>> received = ep.dispatch(torch.randn(1, 32, dtype=torch.bfloat16),
        ...                        torch.tensor([[0.5, 0.5]]), torch.tensor([[3, 1]]))
        >>> received.topk_ids.tolist()
        [[3, 1], [-1, -1], [-1, -1]]
    """

    x: Rows
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    num_tokens: int
    out_dtype: torch.dtype = torch.bfloat16
    state: Any = field(default=None, repr=False)  # each transport has its own kind


@dataclass(frozen=True)
class ExchangeSpec:
    """Settings of an exchange, equal on all ranks.

    Args:
        name: of the object; no other object has it, for example for shared memory.
        rank: of this process in the group; the only field that differs between ranks.
        placement: the experts of each rank; its `num_ranks` is N.
        top_k: experts per token.
        hidden_size: H.
        max_tokens: slots of each rank, the largest bound.
        wire_format: "bf16" or "mxfp8", of dispatched rows.
        combine_dtype: bfloat16 or float32, of rows on their way back.
        timeout_s: seconds after which a rank that does not answer is lost.
    """

    name: str
    rank: int
    placement: Placement
    top_k: int
    hidden_size: int
    max_tokens: int
    wire_format: str
    combine_dtype: torch.dtype
    timeout_s: float

    @property
    def size(self) -> int:
        """N."""
        return self.placement.num_ranks

    def check(self, op: str) -> None:
        """Raise TypeError or ValueError for a value that does not fit; errors name `op`."""
        for name in ("top_k", "hidden_size", "max_tokens"):
            require_int(getattr(self, name), op, name, least=1)
        most = min(MAX_TOP_K, self.placement.num_experts)
        require(self.top_k <= most, op, "top_k", need=f"at most {most}", got=self.top_k)
        rows = self.size * self.max_tokens * self.top_k
        require(
            rows < MAX_ROUTED_ROWS,
            op,
            "max_tokens",
            need=f"ranks · max_tokens · top_k below {MAX_ROUTED_ROWS}",
            got=rows,
            remedy="split the batch",
        )
        require(
            self.wire_format in WIRE_FORMATS,
            op,
            "wire_format",
            need=f"one of {list(WIRE_FORMATS)}",
            got=repr(self.wire_format),
        )
        require(
            self.hidden_size % MX_BLOCK_SIZE == 0,
            op,
            "hidden_size",
            need=f"a multiple of {MX_BLOCK_SIZE}",
            got=self.hidden_size,
        )
        require_dtype(self.combine_dtype, COMBINE_DTYPES, op, "combine_dtype")
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            need = f"seconds above 0, at most {MAX_TIMEOUT_S:.0e}"
            raise ValueError(message(op, "timeout_s", need, repr(self.timeout_s)[:40]))


class Exchange(Protocol):
    """A transport: moves tokens to their experts and results back.

    Made as ``Class(group, spec, device)`` on every rank at the same time; group is a ProcessGroup,
    or None where there is one rank and no torch.distributed. Arguments are checked by the caller:
    x bfloat16 [T, H] or MXFP8 with a dense last axis, where an MXFP8 wire may get either and a bf16
    wire gets bfloat16; topk_weights in one of FLOAT_DTYPES and topk_ids int32 or int64 [T, k]
    with any values and strides; T at most `bound`, which is at most ``spec.max_tokens`` and equal
    on all ranks.
    """

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
        """Send each token to the ranks that own one of its experts, and receive theirs.

        call: what all ranks must call alike; None is a dispatch with this bound and rule. Where
        ranks differ, every rank gets a ValueError that says in what: here, or from `check` where
        nothing waits on the host, with results that are NaN.

        A lost rank raises PeerLostError, or the ids of all other ranks' tokens are −1.
        """

    def layer_kernel(
        self, kernel: LayerKernel, *, bound: int, out_dtype: torch.dtype, layer: int | None
    ) -> LayerLaunch | None:
        """Dispatch, a local layer and combine, as one kernel; None if the transport has none.

        Its `launch` takes the local layer's problem and config, and inputs without an expert map.

        Args:
            kernel: of the local layer. layer: its number, if it has one.
            bound, out_dtype: as for `dispatch`.

        Raises:
            What `dispatch` raises.
        """

    def combine(self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor) -> None:
        """Write ``out[t] = Σ rows of token t``, in rank order and in float32 where it adds itself.

        rows: contiguous [R, H] in combine_dtype; rows without a local expert are zero.
        out: contiguous [T, H] in ``dispatched.out_dtype``.
        """

    def check(self) -> None:
        """Synchronise with the device; raise PeerLostError if a rank was lost."""

    def close(self) -> None:
        """Free what the exchange holds; idempotent. The other ranks may be gone."""

    @staticmethod
    def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
        """Why it cannot run on this group and device, as a phrase; None if it can.

        Called on all ranks at the same time; it may communicate.
        """


class RowExchange(Exchange, Protocol):
    """An exchange that moves rows of any dtype and width; gradients need it.

    `combine` takes rows [R, W] of any float dtype and writes out [T, W].
    """

    def send(self, rows: torch.Tensor, dispatched: DispatchedTokens) -> torch.Tensor:
        """Rows [T, W] of this rank's tokens → [R, W], on the way that `dispatched` went.

        Rows without a local expert have undefined contents.
        """


# ---- Rows as bytes: bfloat16 rows, or MXFP8 codes and scales.


def wire_parts(x: Rows, wire_format: str, scale_rule: ScaleRule) -> tuple[torch.Tensor, ...]:
    """The rows as uint8 [T, bytes], one tensor for each part of the format."""
    if wire_format == "mxfp8":
        quantised = x if isinstance(x, MXTensor) else quantize(x, "mxfp8", scale_rule=scale_rule)
        return quantised.qdata, quantised.scale
    assert isinstance(x, torch.Tensor)  # checked by ExpertParallel
    return (x.contiguous().view(torch.uint8),)


def rows_from_wire(parts: Sequence[torch.Tensor], wire_format: str) -> Rows:
    """The inverse of `wire_parts`; parts are contiguous."""
    if wire_format == "mxfp8":
        codes, scale = parts
        return MXTensor.unchecked(codes, scale, get_format("mxfp8"))
    (data,) = parts
    return data.view(torch.bfloat16)
