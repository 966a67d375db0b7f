"""Expected quantisation noise of Gaussian data, and the SQNR floor of a layer derived from it."""

from __future__ import annotations

import functools
import math

import torch

from ..formats.codec import block_scale, decode, decode_scale, encode
from ..formats.spec import E4M3, MXFormat, ScaleRule, get_format
from ..formats.token import FP8_TOKEN
from .numerics import mx_format, rounding_rms


def gaussian_magnitudes(count: int = 2048) -> torch.Tensor:
    """|x| of a standard normal at `count` equally spaced quantiles, ascending, float64."""
    level = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    result: torch.Tensor = torch.special.ndtri(0.5 + level / 2)
    return result


def gated_magnitudes(count: int = 64) -> torch.Tensor:
    """|silu(g) u| for standard normal g and u on a `count`² grid of quantiles, ascending."""
    half = gaussian_magnitudes(count // 2)
    normal = torch.cat((-half.flip(0), half))
    gated = torch.nn.functional.silu(normal)[:, None] * half[None, :]
    return gated.abs().flatten().sort().values


def quantisation_noise(fmt: MXFormat | str, rule: ScaleRule, magnitudes: torch.Tensor) -> float:
    """Expected noise over signal when independent values are quantised in blocks of 32.

    If the magnitudes ``a_1 ≤ … ≤ a_N`` are equally likely, the block's maximum is a_i with
    probability ``(i^32 − (i−1)^32) / N^32``. It determines the scale, its own error, and the mean
    squared error of the other 31 values, which are uniform over ``a_1 … a_i``. The result depends
    on the position of the values within a binade: the worst of eight positions is returned.

    Args:
        fmt: MX format. rule: scale rule. magnitudes: ascending, float64 [N].

    Returns:
        ``E[(q(v) − v)²] / E[v²]``.
    """
    fmt = get_format(fmt)
    return max(_block_noise(fmt, rule, magnitudes * 2 ** (step / 8)) for step in range(8))


def token_noise(magnitudes: torch.Tensor) -> float:
    """`quantisation_noise` of "fp8_token".

    The largest magnitude of a row is placed at eight positions in e4m3's last binade; the worst
    result is returned.
    """
    noise = 0.0
    for step in range(8):
        values = magnitudes * (E4M3.max_value * 2 ** (-step / 8) / magnitudes.max())
        rounded = decode(encode(values, E4M3), E4M3, torch.float64)
        noise = max(noise, ((rounded - values).square().mean() / values.square().mean()).item())
    return noise


def _block_noise(fmt: MXFormat, rule: ScaleRule, values: torch.Tensor) -> float:
    scales = decode_scale(block_scale(values, fmt, rule), torch.float64)
    rank = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    is_maximum = (rank**fmt.block_size).diff()
    noise = 0.0
    for scale in scales.unique().tolist():
        rounded = decode(encode(values / scale, fmt.element), fmt.element, torch.float64) * scale
        squared = (rounded - values) ** 2
        below = squared.cumsum(0) / torch.arange(1, len(values) + 1)
        block = (squared + (fmt.block_size - 1) * below) / fmt.block_size
        noise += (block * is_maximum)[scales == scale].sum().item()
    return noise / (values**2).mean().item()


@functools.cache
def sqnr_floor_db(
    a_format: str, *, rule: ScaleRule = ScaleRule.RCEIL, quantised_weights: bool = False
) -> float:
    """Least SQNR of a layer's output against the same layer without the given quantisation.

    x and weights are Gaussian. n_x is the noise over signal of x, n_h that of the gated
    intermediate, n_w that of MXFP4 weights (0 if both layers use the same weights):

        ``floor = −10 log10( G (n_x + n_w) + (n_h + n_w) + 2 r² )``

    A linear map keeps noise over signal, since noise and signal are independent of its weights.
    The activation multiplies two noisy values, gate and up: G = 2, plus 10 % because f'(g)² can
    exceed (f(g)/g)² in the mean. r = `rounding_rms(8)` is the bfloat16 rounding of the rows and of
    the output. n_h has another r², since the intermediate is rounded to bfloat16 before it is
    quantised. For bf16 n_x is 0 (x is bfloat16 in both layers).

    Args:
        a_format: "bf16", "mxfp8", "mxfp4" or "fp8_token". rule: scale rule of MX activations.
        quantised_weights: the other layer has unquantised weights (MXFP4 uses RCEIL).

    Returns:
        The floor in dB.
    """
    rounding = rounding_rms(8) ** 2
    noise_x, noise_h = 0.0, rounding
    if a_format == FP8_TOKEN:
        noise_x = token_noise(gaussian_magnitudes())
        noise_h += token_noise(gated_magnitudes())
    elif a_format != "bf16":
        fmt = mx_format(a_format)
        noise_x = quantisation_noise(fmt, rule, gaussian_magnitudes())
        noise_h += quantisation_noise(fmt, rule, gated_magnitudes())
    noise_w = 0.0
    if quantised_weights:
        noise_w = quantisation_noise("mxfp4", ScaleRule.RCEIL, gaussian_magnitudes())
    return -10 * math.log10(2.2 * (noise_x + noise_w) + noise_h + noise_w + 2 * rounding)
