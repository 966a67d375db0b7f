"""Reference MoE layer: float32 or float64 torch on any device, the oracle and the CPU default.

It rounds where the kernels round (quantised x, intermediate, rows before REDUCE, output) and
nowhere else. It computes one expert at a time. Experts without rows are not dequantised, and
padding rows are not computed. Finding the valid rows synchronises with the device, which a real
kernel must not do. Output sizes depend on the plan's capacity alone, as in the kernels.

Operands have at most 8 significant bits (bfloat16, decoded MX values, or e4m3 codes whose row scale
multiplies the product). Torch's float32 matmul precision settings (TF32, bfloat16) therefore do not
change any product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.kernel import ReferenceGemm
from ..core.problem import (
    GELU,
    Activation,
    ClampedSiLU,
    Combine,
    MoEOptions,
    MoEProblem,
    Op,
    ReferenceConfig,
    ReLU2,
    RoutingProblem,
    SiLU,
    SiTUv2,
    SwiGLU,
)
from ..formats.codec import decode, dequantize_blocks, quantize_blocks
from ..formats.spec import E4M3, E8M0_BIAS, MXFormat
from ..formats.tensor import Layout, MXTensor, Operand
from ..formats.token import FP8_TOKEN, quantize_token_rows
from ..formats.weight_tensor import WeightLike, WeightTensor
from ..quantize.reference import WeightDecoder
from ..routing.inputs import PlanInputs, TopKInputs
from ..routing.plan import TOKEN_MASK, RoutingPlan
from ..routing.reference import PLAN, TOPK
from .inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs
from .weights import gate_up_rows


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Apply an activation of `mxpert.core.problem` to gate and up of any shape, in their dtype.

    gate: not read by an activation without a gate.
    """
    match activation:
        case SiLU():
            return gate * torch.sigmoid(gate) * up
        case SwiGLU(alpha=alpha, limit=limit, beta=beta):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + beta)
        case ClampedSiLU(limit=limit):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(gate) * up
        case SiTUv2(beta=beta, beta_up=beta_up):
            gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
            return gated * (beta_up * torch.tanh(up / beta_up))
        case GELU(approximate=approximate):
            return torch.nn.functional.gelu(gate, approximate=approximate) * up
        case ReLU2():
            return up.clamp(min=0).square()


@dataclass(frozen=True)
class RoutedRows:
    """The valid rows of a plan, grouped by expert.

    Args:
        rows: int64 [R], positions in the plan's sorted order.
        tokens: int64 [R], the token of each row.
        experts: one (expert, slice of [0, R)) for every expert that has rows.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    experts: tuple[tuple[int, slice], ...]

    @classmethod
    def of(cls, plan: RoutingPlan) -> RoutedRows:
        """Collect the valid rows: no padding, no block of expert −1, no row past `num_valid[0]`."""
        row = torch.arange(plan.capacity, device=plan.device)
        token = (plan.sorted_token_ids & TOKEN_MASK).long()
        expert = plan.block_expert_ids.long().repeat_interleave(plan.routing_block_m)
        valid = (row < plan.num_valid[0]) & (token < plan.num_tokens)
        valid &= (expert >= 0) & (expert < plan.num_experts)
        rows = valid.nonzero().squeeze(1)
        rows = rows[torch.argsort(expert[rows], stable=True)]
        hit, counts = torch.unique_consecutive(expert[rows], return_counts=True)
        ends = counts.cumsum(0)
        parts = map(slice, (ends - counts).tolist(), ends.tolist())
        return cls(rows, token[rows], tuple(zip(hit.tolist(), parts, strict=True)))


def _reduce(flat: torch.Tensor, plan: RoutingPlan, accumulate: torch.dtype) -> torch.Tensor:
    """Sum the rows of each token in slot order; skip slots that have no row (−1)."""
    total = torch.zeros((plan.num_tokens, flat.shape[1]), dtype=accumulate, device=flat.device)
    for row in plan.slot_rows.long().unbind(1):
        total += flat[row.clamp(min=0)].to(accumulate).masked_fill_((row < 0)[:, None], 0)
    return total


def _scatter_rows(
    values: torch.Tensor,
    rows: torch.Tensor,
    capacity: int,
    fmt: MXFormat | None,
    options: MoEOptions,
) -> torch.Tensor | MXTensor:
    """Round float32 values [R, F] to bfloat16, then to `fmt`; place them in [capacity, F] zeros.

    On every backend, stage 1 with MX output equals stage 1 with bfloat16 output followed by
    `quantize`. MX outputs are therefore rounded to bfloat16 first.
    """
    width = values.shape[1]
    values = values.to(torch.bfloat16)
    if fmt is None:
        h = torch.zeros((capacity, width), dtype=torch.bfloat16, device=values.device)
        h[rows] = values
        return h
    quantised = quantize_blocks(values, fmt, -1, options.scale_rule)
    qdata = quantised.qdata.new_zeros((capacity, width // fmt.codes_per_byte))
    scale = quantised.scale.new_full((capacity, width // fmt.block_size), E8M0_BIAS)
    qdata[rows], scale[rows] = quantised.qdata, quantised.scale
    return MXTensor(qdata, scale, fmt)


def _take_rows(source: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    """Select rows of the activations without reading the others."""
    if not isinstance(source, MXTensor):
        return source[rows]
    return replace(source, qdata=source.qdata[rows], scale=source.scale[rows])


def _row_values(
    rows: torch.Tensor | MXTensor, options: MoEOptions, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values to multiply, and a factor [R, 1] for each row's products or None.

    bfloat16 rows are returned unchanged, MX rows are decoded. With fp8_token the values are those
    of the e4m3 codes, and the factor is the row's scale.
    """
    if isinstance(rows, MXTensor):
        return dequantize_blocks(rows, dtype), None
    if options.activation_format != FP8_TOKEN:
        return rows, None
    quantised = quantize_token_rows(rows)
    return decode(quantised.qdata, E4M3, dtype), quantised.scale.to(dtype).unsqueeze(1)


