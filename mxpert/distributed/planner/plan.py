"""Time of one MoE layer over several GPUs, on paper: measured local layers and a stated link.

    t = dispatch + slowest rank's local layer + combine
    dispatch, combine = α + rows · row bytes / β

A row travels once to each rank that owns one of its token's experts. Dispatch sends MXFP8 rows
(33 H / 32 bytes) or bf16 rows (2 H), combine sends bf16 partial sums. Nothing overlaps.

Local layers were measured on one NVIDIA H200 (`measured_layers.json`, written by
benchmarks/ranks/plan_layers.py). A layer's time is a fixed part and one part for each expert that
is hit: the roof of the expert (reading its weights, or multiplying its rows), times a measured
slowdown that depends on its rows.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from ...core.problem import ACTIVATION_FORMATS, ActivationFormat, parse_activation_format
from ...errors import message, require
from ...formats.token import FP8_TOKEN
from ..placement import contiguous_bounds
from .load import choice_probabilities, expected_maximum

BYTES_PER_MX_WEIGHT = 4.25 / 8
"""MXFP4 bytes per weight: four bits a code, and one scale byte for 32 codes."""
WIRE_BYTES = {"mxfp8": 33 / 32, "bf16": 2.0}
"""Bytes per value of a dispatched row."""
COMBINE_BYTES = 2.0
"""Bytes per value of a combined row: bfloat16."""


@dataclass(frozen=True)
class Link:
    """A stated link model.

    Args:
        name: as `mxpert bench --link` takes it.
        domain: ranks that NVLink joins.
        gbs: GB/s of one rank in one direction within the domain.
        latency_us: time of an exchange of one row within the domain.
        network_gbs: GB/s of one rank between domains; None if all ranks are in one domain.
        network_latency_us: time of an exchange of one row between domains.
        source: where the constants come from.

    Example:
        >>> Link("pcie5", domain=8, gbs=50.0, latency_us=10.0, source="an estimate").gbs
        50.0
    """

    name: str
    domain: int
    gbs: float
    latency_us: float
    source: str
    network_gbs: float | None = None
    network_latency_us: float = 0.0


_MEASURED = (
    "4 µs and 343 GB/s: push and flag between two H200s (18 links of 26.6 GB/s), both directions "
    "at once"
)
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 8, 343.0, 4.0, f"{_MEASURED}; domain of an HGX host"),
        Link(
            "nvlink5",
            72,
            740.0,
            4.0,
            "740 GB/s: DeepEP V2's combine on 8 SM100 GPUs (its README); latency as measured on "
            "NVLink 4; domain of a GB200 NVL72",
        ),
        Link(
            "ib400",
            8,
            343.0,
            4.0,
            f"within a host {_MEASURED}. Between hosts 47 GB/s of a 400 Gb/s NIC (50 GB/s) for "
            "each GPU: DeepEP V1's combine of 32 ranks as first published; 55 µs: pplx-kernels' "
            "combine of one token a GPU, 32 ranks, IBGDA (its README). A row travels once to a "
            "host, NVLink distributes it there",
            network_gbs=47.0,
            network_latency_us=55.0,
        ),
    )
}
"""Links by the name that `mxpert bench --link` takes; `source` says where each is from."""


@dataclass(frozen=True)
class ExpertLayer:
    """Dimensions of one model's MoE layer.

    Args:
        name: of the model.
        num_experts, top_k, hidden_size, intermediate_size: E, k, H and F.

    Example:
        >>> ExpertLayer("gpt-oss-120b", 128, 4, 2880, 2880).weights_per_expert
        24883200
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weights_per_expert(self) -> int:
        """Weights of gate, up and down projection: 3 F H."""
        return 3 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class LayerPlan:
    """Predicted time of a layer, in microseconds, and what it follows from.

    Args:
        num_ranks: N. num_tokens: T, tokens of each rank.
        dispatch_us, combine_us: the exchanges. local_us: expected time of the slowest rank's layer.
        dispatch_bytes, combine_bytes: what the busiest rank sends or receives.
        rows_per_expert: mean rows of an expert that is hit, on the busiest rank.
        hit_experts: expected number of experts that are hit, on the busiest rank.
        balance: mean over the ranks of the local layer's time, over that of the slowest rank.
        measured: models whose measured layers were used.
        is_scaled: whether their experts have other sizes than the layer's.

    Example:
        >>> layer = ExpertLayer("gpt-oss-20b", 32, 4, 2880, 2880)
        >>> plan = plan_layer(layer, num_ranks=1, num_tokens=16, link=LINKS["nvlink4"])
        >>> plan.dispatch_us, plan.measured
        (0.0, ('gpt-oss-20b', 'gpt-oss-120b'))
    """

    num_ranks: int
    num_tokens: int
    dispatch_us: float
    local_us: float
    combine_us: float
    dispatch_bytes: float
    combine_bytes: float
    rows_per_expert: float
    hit_experts: float
    balance: float
    measured: tuple[str, ...]
    is_scaled: bool

    @property
    def us(self) -> float:
        """Time of the whole layer."""
        return self.dispatch_us + self.local_us + self.combine_us


