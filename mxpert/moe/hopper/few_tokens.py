"""Host side of the layer for a few tokens: its memory between calls, and its launch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEProblem, kernel_parameters
from ...device.hopper import matrix_descriptor
from ...device.pdl import PDL_LAUNCH
from ...formats.layouts import UNIT_ROWS
from ...formats.spec import E2M1
from ...formats.tensor import MXTensor
from ..inputs import FusedMoEInputs
from .encode import RowFormat, RowSteps, row_format
from .few_tokens_kernel import _moe_few_tokens_kernel
from .few_tokens_split import REGISTERS, num_ctas, range_units, split_of, units_of


@functools.cache
def _matrix() -> dict[str, Any]:
    codes = matrix_descriptor(32, 128, torch.uint8)
    shifts = matrix_descriptor(8, 32, torch.uint8)
    return {"code1_desc": codes, "shift1_desc": shifts, "code2_desc": codes, "shift2_desc": shifts}


class _Memory:
    """What launches on a device keep between calls: the launch numbers and the published sums.

    A launch takes all CTAs that an SM holds, so launches on two streams run one after the other and
    may share it. Graphs and recorded calls hold its addresses: it is never freed.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of all devices."""
        return [tensor for held in self._held.values() for each in held for tensor in each]

    def get(self, problem: MoEProblem, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """Launch numbers, int32 [CTAs], and the sums of both stages; None in a graph's capture.

        The first call for a size allocates, and waits until the memory is clear.
        """
        ctas, sizes = num_ctas(problem), _sizes(problem)
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


def _sizes(problem: MoEProblem) -> tuple[int, int]:
    """Words of the published sums of both stages."""
    split, units = split_of(problem), units_of(problem)
    groups = -(-units["depth2"] // split.depth)
    first = split.parts * split.all_slots * units["rows1"] * UNIT_ROWS
    return first, 2 * groups * split.all_slots * units["rows2"] * UNIT_ROWS


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    problem: MoEProblem,
    num_stages: int,
    coded: str | None,
    strides: tuple[int, int],
    num_global: int,
) -> Launch:
    """The launch; coded: element format of MX rows, None for bfloat16. strides: of x and scales."""
    options, split = problem.options, split_of(problem)
    h_format = row_format(options)
    return Launch(
        _moe_few_tokens_kernel,
        (num_ctas(problem),),
        _matrix(),
        **kernel_parameters(options.activation),
        num_tokens=problem.num_tokens,
        top_k=problem.top_k,
        num_global=num_global,
        hidden=problem.hidden_size,
        features=problem.intermediate_size,
        **units_of(problem),
        x_stride=strides[0],
        x_scale_stride=strides[1],
        STAGES=num_stages,
        SPLIT=split,
        X_FORMAT=RowFormat(coded, coded=True) if coded else h_format,
        H_FORMAT=h_format,
        X_STEPS=RowSteps(range_units(problem, split), 4),
        H_STEPS=RowSteps(1, 4),
        ACTIVATION=options.activation.name,
        WEIGHT_FIRST=options.apply_router_weight_on_input,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_cooperative_grid=True,
        **PDL_LAUNCH,
    )


def few_tokens_layer(
    problem: MoEProblem, num_stages: int, inputs: FusedMoEInputs
) -> torch.Tensor | None:
    """Return [T, H] in ``options.out_dtype``, or `out`; None without memory, in a graph's capture.

    Warm up before a capture, so that the memory is there.
    """
    held = memory.get(problem, inputs.weights.device)
    if held is None:
        return None
    launches, parts, sums = held
    x, weights, expert_map = inputs.x, inputs.weights, inputs.expert_map
    if isinstance(x, MXTensor):
        element = x.format.element
        data = x.qdata if element is E2M1 else x.qdata.view(torch.float8_e4m3fn)
        x_scale, coded = x.scale, element.name
        strides = data.stride(0), x_scale.stride(0)
    else:
        data, x_scale, coded, strides = x, None, None, (x.stride(0), 0)
    num_global = problem.num_experts if expert_map is None else expert_map.shape[0]
    out = inputs.out
    if out is None:
        size = (problem.num_tokens, problem.hidden_size)
        out = torch.empty(size, dtype=problem.options.out_dtype, device=weights.device)
    first, second = weights.mx_projections
    _launch(problem, num_stages, coded, strides, num_global)(
        out=out,
        code1_desc=first.qdata,
        shift1_desc=first.scale,
        code2_desc=second.qdata,
        shift2_desc=second.scale,
        reference1=first.reference,
        reference2=second.reference,
        bias1=weights.gate_up_bias,
        bias2=weights.down_bias,
        x=data,
        x_scale=x_scale,
        topk_ids=inputs.topk_ids,
        topk_weights=inputs.topk_weights,
        expert_map=expert_map,
        launches=launches,
        parts=parts,
        sums=sums,
    )
    return out
