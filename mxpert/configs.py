"""Configs of the kernels: tiles and schedules, to pin with `override` and to store in tables."""

from .core.stage_configs import GemmConfig, MoEConfig, ReferenceConfig, WeightCache
from .moe.cdna4.config import Cdna4GemmConfig, Cdna4Kernel
from .moe.hopper.config import HopperGemmConfig, HopperKernel

__all__ = [
    "Cdna4GemmConfig",
    "Cdna4Kernel",
    "GemmConfig",
    "HopperGemmConfig",
    "HopperKernel",
    "MoEConfig",
    "ReferenceConfig",
    "WeightCache",
]
