"""The numeric goals of the MoE kernels, and what one comparison says of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from cells import DECODE_TOKENS, GEMM_STAGES, WIDTHS
from document import Row
from figures import BOTH_STAGES, Roof, cell_name, format_rank, layer_overheads, our_rows, ratios
from figures import scale_ratios

PEER_MEAN = {"a16": 0.60, "a8": 0.80}
"""Our decode time over the best peer's, as a geometric mean."""

READ_SHARE = {"a16": 0.92, "a8": 0.95}
"""Weight traffic of decode GEMMs over the read ceiling."""

READ_TOKENS = range(64, DECODE_TOKENS + 1)
NEARLY_ALL = 0.9
"""Share of the experts that counts as nearly all."""

FIRST_TOKEN_US = 30.0
CUBLAS_SHARE = 0.95
ROWS_PER_EXPERT = 256
PREFILL_TFLOPS = {"a16": 600.0, "a8": 1100.0}
PREFILL_TOKENS = 8192
PREFILL_MODELS = ("gpt-oss-120b", "dsv3-ep8", "kimi-k2-tp4")
SCALES_RATIO = 1.10
LAYER_RATIO = 1.10
LAYER_TOKENS = 64

NOTES = (
    "A cell is a model, T and stage; goals against peers count all five stages.",
    f"Read ceiling: T of {READ_TOKENS.start} to {DECODE_TOKENS}, GEMMs, at least "
    f"{100 * NEARLY_ALL:.0f} % of the experts hit, and reading takes longer than multiplying.",
    f"{FIRST_TOKEN_US:.0f} µs: models whose weights can be read in that time.",
    f"cuBLAS: prefill GEMMs with T · k / E ≥ {ROWS_PER_EXPERT}.",
    f"mxfp8 / fp8_token: GEMMs, {BOTH_STAGES}, layer. The formats quantise the intermediate in "
    "different stages, so that single stages do not compare.")


@dataclass(frozen=True)
class Goal:
    """One goal, and the figure of every cell that it speaks of.

    Args:
        number: as the project counts its goals. what: the figure. wanted: its limit.
        values: cell → figure. at_least: the limit is the least, not the most.
        of_mean: the geometric mean has to keep the limit, not every cell.
    """

    number: int
    what: str
    wanted: float
    values: Mapping[str, float]
    at_least: bool = False
    of_mean: bool = False

    def keeps(self, value: float) -> bool:
        """Whether a figure keeps the limit."""
        return value >= self.wanted if self.at_least else value <= self.wanted

    @property
    def mean(self) -> float:
        return geometric_mean(self.values.values())

    @property
    def worst(self) -> str:
        """The cell farthest on the wrong side."""
        return (min if self.at_least else max)(self.values, key=lambda cell: self.values[cell])

    @property
    def num_met(self) -> int:
        return sum(map(self.keeps, self.values.values()))

    @property
    def is_met(self) -> bool:
        return self.keeps(self.mean) if self.of_mean else self.num_met == len(self.values)

    def columns(self) -> tuple[str, ...]:
        """Goal, limit, geometric mean, worst cell, cells that meet it, verdict."""
        form = ".0f" if self.wanted >= 10 else ".2f"
        limit = f"{'≥' if self.at_least else '≤'} {self.wanted:{form}}"
        head = f"{self.number}. {self.what}", f"mean {limit}" if self.of_mean else limit
        if not self.values:
            return *head, "–", "–", "–", "not measured"
        return (*head, f"{self.mean:{form}}", f"{self.values[self.worst]:{form}} ({self.worst})",
                f"{self.num_met} of {len(self.values)}", "met" if self.is_met else "missed")


def _decode_goals(rows: Sequence[Row], activation: str,
                  ceilings: Mapping[str, float]) -> Iterator[Goal]:
    """Goal 1."""
    width = WIDTHS[activation]
    against = {cell_name(each.ours): each.value for each in ratios(rows)
               if each.activation == activation and each.regime == "decode"}
    mine = [row for row in our_rows(rows) if row["activation"] == activation]
    reading = {cell_name(row): row["tbs"] / ceilings["read_tbs"] for row in mine
               if row["stage"] in GEMM_STAGES and row["T"] in READ_TOKENS
               and row["hit"] >= NEARLY_ALL * row["E"] and Roof.of(row, ceilings).bound == "read"}
    single = {cell_name(row): row["us"] for row in mine
              if row["T"] == 1 and row["stage"] == "layer"
              and row["tbs"] * row["us"] <= ceilings["read_tbs"] * FIRST_TOKEN_US}
    yield Goal(1, f"{activation} decode / best {width} peer", 1.0, against)
    yield Goal(1, f"{activation} decode / best {width} peer", PEER_MEAN[width], against,
               of_mean=True)
    yield Goal(1, f"{activation} decode weight traffic / read ceiling", READ_SHARE[width], reading,
               at_least=True)
    yield Goal(1, f"{activation} layer at T = 1, µs", FIRST_TOKEN_US, single)


def _prefill_goals(rows: Sequence[Row], activation: str,
                   ceilings: Mapping[str, float]) -> Iterator[Goal]:
    """Goal 2."""
    width = WIDTHS[activation]
    rate = "bf16" if width == "a16" else "fp8"
    gemms = [row for row in our_rows(rows)
             if row["activation"] == activation and row["stage"] in GEMM_STAGES]
    shares = {cell_name(row): row["tflops"] / ceilings[f"{rate}_tflops"] for row in gemms
              if row["T"] > DECODE_TOKENS and row["T"] * row["k"] >= ROWS_PER_EXPERT * row["E"]}
    rates = {cell_name(row): row["tflops"] for row in gemms
             if row["T"] == PREFILL_TOKENS and row["model"] in PREFILL_MODELS}
    against = {cell_name(each.ours): each.value for each in ratios(rows)
               if each.activation == activation and each.regime == "prefill"}
    yield Goal(2, f"{activation} prefill / cuBLAS {rate}", CUBLAS_SHARE, shares, at_least=True)
    yield Goal(2, f"{activation} TFLOP/s at T = {PREFILL_TOKENS}", PREFILL_TFLOPS[width], rates,
               at_least=True)
    yield Goal(2, f"{activation} prefill / best {width} peer", 1.0, against)


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """Every numeric goal that a comparison can speak of, for each of our activation formats."""
    rows, ceilings = document["rows"], document["meta"]["ceilings"]
    formats = sorted({row["activation"] for row in our_rows(rows)
                      if WIDTHS[row["activation"]] in PEER_MEAN}, key=format_rank)
    found = [goal for activation in formats
             for goal in _decode_goals(rows, activation, ceilings)]
    found += [goal for activation in formats
              for goal in _prefill_goals(rows, activation, ceilings)]
    scales = {f"{model} T={tokens} {stage}" + ("" if routing == "uniform" else f" {routing}"): value
              for (model, tokens, routing, stage), value in scale_ratios(rows).items()
              if stage not in ("gate_up", "down")}
    found.append(Goal(3, "mxfp8 / fp8_token", SCALES_RATIO, scales))
    for activation in formats:
        layers = {f"{model} T={tokens}" + ("" if routing == "uniform" else f" {routing}"): value
                  for (model, routing, name, tokens), value in layer_overheads(rows).items()
                  if name == activation and tokens >= LAYER_TOKENS}
        found.append(Goal(4, f"{activation} layer / its two GEMMs, T ≥ {LAYER_TOKENS}",
                          LAYER_RATIO, layers))
    return found
