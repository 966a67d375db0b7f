"""Portable Triton kernels for Hopper, Blackwell and gfx950; tests also run them interpreted."""

from ..core.backend import Backend, Status, Support
from ..core.problem import Op, Target

_ROWS = "mxpert.training.rows.triton"

BACKEND = Backend(
    "triton",
    kernels={
        Op.QUANTIZE: "mxpert.quantize.triton:QUANTIZE",
        Op.DEQUANTIZE: "mxpert.quantize.triton:DEQUANTIZE",
        Op.ROUTE_TOPK: "mxpert.routing.triton:TOPK",
        Op.ROUTING_PLAN: "mxpert.routing.triton:PLAN",
        Op.MOE_GATE_UP: "mxpert.moe.triton.host:GATE_UP",
        Op.MOE_DOWN: "mxpert.moe.triton.host:DOWN",
        Op.FUSED_MOE: "mxpert.moe.triton.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.quantize.dual_triton:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.grouped.triton:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.grouped.triton:GROUPED_WGRAD",
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
