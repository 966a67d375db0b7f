"""NVFP4 rounded to one e4m3 a weight: the nearest number, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch

from mxpert.formats import MXTensor, WeightTensor, quantize_weight, round_to_e4m3
from mxpert.formats.weight_rounding import RoundingCertificate

EVERY_SCALE = torch.arange(1, 0x7F, dtype=torch.uint8)
"""Each positive e4m3 number."""


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 50


def snr(values: torch.Tensor, rounded: torch.Tensor) -> float:
    noise = (values - rounded).square().sum()
    return 10 * math.log10(float(values.square().sum() / noise))


def nearest(values: torch.Tensor, rounded: MXTensor) -> torch.Tensor:
    """The e4m3 number times the block's scale that is nearest to each value, in float64."""
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    scale = torch.exp2(rounded.scale.double() - 127).repeat_interleave(32, dim=-1)
    place = (values.abs() / scale).unsqueeze(-1)
    return every[(place - every).abs().argmin(-1)] * scale * values.sign()


@pytest.mark.parametrize("factor", [1.0, 0.37, 2.0**-20, 1.9])
def test_every_code_and_scale_becomes_the_nearest_number(factor: float) -> None:
    """16 codes beside each of 126 scales; a block of 32 has two of them."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).repeat(126)[None]
    matrix = WeightTensor(packed, EVERY_SCALE[None], "nvfp4", row_scale=torch.tensor([factor]))
    rounded, cost = round_to_e4m3(matrix)
    values = matrix.dequantize(torch.float64)
    found = rounded.dequantize(torch.float64)
    assert not bool((rounded.qdata & 0x7F == 0x7F).any())
    error, least = (found - values).abs(), (nearest(values, rounded) - values).abs()
    assert torch.equal(error, least)
    assert cost.changed == int((found != values).sum())
    assert cost.numel == values.numel()
    assert cost.signal == pytest.approx(float(values.square().sum()), rel=2.0**-40)
    assert cost.noise == pytest.approx(float(error.square().sum()), rel=2.0**-40)


def test_what_it_costs_normally_distributed_weights() -> None:
    """31 dB; 33 dB with a factor that is a power of two, where 77 % of the weights stay."""
    matrix = quantize_weight(normal(256, 1024), "nvfp4")
    rounded, cost = round_to_e4m3(matrix)
    values = matrix.dequantize(torch.float64)
    assert cost.snr_db == pytest.approx(snr(values, rounded.dequantize(torch.float64)), abs=1e-6)
    assert 30.5 < cost.snr_db < 31.5
    plain = WeightTensor(matrix.qdata, matrix.scale, "nvfp4")
    rounded, cost = round_to_e4m3(plain)
    assert 33 < cost.snr_db < 34
    assert 0.74 < 1 - cost.changed / cost.numel < 0.8
    assert str(cost) == f"nvfp4 rounded to e4m3, SNR {cost.snr_db:.1f} dB, 23 % changed"


def test_against_the_dense_weights_it_costs_half_a_decibel() -> None:
    """Noise of 31 dB beside noise of 20.4 dB: 10 log10(1 + 10^-1.06) = 0.36 dB."""
    dense = normal(256, 1024)
    matrix = quantize_weight(dense, "nvfp4")
    rounded, _ = round_to_e4m3(matrix)
    before = snr(dense.double(), matrix.dequantize(torch.float64))
    after = snr(dense.double(), rounded.dequantize(torch.float64))
    assert 0.3 < before - after < 0.5


def test_experts_are_rounded_one_by_one() -> None:
    stacked = quantize_weight(normal(96, 64).view(3, 32, 64), "nvfp4")
    whole, cost = round_to_e4m3(stacked)
    parts = [round_to_e4m3(stacked[each]) for each in range(3)]
    assert torch.equal(whole.qdata, torch.stack([each.qdata for each, _ in parts]))
    assert torch.equal(whole.scale, torch.stack([each.scale for each, _ in parts]))
    total = parts[0][1] + parts[1][1] + parts[2][1]
    assert (cost.numel, cost.changed) == (total.numel, total.changed)
    assert cost.snr_db == pytest.approx(total.snr_db, abs=1e-6)


def test_weights_that_need_no_rounding_stay() -> None:
    matrix = WeightTensor(
        torch.full((2, 32), 0x21, dtype=torch.uint8),
        torch.full((2, 4), 0x38, dtype=torch.uint8),  # 1
        "nvfp4",
        row_scale=torch.tensor([0.25, 8.0]),
    )
    rounded, cost = round_to_e4m3(matrix)
    assert torch.equal(rounded.dequantize(), matrix.dequantize())
    assert (cost.changed, cost.snr_db) == (0, math.inf)
    assert math.isnan(RoundingCertificate("nvfp4", 1, 1, 0.0, 1.0).snr_db)


def test_other_formats_and_nan_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^round_to_e4m3: t\.format — need nvfp4, got int4_g32"):
        round_to_e4m3(quantize_weight(normal(32, 32), "int4_g32"))
    with pytest.raises(ValueError, match=r"t\.shape\[-1\] — need a multiple of 32, got 48"):
        round_to_e4m3(quantize_weight(normal(2, 48), "nvfp4"))
    with pytest.raises(TypeError, match=r"^round_to_e4m3: t — need a WeightTensor, got Tensor"):
        round_to_e4m3(normal(2, 32))  # type: ignore[arg-type]
    broken = quantize_weight(normal(32, 32), "nvfp4")
    broken.scale[3, 1] = 0x7F
    with pytest.raises(ValueError, match=r"t\[0\] — need finite weights, got NaN or infinity"):
        round_to_e4m3(broken)
