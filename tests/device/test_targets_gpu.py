"""What the portable kernels run on sm_80, sm_86, sm_89 and sm_120, run on this GPU.

The ops take the device for one of those chips, so tiles, stages and launch options are theirs. For
chips before sm_90, Triton is told that there is no FP8 type, so that codes and values are computed
from bits. Only the instructions are those of this GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MappingProxyType

import pytest
import torch

import mxpert
from mxpert import Combine, ReferenceConfig, ScaleRule
from mxpert.core import launch
from mxpert.core.describe import describe
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.core.registry import explain_problem
from mxpert.core.target import on_device
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    stage_tolerance,
)
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.devices import DEVICES
from support.poison import nan_filled_scratch
from support.quantize_cases import assert_quantizes_exactly, block_cases, every_code_and_scale

FLOAT64 = ReferenceConfig(torch.float64)
CHIPS = ("sm_80", "sm_86", "sm_120")
"""sm_89 has the tiles of sm_86."""
SHAPE = MoEShape(hidden_size=704, intermediate_size=384, num_experts=8, top_k=2, has_bias=True)
ROW_BLOCKS = {16: 17, 32: 100, 64: 240, 128: 1000}
"""Row block → a number of tokens for which the heuristic chooses it."""


def forget_launches() -> None:
    """Empty the caches of `Launch` objects: most of their keys lack the device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mxpert."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.fixture(params=CHIPS, autouse=True)
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Take the device for this chip; only the Triton backend serves; new memory is NaN."""
    arch: str = request.param
    if arch != "sm_120":
        options = {**launch.LAUNCH_OPTIONS, "supported_fp8_dtypes": ("fp8e4b15", "fp8e5")}
        monkeypatch.setattr(launch, "LAUNCH_OPTIONS", MappingProxyType(options))
    forget_launches()
    with on_device(DEVICES[arch]), mxpert.override(backend="triton"), nan_filled_scratch():
        yield arch
    forget_launches()


@pytest.mark.parametrize("block_m", ROW_BLOCKS)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_layer(a_format: str, block_m: int, chip: str, device: torch.device) -> None:
    inputs = random_moe_problem(SHAPE, ROW_BLOCKS[block_m], device=device)
    call = inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids
    options = dict(activation=inputs.activation, activation_format=a_format)
    problem = describe(mxpert.fused_moe, *call, **options)
    assert problem.target == DEVICES[chip]
    assert explain_problem(problem).resolution.config.routing_block_m == block_m
    for combine, rows in ((Combine.REDUCE, 2), (Combine.ATOMIC, 1)):
        actual = mxpert.fused_moe(*call, **options, combine=combine)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = mxpert.fused_moe(*call, **options, combine=combine)
        tolerance = end_to_end_tolerance(
            a_format, actual.dtype, 704, 384, top_k=rows, numel=actual.numel()
        )
        assert_close_relative(actual, expected, tolerance, f"{a_format}, {combine.value}")


@pytest.mark.parametrize("trans_b", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("pair", ["bf16", "e4m3", "hybrid"])
def test_grouped_gemm_and_wgrad(pair: str, trans_b: bool, chip: str, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    offsets = torch.tensor([0, 256, 256, 300, 777], dtype=torch.int32, device=device)
    a = torch.randn(777, 1056, generator=generator, device=device).bfloat16()
    b = torch.randn(4, 736, 1056, generator=generator, device=device).bfloat16()
    b = b if trans_b else b.mT.contiguous()
    grad = torch.randn(777, 736, generator=generator, device=device).bfloat16()
    operands, pieces = (a, b), (grad, a)
    if pair != "bf16":
        first = "mxfp8_e5m2" if pair == "hybrid" else "mxfp8_e4m3"
        operands = (
            mxpert.quantize(a, first),
            mxpert.quantize(b, "mxfp8_e4m3", axis=-1 if trans_b else -2),
        )
        pieces = tuple(
            mxpert.quantize_dual(x, fmt, group_offsets=offsets)[1]
            for x, fmt in ((grad, first), (a, "mxfp8_e4m3"))
        )
    for op, arguments, depth in (
        (mxpert.grouped_gemm, operands, 1056),
        (mxpert.grouped_wgrad, pieces, 477),
    ):
        options = {"trans_b": trans_b} if op is mxpert.grouped_gemm else {}
        actual = op(*arguments, offsets, **options)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = op(*arguments, offsets, **options)
        tolerance = stage_tolerance("bf16", actual.dtype, depth, numel=actual.numel())
        assert_close_relative(actual, expected, tolerance, f"{op.__name__} {pair}")


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_codes_are_exact(fmt: str, device: torch.device) -> None:
    """Quantise, both copies of `quantize_dual`, and every code under every scale back."""
    for rule in ScaleRule:
        x = block_cases((480, 736), -1, torch.float32)
        made = mxpert.quantize(x.to(device), fmt, scale_rule=rule)
        assert_quantizes_exactly(made, x, made.format, -1, rule)
    codes = every_code_and_scale(made.format, -1)
    values = mxpert.dequantize(codes.to(device), dtype=torch.float32).cpu()
    with mxpert.override(backend="reference"):
        torch.testing.assert_close(
            values, mxpert.dequantize(codes, dtype=torch.float32), rtol=0, atol=0, equal_nan=True
        )
        if fmt == "mxfp4":
            return
        expected = mxpert.quantize_dual(x.to(device), fmt)
    for actual, wanted in zip(mxpert.quantize_dual(x.to(device), fmt), expected, strict=True):
        assert_exact(actual, wanted, "quantize_dual")
