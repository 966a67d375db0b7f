"""Property tests of quantisation: what holds for every block, found or refuted by hypothesis."""

from __future__ import annotations

import doctest
import importlib
import math

import numpy as np
import pytest
import torch

hypothesis = pytest.importorskip("hypothesis", reason="the property tests are written with it")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as hnp  # noqa: E402

from mxpert.formats import (  # noqa: E402
    FORMATS,
    MXFormat,
    MXTensor,
    ScaleRule,
    dequantize_blocks,
    quantize_blocks,
    unpack_codes,
)
from tests.formats.ocp import assert_same_bits, assert_same_values  # noqa: E402

quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def blocks(draw: st.DrawFn, rows: int = 3) -> torch.Tensor:
    """Finite float32 [rows, 32]: per row values in [-2, 2] times one power of two of any size."""
    # Drawn whole (no fill), half of it from the corners where rounding and carries happen.
    limit = 1.9990234375
    values = st.one_of(
        st.floats(-limit, limit, width=32, allow_subnormal=False),
        st.sampled_from([0.0, -0.0, 1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, -1.9375, 2.0**-6]),
    )
    grid = draw(hnp.arrays(np.float32, (rows, 32), elements=values, fill=st.nothing()))
    exponents = draw(st.lists(st.integers(-149, 127), min_size=rows, max_size=rows))
    scaled = grid.astype(np.float64) * np.exp2(np.array(exponents, np.float64))[:, None]
    return torch.from_numpy(scaled.astype(np.float32))


formats = st.sampled_from(sorted(FORMATS.values(), key=lambda f: f.name))
rules = st.sampled_from(list(ScaleRule))


def exact(t: MXTensor) -> torch.Tensor:
    return dequantize_blocks(t, torch.float64)


def codes(t: MXTensor) -> torch.Tensor:
    return unpack_codes(t.qdata, t.axis) if t.format.codes_per_byte == 2 else t.qdata


@quick
@given(x=blocks(), fmt=formats)
def test_rceil_error_is_half_a_step_and_nothing_saturates(x: torch.Tensor, fmt: MXFormat) -> None:
    """``|x - q(x)| <= max(|x| 2^-(m+1), 2^(1 - bias - m - 1) scale)`` with m mantissa bits.

    Round to nearest leaves half a step: for a normal value at most 2^-(m+1) of it, for a subnormal
    half of the smallest value. RCEIL makes amax <= max * scale, so saturation adds nothing.
    """
    t = quantize_blocks(x, fmt, rule=ScaleRule.RCEIL)
    scale = torch.exp2(t.scale.double() - 127)
    assert bool((x.double().abs() <= fmt.element.max_value * scale).all())
    relative = x.double().abs() * 2.0 ** -(fmt.element.mantissa_bits + 1)
    smallest = 2.0 ** (1 - fmt.element.bias - fmt.element.mantissa_bits)
    error = (exact(t) - x.double()).abs()
    assert bool((error <= torch.maximum(relative, smallest * scale / 2)).all())


@quick
@given(x=blocks(), fmt=formats, rule=rules)
def test_values_are_a_fixed_point_under_every_rule(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule
) -> None:
    """The second scale is never above the first, and a finer grid holds the coarser's values."""
    once = quantize_blocks(x, fmt, rule=rule)
    twice = quantize_blocks(exact(once), fmt, rule=rule)
    assert_same_values(exact(twice), exact(once))
    thrice = quantize_blocks(exact(twice), fmt, rule=rule)
    assert_same_bits(thrice.qdata, twice.qdata, "codes of the fixed point")
    assert_same_bits(thrice.scale, twice.scale, "scales of the fixed point")


@quick
@given(x=blocks(), fmt=formats, rule=st.sampled_from([ScaleRule.FLOOR, ScaleRule.EVEN]))
def test_codes_are_a_fixed_point_of_floor_and_even(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule
) -> None:
    """FLOOR and EVEN keep the maximum's binade, so the same codes come back.

    Only a block that underflowed to zeros does not keep its scale: zeros have scale byte 127.
    """
    once = quantize_blocks(x, fmt, rule=rule)
    twice = quantize_blocks(exact(once), fmt, rule=rule)
    zeros = (exact(once) == 0).all(-1, keepdim=True)
    assert_same_bits(twice.qdata, once.qdata, "codes")
    assert_same_bits(twice.scale, once.scale.masked_fill(zeros, 127), "scales")


