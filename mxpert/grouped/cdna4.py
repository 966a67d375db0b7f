"""Host side of GROUPED_GEMM and GROUPED_WGRAD on gfx950; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import GemmConfig, GroupedProblem, Op, resident_programs
from ..device.cdna4 import NUM_WARPS, NUM_XCDS, ROW_BYTES, WITHOUT_ACCUMULATOR_REGISTERS
from ..device.cdna4_gemm import BLOCK_N
from ..device.cdna4_operands import LINE, MAX_PITCH, MAX_ROWS, WORD, Operand
from ..device.groups import MAX_GROUPS
from ..formats.spec import FLOAT_DTYPES, get_format
from ..formats.tensor import MXTensor
from .cdna4_kernel import _grouped_gemm_cdna4_kernel
from .host import Grouped, GroupedGemm, GroupedWgrad

_HIGH, _LOW = 256, 128
"""Rows of a tile."""
_BANDS = (4, 8)
"""Choices for the row tiles that share a column tile's operand in L2. With 4, the 32 tiles that a
die works on at a time are 4 row tiles by 8 column tiles."""


class _Grouped(Grouped):
    """Base class of both GEMMs: supported problems, configs, and the launch."""

    backend = "cdna4"

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "gfx950":
            return f"needs gfx950, not {problem.target.arch}"
        if problem.out_dtype not in FLOAT_DTYPES:
            return f"writes bfloat16, float16 or float32, not {problem.out_dtype}"
        if problem.a_format == "bf16":
            return "multiplies MXFP8 operands, not bfloat16"
        if problem.op is Op.GROUPED_WGRAD:
            if problem.num_groups > MAX_GROUPS:
                return f"holds at most {MAX_GROUPS} groups, got {problem.num_groups}"
        elif not problem.trans_b and problem.n > MAX_PITCH - LINE:
            return f"reads b across the reduction with at most {MAX_PITCH - LINE} columns"
        elif max(problem.num_rows, problem.num_groups * (problem.n + WORD)) > MAX_ROWS:
            return f"reads operands of at most {MAX_ROWS} rows"
        return None

    def configs(self, problem: GroupedProblem) -> Iterator[GemmConfig]:
        """The heuristic's choice, then all others.

        High tiles have no registers left for the addresses of single numbers, so their output has
        rows of whole 16 values.
        """
        chosen = self.heuristic(problem)
        yield chosen
        for block_m in (_LOW,) if _columns(problem) % 16 else (_HIGH, _LOW):
            for band in _BANDS:
                if (config := _config(block_m, band)) != chosen:
                    yield config

    def heuristic(self, problem: GroupedProblem) -> GemmConfig:
        """High tiles; low ones where an average group (an output matrix) fits into one."""
        rows = problem.n
        if problem.op is Op.GROUPED_GEMM:
            rows = problem.num_rows // max(1, problem.num_groups)
        low = rows <= _LOW or _columns(problem) % 16
        return _config(_LOW if low else _HIGH, _BANDS[0])

    def multiply(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        a: torch.Tensor | MXTensor,
        b: torch.Tensor | MXTensor,
        out: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        assert isinstance(a, MXTensor)  # checked by `unsupported`
        assert isinstance(b, MXTensor)  # checked by `unsupported`
        along = problem.op is Op.GROUPED_WGRAD or problem.trans_b
        first, second = Operand.of(a), Operand.of(b) if along else Operand.across(b)
        pitches = first.pitch, second.pitch, first.scale_pitch, second.scale_pitch
        _gemm_launch(problem, config, pitches)(
            out=out,
            a=first.codes,
            a_scale=first.scale,
            b=second.codes,
            b_scale=second.scale,
            offsets=offsets,
        )


class _GroupedGemm(_Grouped, GroupedGemm):
    pass


class _GroupedWgrad(_Grouped, GroupedWgrad):
    pass


def _columns(problem: GroupedProblem) -> int:
    """Columns of the output."""
    return problem.k if problem.op is Op.GROUPED_WGRAD else problem.n


def _config(block_m: int, band: int) -> GemmConfig:
    return GemmConfig(
        block_m,
        BLOCK_N.value,
        ROW_BYTES.value,
        num_warps=NUM_WARPS.value,
        num_stages=2,
        group_m=band,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _gemm_launch(
    problem: GroupedProblem, config: GemmConfig, pitches: tuple[int, int, int, int]
) -> Launch:
    """pitches: of the codes of a and b in bytes, of their scales in words."""
    wgrad = problem.op is Op.GROUPED_WGRAD
    groups, block_m = problem.num_groups, config.block_m
    columns = _columns(problem)
    if wgrad:
        row_tiles = groups * triton.cdiv(problem.n, block_m)
    else:  # each group, and the rows before and after all, add at most one ragged tile, seldom two
        row_tiles = problem.num_rows // block_m + groups + 2
    tiles = row_tiles * triton.cdiv(columns, BLOCK_N.value)
    dies = NUM_XCDS.value
    resident = resident_programs(problem)
    if resident >= dies:  # whole rounds of the dies; fewer workgroups than dies are one
        workgroups = min(resident // dies, triton.cdiv(tiles, dies)) * dies
    else:
        workgroups = 1
    return Launch(
        _grouped_gemm_cdna4_kernel,
        (workgroups,),
        num_groups=groups,
        num_rows=problem.num_rows,
        num_outer=problem.n if wgrad else 0,
        num_n=columns,
        num_k=0 if wgrad else problem.k,
        a_pitch=pitches[0],
        b_pitch=pitches[1],
        a_scale_pitch=pitches[2],
        b_scale_pitch=pitches[3],
        A_FORMAT=get_format(problem.a_format).element.name,
        B_FORMAT=get_format(problem.b_format).element.name,
        BLOCK_M=block_m,
        BAND=config.group_m,
        WGRAD=wgrad,
        ACCUMULATE=problem.accumulate,
        num_warps=NUM_WARPS.value,
        TRANS_B=wgrad or problem.trans_b,
        **WITHOUT_ACCUMULATOR_REGISTERS,
    )


GROUPED_GEMM = _GroupedGemm()
GROUPED_WGRAD = _GroupedWgrad()
