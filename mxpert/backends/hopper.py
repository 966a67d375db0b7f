"""Hopper kernels (sm_90): TMA, warp specialisation, FP4 weights decoded to FP8 wgmma fragments."""

from ..core.backend import Backend, Status, Support
from ..core.problem import Op, Target
from ..formats.spec import ScaleSpan
from ..moe.hopper.config import HopperGemmConfig
from ..moe.hopper.group_layout import HOPPER_GROUPS, HOPPER_GROUPS_FLOAT16
from ..moe.hopper.layout import HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8

BACKEND = Backend(
    "hopper",
    kernels={
        Op.MOE_GATE_UP: "mxpert.moe.hopper.host:GATE_UP",
        Op.MOE_DOWN: "mxpert.moe.hopper.host:DOWN",
        Op.FUSED_MOE: "mxpert.moe.hopper.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.quantize.dual_hopper:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.grouped.hopper:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.grouped.hopper:GROUPED_WGRAD",
    },
    rank={"cuda": 0},
    made_for=("sm_90",),
    stage_config=HopperGemmConfig,
    weight_layout=HOPPER_FRAGMENT,
    other_layouts=(HOPPER_GROUPS_FLOAT16, HOPPER_GROUPS, HOPPER_FRAGMENT_FP8),
    training_span=ScaleSpan.AUTO,
    gpus=(
        Support("H200", ("sm_90",), "hopper", Status.MEASURED, r"\bH200\b"),
        Support("H100 SXM", ("sm_90",), "hopper", Status.MEASURED, r"\bH100 80GB HBM3\b"),
        Support("H100 PCIe and NVL, GH200, H800, H20", ("sm_90",), "hopper", Status.SAME_BINARIES),
    ),
    devices=tuple(
        Target("cuda", "sm_90", f"NVIDIA {name}", num_sms, 232448, clock, bandwidth)
        for name, num_sms, clock, bandwidth in (
            ("H200", 132, 1.98e9, 4.916736e12),
            ("H100 80GB HBM3", 132, 1.98e9, 3.35232e12),
            ("H100 PCIe", 114, 1.755e9, 2.03904e12),
            ("GH200 480GB", 132, 1.98e9, 4.022784e12),
            ("H20", 78, 1.98e9, 4.022784e12),
        )
    ),
)
