"""The kernels that pack HOPPER_FRAGMENT on a GPU, and decode it, against the code for a CPU."""

from __future__ import annotations

import pytest
import torch

from mxpert.formats.folding import fold_certificate
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8
from mxpert.moe.hopper.pack import decode_units, pack_units
from tests.moe.hopper.test_layout import folding_weights, permutation

SHAPES = [(1, 32, 32), (2, 64, 128), (3, 160, 96), (2, 192, 672)]


@pytest.mark.parametrize("permuted", [False, True], ids=["in_order", "permuted"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_the_kernel_has_the_bits_of_the_cpu(shape: tuple[int, int, int], permuted: bool) -> None:
    t = folding_weights(shape)
    rows = permutation(shape[1]) if permuted else None
    wanted = HOPPER_FRAGMENT.pack(t, fold_certificate(t), rows)
    found = wanted.clone()
    found.qdata.fill_(0xA5)
    found.scale.fill_(0xA5)
    pack_units(t, rows, found)
    assert torch.equal(found.qdata, wanted.qdata)
    assert torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_the_fp8_copy_has_the_bits_of_the_cpu(shape: tuple[int, int, int]) -> None:
    """With zeros of both signs under any shift."""
    wanted = HOPPER_FRAGMENT_FP8.pack(folding_weights(shape))
    assert wanted.fp8_codes is not None
    found = torch.full_like(wanted.fp8_codes, 0xA5)
    decode_units(wanted, found)
    assert torch.equal(found, wanted.fp8_codes)
