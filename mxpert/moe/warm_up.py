"""warm_up(): compile every kernel that a server will meet, before the first request."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..core.describe import describe
from ..core.problem import ActivationFormat, ActivationLike, MoEProblem, Problem, TopKOptions
from ..core.registry import Explanation, explain_problem
from ..errors import message, require, require_dtype, require_int, require_tensor
from ..formats.spec import FLOAT_DTYPES
from ..routing.plan import TOPK_ID_DTYPES
from .from_logits import fused_moe_from_logits
from .op import fused_moe
from .warm_up_ranks import compile_alone, errors_reach_all, exchanged_counts, run_together
from .weights import MoEWeights

if TYPE_CHECKING:
    from ..distributed import ExpertParallel

Progress = Callable[[int, int, int], object]
"""Called with (finished token counts, all of them, the next one) and at the end."""

_SHOWN_EVERY = 5.0
"""Seconds between two lines of progress."""

_DENSE, _STEPS = 256, 64
"""Every token count up to _DENSE is looked at, then _STEPS in each doubling."""

_logger = logging.getLogger("mxpert")


def warm_up(
    weights: MoEWeights,
    max_tokens: int,
    *,
    top_k: int,
    activation: ActivationLike,
    activation_format: ActivationFormat = "bf16",
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    topk_weights_dtype: torch.dtype = torch.float32,
    topk_ids_dtype: torch.dtype = torch.int32,
    router_logits_dtype: torch.dtype | None = None,
    routing: TopKOptions = TopKOptions(),
    correction_bias: torch.Tensor | None = None,
    expert_parallel: ExpertParallel | None = None,
    progress: Progress | None = None,
) -> tuple[int, ...]:
    """Compile the kernels that a layer launches for 1 to `max_tokens` tokens.

    The layer runs once for each kernel and config that `explain` names in that range, and once for
    each power of two, because the kernels that sort and quantise rows change with the number of
    tokens too. It is `fused_moe`, or with `router_logits_dtype` `fused_moe_from_logits`. Layers of
    one shape share their kernels: warm up one of them. Triton stores binaries on disk, so the next
    process is quick.

    With `expert_parallel` every rank calls it, with the same options, and calls with 0 tokens are
    covered too. A rank first compiles without waiting for the others, for as long as that takes.
    Then the ranks run the layer together, and return together. The kernels depend on
    ``ep.max_tokens``: warm up each view of ``ep.with_max_tokens(n)`` that will be used.

    Args:
        weights: prepared MoEWeights, on the device that will serve them; with `expert_parallel`
            this rank's experts.
        max_tokens: the largest number of tokens of a call, of one rank.
        top_k: experts per token.
        activation, activation_format, apply_router_weight_on_input, expert_map, expert_parallel: as
            for `fused_moe`.
        topk_weights_dtype, topk_ids_dtype: dtypes of the calls' routing weights and expert ids.
        router_logits_dtype: dtype of the logits of calls of `fused_moe_from_logits` and mxpert.MoE;
            None warms up `fused_moe`.
        routing, correction_bias: as for `fused_moe_from_logits`, with `router_logits_dtype` alone.
        progress: called as ``progress(done, total, num_tokens)`` before each run and at the end.
            None logs a warning of the logger "mxpert" every five seconds.

    Returns:
        The token counts that ran, ascending. On the reference backend, which compiles nothing,
        nothing runs and the tuple is empty.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `max_tokens` or `top_k` out of range; other values or an error on another rank.
        UnsupportedError: no backend serves the layer.
        PeerLostError: a rank died or did not arrive in time.

    Source:
        The warm-up of CUDA-graph capture sizes in vLLM and SGLang.

    Example:
        >>> import torch, mxpert
        >>> from mxpert.distributed import ExpertParallel
        >>> w = lambda *s: mxpert.quantize(torch.randn(*s), "mxfp4")
        >>> weights = mxpert.MoEWeights(w(4, 64, 32), w(4, 32, 32),
        ...                             gate_up_order=mxpert.GateUpOrder.INTERLEAVED)
        >>> weights = weights.prepare(device="cuda" if torch.cuda.is_available() else "cpu")
        >>> counts = mxpert.warm_up(weights, 64, top_k=2, activation=mxpert.SiLU())
        >>> counts if weights.device.type == "cpu" else ()
        ()
        >>> ep = ExpertParallel(num_experts=4, top_k=2, hidden_size=32, max_tokens=64)
        >>> for view in (ep, ep.with_max_tokens(1)):
        ...     counts = mxpert.warm_up(weights, view.max_tokens, top_k=2,
        ...                             activation=mxpert.SiLU(), expert_parallel=view)
    """
    options = dict(
        activation=activation,
        activation_format=activation_format,
        apply_router_weight_on_input=apply_router_weight_on_input,
        expert_map=expert_map,
        expert_parallel=expert_parallel,
    )
    dtypes = topk_weights_dtype, topk_ids_dtype
    layer = _WarmUp(weights, top_k, dtypes, options)
    if router_logits_dtype is not None:
        chosen = dict(routing=routing, correction_bias=correction_bias)
        layer = _FromLogits(weights, top_k, dtypes, options | chosen, router_logits_dtype)
    elif routing != TopKOptions() or correction_bias is not None:
        need, got = "a dtype with routing or correction_bias", None
        raise ValueError(message("warm_up", "router_logits_dtype", need, got))
    report = _log_slow_progress() if progress is None else progress
    if expert_parallel is not None:
        return _on_ranks(layer, expert_parallel, max_tokens, report)
    return _on_one(layer, max_tokens, report)


@dataclass(frozen=True)
class _WarmUp:
    """A layer, and what its calls have in common.

    Args:
        dtypes: of routing weights and ids.
        options: of `fused_moe`, or of `fused_moe_from_logits`.
    """

    weights: MoEWeights
    top_k: int
    dtypes: tuple[torch.dtype, torch.dtype]
    options: dict[str, Any]  # Any: each option has its own type

    def problem(self, max_tokens: object) -> MoEProblem:
        """Check all arguments; return the problem of the local layer."""
        self._check(max_tokens)
        problem = explain_problem(self._describe()).problem
        assert isinstance(problem, MoEProblem)  # for the type checker: the problem of a layer
        return problem

    def run(self, num_tokens: int) -> None:
        """Run the layer, and wait for it."""
        self._launch(num_tokens)
        if self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)

    def _describe(self) -> Problem:
        return describe(fused_moe, *self._batch(1), **self.options)

    def _launch(self, num_tokens: int) -> None:
        fused_moe(*self._batch(num_tokens), **self.options)

    def _batch(
        self, num_tokens: int
    ) -> tuple[torch.Tensor, MoEWeights, torch.Tensor, torch.Tensor]:
        """X, weights, topk_weights and topk_ids."""
        topk_weights, topk_ids = self._even(num_tokens)
        routed = topk_weights.to(self.dtypes[0]), topk_ids.to(self.dtypes[1])
        return self._x(num_tokens), self.weights, *routed

    def _x(self, num_tokens: int) -> torch.Tensor:
        shape, device = (num_tokens, self.weights.hidden_size), self.weights.device
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def _even(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return even_routing(num_tokens, self.top_k, self._num_global_ids, self.weights.device)

    @property
    def _num_global_ids(self) -> int:
        ranks, expert_map = self.options["expert_parallel"], self.options["expert_map"]
        if ranks is not None:
            return int(ranks.placement.num_experts)
        return int(self.weights.num_experts if expert_map is None else expert_map.shape[0])

    def _check(self, max_tokens: object) -> None:
        """Check what `fused_moe` does not see."""
        op, weights, expert_map = "warm_up", self.weights, self.options["expert_map"]
        if not isinstance(weights, MoEWeights):
            got = type(weights).__name__
            raise TypeError(message(op, "weights", "MoEWeights", got, "see mxpert.MoEWeights"))
        require_int(max_tokens, op, "max_tokens", least=1)
        require_int(self.top_k, op, "top_k", least=1)
        if expert_map is not None:
            device = weights.device
            require_tensor(
                expert_map, op, "expert_map", dtype=torch.int32, shape=(None,), device=device
            )
        most = self._num_global_ids
        require(self.top_k <= most, op, "top_k", need=f"at most {most}", got=self.top_k)
        require_dtype(self.dtypes[0], FLOAT_DTYPES, op, "topk_weights_dtype")
        require_dtype(self.dtypes[1], TOPK_ID_DTYPES, op, "topk_ids_dtype")


@dataclass(frozen=True)
class _FromLogits(_WarmUp):
    """A layer that chooses its experts from logits.

    Args:
        logits_dtype: dtype of the logits.
    """

    logits_dtype: torch.dtype

    def _describe(self) -> Problem:
        return describe(fused_moe_from_logits, *self._tokens(1), **self.options)

    def _launch(self, num_tokens: int) -> None:
        fused_moe_from_logits(*self._tokens(num_tokens), **self.options)

    def _tokens(self, num_tokens: int) -> tuple[torch.Tensor, MoEWeights, torch.Tensor, int]:
        """X, weights, logits that use the experts in turn, and top_k."""
        shape, device = (num_tokens, self._num_global_ids), self.weights.device
        logits = torch.zeros(shape, dtype=self.logits_dtype, device=device)
        logits.scatter_(1, self._even(num_tokens)[1].long(), 1)
        return self._x(num_tokens), self.weights, logits, self.top_k

    def _check(self, max_tokens: object) -> None:
        super()._check(max_tokens)
        require_dtype(self.logits_dtype, FLOAT_DTYPES, "warm_up", "router_logits_dtype")


def _on_one(layer: _WarmUp, max_tokens: int, report: Progress) -> tuple[int, ...]:
    """Run the layer of one rank; returns the token counts that ran."""
    counts = _token_counts(layer.problem(max_tokens), max_tokens)
    for done, num_tokens in enumerate(counts):
        report(done, len(counts), num_tokens)
        layer.run(num_tokens)
    if counts:
        report(len(counts), len(counts), counts[-1])
    return counts


def _on_ranks(
    layer: _WarmUp, ranks: ExpertParallel, max_tokens: int, report: Progress
) -> tuple[int, ...]:
    """Compile on each rank, then run the layer on all; returns the token counts that ran."""
    alone: tuple[int, ...] = ()
    with errors_reach_all(ranks):
        problem = layer.problem(max_tokens)
        slots, transport = ranks.max_tokens, ranks.transport.name
        need = f"at most {slots}, the slots of expert_parallel"
        require(max_tokens <= slots, "warm_up", "max_tokens", need=need, got=max_tokens)
        counts = exchanged_counts(max_tokens)
        compiles = transport == "SYMMETRIC" or _choice(explain_problem(problem))[0] != "reference"
        if transport == "SYMMETRIC":
            alone = counts
        elif transport == "ALL_TO_ALL":  # as many rows as arrive
            alone = (0, *_token_counts(problem, ranks.size * slots))
        else:
            alone = (ranks.size * slots,)
    names = "max_tokens", "slots a rank", "activation_format", "dtypes", "compiles"
    values = max_tokens, slots, layer.options["activation_format"], layer.dtypes, compiles
    ranks.agree({f"warm_up: {name}": value for name, value in zip(names, values, strict=True)})
    if not compiles:
        return ()
    total, done = len(alone) + len(counts), itertools.count()

    def step(num_tokens: int) -> None:
        report(next(done), total, num_tokens)

    with errors_reach_all(ranks):
        compile_alone(ranks, layer.weights, problem, layer.run, counts, alone, step)
    ranks.agree({})  # every rank has compiled
    run_together(ranks, layer.run, counts, step)
    step(counts[-1])
    return counts


def even_routing(
    num_tokens: int, top_k: int, num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_weights and topk_ids [T, top_k] that use the experts in turn."""
    slots = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device)
    topk_ids = (slots % num_experts).view(num_tokens, top_k)
    return torch.full(topk_ids.shape, 1 / top_k, dtype=torch.float32, device=device), topk_ids


