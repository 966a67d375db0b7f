"""The inputs of each op, for tests that launch kernels of several ops in one way."""

from __future__ import annotations

from typing import Any

from mxpert.core.problem import Op
from mxpert.grouped.inputs import GroupedGemmInputs, GroupedWgradInputs
from mxpert.moe.inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs
from mxpert.quantize.inputs import DequantizeInputs, DualInputs, QuantizeInputs
from mxpert.routing.inputs import PlanInputs, TopKInputs
from mxpert.training.rows.inputs import (
    ActivateBackwardInputs,
    ActivateInputs,
    CombineBackwardInputs,
    CombineInputs,
)

INPUTS: dict[Op, Any] = {  # Any: each op has its own class
    Op.QUANTIZE: QuantizeInputs,
    Op.DEQUANTIZE: DequantizeInputs,
    Op.ROUTE_TOPK: TopKInputs,
    Op.ROUTING_PLAN: PlanInputs,
    Op.MOE_GATE_UP: GateUpInputs,
    Op.MOE_DOWN: DownInputs,
    Op.FUSED_MOE: FusedMoEInputs,
    Op.QUANTIZE_DUAL: DualInputs,
    Op.GROUPED_GEMM: GroupedGemmInputs,
    Op.GROUPED_WGRAD: GroupedWgradInputs,
    Op.ACTIVATE_ROWS: ActivateInputs,
    Op.ACTIVATE_ROWS_BACKWARD: ActivateBackwardInputs,
    Op.COMBINE_ROWS: CombineInputs,
    Op.COMBINE_ROWS_BACKWARD: CombineBackwardInputs,
}

LAUNCHED = INPUTS | {Op.FUSED_MOE: LayerInputs}
"""What the kernels of each op take: of a layer the inputs of `fused_moe_from_logits`, too."""
