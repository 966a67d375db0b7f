"""The JSON of grouped_gemm.py: written after every cell, checked when read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from document import read
from grouped_cells import BALANCES, OPS, Shape
from grouped_ours import Variant

from mxpert.cli.report import write_json
from mxpert.errors import require
from mxpert.testing.timing import Timing

Row = dict[str, Any]
META_KEYS = ("device", "clocks", "versions", "commit", "date", "protocol", "ceilings")
OPTIONAL_META_KEYS = ("kernels", "peers", "failures")
_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))
ROW_TYPES: dict[str, tuple[type, ...]] = {
    "shape": (str,),
    "G": (int,),
    "rows": (int,),
    "N": (int,),
    "K": (int,),
    "balance": (str,),
    "impl": (str,),
    "mode": (str,),
    "op": (str,),
    "with_quant": (bool,),
    "us": _NUMBER,
    "us_spread": _NUMBER,
    "tflops": _NUMBER,
    "snr_db": _OPTIONAL,
    "rel_l2": _OPTIONAL,
}
QUANTISER_TYPES: dict[str, tuple[type, ...]] = {
    "shape": (str,),
    "operand": (str,),
    "op": (str,),
    "mode": (str,),
    "dtype": (str,),
    "width": (int,),
    "bytes_ideal": (int,),
    "us": _NUMBER,
    "tbs": _NUMBER,
    "of_copy": _NUMBER,
}
KEY_COLUMNS = ("shape", "balance", "impl", "mode", "op", "with_quant")
QUANTISER_KEY = ("shape", "operand", "op", "mode", "dtype")
SECTIONS = {"rows": (ROW_TYPES, KEY_COLUMNS), "quantiser": (QUANTISER_TYPES, QUANTISER_KEY)}


def validate(document: Any, source: str = "document") -> None:
    """Refuse a document that grouped_gemm.py did not write.

    Raises:
        ValueError: names the first key or row that is missing, unknown or of the wrong kind.
    """
    wanted = {"meta", *SECTIONS}
    require(
        isinstance(document, dict) and set(document) == wanted,
        source,
        "keys",
        need=", ".join(sorted(wanted)),
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
    for section, (types, key_columns) in SECTIONS.items():
        seen = set()
        for index, row in enumerate(document[section]):
            place = f"{section}[{index}]"
            _validate_row(row, types, source, place)
            key = tuple(row[name] for name in key_columns)
            require(
                key not in seen, source, place, need="one row for each cell", got=f"{key} twice"
            )
            seen.add(key)


def _validate_row(row: Row, types: dict[str, tuple[type, ...]], source: str, place: str) -> None:
    require(set(row) == set(types), source, place, need=", ".join(types), got=", ".join(row))
    for name, allowed in types.items():
        value = row[name]
        good = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        require(
            good,
            source,
            f"{place}.{name}",
            got=repr(value),
            need=" or ".join(kind.__name__ for kind in allowed),
        )
    require(row["us"] > 0, source, f"{place}.us", need="more than 0", got=row["us"])
    if "balance" in row:
        for name, choices in (("balance", BALANCES), ("op", OPS)):
            require(
                row[name] in choices,
                source,
                f"{place}.{name}",
                need=f"one of {choices}",
                got=repr(row[name]),
            )


def load(path: Path) -> dict[str, Any]:
    """Read and check a document."""
    return read(path, "grouped_gemm.py", validate)


def make_row(
    shape: Shape,
    balance: str,
    variant: Variant,
    timing: Timing,
    snr_db: float,
    rel_l2: float | None,
) -> Row:
    """One measurement; µs, and the width of the band from the 10th to the 90th percentile."""
    return {
        "shape": str(shape),
        "G": shape.G,
        "rows": shape.rows,
        "N": shape.N,
        "K": shape.K,
        "balance": balance,
        "impl": variant.impl,
        "mode": variant.mode,
        "op": variant.op,
        "with_quant": variant.with_quant,
        "us": timing.us,
        "us_spread": timing.high_us - timing.low_us,
        "tflops": shape.flops(variant.op) / timing.us / 1e6,
        "snr_db": snr_db if math.isfinite(snr_db) else None,
        "rel_l2": rel_l2,
    }


@dataclass
class Document:
    """A run in the making: rows and failures, saved whole each time."""

    path: Path
    meta: Row
    rows: list[Row] = field(default_factory=list)
    quantiser: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    def fail(self, place: str, name: str, error: BaseException) -> None:
        """Note why a variant has no time."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        self.failures.append({"cell": place, "variant": name, "error": text})

    def save(self) -> None:
        """Write everything so far; the file is whole at any moment."""
        write_json(
            self.path,
            {
                "meta": self.meta | {"failures": self.failures},
                "rows": self.rows,
                "quantiser": self.quantiser,
            },
        )
