"""describe(): the problem that a call of an op would resolve, without a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

from torch.overrides import TorchFunctionMode

from ..errors import message
from .files import short
from .ops import OPS
from .problem import Problem

_P = ParamSpec("_P")


def describe(op: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Problem:
    """The problem that ``op(*args, **kwargs)`` resolves. Nothing is launched.

    A layer that first calls `route_topk`, for other ranks to know the ids, is described, not the
    choice.

    Raises:
        ValueError, TypeError: whatever `op` itself would raise.
    """
    try:
        with _StopBeforeLaunch(getattr(op, "__name__", "")):
            op(*args, **kwargs)
    except _DescribedError as described:
        return described.problem
    raise ValueError(message("describe", "op", "a function that calls an op", short(op)))


class _DescribedError(Exception):
    """Ends a call whose problem is known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


class _StopBeforeLaunch(TorchFunctionMode):
    """Observes ops, as a tracer does, and ends the call of the first one of this library.

    Args:
        asked: name of the function that calls it; `fused_moe_from_logits` may call `route_topk`.
    """

    def __init__(self, asked: str) -> None:
        super().__init__()
        self._passed = "route_topk" if asked == "fused_moe_from_logits" else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # what `func` returns
        namespace, _, name = str(func).partition(".")
        if namespace == "mxpert":
            spec = OPS[name.partition(".")[0]]
            if spec.name == self._passed:
                return spec.fake_of(args)
            raise _DescribedError(spec.problem_of(args))
        return func(*args, **(kwargs or {}))
