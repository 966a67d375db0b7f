"""NVFP4 matrices that hold MXFP4 values: found exactly, converted bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import MXTensor
from mxpert.integrations.checkpoints.nvfp4_casts import NotACast, cast_of_mxfp4, mxfp4_of_cast
from mxpert.testing.numerics import assert_exact
from support.expert_containers import KINDS, MATRIX_SIZES, random_matrix

ONE = torch.tensor(1.0)
EVERY_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def e4m3(*values: float) -> torch.Tensor:
    """One row of scales, each of which e4m3 holds."""
    stored = torch.tensor([values]).to(torch.float8_e4m3fn)
    assert torch.equal(stored.float(), torch.tensor([values]))
    return stored


def codes(*blocks: int) -> torch.Tensor:
    """One row of bytes: each block of 16 codes is this byte repeated."""
    return torch.tensor([[byte for byte in blocks for _ in range(8)]], dtype=torch.uint8)


def scale_bytes(*arguments: torch.Tensor, is_divisor: bool = False) -> list[int] | None:
    """The scale bytes of the only row, or None for what is no cast."""
    found = mxfp4_of_cast(*arguments, is_divisor=is_divisor)
    return found.scale[0].tolist() if isinstance(found, MXTensor) else None


def power_of(value: Fraction) -> int | None:
    """k for 2^k, in exact arithmetic; None for another number."""
    if value <= 0:
        return None
    top, bottom = value.numerator, value.denominator
    exact = top & (top - 1) == 0 and bottom & (bottom - 1) == 0
    return top.bit_length() - bottom.bit_length() if exact else None


GLOBALS = [
    1.0,
    2.0**-10,
    1.5,
    3 * 2.0**-20,
    1.875,
    math.nextafter(1.0, 2.0),
    float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
    float(torch.nextafter(torch.tensor(1.25), torch.tensor(0.0))),
    2.0**-126,
    2.0**-149,
    2.0**120,
]


@pytest.mark.parametrize("is_divisor", [False, True], ids=["multiplier", "divisor"])
@pytest.mark.parametrize("number", GLOBALS)
def test_every_scale_is_judged_as_exact_arithmetic_does(number: float, is_divisor: bool) -> None:
    whole = torch.tensor(number)
    for scale in EVERY_E4M3:
        value = float(scale)
        wanted = None
        if math.isfinite(value):
            exact = Fraction(value), Fraction(float(whole))
            power = power_of(exact[0] / exact[1] if is_divisor else exact[0] * exact[1])
            wanted = [power + 127] if power is not None and 0 <= power + 127 < 255 else None
        both = scale.view(torch.uint8).repeat(1, 2).view(torch.float8_e4m3fn)
        found = scale_bytes(codes(0x21, 0x43), both, whole, is_divisor=is_divisor)
        assert found == wanted, (value, number)


def test_codes_are_the_stored_bytes() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.full((4, 8), 0.25).to(torch.float8_e4m3fn)
    found = mxfp4_of_cast(stored, scale, torch.tensor(8.0), is_divisor=False)
    assert isinstance(found, MXTensor)
    assert found.qdata is stored
    assert found.scale.tolist() == [[128] * 4] * 4


def test_both_halves_of_32_have_one_scale() -> None:
    assert scale_bytes(codes(0x11, 0x11), e4m3(2.0, 2.0), ONE) == [128]
    assert scale_bytes(codes(0x11, 0x11), e4m3(2.0, 4.0), ONE) is None
    assert mxfp4_of_cast(
        codes(*[0x11] * 8), e4m3(2, 2, 2, 4, 1, 1, 3, 3), ONE, is_divisor=False
    ) == NotACast(casts=2, blocks=4)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("zeros", [0x00, 0x08, 0x80, 0x88])
def test_a_half_of_zeros_with_a_zero_scale_takes_the_other_halfs(zero: float, zeros: int) -> None:
    assert scale_bytes(codes(zeros, 0x11), e4m3(zero, 8.0), ONE) == [130]
    assert scale_bytes(codes(0x11, zeros), e4m3(8.0, zero), ONE) == [130]
    assert scale_bytes(codes(zeros, zeros), e4m3(zero, zero), ONE) == [127]  # OCP's block of zeros


def test_a_zero_scale_with_other_codes_is_no_cast() -> None:
    assert scale_bytes(codes(0x10, 0x11), e4m3(0.0, 8.0), ONE) is None
    assert scale_bytes(codes(0x01, 0x01), e4m3(0.0, 0.0), ONE) is None


def test_zeros_with_scales_that_differ_are_no_cast() -> None:
    assert scale_bytes(codes(0x00, 0x11), e4m3(2.0, 8.0), ONE) is None


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("is_divisor", [False, True], ids=["multiplier", "divisor"])
def test_a_global_scale_that_is_none_makes_no_cast(number: float, is_divisor: bool) -> None:
    arguments = codes(0x11, 0x11), e4m3(1.0, 1.0), torch.tensor(number)
    assert scale_bytes(*arguments, is_divisor=is_divisor) is None


def test_one_scale_of_another_significand_is_no_cast() -> None:
    matrix = random_matrix(torch.Generator().manual_seed(0), *MATRIX_SIZES["up"])
    tensors = KINDS["ModelOpt NVFP4"].store(matrix, 1)
    names = "weight", "weight_scale", "weight_scale_2"
    assert scale_bytes(*(tensors[name] for name in names)) is not None
    tensors["weight_scale"].view(torch.uint8)[0, 0] += 1
    blocks = matrix.exponents.numel()
    found = mxfp4_of_cast(*(tensors[name] for name in names), is_divisor=False)
    assert found == NotACast(casts=blocks - 1, blocks=blocks)


def test_gate_and_up_have_global_scales_of_their_own() -> None:
    """What `write` gives to neighbours, so that the tests of loading cover it."""
    generator = torch.Generator().manual_seed(0)
    store = KINDS["ModelOpt NVFP4"].store
    factors = [store(random_matrix(generator, 32, 32), each)["weight_scale_2"] for each in range(3)]
    assert len({float(factor) for factor in factors}) == 3


def test_mxfp4_becomes_nvfp4_and_comes_back() -> None:
    """All 18 exponents that e4m3 has, zeros beside them, near both ends of E8M0."""
    for lowest in (0, 100, 254 - 17):
        scale = torch.arange(lowest, lowest + 18, dtype=torch.uint8).repeat(3, 1)
        bytes_ = torch.randint(0, 256, (3, 18 * 16), dtype=torch.uint8)
        bytes_.view(3, 18, 16)[:, :, 0] = 0x21  # no block is zero
        matrix = MXTensor(bytes_, scale, MXFP4)
        (cast,) = cast_of_mxfp4([matrix]) or ()
        assert_exact(cast.dequantize(torch.float64), matrix.dequantize(torch.float64), "cast")
        stored = cast.scale.view(torch.float8_e4m3fn)
        back = mxfp4_of_cast(cast.qdata, stored, cast.row_scale[0], is_divisor=False)
        assert isinstance(back, MXTensor)
        assert torch.equal(back.scale, scale)
        bytes_.view(3, 18, 16)[1, 5] = 0x80  # zeros of either sign
        scale[1, 5] = lowest + 100 if lowest < 100 else 3  # far away
        (cast,) = cast_of_mxfp4([MXTensor(bytes_, scale, MXFP4)]) or ()
        found, wanted = cast.dequantize(), MXTensor(bytes_, scale, MXFP4).dequantize()
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_two_matrices_share_a_factor_or_are_no_cast() -> None:
    bytes_ = torch.full((1, 16), 0x21, dtype=torch.uint8)
    pair = [MXTensor(bytes_, torch.tensor([[e]], dtype=torch.uint8), MXFP4) for e in (100, 117)]
    first, second = cast_of_mxfp4(pair) or ()
    assert torch.equal(first.row_scale, second.row_scale)
    for each, matrix in zip((first, second), pair, strict=True):
        assert_exact(each.dequantize(torch.float64), matrix.dequantize(torch.float64), "cast")
    wider = MXTensor(bytes_, torch.tensor([[118]], dtype=torch.uint8), MXFP4)
    assert cast_of_mxfp4([pair[0], wider]) is None
    nan = MXTensor(bytes_, torch.tensor([[255]], dtype=torch.uint8), MXFP4)
    assert cast_of_mxfp4([nan]) is None
