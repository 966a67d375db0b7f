"""Portable Triton kernels for Hopper, Blackwell and gfx950; tests also run them interpreted."""

from ...backend import Backend, Status, Support
from ...problem import Op, Target

_ROWS = "mxpert.backends.triton.training_rows.host"

BACKEND = Backend(
    "triton",
    kernels={
        Op.QUANTIZE: "mxpert.backends.common.quantize:QUANTIZE",
        Op.DEQUANTIZE: "mxpert.backends.common.quantize:DEQUANTIZE",
        Op.ROUTE_TOPK: "mxpert.backends.common.routing.host:TOPK",
        Op.ROUTING_PLAN: "mxpert.backends.common.routing.host:PLAN",
        Op.MOE_GATE_UP: "mxpert.backends.triton.moe.host:GATE_UP",
        Op.MOE_DOWN: "mxpert.backends.triton.moe.host:DOWN",
        Op.FUSED_MOE: "mxpert.backends.triton.moe.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.backends.triton.quantize_dual.host:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.backends.triton.grouped.host:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.backends.triton.grouped.host:GROUPED_WGRAD",
        Op.ACTIVATE_ROWS: f"{_ROWS}:ACTIVATE_ROWS",
        Op.ACTIVATE_ROWS_BACKWARD: f"{_ROWS}:ACTIVATE_ROWS_BACKWARD",
        Op.COMBINE_ROWS: f"{_ROWS}:COMBINE_ROWS",
        Op.COMBINE_ROWS_BACKWARD: f"{_ROWS}:COMBINE_ROWS_BACKWARD",
    },
    rank={"cuda": 10, "hip": 10, "cpu": 10},
    gpus=(
        Support("B200, GB200, B300, GB300", ("sm_100", "sm_103"), "triton", Status.COMPILED),
        Support("RTX 50, RTX PRO (Blackwell)", ("sm_120",), "triton", Status.COMPILED),
        Support("L40S, L4, RTX 40, RTX Ada", ("sm_89",), "triton", Status.COMPILED),
        Support("A100, A30", ("sm_80",), "triton", Status.COMPILED),
        Support("A10, A40, RTX 30, RTX A6000", ("sm_86",), "triton", Status.COMPILED),
    ),
    devices=(Target("cuda", "sm_100", "NVIDIA B200", 148, 232448),),
)
