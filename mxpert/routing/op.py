"""route_topk and make_routing_plan: from router logits to rows sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.ops import OpSpec
from ..core.problem import (
    GroupScore,
    GroupScoreLike,
    Op,
    RoutingProblem,
    Scoring,
    ScoringLike,
    TopKOptions,
    TopKProblem,
)
from ..core.target import detect_target
from ..errors import Checks
from ..formats.spec import FLOAT_DTYPES
from .inputs import PlanInputs, TopKInputs
from .plan import MAX_ROUTED_ROWS, MAX_TOP_K, RoutingPlan, plan_capacity, require_topk

TOP_K_LIMIT = f"at most {MAX_TOP_K} and the number of experts"
MAX_SORTED_ROWS = 1 << 30
"""Kernels step past the last row in int32 before they mask; this leaves them room."""


def route_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    scoring: ScoringLike = Scoring.SOFTMAX,
    num_groups: int = 1,
    top_groups: int = 1,
    correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    group_score: GroupScoreLike | None = None,
    clamp_nan: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for each token and compute their weights, in float32.

    ``score = softmax(logits)`` over all experts, ``sigmoid(logits)`` or ``sqrt(softplus(logits))``.
    The experts with the highest ``score + correction_bias`` are chosen; of equal ones the lower id
    comes first. The weights are the scores without the bias, divided by their sum if `normalize`
    (with SOFTMAX this is the softmax over the chosen logits; otherwise the divisor is ``sum +
    1e-20``), times `routed_scaling_factor`. Without groups and without bias, SOFTMAX and
    SQRTSOFTPLUS compare the logits themselves, because different logits can round to the same
    score.

    With ``num_groups > 1`` the experts are split into that many equal groups. Experts are chosen
    from the best `top_groups` groups only. The score of a group is the highest ``score +
    correction_bias`` of its experts ("max"), or the sum of the two highest ("top2").

    A NaN logit ranks as −inf, so that ids are always valid and distinct. Weights computed from a
    NaN are NaN, unless `clamp_nan`. The op has no gradient.

    Args:
        logits: float32, bfloat16 or float16 [T, E].
        top_k: experts per token, at most 127.
        normalize: divide the chosen scores by their sum.
        scoring: Scoring.SOFTMAX, SIGMOID or SQRTSOFTPLUS, or its name.
        num_groups: equal groups of at least two experts; 1 is no groups.
        top_groups: groups that compete; they must hold at least `top_k` experts.
        correction_bias: float32 [E], added for the choice only.
        routed_scaling_factor: a finite factor of the weights, applied after normalisation.
        group_score: GroupScore.MAX or TOP2, or its name. None is TOP2 with a correction bias;
            without one it has to be given, because DeepSeek-V2 and vLLM take "max" there.
        clamp_nan: count scores that are NaN or infinite as 0, as vLLM does: a row of NaN logits (as
            padding of CUDA graphs has) gets experts 0 … top_k − 1 with weight 0. With SOFTMAX one
            NaN or +inf logit makes all scores of its row such.

    Returns:
        topk_weights float32 [T, top_k] and topk_ids int32 [T, top_k], best expert first.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device, or more experts than the groups hold.

    Source:
        gpt-oss (softmax over the chosen), Mixtral (softmax, renormalised), DeepSeek-V2 (arXiv
        2405.04434: groups by their best expert), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2:
        sigmoid, groups by their best two, correction bias, scaling factor), DeepSeek-V4
        (sqrtsoftplus); clamping as vLLM's topk_softmax.

    Example:
        >>> import torch, mxpert
        >>> weights, ids = mxpert.route_topk(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), top_k=2)
        >>> ids.tolist(), weights.tolist()
        ([[1, 2]], [[0.5, 0.5]])
    """
    if group_score is not None:
        group_score = GroupScore.parse(group_score, "route_topk", "group_score")
    if not isinstance(scoring, Scoring):
        scoring = Scoring.parse(scoring, "route_topk", "scoring")
    choice = _TopKChoice(
        scoring,
        top_k,
        normalize,
        num_groups,
        top_groups,
        routed_scaling_factor,
        group_score,
        clamp_nan,
    )
    return _TOPK(choice, TopKInputs(logits, correction_bias))


