"""Host side of the layer for a few tokens: its memory between calls, and its launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...core.cuda_kernel import CudaKernel
from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEProblem, Scoring, TopKOptions, best_of_group, kernel_parameters
from ...device.pdl import PDL_LAUNCH
from ...formats.layouts import UNIT_CODES
from ...formats.spec import MX_BLOCK_SIZE
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import WeightLike
from ..inputs import LayerInputs, LogitsInputs
from .encode import row_format
from .few_tokens_limits import (
    ACTIVATIONS,
    SLOTS,
    WARPS,
    group_lanes,
    lane_experts,
    num_ctas,
    num_teams,
    shared_bytes,
    sizes_of,
    tokens_of_launch,
    units_of,
)
from .group_layout import GroupWeights, described

_SUFFIXES = ("_device.cuh", "_weights.cuh", "_topk.cuh", ".cu")
_KERNEL = CudaKernel(
    [Path(__file__).with_name(f"few_tokens{suffix}") for suffix in _SUFFIXES],
    "_moe_few_tokens_kernel",
    "sm_90a",
    dict.fromkeys(("out", "codes1", "scales1", "codes2", "scales2"), "*u8")
    | dict.fromkeys(("rows1", "rows2", "bias1", "bias2", "x", "x_scale"), "*u8")
    | dict.fromkeys(("topk_ids", "topk_weights", "logits", "correction_bias"), "*u8")
    | dict.fromkeys(("expert_map",), "*u8")
    | dict.fromkeys(("launches", "published", "sums"), "*u8")
    | dict.fromkeys(("p0", "p1", "p2", "scaling_factor"), "fp32")
    | dict.fromkeys(("num_tokens", "num_global", "x_stride", "x_scale_stride"), "i32")
    | dict.fromkeys(("logits_stride",), "i32"),
)

# Numbers of the source's macros.
_ROWS = {"hi_lo": 0, "e4m3": 1, "e2m1": 2}
_CODES = {"int4": 1, "int4_zero": 2, "e2m1": 3, "e4m3": 4}
_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.SQRTSOFTPLUS: 2}
_TYPES = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_DEFAULT_PARAMETERS = {"p0": 0.0, "p1": 0.0, "p2": 1.0}
"""p2: beta of SwiGLU, where it is not given."""
_ROUTED = ("topk_ids", "topk_weights", "logits", "correction_bias")
"""Inputs of which a launch has the first two or the last two."""
_LOADED_BYTES = {"hi_lo": 8, "e4m3": 4, "e2m1": 2}
"""Of four values of x, which are loaded at once."""


class _Memory:
    """What launches on a device keep between calls: the launch numbers and the published words.

    A launch takes all SMs, so launches on two streams run one after the other and may share it.
    Graphs and recorded calls hold its addresses: it is never freed.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of all devices."""
        return [tensor for held in self._held.values() for each in held for tensor in each]

    def get(self, problem: MoEProblem, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """Launch numbers, int32 [CTAs], features and sums; None in a graph's capture.

        The first call for a size allocates, and waits until the memory is clear.
        """
        ctas, sizes = num_ctas(problem), _words(problem)
        held = self._held.setdefault((device, ctas), [])
        if not held or held[-1][1].numel() < sum(sizes):
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            size = max(sum(sizes), 2 * held[-1][1].numel() if held else 0)
            launches = torch.zeros(ctas, dtype=torch.int32, device=device)
            held.append((launches, torch.zeros(size, dtype=torch.int64, device=device)))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        launches, words = held[-1]
        return launches, words, words[sizes[0] :]


memory = _Memory()


def _words(problem: MoEProblem) -> tuple[int, int]:
    """Words of the features and of the sums of stage 2."""
    sizes = sizes_of(problem)
    features = SLOTS * sizes.pairs * units_of(problem)["depth_2"] * UNIT_CODES
    return features, num_teams(problem) * sizes.tokens * problem.hidden_size


@dataclass(frozen=True)
class _Routing:
    """How a launch learns which experts a token has.

    Args:
        num_global, is_mapped: experts that ids count, and whether a map says which are here.
        ids, weights: dtypes of ids and of their weights; None where logits are given.
        logits: their dtype. stride: elements between rows of logits.
        is_biased: whether a correction bias is added to scores.
    """

    num_global: int
    is_mapped: bool
    ids: torch.dtype | None = None
    weights: torch.dtype | None = None
    logits: torch.dtype | None = None
    stride: int = 0
    is_biased: bool = False

    @classmethod
    def of(cls, problem: MoEProblem, inputs: LayerInputs) -> _Routing:
        expert_map = inputs.expert_map
        num_global = problem.num_experts if expert_map is None else expert_map.shape[0]
        if isinstance(inputs, LogitsInputs):
            return cls(
                num_global,
                expert_map is not None,
                logits=inputs.logits.dtype,
                stride=inputs.logits.stride(0),
                is_biased=inputs.correction_bias is not None,
            )
        dtypes = inputs.topk_ids.dtype, inputs.topk_weights.dtype
        return cls(num_global, expert_map is not None, *dtypes)

    def macros(self, options: TopKOptions) -> dict[str, int]:
        """Those of the kernel that follow from these, and from how experts are chosen."""
        groups = options.num_groups
        return dict(
            IDS_64=int(self.ids == torch.int64),
            WEIGHTS=_TYPES[self.weights],
            MAPPED=int(self.is_mapped),
            LOGITS=_TYPES[self.logits],
            LANE_EXPERTS=1 if self.logits is None else lane_experts(self.num_global, groups),
            SCORING=_SCORINGS[options.scoring],
            NORMALIZE=int(options.normalize),
            BIASED=int(self.is_biased),
            CLAMP_NAN=int(options.clamp_nan),
            NUM_GROUPS=groups,
            TOP_GROUPS=options.top_groups,
            BEST_OF_GROUP=best_of_group(options),
            GROUP_LANES=group_lanes(groups),
        )


@dataclass(frozen=True)
class _Weights:
    """How a projection's weights are stored; by default MXFP4 with folded scales.

    Args:
        groups: what kernels know of weights with groups. scales: dtype of their scales, None for
            bytes, and for words with zero points.
    """

    groups: GroupWeights | None = None
    scales: torch.dtype | None = None

    @classmethod
    def of(cls, projection: WeightLike) -> _Weights:
        scales = projection.scale.dtype
        return cls(described(projection), scales if scales.is_floating_point else None)

    @property
    def macros(self) -> dict[str, int]:
        """Those of the kernel that follow from these."""
        if self.groups is None:
            return dict(CODES=0, GROUP=MX_BLOCK_SIZE, SCALES=0, ROW_FACTORS=0, EXPONENT=0)
        return dict(
            CODES=_CODES[self.groups.codes],
            GROUP=self.groups.group,
            SCALES=_TYPES[self.scales],
            ROW_FACTORS=int(self.groups.row_factors),
            EXPONENT=self.groups.exponent,
        )


def _row_terms(projection: WeightLike) -> torch.Tensor | None:
    """References of rows of folded MXFP4, or the float32 factors of rows that NVFP4 has."""
    return projection.reference if isinstance(projection, MXTensor) else projection.row_scale


_GIVEN_IDS = TopKOptions()
"""Where ids are given, nothing depends on how experts are chosen."""


@dataclass(frozen=True)
class _Operands:
    """What a launch depends on beside the problem.

    Args:
        rows: name of the rows' format: "hi_lo", "e4m3" or "e2m1". is_coded: whether x has MX codes.
        strides: of x and of its scales. routing: ids or logits.
        weights: of both projections. bias1, bias2, out: dtypes.
    """

    rows: str
    is_coded: bool
    strides: tuple[int, int]
    routing: _Routing
    weights: _Weights
    bias1: torch.dtype | None
    bias2: torch.dtype | None
    out: torch.dtype

    @property
    def macros(self) -> dict[str, int]:
        """Those of the kernel that follow from these."""
        return dict(
            ROWS=_ROWS[self.rows],
            X_CODED=int(self.is_coded),
            BIAS_1=_TYPES[self.bias1],
            BIAS_2=_TYPES[self.bias2],
            OUT=_TYPES[self.out],
            **self.weights.macros,
        )


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(problem: MoEProblem, num_stages: int, operands: _Operands) -> Launch:
    options, sizes, scale_rule = problem.options, sizes_of(problem), row_format(problem.options)
    given = {k: v for k, v in kernel_parameters(options.activation).items() if v is not None}
    routing = operands.routing
    topk = (problem.routing if routing.logits is not None else None) or _GIVEN_IDS
    return Launch(
        _KERNEL,
        (num_ctas(problem),),
        **{**_DEFAULT_PARAMETERS, **given},
        num_tokens=problem.num_tokens,
        num_global=routing.num_global,
        x_stride=operands.strides[0],
        x_scale_stride=operands.strides[1],
        logits_stride=routing.stride,
        scaling_factor=float(topk.routed_scaling_factor),
        CTAS=num_ctas(problem),
        HIDDEN_SIZE=problem.hidden_size,
        INTERMEDIATE_SIZE=problem.intermediate_size,
        TOP_K=problem.top_k,
        **{name.upper(): units for name, units in units_of(problem).items()},
        TOKENS=sizes.tokens,
        STAGES=num_stages,
        QUADS=sizes.quads,
        MAX_ITEMS=sizes.items,
        TABLE_BYTES=sizes.tables,
        EMAX=scale_rule.emax,
        THRESHOLD=scale_rule.threshold,
        ACTIVATION=ACTIVATIONS.index(options.activation.name),
        WEIGHT_FIRST=int(options.apply_router_weight_on_input),
        **operands.macros,
        **routing.macros(topk),
        num_warps=WARPS,
        shared=shared_bytes(problem, num_stages),
        launch_cooperative_grid=True,
        **PDL_LAUNCH,
    )


def few_tokens_layer(
    problem: MoEProblem, num_stages: int, inputs: LayerInputs
) -> torch.Tensor | None:
    """Return [T, H] in ``options.out_dtype``, or `out`.

    Logits have to be of a layer that `chooses_experts` accepts.

    Returns:
        None without memory, in a graph's capture (warm up before it), for rows of x whose sets of
        four values are not aligned, and for projections whose scales are not of one kind.
    """
    step = tokens_of_launch(problem)
    if problem.num_tokens == step:
        return _launched(problem, num_stages, inputs)
    out = _output(problem, inputs)
    for first in range(0, problem.num_tokens, step):
        rows = slice(first, min(first + step, problem.num_tokens))
        part = replace(problem, num_tokens=rows.stop - first)
        if _launched(part, num_stages, _of_rows(inputs, rows, out)) is None:
            return None
    return out


def _output(problem: MoEProblem, inputs: LayerInputs) -> torch.Tensor:
    """The tensor to write, [T, H]."""
    if inputs.out is not None:
        return inputs.out
    size = (problem.num_tokens, problem.hidden_size)
    return torch.empty(size, dtype=problem.options.out_dtype, device=inputs.weights.device)


def _of_rows(inputs: LayerInputs, rows: slice, out: torch.Tensor) -> LayerInputs:
    """The inputs of some of the tokens, whose results go to their rows of `out`."""
    if isinstance(inputs, LogitsInputs):
        return replace(inputs, x=inputs.x[rows], logits=inputs.logits[rows], out=out[rows])
    return replace(
        inputs,
        x=inputs.x[rows],
        topk_weights=inputs.topk_weights[rows],
        topk_ids=inputs.topk_ids[rows],
        out=out[rows],
    )


def _launched(problem: MoEProblem, num_stages: int, inputs: LayerInputs) -> torch.Tensor | None:
    """As `few_tokens_layer`, for the tokens of one launch."""
    x, weights = inputs.x, inputs.weights
    held = memory.get(problem, weights.device)
    first, second = weights.gate_up_proj, weights.down_proj
    stored = _Weights.of(first)
    if held is None or stored != _Weights.of(second):
        return None
    launches, published, sums = held
    if isinstance(x, MXTensor):
        data, x_scale = x.qdata, x.scale
        rows, strides = x.format.element.name, (data.stride(0), x_scale.stride(0))
        loaded = _LOADED_BYTES[rows]
    else:
        data, x_scale, rows, strides = x, None, row_format(problem.options).name, (x.stride(0), 0)
        loaded = _LOADED_BYTES["hi_lo"]
    if data.data_ptr() % loaded or strides[0] * data.element_size() % loaded:
        return None
    out = _output(problem, inputs)
    biases = weights.gate_up_bias, weights.down_bias
    bias1, bias2 = (None if bias is None else bias.dtype for bias in biases)
    routing = _Routing.of(problem, inputs)
    operands = _Operands(
        rows=rows,
        is_coded=x_scale is not None,
        strides=strides,
        routing=routing,
        weights=stored,
        bias1=bias1,
        bias2=bias2,
        out=out.dtype,
    )
    routed: dict[str, torch.Tensor | None] = dict.fromkeys(_ROUTED)
    if isinstance(inputs, LogitsInputs):
        routed |= dict(logits=inputs.logits, correction_bias=inputs.correction_bias)
    else:
        routed |= dict(topk_ids=inputs.topk_ids, topk_weights=inputs.topk_weights)
    _launch(problem, num_stages, operands)(
        out=out,
        codes1=first.qdata,
        scales1=first.scale,
        codes2=second.qdata,
        scales2=second.scale,
        rows1=_row_terms(first),
        rows2=_row_terms(second),
        bias1=biases[0],
        bias2=biases[1],
        x=data,
        x_scale=x_scale,
        **routed,
        expert_map=inputs.expert_map,
        launches=launches,
        published=published,
        sums=sums,
    )
    return out
