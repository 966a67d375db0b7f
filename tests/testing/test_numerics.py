"""Comparators catch wrong results, and derived tolerances agree with simulation."""

from __future__ import annotations

import math

import pytest
import torch

from mxpert import ScaleRule
from mxpert.formats import quantize_blocks
from mxpert.testing.noise import gaussian_magnitudes, quantisation_noise, sqnr_floor_db
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    INTERMEDIATE_NOISE,
    STAGE_GATE,
    accumulation_error,
    assert_close_relative,
    assert_exact,
    bf16_output_tolerance,
    cosine,
    end_to_end_tolerance,
    is_exact,
    relative_l2,
    requantisation_error,
    rounding_rms,
    sampling_margin,
    sqnr_db,
    stage_tolerance,
)

NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "actual, expected",
    [
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [NAN, 1.0]),
        ([NAN, 1.0], [NAN, 1.0]),
        ([math.inf, 1.0], [math.inf, 1.0]),
        ([math.inf, 1.0], [1.0, 1.0]),
        ([1.0], [0.0]),
    ],
    ids=["nan", "nan_expected", "both_nan", "both_inf", "inf", "zero_expected"],
)
def test_non_finite_values_never_pass(actual, expected) -> None:
    with pytest.raises(AssertionError, match=r"case: relative L2 — need at most 1\.000e\+09, got"):
        assert_close_relative(torch.tensor(actual), torch.tensor(expected), 1e9, "case")


def test_measures() -> None:
    expected, actual = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.05])
    assert relative_l2(actual, expected) == pytest.approx(0.01, rel=1e-4)
    assert sqnr_db(actual, expected) == pytest.approx(40, rel=1e-4)
    assert sqnr_db(expected, expected) == math.inf
    assert cosine(expected, 2 * expected) == pytest.approx(1)
    assert math.isnan(cosine(expected, torch.zeros(2)))
    assert relative_l2(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    with pytest.raises(ValueError, match=r"relative_l2: actual.shape — need \[2\], got \[1\]"):
        relative_l2(torch.zeros(1), expected)


def test_exactness_sees_bits_types_and_shapes() -> None:
    x = torch.tensor([0.0, 1.0, NAN])
    assert is_exact(x, x.clone())
    assert not is_exact(x, torch.tensor([-0.0, 1.0, NAN]))
    assert is_exact(x, torch.tensor([-0.0, 1.0, NAN]), ignore_zero_sign=True)
    assert not is_exact(x, x.double())
    assert not is_exact(x, x[None])
    with pytest.raises(AssertionError, match=r"1 of 2 differ, first at \[1\], 3.0 for 2.0"):
        assert_exact(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), "case")


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8_e4m3"])
def test_exactness_of_mx_tensors_sees_codes_and_scales(fmt) -> None:
    x = normal(4, 64)
    x[0, :32] = 0
    expected, negative = quantize_blocks(x, fmt), x.clone()
    negative[0, :32] = -0.0
    actual = quantize_blocks(negative, fmt)
    assert not is_exact(actual, expected)
    assert is_exact(actual, expected, ignore_zero_sign=True)
    actual.scale[1, 0] += 1
    assert not is_exact(actual, expected, ignore_zero_sign=True)
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_exact(actual, expected, "codes", ignore_zero_sign=True)


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("octave", [0, 0.3, 0.6, 0.9])
def test_rounding_noise_agrees_with_simulation(octave, dtype, bits) -> None:
    x = normal(1 << 18) * 2**octave
    assert relative_l2(x.to(dtype), x) == pytest.approx(rounding_rms(bits), rel=0.01)