@dataclass(frozen=True)
class _Curve:
    """Slowdown over the roof of one measured model, by rows of an expert that is hit."""

    model: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    log_rows: tuple[float, ...]
    slowdown: tuple[float, ...]


class MeasuredLayers:
    """Measured layers of one device, and the times of other layers that follow from them.

    Args:
        document: the parsed `measured_layers.json`.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.device: str = document["device"]
        self.sources: list[dict[str, str]] = document["sources"]
        self.bytes_per_us: float = document["read_tbs"] * 1e6
        rates = {"bf16": document["bf16_tflops"]}
        self.flops_per_us: dict[str, float] = {
            name: rates.get(name, document["fp8_tflops"]) * 1e6 for name in ACTIVATION_FORMATS
        }
        self.sort_us: float = document["sort_ns"] * 1e-3
        self.rows = [
            dict(zip(document["columns"], values, strict=True)) for values in document["layers"]
        ]
        self.fixed_us = self._fixed()
        self.curves: dict[str, list[_Curve]] = {
            name: self._curves(name) for name in ACTIVATION_FORMATS
        }

    @staticmethod
    @functools.cache
    def shipped() -> MeasuredLayers:
        """The layers that are part of the package."""
        file = resources.files(__package__) / "measured_layers.json"
        return MeasuredLayers(json.loads(file.read_text(encoding="utf-8")))

    def _roof_us(self, weights: int, rows: float, activation_format: str) -> float:
        """Least time of one expert: reading its weights, or multiplying its rows."""
        reading = weights * BYTES_PER_MX_WEIGHT / self.bytes_per_us
        rate: float = self.flops_per_us[activation_format]
        return max(reading, 2 * rows * weights / rate)

    def _row_roof_us(self, row: dict[str, Any]) -> float:
        weights, rows = 3 * row["H"] * row["F"], row["T"] * row["k"] / row["hit"]
        return float(row["hit"] * self._roof_us(weights, rows, row["activation"]))

    def _fixed(self) -> float:
        """Launches and other fixed costs: what one token takes beyond reading its experts.

        Of FP8_TOKEN, which takes two stages for one token, too; the others take one launch there.
        """
        rest = [
            row["us"] - self._row_roof_us(row)
            for row in self.rows
            if row["T"] == 1 and row["activation"] == FP8_TOKEN
        ]
        return float(np.median(rest))

    def _curves(self, activation_format: str) -> list[_Curve]:
        found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for row in self.rows:
            if row["activation"] == activation_format:
                key = (row["model"], row["E"], row["H"], row["F"])
                rows = row["T"] * row["k"] / row["hit"]
                slowdown = (row["us"] - self.fixed_us) / self._row_roof_us(row)
                found.setdefault(key, []).append((math.log(rows), slowdown))
        return [
            _Curve(*key, *(tuple(column) for column in zip(*sorted(points), strict=True)))
            for key, points in found.items()
        ]

    def nearest(self, layer: ExpertLayer, activation_format: str) -> list[_Curve]:
        """Measured models whose experts have the nearest size, by number of experts."""

        def distance(curve: _Curve) -> float:
            return abs(math.log(curve.hidden_size / layer.hidden_size)) + abs(
                math.log(curve.intermediate_size / layer.intermediate_size)
            )

        curves = self.curves[activation_format]
        least = min(map(distance, curves))
        return sorted(
            (curve for curve in curves if distance(curve) == least),
            key=lambda curve: curve.num_experts,
        )

    def expert_us(
        self,
        layer: ExpertLayer,
        num_local_experts: int,
        rows: Sequence[float],
        activation_format: str,
    ) -> list[float]:
        """Time that each expert adds to a layer, by its number of rows (at least 1).

        The slowdown is linear in log rows between measured counts, and in the log of the number of
        local experts between measured models; outside it keeps the nearest value.
        """
        curves = self.nearest(layer, activation_format)
        logs = np.log(np.asarray(rows, dtype=float))
        slowdowns = [np.interp(logs, curve.log_rows, curve.slowdown) for curve in curves]
        sizes = [math.log(curve.num_experts) for curve in curves]
        size = math.log(num_local_experts)
        return [
            float(np.interp(size, sizes, [each[index] for each in slowdowns]))
            * self._roof_us(layer.weights_per_expert, count, activation_format)
            for index, count in enumerate(rows)
        ]


def plan_layer(
    layer: ExpertLayer,
    *,
    num_ranks: int,
    num_tokens: int,
    link: Link,
    activation_format: ActivationFormat = "mxfp8",
    wire_format: str = "mxfp8",
    routing: str = "uniform",
    layers: MeasuredLayers | None = None,
) -> LayerPlan:
    """Predict the time of one MoE layer with its experts on `num_ranks` GPUs, in rank order.

    Args:
        layer: the layer's dimensions. num_ranks: N, at most the number of experts.
        num_tokens: T, tokens of each rank. link: how the ranks are joined.
        activation_format: of the local layers. wire_format: of dispatched rows.
        routing: "uniform" or "zipf" (expert e has the weight 1 / (e + 1)).
        layers: measured layers; those of the package by default.

    Raises:
        ValueError: a count or a name is out of range.

    Example:
        >>> layer = ExpertLayer("gpt-oss-120b", 128, 4, 2880, 2880)
        >>> plan = plan_layer(layer, num_ranks=2, num_tokens=128, link=LINKS["nvlink4"])
        >>> plan.us == plan.dispatch_us + plan.local_us + plan.combine_us
        True
    """
    op, layers = "plan_layer", layers or MeasuredLayers.shipped()
    activation_format = parse_activation_format(activation_format, op)
    if wire_format not in WIRE_BYTES:
        need = f"one of {', '.join(WIRE_BYTES)}"
        raise ValueError(message(op, "wire_format", need, repr(wire_format)))
    most = layer.num_experts
    require(1 <= num_ranks <= most, op, "num_ranks", need=f"1 to {most}", got=num_ranks)
    require(num_tokens >= 1, op, "num_tokens", need="at least 1", got=num_tokens)
    bounds = contiguous_bounds(layer.num_experts, num_ranks)
    local = _local_layers(layer, bounds, num_ranks * num_tokens, activation_format, routing, layers)
    # The extra slots of other ranks' tokens are sorted, too; those of a rank's own share are part
    # of the measured layer.
    extra_ids = (num_ranks - 1) * num_tokens * layer.top_k
    slowest = local.slowest_us + extra_ids * layers.sort_us
    sizes = [layer.hidden_size * WIRE_BYTES[wire_format], layer.hidden_size * COMBINE_BYTES]
    exchanges = [_exchange(layer, num_ranks, num_tokens, size, link, routing) for size in sizes]
    curves = layers.nearest(layer, activation_format)
    return LayerPlan(
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        dispatch_us=exchanges[0].us,
        local_us=slowest,
        combine_us=exchanges[1].us,
        dispatch_bytes=exchanges[0].bytes,
        combine_bytes=exchanges[1].bytes,
        rows_per_expert=local.rows / local.hit,
        hit_experts=local.hit,
        balance=local.mean_us / local.slowest_us,
        measured=tuple(curve.model for curve in curves),
        is_scaled=(curves[0].hidden_size, curves[0].intermediate_size)
        != (layer.hidden_size, layer.intermediate_size),
    )


@dataclass(frozen=True)
class _Local:
    """Local layers of all ranks. rows, hit: of the rank with the largest expected time."""

    slowest_us: float
    mean_us: float
    rows: float
    hit: float


def _local_layers(
    layer: ExpertLayer,
    bounds: tuple[int, ...],
    num_tokens: int,
    activation_format: str,
    routing: str,
    layers: MeasuredLayers,
) -> _Local:
    """Expected time of the slowest rank for `num_tokens` tokens of all ranks together.

    The times of ranks are taken as independent and normal, with the variance of independent
    experts. That the ranks share a fixed number of rows lowers each variance by the factor 1 - 1/N
    and makes the ranks differ more by the inverse of it, so both effects cancel.
    """
    every = tuple(range(layer.num_experts + 1))
    chosen = choice_probabilities(layer.num_experts, layer.top_k, every, routing)
    hit = -torch.expm1(num_tokens * torch.log1p(-chosen.clamp(max=1 - 1e-15)))
    rows = num_tokens * chosen
    counts, steps = (rows / hit).clamp(min=1.0), 1.01
    times, more = torch.empty_like(rows), torch.empty_like(rows)
    for a, b in itertools.pairwise(bounds):
        for into, factor in ((times, 1.0), (more, steps)):
            into[a:b] = torch.tensor(
                layers.expert_us(layer, b - a, (factor * counts[a:b]).tolist(), activation_format)
            )
    slope = (more - times) / ((steps - 1) * counts)
    varied_rows = (rows * (1 - chosen) + rows**2) / hit - (rows / hit) ** 2  # of experts with rows
    variance = times**2 * hit * (1 - hit) + hit * slope**2 * varied_rows
    fixed = layers.fixed_us
    ranks = list(itertools.pairwise(bounds))
    means = torch.stack([(times * hit)[a:b].sum() for a, b in ranks]) + fixed
    deviations = torch.stack([variance[a:b].sum().sqrt() for a, b in ranks])
    first, last = ranks[int(means.argmax())]
    return _Local(
        slowest_us=expected_maximum(means, deviations),
        mean_us=float(means.mean()),
        rows=float(rows[first:last].sum()),
        hit=float(hit[first:last].sum()),
    )


@dataclass(frozen=True)
class _Exchange:
    us: float
    bytes: float


def _exchange(
    layer: ExpertLayer, num_ranks: int, num_tokens: int, row_bytes: float, link: Link, routing: str
) -> _Exchange:
    """Dispatch or combine: time, and bytes of the busiest rank on the slower link."""
    if num_ranks == 1:
        return _Exchange(0.0, 0.0)
    bounds = contiguous_bounds(layer.num_experts, num_ranks)
    needs = choice_probabilities(layer.num_experts, layer.top_k, bounds, routing)
    sent = num_tokens * row_bytes
    if link.network_gbs is None or num_ranks <= link.domain:
        size = sent * _busiest(needs)
        return _Exchange(link.latency_us + size / link.gbs * 1e-3, size)
    hosts = (*range(0, num_ranks, link.domain), num_ranks)
    host_bounds = tuple(bounds[rank] for rank in hosts)
    host_needs = choice_probabilities(layer.num_experts, layer.top_k, host_bounds, routing)
    size = sent * _busiest(host_needs)
    # Every host distributes the rows of all hosts among its own ranks.
    inner = [needs[a:b] for a, b in itertools.pairwise(hosts)]
    within = sent * (len(hosts) - 1) * max(float(part.sum() - part.min()) for part in inner)
    seconds = max(size / link.network_gbs, within / link.gbs) * 1e-9
    return _Exchange(link.network_latency_us + 1e6 * seconds, size)


def _busiest(needs: torch.Tensor) -> float:
    """Rows that the busiest party sends or receives for one token of each, all others' taken.

    Args:
        needs: probability that a token needs each party, float64 [parties].
    """
    received = (len(needs) - 1) * needs.max()
    sent = needs.sum() - needs.min()
    return float(torch.maximum(received, sent))
