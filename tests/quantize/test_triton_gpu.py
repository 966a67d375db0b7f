"""Triton quantise and dequantise kernels on a GPU, byte for byte against the codec."""

from __future__ import annotations

import functools

import pytest
import torch

from mxpert.core.problem import Op, QuantizeProblem
from mxpert.core.target import detect_target
from mxpert.formats import FORMATS, MXFormat, MXTensor, ScaleRule
from mxpert.quantize.inputs import DequantizeInputs, QuantizeInputs
from mxpert.quantize.triton import DEQUANTIZE, QUANTIZE
from support.quantize_cases import (
    assert_dequantizes_exactly,
    assert_quantizes_exactly,
    block_cases,
    every_bfloat16_amax,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = [
    ((1, 2880), -1),
    ((515, 2880), -1),
    ((3, 5, 320), -1),
    ((2880, 257), -2),
    ((512, 1088), -2),
    ((4, 288, 3, 31), -3),
    ((96,), -1),
]
"""More blocks than one wave of programs, odd and ragged sizes. A test below has 2^31 elements."""

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
rules = pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def quantize(x: torch.Tensor, fmt: MXFormat, axis: int, rule: ScaleRule) -> MXTensor:
    problem = QuantizeProblem(
        Op.QUANTIZE, detect_target(x.device), tuple(x.shape), axis, x.dtype, fmt, rule
    )
    assert QUANTIZE.unsupported(problem) is None
    return QUANTIZE.launch(problem, QUANTIZE.heuristic(problem), QuantizeInputs(x=x))


def dequantize(tensor: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    problem = QuantizeProblem(
        Op.DEQUANTIZE,
        detect_target(tensor.device),
        tuple(tensor.shape),
        tensor.axis,
        dtype,
        tensor.format,
    )
    assert DEQUANTIZE.unsupported(problem) is None
    return DEQUANTIZE.launch(problem, None, DequantizeInputs(tensor=tensor))


@functools.cache
def cases(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Test data in float32 on the CPU; narrower dtypes are rounded from it."""
    return block_cases(shape, axis, torch.float32)


@rules
@dtypes
@formats
def test_quantize(fmt: MXFormat, dtype: torch.dtype, rule: ScaleRule, device: torch.device) -> None:
    for shape, axis in LAYOUTS:
        x = cases(shape, axis).to(device, dtype)
        assert_quantizes_exactly(quantize(x, fmt, axis, rule), x, fmt, axis, rule)


@formats
def test_quantize_every_bfloat16_amax(fmt: MXFormat, device: torch.device) -> None:
    x = every_bfloat16_amax()
    for rule in ScaleRule:
        assert_quantizes_exactly(quantize(x.to(device), fmt, -1, rule), x, fmt, -1, rule)


@formats
def test_dequantize_shapes(fmt: MXFormat, device: torch.device) -> None:
    for shape, axis in LAYOUTS:
        tensor = quantize(cases(shape, axis).to(device), fmt, axis, ScaleRule.FLOOR)
        assert_dequantizes_exactly(dequantize(tensor, torch.bfloat16), tensor)


@pytest.mark.parametrize("axis", [-1, -2])
@formats
def test_more_than_2_to_the_31_elements(fmt: MXFormat, axis: int, device: torch.device) -> None:
    """The tensor repeats one matrix: all copies must quantise alike, also those past 2^31."""
    if torch.cuda.mem_get_info(device)[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    part = block_cases((8192, 2048), axis, torch.bfloat16).to(device)
    x = part.expand(130, *part.shape).contiguous()
    assert x.numel() > 2**31
    quantized, expected = (
        quantize(x, fmt, axis, ScaleRule.RCEIL),
        quantize(part, fmt, axis, ScaleRule.RCEIL),
    )
    values = dequantize(quantized, torch.bfloat16)
    for i in (0, 64, 127, 128, 129):
        assert torch.equal(quantized.qdata[i], expected.qdata)
        assert torch.equal(quantized.scale[i], expected.scale)
        assert torch.equal(
            values[i].view(torch.int16), dequantize(expected, torch.bfloat16).view(torch.int16)
        )


@formats
def test_graph_replay_equals_eager(fmt: MXFormat, device: torch.device) -> None:
    x = block_cases((777, 2880), -1, torch.bfloat16).to(device)
    eager = quantize(x, fmt, -1, ScaleRule.RCEIL)
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize(static, fmt, -1, ScaleRule.RCEIL)
    static.copy_(x)
    graph.replay()
    assert torch.equal(captured.qdata, eager.qdata)
    assert torch.equal(captured.scale, eager.scale)
