"""Poison of a refused reload reaches every value of a layer, in every format and layout."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert.integrations.serving.layer_weights import poison
from support.weight_formats import WITH_GROUPS, in_format


@pytest.mark.parametrize("layout", ["row_major", "hopper_groups"])
@pytest.mark.parametrize("name", WITH_GROUPS)
def test_poisoned_weights_are_nan(name: str, layout: str) -> None:
    torch.manual_seed(0)
    dense = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
    plain = mxpert.quantize_weights(*dense, gate_up_order="concatenated")
    format, _, zeros = name.partition("-")
    weights = in_format(plain, format, exact=False, zero_points=bool(zeros))
    prepared = weights.prepare(device="cpu", layout=layout)
    assert not any(each.isnan().any() for each in prepared.dequantize())
    poison(prepared)
    assert all(each.isnan().all() for each in prepared.dequantize())
