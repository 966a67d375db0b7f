"""NVFP4 and INT4 weights: their values by plain arithmetic, their parts, their errors."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from mxpert.formats import INT4_G32, INT4_G64, INT4_G128, NVFP4, WeightTensor
from mxpert.formats.weight_tensor import parse_weight_format

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(byte: int) -> float:
    """OCP's definition, in Python's floats."""
    exponent, mantissa, sign = byte >> 3 & 15, byte & 7, -1 if byte & 0x80 else 1
    if byte & 0x7F == 0x7F:
        return float("nan")
    return sign * (
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )


def weight(format: Any, *, rows: int = 3, groups: int = 3, seed: int = 0) -> WeightTensor:
    draw = torch.Generator().manual_seed(seed)

    def bytes_of(*shape: int, top: int = 256) -> torch.Tensor:
        return torch.randint(0, top, shape, generator=draw, dtype=torch.uint8)

    codes = bytes_of(2, rows, groups * format.group_size // 2)
    if format == NVFP4:
        factors = torch.rand(2, rows, generator=draw)
        return WeightTensor(codes, bytes_of(2, rows, groups), format, row_scale=factors)
    scale = torch.randn(2, rows, groups, generator=draw).bfloat16()
    return WeightTensor(codes, scale, format, bytes_of(2, rows, groups, top=16))


def values(t: WeightTensor) -> torch.Tensor:
    """Each weight alone, from its nibble."""
    expected = torch.empty(t.shape, dtype=torch.float64)
    for e, n, k in (
        (e, n, k) for e in range(2) for n in range(t.shape[1]) for k in range(t.shape[2])
    ):
        code = int(t.qdata[e, n, k // 2]) >> (4 if k % 2 else 0) & 15
        group = (e, n, k // t.format.group_size)
        if t.format == NVFP4:
            number = (
                (-1 if code & 8 else 1) * E2M1_VALUES[code & 7] * e4m3_value(int(t.scale[group]))
            )
            factor = 1.0 if t.row_scale is None else float(t.row_scale[e, n])
        else:
            zero = 8 if t.zero_point is None else int(t.zero_point[group])
            number, factor = code - zero, float(t.scale[group])
        expected[e, n, k] = number * factor
    return expected


@pytest.mark.parametrize("format", [NVFP4, INT4_G32, INT4_G64, INT4_G128], ids=str)
@pytest.mark.parametrize("optional", [True, False])
def test_values(format: Any, optional: bool) -> None:
    t = weight(format)
    t = t if optional else replace(t, zero_point=None, row_scale=None)
    expected = values(t)
    assert torch.equal(t.dequantize(torch.float64).nan_to_num(9e9), expected.nan_to_num(9e9))
    assert torch.equal(t[1].dequantize(torch.float64).nan_to_num(9e9), expected[1].nan_to_num(9e9))
    assert t.dequantize(torch.bfloat16).dtype == torch.bfloat16


PLANTED = {
    "nibbles exchanged": lambda t: replace(t, qdata=t.qdata << 4 | t.qdata >> 4),
    "scales of the next row": lambda t: replace(t, scale=t.scale.roll(1, 1)),
    "zero point off by one": lambda t: replace(t, zero_point=t.zero_point + 1),
}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("nibbles exchanged", NVFP4),
        ("nibbles exchanged", INT4_G32),
        ("scales of the next row", NVFP4),
        ("scales of the next row", INT4_G128),
        ("zero point off by one", INT4_G32),
    ],
)
def test_planted_errors_are_seen(name: str, format: Any) -> None:
    t = weight(format)
    wrong = PLANTED[name](t).dequantize(torch.float64)
    assert not torch.equal(wrong.nan_to_num(9e9), values(t).nan_to_num(9e9))


def test_a_factor_that_divides_is_seen() -> None:
    t = weight(NVFP4)
    assert t.row_scale is not None
    wrong = replace(t, row_scale=1 / t.row_scale).dequantize(torch.float64)
    assert not torch.equal(wrong.nan_to_num(9e9), values(t).nan_to_num(9e9))


@pytest.mark.parametrize("format", [NVFP4, INT4_G64], ids=str)
def test_parts_move_and_are_saved(format: Any) -> None:
    t = weight(format)
    assert (t.shape, t.ndim, t.numel(), t.axis) == (
        (2, 3, 3 * format.group_size),
        3,
        18 * format.group_size,
        -1,
    )
    parts = [each for each in (t.qdata, t.scale, t.zero_point, t.row_scale) if each is not None]
    assert t.nbytes == sum(part.nbytes for part in parts)
    assert t.to("meta").device.type == "meta"
    assert t.clone().qdata.data_ptr() != t.qdata.data_ptr()
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is WeightTensor
    assert loaded.format == format
    assert torch.equal(loaded.dequantize().nan_to_num(9e9), t.dequantize().nan_to_num(9e9))
    assert format.name in repr(t)


CODES = torch.zeros(2, 3, 32, dtype=torch.uint8)
BYTES = torch.zeros(2, 3, 4, dtype=torch.uint8)
FLOATS = torch.ones(2, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((CODES.int(), BYTES, "nvfp4"), TypeError, "qdata.dtype"),
        ((CODES, BYTES, "int8"), ValueError, "format — need one of"),
        ((CODES, BYTES, 4), TypeError, "format — need one of"),
        ((CODES, FLOATS, "nvfp4"), TypeError, "scale.dtype — need uint8"),
        ((CODES, BYTES, "int4_g32"), TypeError, "scale.dtype — need float32"),
        ((CODES, FLOATS, "int4_g64"), ValueError, "scale.shape"),
        ((CODES[..., :16], FLOATS, "int4_g64"), ValueError, "multiple of the group, 64"),
        ((CODES, BYTES, "nvfp4", BYTES), ValueError, "zero_point — need None for NVFP4"),
        ((CODES, FLOATS, "int4_g32", None, torch.ones(2, 3)), ValueError, "row_scale — need None"),
        ((CODES, FLOATS, "int4_g32", FLOATS), TypeError, "zero_point.dtype"),
        ((CODES, BYTES, "nvfp4", None, torch.ones(3)), ValueError, "row_scale.shape"),
        ((CODES[0, 0], BYTES, "nvfp4"), ValueError, r"qdata.shape — need \[..., N, K/2\]"),
    ],
)
def test_errors_name_the_part(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"WeightTensor: .*{text}"):
        WeightTensor(*arguments)


def test_an_index_that_cuts_a_matrix_is_refused() -> None:
    t = weight(NVFP4)
    with pytest.raises(ValueError, match="index — need a dimension before"):
        t[0][0]
    with pytest.raises(TypeError, match="index — need an int or a slice"):
        t["gate"]  # type: ignore[index]


def test_names_of_formats() -> None:
    assert parse_weight_format("int4_g64", "op") is INT4_G64
    assert parse_weight_format(NVFP4, "op") is NVFP4
    with pytest.raises(ValueError, match=r"op: weight_format — need one of .*nvfp4.*, got 'fp4'"):
        parse_weight_format("fp4", "op")
    with pytest.raises(TypeError, match="op: weight_format"):
        parse_weight_format(None, "op")
