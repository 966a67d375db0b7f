"""`tanh` of the device code in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mxpert.device.activation import tanh

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in:RuntimeWarning",
    "ignore:invalid value encountered in:RuntimeWarning",
)

RELATIVE_ERROR = 2.0**-20
"""Derived in tests/device/test_activation_one_tanh.py."""


@triton.jit
def _tanh_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tanh(tl.load(x_ptr + place)))


def apply(x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    _tanh_kernel[(len(x) // 4096,)](out, x, BLOCK=4096)
    return out


def test_every_magnitude() -> None:
    """From the smallest normal numbers to saturation, with many values around 1/4, where the
    formula changes."""
    exponents = torch.linspace(-126, 6, 1 << 14)
    x = torch.cat(
        [
            torch.exp2(exponents),
            torch.linspace(0.2, 0.3, 1 << 14),
            torch.linspace(0.25, 12, 1 << 14),
        ]
    )
    expected = torch.tanh(x.double())
    actual = apply(x)
    error = (actual.double() - expected).abs() / expected
    assert error.max() < RELATIVE_ERROR
    assert torch.equal(apply(-x), -actual), "odd"


def test_special_values() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45])
    x = torch.zeros(4096)
    x[: len(special)] = special
    actual = apply(x)[: len(special)]
    assert actual[:4].tolist() == [0.0, -0.0, 1.0, -1.0]
    assert torch.signbit(actual[:2]).tolist() == [False, True]
    assert actual[4].isnan()
    assert actual[5:7].tolist() == [1.0, -1.0]
    assert 0 <= actual[7] <= 2e-45
