"""Training of Mixture-of-Experts layers in MXFP8: autograd, layers, a drop-in for torch's op."""

from .autograd import grouped_linear
from .expert_parallel import (
    clip_grad_norm_,
    full_state_dict,
    local_expert_parameters,
    prepare_for_ddp,
)
from .grouped_mm import grouped_mm
from .module import MXGroupedLinear
from .moe import MXMoE
from .recipe import MXFP8Recipe

__all__ = [
    "MXFP8Recipe",
    "MXGroupedLinear",
    "MXMoE",
    "clip_grad_norm_",
    "full_state_dict",
    "grouped_linear",
    "grouped_mm",
    "local_expert_parameters",
    "prepare_for_ddp",
]
