"""Codes, scales and packing against the OCP tables, exhaustively, and torch's own float8 casts."""

from __future__ import annotations

import math

import pytest
import torch

from mxpert.formats import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    MXTensor,
    block_scale,
    decode,
    decode_scale,
    dequantize_blocks,
    encode,
    pack_codes,
    unpack_codes,
)
from mxpert.formats.codec import exact_power_of_two
from tests.formats import ocp
from tests.formats.ocp import assert_same_bits, assert_same_values

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = sorted(FORMATS)
TORCH_FLOAT8 = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # table 5 of the specification, literally


def all_codes(name: str) -> torch.Tensor:
    return torch.arange(len(ocp.code_values(name)), dtype=torch.int32).to(torch.uint8)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_oracle_holds_the_literal_e2m1_table() -> None:
    assert ocp.code_values("mxfp4") == E2M1_VALUES + [-v for v in E2M1_VALUES]


@pytest.mark.parametrize("name", NAMES)
def test_descriptor_matches_the_specification(name: str) -> None:
    element, table = FORMATS[name].element, ocp.TABLES[name]
    assert (
        element.exponent_bits,
        element.mantissa_bits,
        element.bias,
        element.max_value,
        element.emax,
    ) == (table.exponent_bits, table.mantissa_bits, table.bias, table.max_normal, table.emax)
    assert element.has_inf == any(map(math.isinf, ocp.code_values(name)))
    assert element.has_nan == any(map(math.isnan, ocp.code_values(name)))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_decode_gives_the_table_value_of_every_code(name: str, dtype: torch.dtype) -> None:
    expected = torch.tensor(ocp.code_values(name), dtype=torch.float64).to(dtype)
    assert_same_values(decode(all_codes(name), FORMATS[name].element, dtype), expected)


@pytest.mark.parametrize("name", sorted(TORCH_FLOAT8))
def test_decode_agrees_with_torch_float8(name: str) -> None:
    codes = all_codes(name)
    assert_same_values(decode(codes, FORMATS[name].element), codes.view(TORCH_FLOAT8[name]).float())


def test_decode_ignores_the_high_nibble_of_e2m1_codes() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert_same_values(decode(codes, E2M1), decode(codes & 15, E2M1))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_encode_at_and_beside_every_tie(name: str, dtype: torch.dtype) -> None:
    finite = torch.tensor(ocp.TABLES[name].finite, dtype=torch.float64)
    tie = ((finite[1:] + finite[:-1]) / 2).to(dtype)
    assert torch.equal(tie.double() * 2, finite[1:] + finite[:-1]), "ties must be exact in dtype"
    below = torch.nextafter(tie, torch.zeros_like(tie))
    above = torch.nextafter(tie, torch.full_like(tie, math.inf))
    lower = torch.arange(len(tie), dtype=torch.int32).to(torch.uint8)
    even = lower + lower % 2
    sign = 8 if name == "mxfp4" else 128
    element = FORMATS[name].element
    for values, expected in ((below, lower), (tie, even), (above, lower + 1)):
        assert_same_bits(encode(values, element), expected, "positive")
        assert_same_bits(encode(-values, element), expected | sign, "negative")


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_encode_inverts_decode_and_saturates(name: str, dtype: torch.dtype) -> None:
    element, codes = FORMATS[name].element, all_codes(name)
    values = decode(codes, element, dtype)
    finite = values.isfinite()
    assert_same_bits(encode(values[finite], element), codes[finite], "round trip")
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([min(element.max_value * 1.25, largest), largest], dtype=dtype)
    top = len(ocp.TABLES[name].finite) - 1
    sign = 8 if name == "mxfp4" else 128
    assert encode(beyond, element).tolist() == [top] * 2
    assert encode(-beyond, element).tolist() == [top | sign] * 2


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize(
    ("element", "expected"),
    [(E2M1, [7, 7]), (E4M3, [0x7F, 0x7F]), (E5M2, [0x7C, 0xFC])],
    ids=["e2m1", "e4m3", "e5m2"],
)
def test_encode_infinity_is_no_finite_number(element, expected, dtype: torch.dtype) -> None:
    """The infinity of e5m2, the NaN of e4m3; e2m1 has neither, there the scale of its block has."""
    infinite = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert encode(infinite, element).tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize(
    ("element", "code"), [(E2M1, 7), (E4M3, 0x7F), (E5M2, 0x7F)], ids=["e2m1", "e4m3", "e5m2"]
)
def test_encode_nan_of_either_sign(element, code: int, dtype: torch.dtype) -> None:
    nan = torch.tensor([math.nan], dtype=dtype)
    assert encode(torch.cat([nan, -nan]), element).tolist() == [code, code]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_encode_every_16_bit_pattern(name: str, dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    codes = encode(values, FORMATS[name].element)
    assert_same_bits(codes, ocp.nearest_codes(values, name), "OCP tables")
    if name in TORCH_FLOAT8:  # torch does not saturate e5m2: compare inside the range
        inside = values.float().abs() <= FORMATS[name].element.max_value
        theirs = values[inside].to(TORCH_FLOAT8[name]).view(torch.uint8)
        assert_same_bits(codes[inside], theirs, "torch cast")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_encode_wide_random_values(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    mantissa = torch.rand(200_000, generator=generator, dtype=dtype) + 1
    exponent = torch.randint(-24, 20, mantissa.shape, generator=generator)
    sign = torch.randint(0, 2, mantissa.shape, generator=generator) * 2 - 1
    values = mantissa * exact_power_of_two(exponent, dtype) * sign
    codes = encode(values, FORMATS[name].element)
    assert_same_bits(codes, ocp.nearest_codes(values, name), "OCP tables")
    if name in TORCH_FLOAT8 and dtype is torch.float32:
        inside = values.abs() <= FORMATS[name].element.max_value
        theirs = values[inside].to(TORCH_FLOAT8[name]).view(torch.uint8)
        assert_same_bits(codes[inside], theirs, "torch cast")


def test_float64_is_not_rounded_to_float32_first() -> None:
    just_above_tie = torch.tensor([1.25 * (1 + 2.0**-40)], dtype=torch.float64)
    assert encode(just_above_tie, E2M1).tolist() == [3]
    assert encode(just_above_tie.float(), E2M1).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
def test_decode_scale_every_byte(dtype: torch.dtype) -> None:
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = torch.tensor(
        [math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan], dtype=torch.float64
    )
    assert_same_values(decode_scale(bytes_, dtype).double(), expected)
    theirs = bytes_.view(torch.float8_e8m0fnu).float().double()
    assert_same_values(decode_scale(bytes_, dtype).double(), theirs)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float32, -149, 127), (torch.float64, -1074, 1023)],
    ids=["float32", "float64"],
)
def test_exact_power_of_two_over_its_whole_range(dtype: torch.dtype, low: int, high: int) -> None:
    exponent = torch.arange(low, high + 1)
    expected = torch.tensor([math.ldexp(1.0, int(e)) for e in exponent], dtype=torch.float64)
    assert_same_values(exact_power_of_two(exponent, dtype).double(), expected)


