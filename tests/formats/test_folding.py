"""The exact fold of MXFP4 weights into e4m3: range by enumeration, certificate by search."""

from __future__ import annotations

import math
import re

import pytest
import torch

from mxpert.formats import (
    FORMATS,
    MXTensor,
    dequantize_blocks,
    fold,
    fold_certificate,
    pack_codes,
    quantize_blocks,
    unfold,
)
from mxpert.formats import folding as folding_module
from mxpert.formats.folding import FOLD_SPAN, FOLD_TOP
from tests.formats import ocp
from tests.formats.ocp import assert_same_bits, assert_same_values

MXFP4 = FORMATS["mxfp4"]


def weights(scale: torch.Tensor, seed: int = 0) -> MXTensor:
    """Random codes, no block of them all zero, under the scale bytes [..., N, K/32]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*scale.shape, 32), generator=generator)
    codes[..., 0] = 7
    return MXTensor(pack_codes(codes.flatten(-2).to(torch.uint8)), scale.to(torch.uint8), MXFP4)


def zero_block(t: MXTensor, *index: int) -> MXTensor:
    """The same weights with block `index` set to zeros, every other one negative."""
    qdata = t.qdata.clone()
    qdata[*index[:-1], index[-1] * 16 : index[-1] * 16 + 16] = 0x80
    return MXTensor(qdata, t.scale, t.format)


def fewest_outside(scale: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Minimum over all 256 references of the counted blocks outside, per row."""
    reference = torch.arange(256).reshape(-1, *[1] * scale.dim())
    shift = reference - scale.int()
    return (((shift < 0) | (shift > 14)) & counted).sum(-1).amin(0)


# --- the range ----------------------------------------------------------------------------------


def test_every_code_times_every_shift_is_an_e4m3_number() -> None:
    numbers = {v for v in ocp.code_values("mxfp8_e4m3") if not math.isnan(v)}
    for s in range(FOLD_TOP - FOLD_SPAN + 1, FOLD_TOP + 1):
        assert {math.ldexp(v, s) for v in ocp.code_values("mxfp4")} <= numbers, s
    assert FOLD_SPAN == 15


@pytest.mark.parametrize("s", [FOLD_TOP + 1, FOLD_TOP - FOLD_SPAN], ids=["above", "below"])
def test_the_sixteenth_shift_is_not(s: int) -> None:
    numbers = set(ocp.code_values("mxfp8_e4m3"))
    assert not {math.ldexp(v, s) for v in ocp.code_values("mxfp4")} <= numbers


@pytest.mark.parametrize("shift", range(FOLD_SPAN))
def test_fold_of_every_code_under_every_shift(shift: int) -> None:
    codes = torch.arange(16, dtype=torch.int32).repeat(4).to(torch.uint8)[None]
    t = MXTensor(pack_codes(codes), torch.tensor([[140, 140 - shift]], dtype=torch.uint8), MXFP4)
    folded, reference = fold(t)
    assert reference.tolist() == [140]
    values = torch.tensor(ocp.code_values("mxfp8_e4m3"), dtype=torch.float64)[folded.int()]
    expected = torch.tensor(ocp.code_values("mxfp4") * 2, dtype=torch.float64)
    assert_same_values(values[0, :32], expected * 2.0**FOLD_TOP)
    assert_same_values(values[0, 32:], expected * 2.0 ** (FOLD_TOP - shift))


