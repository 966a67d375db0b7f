"""Warm calls of an op: arguments of a known geometry are not checked again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..problem import KernelSpec, Problem
from ..runtime.geometry import Known, describe
from .registry import resolve, resolve_known

_MAX_KNOWN = 1024
"""Geometries of an op, each with some ten kilobytes of noted launches."""

_T = TypeVar("_T")


def without_grad(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return `function` with gradient recording off."""

    @functools.wraps(function)
    def run(*arguments: Any) -> _T:
        if not torch.is_grad_enabled():
            return function(*arguments)
        torch.set_grad_enabled(False)  # takes half the time of no_grad
        try:
            return function(*arguments)
        finally:
            torch.set_grad_enabled(True)

    return run


class Calls:
    """The calls of one op: check and describe once for each geometry, then resolve and launch."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Known] = {}

    def launch(
        self,
        choice: object,
        values: tuple[Any, ...],
        arguments: dict[str, Any],
        describe_problem: Callable[[], Problem],
    ) -> Any:
        """Return the op's result, which has no gradient.

        Args:
            choice: an option object; the cache key holds its identity.
            values: numbers and names; the cache key holds their types and values. `choice`,
                `values` and the geometry of `arguments` together decide the problem.
            arguments: the keyword arguments of the kernel's `launch`.
            describe_problem: checks everything and returns the problem, or raises.
        """
        found = describe(arguments.values())
        if found is None:
            problem = describe_problem()
            return _launch(*resolve(problem), problem, arguments)
        tensors, geometry = found
        key = (id(choice), *values, *map(type, values), *geometry)
        known = self._find(key, choice, describe_problem)
        kernel, config = resolve_known(known)
        replay = getattr(kernel, "replay", None)
        if replay is not None:
            result = replay(known, config, tensors, arguments)
            if result is not None:
                return result
        return _launch(kernel, config, known.problem, arguments)

    def _find(
        self, key: tuple[Any, ...], choice: object, describe_problem: Callable[[], Problem]
    ) -> Known:
        try:
            known = self._known.get(key)
        except TypeError:  # a choice without a hash, which passes no check
            return Known(describe_problem(), choice)
        if known is None:
            known = Known(describe_problem(), choice)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known


@without_grad
def _launch(kernel: KernelSpec, config: Any, problem: Problem, arguments: dict[str, Any]) -> Any:
    return kernel.launch(problem, config, **arguments)
