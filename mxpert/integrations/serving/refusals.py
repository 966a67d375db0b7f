"""Requests that a plugin does not serve: one line each, before the engine's processes start."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import UnsupportedError, message, require

FORMATS = "experts in MXFP4, MXFP8, NVFP4 or INT4"
"""What plugins serve."""

Refusal = tuple[str, str, object, str]
"""Argument, what is needed, what was given, remedy."""


def refuse_first(op: str, refused: Iterable[Refusal]) -> None:
    """Raise UnsupportedError, in one line, for the first of `refused`, if there is one.

    Args:
        op: what the message starts with.
    """
    for argument, need, got, remedy in refused:
        raise UnsupportedError(message(op, argument, need, got, remedy))


def refuse_copies(keep_fp8: bool, format: str, prefix: str, op: str, argument: str) -> None:
    """Refuse `keep_fp8` for experts that cannot become MXFP4, before they are loaded.

    Args:
        format: of the experts, as stored. prefix: the layer's name.
        op, argument: what the message starts with.

    Raises:
        ValueError: another format than MXFP4, and than NVFP4, which may be a cast of it.
    """
    fits = not keep_fp8 or format in ("MXFP4", "NVFP4")
    need, got = "MXFP4 weights, which alone have an FP8 copy", f"{format} ({prefix})"
    require(fits, op, argument, need=need, got=got, remedy="omit it")


@contextmanager
def one_line_in_commands(package: str) -> Iterator[None]:
    """Print a refusal without a traceback where the process is a command of `package`.

    The process ends with the message on stderr and exit status 1. In any other program, for example
    one that uses the engine as a library, the exception is raised as it is.
    """
    try:
        yield
    except (UnsupportedError, ValueError) as error:
        if _is_command_of(package):
            raise SystemExit(str(error)) from None
        raise


def _is_command_of(package: str) -> bool:
    """Whether the process was started as `package` or as ``python -m package.module``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name
    return Path(sys.argv[0]).name == package or module.partition(".")[0] == package
