"""Calling sequences of other projects, and torch.compile, on several ranks.

The classes here have the public interfaces of vLLM's FusedMoEPrepareAndFinalizeModular and of
torchtitan's token dispatchers, and the drivers call them in the order in which those projects do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mxpert
from mxpert import MoEWeights, MXTensor
from mxpert.distributed import DispatchedTokens, ExpertParallel, Transport
from mxpert.formats import get_format
from mxpert.testing.numerics import assert_close_relative, assert_exact
from tests.distributed.ranked_layer import (
    FLOAT32,
    SHAPE,
    TRANSPORTS,
    Tokens,
    judge,
    local_layer,
    make,
    part_of,
    run,
    size,
    tokens,
    whole_layer,
)

Prepared = tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, torch.Tensor]
Reduce = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""vLLM's TopKWeightAndReduce.apply: expert output, weights, ids → [M, K]."""


class PrepareAndFinalize:
    """vLLM's prepare and finalize by an ExpertParallel."""

    def __init__(self, ep: ExpertParallel) -> None:
        self._ep = ep
        self._sent: DispatchedTokens | None = None

    def num_dispatchers(self) -> int:
        return self._ep.size

    def max_num_tokens_per_rank(self) -> int:
        return self._ep.max_tokens

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def output_is_reduced(self) -> bool:
        return False

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: object,
        defer_input_quant: bool,
    ) -> Prepared:
        """Rows, scales, no counts, local ids, weights; the experts then need no expert map."""
        assert num_experts == self._ep.placement.num_experts
        self._sent = self._ep.dispatch(a1, topk_weights, topk_ids, out_dtype=a1.dtype)
        x = self._sent.x
        rows = (x.qdata.view(x.dtype), x.scale) if isinstance(x, MXTensor) else (x, None)
        return *rows, None, self._sent.topk_ids, self._sent.topk_weights

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Reduce,
    ) -> None:
        """Write this rank's tokens into `output`."""
        assert self._sent is not None
        rows = weight_and_reduce_impl(fused_expert_output, topk_weights, topk_ids)
        self._ep.combine(rows.to(self._ep.combine_dtype), self._sent, out=output)


def modular_kernel(
    prepare_finalize: PrepareAndFinalize, mine: MoEWeights, given: Tokens, *, reduces: bool
) -> torch.Tensor:
    """vLLM's order: prepare, experts, finalize.

    reduces: whether the experts weigh and sum themselves; else they return [M, top_k, K].
    """
    ids = given.ids.to(prepare_finalize.topk_indices_dtype())
    assert isinstance(given.x, torch.Tensor)
    assert given.x.shape[0] <= prepare_finalize.max_num_tokens_per_rank()
    output = torch.empty_like(given.x)
    fixed = SHAPE.num_experts, None, False, None, False
    a1q, scale, _, ids, weights = prepare_finalize.prepare(given.x, given.weights, ids, *fixed)
    rows = a1q
    if scale is not None:
        rows = MXTensor(a1q.view(torch.uint8), scale, get_format("mxfp8"))
    sent = DispatchedTokens(rows, weights, ids, 0)
    if reduces:
        fused_out = local_layer(sent, mine, format="bf16" if scale is None else "mxfp8")
        impl = _already_reduced
    else:
        ones = torch.ones_like(weights)
        slots = range(ids.shape[1])
        each = [torch.where(torch.arange(ids.shape[1]) == slot, ids, -1) for slot in slots]
        fused_out = torch.stack(
            [local_layer(DispatchedTokens(rows, ones, one, 0), mine) for one in each], dim=1
        )
        impl = _weigh_and_sum
    prepare_finalize.finalize(output, fused_out, weights, ids, False, impl)
    return output


