"""Tuned tables: one JSON file per device, each row with the config that won, and provenance.

Two files can hold rows for a device: the one shipped with the library and the one that `mxpert
tune` writes into the user's cache directory. A row of the latter replaces the shipped row for the
same formats, dimensions, tokens and backend.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ..environment import cache_directory
from ..errors import require
from ..files import is_file, parse_json, write_atomically
from ..problem import ACTIVATION_FORMATS, GemmConfig, MoEConfig, MoEProblem, Op, Target

REQUIRED_PROVENANCE = ("device", "date", "commit", "torch", "triton")
FORMATS = tuple(f"{name}xmxfp4" for name in ACTIVATION_FORMATS)
SOURCES = ("heuristic", "search")
ROW_REACH = 0.75
"""A row serves token counts above this part of its own."""

_OP = "load_table"
_REMEDY = "write tables with mxpert tune"
_SIZES = ("E", "k", "H", "F", "T")
_STAGES = ("gate_up", "down")
_GEMM_KEYS = tuple(field.name for field in fields(GemmConfig))


@dataclass(frozen=True)
class Measured:
    """What was seen when a row was tuned.

    Args:
        us: microseconds of the row's config.
        heuristic_us: of the heuristic's choice; None if that was wrong.
        spread: width of the 10–90 % band over the median, the wider one of the two.
        source: "search", or "heuristic" where nothing was faster by more than the spread.
        note: the comparison in words. rel_l2: the config's error to float64.
        tried, valid: configs that were tried, and that the kernel has.
        commit, date: of the run that measured this row.
    """

    us: float
    heuristic_us: float | None
    spread: float
    source: str
    note: str
    rel_l2: float
    tried: int
    valid: int
    commit: str
    date: str


_MEASURED_KEYS = tuple(field.name for field in fields(Measured))
_ROW_KEYS = ("formats", *_SIZES, "backend", "config", *_MEASURED_KEYS)


@dataclass(frozen=True)
class TunedRow:
    """One tuned choice: for exactly these dimensions, about `num_tokens` tokens, one backend.

    `place` names the file and the row, for `explain()` and for errors.
    """

    formats: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    backend: str
    config: MoEConfig
    measured: Measured
    place: str = ""

    @property
    def shape_key(self) -> tuple[str, str, int, int, int, int]:
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


def problem_key(problem: MoEProblem, backend: str) -> tuple[str, str, int, int, int, int]:
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

    >>> table_name(Target("cuda", "sm_90", "NVIDIA H200", 132, 232448))
    'nvidia-h200.json'
    """
    return "-".join(target.name.lower().split()) + ".json"


def user_table(target: Target) -> Path | None:
    """Where this user's table for a device is, or would be; None where the user has no home."""
    directory = cache_directory()
    return None if directory is None else directory / "tables" / table_name(target)


def parse_provenance(text: str, source: str) -> dict[str, Any]:
    """Validate a table's head and return its provenance.

    Raises:
        ValueError: no JSON object, or provenance is missing.
    """
    provenance: dict[str, Any] = _document(text, source)["provenance"]
    return provenance


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{_OP}: {source} — need JSON, got {error}; {_REMEDY}") from error
    _check_keys(document, source, ("provenance", "rows"))
    provenance, rows = document["provenance"], document["rows"]
    require(
        isinstance(provenance, dict),
        _OP,
        f"{source}: provenance",
        need="an object",
        got=type(provenance).__name__,
        remedy=_REMEDY,
    )
    missing = [key for key in REQUIRED_PROVENANCE if not provenance.get(key)]
    require(
        not missing,
        _OP,
        f"{source}: provenance",
        need=list(REQUIRED_PROVENANCE),
        got=f"{missing} missing",
        remedy=_REMEDY,
    )
    require(
        isinstance(rows, list),
        _OP,
        f"{source}: rows",
        need="a list",
        got=type(rows).__name__,
        remedy=_REMEDY,
    )
    return dict(document)


def parse_table(text: str, source: str) -> tuple[TunedRow, ...]:
    """Validate a table and return its rows.

    Raises:
        ValueError: provenance is missing, a row lacks a key, has an unknown one, a value of the
            wrong kind or the key of another row, or a config is not valid. The message names
            file, row and key.
    """
    rows = tuple(
        _parse_row(row, f"{source}: rows[{index}]")
        for index, row in enumerate(_document(text, source)["rows"])
    )
    seen: dict[tuple[object, ...], str] = {}
    for row in rows:
        first = seen.setdefault(row.key, row.place)
        require(
            first == row.place,
            _OP,
            row.place,
            need="one row for each shape, T and backend",
            got=f"the key of {first}",
            remedy="drop one of the two",
        )
    return rows


def _check_keys(value: object, place: str, keys: tuple[str, ...]) -> None:
    require(
        isinstance(value, dict),
        _OP,
        place,
        need="an object",
        got=type(value).__name__,
        remedy=_REMEDY,
    )
    assert isinstance(value, dict)  # for the type checker
    unknown, missing = sorted(set(value) - set(keys)), [key for key in keys if key not in value]
    require(not missing, _OP, place, need=list(keys), got=f"{missing} missing", remedy=_REMEDY)
    require(not unknown, _OP, place, need=list(keys), got=f"unknown {unknown}", remedy=_REMEDY)


def _integer(value: Mapping[str, Any], key: str, place: str) -> int:
    number = value[key]
    require(
        type(number) is int and number > 0,
        _OP,
        f"{place}.{key}",
        need="a positive integer",
        got=repr(number),
        remedy=_REMEDY,
    )
    return int(number)


