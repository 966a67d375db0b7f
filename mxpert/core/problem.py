"""Problem descriptors, options and configs of the ops.

Nothing here reads data or launches anything. Descriptors are frozen and hashable: they are keys of
tuned tables and caches. Every number in them is known on the host without a synchronisation.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from ..formats.names import ACTIVATION_FORMATS as ACTIVATION_FORMATS
from ..formats.names import FORMAT_OF as FORMAT_OF
from ..formats.names import SHORT_NAMES as SHORT_NAMES
from ..formats.names import WITH_FP8
from ..formats.names import ActivationFormat as ActivationFormat
from ..formats.names import OwnFormat as OwnFormat
from ..formats.names import activation_mx_format as activation_mx_format
from ..formats.names import parse_activation_format as parse_activation_format
from ..formats.spec import MXFormat, ScaleRule, ScaleSpan, ValueEnum
from ..formats.tensor import Layout
from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import GELU as GELU
from .activations import Activation as Activation
from .activations import ActivationLike as ActivationLike
from .activations import ClampedSiLU as ClampedSiLU
from .activations import ReLU2 as ReLU2
from .activations import SiLU as SiLU
from .activations import SiTUv2 as SiTUv2
from .activations import SwiGLU as SwiGLU
from .activations import activation_from as activation_from
from .activations import kernel_parameters as kernel_parameters
from .activations import parse_activation as parse_activation
from .activations import parse_gated_activation as parse_gated_activation
from .stage_configs import Config as Config
from .stage_configs import GemmConfig as GemmConfig
from .stage_configs import MoEConfig as MoEConfig
from .stage_configs import ReferenceConfig as ReferenceConfig
from .stage_configs import StageConfig as StageConfig
from .stage_configs import WeightCache as WeightCache


class Combine(ValueEnum):
    """How stage 2 turns the top-k rows of a token into one.

    REDUCE: one row per (token, slot), then a sum in slot order; the same bits in every run (the
        default).
    ATOMIC: any order of the sum: atomic additions into a zeroed [T, H] output, in an order that is
        not fixed. Kernels whose fixed order is as fast keep it; `explain` says so.
    FLAT: no sum: the sorted rows [P, H], for expert parallelism. `RoutingPlan.slot_rows` holds the
        row of each (token, slot); padding rows are undefined.

    Source:
        The two stage-2 epilogues of FlyDSL's MoE kernels (pull request 753).

    Example:
        >>> Combine("reduce") is Combine.REDUCE
        True
    """

    REDUCE = "reduce"
    ATOMIC = "atomic"
    FLAT = "flat"


CombineLike = Combine | Literal["reduce", "atomic", "flat"]
"""A Combine or its name."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Results of GEMMs. float64 is served by the reference backend alone, as an oracle."""


@dataclass(frozen=True)
class MoEOptions:
    """Every option that changes the numbers of an MoE layer, and the SMs that it may use.

    `activation` has no default, because torch.compile of torch 2.11 cannot build one.

    Args:
        num_sms: most SMs that a GEMM occupies; None is all of them. It changes no bit of a result.
    """

    activation: Activation
    activation_format: OwnFormat = "bf16"
    scale_rule: ScaleRule = ScaleRule.RCEIL
    apply_router_weight_on_input: bool = False
    combine: Combine = Combine.REDUCE
    out_dtype: torch.dtype = torch.bfloat16
    num_sms: int | None = None

    @property
    def mx_format(self) -> MXFormat | None:
        """The MX format of activations; None where ops exchange bfloat16."""
        return activation_mx_format(self.activation_format)


