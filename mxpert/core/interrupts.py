"""Ctrl-C in the `mxpert` command: one line and exit code 130, also while torch is imported.

`import mxpert` imports this module before torch. In the command, and only there, an interrupt then
ends the process at once, until `raising` hands it to the code that runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

EXIT_INTERRUPTED = 130
INTERRUPTED = "interrupted"


def is_command() -> bool:
    """Whether this process is the `mxpert` command or one of its ranks, which inherit its argv."""
    arguments = sys.orig_argv
    if "-m" in arguments and sys.argv[:1] == ["-m"]:  # Python is looking for the module
        return arguments[arguments.index("-m") + 1 :][:1] == ["mxpert"]
    place = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    return place.stem == "mxpert" or place.parts[-2:] == ("mxpert", "__main__.py")


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Signal handler: end the process without the traceback of whatever it was importing."""
    if "--multiprocessing-fork" not in sys.orig_argv:  # the command says it for its ranks
        with contextlib.suppress(OSError):
            os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt, so that files are closed and removed."""
    is_ours = signal.getsignal(signal.SIGINT) is end_at_once
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, end_at_once)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """An interrupt that arrives inside is handled after the block."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived and callable(handler):
        handler(*arrived[0])


if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and is_command()
):
    signal.signal(signal.SIGINT, end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `testing.ranks` starts ranks so
