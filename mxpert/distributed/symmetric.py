"""SYMMETRIC: one-sided stores into the memory of the other ranks of one host.

The kernels and the protocol are in `mxpert.distributed.exchange`. Here are the buffers of a
rank, the launches, and what a lost rank looks like on the host. Nothing waits on the host.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.problem import MoEConfig, MoEProblem
from ..core.replay import replayed
from ..core.schema import rebuild
from ..core.target import detect_target
from ..errors import PeerLostError, message
from ..formats.spec import ScaleRule
from ..formats.tensor import MXTensor
from ..moe.inputs import FusedMoEInputs, LayerKernel, LayerLaunch
from .calls import Call, call_of, difference_error, differences
from .exchange import host
from .exchange.schedule import most_ctas
from .groups import gather_objects
from .transport import DispatchedTokens, ExchangeSpec, Rows, rows_from_wire
from .workspace import Workspace, make_workspace, refuse_group

_OP = "ExpertParallel"
_NEW_OBJECT = "make a new group of the ranks that are left, and an ExpertParallel on it"
_MISUSE = {
    "two streams": ("stream", "calls on one stream", "calls that overlap on two streams"),
    "no wait": ("arrivals", "a wait for the tokens before their use", "combine without a wait"),
}


class _Buffers(NamedTuple):
    """Buffers of calls with one number of slots a rank.

    Args:
        received: x, topk_weights and topk_ids of DispatchedTokens.
        own_ids: a copy of topk_ids that no other rank writes.
        arrivals: int64 [NUM_ARRIVALS], what kernels wait for.
    """

    received: dict[str, Any]
    own_ids: torch.Tensor
    arrivals: torch.Tensor


class SymmetricExchange:
    """Kernels that store rows and flags on the other ranks; shapes depend on `bound` alone.

    Args:
        group: the ProcessGroup; None for one rank.
        spec: of the exchange.
        device: of the tensors.
        workspace: the memory of this rank; None makes one with the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        spec: ExchangeSpec,
        device: torch.device,
        workspace: Workspace | None = None,
    ) -> None:
        self._spec, self._device = spec, device
        target = detect_target(device)
        layout = layout_of(spec)
        ctas = min(gather_objects(group, most_ctas(target)))
        self._own = host.Rank(layout, spec.rank, spec.placement.num_experts, target, ctas)
        self._workspace = workspace or make_workspace(group, layout.nbytes, device)
        self._sections = layout.views(self._workspace.own)
        self._words = host.new_words(spec.timeout_s, target, device)
        self._arrivals = host.new_arrivals(self._sections["arrived"], self._words)
        self._state = {
            "state": self._words,
            "table": torch.tensor(self._workspace.addresses, dtype=torch.int64, device=device),
            "destinations": torch.zeros(spec.max_tokens, dtype=torch.int64, device=device),
        }
        self._experts = {
            "owners": spec.placement.owners[spec.rank].to(device),
            "local_ids": spec.placement.local_ids[spec.rank].to(device),
        }
        self._no_id = torch.full((1,), -1, dtype=torch.int32, device=device)
        self._buffers: dict[int, _Buffers] = {}
        self._layers: dict[tuple[LayerKernel, int, torch.dtype, int | None], LayerLaunch] = {}
        self._is_dispatched = False
        self._lost: Exception | None = None

    @staticmethod
    def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
        """Why the ranks cannot write in each other's memory, or have no kernels to do it."""
        num_ranks = 1 if group is None else group.size()
        own = host.refuse(num_ranks, detect_target(device))
        return refuse_group(group, device) if own is None else own

    def dispatch(
        self,
        x: Rows,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        bound: int,
        scale_rule: ScaleRule,
        out_dtype: torch.dtype,
        waits: bool = True,
        call: Call | None = None,
    ) -> DispatchedTokens:
        """Store each token on the ranks of its experts, and wait for those of all ranks.

        The ids of tokens that were waited for are a copy, all −1 after a loss: a rank that is late
        may still write its own. The tensors of the result are this object's buffers, valid until
        `combine` of the result.

        Args:
            waits: False leaves the wait to the kernels that sort the tokens; see `arrivals`.

        Raises:
            PeerLostError: an earlier `check` has raised it.
            ValueError: the tokens of an earlier call were not combined; the object was closed.
        """
        self._begin("dispatch", not self._is_dispatched)
        rows, scale = (x.qdata, x.scale) if isinstance(x, MXTensor) else (x, None)
        quantises = self._own.layout.mx_rows and scale is None
        num_tokens, buffers = topk_ids.shape[0], self._of(bound)
        word = (call or Call(bound, scale_rule=scale_rule)).word
        rule = scale_rule if quantises else None
        host.dispatch_launch(self._own, num_tokens, bound, rule, word)(
            x=rows.contiguous(),
            scale=None if scale is None else scale.contiguous(),
            topk_weights=topk_weights.contiguous(),
            topk_ids=topk_ids.contiguous(),
            arrivals=buffers.arrivals if waits else None,
            **self._state,
            **self._experts,
        )
        self._is_dispatched = True
        received = buffers.received
        if waits:
            lost = host.is_lost(self._words)
            torch.where(lost, self._no_id, received["topk_ids"], out=buffers.own_ids)
            received = {**received, "topk_ids": buffers.own_ids}
        return rebuild(
            DispatchedTokens, **received, num_tokens=num_tokens, out_dtype=out_dtype, state=bound
        )

    def arrivals(self, bound: int) -> torch.Tensor:
        """Arrivals that kernels of calls with `bound` slots wait for: int64 [NUM_ARRIVALS]."""
        return self._of(bound).arrivals

    def _of(self, bound: int) -> _Buffers:
        """The buffers of calls with `bound` slots a rank."""
        if bound in self._buffers:
            return self._buffers[bound]
        slots = self._spec.size * bound
        rows, scales, ids, weights = (
            self._sections[name][:slots] for name in ("rows", "scales", "ids", "weights")
        )
        parts = (rows, scales) if self._own.layout.mx_rows else (rows.view(torch.uint8),)
        x = rows_from_wire(parts, self._spec.wire_format)
        self._buffers[bound] = _Buffers(
            dict(x=x, topk_weights=weights, topk_ids=ids),
            torch.empty_like(ids),
            self._arrivals[host.arrivals_row(self._own, bound)],
        )
        return self._buffers[bound]

    def combine(self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor) -> None:
        """Store each row on its token's rank, and sum a token's rows there in rank order.

        Raises:
            PeerLostError: an earlier `check` has raised it.
            ValueError: `dispatched` is not of the last dispatch; the object was closed.
        """
        bound = dispatched.state
        last = self._buffers.get(bound)
        given = dispatched.topk_ids
        is_last = last is not None and (given is last.own_ids or given is last.received["topk_ids"])
        self._begin("combine", self._is_dispatched and is_last)
        host.combine_launch(self._own, dispatched.num_tokens, bound)(
            out=out,
            rows=rows,
            topk_ids=dispatched.topk_ids,
            partials=self._sections["partials"],
            returned=self._sections["returned"],
            **self._state,
        )
        self._is_dispatched = False

    def layer_kernel(
        self, kernel: LayerKernel, *, bound: int, out_dtype: torch.dtype, layer: int | None
    ) -> LayerLaunch | None:
        """The whole layer as one kernel; None for the reference, whose sort does not wait.

        Raises:
            What `dispatch` raises.
        """
        self._begin("dispatch", not self._is_dispatched)
        if kernel.backend == "reference":
            return None
        key = kernel, bound, out_dtype, layer
        if key not in self._layers:
            (self._layers[key],) = replayed(_LayerKernel(self, *key))
        return self._layers[key]

    @property
    def resident(self) -> list[torch.Tensor]:
        """All memory that the kernels use beside their arguments."""
        own, state, experts = self._workspace.own, self._state, self._experts
        return [own, self._arrivals, *state.values(), *experts.values()]

    def _begin(self, step: str, in_order: bool) -> None:
        """Raise for a lost, closed or misused object."""
        if self._lost is not None:
            raise self._lost
        if not in_order:
            need, got = "dispatch and combine in turn", f"{step} out of turn"
            remedy = "if a layer failed in between, close the object on all ranks and make another"
            raise ValueError(message(f"{_OP}.{step}", "order", need, got, remedy))

    def check(self) -> None:
        """Synchronise with the device; raise an error if a rank was lost.

        Raises:
            PeerLostError: a rank died or did not arrive in time.
            ValueError: calls that differ between ranks or overlapped on two streams, or nothing
                waited for received tokens.
        """
        if self._lost is None:
            rank, differs, misuse = host.lost(self._words)
            if rank is not None:
                need, got = f"an answer within {self._spec.timeout_s:g} s", "none"
                text = message(f"{_OP}.check", f"rank {rank}", need, got, _NEW_OBJECT)
                self._lost = PeerLostError(text, (rank,))
            elif differs is not None:
                calls = self._sections["calls"].tolist()
                text = differences(calls) or f"another one on rank {differs}"
                self._lost = difference_error(f"{_OP}.check", text)
            elif misuse is not None:
                argument, need, got = _MISUSE[misuse]
                text = message(f"{_OP}.check", argument, need, got, "make a new ExpertParallel")
                self._lost = ValueError(text)
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Free the buffers, once the kernels that use them have ended; idempotent."""
        if self._sections:
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device)
            text = message(_OP, "object", "an open ExpertParallel", "a closed one")
            self._lost = self._lost or ValueError(text)
            self._sections, self._buffers, self._layers = {}, {}, {}
            del self._workspace, self._arrivals


class _LayerKernel:
    """Dispatch, a local layer and combine, as one kernel.

    It does not keep the exchange alive: recordings of its launches outlive their ExpertParallel.

    Args:
        exchange: of the ranks.
        kernel: of the local layer; its sort waits for the tokens.
        bound: slots of each rank.
        out_dtype: of the result. layer: its number, if it has one.
    """

    def __init__(
        self,
        exchange: SymmetricExchange,
        kernel: LayerKernel,
        bound: int,
        out_dtype: torch.dtype,
        layer: int | None,
    ) -> None:
        self._exchange, self._kernel = weakref.proxy(exchange), kernel
        self._bound, self._out_dtype, self._layer = bound, out_dtype, layer

    @property
    def resident(self) -> list[torch.Tensor]:
        """Memory that the launches use in every call."""
        made: list[torch.Tensor] = self._exchange.resident
        return made

    def launch(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs
    ) -> torch.Tensor:
        """Return this rank's tokens [T, H], or `out`. problem, config: of the local layer."""
        out_dtype, weights, out = self._out_dtype, inputs.weights, inputs.out
        received = self._exchange.dispatch(
            inputs.x,
            inputs.topk_weights,
            inputs.topk_ids,
            bound=self._bound,
            scale_rule=problem.options.scale_rule,
            out_dtype=out_dtype,
            waits=False,
            call=call_of(problem.options, weights, self._bound, self._layer),
        )
        local = FusedMoEInputs(
            received.x,
            weights,
            received.topk_weights,
            received.topk_ids,
            arrivals=self._exchange.arrivals(self._bound),
        )
        rows = self._kernel.launch(problem, config, local)
        if out is None:
            out = torch.empty(inputs.x.shape, dtype=out_dtype, device=rows.device)
        self._exchange.combine(rows, received, out)
        return out


def layout_of(spec: ExchangeSpec) -> host.Layout:
    """The sections of each rank's memory."""
    return host.Layout(
        num_ranks=spec.size,
        max_tokens=spec.max_tokens,
        top_k=spec.top_k,
        hidden_size=spec.hidden_size,
        mx_rows=spec.wire_format == "mxfp8",
        combine_dtype=spec.combine_dtype,
    )
