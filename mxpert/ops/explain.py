"""explain(): which kernel an op would use for these arguments, with which config, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..dispatch import Explanation, explain_problem
from ..errors import message
from ..problem import Problem
from .grouped_gemm import describe_grouped_gemm, describe_grouped_wgrad, grouped_gemm, grouped_wgrad
from .moe import (
    describe_down,
    describe_fused_moe,
    describe_gate_up,
    fused_moe,
    moe_down,
    moe_gate_up,
)
from .quantize import dequantize, describe_dequantize, describe_quantize, quantize
from .quantize_dual import describe_quantize_dual, quantize_dual
from .route import describe_route_topk, describe_routing_plan, make_routing_plan, route_topk

_DESCRIBERS: dict[Callable[..., Any], Callable[..., Problem]] = {
    fused_moe: describe_fused_moe,
    moe_gate_up: describe_gate_up,
    moe_down: describe_down,
    quantize: describe_quantize,
    dequantize: describe_dequantize,
    quantize_dual: describe_quantize_dual,
    grouped_gemm: describe_grouped_gemm,
    grouped_wgrad: describe_grouped_wgrad,
    route_topk: describe_route_topk,
    make_routing_plan: describe_routing_plan,
}


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend and config `op(*args, **kwargs)` would run with, and why.

    Nothing is launched. `override()` blocks are honoured.

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
    describe = _DESCRIBERS.get(op) if callable(op) else None
    if describe is None:
        names = sorted(known.__name__ for known in _DESCRIBERS)
        raise ValueError(message("explain", "op", f"one of {names}", repr(op)))
    try:
        inspect.signature(op).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            message("explain", "arguments", f"those of {op.__name__}", f"others: {error}")
        ) from None
    return explain_problem(describe(*args, **kwargs))