def _accumulator(weight: WeightLike, accumulate: torch.dtype) -> torch.dtype:
    """float64 for weights of more than 8 significant bits: TF32 would round them."""
    return torch.float64 if isinstance(weight, WeightTensor) else accumulate


class _MoEKernel(ReferenceGemm):
    """Base class of the three MoE kernels: any device, ROW_MAJOR weights only."""

    def unsupported(self, problem: MoEProblem) -> str | None:
        if problem.weight_layout is not Layout.ROW_MAJOR:
            return f"reads ROW_MAJOR weights, not {problem.weight_layout.name}"
        return None


class GateUp(_MoEKernel):
    """Stage 1: ``h[r] = act(w[r] · x[token(r)] @ Wgu[e].T + bgu[e])``, in the activation format.

    The factor w[r] is 1 unless `apply_router_weight_on_input`.
    """

    op = Op.MOE_GATE_UP

    def launch(self, problem: MoEProblem, config: ReferenceConfig, inputs: GateUpInputs) -> Operand:
        """Return [P, F] in sorted order, bfloat16 or MX; padding rows are zero.

        x: bfloat16 or MX [T, H].
        """
        options, accumulate = problem.options, config.accumulate
        x, weights, plan, fmt = inputs.x, inputs.weights, inputs.plan, options.mx_format
        if fmt is not None and not isinstance(x, MXTensor):
            x = quantize_blocks(x, fmt, -1, options.scale_rule)
        accumulate = _accumulator(weights.gate_up_proj, accumulate)
        x, x_scale = _row_values(x, options, accumulate)
        features, order = weights.intermediate_size, weights.gate_up_order
        everything = torch.arange(features, device=plan.device)
        gate_columns, up_columns = (
            (everything, everything)  # without a gate, a row is the up row of its feature
            if order is None
            else gate_up_rows(order, features, plan.device)
        )
        decoder, routed = WeightDecoder(accumulate, plan.device), RoutedRows.of(plan)
        values = torch.empty(
            (len(routed.rows), features), dtype=torch.float32, device=plan.device
        )  # [R, F]
        for expert, part in routed.experts:
            tokens = routed.tokens[part]
            product = x[tokens].to(accumulate) @ decoder(weights.gate_up_proj[expert]).T
            if x_scale is not None:
                product *= x_scale[tokens]
            if options.apply_router_weight_on_input:
                product *= plan.sorted_weights[routed.rows[part], None]
            if weights.gate_up_bias is not None:
                product += weights.gate_up_bias[expert]
            values[part] = activate(
                options.activation, product[:, gate_columns], product[:, up_columns]
            )
        return _scatter_rows(values, routed.rows, plan.capacity, fmt, options)


