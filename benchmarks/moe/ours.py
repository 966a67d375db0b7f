"""mxpert under test: the calls of each stage, and the gate that they pass before they are timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import mxpert
from benchmarks.moe.cells import GEMM_STAGES, Cell, Inputs, Model
from mxpert.cli.measure import RunWeights, check_gate, float64_reference, intermediate_sizes
from mxpert.core.registry import Resolution
from mxpert.core.target import on_device
from mxpert.errors import require
from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import MXTensor
from mxpert.formats.weight_tensor import WeightLike, WeightTensor
from mxpert.moe.weights import GateUpOrder, MoEWeights
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.numerics import relative_l2
from mxpert.testing.problems import random_weight

Call = Callable[[], object]
ACTIVATION = mxpert.SwiGLU()
"""One activation for every model and implementation, gate and up interleaved, no biases: what
differs between implementations is then their kernels alone."""

SAMPLED_TOKENS = 4
GEMM_KERNELS, SCHEDULE_KERNEL = "_moe_gemm_", "_moe_tile_schedule_"


def random_weights(
    model: Model, device: torch.device, weight_format: str = MXFP4.name
) -> RunWeights:
    """Uniformly random codes; scales with a standard deviation of one binade, as trained weights
    have. Gate, up and output are of order 1, where activations bend. NVFP4 has one factor for an
    expert, as checkpoints have."""
    generator = torch.Generator(device).manual_seed(0)

    def projection(rows: int, depth: int) -> WeightLike:
        size, rms = (model.E, rows, depth), 1.5 / depth**0.5
        made = random_weight(size, weight_format, rms=rms, scale_spread=1.0, generator=generator)
        if isinstance(made, WeightTensor) and made.row_scale is not None:
            factor = made.row_scale[:, :1].expand_as(made.row_scale)
            made = replace(made, row_scale=factor.contiguous())
        return made

    gate_up, down = projection(2 * model.F, model.H), projection(model.H, model.F)
    return RunWeights.of(MoEWeights(gate_up, down, gate_up_order=GateUpOrder.INTERLEAVED), device)


@dataclass(frozen=True)
class Truth:
    """float64 results, rounded where kernels round, for a few tokens of the first batch.

    Args:
        tokens: int64 [S], the sampled tokens. plan: the plan of these tokens alone.
        gate_up: [P', F] rows of that plan. layer: [S, H].
    """

    tokens: torch.Tensor
    plan: RoutingPlan
    gate_up: torch.Tensor | MXTensor
    layer: torch.Tensor

    @classmethod
    def of(cls, weights: MoEWeights, inputs: Inputs, top_k: int, activation_format: str) -> Truth:
        """Tokens spread evenly over the batch, first and last among them."""
        count = inputs.x.shape[0]
        tokens = torch.linspace(0, count - 1, min(SAMPLED_TOKENS, count)).long().unique()
        tokens = tokens.to(inputs.x.device)
        topk_weights, topk_ids = mxpert.route_topk(inputs.logits, top_k)
        with float64_reference():
            plan = mxpert.make_routing_plan(
                topk_weights[tokens],
                topk_ids[tokens],
                num_experts=weights.num_experts,
                routing_block_m=16,
            )
            form: dict[str, Any] = {"activation_format": activation_format}
            h = mxpert.moe_gate_up(inputs.x[tokens], weights, plan, activation=ACTIVATION, **form)
            return cls(tokens, plan, h, mxpert.moe_down(h, weights, plan, **form))

    def rows_of(self, h: torch.Tensor | MXTensor, plan: RoutingPlan) -> torch.Tensor | MXTensor:
        """Rows of the sampled tokens, taken from a whole intermediate, in this plan's order."""
        here, there = self.plan.slot_rows.flatten().long(), plan.slot_rows[self.tokens].flatten()

        def move(source: torch.Tensor) -> torch.Tensor:
            rows = source.new_zeros((self.plan.capacity, source.shape[1]))
            rows[here] = source[there.long()]
            return rows

        if isinstance(h, MXTensor):
            return replace(h, qdata=move(h.qdata), scale=move(h.scale))
        return move(h)

    def gate_up_error(self, h: torch.Tensor | MXTensor, plan: RoutingPlan) -> float:
        """Relative L2 of stage 1."""
        rows = self.plan.slot_rows.flatten().long()
        mine, right = (
            mxpert.dequantize(each) if isinstance(each, MXTensor) else each
            for each in (self.rows_of(h, plan), self.gate_up)
        )
        return relative_l2(mine[rows], right[rows])

    def down_error(
        self,
        y: torch.Tensor,
        h: torch.Tensor | MXTensor,
        plan: RoutingPlan,
        weights: MoEWeights,
        activation_format: str,
    ) -> float:
        """Relative L2 of stage 2 that was given h."""
        with float64_reference():
            right = mxpert.moe_down(
                self.rows_of(h, plan), weights, self.plan, activation_format=activation_format
            )
        return relative_l2(y[self.tokens], right)

    def layer_error(self, y: torch.Tensor) -> float:
        """Relative L2 of the layer."""
        return relative_l2(y[self.tokens], self.layer)


@dataclass(frozen=True)
class Batch:
    """One batch on its way through the layer: routing, plan, intermediate."""

    inputs: Inputs
    plan: RoutingPlan
    h: torch.Tensor | MXTensor


class Ours:
    """mxpert with one activation format; `prepare` gives the calls of a cell."""

    impl = "mxpert"

    def __init__(self, model: Model, weights: RunWeights, activation_format: str) -> None:
        self.model, self.weights, self.activation = model, weights, activation_format
        self.options: dict[str, Any] = dict(
            activation=ACTIVATION, activation_format=activation_format
        )

    def prepare(
        self,
        cell: Cell,
        batches: Sequence[Inputs],
        stages: Sequence[str],
        truth: Truth | None = None,
    ) -> tuple[dict[str, list[Call]], dict[str, float]]:
        """Calls by stage, one for each batch, and the relative L2 to float64 of those that passed.

        Args:
            truth: of the first batch in this activation format; None computes it.

        Raises:
            GateError: a stage is wrong; nothing of this cell is timed then.
        """
        weights = self._chosen_weights(batches[0])[0]
        ready = [self._batch(weights, inputs) for inputs in batches]
        calls = {
            stage: [self._call(stage, weights, batch) for batch in ready]
            for stage in stages
            if stage not in GEMM_STAGES
        }
        if self._chosen_weights(batches[0])[1].kernel.backend == "hopper":
            for stage in (each for each in stages if each in GEMM_STAGES):
                try:
                    calls[stage] = [self._gemm(stage, weights, batch) for batch in ready]
                except (AttributeError, TypeError, ValueError) as error:
                    print(f"  {stage}: not found in the Hopper backend: {error}", flush=True)
        truth = truth or Truth.of(self.weights.plain, batches[0], self.model.k, self.activation)
        errors = self._errors(truth, weights, ready[0])
        sizes = intermediate_sizes(truth.tokens.numel(), self.model.k, weights.intermediate_size)
        for stage, error in errors.items():
            check_gate(f"{cell} {self.activation} {stage}", error, stage, self.activation, sizes)
        by_stage = {stage: errors[stage.removesuffix("_gemm")] for stage in calls}
        return calls, by_stage

    def _chosen_weights(self, inputs: Inputs) -> tuple[MoEWeights, Resolution]:
        def explain(weights: MoEWeights) -> Any:
            layer = inputs.x, weights, inputs.logits, self.model.k
            return mxpert.explain(mxpert.fused_moe_from_logits, *layer, **self.options)

        return self.weights.resolve(explain, None)

    def _batch(self, weights: MoEWeights, inputs: Inputs) -> Batch:
        """The plan has the padding unit that the layer itself would choose for these tokens."""
        resolution = self._chosen_weights(inputs)[1]
        topk_weights, topk_ids = mxpert.route_topk(inputs.logits, self.model.k)
        plan = mxpert.make_routing_plan(
            topk_weights,
            topk_ids,
            num_experts=self.model.E,
            routing_block_m=resolution.config.routing_block_m,
        )
        h = mxpert.moe_gate_up(inputs.x, weights, plan, **self.options)
        return Batch(inputs, plan, h)

    def _call(self, stage: str, weights: MoEWeights, batch: Batch) -> Call:
        if stage == "layer":
            return functools.partial(self._layer, weights, batch.inputs)
        rows, op, options = batch.inputs.x, mxpert.moe_gate_up, self.options
        if stage == "down":
            rows, op, options = batch.h, mxpert.moe_down, {"activation_format": self.activation}
        return functools.partial(op, rows, weights, batch.plan, **options)

    def _layer(self, weights: MoEWeights, inputs: Inputs) -> torch.Tensor:
        return mxpert.fused_moe_from_logits(
            inputs.x, weights, inputs.logits, self.model.k, **self.options
        )

    def _errors(self, truth: Truth, weights: MoEWeights, batch: Batch) -> dict[str, float]:
        y = mxpert.moe_down(batch.h, weights, batch.plan, activation_format=self.activation)
        return {
            "gate_up": truth.gate_up_error(batch.h, batch.plan),
            "down": truth.down_error(y, batch.h, batch.plan, self.weights.plain, self.activation),
            "layer": truth.layer_error(self._layer(weights, batch.inputs)),
        }

    def _gemm(self, stage: str, weights: MoEWeights, batch: Batch) -> Call:
        """The Hopper GEMM kernel with its epilogue, as the stage itself launched it: its rows are
        encoded already, as the peers' kernels are given quantised rows. The schedule of its tiles,
        where it has one, is made anew each time."""
        from mxpert.core.compilation import ThroughTriton
        from mxpert.core.launch import record_launches

        with on_device(executor=ThroughTriton()), record_launches() as records:
            self._call(stage.removesuffix("_gemm"), weights, batch)()
        named = [(each.launch.kernel.__name__, each) for each in records]
        gemms = sum(name.startswith(GEMM_KERNELS) for name, _ in named)
        require(gemms == 1, "compare", stage, need="one GEMM launch", got=gemms)
        launches = [
            functools.partial(each.launch, **each.tensors)
            for name, each in named
            if name.startswith((GEMM_KERNELS, SCHEDULE_KERNEL))
        ]
        return functools.partial(_call_each, launches)


def _call_each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
