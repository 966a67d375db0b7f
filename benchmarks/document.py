"""The JSON of a comparison: written after every cell, checked when read, resumed cell by cell."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import ROUTINGS, STAGES, WIDTHS, Cell

from mxpert.cli.report import write_json
from mxpert.errors import require
from mxpert.testing.timing import Timing, Work

Row = dict[str, Any]
META_KEYS = ("device", "clocks", "versions", "commit", "date", "protocol", "ceilings")
OPTIONAL_META_KEYS = ("peers", "failures", "left")
ROW_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "E": (int,),
    "k": (int,),
    "H": (int,),
    "F": (int,),
    "T": (int,),
    "hit": (int, float),
    "routing": (str,),
    "impl": (str,),
    "activation": (str,),
    "stage": (str,),
    "us": (int, float),
    "us_spread": (int, float),
    "rel_l2": (int, float, type(None)),
    "tbs": (int, float),
    "tflops": (int, float),
    "percent_of_roof": (int, float),
}
KEY_COLUMNS = ("model", "T", "routing", "impl", "activation", "stage")

Key = tuple[str, int, str, str, str, str]


def row_key(row: Mapping[str, Any]) -> Key:
    """What makes a row unique."""
    model, tokens, routing, impl, activation, stage = (row[name] for name in KEY_COLUMNS)
    return model, tokens, routing, impl, activation, stage


def validate(document: Any, source: str = "document") -> None:
    """Refuse a document that is not a comparison.

    Raises:
        ValueError: names the first key or row that is missing, unknown or of the wrong kind.
    """
    require(
        isinstance(document, dict) and set(document) == {"meta", "rows"},
        source,
        "keys",
        need="meta and rows",
        got=sorted(document) if isinstance(document, dict) else type(document).__name__,
    )
    keys = set(document["meta"])
    require(
        set(META_KEYS) <= keys <= {*META_KEYS, *OPTIONAL_META_KEYS},
        source,
        "meta",
        need=", ".join(META_KEYS),
        got=", ".join(sorted(keys)),
    )
    seen: set[Key] = set()
    for index, row in enumerate(document["rows"]):
        place = f"rows[{index}]"
        require(
            set(row) == set(ROW_TYPES), source, place, need=", ".join(ROW_TYPES), got=", ".join(row)
        )
        for name, types in ROW_TYPES.items():
            good = isinstance(row[name], types) and not isinstance(row[name], bool)
            require(
                good,
                source,
                f"{place}.{name}",
                got=repr(row[name]),
                need=" or ".join(kind.__name__ for kind in types),
            )
        for name, allowed in (("stage", STAGES), ("activation", WIDTHS), ("routing", ROUTINGS)):
            require(
                row[name] in allowed,
                source,
                f"{place}.{name}",
                need=f"one of {list(allowed)}",
                got=repr(row[name]),
            )
        require(row["us"] > 0, source, f"{place}.us", need="more than 0", got=row["us"])
        require(
            row_key(row) not in seen,
            source,
            place,
            need="one row for each cell",
            got=f"{row_key(row)} twice",
        )
        seen.add(row_key(row))


def load(path: Path) -> dict[str, Any]:
    """Read and check a comparison."""
    return read(path, "compare.py", validate)


def read(path: Path, script: str, check: Callable[[Any, str], None]) -> dict[str, Any]:
    """The JSON that `script` wrote to `path`, once `check` has found nothing wrong with it.

    Raises:
        ValueError: no such file, no JSON, or what `check` raises.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: file — need the JSON of {script}, got {error}") from error
    check(document, str(path))
    return document


def make_row(
    cell: Cell,
    hit: float,
    impl: str,
    activation: str,
    stage: str,
    timing: Timing,
    rel_l2: float | None,
    ceilings: Mapping[str, float],
) -> Row:
    """One measurement set against the ceilings of its run; times in µs, `us_spread` the width of
    the band from the 10th to the 90th percentile."""
    model = cell.model
    work = Work.of_stage(
        stage.removesuffix("_gemm"),
        hit_experts=hit,
        hidden_size=model.H,
        routed_rows=cell.tokens * model.k,
        intermediate_size=model.F,
    )
    rate = ceilings["bf16_tflops" if WIDTHS[activation] == "a16" else "fp8_tflops"]
    floor = work.floor_us(ceilings["read_tbs"] * 1e12, rate * 1e12)
    finite = rel_l2 is not None and math.isfinite(rel_l2)
    return {
        "model": model.name,
        "E": model.E,
        "k": model.k,
        "H": model.H,
        "F": model.F,
        "T": cell.tokens,
        "hit": hit,
        "routing": cell.routing,
        "impl": impl,
        "activation": activation,
        "stage": stage,
        "us": timing.us,
        "us_spread": timing.high_us - timing.low_us,
        "rel_l2": rel_l2 if finite else None,
        "tbs": work.weight_bytes / timing.us / 1e6,
        "tflops": work.flops / timing.us / 1e6,
        "percent_of_roof": 100 * floor / timing.us,
    }


@dataclass
class Document:
    """A comparison in the making: rows and failures by key, saved whole each time."""

    path: Path
    meta: Row
    rows: dict[Key, Row] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path, meta: Row) -> Document:
        """Continue the run in `path`, which must be of the same device, commit and protocol.

        Raises:
            ValueError: no such file, or another device, commit or protocol: times of different
                runs do not compare.
        """
        old = load(path)
        for name in ("device", "commit", "protocol"):
            require(
                old["meta"][name] == meta[name],
                "compare",
                f"--resume {path}: {name}",
                need=meta[name],
                got=old["meta"][name],
                remedy="start a new run",
            )
        failures = {row_key(each): each["error"] for each in old["meta"].get("failures", [])}
        return cls(path, old["meta"], {row_key(row): row for row in old["rows"]}, failures)

    def is_done(self, key: Key) -> bool:
        """Whether a cell was measured, or failed and would fail again."""
        return key in self.rows or key in self.failures

    def add(self, row: Row) -> None:
        self.rows[row_key(row)] = row

    def fail(self, key: Key, error: str) -> None:
        """Note why a cell has no time."""
        self.failures[key] = error

    def save(self) -> None:
        """Write everything so far; the file is whole at any moment."""
        failures = [
            dict(zip(KEY_COLUMNS, key, strict=True)) | {"error": error}
            for key, error in self.failures.items()
        ]
        write_json(
            self.path,
            {"meta": self.meta | {"failures": failures}, "rows": list(self.rows.values())},
        )
