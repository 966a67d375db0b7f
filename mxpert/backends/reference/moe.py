"""Reference MoE layer: float32 or float64 torch on any device, the oracle and the CPU default.

It rounds where the kernels round (quantised x, intermediate, rows before REDUCE, output) and
nowhere else. Experts are taken one at a time: only those that are hit are dequantised, and only
their valid rows are computed. Finding those rows synchronises with the device, which a kernel must
not do; output sizes follow from the plan's capacity alone, so callers see no difference.

Operands have at most 8 significant bits (bfloat16 or decoded MX values), so that torch's float32
matmul precision settings (TF32, bfloat16) leave every product exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ...formats.codec import dequantize_blocks, quantize_blocks
from ...formats.spec import E8M0_BIAS, MXFormat
from ...formats.tensor import Layout, MXTensor
from ...problem import (
    Activation,
    ClampedSiLU,
    Combine,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    RoutingProblem,
    SiLU,
    SiTUv2,
    SwiGLU,
    activation_mx_format,
)
from ...routing import TOKEN_MASK, RoutingPlan
from ...weights import MoEWeights, gate_up_rows
from .quantize import expand_mxfp4
from .routing import PLAN


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Apply an activation of `mxpert.problem` to gate and up of any shape, in their dtype."""
    match activation:
        case SiLU():
            return gate * torch.sigmoid(gate) * up
        case SwiGLU(alpha=alpha, limit=limit):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        case ClampedSiLU(limit=limit):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(gate) * up
        case SiTUv2(beta=beta, beta_up=beta_up):
            gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
            return gated * (beta_up * torch.tanh(up / beta_up))


def rows_by_expert(plan: RoutingPlan) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (expert, sorted rows, their tokens) for every expert that has a valid row.

    Padding rows, blocks of expert −1 and rows past ``num_valid[0]`` are left out.
    """
    device, unit = plan.device, plan.routing_block_m
    row = torch.arange(plan.capacity, device=device)
    token = (plan.sorted_token_ids & TOKEN_MASK).long()
    expert = plan.block_expert_ids.long().repeat_interleave(unit)
    valid = (row < plan.num_valid[0]) & (token < plan.num_tokens)
    valid &= (expert >= 0) & (expert < plan.num_experts)
    rows = valid.nonzero().squeeze(1)
    rows = rows[torch.argsort(expert[rows], stable=True)]
    hit, counts = torch.unique_consecutive(expert[rows], return_counts=True)
    for index, chosen in zip(hit.tolist(), rows.split(counts.tolist()), strict=True):
        yield index, chosen, token[chosen]


def gate_up(
    x: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions,
    accumulate: torch.dtype,
) -> torch.Tensor | MXTensor:
    """Stage 1: ``h[r] = act(w_in · x[token(r)] @ Wgu[e].T + bgu[e])``, rounded to the activation format.

    Args:
        x: bfloat16 or MX [T, H]. weights: MoEWeights. plan: RoutingPlan. options: MoEOptions.
        accumulate: torch.float32 or torch.float64.

    Returns:
        [P, F] in sorted order, bfloat16 or MXTensor; zeros in rows that are padding.
    """
    fmt = activation_mx_format(options.activation_format, "moe_gate_up")
    if fmt is not None and not isinstance(x, MXTensor):
        x = quantize_blocks(x, fmt, -1, options.scale_rule)
    features = weights.intermediate_size
    h = _zero_rows(plan.capacity, features, fmt, plan.device)
    gate_columns, up_columns = gate_up_rows(weights.gate_up_order, features, plan.device)
    for expert, rows, tokens in rows_by_expert(plan):
        matrix = expand_mxfp4(weights.gate_up_proj[expert], accumulate)
        product = _take_rows(x, tokens, accumulate) @ matrix.T
        if options.apply_router_weight_on_input:
            product *= plan.sorted_weights[rows, None]
        if weights.gate_up_bias is not None:
            product += weights.gate_up_bias[expert]
        values = activate(options.activation, product[:, gate_columns], product[:, up_columns])
        _store_rows(h, rows, values.float(), options)
    return h


def down(
    h: torch.Tensor | MXTensor, weights: MoEWeights, plan: RoutingPlan, options: MoEOptions,
    accumulate: torch.dtype,
) -> torch.Tensor:
    """Stage 2: ``row[r] = w[r] · (h[r] @ Wd[e].T + bd[e])``, then the combine of `options`.

    Args:
        h: bfloat16 or MX [P, F] in sorted order. weights, plan, options, accumulate: as `gate_up`.

    Returns:
        [T, H] in ``options.out_dtype``; FLAT: [P, H], zeros in rows that are padding.
    """
    atomic = options.combine is Combine.ATOMIC
    shape = (plan.num_tokens if atomic else plan.capacity, weights.hidden_size)
    out = torch.zeros(shape, dtype=accumulate if atomic else options.out_dtype, device=plan.device)
    for expert, rows, tokens in rows_by_expert(plan):
        matrix = expand_mxfp4(weights.down_proj[expert], accumulate)
        values = _take_rows(h, rows, accumulate) @ matrix.T
        if weights.down_bias is not None:
            values += weights.down_bias[expert]
        if not options.apply_router_weight_on_input:
            values *= plan.sorted_weights[rows, None]
        if atomic:
            out.index_add_(0, tokens, values)
        else:
            out[rows] = values.to(out.dtype)
    if options.combine is Combine.REDUCE:
        out = _reduce(out, plan, accumulate)
    return out.to(options.out_dtype)


def _reduce(flat: torch.Tensor, plan: RoutingPlan, accumulate: torch.dtype) -> torch.Tensor:
    """Sum each token's rows in slot order; slots without a row add nothing."""
    total = torch.zeros((plan.num_tokens, flat.shape[1]), dtype=accumulate, device=flat.device)
    for row in plan.slot_rows.long().unbind(1):
        total += flat[row.clamp(min=0)].to(accumulate).masked_fill_((row < 0)[:, None], 0)
    return total