def every_code_under_every_scale(name: str) -> tuple[MXTensor, torch.Tensor]:
    """[256 scale bytes, all codes twice] and its float64 values from the tables."""
    codes = all_codes(name).repeat(2).expand(256, -1)
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None]
    scale = scale.expand(256, codes.shape[1] // 32).contiguous()
    qdata = pack_codes(codes) if name == "mxfp4" else codes.contiguous()
    row = torch.tensor(ocp.code_values(name) * 2, dtype=torch.float64)
    powers = torch.tensor(
        [math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan], dtype=torch.float64
    )
    return MXTensor(qdata, scale, FORMATS[name]), row * powers[:, None]


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_every_code_under_every_scale(name: str, dtype: torch.dtype) -> None:
    t, values = every_code_under_every_scale(name)
    assert_same_values(dequantize_blocks(t, dtype), values.to(dtype))
    assert bool(dequantize_blocks(t, dtype)[255].isnan().all())


def test_unpack_is_low_nibble_first_for_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = unpack_codes(packed)
    assert codes.tolist() == [c for byte in range(256) for c in (byte & 15, byte >> 4)]
    assert_same_bits(pack_codes(codes), packed, "repacked")


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
def test_packing_along_any_axis_equals_moving_it_last(axis: int) -> None:
    generator = torch.Generator().manual_seed(axis + 3)
    codes = torch.randint(0, 16, (4, 6, 8), generator=generator).to(torch.uint8)
    packed = pack_codes(codes, axis)
    assert packed.is_contiguous()
    assert_same_bits(packed, pack_codes(codes.movedim(axis, -1)).movedim(-1, axis), "packed")
    assert_same_bits(unpack_codes(packed, axis), codes, "unpacked")


def test_packing_ignores_high_nibbles() -> None:
    dirty = torch.tensor([0xF1, 0xE2], dtype=torch.uint8)
    assert pack_codes(dirty).tolist() == [0x21]


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode([1.0], E2M1),
        lambda: encode(torch.ones(2, dtype=torch.int32), E2M1),
        lambda: encode(torch.ones(2), "e2m1"),
        lambda: decode(torch.ones(2), E2M1),
        lambda: decode(torch.ones(2, dtype=torch.uint8), None),
        lambda: decode(torch.ones(2, dtype=torch.uint8), E2M1, torch.int8),
        lambda: decode_scale(torch.ones(2)),
        lambda: decode_scale(torch.ones(2, dtype=torch.uint8), torch.float16),
        lambda: pack_codes(torch.ones(2, dtype=torch.int8)),
        lambda: unpack_codes(torch.ones(2)),
        lambda: block_scale(torch.ones(2), "mxfp4", 2),
        lambda: block_scale(torch.ones(2, dtype=torch.int32), "mxfp4", None),
        lambda: exact_power_of_two(torch.ones(2, dtype=torch.int32), torch.bfloat16),
    ],
)
def test_wrong_types_are_named(call) -> None:
    with pytest.raises(TypeError, match=r"^\w+: .+ — need .+, got .+"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: pack_codes(torch.ones(3, dtype=torch.uint8)),
        lambda: pack_codes(torch.ones(2, 2, dtype=torch.uint8), axis=2),
        lambda: unpack_codes(torch.tensor(1, dtype=torch.uint8)),
        lambda: unpack_codes(torch.ones(2, dtype=torch.uint8), axis=-2),
        lambda: block_scale(torch.ones(2), "mxfp6", None),
    ],
    ids=["odd_length", "axis_too_large", "no_dimensions", "axis_too_small", "unknown_format"],
)
def test_wrong_values_are_named(call) -> None:
    with pytest.raises(ValueError, match=r"^\w+: .+ — need .+, got .+"):
        call()
