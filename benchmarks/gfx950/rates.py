"""Modelled rates of the cdna4 MoE loops, kept in a file: to execute them all takes minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from benchmarks.gfx950.choice import LoopKey, Rate, executed_rate
from benchmarks.harness.script import RESULTS
from mxpert.core.files import JSONReader, parse_json

RATES = RESULTS / "gfx950-model/rates.json"

_READER = JSONReader("load_rates", "write them with gfx950/choose.py", least=1)


class Rates:
    """Rates by loop: those of a file, and others executed where they are needed.

    Args:
        path: the file. execute: whether loops that it lacks are executed; else they are an error.
    """

    def __init__(self, path: Path = RATES, *, execute: bool = True) -> None:
        self.path, self.execute = path, execute
        self.known = load_rates(path) if path.is_file() else {}

    def __call__(self, key: LoopKey) -> Rate:
        if key not in self.known:
            if not self.execute:
                raise ValueError(f"{self.path}: no rate of {key}; run gfx950/choose.py")
            self.known[key] = executed_rate(key)
            print(f"{key}: {self.known[key].cycles:.2f} cycles", flush=True)
            self.path.write_text(format_rates(self.known), encoding="utf-8")
        return self.known[key]


def load_rates(path: Path) -> dict[LoopKey, Rate]:
    """Read a file of rates."""
    rows = parse_json(path.read_text(encoding="utf-8"))["rows"]
    return {
        _READER.value(LoopKey, row["loop"], f"{path}: rows[{place}].loop"): _READER.value(
            Rate, row["rate"], f"{path}: rows[{place}].rate"
        )
        for place, row in enumerate(rows)
    }


def format_rates(rates: Mapping[LoopKey, Rate]) -> str:
    """The file's text, one loop a line."""
    rows: list[dict[str, Any]] = [
        {"loop": asdict(key), "rate": asdict(rate)} for key, rate in rates.items()
    ]
    lines = sorted(json.dumps(row, allow_nan=False) for row in rows)
    head = json.dumps({"what": "modelled, not measured", "triton": triton.__version__})[:-1]
    return head + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"
