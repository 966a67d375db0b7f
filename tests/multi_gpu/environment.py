"""Environment of processes that share GPU memory: no multicast, several ranks on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

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
