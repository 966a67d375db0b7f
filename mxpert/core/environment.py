"""The one place that reads the environment; nothing here changes what a kernel computes."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "MXPERT_CACHE_DIR"
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
