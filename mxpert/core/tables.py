"""Tuned tables: one JSON file per device, each row with the config that won, and provenance.

Rows are measured on the device. Only those with the source "model" are not: a cycle model chose
them, and `explain` says so.

Two files can hold rows for a device: the one shipped with the library and the one that `mxpert
tune` writes into the user's cache directory. A row of the latter replaces the shipped row for the
same formats, dimensions, tokens and backend.

A row of the file is a `TunedRow`: its fields and their types say what the loader accepts. A field
without a value in the file takes the default of its dataclass.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..errors import message, require
from .environment import cache_directory
from .files import JSONReader, is_file, parse_json, write_atomically
from .problem import ACTIVATION_FORMATS, MoEConfig, MoEProblem, Op, Target

FORMATS = tuple(f"{name}xmxfp4" for name in ACTIVATION_FORMATS)
ROW_REACH = 0.75
"""A row serves token counts above this part of its own."""

_OP = "load_table"
_REMEDY = "write tables with mxpert tune"
_PROVENANCE = ("device", "date", "commit", "torch", "triton")
_KEYS = {
    "num_experts": "E",
    "top_k": "k",
    "hidden_size": "H",
    "intermediate_size": "F",
    "num_tokens": "T",
    "place": None,
}
"""Fields of a row that have another name in the file, or are not in it."""

_READER = JSONReader(_OP, _REMEDY, least=1, keys=_KEYS)

Source = Literal["heuristic", "search", "model"]
ShapeKey = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class TunedRow:
    """One tuned choice: for exactly these dimensions, about `num_tokens` tokens, one backend.

    Args:
        us: microseconds of the config.
        heuristic_us: of the heuristic's choice; None if that was wrong.
        spread: width of the 10–90 % band over the median, the wider one of the two. Of a modelled
            row: the model's residual.
        source: "search", or "heuristic" where nothing was faster by more than the spread. "model"
            if `us` and `heuristic_us` are modelled, not measured.
        note: the comparison in words. rel_l2: the config's error to float64; None if modelled.
        tried, valid: configs that were tried, and that the kernel has.
        commit, date: of the run that measured or modelled this row.
        place: the file and the row, for `explain()` and for errors. It is not in the file.
    """

    formats: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    backend: str
    config: MoEConfig
    us: float
    heuristic_us: float | None
    spread: float
    source: Source
    note: str
    rel_l2: float | None
    tried: int
    valid: int
    commit: str
    date: str
    place: str = ""

    @property
    def modelled(self) -> bool:
        """Whether nobody has measured this row."""
        return self.source == "model"

    @property
    def shape_key(self) -> ShapeKey:
        """What a problem must match: backend, formats, E, k, H, F."""
        return (
            self.backend,
            self.formats,
            self.num_experts,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
        )

    @property
    def key(self) -> tuple[str, str, int, int, int, int, int]:
        """What no two rows of a table share: `shape_key` and T."""
        return (*self.shape_key, self.num_tokens)


@dataclass(frozen=True)
class _Table:
    provenance: dict[str, Any]
    rows: list[TunedRow]


def problem_key(problem: MoEProblem, backend: str) -> ShapeKey:
    """The `shape_key` of rows that serve a problem on a backend."""
    return (
        backend,
        problem.formats,
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
    )


def table_name(target: Target) -> str:
    """File name of a device's table: "NVIDIA H200" → "nvidia-h200.json".

    >>> table_name(Target("cuda", "sm_100", "NVIDIA B200", 148, 232448))
    'nvidia-b200.json'
    """
    return "-".join(target.name.lower().split()) + ".json"


def user_table(target: Target) -> Path | None:
    """Where this user's table for a device is, or would be; None where the user has no home."""
    directory = cache_directory()
    return None if directory is None else directory / "tables" / table_name(target)


