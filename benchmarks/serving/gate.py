"""The gate: prompt log-probabilities of every backend beside those of vLLM's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import stdev

from benchmarks.serving.backends import BACKENDS
from mxpert.testing.noise import sqnr_floor_db

REFERENCES = ("vllm", "marlin")
"""Backends that are in every gate: vLLM's default, and the one that it is compared with."""

IN_TREE_PAIR = 0.011
"""Mean |Δ log p| of TRITON and Marlin on 2 layers of gpt-oss-20b's shape on an H200, vLLM 0.20.2:
for runs in which one of them is missing."""


def difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Mean |Δ log p| over all tokens."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def sampling_margin(first: Sequence[float], second: Sequence[float]) -> float:
    """How far two means of |Δ log p| with the same expectation may be apart: 1 and three standard
    errors of their ratio, as the tokens themselves show.

    >>> round(sampling_margin([0.0] * 1000, [0.01, 0.0] * 500), 2)
    1.13
    """
    values = [abs(a - b) for a, b in zip(first, second, strict=True)]
    mean = sum(values) / len(values)
    if mean == 0 or len(values) < 2:
        return 1.0
    return 1 + 3 * math.sqrt(2 / len(values)) * stdev(values) / mean


def layer_noise(activation_format: str | None) -> float:
    """Relative error of a layer's output by its formats, as `mxpert.testing.noise` derives it."""
    name = {"a8w4": "mxfp8", "a4w4": "mxfp4", "fp8_token": "fp8_token"}.get(activation_format or "")
    return float(10 ** (-sqnr_floor_db(name or "bf16") / 20))


def bound(activation_format: str | None, pair: float) -> float:
    """Largest difference from vLLM's default that is allowed.

    `pair` is what two in-tree backends with bf16 activations differ by. Small errors of a layer
    reach a log-probability linearly, by values and by ties of the router. So a pair with noises
    a and b differs by ``pair · (a + b) / 2n``, where n is the noise with bf16 activations.

    >>> bound("a16w4", 0.011)
    0.011
    """
    exact = layer_noise(None)
    return pair * (layer_noise(activation_format) / exact + 1) / 2


def judge(found: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Backend → (difference from the reference, bound).

    The reference is vLLM's default, or else the first backend that answered. What leaves the
    experts out is not judged. What two in-tree backends differ by is the mean of a sample, and so
    is what a third one differs by: the bound has the `sampling_margin`.
    """
    names = [name for name in found if BACKENDS[name].computes]
    if not names:
        return {}
    reference = REFERENCES[0] if REFERENCES[0] in names else names[0]
    pair = IN_TREE_PAIR
    if set(REFERENCES) <= set(names):
        both = [found[name] for name in REFERENCES]
        pair = difference(*both) * sampling_margin(*both)
    return {
        name: (difference(found[name], found[reference]), bound(BACKENDS[name].form, pair))
        for name in names
    }
