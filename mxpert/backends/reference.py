"""Reference backend: plain torch on any device, the oracle for every other backend."""

from ..core.backend import Backend, Status, Support
from ..core.problem import Op

BACKEND = Backend(
    "reference",
    kernels={
        Op.QUANTIZE: "mxpert.quantize.reference:QUANTIZE",
        Op.DEQUANTIZE: "mxpert.quantize.reference:DEQUANTIZE",
        Op.ROUTE_TOPK: "mxpert.routing.reference:TOPK",
        Op.ROUTING_PLAN: "mxpert.routing.reference:PLAN",
        Op.MOE_GATE_UP: "mxpert.moe.reference:GATE_UP",
        Op.MOE_DOWN: "mxpert.moe.reference:DOWN",
        Op.FUSED_MOE: "mxpert.moe.reference:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.grouped.reference:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.grouped.reference:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.grouped.reference:GROUPED_WGRAD",
        Op.ACTIVATE_ROWS: "mxpert.training.rows.reference:ACTIVATE_ROWS",
        Op.ACTIVATE_ROWS_BACKWARD: "mxpert.training.rows.reference:ACTIVATE_ROWS_BACKWARD",
        Op.COMBINE_ROWS: "mxpert.training.rows.reference:COMBINE_ROWS",
        Op.COMBINE_ROWS_BACKWARD: "mxpert.training.rows.reference:COMBINE_ROWS_BACKWARD",
    },
    rank={"cpu": 0, "cuda": 20, "hip": 20},
    replays=False,
    gpus=(
        Support("MI300X, MI325X", ("gfx942",), "reference", Status.REFERENCE),
        Support("CPU", ("cpu",), "reference", Status.REFERENCE),
    ),
)