def _number(row: Mapping[str, Any], key: str, place: str) -> float:
    number = row[key]
    require(
        type(number) in (int, float) and 0 <= number < float("inf"),
        _OP,
        f"{place}.{key}",
        need="a finite number of at least 0",
        got=repr(number),
        remedy=_REMEDY,
    )
    return float(number)


def _text(row: Mapping[str, Any], key: str, place: str, allowed: Iterable[str] = ()) -> str:
    text = row[key]
    require(
        isinstance(text, str) and (not allowed or text in allowed),
        _OP,
        f"{place}.{key}",
        need=f"one of {list(allowed)}" if allowed else "a string",
        got=repr(text),
        remedy=_REMEDY,
    )
    return str(text)


def _parse_row(row: Any, place: str) -> TunedRow:
    _check_keys(row, place, _ROW_KEYS)
    experts, top_k, hidden, intermediate, tokens = (_integer(row, key, place) for key in _SIZES)
    formats = _text(row, "formats", place, FORMATS)
    measured = Measured(
        us=_number(row, "us", place),
        spread=_number(row, "spread", place),
        heuristic_us=None if row["heuristic_us"] is None else _number(row, "heuristic_us", place),
        source=_text(row, "source", place, SOURCES),
        note=_text(row, "note", place),
        rel_l2=_number(row, "rel_l2", place),
        tried=_integer(row, "tried", place),
        valid=_integer(row, "valid", place),
        commit=_text(row, "commit", place),
        date=_text(row, "date", place),
    )
    config = _parse_config(row["config"], f"{place}.config")
    return TunedRow(
        formats,
        experts,
        top_k,
        hidden,
        intermediate,
        tokens,
        _text(row, "backend", place),
        config,
        measured,
        place,
    )


def _parse_config(config: Any, place: str) -> MoEConfig:
    _check_keys(config, place, ("routing_block_m", *_STAGES))
    unit, stages = _integer(config, "routing_block_m", place), []
    for name in _STAGES:
        _check_keys(config[name], f"{place}.{name}", _GEMM_KEYS)
        stage = GemmConfig(
            **{key: _integer(config[name], key, f"{place}.{name}") for key in _GEMM_KEYS}
        )
        require(
            unit % stage.block_m == 0,
            _OP,
            f"{place}.routing_block_m",
            got=unit,
            need=f"a multiple of {name}.block_m = {stage.block_m}",
            remedy=_REMEDY,
        )
        stages.append(stage)
    return MoEConfig(unit, *stages)


def format_table(provenance: Mapping[str, Any], rows: Iterable[TunedRow]) -> str:
    """A table's text: rows in the order of their keys, one a line, so that a diff shows rows."""
    lines = ",\n".join(
        f"  {json.dumps(_row_document(row), allow_nan=False)}"
        for row in sorted(rows, key=lambda row: row.key)
    )
    head = json.dumps(dict(provenance), indent=1, allow_nan=False).replace("\n", "\n ")
    return f'{{\n "provenance": {head},\n "rows": [\n{lines}\n ]\n}}\n'


def _row_document(row: TunedRow) -> dict[str, Any]:
    sizes = (row.num_experts, row.top_k, row.hidden_size, row.intermediate_size, row.num_tokens)
    return {
        "formats": row.formats,
        **dict(zip(_SIZES, sizes, strict=True)),
        "backend": row.backend,
        "config": asdict(row.config),
        **asdict(row.measured),
    }


def add_rows(path: Path, provenance: Mapping[str, Any], rows: Iterable[TunedRow]) -> None:
    """Put rows into the table at `path`, in place of those with the same keys, or start a table.

    The file is replaced whole or not at all. Its provenance becomes the given one; each row keeps
    the commit and date of the run that measured it.

    Raises:
        ValueError: the file is not a table, or one of another device.
    """
    merged = {row.key: row for row in read_rows(path, str(provenance["device"]))}
    merged.update({row.key: row for row in rows})
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
    text = path.read_text(encoding="utf-8")
    found = parse_provenance(text, str(path))["device"]
    require(
        found == device,
        _OP,
        f"{path}: provenance.device",
        need=device,
        got=found,
        remedy="give each device a table of its own",
    )
    return parse_table(text, str(path))


_generations = [0]


def generation() -> int:
    """How often tables have been reloaded: choices made from an earlier one are stale."""
    return _generations[0]


def reload_tables() -> None:
    """Read the files again where they are next needed."""
    _rows_by_shape.cache_clear()
    _generations[0] += 1


@functools.cache
def _rows_by_shape(target: Target) -> dict[tuple[str, str, int, int, int, int], list[TunedRow]]:
    name, own = table_name(target), user_table(target)
    shipped = resources.files("mxpert.dispatch") / "tables" / name
    rows: dict[tuple[object, ...], TunedRow] = {}
    if shipped.is_file():
        rows.update({row.key: row for row in parse_table(shipped.read_text("utf-8"), name)})
    if own is not None and is_file(own):
        rows.update({row.key: row for row in parse_table(own.read_text("utf-8"), str(own))})
    table: dict[tuple[str, str, int, int, int, int], list[TunedRow]] = {}
    for row in sorted(rows.values(), key=lambda row: row.key):
        table.setdefault(row.shape_key, []).append(row)
    return table


def tuned_row(problem: MoEProblem, backend: str) -> TunedRow | None:
    """The backend's row for these dimensions whose token count is T or a little above.

    A row answers from its own count down to three quarters of it (`ROW_REACH`). Further off the
    rows per expert are others, and the heuristic, which follows them, is the better guide.
    """
    if problem.op not in (Op.FUSED_MOE, Op.MOE_GATE_UP, Op.MOE_DOWN):
        return None
    for row in _rows_by_shape(problem.target).get(problem_key(problem, backend), []):
        if row.num_tokens * ROW_REACH < problem.num_tokens <= row.num_tokens:
            return row
    return None
