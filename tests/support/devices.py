"""GPUs that kernels are compiled for, as `detect_target` describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from unittest import mock

from mxpert.core.backend import BACKENDS
from mxpert.core.problem import Target
from mxpert.moe import prepared_weights

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

HOPPER_CARDS: Mapping[str, Target] = MappingProxyType(
    {card.name.removeprefix("NVIDIA "): card for card in BACKENDS["hopper"].devices}
)
"""Clock and bandwidth are what the driver's clocks and bus widths give. It does not tell that the
tensor cores of an H20 are slowed down to 296 TFLOP/s."""


@contextmanager
def prepared_for(arch: str) -> Iterator[None]:
    """Weights on any device are prepared as on one of this architecture; ops see the real one."""
    with mock.patch.object(prepared_weights, "detect_target", return_value=DEVICES[arch]):
        yield
