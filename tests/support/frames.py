"""Counts of Python calls: host work that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import mxpert

PACKAGE = str(Path(mxpert.__file__).parent)
_ENCODING = str(Path(PACKAGE, "core", "binary.py"))
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def count_frames(call: Callable[[], object]) -> int:
    """Number of mxpert's Python functions that `call` enters in this thread.

    Comprehensions do not count, because newer Pythons inline them, and neither does the encoding of
    TMA descriptors, which depends on addresses.
    """
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_name not in _INLINED:
            count += code.co_filename.startswith(PACKAGE) and code.co_filename != _ENCODING

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
