"""Version ranges of serving engines."""

from __future__ import annotations

import re

from ...errors import UnsupportedError, require

Version = tuple[int, int, int]


def require_version(
    op: str, engine: str, version: str, oldest: Version, below: Version, otherwise: str
) -> None:
    """Raise UnsupportedError unless `version` is at least `oldest` and lower than `below`.

    Args:
        op: what the message starts with. engine: the package's name.
        version: as the package states it; what follows three numbers is ignored.
        otherwise: what a user may do instead of installing another version.

    Example:
        >>> require_version("serve", "vllm", "0.26.0", (0, 20, 2), (0, 34, 0), "remove it")
        >>> require_version("serve", "vllm", "0.9", (0, 20, 2), (0, 34, 0), "remove it")
        Traceback (most recent call last):
        mxpert.errors.UnsupportedError: serve: vllm — need 0.20.2 or newer, below 0.34.0, got 0.9; \
install such a vllm or remove it
    """
    require(
        in_range(version, oldest, below),
        op,
        engine,
        need=f"{'.'.join(map(str, oldest))} or newer, below {'.'.join(map(str, below))}",
        got=version,
        remedy=f"install such a {engine} or {otherwise}",
        error=UnsupportedError,
    )


def in_range(version: str, oldest: Version, below: Version) -> bool:
    """Whether `version` is at least `oldest` and lower than `below`.

    Example:
        >>> in_range("0.32.0+cpu", (0, 20, 2), (0, 34, 0)), in_range("dev", (0, 0, 1), (9, 0, 0))
        (True, False)
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    parts = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    return oldest <= parts < below
