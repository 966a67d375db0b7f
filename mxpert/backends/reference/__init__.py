"""Reference backend: plain torch on any device, the oracle for every other backend."""

from ...backend import Backend, Status, Support
from ...problem import Op

BACKEND = Backend(
    "reference",
    kernels={
        Op.QUANTIZE: f"{__name__}.quantize:QUANTIZE",
        Op.DEQUANTIZE: f"{__name__}.quantize:DEQUANTIZE",
        Op.ROUTE_TOPK: f"{__name__}.routing:TOPK",
        Op.ROUTING_PLAN: f"{__name__}.routing:PLAN",
        Op.MOE_GATE_UP: f"{__name__}.moe:GATE_UP",
        Op.MOE_DOWN: f"{__name__}.moe:DOWN",
        Op.FUSED_MOE: f"{__name__}.moe:FUSED_MOE",
        Op.QUANTIZE_DUAL: f"{__name__}.grouped:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: f"{__name__}.grouped:GROUPED_GEMM",
        Op.GROUPED_WGRAD: f"{__name__}.grouped:GROUPED_WGRAD",
        Op.ACTIVATE_ROWS: f"{__name__}.training_rows:ACTIVATE_ROWS",
        Op.ACTIVATE_ROWS_BACKWARD: f"{__name__}.training_rows:ACTIVATE_ROWS_BACKWARD",
        Op.COMBINE_ROWS: f"{__name__}.training_rows:COMBINE_ROWS",
        Op.COMBINE_ROWS_BACKWARD: f"{__name__}.training_rows:COMBINE_ROWS_BACKWARD",
    },
    rank={"cpu": 0, "cuda": 20, "hip": 20},
    replays=False,
    gpus=(
        Support("MI300X, MI325X", ("gfx942",), "reference", Status.REFERENCE),
        Support("CPU", ("cpu",), "reference", Status.REFERENCE),
    ),
)
