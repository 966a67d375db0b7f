"""GPUs that kernels are compiled for, as `detect_target` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mxpert.core.problem import Target

DEVICES: Mapping[str, Target] = MappingProxyType(
    {
        "sm_80": Target("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", 108, 163 * 1024),
        "sm_86": Target("cuda", "sm_86", "NVIDIA A10", 72, 99 * 1024),
        "sm_89": Target("cuda", "sm_89", "NVIDIA L40S", 142, 99 * 1024),
        "sm_90": Target("cuda", "sm_90", "NVIDIA H200", 132, 227 * 1024),
        "sm_100": Target("cuda", "sm_100", "NVIDIA B200", 148, 227 * 1024),
        "sm_103": Target("cuda", "sm_103", "NVIDIA B300", 148, 227 * 1024),
        "sm_120": Target("cuda", "sm_120", "NVIDIA GeForce RTX 5090", 170, 99 * 1024),
        "gfx950": Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024),
        "gfx942": Target("hip", "gfx942", "AMD Instinct MI300X", 304, 64 * 1024),
    }
)
"""By architecture."""

MMA_SYNC = ("sm_80", "sm_86", "sm_89", "sm_120")
"""Architectures whose warps multiply operands in registers."""


def hopper_card(name: str, num_sms: int, mhz: int, memory_mhz: int, bus_bits: int) -> Target:
    """A card as the driver describes it."""
    rates = dict(clock=1e6 * mhz, bandwidth=2e6 * memory_mhz * bus_bits / 8)
    return Target("cuda", "sm_90", f"NVIDIA {name}", num_sms, 227 * 1024, **rates)


HOPPER_CARDS: Mapping[str, Target] = MappingProxyType(
    {
        card.name.removeprefix("NVIDIA "): card
        for card in (
            hopper_card("H200", 132, 1980, 3201, 6144),
            hopper_card("H100 80GB HBM3", 132, 1980, 2619, 5120),
            hopper_card("H100 PCIe", 114, 1755, 1593, 5120),
            hopper_card("GH200 480GB", 132, 1980, 2619, 6144),
            hopper_card("GH200 144G HBM3e", 132, 1980, 3201, 6144),
            hopper_card("H20", 78, 1980, 2619, 6144),
        )
    }
)
"""4.9, 3.4, 2.0, 4.0, 4.9 and 4.0 TB/s. Of the H20 the driver does not tell that its tensor cores
are slowed down to 296 TFLOP/s."""
