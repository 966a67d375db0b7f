"""Environment of processes that share GPU memory: no multicast, several ranks on a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mxpert.distributed import workspace

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


@contextmanager
def gpu_environment() -> Iterator[None]:
    """Processes that are started inside of the block get `ENVIRONMENT`."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        yield


def share_one_gpu() -> bool:
    """Whether there is one GPU; then SYMMETRIC takes ranks that share it, in this process.

    Callers get GATHER there.
    """
    shared = torch.cuda.device_count() == 1
    if shared:
        workspace.symmetric_refusal = lambda links: None  # type: ignore[assignment]
    return shared


@functools.cache
def gpu_group() -> Any:
    """The group of the transports: NCCL's where each rank has a GPU, else the default one."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return dist.group.WORLD if share_one_gpu() else dist.new_group(backend="nccl")