# --- fold and unfold ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("top", [0, 5, 127, 253, 254])
def test_unfold_returns_the_dequantised_weights(top: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(top)
    scale = (top - torch.randint(0, FOLD_SPAN, (3, 5, 9), generator=generator)).clamp(min=0)
    t = weights(scale)
    codes, reference = fold(t)
    assert_same_values(unfold(codes, reference, dtype), dequantize_blocks(t, dtype))
    assert (codes.shape, reference.shape) == (t.shape, t.shape[:-1])


def test_fold_of_quantised_random_weights_is_exact() -> None:
    x = torch.randn(2, 64, 2880, generator=torch.Generator().manual_seed(1)) * 0.02
    t = quantize_blocks(x, "mxfp4")
    certificate = fold_certificate(t)
    assert certificate.exact
    assert certificate.num_blocks == 2 * 64 * 90
    assert_same_bits(certificate.reference, t.scale.amax(-1), "reference is the largest scale")
    assert_same_values(unfold(*fold(t, certificate)), dequantize_blocks(t))


def test_a_wrong_reference_is_caught() -> None:
    t = weights(torch.full((2, 3), 120))
    codes, reference = fold(t)
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_values(unfold(codes, reference + 1), dequantize_blocks(t))
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_values(unfold(codes.roll(32, -1), reference), dequantize_blocks(t))


# --- the certificate ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 1 << 14])
@pytest.mark.parametrize("spread", [1, 15, 16, 17, 30, 60, 255])
def test_reference_leaves_the_fewest_blocks_outside(
    spread: int, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(folding_module._ROWS_PER_CHUNK, "cpu", rows_per_chunk)
    generator = torch.Generator().manual_seed(spread)
    base = torch.randint(0, 256 - spread, (4, 25, 1), generator=generator)
    scale = base + torch.randint(0, spread, (4, 25, 12), generator=generator)
    t = weights(scale)
    for e in range(4):
        t = zero_block(t, e, e, e)
    counted = torch.ones_like(scale, dtype=torch.bool)
    counted[range(4), range(4), range(4)] = False
    certificate = fold_certificate(t)
    fewest = fewest_outside(scale, counted)
    shift = certificate.reference.int().unsqueeze(-1) - scale
    reached = (((shift < 0) | (shift > 14)) & counted).sum(-1)
    assert torch.equal(reached, fewest)
    assert torch.equal(certificate.blocks_outside, fewest.sum(-1))
    assert torch.equal(certificate.rows_outside, fewest > 0)
    assert certificate.total_outside == int(fewest.sum())
    assert certificate.exact == (fewest.sum() == 0)
    assert certificate.num_blocks == scale.numel()
    span = scale.masked_fill(~counted, -1).amax(-1) - scale.masked_fill(~counted, 999).amin(-1)
    assert certificate.widest_span == int(span.max())
    assert spread > 15 or certificate.exact


def test_of_equal_references_the_largest_scale_wins() -> None:
    certificate = fold_certificate(weights(torch.tensor([[100, 101, 150, 151]])))
    assert certificate.reference.tolist() == [151]
    assert certificate.blocks_outside.tolist() == 2


def test_zero_blocks_never_fall_outside() -> None:
    t = zero_block(weights(torch.tensor([[[120, 3, 118]], [[120, 254, 118]]])), 0, 0, 1)
    t = zero_block(t, 1, 0, 1)
    certificate = fold_certificate(t)
    assert certificate.exact
    assert certificate.widest_span == 2
    assert certificate.reference.tolist() == [[120], [120]]
    assert_same_values(unfold(*fold(t)), dequantize_blocks(t))


def test_a_row_of_zero_blocks_folds_at_127() -> None:
    t = zero_block(zero_block(weights(torch.tensor([[3, 200]])), 0, 0), 0, 1)
    certificate = fold_certificate(t)
    assert (certificate.exact, certificate.reference.tolist()) == (True, [127])
    assert_same_values(unfold(*fold(t)), dequantize_blocks(t))


@pytest.mark.parametrize("zeros", [False, True], ids=["codes", "zero_codes"])
def test_nan_scales_never_fold(zeros: bool) -> None:
    t = weights(torch.tensor([[120, 255, 119], [120, 121, 119]]))
    certificate = fold_certificate(zero_block(t, 0, 1) if zeros else t)
    assert certificate.rows_outside.tolist() == [True, False]
    assert certificate.reference.tolist() == [120, 121]
    assert (certificate.total_outside, certificate.widest_span) == (1, 2)


def test_blocks_outside_are_counted_per_expert() -> None:
    scale = torch.full((2, 3, 4, 6), 120)
    scale[0, 1, 2, 3], scale[1, 2, 0, :2] = 105, 140
    certificate = fold_certificate(weights(scale))
    assert certificate.blocks_outside.tolist() == [[0, 1, 0], [0, 0, 2]]


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_empty_weights_fold(shape: tuple[int, ...]) -> None:
    certificate = fold_certificate(weights(torch.zeros(shape, dtype=torch.int32)))
    assert (certificate.exact, certificate.num_blocks, certificate.widest_span) == (True, 0, 0)
    assert certificate.reference.shape == shape[:-1]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: fold(weights(torch.tensor([[120, 105]]))),
            ValueError,
            "fold: t — need every block within 15 binades of its row, got 1 of 2 blocks outside;"
            " use the",
        ),
        (
            lambda: fold(
                weights(torch.full((2, 2), 9)), fold_certificate(weights(torch.full((3, 2), 9)))
            ),
            ValueError,
            "fold: certificate.reference — need [2], got [3]",
        ),
        (lambda: fold_certificate(torch.ones(2)), TypeError, "t — need an MXTensor, got Tensor"),
        (
            lambda: fold_certificate(quantize_blocks(torch.ones(2, 32), "mxfp8")),
            ValueError,
            "t.format — need mxfp4, got mxfp8_e4m3",
        ),
        (
            lambda: fold(quantize_blocks(torch.ones(32, 32), "mxfp4", axis=0)),
            ValueError,
            "fold: t.axis — need -1, got -2",
        ),
        (
            lambda: fold_certificate(quantize_blocks(torch.ones(32), "mxfp4")),
            ValueError,
            "t.shape — need [..., N, K], got [32]",
        ),
        (
            lambda: unfold(torch.ones(2, 2), torch.ones(2).byte()),
            TypeError,
            "codes.dtype — need uint8",
        ),
        (
            lambda: unfold(torch.ones(2, 2).byte(), torch.ones(3).byte()),
            ValueError,
            "reference.shape — need [2], got [3]",
        ),
        (
            lambda: unfold(torch.ones(2, 2).byte(), torch.ones(2).byte(), torch.bfloat16),
            TypeError,
            "dtype — need float32 or float64, got torch.bfloat16",
        ),
    ],
    ids=[
        "outside",
        "foreign_certificate",
        "no_mxtensor",
        "not_mxfp4",
        "other_axis",
        "one_dimension",
        "float_codes",
        "short_reference",
        "bfloat16_output",
    ],
)
def test_bad_input_is_named(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()
