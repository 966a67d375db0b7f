"""Base classes of the reference kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .problem import Config, Problem, ReferenceConfig
from .untuned import UntunedKernel


class ReferenceKernel(UntunedKernel):
    """Supports every problem of its op on any device."""

    backend = "reference"

    def unsupported(self, problem: Any) -> str | None:  # Any: subclasses take their op's problem
        return None


class ReferenceGemm(ReferenceKernel):
    """A kernel whose config names the accumulation type."""

    def configs(self, problem: Problem) -> Iterable[Config]:
        return (ReferenceConfig(),)

    def heuristic(self, problem: Problem) -> Config:
        return ReferenceConfig()
