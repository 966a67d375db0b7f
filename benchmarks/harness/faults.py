"""Errors of a benchmark run: in one line, and those that end the CUDA context."""

from __future__ import annotations

import torch

FATAL = 3
"""Exit code of a script whose CUDA context is lost."""


class FatalError(RuntimeError):
    """The CUDA context is gone; only a new process can go on."""


def check_alive(device: torch.device) -> None:
    """Synchronise: a kernel's illegal access shows here and ends every later call.

    Raises:
        FatalError: the context is lost.
    """
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise FatalError(str(error)) from error


def describe(error: BaseException) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