def choose_experts(
    logits: torch.Tensor, top_k: int, options: TopKOptions, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_topk` with the options of a layer."""
    return route_topk(
        logits,
        top_k,
        normalize=options.normalize,
        scoring=options.scoring,
        num_groups=options.num_groups,
        top_groups=options.top_groups,
        correction_bias=correction_bias,
        routed_scaling_factor=options.routed_scaling_factor,
        group_score=options.group_score,
        clamp_nan=options.clamp_nan,
    )


def make_routing_plan(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    routing_block_m: int,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
) -> RoutingPlan:
    """Sort (token, slot) rows by expert and pad each expert to blocks of `routing_block_m` rows.

    See RoutingPlan for the layout. Its sizes depend on shapes only, and nothing is read back from
    the device.

    An id is ignored if it is negative, at least `num_experts`, or mapped to no local expert: it
    gets no row, and −1 in `slot_rows`. An id that appears twice in a token gets two rows.

    Args:
        topk_weights: float32, bfloat16 or float16 [T, top_k]; the plan has them in float32.
        topk_ids: int32 or int64 [T, top_k], global expert ids.
        num_experts: global ids range over 0 … num_experts − 1.
        routing_block_m: rows per block, a multiple of the block_m of each GEMM that uses the plan.
        expert_map: int32 [num_experts], global id → local id, or −1 if the expert lives elsewhere.
        num_local_experts: experts of this process; None means `num_experts`.
        num_local_tokens: int32 [1] on the device; tokens at or beyond it are ignored. None means T.

    Returns:
        RoutingPlan on the device of `topk_ids`; T = 0 gives a valid plan without rows.
        `num_valid[1]` is `num_local_tokens`, clamped to 0 … T.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or size.

    Source:
        The sorted, padded rows of vLLM's and SGLang's ``moe_align_block_size``, and of AITER's
        ``moe_sorting``.

    Example:
        >>> import torch, mxpert
        >>> ids = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
        >>> plan = mxpert.make_routing_plan(torch.ones(2, 2), ids, num_experts=3, routing_block_m=2)
        >>> plan.block_expert_ids.tolist(), plan.num_valid.tolist(), plan.slot_rows.tolist()
        ([0, 1, 2, -1], [6, 2], [[2, 0], [3, 4]])
        >>> [(row >> 24, row & 0xFFFFFF) for row in plan.sorted_token_ids.tolist()[:4]]
        [(1, 0), (2, 2), (0, 0), (0, 1)]
    """
    local = num_experts if num_local_experts is None else num_local_experts
    inputs = PlanInputs(topk_weights, topk_ids, expert_map, num_local_tokens)
    return _PLAN(PlanOptions(num_experts, local, routing_block_m), inputs)


def check_route_topk(
    logits: torch.Tensor,
    top_k: int,
    options: TopKOptions,
    correction_bias: torch.Tensor | None,
    op: str = "route_topk",
) -> None:
    """Argument checks of `route_topk`, and of layers that will call it."""
    need = Checks(op)
    need.tensor(logits, "logits", dtype=FLOAT_DTYPES, shape=(None, None))
    num_experts = logits.shape[1]
    _require_count(need, "top_k", top_k, min(MAX_TOP_K, num_experts), TOP_K_LIMIT)
    if not isinstance(options.scoring, Scoring):
        raise need.type_error(
            "scoring", "a Scoring", repr(options.scoring), "for example mxpert.Scoring.SIGMOID"
        )
    for name, value in (("normalize", options.normalize), ("clamp_nan", options.clamp_nan)):
        if not isinstance(value, bool):
            raise need.type_error(name, "a bool", repr(value))
    group_score = options.group_score
    if group_score is not None:
        group_score = GroupScore.parse(group_score, need.op, "group_score")
    need.number(options.routed_scaling_factor, "routed_scaling_factor")
    if not (_is_one(options.num_groups) and _is_one(options.top_groups)):
        _check_groups(need, num_experts, top_k, options.num_groups, options.top_groups)
        if group_score is None and correction_bias is None:
            need(
                options.top_groups == options.num_groups,
                "group_score",
                "'max' or 'top2' for groups without correction_bias",
                None,
                "DeepSeek-V2 and vLLM take 'max', DeepSeek-V3 'top2'",
            )
    if correction_bias is not None:
        need.tensor(
            correction_bias,
            "correction_bias",
            dtype=torch.float32,
            shape=(num_experts,),
            device=logits.device,
            contiguous=True,
        )


def _is_one(value: object) -> bool:
    is_integer = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    return is_integer and bool(value == 1)


def _check_groups(
    need: Checks, num_experts: int, top_k: int, num_groups: int, top_groups: int
) -> None:
    _require_count(
        need, "num_groups", num_groups, max(1, num_experts // 2), "groups of two or more experts"
    )
    need(
        num_experts % num_groups == 0,
        "num_groups",
        f"a divisor of the {num_experts} experts",
        num_groups,
    )
    _require_count(need, "top_groups", top_groups, num_groups, "num_groups")
    reachable = top_groups * (num_experts // num_groups)
    need(
        top_k <= reachable,
        "top_groups",
        f"groups that hold top_k = {top_k} experts together",
        top_groups,
        f"they hold {reachable}; choose more groups or fewer experts",
    )


class PlanOptions(NamedTuple):
    """Options of `make_routing_plan`."""

    num_experts: int
    num_local_experts: int
    routing_block_m: int

    def capacity(self, topk_ids: torch.Tensor) -> int:
        """Rows of the plan."""
        num_tokens, top_k = topk_ids.shape
        return plan_capacity(num_tokens, top_k, self.num_local_experts, self.routing_block_m)


def check_routing_plan(options: PlanOptions, inputs: PlanInputs) -> None:
    """Argument checks of `make_routing_plan`."""
    need, topk_ids, num_experts = Checks("make_routing_plan"), inputs.topk_ids, options.num_experts
    require_topk(inputs.topk_weights, topk_ids, need.op)
    num_tokens, top_k = topk_ids.shape
    for name, value in zip(options._fields, options, strict=True):
        _require_count(need, name, value, MAX_SORTED_ROWS, "rows of a plan")
    _require_count(need, "topk_ids.shape[1]", top_k, min(MAX_TOP_K, num_experts), TOP_K_LIMIT)
    if num_tokens * top_k >= MAX_ROUTED_ROWS:
        raise need.value_error(
            "topk_ids.shape",
            f"fewer than {MAX_ROUTED_ROWS} routed rows (T·top_k)",
            num_tokens * top_k,
            "split the tokens into smaller batches",
        )
    capacity = options.capacity(topk_ids)
    if capacity > MAX_SORTED_ROWS:
        raise need.value_error(
            "routing_block_m",
            f"at most {MAX_SORTED_ROWS} padded rows",
            capacity,
            f"use a smaller block than {options.routing_block_m}",
        )
    if inputs.expert_map is not None:
        need.tensor(
            inputs.expert_map,
            "expert_map",
            dtype=torch.int32,
            shape=(num_experts,),
            device=topk_ids.device,
            contiguous=True,
        )
    if inputs.num_local_tokens is not None:
        need.tensor(
            inputs.num_local_tokens,
            "num_local_tokens",
            dtype=torch.int32,
            shape=(1,),
            device=topk_ids.device,
        )


def _require_count(need: Checks, name: str, value: int, most: int, of: str) -> None:
    """Check that `value` is an int in 1 … `most`; the common case returns at once."""
    if type(value) is int and 1 <= value <= most:
        return
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise need.type_error(name, "an int", repr(value))
    need(1 <= value <= most, name, f"1 … {most} ({of})", value)


class _TopKChoice(NamedTuple):
    """Options of `route_topk`, in the order of the op's schema."""

    scoring: Scoring
    top_k: int
    normalize: bool
    num_groups: int
    top_groups: int
    routed_scaling_factor: float
    group_score: GroupScore | None
    clamp_nan: bool

    @property
    def options(self) -> TopKOptions:
        """All but `top_k`."""
        return TopKOptions(
            self.scoring,
            self.normalize,
            self.num_groups,
            self.top_groups,
            self.routed_scaling_factor,
            self.group_score,
            self.clamp_nan,
        )


def _check_topk(choice: _TopKChoice, inputs: TopKInputs) -> None:
    check_route_topk(inputs.logits, choice.top_k, choice.options, inputs.correction_bias)


def _topk_problem(choice: _TopKChoice, inputs: TopKInputs) -> TopKProblem:
    num_tokens, num_experts = inputs.logits.shape
    target = detect_target(inputs.logits.device)
    sizes = num_tokens, choice.top_k, num_experts
    return TopKProblem(Op.ROUTE_TOPK, target, *sizes, choice.options)


def _fake_topk(choice: _TopKChoice, inputs: TopKInputs) -> list[torch.Tensor]:
    shape, new = (inputs.logits.shape[0], choice.top_k), inputs.logits.new_empty
    return [new(shape, dtype=dtype) for dtype in (torch.float32, torch.int32)]


_TOPK: OpSpec[_TopKChoice, TopKInputs, tuple[torch.Tensor, torch.Tensor]] = OpSpec(
    "route_topk",
    check=_check_topk,
    describe=_topk_problem,
    fake=_fake_topk,
    returns="(Tensor, Tensor)",
)


def _plan_problem(options: PlanOptions, inputs: PlanInputs) -> RoutingProblem:
    target = detect_target(inputs.topk_ids.device)
    num_tokens, top_k = inputs.topk_ids.shape
    return RoutingProblem(Op.ROUTING_PLAN, target, num_tokens, top_k, *options)


def _fake_plan(options: PlanOptions, inputs: PlanInputs) -> list[torch.Tensor]:
    topk_ids, capacity = inputs.topk_ids, options.capacity(inputs.topk_ids)
    new = functools.partial(topk_ids.new_empty, dtype=torch.int32)
    return [
        new(capacity),
        topk_ids.new_empty(capacity, dtype=torch.float32),
        new(capacity // options.routing_block_m),
        new(2),
        new(topk_ids.shape),
    ]


def _build_plan(
    tensors: Sequence[torch.Tensor], options: PlanOptions, inputs: PlanInputs
) -> RoutingPlan:
    rows, row_weights, block_experts, num_valid, slot_rows = tensors
    num_tokens, top_k = inputs.topk_ids.shape
    return RoutingPlan(
        rows,
        row_weights,
        block_experts,
        num_valid,
        slot_rows,
        num_tokens,
        top_k,
        options.num_local_experts,
        options.routing_block_m,
    )


_PLAN: OpSpec[PlanOptions, PlanInputs, RoutingPlan] = OpSpec(
    "make_routing_plan",
    check=check_routing_plan,
    describe=_plan_problem,
    fake=_fake_plan,
    absent=("arrivals",),
    returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
    build=_build_plan,
)
