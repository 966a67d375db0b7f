"""Standard output and error of the `mxpert` command: a reader may go before all is written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Stream:
    """A text stream; what is written after its reader has gone (`mxpert … | head`) is lost.

    name: the file's name in other errors, of a full disk for example.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._reader_may_go():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._reader_may_go():
            self.stream.flush()

    @contextlib.contextmanager
    def _reader_may_go(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            discard(self.stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from error


def discard(stream: TextIO) -> None:
    """Lose what `stream` holds and all that comes: Python would try to write it on exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


@contextlib.contextmanager
def readers_may_go() -> Iterator[None]:
    """Inside, a closed pipe at standard output or error is no error."""
    with contextlib.ExitStack() as stack:
        for redirect, stream, name in (
            (contextlib.redirect_stdout, sys.stdout, "standard output"),
            (contextlib.redirect_stderr, sys.stderr, "standard error"),
        ):
            if stream is not None:
                stack.enter_context(redirect(cast(TextIO, _Stream(stream, name))))
        yield
