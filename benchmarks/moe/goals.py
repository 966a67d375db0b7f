"""The numeric goals of the MoE kernels, and what one comparison says of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.moe.cells import DECODE_TOKENS, GEMM_STAGES, WIDTHS
from benchmarks.moe.figures import (
    BOTH_STAGES,
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


def _speed_ups(rows: Sequence[Row], activation: str, regime: str) -> dict[str, float]:
    """Cell → speed-up over the best peer."""
    found = [
        each for each in speed_ups(rows) if (each.activation, each.regime) == (activation, regime)
    ]
    return {cell_name(each.ours): each.value for each in found}


def _decode_goals(
    rows: Sequence[Row], activation: str, ceilings: Mapping[str, float]
) -> Iterator[Goal]:
    """Goal 1."""
    width, mine = WIDTHS[activation], [row for row in rows if row["activation"] == activation]
    reading = {
        cell_name(row): row["tbs"] / ceilings["read_tbs"]
        for row in our_rows(mine)
        if row["stage"] in GEMM_STAGES
        and row["T"] in READ_TOKENS
        and row["hit"] >= NEARLY_ALL * row["E"]
        and Roof.of(row, ceilings).bound == "read"
    }
    single = {
        cell_name(row): row["us"]
        for row in our_rows(mine)
        if (row["T"], row["stage"]) == (1, "layer")
        and row["tbs"] * row["us"] <= ceilings["read_tbs"] * FIRST_TOKEN_US
    }
    against = _speed_ups(rows, activation, "decode")
    what = f"{activation} decode, speed-up over the best {peer_width(activation)} peer"
    yield Goal(1, what, 1.0, against)
    yield Goal(1, what, PEER_MEAN[width], against, of_mean=True)
    yield Goal(1, f"{activation} decode weight traffic / read ceiling", READ_SHARE[width], reading)
    yield Goal(1, f"{activation} layer at T = 1, µs", FIRST_TOKEN_US, single, at_most=True)


def _prefill_goals(
    rows: Sequence[Row], activation: str, ceilings: Mapping[str, float]
) -> Iterator[Goal]:
    """Goal 2."""
    width = WIDTHS[activation]
    rate = "bf16" if width == "a16" else "fp8"
    mine = [row for row in rows if row["activation"] == activation]
    gemms = [row for row in our_rows(mine) if row["stage"] in GEMM_STAGES]
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
    what = f"{activation} prefill, speed-up over the best {peer_width(activation)} peer"
    yield Goal(2, f"{activation} prefill / cuBLAS {rate}", CUBLAS_SHARE, shares)
    yield Goal(2, f"{activation} TFLOP/s at T = {PREFILL_TOKENS}", PREFILL_TFLOPS[width], rates)
    yield Goal(2, what, 1.0, _speed_ups(rows, activation, "prefill"))


def _name(model: str, tokens: int, routing: str, stage: str = "") -> str:
    return " ".join(filter(None, (model, f"T={tokens}", stage, routing.replace("uniform", ""))))


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """Every numeric goal that a comparison can speak of, for each of our activation formats."""
    rows, ceilings = document["rows"], document["meta"]["ceilings"]
    present = {row["activation"] for row in our_rows(rows)}
    formats = sorted((name for name in present if WIDTHS[name] in PEER_MEAN), key=format_rank)
    found = [goal for name in formats for goal in _decode_goals(rows, name, ceilings)]
    found += [goal for name in formats for goal in _prefill_goals(rows, name, ceilings)]
    scales, narrow = (
        {
            _name(*key): value
            for key, value in format_speed_ups(rows, *pair).items()
            if key[3] not in hidden
        }
        for *pair, hidden in (("mxfp8", "fp8_token", ("gate_up", "down")), ("mxfp4", "mxfp8", ()))
    )
    found.append(Goal(3, "speed of mxfp8 over fp8_token", SCALES_SPEED, scales))
    found.append(Goal(3, "speed-up of mxfp4 over mxfp8", 1.0, narrow))
    shares = gemm_shares(rows).items()
    for activation in formats:
        layers = {
            _name(model, tokens, routing): value
            for (model, routing, name, tokens), value in shares
            if name == activation and tokens >= LAYER_TOKENS
        }
        what = f"{activation} two GEMMs / layer, T ≥ {LAYER_TOKENS}"
        found.append(Goal(4, what, GEMM_SHARE, layers))
    return found