@quick
@given(x=blocks(), fmt=formats, rule=st.sampled_from([ScaleRule.RCEIL, ScaleRule.CEIL]))
def test_codes_of_rceil_and_ceil_repeat_unless_the_maximum_rounded_down_a_binade(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule
) -> None:
    """Where the largest code stays above half of the rule's bound (max, or 2^emax for CEIL)."""
    once = quantize_blocks(x, fmt, rule=rule)
    twice = quantize_blocks(exact(once), fmt, rule=rule)
    bound = fmt.element.max_value if rule is ScaleRule.RCEIL else 2.0**fmt.element.emax
    scale = torch.exp2(once.scale.double() - 127)
    keeps = exact(once).abs().amax(-1, keepdim=True) > bound / 2 * scale
    bottom = (once.scale == 0) & (exact(once) != 0).any(-1, keepdim=True)
    same = keeps | bottom
    assert torch.equal(twice.scale[same], once.scale[same])
    assert torch.equal(codes(twice)[same[:, 0]], codes(once)[same[:, 0]])


def test_rceil_codes_do_not_always_repeat() -> None:
    """3.1 rounds to 3 = max / 2, which the next pass writes as 6 with half of the scale."""
    once = quantize_blocks(torch.full((32,), 3.1), "mxfp4")
    twice = quantize_blocks(dequantize_blocks(once), "mxfp4")
    assert (once.scale.item(), twice.scale.item()) == (127, 126)
    assert_same_values(exact(twice), exact(once))


@quick
@given(x=blocks(), fmt=formats, rule=rules)
def test_sign_symmetry(x: torch.Tensor, fmt: MXFormat, rule: ScaleRule) -> None:
    plus, minus = quantize_blocks(x, fmt, rule=rule), quantize_blocks(-x, fmt, rule=rule)
    sign = 0x88 if fmt.codes_per_byte == 2 else 0x80
    assert_same_bits(minus.qdata, plus.qdata ^ sign, "codes")
    assert_same_bits(minus.scale, plus.scale, "scales")


@quick
@given(x=blocks(), fmt=formats, rule=rules, shift=st.integers(-60, 60))
def test_powers_of_two_move_the_scale_alone(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule, shift: int
) -> None:
    """Scale bytes follow a factor 2^shift, codes stay, where no byte is clamped."""
    base = quantize_blocks(x.double(), fmt, rule=rule)
    moved = quantize_blocks(x.double() * 2.0**shift, fmt, rule=rule)
    free = (base.scale > 60) & (base.scale < 194) & (x != 0).any(-1, keepdim=True)
    assert torch.equal(moved.scale[free].int(), base.scale[free].int() + shift)
    assert torch.equal(moved.qdata[free[:, 0]], base.qdata[free[:, 0]])


@quick
@given(x=blocks(), fmt=formats, rule=rules)
def test_order_is_kept_within_a_block(x: torch.Tensor, fmt: MXFormat, rule: ScaleRule) -> None:
    order = x.argsort(-1)
    ordered = exact(quantize_blocks(x, fmt, rule=rule)).gather(-1, order)
    assert bool((ordered.diff(dim=-1) >= 0).all())


@quick
@given(x=blocks(), fmt=formats, rule=rules)
def test_quantising_the_transpose_along_the_other_axis(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule
) -> None:
    rows, columns = quantize_blocks(x, fmt, rule=rule), quantize_blocks(x.t(), fmt, 0, rule)
    assert_same_bits(codes(columns), codes(rows).t(), "codes")
    assert_same_bits(columns.scale, rows.scale.t(), "scales")
    assert_same_values(exact(columns).t(), exact(rows))


@quick
@given(x=blocks(), fmt=formats, rule=rules, row=st.integers(0, 2))
def test_blocks_do_not_see_each_other(
    x: torch.Tensor, fmt: MXFormat, rule: ScaleRule, row: int
) -> None:
    alone = quantize_blocks(x[row], fmt, rule=rule)
    flat = quantize_blocks(x.flatten(), fmt, rule=rule)
    assert_same_bits(codes(flat)[row * 32 : row * 32 + 32], codes(alone), "codes")
    assert_same_bits(flat.scale[row : row + 1], alone.scale, "scale")


def test_the_value_next_to_the_float32_maximum_rounds_up_to_infinity_in_float32_alone() -> None:
    x = torch.full((32,), torch.finfo(torch.float32).max)
    t = quantize_blocks(x, "mxfp8_e4m3", rule=ScaleRule.RCEIL)
    assert dequantize_blocks(t)[0] == math.inf
    assert dequantize_blocks(t, torch.float64)[0] == 2.0**128


@pytest.mark.parametrize("name", ["codec", "folding", "spec", "tensor"])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"mxpert.formats.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or name == "tensor"