def _zero_rows(
    rows: int, width: int, fmt: MXFormat | None, device: torch.device,
) -> torch.Tensor | MXTensor:
    """[rows, width] zeros, bfloat16 or in an MX format."""
    if fmt is None:
        return torch.zeros((rows, width), dtype=torch.bfloat16, device=device)
    qdata = torch.zeros((rows, width // fmt.codes_per_byte), dtype=torch.uint8, device=device)
    scale = torch.full((rows, width // fmt.block_size), E8M0_BIAS, dtype=torch.uint8, device=device)
    return MXTensor(qdata, scale, fmt)


def _store_rows(
    h: torch.Tensor | MXTensor, rows: torch.Tensor, values: torch.Tensor, options: MoEOptions,
) -> None:
    """Round float32 `values` to the type of `h` and write them to `rows`."""
    if not isinstance(h, MXTensor):
        h[rows] = values.to(h.dtype)
        return
    quantised = quantize_blocks(values, h.format, -1, options.scale_rule)
    h.qdata[rows] = quantised.qdata
    h.scale[rows] = quantised.scale


def _take_rows(
    source: torch.Tensor | MXTensor, rows: torch.Tensor, dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of bfloat16 or MX activations as `dtype`; no other row is read."""
    if not isinstance(source, MXTensor):
        return source[rows].to(dtype)
    taken = replace(source, qdata=source.qdata[rows], scale=source.scale[rows])
    return dequantize_blocks(taken, dtype)


@dataclass(frozen=True)
class _MoEKernel:
    """What the three MoE operations share: they serve any ROW_MAJOR weights on any device."""

    op: Op
    backend: str = "reference"

    def unsupported(self, problem: MoEProblem) -> str | None:
        if problem.weight_layout is not Layout.ROW_MAJOR:
            return f"reads ROW_MAJOR weights, not {problem.weight_layout.name}"
        return None

    def configs(self, problem: MoEProblem) -> Iterable[ReferenceConfig]:
        return (self.heuristic(problem),)

    def heuristic(self, problem: MoEProblem) -> ReferenceConfig:
        return ReferenceConfig()


@dataclass(frozen=True)
class GateUp(_MoEKernel):
    """MOE_GATE_UP by `gate_up`."""

    op: Op = Op.MOE_GATE_UP

    def launch(
        self, problem: MoEProblem, config: ReferenceConfig, *, x: torch.Tensor | MXTensor,
        weights: MoEWeights, plan: RoutingPlan,
    ) -> torch.Tensor | MXTensor:
        return gate_up(x, weights, plan, problem.options, config.accumulate)


@dataclass(frozen=True)
class Down(_MoEKernel):
    """MOE_DOWN by `down`."""

    op: Op = Op.MOE_DOWN

    def launch(
        self, problem: MoEProblem, config: ReferenceConfig, *, h: torch.Tensor | MXTensor,
        weights: MoEWeights, plan: RoutingPlan,
    ) -> torch.Tensor:
        return down(h, weights, plan, problem.options, config.accumulate)


@dataclass(frozen=True)
class FusedMoE(_MoEKernel):
    """FUSED_MOE: the reference plan, then both stages."""

    op: Op = Op.FUSED_MOE

    def unsupported(self, problem: MoEProblem) -> str | None:
        if problem.options.combine is Combine.FLAT:
            return "FLAT rows need the plan that only the separate stages have"
        return super().unsupported(problem)

    def launch(
        self, problem: MoEProblem, config: ReferenceConfig, *, x: torch.Tensor | MXTensor,
        weights: MoEWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None, num_local_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_global = weights.num_experts if expert_map is None else expert_map.shape[0]
        routing = RoutingProblem(
            Op.ROUTING_PLAN, problem.target, problem.num_tokens, problem.top_k, num_global,
            weights.num_experts, config.routing_block_m)
        plan = PLAN.launch(
            routing, PLAN.heuristic(routing), topk_ids=topk_ids, topk_weights=topk_weights,
            expert_map=expert_map, num_local_tokens=num_local_tokens)
        h = gate_up(x, weights, plan, problem.options, config.accumulate)
        return down(h, weights, plan, problem.options, config.accumulate)


GATE_UP = GateUp()
DOWN = Down()
FUSED_MOE = FusedMoE()
