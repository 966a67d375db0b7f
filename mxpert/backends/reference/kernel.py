"""What the reference kernels without a choice share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...problem import Config


class ReferenceKernel:
    """Serves every problem of its op on any device, in the one way there is."""

    backend = "reference"

    def unsupported(self, problem: Any) -> str | None:
        return None

    def configs(self, problem: Any) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: Any) -> Config:
        return None