def _already_reduced(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return rows


def _weigh_and_sum(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (rows * weights.masked_fill(ids < 0, 0)[..., None]).sum(1)


def vllm_prepare_and_finalize() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        for format in ("bf16", "mxfp8"):
            ep = make(transport=transport, wire_format=format)
            mine, given = part_of(weights, ep), tokens()
            expected = run(ep, mine, given, activation_format=format, out_dtype=torch.bfloat16)
            adapter = PrepareAndFinalize(ep)
            actual = modular_kernel(adapter, mine, given, reduces=True)
            assert_exact(actual, expected, f"{transport.name} {format}: experts that reduce")
            if format == "bf16":
                actual = modular_kernel(adapter, mine, given, reduces=False)
                one_rounding = 2.0**-8 + FLOAT32
                assert_close_relative(actual, judge(weights, given), one_rounding, "[M, k, K]")
            ep.close()


@dataclass(frozen=True)
class Metadata:
    """What torchtitan hands from dispatch to combine."""

    sent: DispatchedTokens
    places: torch.Tensor
    """int64 [R], slots of the received rows in the order of local experts."""


class TokenDispatcher:
    """torchtitan's token dispatcher by an ExpertParallel."""

    def __init__(self, num_experts: int, top_k: int, **options: Any) -> None:
        self.num_experts, self.top_k, self._options = num_experts, top_k, options

    def wire_meshes(self, *, ep_mesh: DeviceMesh) -> None:
        sizes = dict(num_experts=self.num_experts, top_k=self.top_k)
        self.ep = ExpertParallel(ep_mesh, **sizes, **self._options)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Metadata]:
        """Rows sorted by local expert, counts of the local experts, metadata."""
        sent = self.ep.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, out_dtype=torch.float32)
        ids = sent.topk_ids.flatten().long()
        places = ids.argsort(stable=True)[(ids < 0).sum() :]
        counts = torch.bincount(ids[places], minlength=self.ep.num_local_experts)
        assert isinstance(sent.x, torch.Tensor)
        return sent.x[places // self.top_k], counts, Metadata(sent, places)

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: Metadata,
        x_TD: torch.Tensor,
        *,
        num_local_tokens_after_padding: int,
        local_seq_len_after_padding: int,
    ) -> torch.Tensor:
        """Weigh, sum the rows of each received token, and return them to their ranks."""
        sent, places = metadata.sent, metadata.places
        scores = sent.topk_weights.flatten()[places, None]
        rows = routed_output_RD.new_zeros(sent.topk_ids.shape[0], x_TD.shape[1])
        rows.index_add_(0, places // self.top_k, routed_output_RD * scores)
        return self.ep.combine(rows, sent)


def torchtitan_token_dispatcher() -> None:
    mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(1)
    hidden = SHAPE.hidden_size
    matrices = torch.randn(SHAPE.num_experts, hidden, hidden, generator=generator)
    for transport in (Transport.ALL_TO_ALL, Transport.GATHER):
        dispatcher = TokenDispatcher(
            SHAPE.num_experts,
            SHAPE.top_k,
            hidden_size=hidden,
            max_tokens=8,
            transport=transport,
            combine_dtype=torch.float32,
        )
        dispatcher.wire_meshes(ep_mesh=mesh["ep"])
        mine = matrices[list(dispatcher.ep.local_experts)]
        given = tokens()
        assert isinstance(given.x, torch.Tensor)
        counts = torch.bincount(given.ids.flatten().long(), minlength=SHAPE.num_experts)
        rows, counts, metadata = dispatcher.dispatch(given.x, given.weights, given.ids, counts)
        parts = rows.float().split(counts.tolist())
        done = torch.cat([part @ matrix.T for part, matrix in zip(parts, mine, strict=True)])
        padding = dict(num_local_tokens_after_padding=8, local_seq_len_after_padding=8)
        actual = dispatcher.combine(done, metadata, given.x, **padding)
        chosen = matrices[given.ids.long()] @ given.x.float()[:, None, :, None]
        expected = (chosen.squeeze(-1) * given.weights[..., None]).sum(1)
        assert_close_relative(actual, expected, FLOAT32, transport.name)
        dispatcher.ep.close()


def _scaled_layer(ep: ExpertParallel, mine: MoEWeights) -> Callable[..., torch.Tensor]:
    """A layer between two operations of torch."""

    def layer(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = dict(activation=SHAPE.activation, expert_parallel=ep)
        return x + mxpert.fused_moe(2 * x, mine, scores, ids, **options)

    return layer


def compiled_without_a_graph_break() -> None:
    weights = whole_layer()
    for transport in TRANSPORTS:
        ep = make(transport=transport)
        layer = _scaled_layer(ep, part_of(weights, ep))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for count in (5, 3):
            given = tokens(count)
            arguments = given.x, given.weights, given.ids
            assert_exact(compiled(*arguments), layer(*arguments), transport.name)
        ep.close()