@pytest.mark.parametrize("numel", [64, 1024, 8192])
def test_sampling_margin_covers_small_samples_without_slack(numel) -> None:
    x = normal((1 << 20) // numel, numel)
    errors = (x.bfloat16().double() - x).norm(dim=1) / x.norm(dim=1)
    bound = rounding_rms(8) * sampling_margin(numel)
    assert errors.max() <= bound
    assert errors.max() - rounding_rms(8) > 0.2 * (bound - rounding_rms(8))


@pytest.mark.parametrize("top_k", [2, 3, 4, 10])
def test_reduce_tolerance_covers_rows_and_output(top_k) -> None:
    rows = normal(top_k, 64, 512)
    actual = rows.bfloat16().float().sum(0).bfloat16()
    tolerance = stage_tolerance("bf16", torch.bfloat16, 512, top_k=top_k, numel=actual.numel())
    error = assert_close_relative(actual, rows.sum(0), tolerance, "sum")
    assert 0.9 * tolerance < error


@pytest.mark.parametrize("k", [256, 4096])
def test_accumulation_error_covers_sequential_float32_sums(k) -> None:
    products = (normal(512, k) * normal(512, k, seed=1)).float()
    total = torch.zeros(512)
    for column in products.unbind(1):
        total += column
    error = relative_l2(total, products.double().sum(1))
    assert accumulation_error(k) / 20 < error < accumulation_error(k)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", None], ids=str)
@pytest.mark.parametrize("noise", [1e-7, 1e-4, INTERMEDIATE_NOISE])
def test_requantisation_error_covers_simulated_flips(noise, fmt) -> None:
    values = normal(2048, 256)
    moved = values + noise * normal(2048, 256, seed=1)
    if fmt is None:
        error = relative_l2(moved.bfloat16(), values.bfloat16())
    else:
        error = relative_l2(quantize_blocks(moved, fmt), quantize_blocks(values, fmt))
    bound = requantisation_error(fmt, noise, values.numel())
    assert error < bound
    if noise >= 1e-4:  # enough events for their sum to be near its expectation
        assert bound / 4 < error


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_quantisation_noise_agrees_with_simulation(fmt, rule) -> None:
    noises = []
    for step in range(8):
        x = normal(1 << 13, 32, seed=step) * 2 ** (step / 8)
        noises.append(relative_l2(quantize_blocks(x, fmt, -1, rule), x) ** 2)
    derived = quantisation_noise(fmt, rule, gaussian_magnitudes())
    assert max(noises) == pytest.approx(derived, rel=0.05)


@pytest.mark.parametrize("a_format", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
@pytest.mark.parametrize("k", [32, 512, 2048, 2880, 7168])
def test_tolerances_stay_within_the_gates(k, a_format) -> None:
    assert bf16_output_tolerance() < STAGE_GATE
    for top_k in (1, 4, 10):
        assert stage_tolerance(a_format, torch.bfloat16, k, top_k=top_k) <= STAGE_GATE
        assert end_to_end_tolerance(a_format, torch.bfloat16, k, k, top_k=top_k) <= END_TO_END_GATE
    assert stage_tolerance(a_format, torch.bfloat16, k) < 0.75 * STAGE_GATE
    assert stage_tolerance(a_format, torch.float32, k) < 1e-4
    assert stage_tolerance(a_format, torch.bfloat16, k, numel=1) == STAGE_GATE


def test_sqnr_floors_rank_the_formats() -> None:
    floors = [sqnr_floor_db(name) for name in ("bf16", "mxfp8", "mxfp4")]
    assert floors == sorted(floors, reverse=True)
    assert 45 < floors[0] < 56
    assert 24 < floors[1] < 31
    assert 10 < floors[2] < 18
    assert floors[1] - 1 < sqnr_floor_db("fp8_token") < floors[1] + 1
    assert sqnr_floor_db("mxfp8", quantised_weights=True) < floors[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: stage_tolerance("fp8", None, 32),
        lambda: sqnr_floor_db("mxfp6"),
        lambda: stage_tolerance("bf16", torch.int32, 32),
    ],
    ids=["mx_output", "floor", "dtype"],
)
def test_unknown_names_raise(call) -> None:
    with pytest.raises(ValueError, match="need"):
        call()
