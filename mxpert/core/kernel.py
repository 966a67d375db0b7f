"""The interface between dispatch and the kernels of a backend."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, cast, dataclass_transform

from ..errors import UnsupportedError, message
from .problem import Config, Op, Problem, ReferenceConfig

_T = TypeVar("_T")
ProblemT = TypeVar("ProblemT", contravariant=True)
ConfigT = TypeVar("ConfigT")
_LaunchedT = TypeVar("_LaunchedT", contravariant=True)
InputsT = TypeVar("InputsT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)


@dataclass_transform(frozen_default=True)
def op_inputs(cls: type[_T]) -> type[_T]:
    """Make a dataclass of an op's tensors, with one field for each.

    It is frozen for type checkers alone: `frozen=True` would take 0.7 µs of every warm call.
    """
    return dataclass(eq=False, slots=True)(cls)


def values_of(cls: type[_T]) -> Callable[[_T], tuple[object, ...]]:
    """Return a function that takes the fields' values out of inputs of this type, in order."""
    names = [field.name for field in fields(cast("Any", cls))]
    take = operator.attrgetter(*names)
    return take if len(names) > 1 else lambda inputs: (take(inputs),)


class Launchable(Protocol[ProblemT, _LaunchedT, InputsT, ResultT]):
    """What can be started, and replayed (`mxpert.core.replay`).

    It may have ``resident``: tensors that it uses in every call, beside the inputs.
    """

    def launch(self, problem: ProblemT, config: _LaunchedT, inputs: InputsT) -> ResultT:
        """Run it: allocates outputs, enqueues work on the current stream, returns the result."""


class KernelSpec(
    Launchable[ProblemT, ConfigT, InputsT, ResultT], Protocol[ProblemT, ConfigT, InputsT, ResultT]
):
    """One kernel of one backend: what it can do, how it would do it, and how to start it.

    `inputs.py` beside an op holds its inputs. Results of `launch`, by op:
        quantize: MXTensor. dequantize: Tensor of problem.dtype.
        route_topk: (topk_weights, topk_ids). make_routing_plan: RoutingPlan.
        moe_gate_up: Tensor or MXTensor [P, F]. moe_down: [T, H] ([P, H] for FLAT), or `out`.
        fused_moe: [T, H], or `out`.
        quantize_dual: (row, col), two MXTensors.
        grouped_gemm: [M, n]. grouped_wgrad: [G, n, k]; `accumulate_into` where it is given.
        activate_rows: [R, F]. activate_rows_backward: [R, 2F].
        combine_rows: [T, H]. combine_rows_backward: ([R, H], float32 [T, top_k]).
    """

    @property
    def op(self) -> Op: ...

    @property
    def backend(self) -> str: ...

    def unsupported(self, problem: ProblemT) -> str | None:
        """Why this kernel cannot serve `problem`, as a phrase; None if it can."""

    def configs(self, problem: ProblemT) -> Iterable[ConfigT]:
        """Valid configurations for a tuner, the heuristic's choice among them."""

    def heuristic(self, problem: ProblemT) -> ConfigT:
        """The configuration used where no tuned row answers."""

    # A kernel of GEMMs whose grid may be persistent has ``persistent(problem, config) -> config |
    # str``: a config that computes the same bits with a grid of any number of programs, or why it
    # has none, as a phrase after the backend's name. Dispatch asks it where a call has `num_sms`.
    #
    # A kernel may also have ``slower(problem) -> str``: why it serves this problem more slowly than
    # others like it, with the remedy, as a phrase after the op's name; "" if it does not. A kernel
    # of QUANTIZE_DUAL whose results are not contiguous has ``empty(like, shape, format) ->
    # MXTensor``, which allocates one.


AnyKernel = KernelSpec[Any, Any, Any, Any]
"""A kernel of the registry, which holds those of all ops. The op that asks knows the types."""


NO_PERSISTENT_GRID = "has no persistent grid to keep to num_sms; drop num_sms"
"""Why a kernel refuses `num_sms`, as a phrase after its backend's name."""


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


# ---- Base class of the kernels that have nothing to tune.


class UntunedKernel:
    """A `KernelSpec` whose only config is None."""

    op: Op
    backend = "triton"

    def configs(self, problem: Problem) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: Problem) -> Config:
        return None


# ---- Base classes of the reference kernels.


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
