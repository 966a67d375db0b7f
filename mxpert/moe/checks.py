"""Argument checks of the MoE ops: everything that is known without looking at data.

Messages that hold a size are composed on failure alone: under torch.compile sizes are symbols.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from ..core.problem import (
    OUT_DTYPES,
    Activation,
    ActivationLike,
    Combine,
    CombineLike,
    GroupScore,
    MoEOptions,
    Scoring,
    TopKOptions,
    parse_activation,
    parse_activation_format,
)
from ..core.target import check_num_sms
from ..errors import Checks
from ..formats.spec import FLOAT_DTYPES, ScaleRule, ScaleRuleLike
from ..formats.tensor import MXTensor, Operand
from ..routing.op import check_route_topk
from ..routing.plan import MAX_ROUTED_ROWS, MAX_TOP_K, RoutingPlan, check_plan_shapes, require_topk
from .inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs, LogitsInputs
from .weights import MoEWeights


class ReceivedOptions(NamedTuple):
    """Options of a layer whose tokens other ranks send.

    Args:
        options: of the layer.
        local_top_k: expected ids of a row that are not −1; configs follow it, results do not.
    """

    options: MoEOptions
    local_top_k: float


class LogitsOptions(NamedTuple):
    """Options of a layer that chooses experts from logits: the layer's, then those of the choice.

    Args:
        options: of the layer.
        top_k: experts per token. The other fields are those of `TopKOptions`.
    """

    options: MoEOptions
    top_k: int
    scoring: Scoring
    normalize: bool
    num_groups: int
    top_groups: int
    routed_scaling_factor: float
    group_score: GroupScore | None
    clamp_nan: bool

    @property
    def routing(self) -> TopKOptions:
        """How experts are chosen and weighed."""
        return TopKOptions(*self[2:])


def check_fused_moe(options: MoEOptions, inputs: FusedMoEInputs) -> None:
    """Checks of `fused_moe`."""
    check_local_layer(options, inputs)
    weights, expert_map, top_k = inputs.weights, inputs.expert_map, inputs.topk_ids.shape[1]
    num_global = weights.num_experts if expert_map is None else expert_map.shape[0]
    if top_k > num_global:
        wanted = f"at most {num_global} experts per token"
        raise Checks("fused_moe").value_error("topk_ids.shape[1]", wanted, top_k)
    check_out(options, inputs)


def check_received(options: ReceivedOptions, inputs: FusedMoEInputs) -> None:
    """Checks of `fused_moe` for rows that other ranks send."""
    check_local_layer(options.options, inputs)


def check_local_layer(options: MoEOptions, inputs: FusedMoEInputs) -> None:
    """Checks of `fused_moe` for rows that may have more ids than there are local experts."""
    need = Checks("fused_moe")
    _check_layer(options, inputs, need)
    routed = inputs.topk_weights, inputs.topk_ids
    check_topk(*routed, inputs.x.shape[0], inputs.weights.device, need)


def check_from_logits(options: LogitsOptions, inputs: LogitsInputs) -> None:
    """Checks of `fused_moe_from_logits`."""
    need = Checks("fused_moe_from_logits")
    _check_layer(options.options, inputs, need)
    logits, weights, expert_map = inputs.logits, inputs.weights, inputs.expert_map
    need.tensor(
        logits,
        "logits",
        dtype=FLOAT_DTYPES,
        shape=(
            inputs.x.shape[0],
            weights.num_experts if expert_map is None else expert_map.shape[0],
        ),
        device=weights.device,
    )
    check_route_topk(logits, options.top_k, options.routing, inputs.correction_bias, need.op)
    _check_routed_rows("logits", inputs.x.shape[0] * options.top_k, need)
    check_out(options.options, inputs, need.op)


def _check_layer(options: MoEOptions, inputs: LayerInputs, need: Checks) -> None:
    """Everything but ids or logits, and `out`."""
    x, weights = inputs.x, inputs.weights
    _check_weights(weights, need)
    check_num_sms(options.num_sms, weights.device, need)
    check_gate(options.activation, weights.has_gate, need)
    _check_rows(x, "x", weights, weights.hidden_size, options, need)
    if inputs.expert_map is not None:
        need.tensor(
            inputs.expert_map,
            "expert_map",
            dtype=torch.int32,
            shape=(None,),
            device=weights.device,
            contiguous=True,
        )
    if inputs.num_local_tokens is not None:
        need.tensor(
            inputs.num_local_tokens,
            "num_local_tokens",
            dtype=torch.int32,
            shape=(1,),
            device=weights.device,
        )


def check_out(options: MoEOptions, inputs: LayerInputs, op: str = "fused_moe") -> None:
    """Check the tensor that a layer writes, if any: contiguous [T, H] in ``options.out_dtype``."""
    if inputs.out is not None:
        Checks(op).tensor(
            inputs.out,
            "out",
            dtype=options.out_dtype,
            shape=(inputs.x.shape[0], inputs.weights.hidden_size),
            device=inputs.weights.device,
            contiguous=True,
        )


def check_gate_up(options: MoEOptions, inputs: GateUpInputs) -> None:
    """Checks of `moe_gate_up`."""
    need, x, weights, plan = Checks("moe_gate_up"), inputs.x, inputs.weights, inputs.plan
    _check_weights(weights, need)
    check_num_sms(options.num_sms, weights.device, need)
    check_gate(options.activation, weights.has_gate, need)
    _check_plan(plan, weights, need)
    _check_rows(x, "x", weights, weights.hidden_size, options, need)
    if x.shape[0] != plan.num_tokens:
        raise need.value_error("x.shape[0]", f"the plan's {plan.num_tokens} tokens", x.shape[0])


def check_down(options: MoEOptions, inputs: DownInputs) -> None:
    """Checks of `moe_down`."""
    need, h, weights, plan = Checks("moe_down"), inputs.h, inputs.weights, inputs.plan
    _check_weights(weights, need)
    check_num_sms(options.num_sms, weights.device, need)
    _check_plan(plan, weights, need)
    _check_rows(h, "h", weights, weights.intermediate_size, options, need)
    if h.shape[0] != plan.capacity:
        raise need.value_error(
            "h.shape[0]",
            f"the plan's {plan.capacity} sorted rows",
            h.shape[0],
            "pass what moe_gate_up returned for the same plan",
        )


def check_topk(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_tokens: int | None,
    device: torch.device,
    need: Checks,
) -> None:
    """Router output: ids [T, k] and weights [T, k] on one device, within the packing limits."""
    require_topk(topk_weights, topk_ids, need.op, num_tokens=num_tokens, device=device)
    top_k = topk_ids.shape[1]
    if not 1 <= top_k <= MAX_TOP_K:
        raise need.value_error("topk_ids.shape[1]", f"1 to {MAX_TOP_K} experts per token", top_k)
    _check_routed_rows("topk_ids", topk_ids.numel(), need)


def _check_routed_rows(name: str, num_rows: int, need: Checks) -> None:
    if num_rows >= MAX_ROUTED_ROWS:
        raise need.value_error(
            name, f"fewer than {MAX_ROUTED_ROWS} routed rows (T·top_k)", num_rows, "split the batch"
        )


def _check_weights(weights: MoEWeights, need: Checks) -> None:
    if not isinstance(weights, MoEWeights):
        got, remedy = type(weights).__name__, "mxpert.quantize_weights makes them of dense tensors"
        raise need.type_error("weights", "MoEWeights", got, remedy)
    gate_up, down = weights.gate_up_proj, weights.down_proj
    for name, part in (
        ("gate_up_proj.qdata", gate_up.qdata),
        ("gate_up_proj.scale", gate_up.scale),
        ("down_proj.qdata", down.qdata),
        ("down_proj.scale", down.scale),
    ):
        if part.stride(-1) != 1 and part.shape[-1] > 1:
            raise need.value_error(
                f"weights.{name}.stride(-1)",
                "1 (dense along K)",
                part.stride(-1),
                "call weights.prepare(device=...)",
            )
    for name, projection in (("gate_up_proj", gate_up), ("down_proj", down)):
        zero_point = getattr(projection, "zero_point", None)
        if zero_point is not None and zero_point.stride() != projection.scale.stride():
            raise need.value_error(
                f"weights.{name}.zero_point.stride()",
                f"{projection.scale.stride()}, as scale has",
                zero_point.stride(),
                "call weights.prepare(device=...)",
            )


def check_gate(activation: Activation, has_gate: bool, need: Checks) -> None:
    """Raise ValueError for an activation that joins gate and up where there is no gate, or not."""
    if activation.is_gated == has_gate:
        return
    if has_gate:
        wanted = "one that joins gate and up, which these weights have"
        remedy = "weights of ReLU2 are the up projection [E, F, H] alone, with gate_up_order=None"
    else:
        wanted, remedy = "ReLU2(), because these weights have no gate", "pass activation='relu2'"
    raise need.value_error("activation", wanted, activation, remedy)


def refuse_foreign_call(arguments: tuple[object, ...]) -> None:
    """Raise for a call of `fused_moe` as other libraries spell it, or without an activation.

    Args:
        arguments: the positional ones.
    """
    need = Checks("fused_moe")
    if len(arguments) > 4 or isinstance(arguments[1], torch.Tensor):
        raise need.type_error(
            "arguments",
            "fused_moe(x, weights, topk_weights, topk_ids, activation='silu')",
            f"{len(arguments)} by position, as vLLM's fused_experts(x, w1, w2, topk_weights, "
            "topk_ids) takes them",
            "once: weights = mxpert.quantize_weights(w1, w2, gate_up_order='concatenated')"
            ".prepare(device=x.device)",
        )
    parse_activation(None, need.op)


def moe_options(
    op: str,
    activation: ActivationLike,
    activation_format: str = "bf16",
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
    combine: CombineLike = Combine.REDUCE,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
) -> MoEOptions:
    """Check options; equal choices give the same object, by whose identity later caches look up.

    Names become what they stand for here, and nowhere else.
    """
    choices = (
        op,
        activation,
        activation_format,
        scale_rule,
        apply_router_weight_on_input,
        combine,
        out_dtype,
        num_sms,
    )
    if torch.compiler.is_compiling():
        return _checked_options(*choices)
    known = _known_options.get(id(activation))
    if known is not None and all(map(operator.is_, known[0], choices)):
        return known[1]
    try:
        options = _cached_options(*choices)
    except TypeError:  # a choice without a hash: the check raises an error that names it
        return _checked_options(*choices)
    if len(_known_options) >= _MAX_OPTIONS:
        _known_options.clear()
    _known_options[id(activation)] = choices, options
    return options


_MAX_OPTIONS = 1024
_known_options: dict[int, tuple[tuple[object, ...], MoEOptions]] = {}
"""The last choices with an activation, which cannot change, and what they gave; by its identity."""


def _checked_options(
    op: str,
    activation: ActivationLike,
    activation_format: str,
    scale_rule: ScaleRuleLike,
    apply_router_weight_on_input: bool,
    combine: CombineLike,
    out_dtype: torch.dtype,
    num_sms: int | None,
) -> MoEOptions:
    options = MoEOptions(
        parse_activation(activation, op),
        parse_activation_format(activation_format, op),
        ScaleRule.parse(scale_rule, op, "scale_rule"),
        apply_router_weight_on_input,
        Combine.parse(combine, op, "combine"),
        out_dtype,
        num_sms,
    )
    _check_options(options, op)
    return options


@functools.lru_cache(_MAX_OPTIONS, typed=True)
def _cached_options(op: str, *choices: Any) -> MoEOptions:  # Any: those of _checked_options
    options = _checked_options(op, *choices)
    parsed = tuple(getattr(options, each.name) for each in fields(options))
    return options if parsed == choices else _cached_options(op, *parsed)


_LAYERS = "fused_moe", "fused_moe_from_logits"


def _check_options(options: MoEOptions, op: str) -> None:
    need = Checks(op)
    _check_bool(options.apply_router_weight_on_input, need)
    need.dtype(options.out_dtype, OUT_DTYPES, "out_dtype")
    need(
        op not in _LAYERS or options.combine is not Combine.FLAT,
        "combine",
        "REDUCE or ATOMIC",
        "FLAT",
        "call make_routing_plan, moe_gate_up and moe_down: FLAT rows need the plan",
    )


def check_weight_on_input(op: str, on_input: bool, top_k: int) -> None:
    """Check `apply_router_weight_on_input` of a module.

    Raises:
        TypeError: not a bool. ValueError: more than one expert per token, as vLLM refuses it.
    """
    need = Checks(op)
    _check_bool(on_input, need)
    need(
        top_k == 1 or not on_input,
        "top_k",
        "1 with apply_router_weight_on_input",
        top_k,
        "call fused_moe, which scales one copy of x for each expert of a token",
    )


def _check_bool(on_input: object, need: Checks) -> None:
    if not isinstance(on_input, bool):
        raise need.type_error("apply_router_weight_on_input", "a bool", repr(on_input))


def _check_rows(
    rows: Operand, name: str, weights: MoEWeights, width: int, options: MoEOptions, need: Checks
) -> None:
    """Activations [rows, width]: bfloat16, or an MXTensor in the layer's activation format."""
    expected = options.mx_format
    if isinstance(rows, MXTensor):
        if expected is None or rows.format != expected:
            raise need.value_error(
                f"{name}.format",
                options.activation_format,
                rows.format.name,
                f"pass activation_format={rows.format.name.split('_')[0]!r}",
            )
        need(rows.axis == -1, f"{name}.axis", -1, rows.axis)
        if not (rows.qdata.is_contiguous() and rows.scale.is_contiguous()):
            raise need.value_error(
                name,
                "contiguous codes and scales",
                f"strides {rows.qdata.stride()}, {rows.scale.stride()}",
                "quantise along the last axis",
            )
        shape = rows.shape
    else:
        need.tensor(rows, name, dtype=torch.bfloat16)
        if need.op == "moe_down" and expected is not None:
            raise need.value_error(name, f"an MXTensor for {options.activation_format}", "a Tensor")
        if not (rows.dim() == 2 and (rows.stride(-1) == 1 or rows.numel() == 0)):
            raise need.value_error(
                name,
                "two dimensions, the last one dense",
                f"shape {list(rows.shape)}, strides {rows.stride()}",
                "call .contiguous()",
            )
        shape = rows.shape
    if not (len(shape) == 2 and shape[1] == width):
        raise need.value_error(f"{name}.shape", f"[*, {width}]", list(shape))
    if rows.device != weights.device:
        raise need.value_error(
            f"{name}.device",
            weights.device,
            rows.device,
            f"weights are on {weights.device}; move one of them",
        )


def _check_plan(plan: RoutingPlan, weights: MoEWeights, need: Checks) -> None:
    if not isinstance(plan, RoutingPlan):
        raise need.type_error(
            "plan", "a RoutingPlan", type(plan).__name__, "build it with mxpert.make_routing_plan"
        )
    check_plan_shapes(plan, need.op)
    if plan.num_experts != weights.num_experts:
        raise need.value_error(
            "plan.num_experts", f"the weights' {weights.num_experts} experts", plan.num_experts
        )
    need(plan.device == weights.device, "plan.device", weights.device, plan.device)
