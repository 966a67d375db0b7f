"""What the rows of a comparison say: ratios to peers and among ours, shares of the roof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from cells import DECODE_TOKENS, FORMATS, GEMM_STAGES, MODELS, STAGES, WIDTHS
from document import Row

OURS = "mxpert"
BOTH_STAGES = "gate_up + down"
CellKey = tuple[str, int, str, str]
"""(model, T, routing, stage)."""


def model_rank(name: str) -> tuple[int, str]:
    """Models in the order of importance, unknown ones last."""
    return (list(MODELS).index(name) if name in MODELS else len(MODELS)), name


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
class Ratio:
    """The time of one of our formats over the best peer's of the same width, in one cell."""

    ours: Row
    peer: Row

    @property
    def value(self) -> float:
        return float(self.ours["us"] / self.peer["us"])

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


def our_rows(rows: Iterable[Row]) -> list[Row]:
    """Ours, in the order of the tables."""
    return sorted((row for row in rows if row["impl"] == OURS), key=lambda row: (
        model_rank(row["model"]), row["routing"], format_rank(row["activation"]),
        STAGES.index(row["stage"]), row["T"]))


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """One Ratio for each of our rows whose width a peer has in the same cell."""
    peers: dict[tuple[CellKey, str], Row] = {}
    for row in rows:
        key = cell_of(row), WIDTHS[row["activation"]]
        if row["impl"] != OURS and (key not in peers or row["us"] < peers[key]["us"]):
            peers[key] = row
    best = ((row, peers.get((cell_of(row), WIDTHS[row["activation"]]))) for row in our_rows(rows))
    return [Ratio(row, peer) for row, peer in best if peer is not None]


def geometric_means(found: Iterable[Ratio]) -> dict[tuple[str, str, str], tuple[float, int, float]]:
    """(our activation, stage, regime) → geometric mean, number of cells, worst ratio."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        key = each.activation, each.ours["stage"], each.regime
        groups.setdefault(key, []).append(each.value)
    order = sorted(groups, key=lambda key: (format_rank(key[0]), STAGES.index(key[1]), key[2]))
    return {key: (geometric_mean(groups[key]), len(groups[key]), max(groups[key]))
            for key in order}


def slower_cells(found: Iterable[Ratio]) -> list[Ratio]:
    """Cells in which a peer is faster, the worst first."""
    return sorted((each for each in found if each.value > 1), key=lambda each: -each.value)


def layer_overheads(rows: Iterable[Row]) -> dict[tuple[str, str, str, int], float]:
    """(model, routing, activation, T) → our layer's time over the sum of its two GEMMs'."""
    times: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in our_rows(rows):
        key = row["model"], row["routing"], row["activation"], row["T"]
        times.setdefault(key, {})[row["stage"]] = row["us"]
    return {key: each["layer"] / sum(each[stage] for stage in GEMM_STAGES)
            for key, each in times.items() if {"layer", *GEMM_STAGES} <= set(each)}


def scale_ratios(rows: Iterable[Row]) -> dict[CellKey, float]:
    """Cell → time with 1×32 scales (mxfp8) over that with one scale per token (fp8_token), for
    every stage and for `BOTH_STAGES`."""
    times: dict[str, dict[CellKey, float]] = {"mxfp8": {}, "fp8_token": {}}
    for row in our_rows(rows):
        if row["activation"] in times:
            times[row["activation"]][cell_of(row)] = row["us"]
    for each in times.values():
        for model, tokens, routing, stage in list(each):
            down = each.get((model, tokens, routing, "down"))
            if stage == "gate_up" and down is not None:
                both = model, tokens, routing, BOTH_STAGES
                each[both] = each[model, tokens, routing, stage] + down
    blocks, tokens_scaled = times["mxfp8"], times["fp8_token"]
    return {key: blocks[key] / tokens_scaled[key] for key in blocks if key in tokens_scaled}
