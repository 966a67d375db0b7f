"""Reference dual quantisation and grouped GEMMs: float32 or float64 torch on any device.

Each group is one torch matmul. Reading the group bounds synchronises with the device, which a real
kernel must not do. The operands are dequantised values with at most 8 significant bits, so torch's
float32 matmul precision settings (TF32, bfloat16) do not change the products. Sums are kept in the
accumulation type and rounded once.
"""

from __future__ import annotations

import torch

from ..core.kernel import ReferenceGemm, ReferenceKernel
from ..core.problem import Config, DualProblem, GroupedProblem, Op, ReferenceConfig
from ..formats.codec import dequantize_blocks
from ..formats.spans import quantize_spans
from ..formats.stochastic import random_bits
from ..formats.tensor import MXTensor
from ..quantize.inputs import DualInputs
from ..routing.plan import group_bounds, padded_capacity, padded_group_offsets
from .inputs import GroupedGemmInputs, GroupedWgradInputs


class QuantizeDual(ReferenceKernel):
    """Quantise the rows, and the transpose of the rows with each group padded to 32."""

    op = Op.QUANTIZE_DUAL

    def launch(
        self, problem: DualProblem, config: Config, inputs: DualInputs
    ) -> tuple[MXTensor, MXTensor]:
        x, group_offsets, seed = inputs.x, inputs.group_offsets, inputs.seed
        random = None if seed is None else random_bits(seed, tuple(x.shape))
        padded, padded_random, starts = x, random, None
        if group_offsets is not None:
            starts = padded_group_offsets(group_bounds(group_offsets, x.shape[0]))
            if random is not None:
                padded_random = pad_groups(random, group_offsets)[1]
            x, padded = pad_groups(x, group_offsets)
        format, rule = problem.format, problem.scale_rule
        return (
            quantize_spans(x.contiguous(), format, rule, problem.row_span, random=random),
            quantize_spans(
                padded.mT.contiguous(),
                format,
                rule,
                problem.column_span,
                group_starts=starts,
                random=None if padded_random is None else padded_random.mT.contiguous(),
            ),
        )


def pad_groups(x: torch.Tensor, group_offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the rows that belong to no group; also return the rows with each group padded to 32.

    Args:
        x: [M, K]. group_offsets: int32 or int64 [G + 1].

    Returns:
        x [M, K] with zeros in the rows of no group, and the padded rows [padded_capacity(M, G), K].
    """
    num_rows, num_groups = x.shape[0], group_offsets.shape[0] - 1
    bounds = group_bounds(group_offsets, num_rows).long()
    row = torch.arange(num_rows, device=x.device)
    inside = (row >= bounds[0]) & (row < bounds[-1])
    x = torch.where(inside[:, None], x, 0)
    group = torch.searchsorted(bounds[1:], row, right=True).clamp(max=num_groups - 1)
    target = row + (padded_group_offsets(bounds)[:-1] - bounds[:-1])[group]
    capacity = padded_capacity(num_rows, num_groups)
    padded = x.new_zeros(capacity + 1, x.shape[1])  # the extra last row takes rows of no group
    padded[torch.where(inside, target, capacity)] = x
    return x, padded[:capacity]


class GroupedGemm(ReferenceGemm):
    """grouped_gemm as one torch matmul per non-empty group."""

    op = Op.GROUPED_GEMM

    def launch(
        self, problem: GroupedProblem, config: ReferenceConfig, inputs: GroupedGemmInputs
    ) -> torch.Tensor:
        a, b, group_offsets = inputs.a, inputs.b, inputs.group_offsets
        dtype = config.accumulate
        out = torch.zeros(
            problem.num_rows, problem.n, dtype=problem.out_dtype, device=group_offsets.device
        )
        bounds = group_bounds(group_offsets, problem.num_rows).tolist()
        for group in range(problem.num_groups):
            rows = slice(bounds[group], bounds[group + 1])
            if rows.start < rows.stop:
                matrix = _values(b[group], dtype)
                product = _values(a[rows], dtype) @ (matrix.mT if problem.trans_b else matrix)
                out[rows] = product.to(problem.out_dtype)
        return out


class GroupedWgrad(ReferenceGemm):
    """grouped_wgrad as one torch matmul per non-empty group."""

    op = Op.GROUPED_WGRAD

    def launch(
        self, problem: GroupedProblem, config: ReferenceConfig, inputs: GroupedWgradInputs
    ) -> torch.Tensor:
        grad, a, group_offsets = inputs.grad, inputs.a, inputs.group_offsets
        dtype, out = config.accumulate, inputs.accumulate_into
        if out is None:
            shape = (problem.num_groups, problem.n, problem.k)
            out = torch.zeros(shape, dtype=problem.out_dtype, device=group_offsets.device)
        copies = isinstance(grad, MXTensor)
        offsets = padded_group_offsets(group_offsets) if copies else group_offsets
        bounds = group_bounds(offsets, problem.num_rows).tolist()
        for group in range(problem.num_groups):
            part = slice(bounds[group], bounds[group + 1])
            if part.start < part.stop:
                product = _columns(grad, part, dtype) @ _columns(a, part, dtype).mT
                out[group] = (out[group] + product).to(out.dtype)
        return out


def _values(operand: torch.Tensor | MXTensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_blocks(operand, dtype) if isinstance(operand, MXTensor) else operand.to(dtype)


def _columns(operand: torch.Tensor | MXTensor, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Values [width, rows] of one group, from a columnwise MX copy or from a plain [M, width]."""
    if not isinstance(operand, MXTensor):
        return operand[part].mT.to(dtype)
    block = operand.format.block_size
    scales = slice(part.start // block, part.stop // block)
    return dequantize_blocks(
        MXTensor(operand.qdata[:, part], operand.scale[:, scales], operand.format), dtype
    )


QUANTIZE_DUAL = QuantizeDual()
GROUPED_GEMM = GroupedGemm()
GROUPED_WGRAD = GroupedWgrad()
