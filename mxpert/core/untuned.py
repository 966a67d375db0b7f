"""Base class of the kernels that have nothing to tune."""

from __future__ import annotations

from collections.abc import Iterable

from .problem import Config, Op, Problem


class UntunedKernel:
    """A `KernelSpec` whose only config is None."""

    op: Op
    backend = "triton"

    def configs(self, problem: Problem) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: Problem) -> Config:
        return None
