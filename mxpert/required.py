"""Packages that mxpert cannot be imported without; `pip install --no-deps` leaves them out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LIBRARY = ("torch", "numpy", "safetensors")
COMMAND = ("typer", "rich")
"""What the `mxpert` command needs beside them."""


def check_required() -> None:
    """Refuse in one line: the command by ending, a script by an error that it may catch.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    # argv[0] is "-m" while `python -m mxpert` looks for the package.
    is_command = Path(sys.argv[0]).stem == "mxpert" or sys.argv[0] == "-m"
    needed = LIBRARY + COMMAND * is_command
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return
    names = " ".join(missing)
    line = f"mxpert: import — need {names}, got no such package; pip install {names}"
    if is_command:
        sys.stderr.write(f"error: {line}\n")
        raise SystemExit(2)
    raise ModuleNotFoundError(line, name=missing[0])


check_required()
