"""The layer of `fused_moe(expert_parallel=…)` as an op: dispatch → local layer → combine.

As an op it is checked once for each geometry, and torch.compile and export see one node. The op
knows its `ExpertParallel` by a number.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core.calls import launch, without_grad
from ..core.geometry import CachedCall
from ..core.ops import OpSpec
from ..core.problem import MoEOptions, MoEProblem, Op
from ..core.registry import resolve_cached
from ..errors import message
from ..moe.checks import check_local_layer, check_out, moe_options
from ..moe.inputs import FusedMoEInputs
from ..moe.local_weights import check_wire_format
from ..moe.op import fake_layer, fused_moe_received, moe_problem
from .calls import call_of

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

OBJECTS: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()
"""The living objects by their number."""


class RanksOptions(NamedTuple):
    """Options of a layer, and the number of its object in `OBJECTS`."""

    options: MoEOptions
    handle: int


class RanksOp(OpSpec[RanksOptions, FusedMoEInputs, torch.Tensor]):
    """`fused_moe` over several ranks."""

    def _launch(
        self, call: CachedCall, tensors: list[torch.Tensor] | None, inputs: FusedMoEInputs
    ) -> torch.Tensor:
        """Resolve → exchange and launch; nothing is sent before the launch."""
        options: RanksOptions = call.options  # type: ignore[assignment]  # of this op's calls
        # An error here comes before the others wait for this rank.
        kernel, config = resolve_cached(call)
        ranks, out_dtype = OBJECTS[options.handle], options.options.out_dtype
        whole = ranks.layer_kernel(kernel, out_dtype)
        if whole is not None:
            return launch(whole, config, call, tensors, inputs)
        return _exchange(ranks, out_dtype, call, inputs)


@without_grad
def _exchange(
    ranks: ExpertParallel, out_dtype: torch.dtype, call: CachedCall, inputs: FusedMoEInputs
) -> torch.Tensor:
    """Dispatch, the local layer as an op of its own, combine."""
    local, weights = call.problem, inputs.weights
    assert isinstance(local, MoEProblem)  # for the type checker: the problem of a layer
    options = local.options
    dispatched = ranks.dispatch_unchecked(
        inputs.x,
        inputs.topk_weights,
        inputs.topk_ids,
        scale_rule=options.scale_rule,
        out_dtype=out_dtype,
        call=call_of(options, weights, ranks.max_tokens, ranks.layer),
    )
    received = FusedMoEInputs(dispatched.x, weights, dispatched.topk_weights, dispatched.topk_ids)
    rows = fused_moe_received(received, options, ranks.local_top_k, call)
    return ranks.combine_unchecked(rows, dispatched, inputs.out)


def check_layer(options: RanksOptions, inputs: FusedMoEInputs) -> None:
    """Checks of `fused_moe` with `expert_parallel`."""
    check_local_layer(options.options, inputs)
    if not torch.compiler.is_compiling():  # a traced layer is checked when it runs
        _check_ranks(OBJECTS[options.handle], options.options, inputs)
    check_out(options.options, inputs)


def _check_ranks(ranks: ExpertParallel, options: MoEOptions, inputs: FusedMoEInputs) -> None:
    op, weights = "fused_moe", inputs.weights
    ranks.check_tokens(op, inputs.x, inputs.topk_weights, inputs.topk_ids)
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


def _describe(options: RanksOptions, inputs: FusedMoEInputs) -> MoEProblem:
    layer, ranks = options.options, OBJECTS[options.handle]
    local = moe_options(
        "fused_moe",
        layer.activation,
        layer.activation_format,
        layer.scale_rule,
        layer.apply_router_weight_on_input,
        layer.combine,
        ranks.combine_dtype,
        layer.num_sms,
    )
    sizes = ranks.size * ranks.max_tokens, inputs.topk_ids.shape[1]
    return moe_problem(Op.FUSED_MOE, local, inputs.weights, *sizes, local_top_k=ranks.local_top_k)


LAYER = RanksOp(
    "fused_moe_expert_parallel",
    check=check_layer,
    describe=_describe,
    fake=lambda options, inputs: fake_layer(options.options, inputs),
    absent=("expert_map", "num_local_tokens", "out", "arrivals"),
    is_public=False,
)
LAYER_OUT = RanksOp(
    "fused_moe_expert_parallel_out",
    check=check_layer,
    describe=_describe,
    fake=lambda options, inputs: fake_layer(options.options, inputs),
    absent=("expert_map", "num_local_tokens", "arrivals"),
    returns="()",
    mutates="out",
    is_public=False,
)
