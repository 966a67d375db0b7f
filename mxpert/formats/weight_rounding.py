"""NVFP4 weights rounded to one e4m3 number each, on request: what 8-bit matrix units multiply."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import Checks
from .codec import dequantize_blocks, quantize_blocks
from .spec import MXFP8_E4M3, ScaleRule
from .tensor import MXTensor
from .weight_tensor import NVFP4, WeightTensor

WeightRounding = Literal["e4m3"]
"""How weights may be rounded once more: to one e4m3 number each."""


@dataclass(frozen=True)
class RoundingCertificate:
    """What rounding weights once more has cost.

    Args:
        source: name of the format that they had. numel: number of weights. changed: those that
            have another value now.
        signal, noise: ``sum w^2`` and ``sum (w - rounded)^2`` over the source's weights w.

    Example:
        >>> RoundingCertificate("nvfp4", 4, 1, 1000.0, 1.0).snr_db
        30.0
    """

    source: str
    numel: int
    changed: int
    signal: float
    noise: float

    @property
    def snr_db(self) -> float:
        """``10 log10(signal / noise)`` in dB, infinite where no weight has changed."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else math.nan

    def __add__(self, other: RoundingCertificate) -> RoundingCertificate:
        return RoundingCertificate(
            self.source,
            self.numel + other.numel,
            self.changed + other.changed,
            self.signal + other.signal,
            self.noise + other.noise,
        )

    def __str__(self) -> str:
        share = 100 * self.changed / self.numel
        return f"{self.source} rounded to e4m3, SNR {self.snr_db:.1f} dB, {share:.0f} % changed"


def round_to_e4m3(t: WeightTensor) -> tuple[MXTensor, RoundingCertificate]:
    """Round NVFP4 weights [..., N, K] to MXFP8: one e4m3 number each, a power of two for each 32.

    Each weight ``code · scale · factor`` is formed exactly and rounded once; the scale of a block
    follows RCEIL, so that none saturates. The factor is folded into the codes: MXFP8 has none. Of
    normally distributed weights the result has 31 dB to NVFP4's values, and 33 dB where the factor
    is a power of two, for which 3 of 4 weights stay as they are.

    Args:
        t: NVFP4, ROW_MAJOR, K a multiple of 32.

    Returns:
        The MXFP8 tensor on the device of `t`, and what it cost.

    Raises:
        TypeError: no WeightTensor.
        ValueError: another format or layout, another K, or weights that are not finite.

    Example:
        >>> from mxpert.formats import quantize_weight
        >>> weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        >>> rounded, cost = round_to_e4m3(quantize_weight(weights, "nvfp4"))
        >>> rounded.format, 29 < cost.snr_db < 35
        (MXFormat('mxfp8_e4m3'), True)
    """
    need = Checks("round_to_e4m3")
    if not isinstance(t, WeightTensor):
        raise need.type_error("t", "a WeightTensor", type(t).__name__)
    need(t.format == NVFP4, "t.format", NVFP4.name, t.format.name, "other formats need no rounding")
    rows, width, block = t.shape[:-1].numel(), t.shape[-1], MXFP8_E4M3.block_size
    need(width % block == 0, "t.shape[-1]", f"a multiple of {block}", width)
    codes = torch.empty(t.shape, dtype=torch.uint8, device=t.device)
    scale = codes.new_empty((*t.shape[:-1], width // block))
    changed, signal, noise = 0, 0.0, 0.0
    step = 1 if t.ndim > 2 else max(t.shape[0], 1)
    for start in range(0, t.shape[0], step):  # an expert, so that its float64 values stay few
        part = slice(start, start + step)
        exact = t[part].dequantize(torch.float64)
        got, remedy = "NaN or infinity", "the checkpoint is damaged: download it again"
        need(bool(exact.isfinite().all()), f"t[{start}]", "finite weights", got, remedy)
        rounded = quantize_blocks(exact, MXFP8_E4M3, rule=ScaleRule.RCEIL)
        codes[part], scale[part] = rounded.qdata, rounded.scale
        error = dequantize_blocks(rounded, torch.float64) - exact
        changed += int((error != 0).sum())
        signal += float(exact.square().sum())
        noise += float(error.square().sum())
    found = MXTensor(codes, scale, MXFP8_E4M3)
    return found, RoundingCertificate(NVFP4.name, rows * width, changed, signal, noise)
