"""The one place that reads the environment; nothing here changes what a kernel computes."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import require

CACHE_VARIABLE = "MXPERT_CACHE_DIR"
THREADS_VARIABLE = "MXPERT_COMPILE_THREADS"
MOST_THREADS = 8
"""Threads hold Python's lock for a third of a compilation, so more would wait for each other."""
SHARED_GPUS_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def cache_directory() -> Path | None:
    """Where this user's tuned tables live: $MXPERT_CACHE_DIR, else ~/.cache/mxpert.

    Returns:
        The directory, which need not exist; None where the user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    try:
        return Path.home() / ".cache" / "mxpert"
    except RuntimeError:  # a container's user without an entry in the password database
        return None


def ranks_may_share_gpus() -> bool:
    """Whether torch's symmetric memory accepts several ranks on one GPU."""
    return os.environ.get(SHARED_GPUS_VARIABLE) == "1"


def compile_threads() -> int:
    """Number of threads that compile the kernels of a call: $MXPERT_COMPILE_THREADS, or by cores.

    Without the variable it is the number of cores of this process, at most MOST_THREADS.

    Raises:
        ValueError: the variable is no positive integer.
    """
    named = os.environ.get(THREADS_VARIABLE)
    if not named:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return min(MOST_THREADS, cores or 1)
    is_number = named.isascii() and named.isdecimal() and int(named) > 0
    require(is_number, "mxpert", THREADS_VARIABLE, need="an integer from 1 on", got=repr(named))
    return int(named)