def parse_table(text: str, source: str) -> tuple[dict[str, Any], tuple[TunedRow, ...]]:
    """Read a table.

    Returns:
        Its provenance and its rows.

    Raises:
        ValueError: provenance is missing, a row lacks a key, has an unknown one, a value of another
            type or the key of another row, or a config is not valid. The message names file, row
            and key.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ValueError(message(_OP, source, "JSON", error, _REMEDY)) from error
    table: _Table = _READER.value(_Table, document, source, joint=": ")
    provenance, place = table.provenance, f"{source}: provenance"
    missing = [key for key in _PROVENANCE if not provenance.get(key)]
    _check(not missing, place, list(_PROVENANCE), f"{missing} missing")
    seen: dict[tuple[object, ...], TunedRow] = {}
    for index, found in enumerate(table.rows):
        row = replace(found, place=f"{source}: rows[{index}]")
        _check(row.formats in FORMATS, f"{row.place}.formats", list(FORMATS), repr(row.formats))
        first = seen.setdefault(row.key, row)
        _check(
            first is row,
            row.place,
            "one row for each shape, T and backend",
            f"the key of {first.place}",
            "drop one of the two",
        )
    return provenance, tuple(seen.values())


def _check(condition: bool, place: str, need: object, got: object, remedy: str = _REMEDY) -> None:
    require(condition, _OP, place, need=need, got=got, remedy=remedy)


def format_table(provenance: Mapping[str, Any], rows: Iterable[TunedRow]) -> str:
    """A table's text: rows in the order of their keys, one a line, so that a diff shows rows."""
    lines = []
    for row in sorted(rows, key=lambda row: row.key):
        named = {_KEYS.get(name, name): value for name, value in asdict(row).items()}
        document = {name: value for name, value in named.items() if name is not None}
        lines.append(f"  {json.dumps(document, allow_nan=False)}")
    head = json.dumps(dict(provenance), indent=1, allow_nan=False).replace("\n", "\n ")
    return f'{{\n "provenance": {head},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def add_rows(path: Path, provenance: Mapping[str, Any], rows: Iterable[TunedRow]) -> None:
    """Put rows into the table at `path`, in place of those with the same keys, or start a table.

    The file is replaced whole or not at all. Its provenance becomes the given one; each row keeps
    the commit and date of the run that measured it.

    Raises:
        ValueError: the file is not a table, or one of another device.
    """
    merged = {row.key: row for row in (*read_rows(path, str(provenance["device"])), *rows)}
    text = format_table(provenance, merged.values())
    parse_table(text, str(path))  # nothing is written that could not be read
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"), shared=True)
    reload_tables()


def read_rows(path: Path, device: str) -> tuple[TunedRow, ...]:
    """Rows of the table at `path`; none if there is no file.

    Raises:
        ValueError: the file is not a table, or one of another device.
    """
    if not path.exists():
        return ()
    provenance, rows = parse_table(path.read_text(encoding="utf-8"), str(path))
    _check(
        provenance["device"] == device,
        f"{path}: provenance.device",
        device,
        provenance["device"],
        "give each device a table of its own",
    )
    return rows


_generations = [0]


def generation() -> int:
    """How often tables have been reloaded: choices made from an earlier one are stale."""
    return _generations[0]


def reload_tables() -> None:
    """Read the files again where they are next needed."""
    _rows_by_shape.cache_clear()
    _generations[0] += 1


@functools.cache
def _rows_by_shape(target: Target) -> dict[ShapeKey, list[TunedRow]]:
    name, own = table_name(target), user_table(target)
    shipped = resources.files("mxpert.core") / "tables" / name
    rows: dict[tuple[object, ...], TunedRow] = {}
    if shipped.is_file():
        rows.update({row.key: row for row in parse_table(shipped.read_text("utf-8"), name)[1]})
    if own is not None and is_file(own):
        rows.update({row.key: row for row in parse_table(own.read_text("utf-8"), str(own))[1]})
    table: dict[ShapeKey, list[TunedRow]] = {}
    for row in sorted(rows.values(), key=lambda row: row.key):
        table.setdefault(row.shape_key, []).append(row)
    return table


def tuned_row(problem: MoEProblem, backend: str) -> TunedRow | None:
    """The backend's row for these dimensions whose token count is T or a little above.

    A row answers from its own count down to three quarters of it (`ROW_REACH`). Further off the
    rows per expert are others, and the heuristic, which follows them, is the better guide. Where
    other ranks have a part of the experts, T is the number of tokens that would route as many rows
    to this rank's experts alone.
    """
    if problem.op not in (Op.FUSED_MOE, Op.MOE_GATE_UP, Op.MOE_DOWN):
        return None
    num_tokens = problem.routed_rows / problem.top_k
    for row in _rows_by_shape(problem.target).get(problem_key(problem, backend), []):
        if row.num_tokens * ROW_REACH < num_tokens <= row.num_tokens:
            return row
    return None
