"""Portable Triton kernels for Hopper, Blackwell and gfx950; tests also run them interpreted."""

from ...backend import Backend, Status, Support
from ...problem import Op, Target

_COMMON = f"{__name__.rpartition('.')[0]}.common"

BACKEND = Backend(
    "triton",
    kernels={
        Op.QUANTIZE: f"{_COMMON}.quantize:QUANTIZE",
        Op.DEQUANTIZE: f"{_COMMON}.quantize:DEQUANTIZE",
        Op.ROUTE_TOPK: f"{_COMMON}.routing.host:TOPK",
        Op.ROUTING_PLAN: f"{_COMMON}.routing.host:PLAN",
        Op.MOE_GATE_UP: f"{__name__}.moe.host:GATE_UP",
        Op.MOE_DOWN: f"{__name__}.moe.host:DOWN",
        Op.FUSED_MOE: f"{__name__}.moe.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: f"{__name__}.quantize_dual.host:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: f"{__name__}.grouped.host:GROUPED_GEMM",
        Op.GROUPED_WGRAD: f"{__name__}.grouped.host:GROUPED_WGRAD",
        Op.ACTIVATE_ROWS: f"{__name__}.training_rows.host:ACTIVATE_ROWS",
        Op.ACTIVATE_ROWS_BACKWARD: f"{__name__}.training_rows.host:ACTIVATE_ROWS_BACKWARD",
        Op.COMBINE_ROWS: f"{__name__}.training_rows.host:COMBINE_ROWS",
        Op.COMBINE_ROWS_BACKWARD: f"{__name__}.training_rows.host:COMBINE_ROWS_BACKWARD",
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
