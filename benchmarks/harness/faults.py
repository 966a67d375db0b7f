"""Errors of a benchmark run: in one line, and those that end the CUDA context."""

from __future__ import annotations

import re

import torch

FATAL = 3
"""Exit code of a script whose CUDA context is lost."""

_CPP_PLACE = re.compile(r" \(/\S+:\d+\)")


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
    """One line of an error, without the source place and the stack that a C++ library appends.

    >>> describe(RuntimeError("no such tile (/build/moe.h:3)\\n1 0x7f f() + 2"))
    'RuntimeError: no such tile'
    """
    text = _CPP_PLACE.split(" ".join(str(error).split()))[0]
    return f"{type(error).__name__}: {text}"[:400]
