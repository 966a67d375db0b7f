"""Reference backend: plain torch on any device, the oracle for every other backend."""

from ...backend import Backend, Status, Support
from ...problem import Op

BACKEND = Backend(
    "reference",
    kernels={
        Op.QUANTIZE: "mxpert.backends.reference.quantize:QUANTIZE",
        Op.DEQUANTIZE: "mxpert.backends.reference.quantize:DEQUANTIZE",
        Op.ROUTE_TOPK: "mxpert.backends.reference.routing:TOPK",
        Op.ROUTING_PLAN: "mxpert.backends.reference.routing:PLAN",
        Op.MOE_GATE_UP: "mxpert.backends.reference.moe:GATE_UP",
        Op.MOE_DOWN: "mxpert.backends.reference.moe:DOWN",
        Op.FUSED_MOE: "mxpert.backends.reference.moe:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.backends.reference.grouped:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.backends.reference.grouped:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.backends.reference.grouped:GROUPED_WGRAD",
        Op.ACTIVATE_ROWS: "mxpert.backends.reference.training_rows:ACTIVATE_ROWS",
        Op.ACTIVATE_ROWS_BACKWARD: "mxpert.backends.reference.training_rows:ACTIVATE_ROWS_BACKWARD",
        Op.COMBINE_ROWS: "mxpert.backends.reference.training_rows:COMBINE_ROWS",
        Op.COMBINE_ROWS_BACKWARD: "mxpert.backends.reference.training_rows:COMBINE_ROWS_BACKWARD",
    },
    rank={"cpu": 0, "cuda": 20, "hip": 20},
    replays=False,
    gpus=(
        Support("MI300X, MI325X", ("gfx942",), "reference", Status.REFERENCE),
        Support("CPU", ("cpu",), "reference", Status.REFERENCE),
    ),
)
