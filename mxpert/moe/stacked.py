"""Quantise the stacked projections of a layer to MXFP4, a part at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..formats.spec import MX_BLOCK_SIZE, MXFP4, ScaleRule
from ..formats.tensor import MXTensor
from ..quantize.op import quantize

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Weights quantised at a time: temporaries that stay in a CPU's cache; few launches on a GPU."""


def quantize_stacked(
    weight: torch.Tensor,
    *,
    transposed: bool,
    scale_rule: ScaleRule,
    device: torch.device,
    experts: Sequence[int] | None = None,
) -> MXTensor:
    """Quantise stacked weights along their reduction, a part at a time.

    Args:
        weight: [E, N, K], or [E, K, N] if `transposed`.
        device: where to quantise and leave the result.
        experts: which ones, in the order of the result; None is all of them.

    Returns:
        MXFP4 [E, N, K], or as many as `experts` has.
    """
    rows = weight.detach().transpose(1, 2) if transposed else weight.detach()
    chosen = range(len(rows)) if experts is None else experts
    _, count, columns = rows.shape
    size = len(chosen), count
    qdata = torch.empty(*size, columns // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(*size, columns // MX_BLOCK_SIZE, dtype=torch.uint8, device=device)
    limit = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    step = max(1, limit // max(1, columns))
    for place, expert in enumerate(chosen):
        for start in range(0, count, step):
            part = rows[expert, start : start + step].to(device).contiguous()
            quantized = quantize(part, MXFP4, scale_rule=scale_rule)
            qdata[place, start : start + step] = quantized.qdata
            scale[place, start : start + step] = quantized.scale
    return MXTensor(qdata, scale, MXFP4)
