"""Tuned tables: one JSON file per device, each row with the config that won, and provenance.

Rows are measured on the device. Only those with the source "model" are not: a cycle model chose
them, and `explain` says so.

Two files can hold rows for a device: the one shipped with the library and the one that `mxpert
tune` writes into the user's cache directory. A row of the latter replaces the shipped row for the
same formats, dimensions, tokens and backend.

"rows" of the file are `TunedRow`s, of MoE layers; "grouped" are `GroupedRow`s, of grouped GEMMs.
Their fields and types say what the loader accepts. A field without a value in the file takes the
default of its dataclass.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import message, require
from ..formats.names import WITH_FP8
from ..formats.spec import MXFP4, MXFP8_E4M3
from ..formats.weight_tensor import WEIGHT_FORMATS
from .environment import cache_directory
from .files import JSONReader, is_file, parse_json, write_atomically
from .problem import (
    ACTIVATION_FORMATS,
    GemmConfig,
    GroupedProblem,
    MoEConfig,
    MoEProblem,
    Op,
    OwnFormat,
    Target,
)

FORMATS: dict[str, tuple[OwnFormat, str]] = {
    f"{activation}x{weight}": (activation, weight)
    for weight in (MXFP4.name, MXFP8_E4M3.name, *WEIGHT_FORMATS)
    for activation in ACTIVATION_FORMATS
}
FORMATS |= {
    f"{name}{WITH_FP8}": both
    for name, both in FORMATS.items()
    if both[1] == MXFP4.name and both[0] != "bf16"
}
"""Formats of activations and weights of a layer, by the name that rows have."""
_MXFP8 = ("mxfp8_e4m3", "mxfp8_e5m2")
GROUPED_FORMATS = {
    f"{a}x{b}": (a, b) for a, b in (("bf16", "bf16"), *itertools.product(_MXFP8, _MXFP8))
}
"""Formats of both operands of a grouped GEMM, by the name that rows have."""
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
    "num_groups": "G",
    "num_rows": "M",
    "place": None,
}
"""Fields of a row that have another name in the file, or are not in it."""

_READER = JSONReader(_OP, _REMEDY, least=1, keys=_KEYS)

Source = Literal["heuristic", "search", "model"]
GroupedOp = Literal["grouped_gemm", "grouped_wgrad"]
ShapeKey = tuple[str, str, int, int, int, int]
GroupedKey = tuple[str, str, str, str, bool, int, int, int]


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """What every row says of its config. In a file it follows the row's own fields.

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


