"""e4m3 rows with one float32 scale each ("per token"), the activation format ``"fp8_token"``.

No MX format: the scale is any float32, not a power of two, and spans a whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import Checks
from .codec import decode, encode
from .spec import E4M3

FP8_TOKEN = "fp8_token"
"""Name of the format, as ``activation_format=`` takes it."""

SMALLEST_SCALE = 2.0**-126
"""Smallest scale of a row, the smallest normal float32: its inverse is finite."""


@dataclass(frozen=True)
class TokenRows:
    """Codes and scales of quantised rows.

    Args:
        qdata: uint8 [M, K], e4m3 codes.
        scale: float32 [M].

    Example:
        >>> rows = quantize_token_rows(torch.tensor([[448.0, 1.0]]))
        >>> rows.scale.tolist()
        [1.0]
    """

    qdata: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``value = decode(code) * scale``, computed in `dtype` (float32 or float64)."""
        return decode(self.qdata, E4M3, dtype) * self.scale.to(dtype).unsqueeze(-1)


def quantize_token_rows(x: torch.Tensor) -> TokenRows:
    """Quantise each row to e4m3 with the float32 scale that maps its largest magnitude to 448.

    ``scale = max(amax / 448, 2^-126)``, ``code = encode(x * (1 / scale))`` with ``1 / scale``
    computed as ``448 / amax`` and every operation rounded to float32; codes saturate and round to
    nearest, ties to even. A row of zeros has scale 1. A row that holds NaN or infinity has scale
    NaN: all of it is NaN.

    Args:
        x: bfloat16, float16 or float32 [M, K], K at least 1.

    Returns:
        TokenRows.

    Raises:
        TypeError: `x` is no tensor of these dtypes.
        ValueError: `x` has no columns, or not two dimensions.

    Source:
        The per-token FP8 quantisation of vLLM (``scaled_fp8_quant`` with per-token scales).

    Example:
        >>> rows = quantize_token_rows(torch.tensor([[-2.0, 0.5], [0.0, 0.0]]))
        >>> rows.dequantize().tolist()
        [[-2.0, 0.5], [0.0, 0.0]]
    """
    need = Checks("quantize_token_rows")
    need.tensor(x, "x", shape=(None, None), dtype=(torch.bfloat16, torch.float16, torch.float32))
    need(x.shape[1] > 0, "x.shape[1]", "at least 1", 0)
    values = x.detach().float()
    amax = values.abs().amax(-1)  # NaN wins
    bounded = amax.clamp(min=E4M3.max_value * SMALLEST_SCALE)
    # A tensor, not a number: torch multiplies by a number's rounded inverse on CUDA.
    largest = torch.full_like(bounded, E4M3.max_value)
    codes = encode(values * torch.div(largest, bounded).unsqueeze(-1), E4M3)
    scale = torch.div(bounded, largest).masked_fill(amax == 0, 1.0)
    return TokenRows(codes, scale.masked_fill(~amax.isfinite(), float("nan")))
