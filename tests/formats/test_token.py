"""e4m3 rows with one float32 scale: torch's own conversion, and the ends of the range."""

from __future__ import annotations

import math

import pytest
import torch

from mxpert.formats import quantize_token_rows
from mxpert.formats.token import SMALLEST_SCALE
from mxpert.testing.noise import gaussian_magnitudes, token_noise
from mxpert.testing.numerics import assert_exact, relative_l2


def rows(count: int, width: int, spread: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(count, width, generator=generator)
    return (x * torch.exp(spread * torch.randn(x.shape, generator=generator))).bfloat16()


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("width", [1, 33, 2880])
def test_codes_are_torchs(width: int, spread: float) -> None:
    """float32 division and product, then torch's conversion to float8_e4m3fn."""
    x = rows(64, width, spread)
    found = quantize_token_rows(x)
    assert found.qdata.dtype == torch.uint8
    assert found.scale.dtype == torch.float32
    amax = x.float().abs().amax(1)
    assert_exact(found.scale, amax / torch.full_like(amax, 448.0), "scale")
    scaled = x.float() * (torch.full_like(amax, 448.0) / amax)[:, None]
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert_exact(found.qdata, codes, "codes")
    assert int(codes.amax(1).max()) >= 0x7E  # 448 is reached
    # Half a step of 3 mantissa bits, and half a subnormal unit of the scale.
    error = (found.dequantize(torch.float64) - x.double()).abs()
    limit = torch.maximum(x.double().abs() / 16, found.scale.double()[:, None] * 2.0**-10)
    assert (error <= limit * (1 + 2.0**-20)).all()


def test_noise_is_the_derived_one() -> None:
    x = rows(512, 2880)
    found = relative_l2(quantize_token_rows(x).dequantize(), x) ** 2
    assert 0.8 * token_noise(gaussian_magnitudes()) < found <= token_noise(gaussian_magnitudes())


def test_zero_and_tiny_rows() -> None:
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[1, 3], x[2, 3], x[3, 3] = 2.0**-133, -(2.0**-120), 2.0**-117
    found = quantize_token_rows(x)
    assert found.scale.tolist()[:3] == [1.0, SMALLEST_SCALE, SMALLEST_SCALE]
    assert found.qdata[0].eq(0).all()
    values = found.dequantize(torch.float64)[:, 3].tolist()
    assert values[:3] == [0.0, 2.0**-133, -(2.0**-120)]
    assert math.isclose(values[3], 2.0**-117, rel_tol=1e-6)


def test_the_largest_bfloat16_stays_finite() -> None:
    x = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    found = quantize_token_rows(x)
    assert found.qdata.eq(0x7E).all()
    assert torch.allclose(found.dequantize(torch.float64), x.double(), rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_bad_value_spoils_its_row_alone(bad: float) -> None:
    x = rows(3, 64)
    good = quantize_token_rows(x).dequantize()
    x[1, 5] = bad
    found = quantize_token_rows(x).dequantize()
    assert found[1].isnan().all()
    assert_exact(found[::2], good[::2], "other rows")


def test_no_rows() -> None:
    assert quantize_token_rows(torch.empty(0, 32)).qdata.shape == (0, 32)


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"quantize_token_rows: x"):
        quantize_token_rows(torch.zeros(2, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"quantize_token_rows: x"):
        quantize_token_rows(torch.zeros(32))
