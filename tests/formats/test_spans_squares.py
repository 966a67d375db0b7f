"""32 × 32 squares against exact arithmetic, and tensors blocked along another axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mxpert
from mxpert.formats import FORMATS, MXTensor, ScaleRule, ScaleSpan, quantize_blocks, unpack_codes
from mxpert.testing.numerics import assert_exact
from support.quantize_cases import square_cases
from tests.formats import ocp

NAMES = sorted(FORMATS)
SHAPES = [(64, 256), (77, 192), (2, 33, 96), (1, 64), (2, 3, 32, 64)]
"""With rows of several squares, cut squares, one row, and leading dimensions."""
NAN_CODE = {"mxfp4": 7, "mxfp8_e4m3": 0x7F, "mxfp8_e5m2": 0x7F}


def oracle(x: np.ndarray[Any, Any], name: str, rule: ScaleRule) -> tuple[torch.Tensor, ...]:
    """Codes and scales of squares along the last axis, square by square in float64."""
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((*x.shape[:-1], x.shape[-1] // 32), np.uint8)
    for *matrix, row, column in np.ndindex(*x.shape[:-2], -(-x.shape[-2] // 32), scales.shape[-1]):
        rows, columns = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
        place = (*matrix, rows, columns)
        square = x[place]
        if not np.isfinite(square).all():
            scales[(*matrix, rows, column)], codes[place] = 255, NAN_CODE[name]
            continue
        byte = ocp.scale_byte(float(np.abs(square).max()), name, rule)
        scaled = torch.from_numpy(square * math.ldexp(1.0, 127 - byte))
        scales[(*matrix, rows, column)] = byte
        codes[place] = ocp.nearest_codes(scaled, name).numpy()
    return torch.from_numpy(codes), torch.from_numpy(scales)


def codes_of(tensor: MXTensor) -> torch.Tensor:
    return (
        unpack_codes(tensor.qdata, tensor.axis) if tensor.format.name == "mxfp4" else tensor.qdata
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
@pytest.mark.parametrize("name", NAMES)
def test_squares_equal_the_definition(name: Any, rule: ScaleRule, shape: tuple[int, ...]) -> None:
    x = square_cases(shape, torch.float32)
    square = mxpert.quantize(x, name, scale_rule=rule, scale_span="square")
    codes, scales = oracle(x.double().numpy(), name, rule)
    ocp.assert_same_bits(square.scale, scales, "scales")
    ocp.assert_same_bits(codes_of(square), codes, "codes")
    assert square.scale_span is ScaleSpan.SQUARE
    across = mxpert.quantize(x.mT, name, axis=-2, scale_rule=rule, scale_span="square")
    assert_exact(across, square.mT, "along the other axis")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_one_value_that_is_not_finite_makes_its_square_nan(name: Any, value: float) -> None:
    x = torch.ones(64, 96)
    x[40, 33] = value
    square = mxpert.quantize(x, name, scale_span="square")
    wanted = torch.zeros(64, 96, dtype=torch.bool)
    wanted[32:, 32:64] = True
    assert torch.equal(square.dequantize().isnan(), wanted)
    assert set(square.scale[32:, 1].tolist()) == {255}


@pytest.mark.parametrize("shape", [(64, 256), (3, 32, 128)], ids=str)
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
@pytest.mark.parametrize("name", NAMES)
def test_a_square_tensor_and_its_transpose_hold_the_same_codes_and_scales(
    name: Any, rule: ScaleRule, shape: tuple[int, ...]
) -> None:
    x = square_cases(shape, torch.float32)
    options: dict[str, Any] = {"scale_rule": rule, "scale_span": "square"}
    one, other = (mxpert.quantize(each, name, **options) for each in (x, x.mT))
    assert_exact(one.mT.with_axis(-1), other, "transpose")
    assert_exact(one.with_axis(-2).mT, other, "the other axis, transposed")
    assert_exact(one.with_axis(-2).with_axis(-1), one, "there and back")
    assert_exact(one.with_axis(-2), mxpert.quantize(x, name, axis=-2, **options), "the other axis")
    assert torch.equal(codes_of(one).mT, codes_of(other))


def test_a_plain_tensor_is_quantised_again() -> None:
    x = torch.randn(64, 96)
    plain = mxpert.quantize(x, "mxfp8")
    again = plain.with_axis(-2, scale_rule="floor")
    exact = plain.dequantize(torch.float64)
    assert_exact(again, quantize_blocks(exact, "mxfp8", -2, ScaleRule.FLOOR), "with_axis")
    assert not torch.equal(again.dequantize(torch.float64), exact)
    assert plain.with_axis(1) is plain
    largest = MXTensor(
        torch.full((32, 32), 0x7E, dtype=torch.uint8),
        torch.full((32, 1), 254, dtype=torch.uint8),
        FORMATS["mxfp8_e4m3"],
    )
    assert_exact(largest.with_axis(0), largest.mT, "values beyond float32")


@pytest.mark.parametrize(
    "plant",
    [
        lambda q: replace(q, scale=q.scale.roll(1, dims=-2)),
        lambda q: replace(q, qdata=q.qdata.flip(-2)),
        lambda q: quantize_blocks(q.dequantize(), q.format),
    ],
    ids=["scales_of_the_row_above", "rows_exchanged", "a_scale_for_each_block"],
)
def test_the_comparison_catches(plant: Callable[[MXTensor], MXTensor]) -> None:
    x = torch.randn(64, 64) * torch.exp2(torch.arange(64.0) // 8)[:, None]
    square = quantize_blocks(x, "mxfp8", span="square")
    codes, scales = oracle(x.double().numpy(), "mxfp8_e4m3", ScaleRule.RCEIL)
    expected = replace(square, qdata=codes, scale=scales)
    assert_exact(square, expected, "squares")
    with pytest.raises(AssertionError):
        assert_exact(replace(plant(square), scale_span="square"), expected, "squares")


SQUARE = mxpert.quantize(torch.randn(2, 33, 64), "mxfp8", scale_span="square")


def test_parts_of_squares() -> None:
    assert SQUARE[1].scale_span is ScaleSpan.SQUARE
    assert SQUARE[1][3:].scale_span is ScaleSpan.BLOCK  # its squares would begin elsewhere
    assert "SQUARE" in repr(SQUARE)
    assert SQUARE.mT.qdata.data_ptr() == SQUARE.qdata.data_ptr()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: SQUARE.with_axis(-2), ValueError, r"shape\[-2\] — need a multiple of 32, got 33"),
        (lambda: SQUARE.with_axis(3), ValueError, "axis of a 3-dimensional tensor"),
        (lambda: SQUARE.with_axis("last"), TypeError, "axis — need an int"),
        (
            lambda: mxpert.quantize(torch.ones(32, 32, 32), "mxfp4", scale_span="square").with_axis(
                0
            ),
            ValueError,
            "need -1 or -2, with ScaleSpan.SQUARE",
        ),
        (lambda: mxpert.quantize(torch.ones(32), "mxfp8").mT, ValueError, "two dimensions"),
        (
            lambda: mxpert.quantize(torch.ones(32), "mxfp8", scale_span="square"),
            ValueError,
            r"quantize: axis — need one of the last two of a matrix, with SQUARE",
        ),
        (
            lambda: mxpert.quantize(torch.ones(32, 4, 4), "mxfp8", axis=0, scale_span="square"),
            ValueError,
            "movedim",
        ),
        (
            lambda: mxpert.quantize(torch.ones(32, 32), "mxfp8", scale_span="row"),
            ValueError,
            "need BLOCK or SQUARE, got ScaleSpan.ROW; quantize_dual",
        ),
        (
            lambda: mxpert.quantize(torch.ones(32, 32), "mxfp8", scale_span="cube"),
            ValueError,
            "square",
        ),
        (
            lambda: mxpert.quantize_dual(torch.ones(32, 32), scale_span="square"),
            ValueError,
            "quantize_dual: scale_span — need one of BLOCK, SPAN128, ROW, AUTO",
        ),
        (
            lambda: mxpert.quantize_dual(torch.ones(32, 32), scale_span=("row", "square")),
            ValueError,
            "with_axis",
        ),
        (lambda: mxpert.rebase(SQUARE, "square"), ValueError, "rebase: span — need one of BLOCK"),
        (
            lambda: mxpert.formats.quantize_spans(torch.ones(32, 32), "mxfp8", "rceil", "square"),
            ValueError,
            "quantize_spans: span",
        ),
        (
            lambda: mxpert.training.MXFP8Recipe(scale_span="square"),
            ValueError,
            "MXFP8Recipe: scale_span",
        ),
        (
            lambda: MXTensor(
                torch.zeros(32, dtype=torch.uint8),
                torch.zeros(1, dtype=torch.uint8),
                "mxfp8",
                scale_span="square",
            ),
            ValueError,
            "MXTensor: axis — need one of the last two",
        ),
    ],
    ids=lambda each: each[:24] if isinstance(each, str) else "",
)
def test_bad_input(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
