"""Host side of QUANTIZE_DUAL with a scale for each block of 32; no synchronisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ..core.kernel import UntunedKernel
from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import Config, DualProblem, Op
from ..device.groups import group_block, refuse_groups
from ..device.mx_codec import scale_rule_constants
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, MXFormat, ScaleSpan
from ..formats.tensor import MXTensor
from ..routing.plan import padded_capacity
from .inputs import DualInputs

TO_NEAREST = "rounds to nearest; stochastic rounding runs on the portable kernels"
"""Why a chip's own kernel refuses a seed, as a phrase after its backend's name."""


class QuantizeDual(UntunedKernel):
    """x → rowwise and columnwise MX copies, bit-exact to `formats.codec.quantize_blocks`.

    A subclass names the kernel, the rows and columns of its tile, and its own `constants`. The
    kernel's first parameters are codes and scales of the rowwise copy, those of the columnwise
    copy, x, the group offsets and, if it `rounds_stochastically`, the seed.
    """

    op = Op.QUANTIZE_DUAL
    kernel: JITFunction
    tile: tuple[int, int]
    rounds_stochastically = False

    def constants(self, block_g: int) -> dict[str, Any]:
        """Tile and launch options; block_g: length of the kernel's vector of groups."""
        raise NotImplementedError

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], format: MXFormat) -> MXTensor:
        """An uninitialised MXTensor of this shape on the device of `like`, without checks."""
        scale_shape = (*shape[:-1], shape[-1] // MX_BLOCK_SIZE)
        qdata, scale = (like.new_empty(size, dtype=torch.uint8) for size in (shape, scale_shape))
        return MXTensor.unchecked(qdata, scale, format)

    def pitches(self, row: MXTensor, column: MXTensor) -> dict[str, int]:
        """Strides of the results that the kernel takes; none if they are contiguous."""
        return {}

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.dtype not in FLOAT_DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}; convert x to one"
        if {problem.row_span, problem.column_span} != {ScaleSpan.BLOCK}:
            return "writes one scale per block of 32; pass scale_span=ScaleSpan.BLOCK"
        if problem.stochastic and not self.rounds_stochastically:
            return TO_NEAREST
        return refuse_groups(problem.target, problem.num_groups if problem.grouped_rows else 0)

    def launch(
        self, problem: DualProblem, config: Config, inputs: DualInputs
    ) -> tuple[MXTensor, MXTensor]:
        """Return the rowwise copy (shape of x) and the columnwise copy.

        The columnwise copy is [K, M], [K, padded capacity] with group offsets, or [G, K, N].
        """
        x, group_offsets = inputs.x, inputs.group_offsets
        if x.stride(-1) != 1:
            x = x.contiguous()  # dense rows are read in place at any row stride
        *leading, num_rows, width = x.shape
        num_groups = 0 if group_offsets is None else group_offsets.shape[0] - 1
        length = padded_capacity(num_rows, num_groups) if num_groups else num_rows
        row, column = (
            self.empty(x, shape, problem.format)
            for shape in ((*leading, num_rows, width), (*leading, width, length))
        )
        if row.qdata.numel() + column.qdata.numel() > 0:
            strides = x.stride(0) if leading else 0, x.stride(-2)
            pitches = tuple(self.pitches(row, column).items())
            tensors = [row.qdata, row.scale, column.qdata, column.scale, x, group_offsets]
            if self.rounds_stochastically:
                tensors.append(inputs.seed)
            _launch(self, problem, length, strides, pitches)(
                **dict(zip(self.kernel.arg_names, tensors, strict=False))
            )
        return row, column


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    quantizer: QuantizeDual,
    problem: DualProblem,
    length: int,
    strides: tuple[int, int],
    pitches: tuple[tuple[str, int], ...],
) -> Launch:
    """Launch for columnwise copies of `length` positions a row.

    strides: matrix and row of x. pitches: of `QuantizeDual.pitches`.
    """
    *leading, num_rows, width = problem.shape
    num_groups = problem.num_groups if problem.grouped_rows else 0
    block_rows, block_columns = quantizer.tile
    batch = leading[0] if leading else 1
    block_g = group_block(num_groups)
    return Launch(
        quantizer.kernel,
        (batch * triton.cdiv(length, block_rows) * triton.cdiv(width, block_columns),),
        num_rows=num_rows,
        num_groups=num_groups,
        num_k_blocks=width // MX_BLOCK_SIZE,
        num_column_blocks=length // MX_BLOCK_SIZE,
        x_stride_batch=strides[0],
        x_stride_row=strides[1],
        **dict(pitches),
        FORMAT=problem.format.element.name,
        **scale_rule_constants(problem.format, problem.scale_rule),
        BLOCK_G=block_g,
        **quantizer.constants(block_g),
    )
