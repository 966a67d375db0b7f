"""Base class of the reference kernels that have nothing to tune."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...problem import Config


class ReferenceKernel:
    """Supports every problem of its op on any device, with a single config (None)."""

    backend = "reference"

    def unsupported(self, problem: Any) -> str | None:
        return None

    def configs(self, problem: Any) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: Any) -> Config:
        return None