def _token_counts(problem: MoEProblem, max_tokens: int) -> tuple[int, ...]:
    """Token counts whose launches together use every binary of 1 … max_tokens tokens."""
    counts = {max_tokens, *(1 << n for n in range(max_tokens.bit_length()))}
    seen = set()
    compiles = False
    for num_tokens in _sampled(max_tokens):
        choice = _choice(explain_problem(replace(problem, num_tokens=num_tokens)))
        compiles = compiles or choice[0] != "reference"
        if choice not in seen:
            seen.add(choice)
            counts.add(num_tokens)
    return tuple(sorted(counts)) if compiles else ()


def _choice(explanation: Explanation) -> tuple[str, object]:
    return explanation.resolution.kernel.backend, explanation.resolution.config


def _sampled(max_tokens: int) -> Iterator[int]:
    """Token counts at which the choice is looked at, dense where configs change often."""
    num_tokens = 1
    while num_tokens <= max_tokens:
        yield num_tokens
        num_tokens += 1 if num_tokens < _DENSE else (1 << num_tokens.bit_length() - 1) // _STEPS
    yield max_tokens


def _log_slow_progress() -> Progress:
    shown = time.monotonic()

    def report(done: int, total: int, num_tokens: int) -> None:
        nonlocal shown
        if done < total and time.monotonic() - shown >= _SHOWN_EVERY:
            shown = time.monotonic()
            _logger.warning("warm_up: %d of %d token counts, T = %d", done, total, num_tokens)

    return report
