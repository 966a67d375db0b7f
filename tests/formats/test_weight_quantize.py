"""Dense weights to NVFP4 and INT4: error within half a step, extremes, special values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mxpert.formats import quantize_weight

INT4 = ("int4_g32", "int4_g64", "int4_g128")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", INT4)
def test_int4_is_the_nearest_step(format: str, dtype: torch.dtype) -> None:
    weight = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    t = quantize_weight(weight, format)
    assert t.scale.dtype == dtype
    steps = t.scale.double().repeat_interleave(t.format.group_size, -1)
    inside = (weight.double() / steps > -8.5) & (weight.double() / steps < 7.5)
    error = (t.dequantize(torch.float64) - weight.double()).abs() / steps
    assert error[inside].max() <= 0.5 + 2.0**-20
    largest = weight.float().unflatten(-1, (-1, t.format.group_size)).abs().amax(-1)
    assert torch.equal(t.scale, (largest / 7.5).to(dtype))
    assert inside.float().mean() > 0.97


def test_nvfp4_is_the_nearest_code_of_its_scale() -> None:
    weight = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(2))
    t = quantize_weight(weight, "nvfp4")
    assert t.row_scale is not None
    for e in range(2):
        factor = weight[e].abs().max() / (448 * 6)
        assert torch.equal(t.row_scale[e], factor.expand(4))
        for n, group in ((n, group) for n in range(4) for group in range(4)):
            values = weight[e, n, 16 * group : 16 * group + 16]
            scale = (values.abs().max() / 6 / factor).to(torch.float8_e4m3fn)
            assert t.scale[e, n, group] == scale.view(torch.uint8)
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
            grid = torch.cat((-grid, grid)) * scale.double() * factor.double()
            nearest = (values.double()[:, None] - grid).abs().amin(1)
            found = t.dequantize(torch.float64)[e, n, 16 * group : 16 * group + 16]
            assert torch.allclose((found - values.double()).abs(), nearest, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("format", [*INT4, "nvfp4"])
def test_zeros_stay_zeros(format: str) -> None:
    weight = torch.zeros(1, 2, 256)
    weight[0, 0, 0] = 1.0
    t = quantize_weight(weight, format)
    assert torch.equal(t.dequantize()[0, 1], torch.zeros(256))
    assert t.dequantize()[0, 0, 1:].eq(0).all()


@pytest.mark.parametrize("format", [*INT4, "nvfp4"])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values_become_nan(format: str, special: float) -> None:
    weight = torch.randn(2, 4, 256)
    weight[0, 1, 5] = special
    t = quantize_weight(weight, format).dequantize()
    assert t[0, 1, 5].isnan()
    assert t[1].isfinite().all()


@pytest.mark.parametrize(
    ("weight", "format", "error", "text"),
    [
        (torch.ones(2, 40), "int4_g32", ValueError, "weight.shape"),
        (torch.ones(32), "nvfp4", ValueError, "weight.shape"),
        (torch.ones(2, 32, dtype=torch.float64), "nvfp4", TypeError, "weight.dtype"),
        (torch.ones(2, 32), "mxfp4", ValueError, "format — need one of"),
        ([1.0], "nvfp4", TypeError, "weight — need a torch.Tensor"),
    ],
)
def test_errors(weight: Any, format: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"quantize_weight: {text}"):
        quantize_weight(weight, format)
