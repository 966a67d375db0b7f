"""Tuned tables: one JSON file per device, each row with the config that won, and provenance."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..errors import require
from ..problem import GemmConfig, MoEConfig, MoEProblem, Op, Target

REQUIRED_PROVENANCE = ("device", "date", "commit", "torch", "triton")


@dataclass(frozen=True)
class TunedRow:
    """One tuned choice: for exactly these dimensions, up to `num_tokens` tokens."""

    formats: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    backend: str
    config: MoEConfig
    source: str

    @property
    def shape_key(self) -> tuple[str, int, int, int, int]:
        return (self.formats, self.num_experts, self.top_k, self.hidden_size,
                self.intermediate_size)


def table_name(target: Target) -> str:
    """File name of a device's table: "NVIDIA H200" → "nvidia-h200.json"."""
    return "-".join(target.name.lower().split()) + ".json"


def parse_table(text: str, source: str) -> tuple[TunedRow, ...]:
    """Validate a table and return its rows.

    Raises:
        ValueError: provenance is missing, a row lacks a key, or a config is not valid.
    """
    document = json.loads(text)
    provenance = document.get("provenance", {})
    missing = [key for key in REQUIRED_PROVENANCE if not provenance.get(key)]
    require(not missing, "load_table", f"{source}: provenance", need=list(REQUIRED_PROVENANCE),
            got=f"{missing} missing", remedy="write tables with mxpert tune or mxpert bench")
    return tuple(_parse_row(row, source, index) for index, row in enumerate(document["rows"]))


def _parse_row(row: dict[str, Any], source: str, index: int) -> TunedRow:
    place = f"{source}: rows[{index}]"
    try:
        config = MoEConfig(row["config"]["routing_block_m"], GemmConfig(**row["config"]["gate_up"]),
                           GemmConfig(**row["config"]["down"]))
        return TunedRow(row["formats"], row["E"], row["k"], row["H"], row["F"], row["T"],
                        row["backend"], config, place)
    except (KeyError, TypeError) as error:
        raise ValueError(f"load_table: {place} — {error!r}; see TunedRow for the keys") from error


@functools.cache
def _rows_by_shape(target: Target) -> dict[tuple[str, int, int, int, int], list[TunedRow]]:
    name = table_name(target)
    file = resources.files("mxpert.dispatch") / "tables" / name
    table: dict[tuple[str, int, int, int, int], list[TunedRow]] = {}
    if file.is_file():
        for row in parse_table(file.read_text(encoding="utf-8"), name):
            table.setdefault(row.shape_key, []).append(row)
    for rows in table.values():
        rows.sort(key=lambda row: row.num_tokens)
    return table


def tuned_row(problem: MoEProblem) -> TunedRow | None:
    """The row for these dimensions with the smallest token count that covers the problem's.

    Above the largest tuned count the largest row answers: configs settle there.
    """
    if problem.op not in (Op.FUSED_MOE, Op.MOE_GATE_UP, Op.MOE_DOWN):
        return None
    rows = _rows_by_shape(problem.target).get(
        (problem.formats, problem.num_experts, problem.top_k, problem.hidden_size,
         problem.intermediate_size), [])
    for row in rows:
        if row.num_tokens >= problem.num_tokens:
            return row
    return rows[-1] if rows else None
