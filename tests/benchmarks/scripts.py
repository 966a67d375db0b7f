"""Runs a benchmark script on tiny inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Main = Callable[[Sequence[str]], int]


def dry_run(main: Main, path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a dry run."""
    code = main(["--dry-run", "--commit", "abc", "--output", str(path), *arguments])
    return code, json.loads(path.read_text("utf-8"))
