"""Registration of the ops with torch.library, and dataclasses as arguments of their schemas.

Ops are registered so that torch.compile, export and FakeTensor see them as leaves. A schema holds
tensors and numbers only. Weights, plans and options are therefore flattened to them and rebuilt
inside, without a second check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..dispatch import without_grad
from ..errors import PLAIN_TENSORS
from ..formats.spec import MXFP4, ScaleRule, ScaleSpan, get_format
from ..formats.tensor import Layout, MXTensor
from ..problem import Combine, MoEOptions, activation_from
from ..routing import RoutingPlan
from ..weights import GateUpOrder, MoEWeights
from .moe_checks import moe_options

_LIBRARY = torch.library.Library("mxpert", "FRAGMENT")
_T = TypeVar("_T")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``mxpert::<schema>`` for every device and return a function that calls it.

    Outputs have no gradient, on any backend. Eager calls that nothing observes skip the dispatcher,
    which costs as much host time as a launch.
    """
    name = schema.split("(")[0]
    run = without_grad(implementation)
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"mxpert::{name}", fake, lib=_LIBRARY)
    leaf = getattr(torch.ops.mxpert, name)

    def call(first: torch.Tensor, *arguments: Any) -> Any:
        return (run if is_unobserved(first) else leaf)(first, *arguments)

    return call


def _observers() -> tuple[Callable[[], object], ...] | None:
    """Return torch's functions that tell whether something observes ops.

    Observers are modes (fake tensors, export, counters), functorch, tracing and the profiler. The
    result is None if this torch lacks such functions.
    """
    try:
        return (
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._get_tracing_state,
            torch._C._autograd._profiler_enabled,
        )
    except AttributeError:
        return None


_OBSERVERS = _observers()


def is_unobserved(tensor: torch.Tensor) -> bool:
    """Return whether a call on `tensor` is eager and may skip torch's dispatcher.

    It may not where something observes ops, and where the dispatcher has to negate a lazy view.
    """
    if (
        torch.compiler.is_compiling()
        or _OBSERVERS is None
        or type(tensor) not in PLAIN_TENSORS
        or tensor.is_neg()
    ):
        return False
    dispatch_modes, function_modes, transforms, tracing, profiler = _OBSERVERS
    return not (dispatch_modes() or function_modes() or transforms() or tracing() or profiler())


def rebuild(cls: type[_T], **fields: Any) -> _T:
    """Return an instance of a frozen dataclass without checking its fields again."""
    instance = object.__new__(cls)
    if torch.compiler.is_compiling():  # dynamo of torch 2.11 cannot trace the faster way
        for name, value in fields.items():
            object.__setattr__(instance, name, value)
    else:
        instance.__dict__.update(fields)
    return instance


WEIGHTS_SCHEMA = (
    "Tensor gate_up_qdata, Tensor gate_up_scale, Tensor? gate_up_reference, "
    "Tensor down_qdata, Tensor down_scale, Tensor? down_reference, "
    "Tensor? gate_up_bias, Tensor? down_bias, str gate_up_order, str layout, "
    "int num_experts, int hidden_size, int intermediate_size"
)


def flatten_weights(weights: MoEWeights) -> tuple[Any, ...]:
    """Arguments for WEIGHTS_SCHEMA."""
    assert weights.gate_up_order is not None  # checked by MoEWeights
    gate_up, down = weights.gate_up_proj, weights.down_proj
    return (
        gate_up.qdata,
        gate_up.scale,
        gate_up.reference,
        down.qdata,
        down.scale,
        down.reference,
        weights.gate_up_bias,
        weights.down_bias,
        weights.gate_up_order.value,
        weights.layout.value,
        weights.num_experts,
        weights.hidden_size,
        weights.intermediate_size,
    )


def rebuild_weights(arguments: tuple[Any, ...]) -> MoEWeights:
    """The inverse of `flatten_weights`."""
    (
        gate_up,
        gate_up_scale,
        gate_up_reference,
        down,
        down_scale,
        down_reference,
        gate_up_bias,
        down_bias,
        order,
        layout,
        experts,
        hidden,
        intermediate,
    ) = arguments
    return rebuild(
        MoEWeights,
        gate_up_proj=_rebuild_projection(
            gate_up, gate_up_scale, gate_up_reference, layout, (experts, 2 * intermediate, hidden)
        ),
        down_proj=_rebuild_projection(
            down, down_scale, down_reference, layout, (experts, hidden, intermediate)
        ),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_up_order=GateUpOrder(order),
        fold_certificates=None,
        source_order=None,
    )


def _rebuild_projection(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    reference: torch.Tensor | None,
    layout: str,
    shape: tuple[int, int, int],
) -> MXTensor:
    return rebuild(
        MXTensor,
        qdata=qdata,
        scale=scale,
        format=MXFP4,
        axis=-1,
        layout=Layout(layout),
        reference=reference,
        logical_shape=None if reference is None else shape,
    )


def rebuild_mx(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    name: str,
    *,
    axis: int = -1,
    span: ScaleSpan = ScaleSpan.BLOCK,
    wide: torch.Tensor | None = None,
) -> MXTensor:
    """A ROW_MAJOR MXTensor from its validated parts."""
    return rebuild(
        MXTensor,
        qdata=qdata,
        scale=scale,
        format=get_format(name),
        axis=axis,
        layout=Layout.ROW_MAJOR,
        reference=None,
        logical_shape=None,
        scale_span=span,
        wide_blocks=wide,
    )


PLAN_SCHEMA = (
    "Tensor sorted_token_ids, Tensor sorted_weights, Tensor block_expert_ids, Tensor num_valid, "
    "Tensor slot_rows, int plan_experts, int routing_block_m"
)


def flatten_plan(plan: RoutingPlan) -> tuple[Any, ...]:
    """Arguments for PLAN_SCHEMA; T and top_k are the shape of `slot_rows`."""
    return (
        plan.sorted_token_ids,
        plan.sorted_weights,
        plan.block_expert_ids,
        plan.num_valid,
        plan.slot_rows,
        plan.num_experts,
        plan.routing_block_m,
    )


def rebuild_plan(arguments: tuple[Any, ...]) -> RoutingPlan:
    """The inverse of `flatten_plan`."""
    ids, row_weights, block_experts, num_valid, slot_rows, num_experts, block_m = arguments
    return RoutingPlan(
        ids,
        row_weights,
        block_experts,
        num_valid,
        slot_rows,
        slot_rows.shape[0],
        slot_rows.shape[1],
        num_experts,
        block_m,
    )


OPTIONS_SCHEMA = (
    "str activation, float[] activation_parameters, str activation_format, str scale_rule, "
    "bool router_weight_on_input, str combine, ScalarType out_dtype"
)


def flatten_options(options: MoEOptions) -> tuple[Any, ...]:
    """Arguments for OPTIONS_SCHEMA."""
    return (
        options.activation.name,
        list(options.activation.parameters),
        options.activation_format,
        options.scale_rule.value,
        options.apply_router_weight_on_input,
        options.combine.value,
        options.out_dtype,
    )


def rebuild_options(op: str, arguments: tuple[Any, ...]) -> MoEOptions:
    """The inverse of `flatten_options`; the object that the op itself has for these choices."""
    name, parameters, activation_format, rule, on_input, combine, out_dtype = arguments
    return moe_options(
        op,
        activation_from(name, parameters),
        activation_format,
        ScaleRule(rule),
        on_input,
        Combine(combine),
        out_dtype,
    )


NUM_WEIGHT_ARGUMENTS = 13
NUM_PLAN_ARGUMENTS = 7
NUM_OPTION_ARGUMENTS = 7