@dataclass(frozen=True)
class TunedRow(MeasuredRow):
    """One tuned choice: for exactly these dimensions, about `num_tokens` tokens, one backend."""

    formats: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    backend: str
    config: MoEConfig

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
class GroupedRow(MeasuredRow):
    """One tuned choice for a grouped GEMM.

    Args:
        op: "grouped_gemm" (forward and dgrad) or "grouped_wgrad".
        formats: of both operands, as `GroupedProblem.formats`. spans: their scale spans, "row,row".
        trans_b, num_groups, n, k, num_rows: as in `GroupedProblem`.
    """

    op: GroupedOp
    formats: str
    spans: str
    trans_b: bool
    num_groups: int
    n: int
    k: int
    num_rows: int
    backend: str
    config: GemmConfig

    @property
    def shape_key(self) -> GroupedKey:
        """What a problem must match: backend, op, formats, spans, trans_b, G, n, k."""
        return (
            self.backend,
            self.op,
            self.formats,
            self.spans,
            self.trans_b,
            self.num_groups,
            self.n,
            self.k,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """What no two rows of a table share: `shape_key` and M."""
        return (*self.shape_key, self.num_rows)


AnyRow = TunedRow | GroupedRow
_RowT = TypeVar("_RowT", TunedRow, GroupedRow)


@dataclass(frozen=True)
class Table:
    """A table as it is read: rows of MoE layers, and of grouped GEMMs."""

    provenance: dict[str, Any]
    rows: list[TunedRow]
    grouped: list[GroupedRow] = field(default_factory=list)


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


def grouped_spans(problem: GroupedProblem) -> str:
    """The scale spans of both operands, as rows have them."""
    return f"{problem.a_span.value},{problem.b_span.value}"


def grouped_key(problem: GroupedProblem, backend: str) -> GroupedKey:
    """The `shape_key` of rows that serve a grouped GEMM on a backend."""
    return (
        backend,
        problem.op.value,
        problem.formats,
        grouped_spans(problem),
        problem.trans_b,
        problem.num_groups,
        problem.n,
        problem.k,
    )


def row_key(problem: MoEProblem | GroupedProblem, backend: str) -> tuple[object, ...]:
    """The `key` of the row that a problem of exactly this size would have."""
    if isinstance(problem, GroupedProblem):
        return (*grouped_key(problem, backend), problem.num_rows)
    return (*problem_key(problem, backend), problem.num_tokens)


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
    """The provenance and the rows of MoE layers of a table; see `read_table`."""
    table = read_table(text, source)
    return table.provenance, tuple(table.rows)


def read_table(text: str, source: str) -> Table:
    """Read a table.

    Raises:
        ValueError: provenance is missing, a row lacks a key, has an unknown one, a value of another
            type or the key of another row, or a config is not valid. The message names file, row
            and key.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ValueError(message(_OP, source, "JSON", error, _REMEDY)) from error
    table: Table = _READER.value(Table, document, source, joint=": ")
    provenance, place = table.provenance, f"{source}: provenance"
    missing = [key for key in _PROVENANCE if not provenance.get(key)]
    _check(not missing, place, list(_PROVENANCE), f"{missing} missing")
    return Table(
        provenance,
        _placed(table.rows, f"{source}: rows", FORMATS),
        _placed(table.grouped, f"{source}: grouped", GROUPED_FORMATS),
    )


def _placed(rows: Iterable[_RowT], place: str, formats: Iterable[str]) -> list[_RowT]:
    """The rows with their places; raises for an unknown format, and for a key that another has."""
    seen: dict[tuple[object, ...], _RowT] = {}
    for index, found in enumerate(rows):
        row = replace(found, place=f"{place}[{index}]")
        _check(row.formats in formats, f"{row.place}.formats", list(formats), repr(row.formats))
        first = seen.setdefault(row.key, row)
        _check(
            first is row,
            row.place,
            "one row for each shape, T (M of a grouped GEMM) and backend",
            f"the key of {first.place}",
            "drop one of the two",
        )
    return list(seen.values())


def _check(condition: bool, place: str, need: object, got: object, remedy: str = _REMEDY) -> None:
    require(condition, _OP, place, need=need, got=got, remedy=remedy)


def format_table(provenance: Mapping[str, Any], rows: Iterable[AnyRow]) -> str:
    """A table's text: rows in the order of their keys, one a line, so that a diff shows rows."""
    every = list(rows)
    head = json.dumps(dict(provenance), indent=1, allow_nan=False).replace("\n", "\n ")
    parts = [f'"provenance": {head}', _format_rows("rows", every, TunedRow)]
    if any(isinstance(row, GroupedRow) for row in every):
        parts.append(_format_rows("grouped", every, GroupedRow))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _format_rows(name: str, rows: Iterable[AnyRow], kind: type[AnyRow]) -> str:
    lines = []
    keys = {field: _KEYS.get(field, field) for field in (*_own(kind), *_own(MeasuredRow))}
    for row in sorted((row for row in rows if isinstance(row, kind)), key=lambda row: row.key):
        values = asdict(row)
        document = {key: values[field] for field, key in keys.items() if key is not None}
        lines.append(f"  {json.dumps(document, allow_nan=False)}")
    return f'"{name}": [\n' + ",\n".join(lines) + "\n ]"


def _own(kind: type[MeasuredRow]) -> tuple[str, ...]:
    """The fields that a class does not inherit."""
    return tuple(kind.__annotations__)


def add_rows(path: Path, provenance: Mapping[str, Any], rows: Iterable[AnyRow]) -> None:
    """Put rows into the table at `path`, in place of those with the same keys, or start a table.

    The file is replaced whole or not at all. Its provenance becomes the given one; each row keeps
    the commit and date of the run that measured it.

    Raises:
        ValueError: the file is not a table, or one of another device.
    """
    merged = {row.key: row for row in (*every_row(path, str(provenance["device"])), *rows)}
    text = format_table(provenance, merged.values())
    parse_table(text, str(path))  # nothing is written that could not be read
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"), shared=True)
    reload_tables()


def read_rows(path: Path, device: str) -> tuple[TunedRow, ...]:
    """Rows of MoE layers of the table at `path`; see `every_row`."""
    return tuple(row for row in every_row(path, device) if isinstance(row, TunedRow))


def every_row(path: Path, device: str) -> tuple[AnyRow, ...]:
    """Rows of the table at `path`; none if there is no file.

    Raises:
        ValueError: the file is not a table, or one of another device.
    """
    if not path.exists():
        return ()
    table = read_table(path.read_text(encoding="utf-8"), str(path))
    _check(
        table.provenance["device"] == device,
        f"{path}: provenance.device",
        device,
        table.provenance["device"],
        "give each device a table of its own",
    )
    return *table.rows, *table.grouped


_generations = [0]


def generation() -> int:
    """How often tables have been reloaded: choices made from an earlier one are stale."""
    return _generations[0]


def reload_tables() -> None:
    """Read the files again where they are next needed."""
    _rows_by_shape.cache_clear()
    _generations[0] += 1


@functools.cache
def _rows_by_shape(target: Target) -> tuple[_ByShape[TunedRow], _ByShape[GroupedRow]]:
    """Rows of layers and of grouped GEMMs, each shape's by rising size."""
    name, own = table_name(target), user_table(target)
    shipped = resources.files("mxpert.core") / "tables" / name
    tables = []
    if shipped.is_file():
        tables.append(read_table(shipped.read_text("utf-8"), name))
    if own is not None and is_file(own):
        tables.append(read_table(own.read_text("utf-8"), str(own)))
    layers = _by_shape([row for table in tables for row in table.rows])
    return layers, _by_shape([row for table in tables for row in table.grouped])


_ByShape = dict[tuple[object, ...], list[_RowT]]


def _by_shape(rows: Iterable[_RowT]) -> _ByShape[_RowT]:
    """Rows by `shape_key`; of two with one key the later one."""
    table: _ByShape[_RowT] = {}
    for row in sorted({row.key: row for row in rows}.values(), key=lambda row: row.key):
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
    for row in _rows_by_shape(problem.target)[0].get(problem_key(problem, backend), []):
        if row.num_tokens * ROW_REACH < num_tokens <= row.num_tokens:
            return row
    return None


def tuned_grouped_row(problem: GroupedProblem, backend: str) -> GroupedRow | None:
    """The backend's row for this grouped GEMM whose number of rows is M or a little above.

    A row answers from its own M down to three quarters of it (`ROW_REACH`). How the rows divide
    among the groups is not known on the host, and not asked.
    """
    for row in _rows_by_shape(problem.target)[1].get(grouped_key(problem, backend), []):
        if row.num_rows * ROW_REACH < problem.num_rows <= row.num_rows:
            return row
    return None
