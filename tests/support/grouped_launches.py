"""Launches of the portable grouped kernels on meta tensors, for the ahead-of-time tests."""

from __future__ import annotations

from typing import Any

import torch

from mxpert.core.problem import DualProblem, GroupedProblem, Op
from mxpert.formats import MXTensor, ScaleRule
from mxpert.formats.spec import get_format
from mxpert.grouped import triton as grouped
from mxpert.grouped.inputs import GroupedGemmInputs, GroupedWgradInputs
from mxpert.quantize.dual_triton import QUANTIZE_DUAL
from mxpert.quantize.inputs import DualInputs
from mxpert.routing.plan import padded_capacity
from support.devices import DEVICES
from support.without_data import empty

FORMATS = {
    "bf16": ("bf16", "bf16"),
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
}
"""Formats of both operands by name."""

GEMMS = {
    "bf16-nt": ("bf16", True, 8192),
    "bf16-nn": ("bf16", False, 8192),
    "e4m3-nt": ("e4m3", True, 8192),
    "e4m3-nn": ("e4m3", False, 8192),
    "e4m3-nt-small": ("e4m3", True, 256),
    "hybrid-nt": ("hybrid", True, 8192),
}
"""Cases of `launch_gemm` by name: formats, trans_b, rows."""


def operand(fmt: str, *size: int, axis: int = -1) -> torch.Tensor | MXTensor:
    if fmt == "bf16":
        return empty(*size, dtype=torch.bfloat16)
    scale = list(size)
    scale[axis] //= 32
    return MXTensor(empty(*size), empty(*scale), get_format(fmt), axis)


def launch_gemm(
    target: str,
    formats: tuple[str, str],
    *,
    trans_b: bool = True,
    m: int = 8192,
    groups: int = 8,
    n: int = 2880,
    k: int = 2880,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[GroupedProblem, Any]:
    problem = GroupedProblem(
        Op.GROUPED_GEMM, DEVICES[target], m, groups, n, k, *formats, trans_b, out_dtype
    )
    config = grouped.GROUPED_GEMM.heuristic(problem)
    b = operand(formats[1], groups, n, k) if trans_b else operand(formats[1], groups, k, n, axis=-2)
    grouped.GROUPED_GEMM.launch(
        problem,
        config,
        GroupedGemmInputs(
            a=operand(formats[0], m, k), b=b, group_offsets=empty(groups + 1, dtype=torch.int32)
        ),
    )
    return problem, config


def launch_wgrad(
    target: str,
    formats: tuple[str, str],
    *,
    accumulate: bool = False,
    m: int = 8192,
    groups: int = 8,
    n: int = 2880,
    k: int = 2880,
) -> tuple[GroupedProblem, Any]:
    mx = formats[0] != "bf16"
    length = padded_capacity(m, groups) if mx else m
    problem = GroupedProblem(
        Op.GROUPED_WGRAD,
        DEVICES[target],
        length,
        groups,
        n,
        k,
        *formats,
        False,
        torch.bfloat16,
        accumulate,
    )
    config = grouped.GROUPED_WGRAD.heuristic(problem)
    offsets = empty(groups + 1, dtype=torch.int32)
    grad, a = (
        operand(fmt, *((size, length) if mx else (length, size)))
        for fmt, size in zip(formats, (n, k), strict=True)
    )
    into = empty(groups, n, k, dtype=torch.float32) if accumulate else None
    grouped.GROUPED_WGRAD.launch(
        problem,
        config,
        GroupedWgradInputs(grad=grad, a=a, group_offsets=offsets, accumulate_into=into),
    )
    return problem, config


def launch_dual(
    target: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    groups: int = 0,
    stochastic: bool = False,
) -> None:
    problem = DualProblem(
        Op.QUANTIZE_DUAL,
        DEVICES[target],
        shape,
        dtype,
        get_format("mxfp8_e4m3"),
        ScaleRule.RCEIL,
        groups,
        groups > 0,
        stochastic=stochastic,
    )
    seed = empty(1, dtype=torch.int64) if stochastic else None
    offsets = empty(groups + 1, dtype=torch.int32) if groups else None
    QUANTIZE_DUAL.launch(
        problem, None, DualInputs(x=empty(*shape, dtype=dtype), group_offsets=offsets, seed=seed)
    )