@dataclass(frozen=True)
class Target:
    """The device that a kernel is chosen for.

    Args:
        kind: "cuda", "hip" or "cpu".
        arch: "sm_100", "gfx942", … or "cpu".
        name: the driver's name of the device.
        num_sms: multiprocessors or compute units.
        shared_memory: bytes that one block may use.
        clock: highest clock of the multiprocessors in Hz; 0 where it is not known.
        bandwidth: bytes a second that memory can deliver by its clock and width; 0 likewise.
    """

    kind: str = field(hash=False)  # the name tells devices apart, and every call hashes one
    arch: str = field(hash=False)
    name: str
    num_sms: int = field(hash=False)
    shared_memory: int = field(hash=False)
    clock: float = field(default=0.0, hash=False)
    bandwidth: float = field(default=0.0, hash=False)

    @property
    def compute_capability(self) -> int:
        """100 for "sm_100"; of NVIDIA targets alone."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))


class Op(enum.Enum):
    """Operations that backends implement."""

    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    ROUTE_TOPK = "route_topk"
    ROUTING_PLAN = "make_routing_plan"
    MOE_GATE_UP = "moe_gate_up"
    MOE_DOWN = "moe_down"
    FUSED_MOE = "fused_moe"
    QUANTIZE_DUAL = "quantize_dual"
    GROUPED_GEMM = "grouped_gemm"
    GROUPED_WGRAD = "grouped_wgrad"
    ACTIVATE_ROWS = "activate_rows"
    ACTIVATE_ROWS_BACKWARD = "activate_rows_backward"
    COMBINE_ROWS = "combine_rows"
    COMBINE_ROWS_BACKWARD = "combine_rows_backward"


@dataclass(frozen=True)
class QuantizeProblem:
    """Quantise or dequantise one tensor: logical shape, axis, format, scale rule and span.

    stochastic: whether codes are rounded stochastically, by a seed among the inputs.
    """

    op: Op
    target: Target
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype
    format: MXFormat
    scale_rule: ScaleRule = ScaleRule.RCEIL
    scale_span: ScaleSpan = ScaleSpan.BLOCK
    stochastic: bool = False


class Scoring(ValueEnum):
    """How router logits become scores: by a softmax over experts, or from each logit alone.

    SOFTMAX: ``softmax(logits)``. SIGMOID: ``sigmoid(logit)``. SQRTSOFTPLUS:
    ``sqrt(softplus(logit))``, softplus(x) = log(1 + exp(x)).

    Source:
        Mixtral and gpt-oss (softmax), DeepSeek-V3 (sigmoid, arXiv 2412.19437), DeepSeek-V4
        (sqrtsoftplus).

    Example:
        >>> Scoring("sigmoid") is Scoring.SIGMOID
        True
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRTSOFTPLUS = "sqrtsoftplus"


class GroupScore(ValueEnum):
    """What stands for a group of experts when `route_topk` chooses groups.

    MAX: the highest score of its experts. TOP2: the sum of the two highest.

    Source:
        DeepSeek-V2 (MAX, arXiv 2405.04434), DeepSeek-V3 (TOP2, arXiv 2412.19437). vLLM's
        grouped_topk takes TOP2 with a correction bias and MAX without.

    Example:
        >>> GroupScore("max") is GroupScore.MAX
        True
    """

    MAX = "max"
    TOP2 = "top2"


GroupScoreLike = GroupScore | Literal["max", "top2"]
"""A GroupScore or its name."""


ScoringLike = Scoring | Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""A Scoring or its name."""


@dataclass(frozen=True)
class TopKOptions:
    """How `route_topk` chooses and weighs experts.

    Args:
        scoring: SOFTMAX, SIGMOID or SQRTSOFTPLUS, or its name.
        normalize: divide the chosen scores by their sum; with SOFTMAX this is the softmax over the
            chosen experts alone.
        num_groups: equal groups of experts; 1 means no groups.
        top_groups: groups that experts are chosen from, best first.
        routed_scaling_factor: multiplies the weights, after normalisation.
        group_score: what stands for a group; None is TOP2, which needs a correction bias.
        clamp_nan: count scores that are NaN or infinite as 0.

    Source:
        The options of `route_topk`, which checks them.

    Example:
        >>> TopKOptions(Scoring.SIGMOID, num_groups=8, top_groups=4).normalize  # DeepSeek-V3
        True
    """

    scoring: Scoring = Scoring.SOFTMAX
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling_factor: float = 1.0
    group_score: GroupScore | None = None
    clamp_nan: bool = False

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self,
            scoring: ScoringLike = ...,
            normalize: bool = ...,
            num_groups: int = ...,
            top_groups: int = ...,
            routed_scaling_factor: float = ...,
            group_score: GroupScoreLike | None = ...,
            clamp_nan: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.scoring, str):
            scoring = Scoring.parse(self.scoring, "TopKOptions", "scoring")
            object.__setattr__(self, "scoring", scoring)
        if isinstance(self.group_score, str):
            score = GroupScore.parse(self.group_score, "TopKOptions", "group_score")
            object.__setattr__(self, "group_score", score)


def compares_scores(options: TopKOptions, is_biased: bool) -> bool:
    """Whether experts are chosen by their scores; if not, by their logits, in the same order."""
    return options.num_groups > 1 or is_biased or options.scoring is Scoring.SIGMOID


def best_of_group(options: TopKOptions) -> int:
    """Number of experts, the best of a group, whose scores add up to the group's: 1 or 2."""
    return 1 if options.group_score is GroupScore.MAX else 2


