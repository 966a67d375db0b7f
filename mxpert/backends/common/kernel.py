"""Base class of the kernels that have nothing to tune."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...problem import Config, Op


class UntunedKernel:
    """A `KernelSpec` whose only config is None."""

    op: Op
    backend = "triton"

    def configs(self, problem: Any) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: Any) -> Config:
        return None
