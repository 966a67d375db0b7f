"""Quantise the dense experts of a layer, a part at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.ambient import isolated
from ..errors import require, require_device, require_tensor
from ..formats.gate_up import GateUpOrderLike
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, MXFP4, MXFormat, ScaleRule, ScaleRuleLike
from ..formats.tensor import MXTensor
from ..formats.weight_quantize import quantize_weight
from ..formats.weight_tensor import (
    WeightFormat,
    WeightFormatName,
    WeightTensor,
    parse_weight_format,
)
from ..quantize.op import quantize
from .weights import MoEWeights, parse_order

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Weights quantised at a time: temporaries that stay in a CPU's cache; few launches on a GPU."""


def quantize_stacked(
    weight: torch.Tensor,
    *,
    transposed: bool,
    scale_rule: ScaleRule,
    device: torch.device,
    experts: Sequence[int] | None = None,
    format: MXFormat = MXFP4,
) -> MXTensor:
    """Quantise stacked weights along their reduction, a part at a time.

    Args:
        weight: [E, N, K], or [E, K, N] if `transposed`.
        device: where to quantise and leave the result.
        experts: which ones, in the order of the result; None is all of them.
        format: of the result.

    Returns:
        An MXTensor [E, N, K], or as many as `experts` has.
    """
    rows = weight.detach().transpose(1, 2) if transposed else weight.detach()
    chosen = range(len(rows)) if experts is None else experts
    _, count, columns = rows.shape
    size = len(chosen), count
    qdata = torch.empty(*size, columns // format.codes_per_byte, dtype=torch.uint8, device=device)
    scale = torch.empty(*size, columns // MX_BLOCK_SIZE, dtype=torch.uint8, device=device)
    limit = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    step = max(1, limit // max(1, columns))
    for place, expert in enumerate(chosen):
        for start in range(0, count, step):
            part = rows[expert, start : start + step].to(device).contiguous()
            quantized = quantize(part, format, scale_rule=scale_rule)
            qdata[place, start : start + step] = quantized.qdata
            scale[place, start : start + step] = quantized.scale
    return MXTensor(qdata, scale, format)


def quantize_experts(
    weight: torch.Tensor,
    format: WeightFormat,
    device: torch.device,
    *,
    transposed: bool = False,
    experts: Sequence[int] | None = None,
) -> WeightTensor:
    """Quantise stacked weights to NVFP4 or INT4, an expert at a time; as `quantize_stacked`."""
    rows = weight.detach().transpose(1, 2) if transposed else weight.detach()
    chosen = range(len(rows)) if experts is None else experts
    parts = [quantize_weight(rows[each].to(device).contiguous(), format) for each in chosen]
    with isolated(device.type):  # autocast of a CPU stacks no float16 scales
        qdata, scale, zero_point, row_scale = (
            None
            if getattr(parts[0], name) is None
            else torch.stack([getattr(p, name) for p in parts])
            for name in ("qdata", "scale", "zero_point", "row_scale")
        )
    assert qdata is not None  # for the type checker
    assert scale is not None  # for the type checker
    return WeightTensor(qdata, scale, format, zero_point, row_scale)


def quantize_weights(
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    gate_up_order: GateUpOrderLike | None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    weight_format: WeightFormatName = "mxfp4",
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    device: torch.device | str | None = None,
) -> MoEWeights:
    """Quantise the dense experts of one layer.

    In MXFP4 and MXFP8 each projection becomes ``quantize(w, weight_format, axis=-1)``, a few rows
    at a time; in NVFP4 and INT4 `mxpert.formats.quantize_weight` of each expert.

    Args:
        gate_up_proj: bfloat16, float16 or float32 [E, 2F, H]; the up projection [E, F, H] of
            experts without a gate (ReLU2).
        down_proj: the same dtypes, [E, H, F].
        gate_up_order: how gate and up rows are arranged: "concatenated" (F gate rows, then F up
            rows), "interleaved" (gpt-oss) or "interleaved_16"; None without a gate.
        gate_up_bias: [E, 2F] in that order ([E, F] without a gate), or None. down_bias: [E, H], or
            None.
        weight_format: "mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g64" or "int4_g128".
        scale_rule: how a block's scale follows from its maximum, in MXFP4 and MXFP8.
        device: where the result goes; None is the device of `gate_up_proj`.

    Returns:
        MoEWeights, not prepared.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, format or device.

    Example:
        >>> quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
        ...                  gate_up_order="concatenated").num_experts
        4
    """
    op = "quantize_weights"
    scale_rule = ScaleRule.parse(scale_rule, op, "scale_rule")
    format = parse_weight_format(weight_format, op)
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        require_tensor(weight, op, name, dtype=FLOAT_DTYPES, shape=(None, None, None))
        require(weight.shape[0] > 0, op, f"{name}.shape[0]", need="at least one expert", got=0)
        require(
            weight.shape[-1] % MX_BLOCK_SIZE == 0,
            op,
            f"{name}.shape[-1]",
            need=f"a multiple of {MX_BLOCK_SIZE}",
            got=weight.shape[-1],
            remedy="there are no partial blocks; pad the layer first",
        )
    gate_up_order = parse_order(gate_up_order, gate_up_proj, down_proj, op)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            require_tensor(bias, op, name, dtype=FLOAT_DTYPES)
    target = gate_up_proj.device if device is None else require_device(device, op)
    gate_up, down = (
        quantize_stacked(
            weight, transposed=False, scale_rule=scale_rule, device=target, format=format
        )
        if isinstance(format, MXFormat)
        else quantize_experts(weight, format, target)
        for weight in (gate_up_proj, down_proj)
    )
    biases = [
        None if bias is None else bias.detach().to(target, torch.float32).contiguous()
        for bias in (gate_up_bias, down_bias)
    ]
    return MoEWeights(gate_up, down, biases[0], biases[1], gate_up_order=gate_up_order)
