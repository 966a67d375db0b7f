"""gfx950 kernels (CDNA4): weights in matrix fragment order, scaled MFMA, written in Gluon."""

from ...backend import Backend, Status, Support
from ...problem import Op, Target
from .moe.config import Cdna4GemmConfig
from .moe.layout import CDNA4_FRAGMENT

BACKEND = Backend(
    "cdna4",
    kernels={
        Op.MOE_GATE_UP: "mxpert.backends.cdna4.moe.host:GATE_UP",
        Op.MOE_DOWN: "mxpert.backends.cdna4.moe.host:DOWN",
        Op.FUSED_MOE: "mxpert.backends.cdna4.moe.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.backends.cdna4.quantize_dual.host:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.backends.cdna4.grouped.host:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.backends.cdna4.grouped.host:GROUPED_WGRAD",
    },
    rank={"hip": 0},
    made_for=("gfx950",),
    stage_config=Cdna4GemmConfig,
    weight_layout=CDNA4_FRAGMENT,
    gpus=(Support("MI350X, MI355X", ("gfx950",), "cdna4", Status.EMULATED),),
    devices=(Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024),),
)