class Down(_MoEKernel):
    """Stage 2: ``row[r] = w[r] · (h[r] @ Wd[e].T + bd[e])``, then the combine of the options.

    The factor w[r] is 1 with `apply_router_weight_on_input`.
    """

    op = Op.MOE_DOWN

    def launch(
        self, problem: MoEProblem, config: ReferenceConfig, inputs: DownInputs
    ) -> torch.Tensor:
        """Return [T, H] in ``options.out_dtype``; with FLAT [P, H], where padding rows are zero.

        h: bfloat16 or MX [P, F] in sorted order.
        """
        options, weights, plan = problem.options, inputs.weights, inputs.plan
        accumulate = _accumulator(weights.down_proj, config.accumulate)
        atomic = options.combine is Combine.ATOMIC
        shape = (plan.num_tokens if atomic else plan.capacity, weights.hidden_size)
        out = torch.zeros(
            shape, dtype=accumulate if atomic else options.out_dtype, device=plan.device
        )
        decoder, routed = WeightDecoder(accumulate, plan.device), RoutedRows.of(plan)
        h, h_scale = _row_values(_take_rows(inputs.h, routed.rows), options, accumulate)  # [R, F]
        for expert, part in routed.experts:
            values = h[part].to(accumulate) @ decoder(weights.down_proj[expert]).T
            if h_scale is not None:
                values *= h_scale[part]
            if weights.down_bias is not None:
                values += weights.down_bias[expert]
            if not options.apply_router_weight_on_input:
                values *= plan.sorted_weights[routed.rows[part], None]
            if atomic:
                out.index_add_(0, routed.tokens[part], values)
            else:
                out[routed.rows[part]] = values.to(out.dtype)
        if options.combine is Combine.REDUCE:
            out = _reduce(out, plan, accumulate)
        return out.to(options.out_dtype)


class FusedMoE(_MoEKernel):
    """FUSED_MOE: the reference plan, then both stages."""

    op = Op.FUSED_MOE

    def unsupported(self, problem: MoEProblem) -> str | None:
        if problem.options.combine is Combine.FLAT:
            return "FLAT rows need the plan that only the separate stages have"
        return super().unsupported(problem)

    def launch(
        self, problem: MoEProblem, config: ReferenceConfig, inputs: LayerInputs
    ) -> torch.Tensor:
        """Return [T, H], or `out`."""
        inputs = _routed(problem, inputs)
        weights, expert_map, out = inputs.weights, inputs.expert_map, inputs.out
        num_global = weights.num_experts if expert_map is None else expert_map.shape[0]
        routing = RoutingProblem(
            Op.ROUTING_PLAN,
            problem.target,
            problem.num_tokens,
            problem.top_k,
            num_global,
            weights.num_experts,
            config.routing_block_m,
        )
        routed = PlanInputs(
            inputs.topk_weights, inputs.topk_ids, expert_map, inputs.num_local_tokens
        )
        plan = PLAN.launch(routing, PLAN.heuristic(routing), routed)
        h = GATE_UP.launch(problem, config, GateUpInputs(inputs.x, weights, plan))
        y = DOWN.launch(problem, config, DownInputs(h, weights, plan))
        return y if out is None else out.copy_(y)


def _routed(problem: MoEProblem, inputs: LayerInputs) -> FusedMoEInputs:
    """Inputs with ids: as they are, or with those that the reference chooses from the logits."""
    if isinstance(inputs, FusedMoEInputs):
        return inputs
    choice = problem.choice
    assert choice is not None  # for the type checker: the layer is given logits
    logits = TopKInputs(inputs.logits, inputs.correction_bias)
    return inputs.with_ids(*TOPK.launch(choice, TOPK.heuristic(choice), logits))


GATE_UP = GateUp()
DOWN = Down()
FUSED_MOE = FusedMoE()
