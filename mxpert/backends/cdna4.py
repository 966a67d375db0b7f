"""gfx950 kernels (CDNA4): weights in matrix fragment order, scaled MFMA, written in Gluon."""

from ..core.backend import Backend, Status, Support
from ..core.problem import Op, Target
from ..moe.cdna4.config import Cdna4GemmConfig
from ..moe.cdna4.layout import CDNA4_FRAGMENT

BACKEND = Backend(
    "cdna4",
    kernels={
        Op.MOE_GATE_UP: "mxpert.moe.cdna4.host:GATE_UP",
        Op.MOE_DOWN: "mxpert.moe.cdna4.host:DOWN",
        Op.FUSED_MOE: "mxpert.moe.cdna4.host:FUSED_MOE",
        Op.QUANTIZE_DUAL: "mxpert.quantize.dual_cdna4:QUANTIZE_DUAL",
        Op.GROUPED_GEMM: "mxpert.grouped.cdna4:GROUPED_GEMM",
        Op.GROUPED_WGRAD: "mxpert.grouped.cdna4:GROUPED_WGRAD",
    },
    rank={"hip": 0},
    made_for=("gfx950",),
    stage_config=Cdna4GemmConfig,
    weight_layout=CDNA4_FRAGMENT,
    gpus=(Support("MI350X, MI355X", ("gfx950",), "cdna4", Status.EMULATED),),
    devices=(Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024),),
)
