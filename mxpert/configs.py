"""Configs of the kernels: tiles and schedules, to pin with `override` and to store in tables."""

from .backends.cdna4.moe.config import Cdna4GemmConfig, Cdna4Kernel
from .backends.hopper.moe.config import HopperGemmConfig, HopperKernel
from .stage_configs import GemmConfig, MoEConfig, ReferenceConfig

__all__ = [
    "Cdna4GemmConfig",
    "Cdna4Kernel",
    "GemmConfig",
    "HopperGemmConfig",
    "HopperKernel",
    "MoEConfig",
    "ReferenceConfig",
]
