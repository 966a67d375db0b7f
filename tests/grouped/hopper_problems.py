"""Grouped GEMM problems of the Hopper tests: operands, poison, float64 reference, tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mxpert.core.problem import DualProblem, GroupedProblem, Op, ReferenceConfig
from mxpert.core.target import detect_target
from mxpert.formats import MXTensor, ScaleRule, ScaleSpan
from mxpert.formats.spans import quantize_spans
from mxpert.grouped.reference import pad_groups
from mxpert.routing.plan import padded_group_offsets
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    effective_numel,
    stage_tolerance,
)
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.poison import nan_filled_scratch

pytest.importorskip("mxpert.moe.hopper.host", reason="needs Gluon")
HOPPER = kernels_of("hopper")
REFERENCE = kernels_of("reference")
FLOAT64 = ReferenceConfig(torch.float64)
BLOCK, SPAN128, ROW = ScaleSpan.BLOCK, ScaleSpan.SPAN128, ScaleSpan.ROW
GEMM, WGRAD, DUAL = Op.GROUPED_GEMM, Op.GROUPED_WGRAD, Op.QUANTIZE_DUAL

NAN_CODE, NAN_SCALE = 0x7F, 255
TAIL = 45
"""Rows after the last group."""

SIZES = {
    "ragged": [0, 1, 31, 63, 130, 257],
    "many": [5, 0, 33, 64] * 12,
    "one_group": [777],
    "all_in_last": [0, 0, 0, 1000],
    "empty": [0, 0, 0],
}
SPANS = {
    "row": (ROW, ROW),
    "span128": (SPAN128, ROW),
    "exact": (BLOCK, BLOCK),
    "exact-mixed": (ROW, BLOCK),
    "bf16": (BLOCK, BLOCK),
}
"""Spans for each mode of the GEMMs: scales in the epilogue, in the main loop, or exact bfloat16."""
PAIRS = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "mixed": ("mxfp8_e4m3", "mxfp8_e5m2"),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2"),
}


@dataclass(frozen=True)
class Case:
    """Parameters of one grouped GEMM, without values and offsets."""

    op: Op
    mode: str = "row"
    pair: str = "e4m3"
    out_dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, ...] = tuple(SIZES["ragged"])
    n: int = 736
    k: int = 1056
    offsets_dtype: torch.dtype = torch.int32
    accumulate: bool = False
    trans_b: bool = True

    @property
    def formats(self) -> tuple[str, str]:
        return ("bf16", "bf16") if self.mode == "bf16" else PAIRS[self.pair]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes) + TAIL

    @property
    def depth(self) -> int:
        """Products per result that are summed in the tensor core before promotion to float32."""
        depth, average = self.k, self.k
        if self.op is WGRAD:
            depth = max(self.sizes)
            average = self.num_rows // len(self.sizes)
        if self.mode == "span128":
            return min(depth, 128)
        return 256 if average > 8192 else depth


def offsets_of(
    sizes: tuple[int, ...] | list[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, dtype)


def values(*size: int, device: torch.device, whole: bool, seed: int) -> torch.Tensor:
    """Normal values times a power of two for each row and for each 64 columns.

    With `whole`: integers up to 3, which are exact in every format.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if whole:
        return torch.randint(-3, 4, size, generator=generator, device=device).float()
    rows = torch.randint(-1, 2, (*size[:-1], 1), generator=generator, device=device)
    blocks = torch.randint(0, 2, (size[-1] // 64 + 1,), generator=generator, device=device)
    factors = 2.0 ** (rows + blocks.repeat_interleave(64)[: size[-1]])
    return factors * torch.randn(size, generator=generator, device=device)


def operand(
    x: torch.Tensor, fmt: str, span: ScaleSpan, starts: torch.Tensor | None = None
) -> torch.Tensor | MXTensor:
    if fmt == "bf16":
        return x.to(torch.bfloat16)
    return quantize_spans(x, fmt, ScaleRule.RCEIL, span, group_starts=starts)


def transposed(value: torch.Tensor | MXTensor) -> torch.Tensor | MXTensor:
    """The same values as [G, K, N], in memory too."""
    if isinstance(value, torch.Tensor):
        return value.mT.contiguous()
    return MXTensor(
        value.qdata.mT.contiguous(),
        value.scale.mT.contiguous(),
        value.format,
        -2,
        scale_span=value.scale_span,
    )


def poison(value: torch.Tensor | MXTensor, place: Any) -> None:
    """Write NaN at `place`: an index of rows, or a pair that selects columns of codes."""
    if isinstance(value, torch.Tensor):
        value[place] = torch.nan
        return
    value.qdata[place] = NAN_CODE
    if isinstance(place, tuple):
        columns = place[-1]
        stop = None if columns.stop is None else columns.stop // 32
        place = (*place[:-1], slice(columns.start // 32, stop))
    value.scale[place] = NAN_SCALE


def make(
    case: Case,
    device: torch.device,
    *,
    whole: bool = False,
    seed: int = 0,
    offsets: torch.Tensor | None = None,
) -> tuple[GroupedProblem, dict[str, Any]]:
    """Problem and arguments; rows outside the groups are NaN."""
    if offsets is None:
        offsets = offsets_of(case.sizes, device, case.offsets_dtype)
    wgrad, groups = case.op is WGRAD, len(case.sizes)
    shapes = (
        [(case.num_rows, case.n), (case.num_rows, case.k)]
        if wgrad
        else [(case.num_rows, case.k), (groups, case.n, case.k)]
    )
    dense = [
        values(*shape, device=device, whole=whole, seed=3 * seed + index)
        for index, shape in enumerate(shapes)
    ]
    starts, end = None, int(offsets[-1])
    if wgrad:
        dense = [pad_groups(x, offsets)[1].mT.contiguous() for x in dense]
        starts = padded_group_offsets(offsets)
        end = int(starts[-1])
    first, second = (
        operand(x, fmt, span, starts)
        for x, fmt, span in zip(dense, case.formats, SPANS[case.mode], strict=True)
    )
    if not (wgrad or case.trans_b):
        second = transposed(second)
    for value in (first, second) if wgrad else (first,):
        poison(value, (slice(None), slice(end, None)) if wgrad else slice(end, None))
    problem = GroupedProblem(
        case.op,
        detect_target(device),
        first.shape[1 if wgrad else 0],
        groups,
        case.n,
        case.k,
        *case.formats,
        case.trans_b and not wgrad,
        case.out_dtype,
        case.accumulate,
        *SPANS[case.mode],
    )
    if not wgrad:
        return problem, {"a": first, "b": second, "group_offsets": offsets}
    into = values(groups, case.n, case.k, device=device, whole=whole, seed=3 * seed + 2)
    return problem, {
        "grad": first,
        "a": second,
        "group_offsets": offsets,
        "accumulate_into": into if case.accumulate else None,
    }


def run(problem: GroupedProblem | DualProblem, **arguments: Any) -> Any:
    """Run on the Hopper backend; scratch and results start as NaN."""
    kernel = HOPPER[problem.op]
    assert kernel.unsupported(problem) is None
    with nan_filled_scratch():
        return kernel.launch(problem, kernel.heuristic(problem), INPUTS[problem.op](**arguments))


def expect(problem: GroupedProblem, **arguments: Any) -> torch.Tensor:
    """Reference result in float64; `accumulate_into` is added but not modified."""
    into = arguments.get("accumulate_into")
    if into is not None:
        arguments["accumulate_into"] = into.double()
    return REFERENCE[problem.op].launch(
        replace(problem, out_dtype=torch.float64), FLOAT64, INPUTS[problem.op](**arguments)
    )


def adder_error(depth: int) -> float:
    """Relative L2 of a sum of `depth` fp8 products in Hopper's tensor core: ``2^-13 √(depth / 6)``.

    An instruction aligns 32 products and the partial sum to the largest exponent among them, and
    drops bits below 2^-13 of it. The partial sum has no such bits left. Each product loses less
    than one unit ``2^-13 |S_i|``, with its own sign: a variance of ``(2^-13 |S_i|)² / 3``. With
    ``|S_i|² = (i / depth) |S|²`` the total is ``(2^-13 |S|)² depth / 6``. This is an upper bound,
    since products with few bits lose nothing: a float64 simulation of the adder gives 1.0e-3 at
    2880 values and 2.0e-3 at 8192, which is 0.4 of the bound.
    """
    return 2.0**-13 * math.sqrt(depth / 6)


def tolerance(case: Case, expected: torch.Tensor) -> float:
    """Rounding of the result and error of the adder, added in squares.

    Powers of two in b's rows (a's columns) reduce the effective number of values to a quarter.
    """
    numel = effective_numel(expected.flatten(0, -2)) // 4
    rounding = stage_tolerance("bf16", case.out_dtype, max(case.k, *case.sizes), numel=numel)
    fp8 = case.mode in ("row", "span128")
    return math.hypot(rounding, adder_error(case.depth) if fp8 else 0.0)


def check(case: Case, actual: torch.Tensor, expected: torch.Tensor, *, whole: bool = False) -> None:
    assert actual.dtype == case.out_dtype
    if whole:  # sums are exact: one rounding
        assert_exact(actual, expected.to(actual.dtype), str(case), ignore_zero_sign=True)
    else:
        assert_close_relative(actual, expected, tolerance(case, expected), str(case))
