"""ExpertParallel: the ranks of a layer, and the exchange of tokens between them."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..core.problem import MoEOptions
from ..errors import message, require_dtype, require_int, require_tensor
from ..formats.spec import ScaleRule, ScaleRuleLike
from ..formats.tensor import MXTensor
from ..moe.inputs import FusedMoEInputs, LayerKernel, LayerLaunch
from .arguments import OP as _OP
from .arguments import check_tokens, checked_placement, indexed
from .calls import MOST_LAYERS, Call, StreamGuard
from .choice import choose, make_exchange
from .groups import agree, default_device, find_group
from .layer import LAYER, LAYER_OUT, OBJECTS, RanksOptions
from .placement import Placement
from .transport import (
    DispatchedTokens,
    Exchange,
    ExchangeSpec,
    Rows,
    Transport,
    TransportLike,
    WireFormat,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_numbers = itertools.count()


class ExpertParallel:
    """An MoE layer's experts on several ranks: each rank passes its tokens and gets its results.

    ``y[t] = Σ_rank Σ_slot w[t, slot] · expert(ids[t, slot])(x[t])`` over the ranks that own one of
    the token's experts. ALL_TO_ALL and SYMMETRIC add the ranks' rows in rank order, in float32;
    GATHER leaves that sum to the backend, in `combine_dtype`.

    All ranks of the group make the object at the same time with the same arguments, and then make
    the same calls in the same order: the same op and options, and views of the same `max_tokens`.
    Where they differ, all ranks get a ValueError that names the difference. Calls for two layers of
    the same sizes and options differ if the layers have numbers: modules number themselves, other
    callers take `with_layer`. A rank without tokens takes part with T = 0. Make the
    object and its first call before a CUDA graph capture: kernels compile and backends connect in
    it. One object serves one stream; make two for two micro-batches that overlap.

    Args:
        group_or_mesh: a ProcessGroup or a one-dimensional DeviceMesh; None is the default group, or
            this process alone where torch.distributed is not initialised.
        num_experts: E, the global experts.
        top_k: experts per token.
        hidden_size: H.
        max_tokens: largest number of tokens of a rank in one call.
        placement: which rank holds which experts; None is ``Placement.contiguous``.
        transport: AUTO takes SYMMETRIC where it runs, else GATHER; or the name, as "gather".
        wire_format: "bf16", or "mxfp8" to send MXFP8 rows; then `fused_moe` needs
            activation_format="mxfp8", and gives the same bits as quantising inside.
        combine_dtype: bfloat16 or float32, the dtype of partial results between ranks.
        timeout_s: seconds after which a rank that does not answer is lost. Over gloo the object
            makes a group of its own with this time-out. NCCL's collectives (GATHER, ALL_TO_ALL)
            end by the time-out of the given group, and its watchdog may end the process.
        device: of the tensors; None is the current GPU with NCCL, else the CPU.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value, on this rank or another one;
            arguments that differ between ranks.
        UnsupportedError: a transport that was asked for by name cannot run here.

    Source:
        Expert parallelism of GShard (arXiv 2006.16668); dispatch and combine as in DeepEP.

    Example:
        >>> import torch, mxpert
        >>> from mxpert.distributed import ExpertParallel
        >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=8)
        >>> w = lambda *s: mxpert.quantize(torch.randn(*s), "mxfp4")
        >>> local = len(ep.local_experts)  # under torchrun: this rank's share
        >>> weights = mxpert.MoEWeights(w(local, 64, 32), w(local, 32, 32),
        ...                             gate_up_order=mxpert.GateUpOrder.CONCATENATED)
        >>> x = torch.randn(3, 32, dtype=torch.bfloat16)
        >>> topk = mxpert.route_topk(torch.randn(3, 4), top_k=2)
        >>> mxpert.fused_moe(x, weights, *topk, activation=mxpert.SiLU(),
        ...                  expert_parallel=ep).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        group_or_mesh: ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        max_tokens: int,
        placement: Placement | None = None,
        transport: TransportLike = Transport.AUTO,
        wire_format: WireFormat = "bf16",
        combine_dtype: torch.dtype = torch.bfloat16,
        timeout_s: float = 30.0,
        device: torch.device | str | None = None,
    ) -> None:
        named = placement.num_ranks if isinstance(placement, Placement) else None
        group = find_group(group_or_mesh, named)
        self.group: ProcessGroup | None = group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        sizes = num_experts, top_k, hidden_size, max_tokens
        try:
            transport = Transport.parse(transport, _OP, "transport")
            require_int(num_experts, _OP, "num_experts", least=size)
            placement = checked_placement(placement, num_experts, size)
            formats = wire_format, combine_dtype
            spec = ExchangeSpec("", rank, placement, *sizes[1:], *formats, timeout_s)
            spec.check(_OP)
            self.device = default_device(group) if device is None else indexed(device)
        except Exception as error:  # the other ranks wait for this one in `agree`
            agree(group, error)
            raise
        names = "num_experts", "top_k", "hidden_size", "max_tokens"
        name = agree(
            group,
            dict(
                zip(names, sizes, strict=True),
                placement=placement.digest,
                transport=transport.name,
                wire_format=wire_format,
                combine_dtype=combine_dtype,
                timeout_s=float(timeout_s),
                device=self.device.type,
            ),
        )
        self._spec = replace(spec, name=name)
        self.max_tokens = max_tokens
        self.layer: int | None = None
        self._next_layer = itertools.count()
        self.transport, self._why = choose(transport, group, size, self.device)
        self._exchange: Exchange = make_exchange(self.transport, group, self._spec, self.device)
        self._guard = StreamGuard(self.device)
        self._register()

    def _register(self) -> None:
        self._handle = next(_numbers)
        OBJECTS[self._handle] = self

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._spec.rank

    @property
    def size(self) -> int:
        """N, the ranks of the group."""
        return self._spec.size

    @property
    def placement(self) -> Placement:
        """The experts of each rank."""
        return self._spec.placement

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self._spec.top_k

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._spec.hidden_size

    @property
    def wire_format(self) -> str:
        """Format of dispatched rows: "bf16" or "mxfp8"."""
        return self._spec.wire_format

    @property
    def combine_dtype(self) -> torch.dtype:
        """Dtype of partial results between ranks."""
        return self._spec.combine_dtype

    @functools.cached_property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.placement.num_local_experts[self.rank]

    @functools.cached_property
    def local_experts(self) -> tuple[int, ...]:
        """Global experts of this rank, in the order in which its weights hold them."""
        return self.placement.local_experts(self.rank)

    @functools.cached_property
    def local_top_k(self) -> float:
        """Expected number of this rank's experts among the ids of a row that it receives.

        Tokens spread evenly over ranks and experts. ALL_TO_ALL sends only rows that have one.
        """
        share = self.placement.share(self.rank)
        sent = 1 - (1 - share) ** self.top_k if self.transport is Transport.ALL_TO_ALL else 1.0
        return self.top_k * share / sent

    @functools.cached_property
    def expert_map(self) -> torch.Tensor:
        """int32 [E] on the object's device: the local id of each global expert, or −1."""
        return self.placement.expert_map(self.rank).to(self.device)

    def with_max_tokens(self, max_tokens: int) -> ExpertParallel:
        """Return a view with fewer slots, which shares buffers, flags and epochs.

        Calls cost less with fewer slots. Every rank uses a view of the same size in the same call.

        Args:
            max_tokens: 1 up to the object's own.

        Returns:
            An ExpertParallel; closing one closes both.

        Raises:
            TypeError, ValueError: no int in that range.
        """
        require_int(max_tokens, _OP, "max_tokens", least=1)
        most = self._spec.max_tokens
        if max_tokens > most:
            raise ValueError(message(_OP, "max_tokens", f"at most {most}", max_tokens))
        return self._view(max_tokens=max_tokens)

    def with_layer(self, layer: int) -> ExpertParallel:
        """Return a view for the calls of one layer, which shares buffers, flags and epochs.

        Ranks that call two layers of the same sizes and options in another order get a ValueError
        that names the layers; without numbers they exchange tokens of different layers.
        `mxpert.MoE`, `mxpert.training.MXMoE` and converted models number their layers by
        themselves, in the order in which they are made.

        Args:
            layer: the layer's number in the model, the same on every rank: 0 to 4094.

        Returns:
            An ExpertParallel; closing one closes both.

        Raises:
            TypeError, ValueError: no int in that range.

        Example:
            >>> from mxpert.distributed import ExpertParallel
            >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=8)
            >>> [ep.with_layer(number).layer for number in range(3)]
            [0, 1, 2]
        """
        require_int(layer, _OP, "layer", least=0)
        if layer >= MOST_LAYERS:
            raise ValueError(message(_OP, "layer", f"at most {MOST_LAYERS - 1}", layer))
        return self._view(layer=layer)

    def of_next_layer(self) -> ExpertParallel:
        """A view for a new layer, with the next number; the object itself if it has one already."""
        if self.layer is not None:
            return self
        return self.with_layer(next(self._next_layer) % MOST_LAYERS)

    def _view(self, **changes: int) -> ExpertParallel:
        view = copy.copy(self)
        vars(view).update(changes)
        view._register()
        return view

    def dispatch(
        self,
        x: torch.Tensor | MXTensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> DispatchedTokens:
        """Send this rank's tokens to the ranks that own their experts, and receive theirs.

        A token travels once to a rank, however many of its experts lie there. Neither this nor
        `combine` records gradients; `mxpert.training.MXMoE` does.

        Args:
            x: bfloat16 [T, H]; with wire_format="mxfp8" also an MXFP8 MXTensor [T, H].
            topk_weights: float32, bfloat16 or float16 [T, k].
            topk_ids: int32 or int64 [T, k], global ids; negative and foreign ids are skipped.
            scale_rule: of MXFP8 rows that are quantised here.
            out_dtype: bfloat16, float16 or float32, of the result of `combine`.

        Returns:
            DispatchedTokens: rows [R, H] with local ids, for experts of any kind. vLLM's
            ``prepare`` returns its rows, scales, ids and weights, without an expert map; a token
            dispatcher of torchtitan sorts its rows by local id.

        Raises:
            TypeError, ValueError: arguments that do not fit, before anything is sent; a second
                stream.
            PeerLostError: a rank died or did not arrive in time.

        Example:
            >>> import torch
            >>> from mxpert.distributed import ExpertParallel
            >>> ep = ExpertParallel(num_experts=2, top_k=1, hidden_size=32, max_tokens=4)
            >>> x, ids = torch.ones(3, 32, dtype=torch.bfloat16), torch.tensor([[1], [0], [1]])
            >>> got = ep.dispatch(x, torch.full((3, 1), 0.5), ids)
            >>> expert = got.x * (got.topk_ids + 1)  # expert e multiplies by e + 1
            >>> rows = torch.where(got.topk_ids >= 0, expert * got.topk_weights, 0).bfloat16()
            >>> ep.combine(rows, got)[:, 0].tolist()
            [1.0, 0.5, 1.0]
        """
        self.check_tokens(f"{_OP}.dispatch", x, topk_weights, topk_ids)
        scale_rule = ScaleRule.parse(scale_rule, f"{_OP}.dispatch", "scale_rule")
        require_dtype(out_dtype, OUT_DTYPES, f"{_OP}.dispatch", "out_dtype")
        with torch.no_grad():
            return self.dispatch_unchecked(
                x, topk_weights, topk_ids, scale_rule=scale_rule, out_dtype=out_dtype
            )

    def combine(
        self, rows: torch.Tensor, dispatched: DispatchedTokens, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return each row to its token's rank, and sum a token's rows there.

        Args:
            rows: contiguous [R, H] in `combine_dtype`: for each received row the weighted sum over
                this rank's experts; zero for a row whose ids are all −1.
            dispatched: what `dispatch` returned.
            out: contiguous [T, H] in ``dispatched.out_dtype``; None allocates.

        Returns:
            [T, H] of this rank's tokens, or `out`; zero where a token has no expert. vLLM's
            ``finalize`` passes its output tensor as `out`.

        Raises:
            TypeError, ValueError: arguments that do not fit; a second stream.
            PeerLostError: a rank died or did not arrive in time.

        Example:
            >>> import torch
            >>> from mxpert.distributed import ExpertParallel
            >>> ep = ExpertParallel(num_experts=2, top_k=1, hidden_size=32, max_tokens=4)
            >>> x = torch.ones(1, 32, dtype=torch.bfloat16)
            >>> got = ep.dispatch(x, torch.ones(1, 1), torch.tensor([[0]]))
            >>> output = torch.empty_like(x)
            >>> ep.combine(torch.full((4, 32), 3, dtype=torch.bfloat16), got, out=output) is output
            True
        """
        op = f"{_OP}.combine"
        if not isinstance(dispatched, DispatchedTokens):
            got = type(dispatched).__name__
            raise TypeError(message(op, "dispatched", "DispatchedTokens", got))
        shape, width = dispatched.topk_ids.shape[0], self.hidden_size
        place: dict[str, Any] = dict(device=self.device, contiguous=True)
        require_tensor(rows, op, "rows", dtype=self.combine_dtype, shape=(shape, width), **place)
        if out is not None:
            size = dispatched.num_tokens, width
            require_tensor(out, op, "out", dtype=dispatched.out_dtype, shape=size, **place)
        self._guard.check(op)
        with torch.no_grad():
            return self.combine_unchecked(rows, dispatched, out)

    def run_layer(self, options: MoEOptions, inputs: FusedMoEInputs) -> torch.Tensor:
        """What `mxpert.fused_moe` with `expert_parallel` calls.

        Args:
            options: of the layer, checked.
            inputs: without an expert map, a number of tokens and arrivals.
        """
        layer = RanksOptions(options, self._handle)
        if inputs.out is None:
            return LAYER(layer, inputs)
        LAYER_OUT(layer, inputs)
        return inputs.out

    def dispatch_unchecked(
        self,
        x: Rows,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        scale_rule: ScaleRule,
        out_dtype: torch.dtype,
        call: Call | None = None,
    ) -> DispatchedTokens:
        """`dispatch` of arguments that were checked; call: of the layer that they are for."""
        self._guard.check(_OP)
        bound = self.max_tokens
        call = call or Call(bound, scale_rule=scale_rule, layer=self.layer)
        options: dict[str, Any] = dict(bound=bound, scale_rule=scale_rule)
        return self._exchange.dispatch(
            x, topk_weights, topk_ids, **options, out_dtype=out_dtype, call=call
        )

    def layer_kernel(self, kernel: LayerKernel, out_dtype: torch.dtype) -> LayerLaunch | None:
        """The whole layer as one kernel; None if the transport has none for `kernel`.

        Args:
            kernel: of the local layer. out_dtype: of the result.

        Raises:
            What `dispatch` raises.
        """
        self._guard.check(_OP)
        given: dict[str, Any] = dict(bound=self.max_tokens, out_dtype=out_dtype, layer=self.layer)
        return self._exchange.layer_kernel(kernel, **given)

    def combine_unchecked(
        self, rows: torch.Tensor, dispatched: DispatchedTokens, out: torch.Tensor | None
    ) -> torch.Tensor:
        """`combine` of arguments that were checked, on the stream of the dispatch."""
        if out is None:
            size = dispatched.num_tokens, self.hidden_size
            out = torch.empty(size, dtype=dispatched.out_dtype, device=self.device)
        self._exchange.combine(rows, dispatched, out)
        return out

    @property
    def exchange(self) -> Exchange:
        """The transport's exchange."""
        return self._exchange

    def check_tokens(
        self, op: str, x: object, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> None:
        """Check what `dispatch` gets; errors name `op`.

        Raises:
            TypeError, ValueError: arguments that do not fit.
        """
        check_tokens(op, self, x, topk_weights, topk_ids)

    def agree(self, arguments: dict[str, object] | Exception) -> None:
        """Wait for all ranks; raise where they give different values, or where one has an error."""
        agree(self.group, arguments)

    def explain(self) -> str:
        """The transport, the reason for it, and why not the others; one line each."""
        lines = [f"transport: {self.transport.value} ({self._why[self.transport]})"]
        for transport, reason in self._why.items():
            if transport is not self.transport:
                lines.append(f"not {transport.value}: {reason}")
        lines.append(
            f"rank {self.rank} of {self.size}: {self.num_local_experts} of "
            f"{self.placement.num_experts} experts, {self.max_tokens} slots a rank, wire "
            f"{self.wire_format}, combine {str(self.combine_dtype).removeprefix('torch.')}"
        )
        return "\n".join(lines)

    def check(self) -> None:
        """Synchronise with the device, and raise an error if a rank was lost.

        Raises:
            PeerLostError: a rank died or did not arrive in time; results since then are NaN, or
                were never returned.
        """
        self._exchange.check()

    def close(self) -> None:
        """Free buffers and the group that the object made. Later calls are errors.

        Every rank that is alive should close its object; the others may be gone.
        """
        self._exchange.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """The object itself: copies of a model share their ranks."""
        return self

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(rank {self.rank} of {self.size}, {self.placement!r}, "
            f"{self.transport.name}, max_tokens={self.max_tokens}, device='{self.device}')"
        )
