"""FP8 codes and values computed from bits, as on chips before sm_90, against the instructions.

The interpreter is told that its target has no FP8 type, as Triton is for sm_80; a use of one is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

import mxpert
from mxpert import ScaleRule
from mxpert.formats import MXFP8_E4M3, MXFP8_E5M2, MXFormat
from support.executors import Executor
from support.quantize_cases import (
    assert_dequantizes_exactly,
    assert_quantizes_exactly,
    block_cases,
    every_bfloat16_amax,
    every_code_and_scale,
)
from tests.conformance.cases.moe import ROUNDED

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
formats = pytest.mark.parametrize("fmt", [MXFP8_E4M3, MXFP8_E5M2], ids=lambda fmt: fmt.name)


def refuse_fp8(name: str) -> Any:
    """Patch a method of the interpreter's builder: a conversion to an FP8 type is an error."""
    original = getattr(stock.InterpreterBuilder, name)

    def convert(self: Any, source: Any, kind: Any, *options: Any) -> Any:
        if kind.scalar in (tl.float8e4nv, tl.float8e5):
            raise TypeError(f"{kind} is not supported in this architecture")
        return original(self, source, kind, *options)

    return mock.patch.object(stock.InterpreterBuilder, name, convert)


@contextmanager
def by_bits() -> Iterator[None]:
    """Interpret kernels as for a target without FP8."""
    builder = stock.interpreter_builder
    without = replace(builder.options, supported_fp8_dtypes=())
    with (
        mock.patch.object(builder, "options", without),
        refuse_fp8("create_bitcast"),
        refuse_fp8("create_fp_to_fp"),
        refuse_fp8("cast_impl"),
    ):
        yield


@pytest.fixture(autouse=True)
def _on_triton(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("--gfx950"):
        pytest.skip("gfx950 has the instructions")
    with mxpert.override(backend="triton"):
        yield


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
@formats
def test_codes_equal_the_codec(fmt: MXFormat, rule: ScaleRule) -> None:
    x = block_cases((64, 96), -1, torch.float32)
    with by_bits():
        made = mxpert.quantize(x, fmt.name, scale_rule=rule)
    assert_quantizes_exactly(made, x, fmt, -1, rule)


@formats
def test_codes_of_every_magnitude(fmt: MXFormat) -> None:
    """Subnormal codes, ties and saturation: ratios to the block's maximum of every size."""
    x = every_bfloat16_amax()[::37].float()
    x[:, 1:] *= torch.exp2(-torch.arange(31.0))
    with by_bits():
        made = mxpert.quantize(x, fmt.name)
    assert_quantizes_exactly(made, x, fmt, -1, ScaleRule.RCEIL)


@formats
def test_every_code_is_decoded_exactly(fmt: MXFormat) -> None:
    codes = every_code_and_scale(fmt, -1)
    with by_bits():
        values = mxpert.dequantize(codes, dtype=torch.float32)
    assert_dequantizes_exactly(values, codes)


@pytest.mark.parametrize("a_format", ["mxfp8", "fp8_token"])
def test_a_layer_is_right(a_format: str) -> None:
    with by_bits():
        ROUNDED[a_format].check(Executor("triton", "interpreted"))


@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_a_grouped_gemm_gives_the_same_bits(a_format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator) for size in ((64, 96), (2, 64, 96)))
    operands = mxpert.quantize(a, a_format), mxpert.quantize(b, "mxfp8_e4m3")
    offsets = torch.tensor([0, 40, 64])
    expected = mxpert.grouped_gemm(*operands, offsets)
    with by_bits():
        assert torch.equal(mxpert.grouped_gemm(*operands, offsets), expected)
