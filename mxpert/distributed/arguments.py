"""Checks of the arguments of ExpertParallel and of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import message, require, require_device, require_tensor
from ..formats.tensor import Layout, MXTensor
from ..routing.plan import require_topk
from .placement import Placement

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

OP = "ExpertParallel"


def check_tokens(
    op: str, ranks: ExpertParallel, x: object, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> None:
    """Check what `dispatch` gets; errors name `op`.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    if isinstance(x, MXTensor):
        _check_mx_rows(op, x, ranks.wire_format)
    else:
        require_tensor(x, op, "x", dtype=torch.bfloat16)
    assert isinstance(x, (torch.Tensor, MXTensor))  # checked by the lines above
    shape = x.shape
    if not (len(shape) == 2 and shape[1] == ranks.hidden_size):
        raise ValueError(message(op, "x.shape", f"[T, {ranks.hidden_size}]", list(shape)))
    require(x.device == ranks.device, op, "x.device", need=ranks.device, got=x.device)
    require_topk(topk_weights, topk_ids, op, num_tokens=shape[0], device=ranks.device)
    if topk_ids.shape[1] != ranks.top_k:
        raise ValueError(message(op, "topk_ids.shape[1]", ranks.top_k, topk_ids.shape[1]))
    if shape[0] > ranks.max_tokens:
        raise ValueError(
            message(
                op,
                "x.shape[0]",
                f"at most max_tokens = {ranks.max_tokens} tokens a rank",
                shape[0],
                "split the batch, or make ExpertParallel with a larger max_tokens",
            )
        )


def indexed(device: torch.device | str) -> torch.device:
    """The device that is named; "cuda" is the current GPU."""
    named = require_device(device, OP)
    require(named.type in ("cpu", "cuda"), OP, "device", need="a GPU or the CPU", got=named)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def checked_placement(placement: object, num_experts: int, size: int) -> Placement:
    """The placement, or a contiguous one for None; it must fit experts and ranks."""
    if placement is None:
        return Placement.contiguous(num_experts, size)
    if not isinstance(placement, Placement):
        need = "None or a Placement"
        raise TypeError(message(OP, "placement", need, type(placement).__name__))
    for name, have, want in (
        ("num_experts", placement.num_experts, num_experts),
        ("num_ranks", placement.num_ranks, size),
    ):
        require(have == want, OP, f"placement.{name}", need=want, got=have)
    return placement


def _check_mx_rows(op: str, x: MXTensor, wire_format: str) -> None:
    """Check that an MXTensor can travel as it is."""
    if wire_format != "mxfp8":
        remedy = "make ExpertParallel with wire_format='mxfp8'"
        raise ValueError(
            message(op, "x", "a bfloat16 tensor", f"an MXTensor {x.format.name}", remedy)
        )
    fits = x.format.name == "mxfp8_e4m3" and x.axis == -1 and x.layout is Layout.ROW_MAJOR
    if not (fits and x.qdata.is_contiguous() and x.scale.is_contiguous()):
        need = "a contiguous mxfp8_e4m3 MXTensor along the last axis"
        raise ValueError(
            message(op, "x", need, repr(x), "quantise with mxpert.quantize(x, 'mxfp8')")
        )