@dataclass(frozen=True)
class TopKProblem:
    """route_topk for T tokens, top_k of E experts."""

    op: Op
    target: Target
    num_tokens: int
    top_k: int
    num_experts: int
    options: TopKOptions


@dataclass(frozen=True)
class RoutingProblem:
    """make_routing_plan for T tokens; ids range over `num_experts`, `num_local_experts` here."""

    op: Op
    target: Target
    num_tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int
    routing_block_m: int


@dataclass(frozen=True)
class MoEProblem:
    """One stage of an MoE layer, or the whole layer (op FUSED_MOE).

    Args:
        num_tokens: T.
        top_k: ids of a token.
        num_experts: experts of `weights`: those of this rank.
        routing_block_m: the plan's unit for a stage on its own (each stage's block_m must divide
            it), and 0 for the whole layer, which chooses its own.
        local_top_k: how many ids of a token name an expert of this rank, on average over tokens
            that spread evenly over all experts; None if all of them do.
        weight_format: name of the weights' format: "mxfp4", "mxfp8_e4m3", "nvfp4", "int4_g32", …
        routing: how the layer chooses experts from logits; None: it is given ids.
        num_routed: experts among which it chooses, those of all ranks; 0 where it is given ids.
    """

    op: Op
    target: Target = field(hash=False)
    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    options: MoEOptions = field(hash=False)
    weight_layout: Layout = field(hash=False)
    routing_block_m: int = 0
    local_top_k: float | None = None
    weight_format: str = field(default="mxfp4", hash=False)
    routing: TopKOptions | None = field(default=None, hash=False)
    num_routed: int = field(default=0, hash=False)

    @property
    def formats(self) -> str:
        """Short name of the operand formats, as tuned tables key them: "bf16xmxfp4".

        Weights with an FP8 copy have rows of their own: other kernels may read them.
        """
        copy = WITH_FP8 if self.weight_layout.has_fp8_codes else ""
        return f"{self.options.activation_format}x{self.weight_format}{copy}"

    @property
    def choice(self) -> TopKProblem | None:
        """How the layer chooses experts, as a problem of its own; None if it is given ids."""
        if self.routing is None:
            return None
        sizes = self.num_tokens, self.top_k, self.num_routed
        return TopKProblem(Op.ROUTE_TOPK, self.target, *sizes, self.routing)

    @property
    def num_sms(self) -> int | None:
        """Most SMs that a GEMM occupies; None is all of them."""
        return self.options.num_sms

    @property
    def routed_rows(self) -> float:
        """Rows of all experts of this rank if tokens spread evenly; configs follow them."""
        return self.num_tokens * (self.top_k if self.local_top_k is None else self.local_top_k)

    @property
    def hit_experts(self) -> int:
        """Number of experts that have rows if tokens spread evenly, at least 1."""
        return max(1, min(self.num_experts, math.ceil(self.routed_rows)))

    @property
    def rows_per_expert(self) -> float:
        """Average number of rows of an expert that has rows."""
        return self.routed_rows / self.hit_experts


