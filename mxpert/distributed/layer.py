"""The layer of `fused_moe(expert_parallel=…)` as an op: dispatch → local layer → combine.

As an op it is checked once for each geometry, and torch.compile and export see one node. The op
knows its `ExpertParallel` by a number.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..dispatch import launch, resolve_cached, without_grad
from ..errors import message
from ..ops.library import OpSpec
from ..ops.local_weights import check_wire_format
from ..ops.moe import fused_moe_received, received_problem
from ..ops.moe_checks import check_out, check_received, moe_options
from ..ops.schema import Operand
from ..problem import MoEOptions, MoEProblem
from ..runtime.geometry import CachedCall, Described
from ..weights import MoEWeights
from .calls import call_of

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

OBJECTS: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()
"""The living objects by their number."""


class LayerOp(OpSpec[torch.Tensor]):
    """`fused_moe` over several ranks. Options are the layer's and the number of its object."""

    def _run(
        self, options: Sequence[Any], geometry: Described | None, inputs: dict[str, Any]
    ) -> Any:
        """Check → describe → resolve → exchange and launch; nothing is sent before the launch."""
        call = self._checked(options, geometry, inputs)
        # An error here comes before the others wait for this rank.
        kernel, config = resolve_cached(call)
        ranks, out_dtype = OBJECTS[options[1]], options[0].out_dtype
        whole = ranks.layer_kernel(kernel, out_dtype)
        if whole is not None:
            return launch(whole, config, call, geometry, inputs)
        return _exchange(ranks, out_dtype, call, inputs)


@without_grad
def _exchange(
    ranks: ExpertParallel, out_dtype: torch.dtype, call: CachedCall, inputs: dict[str, Any]
) -> torch.Tensor:
    """Dispatch, the local layer as an op of its own, combine."""
    local: Any = call.problem
    routed = inputs["x"], inputs["topk_weights"], inputs["topk_ids"]
    options, weights = local.options, inputs["weights"]
    dispatched = ranks.dispatch_unchecked(
        *routed,
        scale_rule=options.scale_rule,
        out_dtype=out_dtype,
        call=call_of(options, weights, ranks.max_tokens),
    )
    rows = fused_moe_received(dispatched, weights, options, ranks.local_top_k, call)
    return ranks.combine_unchecked(rows, dispatched, inputs.get("out"))


def check_layer(
    options: MoEOptions,
    handle: int,
    x: Operand,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    """Checks of `fused_moe` with `expert_parallel`."""
    check_received(options, x, weights, topk_weights, topk_ids, None, None)
    if not torch.compiler.is_compiling():  # a traced layer is checked when it runs
        _check_ranks(OBJECTS[handle], options, x, weights, topk_weights, topk_ids)


def check_layer_out(
    options: MoEOptions,
    handle: int,
    x: Operand,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Checks of `fused_moe` with `expert_parallel` and `out`."""
    check_layer(options, handle, x, weights, topk_weights, topk_ids)
    check_out(out, options, weights, topk_ids.shape[0])


def _check_ranks(
    ranks: ExpertParallel,
    options: MoEOptions,
    x: Operand,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    op = "fused_moe"
    ranks.check_tokens(op, x, topk_weights, topk_ids)
    if weights.num_experts != ranks.num_local_experts:
        raise ValueError(
            message(
                op,
                "weights",
                f"the {ranks.num_local_experts} experts of rank {ranks.rank}",
                f"{weights.num_experts} experts",
                "take ExpertParallel.local_experts of the layer's experts",
            )
        )
    check_wire_format(op, ranks, options.activation_format)


def _describe(
    options: MoEOptions, handle: int, *, weights: MoEWeights, topk_ids: torch.Tensor, **_: Any
) -> MoEProblem:
    ranks = OBJECTS[handle]
    local = moe_options(
        "fused_moe",
        options.activation,
        options.activation_format,
        options.scale_rule,
        options.apply_router_weight_on_input,
        options.combine,
        ranks.combine_dtype,
    )
    num_rows = ranks.size * ranks.max_tokens
    return received_problem(
        local, ranks.local_top_k, weights=weights, num_rows=num_rows, top_k=topk_ids.shape[1]
    )


def _fake(
    options: MoEOptions, handle: int, *, weights: MoEWeights, topk_ids: torch.Tensor, **_: Any
) -> torch.Tensor:
    shape = topk_ids.shape[0], weights.hidden_size
    return topk_ids.new_empty(shape, dtype=options.out_dtype)


LAYER = LayerOp(
    "fused_moe_expert_parallel", check=check_layer, describe=_describe, fake=_fake, is_public=False
)
LAYER_OUT = LayerOp(
    "fused_moe_expert_parallel_out",
    check=check_layer_out,
    describe=_describe,
    fake=_fake,
    returns="()",
    mutates="out",
    is_public=False,
)
