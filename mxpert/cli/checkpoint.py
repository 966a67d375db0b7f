"""Checkpoints that a user names: examined before other libraries read them, errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UnsupportedError, message, require
from ..files import is_file, what_is_at
from ..integrations.checkpoints.safetensors_files import (
    CONFIG_FILE,
    CheckpointReader,
    read_json,
    short,
)


def check_checkpoint(directory: Path, command: str) -> None:
    """Refuse a checkpoint directory that is damaged, by its headers; reads no weights.

    Raises:
        ValueError: no directory, a pipe or a device in it, a config.json or index that cannot be
            read, or a missing or truncated shard.
    """
    require(
        directory.is_dir(),
        command,
        str(directory),
        need="a checkpoint directory",
        got="none" if not directory.exists() else "a file",
    )
    for entry in sorted(directory.iterdir()):
        require(
            is_file(entry) or entry.is_dir() or not entry.exists(),
            command,
            str(entry),
            need="regular files in a checkpoint",
            got=what_is_at(entry),
        )
    config = read_json(directory / CONFIG_FILE, command)
    quantization = config.get("quantization_config")
    require(
        quantization is None or isinstance(quantization, dict),
        command,
        f"{directory / CONFIG_FILE}: quantization_config",
        need="a JSON object",
        got=short(quantization),
    )
    if any(directory.glob("*.safetensors*")):
        CheckpointReader(directory, command).check_files()


@contextmanager
def reading(directory: Path, command: str) -> Iterator[None]:
    """Inside, other libraries read a checkpoint: what they raise becomes one line about it."""
    try:
        yield
    except Exception as error:
        if " — " in str(error) or isinstance(error, UnsupportedError | MemoryError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            message(
                command,
                str(directory),
                "a checkpoint that can be loaded",
                reason[:300],
                "it may be damaged: download it again",
            )
        ) from error
