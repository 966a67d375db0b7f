"""Target: one function of `fuzz_targets`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fuzz_arguments import Arguments


@dataclass
class Target:
    """One function.

    Args:
        name: for reports.
        call: takes the arguments by name.
        arguments: makes right ones.
        expected: the right answer, or None where it does not know it.
        tolerance: relative L2 error of an answer.
        skip: arguments that stay right: objects that other targets make, and indices whose values
            the function documents as not checked.
    """

    name: str
    call: Callable[..., Any]
    arguments: Callable[[random.Random], Arguments]
    expected: Callable[[Arguments], Any] | None = None
    tolerance: float = 0.0
    skip: frozenset[str] = field(default_factory=frozenset)
