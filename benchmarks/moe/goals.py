"""The numeric goals of the MoE kernels, and what one comparison says of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from harness.document import Row

from moe.cells import DECODE_TOKENS, GEMM_STAGES, WIDTHS
from moe.figures import (
    BOTH_STAGES,
    CellKey,
    Roof,
    cell_name,
    format_rank,
    format_speed_ups,
    gemm_shares,
    our_rows,
    peer_width,
    speed_ups,
)

PEER_MEAN = {"a16": 1 / 0.60, "a8": 1 / 0.80, "a4": 1 / 0.80}
"""Speed-up of decode over the best peer, as a geometric mean."""

READ_SHARE = {"a16": 0.92, "a8": 0.95, "a4": 0.95}
"""Weight traffic of decode GEMMs over the read ceiling."""

READ_TOKENS = range(64, DECODE_TOKENS + 1)
NEARLY_ALL = 0.9
"""Share of the experts that counts as nearly all."""

FIRST_TOKEN_US = 30.0
CUBLAS_SHARE = 0.95
ROWS_PER_EXPERT = 256
PREFILL_TFLOPS = {"a16": 600.0, "a8": 1100.0, "a4": 1100.0}
PREFILL_TOKENS = 8192
PREFILL_MODELS = ("gpt-oss-120b", "dsv3-ep8", "kimi-k2-tp4")
SCALES_SPEED = 1 / 1.10
GEMM_SHARE = 1 / 1.10
LAYER_TOKENS = 64

NOTES = (
    "A cell is a model, T and stage. Speed-ups are a peer's time over ours and count all stages.",
    f"Read ceiling: T of {READ_TOKENS.start} to {DECODE_TOKENS}, GEMMs, at least "
    f"{100 * NEARLY_ALL:.0f} % of the experts hit, and reading takes longer than multiplying.",
    f"{FIRST_TOKEN_US:.0f} µs: models whose weights can be read in that time.",
    f"cuBLAS: prefill GEMMs with T · k / E ≥ {ROWS_PER_EXPERT}.",
    f"Speed of mxfp8 over fp8_token: GEMMs, {BOTH_STAGES}, layer. The formats quantise the "
    "intermediate in different stages, so that single stages do not compare.",
)


@dataclass(frozen=True)
class Goal:
    """One goal, and the figure of every cell that it speaks of.

    Args:
        number: as the project counts its goals. what: the figure. wanted: its limit.
        values: cell → figure. at_most: the limit is the most, not the least.
        of_mean: the geometric mean has to keep the limit, not every cell.
    """

    number: int
    what: str
    wanted: float
    values: Mapping[str, float]
    at_most: bool = False
    of_mean: bool = False

    def keeps(self, value: float) -> bool:
        """Whether a figure keeps the limit."""
        return value <= self.wanted if self.at_most else value >= self.wanted

    @property
    def mean(self) -> float:
        return geometric_mean(self.values.values())

    @property
    def worst(self) -> str:
        """The cell farthest on the wrong side."""
        return (max if self.at_most else min)(self.values, key=lambda cell: self.values[cell])

    @property
    def num_met(self) -> int:
        return sum(map(self.keeps, self.values.values()))

    @property
    def is_met(self) -> bool:
        return self.keeps(self.mean) if self.of_mean else self.num_met == len(self.values)

    def columns(self) -> tuple[str, ...]:
        """Goal, limit, geometric mean, worst cell, cells that meet it, verdict."""
        form = ".0f" if self.wanted >= 10 else ".2f"
        limit = f"{'≤' if self.at_most else '≥'} {self.wanted:{form}}"
        head = f"{self.number}. {self.what}", f"mean {limit}" if self.of_mean else limit
        if not self.values:
            return *head, "–", "–", "–", "not measured"
        return (
            *head,
            f"{self.mean:{form}}",
            f"{self.values[self.worst]:{form}} ({self.worst})",
            f"{self.num_met} of {len(self.values)}",
            "met" if self.is_met else "missed",
        )


def _decode_goals(
    rows: Sequence[Row], activation: str, ceilings: Mapping[str, float]
) -> Iterator[Goal]:
    """Goal 1."""
    width, peers = WIDTHS[activation], peer_width(activation)
    against = {
        cell_name(each.ours): each.value
        for each in speed_ups(rows)
        if each.activation == activation and each.regime == "decode"
    }
    mine = [row for row in our_rows(rows) if row["activation"] == activation]
    reading = {
        cell_name(row): row["tbs"] / ceilings["read_tbs"]
        for row in mine
        if row["stage"] in GEMM_STAGES
        and row["T"] in READ_TOKENS
        and row["hit"] >= NEARLY_ALL * row["E"]
        and Roof.of(row, ceilings).bound == "read"
    }
    single = {
        cell_name(row): row["us"]
        for row in mine
        if row["T"] == 1
        and row["stage"] == "layer"
        and row["tbs"] * row["us"] <= ceilings["read_tbs"] * FIRST_TOKEN_US
    }
    yield Goal(1, f"{activation} decode, speed-up over the best {peers} peer", 1.0, against)
    yield Goal(
        1,
        f"{activation} decode, speed-up over the best {peers} peer",
        PEER_MEAN[width],
        against,
        of_mean=True,
    )
    yield Goal(1, f"{activation} decode weight traffic / read ceiling", READ_SHARE[width], reading)
    yield Goal(1, f"{activation} layer at T = 1, µs", FIRST_TOKEN_US, single, at_most=True)


def _prefill_goals(
    rows: Sequence[Row], activation: str, ceilings: Mapping[str, float]
) -> Iterator[Goal]:
    """Goal 2."""
    width = WIDTHS[activation]
    rate = "bf16" if width == "a16" else "fp8"
    gemms = [
        row
        for row in our_rows(rows)
        if row["activation"] == activation and row["stage"] in GEMM_STAGES
    ]
    shares = {
        cell_name(row): row["tflops"] / ceilings[f"{rate}_tflops"]
        for row in gemms
        if row["T"] > DECODE_TOKENS and row["T"] * row["k"] >= ROWS_PER_EXPERT * row["E"]
    }
    rates = {
        cell_name(row): row["tflops"]
        for row in gemms
        if row["T"] == PREFILL_TOKENS and row["model"] in PREFILL_MODELS
    }
    against = {
        cell_name(each.ours): each.value
        for each in speed_ups(rows)
        if each.activation == activation and each.regime == "prefill"
    }
    yield Goal(2, f"{activation} prefill / cuBLAS {rate}", CUBLAS_SHARE, shares)
    yield Goal(2, f"{activation} TFLOP/s at T = {PREFILL_TOKENS}", PREFILL_TFLOPS[width], rates)
    yield Goal(
        2,
        f"{activation} prefill, speed-up over the best {peer_width(activation)} peer",
        1.0,
        against,
    )


def _name(key: CellKey) -> str:
    model, tokens, routing, stage = key
    return f"{model} T={tokens} {stage}" + ("" if routing == "uniform" else f" {routing}")


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """Every numeric goal that a comparison can speak of, for each of our activation formats."""
    rows, ceilings = document["rows"], document["meta"]["ceilings"]
    formats = sorted(
        {row["activation"] for row in our_rows(rows) if WIDTHS[row["activation"]] in PEER_MEAN},
        key=format_rank,
    )
    found = [goal for activation in formats for goal in _decode_goals(rows, activation, ceilings)]
    found += [goal for activation in formats for goal in _prefill_goals(rows, activation, ceilings)]
    found.append(
        Goal(
            3,
            "speed of mxfp8 over fp8_token",
            SCALES_SPEED,
            {
                _name(key): value
                for key, value in format_speed_ups(rows, "mxfp8", "fp8_token").items()
                if key[3] not in ("gate_up", "down")
            },
        )
    )
    found.append(
        Goal(
            3,
            "speed-up of mxfp4 over mxfp8",
            1.0,
            {_name(key): value for key, value in format_speed_ups(rows, "mxfp4", "mxfp8").items()},
        )
    )
    for activation in formats:
        layers = {
            f"{model} T={tokens}" + ("" if routing == "uniform" else f" {routing}"): value
            for (model, routing, name, tokens), value in gemm_shares(rows).items()
            if name == activation and tokens >= LAYER_TOKENS
        }
        found.append(
            Goal(4, f"{activation} two GEMMs / layer, T ≥ {LAYER_TOKENS}", GEMM_SHARE, layers)
        )
    return found