@dataclass(frozen=True)
class DualProblem:
    """Quantise one tensor rowwise and columnwise in one read.

    Args:
        shape: [M, K], or [G, N, K] for weights.
        dtype: dtype of the tensor.
        format: the MXFP8 format of both copies.
        scale_rule: how scales follow from each block's maximum.
        num_groups: groups of rows, or G of the weights; 0 for [M, K] without groups.
        grouped_rows: whether `group_offsets` splits the rows of [M, K]; M is then any number,
            because each group of the columnwise copy is padded by itself.
        row_span: how many blocks share a scale in the rowwise copy.
        column_span: the same in the columnwise copy.
        stochastic: as in `QuantizeProblem`.
    """

    op: Op
    target: Target
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: MXFormat
    scale_rule: ScaleRule
    num_groups: int
    grouped_rows: bool
    row_span: ScaleSpan = ScaleSpan.BLOCK
    column_span: ScaleSpan = ScaleSpan.BLOCK
    stochastic: bool = False


@dataclass(frozen=True)
class GroupedProblem:
    """One grouped GEMM: GROUPED_GEMM (forward and dgrad) or GROUPED_WGRAD.

    GROUPED_GEMM: ``c [M, n] = a [M, k] @ b[g] [n, k].T``. GROUPED_WGRAD:
    ``out[g] [n, k] = grad_g [·, n].T @ a_g [·, k]``, summed over the rows of each group.

    Args:
        num_rows: M; for GROUPED_WGRAD with MX operands P, the columns of the columnwise copies.
        num_groups: G.
        n: as in the formulas above.
        k: as in the formulas above; for GROUPED_WGRAD a size of the output too.
        a_format: "bf16" or the name of the first operand's MX format (GROUPED_WGRAD: of grad).
        b_format: the same of the second operand (GROUPED_WGRAD: of a).
        trans_b: whether b is [G, n, k] and not [G, k, n]; False for GROUPED_WGRAD.
        out_dtype: dtype of the result.
        accumulate: add the result to a given float32 tensor.
        a_span: how many blocks share a scale in the first MX operand.
        b_span: the same in the second.
        num_sms: most SMs that the GEMM occupies; None is all of them.
    """

    op: Op
    target: Target
    num_rows: int
    num_groups: int
    n: int
    k: int
    a_format: str
    b_format: str
    trans_b: bool
    out_dtype: torch.dtype
    accumulate: bool = False
    a_span: ScaleSpan = ScaleSpan.BLOCK
    b_span: ScaleSpan = ScaleSpan.BLOCK
    num_sms: int | None = None

    @property
    def formats(self) -> str:
        """Short name of the operand formats: "mxfp8_e5m2xmxfp8_e4m3"."""
        return f"{self.a_format}x{self.b_format}"


def leaves_sms(problem: MoEProblem | GroupedProblem) -> bool:
    """Whether a GEMM has to leave some of the device's SMs to other work."""
    return problem.num_sms is not None and problem.num_sms != problem.target.num_sms


def resident_programs(problem: MoEProblem | GroupedProblem, per_sm: int = 1) -> int:
    """Number of programs of a persistent grid.

    Args:
        per_sm: how many programs an SM holds. They spread over all SMs before an SM gets a second
            one, so a grid that leaves SMs to other work has one for each SM that it may occupy.
    """
    limit = problem.num_sms
    if limit is not None and leaves_sms(problem):
        return limit
    return per_sm * problem.target.num_sms


@dataclass(frozen=True)
class RowsProblem:
    """One pass over the rows between the grouped GEMMs of training, forward or backward.

    ACTIVATE_ROWS: [R, 2F] → [R, F]. COMBINE_ROWS: [R, H] → [T, H], the sum of each token's rows.

    Args:
        num_rows: R.
        width: F for ACTIVATE_ROWS, H for COMBINE_ROWS.
        dtype: dtype of the rows.
        top_k: rows of a token, for COMBINE_ROWS.
        activation: for ACTIVATE_ROWS.
    """

    op: Op
    target: Target
    num_rows: int
    width: int
    dtype: torch.dtype
    top_k: int = 1
    activation: Activation | None = None


Problem = (
    QuantizeProblem
    | TopKProblem
    | RoutingProblem
    | MoEProblem
    | DualProblem
    | GroupedProblem
    | RowsProblem
)
