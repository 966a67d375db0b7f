"""Stochastic rounding: its random numbers, both neighbours of a value, its mean, its arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import mxpert
from mxpert.core.registry import explain_problem
from mxpert.core.target import on_device
from mxpert.errors import PerformanceWarning
from mxpert.formats import E2M1, E4M3, E5M2, FORMATS, MXTensor
from mxpert.formats.codec import decode, dequantize_blocks, encode, quantize_blocks
from mxpert.formats.spec import ElementFormat
from mxpert.formats.stochastic import encode_stochastic, random_bits
from mxpert.testing.numerics import assert_exact
from support.devices import DEVICES
from support.launches import recorded_launches

ELEMENTS = {element.name: element for element in (E2M1, E4M3, E5M2)}
elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
formats = pytest.mark.parametrize("fmt", FORMATS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor([number])


# ---- random numbers


def test_the_generator_is_philox_4x32_10() -> None:
    """The known answer of Random123 for a counter and a key of zeros."""
    words = [f"{word:08x}" for word in random_bits(seed_of(0), (4,)).tolist()]
    assert words == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_an_elements_number_depends_on_its_place_and_the_seed_alone() -> None:
    long, high = random_bits(seed_of(5), (3, 40)), random_bits(seed_of(5 + (1 << 40)), (3, 40))
    assert torch.equal(random_bits(seed_of(5), (30,)), long.flatten()[:30])
    assert long.unique().numel() == 120
    assert (long != high).sum() > 115, "both words of the seed count"
    assert (long >= 0).all()
    assert (long < 1 << 32).all()
    assert random_bits(seed_of(5), (0, 7)).shape == (0, 7)


def test_bits_are_even() -> None:
    """Each of 32 bits is set in half of 2^16 numbers, to six standard deviations."""
    numbers = random_bits(seed_of(11), (1 << 16,))
    for bit in range(32):
        share = (numbers >> bit & 1).double().mean().item()
        assert abs(share - 0.5) < 6 * 0.5 / 2**8


# ---- codes


def values_of(element: ElementFormat) -> torch.Tensor:
    """Values of every binade down to a part of a subnormal step, signs, zeros and overflow."""
    exponents = torch.arange(1 - element.bias - element.mantissa_bits - 12, element.emax + 2)
    mantissas = 1 + torch.rand(200, generator=torch.Generator().manual_seed(1))
    values = (torch.exp2(exponents.float())[:, None] * mantissas).flatten()
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    exact = decode(codes, element)
    every = torch.cat([values, -values, exact[exact.isfinite()], torch.zeros(1), -torch.zeros(1)])
    return every.float()


@elements
def test_codes_are_those_of_an_exact_sum(element: ElementFormat) -> None:
    """floor(steps + random) in float64, which holds the sum exactly, with steps of the binade."""
    values = values_of(element)
    random = random_bits(seed_of(3), tuple(values.shape))
    size = values.double().abs().clamp(max=element.max_value)
    smallest = 1 - element.bias
    exponent = torch.frexp(size)[1] - 1
    is_small = size < 2.0**smallest
    exponent = torch.where(is_small, smallest, exponent)
    step = torch.exp2((exponent - element.mantissa_bits).double())
    used = torch.where(is_small, 24, 23 - element.mantissa_bits)  # bits of the random number
    part = torch.floor(random.double() / torch.exp2(32.0 - used)) / torch.exp2(used.double())
    steps = size / step
    steps = torch.where(is_small, torch.floor(steps * 2**24) / 2**24, steps)
    expected = torch.floor(steps + part) * step * values.sign()
    actual = decode(encode_stochastic(values, element, random), element, torch.float64)
    assert torch.equal(actual, expected)
    assert torch.equal(actual.signbit(), values.signbit())


@elements
def test_a_code_stays_and_others_become_a_neighbour(element: ElementFormat) -> None:
    values = values_of(element)
    for number in range(4):
        random = random_bits(seed_of(number), tuple(values.shape))
        found = decode(encode_stochastic(values, element, random), element)
        nearest = decode(encode(values, element), element)
        is_code = nearest == values
        assert torch.equal(found[is_code], values[is_code])
        size = values.abs().clamp(max=element.max_value)
        grid = decode(torch.arange(1 << (element.bits - 1), dtype=torch.uint8), element)
        grid = grid[grid.isfinite()].sort().values
        place = torch.searchsorted(grid, size, right=True)
        below, above = grid[place - 1], grid[place.clamp(max=len(grid) - 1)]
        assert ((found.abs() == below) | (found.abs() == above)).all()


@elements
def test_the_largest_random_number_rounds_up_and_zero_down(element: ElementFormat) -> None:
    values = torch.tensor([0.75 * 2.0 ** (1 - element.bias - element.mantissa_bits), 1.2])
    for word, up in ((0, False), (0xFFFFFFFF, True)):
        random = torch.full((2,), word)
        found = decode(encode_stochastic(values, element, random), element)
        assert ((found > values) == up).all()


@elements
def test_nan_and_infinity(element: ElementFormat) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    codes = encode_stochastic(values, element, random_bits(seed_of(1), (3,)))
    assert codes.tolist() == [(1 << (element.bits - 1)) - 1] * 3


# ---- the mean


@formats
@pytest.mark.parametrize("rule", ["rceil", "ceil"])
def test_the_mean_over_seeds_is_the_value(fmt: str, rule: str) -> None:
    """Hoeffding's bound for each element, and six standard deviations for the sum of all.

    An error lies between two neighbours, `step` apart. The mean of n of them is off by more than
    ``step · √(ln(2 / p) / 2n)`` with probability p at most; p is 10^-9 for all elements together.
    """
    seeds, x = 200, normal(32, 64) * torch.exp2(normal(32, 64, seed=1).round())
    nearest = mxpert.quantize(x, fmt, scale_rule=rule)
    element = nearest.format.element
    scale = torch.exp2(nearest.scale.double() - 127).repeat_interleave(32, -1)
    scaled = x.double().abs() / scale
    exponent = (torch.frexp(scaled)[1] - 1).clamp(min=1 - element.bias)
    step = scale * torch.exp2((exponent - element.mantissa_bits).double())
    total = torch.zeros_like(step)
    for number in range(seeds):
        q = mxpert.quantize(x, fmt, scale_rule=rule, stochastic_seed=number)
        assert torch.equal(q.scale, nearest.scale)
        total += dequantize_blocks(q, torch.float64)
    error = total / seeds - x.double()
    each = step * math.sqrt(math.log(2 * x.numel() / 1e-9) / (2 * seeds))
    assert (error.abs() <= each).all()
    part = (scaled * scale / step).frac()
    deviation = (part * (1 - part) * step**2 / seeds).sum().sqrt()
    assert abs(error.sum()) <= 6 * deviation
    biased = (dequantize_blocks(nearest, torch.float64) - x.double()).abs()
    assert (biased > each).any(), "rounding to nearest fails the same bound"


def test_floor_saturates_at_the_largest_code() -> None:
    x = torch.full((1, 32), 1.99)
    q = mxpert.quantize(x, "mxfp8_e4m3", scale_rule="floor", stochastic_seed=0)
    assert q.qdata.unique().tolist() == [0x7E]


# ---- the ops


@formats
@pytest.mark.parametrize(
    ("axis", "span"), [(-1, "block"), (-2, "block"), (-1, "square"), (-2, "square")]
)
def test_a_seed_gives_the_same_codes_again(fmt: str, axis: int, span: str) -> None:
    x, options = normal(64, 96), {"axis": axis, "scale_span": span}
    first = mxpert.quantize(x, fmt, stochastic_seed=9, **options)
    assert_exact(mxpert.quantize(x, fmt, stochastic_seed=seed_of(9), **options), first, "tensor")
    other = mxpert.quantize(x, fmt, stochastic_seed=10, **options)
    nearest = mxpert.quantize(x, fmt, **options)
    assert torch.equal(other.scale, first.scale)
    for different in (other, nearest):
        assert (different.qdata != first.qdata).float().mean() > 0.2
    strided = torch.randn(64, 200)[:, :96].copy_(x)
    assert_exact(mxpert.quantize(strided, fmt, stochastic_seed=9, **options), first, "strides")


def test_special_blocks_are_those_of_rounding_to_nearest() -> None:
    x = normal(4, 64)
    x[0, 3], x[1, 40], x[2] = math.nan, -math.inf, -0.0
    for fmt in FORMATS:
        found, nearest = mxpert.quantize(x, fmt, stochastic_seed=4), mxpert.quantize(x, fmt)
        assert torch.equal(found.scale, nearest.scale)
        special = nearest.scale == 255
        special[2] = True
        assert special.sum() == 4
        wide = special.repeat_interleave(32 // nearest.format.codes_per_byte, -1)
        assert torch.equal(found.qdata[wide], nearest.qdata[wide])


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("shape", [(64, 96), (2, 64, 96)], ids=["matrix", "weights"])
def test_both_copies_round_an_element_by_its_own_number(fmt: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    row, col = mxpert.quantize_dual(x, fmt, stochastic_seed=6)
    assert_exact(row, mxpert.quantize(x, fmt, stochastic_seed=6), "row")
    other = mxpert.quantize(x, fmt, axis=-2, stochastic_seed=6)
    assert_exact(col, MXTensor(other.qdata.mT, other.scale.mT, other.format), "col")


@pytest.mark.parametrize("span", ["block", "row", "span128", "auto"])
def test_groups_do_not_change_an_elements_number(span: str) -> None:
    x, offsets = normal(70, 128), torch.tensor([0, 40, 41, 64])
    row, col = mxpert.quantize_dual(x, group_offsets=offsets, scale_span=span, stochastic_seed=6)
    bits = random_bits(seed_of(6), (70, 128))
    again, _ = mxpert.quantize_dual(x[:64], scale_span=span, stochastic_seed=6)
    if span != "auto":
        assert torch.equal(row.qdata[:64], again.qdata)
    nearest = mxpert.quantize_dual(x, group_offsets=offsets, scale_span=span)
    assert torch.equal(col.scale, nearest[1].scale)
    assert (col.qdata != nearest[1].qdata).any()
    if span == "block":
        padded, random = (pad(each[:40].mT, (0, 24)).contiguous() for each in (x, bits))
        own = quantize_blocks(padded, "mxfp8", random=random)
        assert torch.equal(col.qdata[:, :64], own.qdata)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "float": (1.0, TypeError, "stochastic_seed — need an int, a tensor or None, got 1.0"),
    "bool": (True, TypeError, "stochastic_seed — need an int, a tensor or None"),
    "negative": (-1, ValueError, "stochastic_seed — need 0 to 2"),
    "large": (1 << 63, ValueError, "stochastic_seed — need 0 to 2"),
    "int32": (torch.zeros(1, dtype=torch.int32), TypeError, r"stochastic_seed\.dtype"),
    "two": (torch.zeros(2, dtype=torch.int64), ValueError, r"stochastic_seed\.shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_seeds(name: str) -> None:
    seed, error, words = BAD[name]
    for op in (mxpert.quantize, mxpert.quantize_dual):
        with pytest.raises(error, match=f"{op.__name__}: {words}"):
            op(torch.ones(32, 32), "mxfp8", stochastic_seed=seed)


def test_codecs_refuse_what_they_would_round_twice() -> None:
    bits = random_bits(seed_of(0), (32,))
    with pytest.raises(TypeError, match=r"values\.dtype — need float32, bfloat16 or float16"):
        encode_stochastic(torch.ones(32, dtype=torch.float64), E4M3, bits)
    with pytest.raises(ValueError, match=r"random\.numel\(\) — need 4, got 32"):
        encode_stochastic(torch.ones(4), E4M3, bits)


# ---- dispatch


@pytest.mark.parametrize(("arch", "own"), [("sm_90", "hopper"), ("gfx950", "cdna4")])
def test_a_chips_own_kernel_gives_way_and_says_so(arch: str, own: str) -> None:
    words = f"{own} rounds to nearest; stochastic rounding runs on the portable kernels"
    with on_device(DEVICES[arch]), recorded_launches() as launches:
        why = mxpert.explain(mxpert.quantize_dual, torch.ones(64, 64), stochastic_seed=1)
        with pytest.warns(PerformanceWarning, match=words):
            mxpert.quantize_dual(torch.ones(64, 64), stochastic_seed=1)
        mxpert.quantize_dual(torch.ones(64, 64))
    assert why.resolution.kernel.backend == "triton"
    assert words in str(why)
    assert explain_problem(why.problem).resolution.slower == why.resolution.slower
    first, second = (launch.kernel.__name__ for launch in launches[-2:])
    assert first == "_quantize_dual_kernel" != second


def test_spans_without_a_kernel_are_told() -> None:
    with on_device(DEVICES["sm_90"]), recorded_launches():
        why = mxpert.explain(
            mxpert.quantize_dual, torch.ones(64, 64), scale_span="auto", stochastic_seed=1
        )
    assert why.resolution.kernel.backend == "reference"
    assert "pass scale_span=ScaleSpan.BLOCK" in why.resolution.slower
