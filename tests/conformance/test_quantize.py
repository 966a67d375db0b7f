"""quantize, dequantize and quantize_dual of every executor, bit for bit against the codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mxpert.core.problem import Op
from mxpert.formats import MXFP4, MXTensor, ScaleRule, dequantize_blocks, quantize_blocks
from support.devices import DEVICES
from support.executors import CHIPS, Executor
from support.kernels import kernels_of
from support.quantize_cases import (
    assert_dequantizes_exactly,
    assert_quantizes_exactly,
    block_cases,
    every_code_and_scale,
)
from tests.conformance.cases import quantize as cases
from tests.conformance.cases.quantize import DequantizeCase, DualCase, QuantizeCase


@pytest.mark.cases(
    every=cases.QUANTIZE,
    bfloat16_amax=cases.QUANTIZE_AMAX,
    views=cases.QUANTIZE_VIEWS,
    squares=cases.QUANTIZE_SQUARES,
    stochastic=cases.STOCHASTIC,
    nothing=cases.QUANTIZE_NOTHING,
)
def test_quantize(case: QuantizeCase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.cases(every_code_and_scale=cases.DEQUANTIZE, shapes=cases.DEQUANTIZE_SHAPES)
def test_dequantize(case: DequantizeCase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.cases(
    every=cases.DUAL,
    any_strides=cases.DUAL_VIEWS,
    groups=cases.DUAL_GROUPS,
    stochastic=cases.DUAL_STOCHASTIC,
)
def test_dual(case: DualCase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.parametrize("arch", [*CHIPS, "sm_100"])
def test_backends_serve_every_dual_case(arch: str) -> None:
    kernel = kernels_of(CHIPS.get(arch, "triton"))[Op.QUANTIZE_DUAL]
    for group in (cases.DUAL, cases.DUAL_VIEWS, cases.DUAL_GROUPS):
        for name, case in group.items():
            assert kernel.unsupported(case.problem(DEVICES[arch])) is None, name


@pytest.mark.parametrize(
    "plant",
    [
        lambda q: replace(q, qdata=q.qdata << 4 | q.qdata >> 4),
        lambda q: replace(q, scale=q.scale.roll(1, dims=-1)),
        lambda q: replace(q, qdata=torch.where(q.qdata == 0x80, 0, q.qdata)),
        lambda q: replace(q, axis=-2, qdata=q.qdata.T, scale=q.scale.T),
    ],
    ids=["swapped_nibbles", "scale_off_by_one_block", "lost_sign_of_zero", "wrong_axis"],
)
def test_the_comparison_catches(plant: Callable[[MXTensor], MXTensor]) -> None:
    x = block_cases((128, 128), -1, torch.float32)
    quantized = quantize_blocks(x, MXFP4)
    assert_quantizes_exactly(quantized, x, MXFP4, -1, ScaleRule.RCEIL)
    with pytest.raises(AssertionError):
        assert_quantizes_exactly(plant(quantized), x, MXFP4, -1, ScaleRule.RCEIL)


@pytest.mark.parametrize(
    "plant",
    [
        lambda y: torch.where(y == 1.0, 1.5, y),
        lambda y: y.abs(),
        lambda y: y.nan_to_num(),
        lambda y: torch.where(y.abs() < 2.0**-126, 0.0, y),
    ],
    ids=["wrong_value", "lost_signs", "lost_nan", "flushed_subnormals"],
)
def test_the_comparison_of_values_catches(plant: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = every_code_and_scale(MXFP4, -1)
    values = dequantize_blocks(tensor)
    assert_dequantizes_exactly(values, tensor)
    with pytest.raises(AssertionError):
        assert_dequantizes_exactly(plant(values), tensor)
