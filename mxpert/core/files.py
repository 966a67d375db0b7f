"""Files that are read and written: regular ones, replaced as a whole; JSON into dataclasses."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import message, require

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk."""


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


def kind_of_file(path: Path) -> str:
    """The kind of a path that is no regular file, for an error message."""
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
    makes a private file. The error of a full disk names `path`.

    Args:
        path: the file. write: takes the name of the temporary file.
        shared: other threads and processes may write `path` at the same time; the last one wins.
    """
    partial = partial_name(path)
    if shared:
        partial = partial.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if (number := _failed_write(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _failed_write(error: BaseException) -> int | None:
    """Error number of a full disk, whose error names no file or another one, or of safetensors."""
    if isinstance(error, OSError):
        return error.errno if error.errno in NO_ROOM else None
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


@dataclass(frozen=True)
class JSONReader:
    """Builds dataclasses from parsed JSON; their fields, types and defaults say what is accepted.

    Types are dataclasses, Literal, int, float, bool, str, dict, lists and tuples, and unions. A
    float is finite and at least 0. A JSON object for a union of dataclasses, or for their base,
    becomes the one that shares most keys with it.

    Args:
        op, remedy: what error messages start and end with.
        least: smallest integer.
        keys: names in JSON of fields that have another name there; None for fields not in it.
    """

    op: str
    remedy: str
    least: int = 0
    keys: Mapping[str, str | None] = field(default_factory=dict)

    # Any: Python 3.11 has no type for a declared type, and a parsed value may be of any.

    def value(self, declared: Any, value: Any, place: str, *, joint: str = ".") -> Any:
        """Read a value of a declared type.

        Args:
            declared: the type. value: parsed JSON. place: where it is, for messages.
            joint: stands between `place` and the key of a part of it.

        Raises:
            ValueError: the message names the place and the key.
        """
        choices = get_args(declared) if isinstance(declared, UnionType) else (declared,)
        if value is None and NoneType in choices:
            return None
        kinds = [kind for each in choices for kind in _dataclasses(each)]
        if kinds:
            self.check(isinstance(value, dict), place, "an object", type(value).__name__)
            kind = max(kinds, key=lambda kind: _shared(kind, value))
            return self._object(kind, value, place, joint)
        if get_origin(declared) in (list, tuple):
            return self._items(declared, value, place)
        if get_origin(declared) is Literal:
            valid, need = value in get_args(declared), f"one of {list(get_args(declared))}"
        elif declared is dict or get_origin(declared) is dict:
            valid, need = isinstance(value, dict), "an object"
        elif int in choices:
            valid = type(value) is int and value >= self.least
            need = f"an integer of at least {self.least}"
        elif float in choices:
            valid = type(value) in (int, float) and 0 <= value < math.inf
            need = "a finite number of at least 0"
        elif bool in choices:
            valid, need = type(value) is bool, "true or false"
        else:
            valid, need = isinstance(value, str), "a string"
        self.check(valid, place, need, short(value))
        return value

    def check(self, condition: bool, place: str, need: object, got: object) -> None:
        require(condition, self.op, place, need=need, got=got, remedy=self.remedy)

    def _items(self, declared: Any, value: Any, place: str) -> Any:
        kind, types = get_origin(declared), get_args(declared)
        self.check(isinstance(value, list), place, "a list", type(value).__name__)
        types = types * len(value) if kind is list else types
        self.check(len(value) == len(types), place, f"a list of {len(types)}", len(value))
        pairs = zip(types, value, strict=True)
        return kind(self.value(t, v, f"{place}[{i}]") for i, (t, v) in enumerate(pairs))

    def _object(self, kind: Any, value: dict[str, Any], place: str, joint: str) -> Any:
        names = {self.keys.get(each.name, each.name): each for each in fields(kind)}
        declared = {name: each for name, each in names.items() if name is not None}
        needed = {
            name
            for name, each in declared.items()
            if each.default is MISSING and each.default_factory is MISSING
        }
        missing, unknown = sorted(needed - set(value)), sorted(set(value) - set(declared))
        self.check(not missing, place, list(declared), f"{missing} missing")
        self.check(not unknown, place, list(declared), f"unknown {unknown}")
        types = get_type_hints(kind)
        given = {
            each.name: self.value(types[each.name], value[name], f"{place}{joint}{name}")
            for name, each in declared.items()
            if name in value
        }
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            text = message(self.op, place, f"a {kind.__name__}", error, self.remedy)
            raise ValueError(text) from error


def _dataclasses(declared: Any) -> list[Any]:
    """The declared dataclass, or the dataclasses that derive from a base that is none itself."""
    if is_dataclass(declared):
        return [declared]
    is_base = isinstance(declared, type) and declared.__module__ != "builtins"
    return [each for each in declared.__subclasses__() if is_dataclass(each)] if is_base else []


def _shared(kind: Any, value: dict[str, Any]) -> int:
    return len(set(value) & {each.name for each in fields(kind)})


def short(value: object) -> str:
    """`value` for an error message, cut where it is long.

    Example:
        >>> short(10 ** 5000), short([1])
        ('an integer of 16610 bits', '[1]')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
