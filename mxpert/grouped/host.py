"""Host side of the grouped GEMMs that all backends share: outputs, offsets, valid configs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..core.launch import CACHED_LAUNCHES
from ..core.problem import GemmConfig, GroupedProblem, Op
from ..device.groups import padded_offsets
from ..errors import require
from ..formats.tensor import Operand
from .inputs import GroupedGemmInputs, GroupedWgradInputs


class Grouped:
    """Base class of a backend's grouped GEMMs.

    A subclass has `configs` and `multiply`. Its kernels derive from it and from `GroupedGemm` or
    `GroupedWgrad`.
    """

    op: Op
    backend: str

    def configs(self, problem: GroupedProblem) -> Iterator[GemmConfig]:
        """All valid configs."""
        raise NotImplementedError

    def heuristic(self, problem: GroupedProblem) -> GemmConfig:
        """The config used if none is pinned."""
        return next(self.configs(problem))

    def require_valid(self, problem: GroupedProblem, config: GemmConfig) -> None:
        """Raise ValueError for a config that is none of `configs`."""
        require(
            config in tuple(self.configs(problem)),
            problem.op.value,
            "config",
            need="a config of this backend",
            got=config,
            remedy="see configs() of the kernel for valid ones",
        )

    def persistent(self, problem: GroupedProblem, config: GemmConfig) -> GemmConfig:
        """The config itself: each program computes its tiles one after the other."""
        return config

    def multiply(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        out: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Launch the GEMM. All sizes are above 0, and the config is valid.

        Args:
            a, b: the operands of the op, in its order.
            offsets: where groups begin in a; in the reduction in wgrad.
        """
        raise NotImplementedError


@functools.lru_cache(CACHED_LAUNCHES)
def _require_valid(kernel: Grouped, problem: GroupedProblem, config: GemmConfig) -> None:
    kernel.require_valid(problem, config)


class GroupedGemm(Grouped):
    """GROUPED_GEMM: ``c[r] = a[r] @ b[group of r].T``; zeros in rows without a group."""

    op = Op.GROUPED_GEMM

    def launch(
        self, problem: GroupedProblem, config: GemmConfig, inputs: GroupedGemmInputs
    ) -> torch.Tensor:
        """Return c [M, n], contiguous, in `problem.out_dtype`."""
        _require_valid(self, problem, config)
        group_offsets = inputs.group_offsets
        out = group_offsets.new_empty((problem.num_rows, problem.n), dtype=problem.out_dtype)
        if problem.k == 0:
            return out.zero_()
        if out.numel() > 0:
            self.multiply(problem, config, inputs.a, inputs.b, out, group_offsets)
        return out


class GroupedWgrad(Grouped):
    """GROUPED_WGRAD: ``out[g] = grad_g.T @ a_g`` over the rows of group g; zeros if it is empty."""

    op = Op.GROUPED_WGRAD

    def launch(
        self, problem: GroupedProblem, config: GemmConfig, inputs: GroupedWgradInputs
    ) -> torch.Tensor:
        """Return out [G, n, k] in `problem.out_dtype`, or add the result to `accumulate_into`."""
        _require_valid(self, problem, config)
        group_offsets, out = inputs.group_offsets, inputs.accumulate_into
        if out is None:
            out = group_offsets.new_empty(
                (problem.num_groups, problem.n, problem.k), dtype=problem.out_dtype
            )
        if out.numel() > 0:
            offsets = group_offsets
            if problem.a_format != "bf16":  # columnwise copies have padded groups
                offsets = padded_offsets(problem, group_offsets)
            self.multiply(problem, config, inputs.grad, inputs.a, out, offsets)
        return out
