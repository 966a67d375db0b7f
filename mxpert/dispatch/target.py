"""Facts about a device, read once per process."""

from __future__ import annotations

import functools
import platform

import torch

from ..problem import Target


def detect_target(device: torch.device | str) -> Target:
    """Describe the device that a tensor lives on.

    >>> detect_target("cpu").arch
    'cpu'
    """
    device = torch.device(device)
    if device.type != "cuda":
        return _cpu_target(device.type)
    return _gpu_target(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cpu_target(kind: str) -> Target:
    return Target(
        kind="cpu",
        arch=kind,
        name=platform.processor() or platform.machine(),
        num_sms=torch.get_num_threads(),
        shared_memory=0,
    )


@functools.cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        return Target("hip", arch, properties.name, properties.multi_processor_count, 160 * 1024)
    # torch's stub lacks the attribute.
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined,unused-ignore]
    arch = f"sm_{properties.major}{properties.minor}"
    return Target("cuda", arch, properties.name, properties.multi_processor_count, shared_memory)
