"""explain(): which kernel an op would use for these arguments, with which config, and why."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

import torch

from .core.describe import describe
from .core.files import short
from .core.ops import OPS
from .core.registry import Explanation, explain_problem
from .errors import message
from .formats.tensor import MXTensor
from .routing import op as route  # noqa: F401  (they fill OPS)
from .routing.plan import RoutingPlan

_P = ParamSpec("_P")


def explain(op: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Explanation:
    """Say which backend and config `op(*args, **kwargs)` would run with, and why.

    Nothing is launched or sent. `override()` blocks are honoured. With `expert_parallel` the answer
    is about this rank's local layer, and the transport.

    Args:
        op: a public op, for example mxpert.fused_moe.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        An Explanation. Print it, or read `.resolution` and `.rejected`.

    Raises:
        ValueError: `op` is not an op of this library; and whatever `op` itself would raise.

    Example:
        >>> import torch, mxpert
        >>> print(mxpert.explain(mxpert.quantize, torch.zeros(1, 32), "mxfp4").resolution.source)
        heuristic
    """
    if not _is_public_op(op):
        names = sorted(name for name, spec in OPS.items() if spec.is_public)
        got, remedy = short(op), ""
        if isinstance(op, torch.Tensor | MXTensor | RoutingPlan | tuple):
            got = f"a {type(op).__name__}, which may be an op's result"
            remedy = "pass the op and its arguments: mxpert.explain(mxpert.fused_moe, x, …)"
        raise ValueError(message("explain", "op", f"one of {names}", got, remedy))
    try:
        given = inspect.signature(op).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            message("explain", "arguments", f"those of {op.__name__}", f"others: {error}")
        ) from None
    explanation = explain_problem(describe(op, *args, **kwargs))
    rounding = getattr(given.get("weights"), "rounding_certificates", None)
    if rounding is not None:
        explanation = replace(explanation, weights="; ".join(map(str, rounding)))
    ranks = given.get("expert_parallel")
    return explanation if ranks is None else replace(explanation, transport=ranks.explain())


def _is_public_op(op: object) -> bool:
    """Whether `op` is the public function of an entry of OPS."""
    name, module = getattr(op, "__name__", None), sys.modules.get(getattr(op, "__module__", ""))
    return (
        isinstance(name, str)
        and name in OPS
        and OPS[name].is_public
        and getattr(module, name, None) is op
    )
