"""Figures from the rows of a comparison: speed-ups over peers, shares of the roof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.moe.cells import (
    DECODE_TOKENS,
    FORMATS,
    GEMM_STAGES,
    OFFERED,
    PEER_WIDTHS,
    STAGES,
    WIDTHS,
)

OURS = "mxpert"
BOTH_STAGES = "gate_up + down"
CellKey = tuple[str, int, str, str]
"""(model, T, routing, stage)."""


def model_rank(name: str) -> tuple[int, str]:
    """Models in the order of importance, unknown ones last."""
    return (list(OFFERED).index(name) if name in OFFERED else len(OFFERED)), name


def format_rank(activation: str) -> int:
    """Our activation formats in the order of the tables."""
    return FORMATS.index(activation) if activation in FORMATS else len(FORMATS)


def regime(tokens: int) -> str:
    return "decode" if tokens <= DECODE_TOKENS else "prefill"


@dataclass(frozen=True)
class Roof:
    """How near a row comes to what its own run measured as possible.

    Args:
        share: of the time that reading the weights that are hit, or multiplying, must take.
        bound: which of the two takes longer: "read", or the cuBLAS rate "bf16" or "fp8".
    """

    share: float
    bound: str

    @classmethod
    def of(cls, row: Mapping[str, Any], ceilings: Mapping[str, float]) -> Roof:
        """From a row's rates; both are work over the time taken."""
        rate = "bf16" if WIDTHS[row["activation"]] == "a16" else "fp8"
        reading = row["tbs"] / ceilings["read_tbs"]
        computing = row["tflops"] / ceilings[f"{rate}_tflops"]
        return cls(reading, "read") if reading >= computing else cls(computing, rate)

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % {self.bound}"


@dataclass(frozen=True)
class SpeedUp:
    """The best peer's time over that of one of our formats, in one cell; above 1 ours is faster."""

    ours: Row
    peer: Row

    @property
    def value(self) -> float:
        return float(self.peer["us"] / self.ours["us"])

    @property
    def activation(self) -> str:
        """Our activation format."""
        return str(self.ours["activation"])

    @property
    def regime(self) -> str:
        return regime(self.ours["T"])

    def __str__(self) -> str:
        return f"{cell_name(self.ours)} {self.activation}"


def cell_name(row: Mapping[str, Any]) -> str:
    """Model, T, routing where it is not uniform, stage."""
    routing = "" if row["routing"] == "uniform" else f" {row['routing']}"
    return f"{row['model']} T={row['T']}{routing} {row['stage']}"


def cell_of(row: Mapping[str, Any]) -> CellKey:
    return row["model"], row["T"], row["routing"], row["stage"]


def line_name(row: Mapping[str, Any]) -> str:
    """Model and activation, and the routing where it is not uniform."""
    routing = "" if row["routing"] == "uniform" else f" {row['routing']}"
    return f"{row['model']} {row['activation']}{routing}"


def token_columns(counts: Iterable[int]) -> list[str]:
    return [f"T = {count}" for count in sorted(set(counts))]


def our_rows(rows: Iterable[Row]) -> list[Row]:
    """Ours, in the order of the tables."""

    def rank(row: Row) -> tuple[Any, ...]:
        kind = format_rank(row["activation"]), STAGES.index(row["stage"])
        return model_rank(row["model"]), row["routing"], *kind, row["T"]

    return sorted((row for row in rows if row["impl"] == OURS), key=rank)


def peer_width(activation: str) -> str:
    """Width of the peers that one of our formats is compared with."""
    return PEER_WIDTHS[WIDTHS[activation]]


def speed_ups(rows: Iterable[Row]) -> list[SpeedUp]:
    """One for each of our rows that has a peer of its `peer_width` in the same cell."""
    rows = list(rows)
    peers: dict[tuple[CellKey, str], Row] = {}
    for row in rows:
        key = cell_of(row), WIDTHS[row["activation"]]
        if row["impl"] != OURS and (key not in peers or row["us"] < peers[key]["us"]):
            peers[key] = row
    keys = ((row, (cell_of(row), peer_width(row["activation"]))) for row in our_rows(rows))
    return [SpeedUp(row, peers[key]) for row, key in keys if key in peers]


def geometric_means(
    found: Iterable[SpeedUp],
) -> dict[tuple[str, str, str], tuple[float, int, float]]:
    """(our activation, stage, regime) → geometric mean, number of cells, least speed-up."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        key = each.activation, each.ours["stage"], each.regime
        groups.setdefault(key, []).append(each.value)
    order = sorted(groups, key=lambda key: (format_rank(key[0]), STAGES.index(key[1]), key[2]))
    return {key: (geometric_mean(groups[key]), len(groups[key]), min(groups[key])) for key in order}


def slower_cells(found: Iterable[SpeedUp]) -> list[SpeedUp]:
    """Cells in which a peer is faster, the worst first."""
    return sorted((each for each in found if each.value < 1), key=lambda each: each.value)


def gemm_shares(rows: Iterable[Row]) -> dict[tuple[str, str, str, int], float]:
    """(model, routing, activation, T) → time of our two GEMMs over that of our layer."""
    times: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in our_rows(rows):
        key = row["model"], row["routing"], row["activation"], row["T"]
        times.setdefault(key, {})[row["stage"]] = row["us"]
    return {
        key: sum(each[stage] for stage in GEMM_STAGES) / each["layer"]
        for key, each in times.items()
        if {"layer", *GEMM_STAGES} <= set(each)
    }


def format_speed_ups(rows: Iterable[Row], activation: str, other: str) -> dict[CellKey, float]:
    """Cell → our time with the format `other` over that with `activation`, for every stage and for
    `BOTH_STAGES`."""
    times: dict[str, dict[CellKey, float]] = {activation: {}, other: {}}
    for row in our_rows(rows):
        times.setdefault(row["activation"], {})[cell_of(row)] = row["us"]
    mine, theirs = times[activation], times[other]
    for each in (mine, theirs):
        for *place, stage in list(each):
            down = each.get((*place, "down"))
            if stage == "gate_up" and down is not None:
                each[(*place, BOTH_STAGES)] = each[(*place, stage)] + down
    return {key: theirs[key] / mine[key] for key in mine if key in theirs}
