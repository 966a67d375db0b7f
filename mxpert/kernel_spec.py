"""The interface between dispatch and the kernels of a backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from .errors import UnsupportedError, message
from .problem import Op, Problem


class Launchable(Protocol):
    """What can be started, and replayed (`mxpert.runtime.replay`).

    It may have ``resident``: tensors that it uses in every call, beside the arguments.
    """

    def launch(self, problem: Any, config: Any, *_: Any, **arguments: Any) -> Any:
        """Run it: allocates outputs, enqueues work on the current stream, returns the result."""


class KernelSpec(Launchable, Protocol):
    """One kernel of one backend: what it can do, how it would do it, and how to start it.

    Arguments of `launch` after (problem, config), all keyword-only, by operation:
        quantize: x → MXTensor. dequantize: tensor → Tensor of problem.dtype.
        route_topk: logits, correction_bias (or None) → (topk_weights, topk_ids).
        make_routing_plan: topk_weights, topk_ids, expert_map, num_local_tokens (or None)
            → RoutingPlan.
        moe_gate_up: x (Tensor or MXTensor [T, H]), weights, plan → Tensor or MXTensor [P, F].
        moe_down: h (Tensor or MXTensor [P, F]), weights, plan → [T, H] ([P, H] for FLAT).
        fused_moe: x, weights, topk_weights, topk_ids, expert_map, num_local_tokens, and out where
            the caller has one → [T, H], or `out`. Where other ranks send the tokens also arrivals
            (or None), which the sort waits for.
        quantize_dual: x (any strides), group_offsets (or None) → (row, col), two MXTensors.
        grouped_gemm: a, b (bf16 Tensors or MXTensors, any strides), group_offsets → [M, n].
        grouped_wgrad: grad, a (as above), group_offsets, accumulate_into (or None) → [G, n, k];
            `accumulate_into` itself where it is given.
        activate_rows: gate_up → [R, F]. activate_rows_backward: grad, gate_up → [R, 2F].
        combine_rows: rows, row_ids, weights (or None), out_dtype → [T, H].
        combine_rows_backward: grad, rows, row_ids, weights → ([R, H], float32 [T, top_k]).
    `group_offsets` holds int32 or int64 [G + 1]; `mxpert.routing.group_bounds` makes it safe.
    """

    op: Op
    backend: str

    def unsupported(self, problem: Any) -> str | None:
        """Why this kernel cannot serve `problem`, as a phrase; None if it can."""

    def configs(self, problem: Any) -> Iterable[Any]:
        """Valid configurations for a tuner, the heuristic's choice among them."""

    def heuristic(self, problem: Any) -> Any:
        """The configuration used where no tuned row answers."""

    # A kernel may also have ``slower(problem) -> str``: why it serves this problem more slowly than
    # others like it, with the remedy, as a phrase after the op's name; "" if it does not. A kernel
    # of QUANTIZE_DUAL whose results are not contiguous has ``empty(like, shape, format) ->
    # MXTensor``, which allocates one.


def refuse(problem: Problem, reasons: Iterable[str]) -> UnsupportedError:
    """The error for a problem that no kernel can serve."""
    return UnsupportedError(
        message(
            problem.op.value,
            "backend",
            "a kernel for this problem",
            "; ".join(reasons),
            f"target is {problem.target.name}",
        )
    )
