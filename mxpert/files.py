"""Files that are read and written: regular ones only, replaced as a whole, strict JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exists(path: Path) -> bool:
    """Whether there is anything at `path`; False for a name that the file system refuses."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether `path` is a regular file: opening a FIFO would wait for a writer."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def what_is_at(path: Path) -> str:
    """What stands in the place of a regular file, for an error message."""
    if not exists(path):
        return "no such file"
    return "a directory" if path.is_dir() else "no regular file (a pipe, socket or device)"


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: no JSON, an integer of thousands of digits, or too deep nesting.

    Example:
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: lists or objects nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects nested too deeply") from None


def partial_name(path: Path) -> Path:
    """Temporary name under which `write_atomically` fills a file."""
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, write: Callable[[Path], object], *, shared: bool = False) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk, then rename it.

    A file at `path` is complete, even after a crash. Its mode follows the umask, also if `write`
    makes a private file.

    Args:
        path: the file. write: takes the name of the temporary file.
        shared: other processes may write `path` at the same time; the last one wins.
    """
    partial = partial_name(path)
    if shared:
        partial = partial.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
