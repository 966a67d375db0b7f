"""The published layout of one layer's experts: tensor names, shapes, to and from MoEWeights.

gpt-oss publishes its MXFP4 experts this way, and so does everything that mxpert writes: blocks and
scales of each projection, biases, gate and up rows INTERLEAVED, the low nibble of a byte first.
Other formats have no such name in a published model: their tensors are named after the parts of
MXTensor and WeightTensor, ``gate_up_proj_qdata`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..core.problem import OUT_DTYPES
from ..errors import message, require, require_dtype, require_tensor
from ..formats.spec import MX_BLOCK_SIZE, MXFP4, MXFormat
from ..formats.tensor import Layout, MXTensor
from ..formats.weight_tensor import WeightLike, WeightTensor, parse_weight_format
from .weights import GateUpOrder, MoEWeights, interleaved_rows
from .weights_state import PROJECTIONS

PARTS = ("qdata", "scale", "zero_point", "row_scale")
"""Tensors of a projection in another format than MXFP4."""
BLOCK_BYTES = MX_BLOCK_SIZE // MXFP4.codes_per_byte
"""Bytes of one block's codes: the last dimension of ``*_blocks``."""


def published_shapes(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    has_bias: bool,
    has_gate: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Shape of each published tensor, by its name below ``experts.``.

    Experts without a gate have ``up_proj`` in the place of ``gate_up_proj``.

    Example:
        >>> published_shapes(4, 64, 32, has_bias=False)["gate_up_proj_blocks"]
        (4, 64, 2, 16)
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        (
            published_projections(has_gate)[0],
            intermediate_size * (2 if has_gate else 1),
            hidden_size,
        ),
        ("down_proj", hidden_size, intermediate_size),
    ):
        blocks = (num_experts, rows, columns // MX_BLOCK_SIZE)
        shapes |= {f"{name}_blocks": (*blocks, BLOCK_BYTES), f"{name}_scales": blocks}
        if has_bias:
            shapes[f"{name}_bias"] = (num_experts, rows)
    return shapes


def published_expert_tensors(
    weights: MoEWeights,
    *,
    dtype: torch.dtype = torch.bfloat16,
    op: str = "published_expert_tensors",
) -> dict[str, torch.Tensor]:
    """The published tensors of one layer's experts, in any weight format.

    Args:
        weights: ROW_MAJOR, in any gate/up order; rows and bias come out INTERLEAVED.
        dtype: dtype of the biases.
        op: name of the operation that error messages start with.

    Returns:
        ``gate_up_proj_blocks`` uint8 [E, 2F, H/32, 16], ``gate_up_proj_scales`` uint8 [E, 2F,
        H/32], the same for ``down_proj``, and ``*_bias`` where there are biases; contiguous.
        Without a gate ``up_proj_*`` [E, F, …] instead of ``gate_up_proj_*``. Of other formats than
        MXFP4 ``*_qdata`` and ``*_scale``, and ``*_zero_point``, ``*_row_scale`` where they are.
    """
    if not isinstance(weights, MoEWeights):
        raise TypeError(message(op, "weights", "MoEWeights", type(weights).__name__))
    require(
        weights.layout is Layout.ROW_MAJOR,
        op,
        "weights.layout",
        need=Layout.ROW_MAJOR,
        got=weights.layout,
        remedy="call weights.unprepare() first",
    )
    require_dtype(dtype, OUT_DTYPES, op)
    weights = _interleaved(weights)
    tensors: dict[str, torch.Tensor] = {}
    for name, projection, bias in (
        (published_projections(weights.has_gate)[0], weights.gate_up_proj, weights.gate_up_bias),
        ("down_proj", weights.down_proj, weights.down_bias),
    ):
        parts = {part: getattr(projection, part, None) for part in PARTS}
        if projection.format == MXFP4:
            scale = projection.scale.contiguous()
            blocks = projection.qdata.contiguous().view(*scale.shape, BLOCK_BYTES)
            parts = {"blocks": blocks, "scales": scale}
        tensors |= {
            f"{name}_{part}": tensor.contiguous()
            for part, tensor in parts.items()
            if tensor is not None
        }
        if bias is not None:
            tensors[f"{name}_bias"] = bias.to(dtype).contiguous()
    return tensors


def published_projections(has_gate: bool) -> tuple[str, str]:
    """Names of the published projections of stage 1 and stage 2."""
    return PROJECTIONS if has_gate else ("up_proj", "down_proj")


def expert_weights_from(
    tensors: Mapping[str, torch.Tensor], order: GateUpOrder | None, weight_format: str = MXFP4.name
) -> MoEWeights:
    """MoEWeights of published tensors: the same codes and scales, biases in float32.

    Args:
        tensors: by names below ``experts.``; biases may be absent.
        order: order of gate and up rows as stored; published checkpoints are INTERLEAVED. None:
            experts without a gate.
        weight_format: name of the format.

    Example:
        >>> tensors = {name: torch.zeros(shape, dtype=torch.uint8)
        ...            for name, shape in published_shapes(4, 64, 32, has_bias=False).items()}
        >>> expert_weights_from(tensors, GateUpOrder.INTERLEAVED).hidden_size
        64
    """
    op = "expert_weights_from"
    if not isinstance(tensors, Mapping):
        raise TypeError(message(op, "tensors", "tensors by name", type(tensors).__name__))
    first, _ = published_projections(order is not None)
    format = parse_weight_format(weight_format, op)
    wanted = {"blocks": 4, "scales": 3} if format == MXFP4 else {"qdata": 3, "scale": 3}
    for part, dims in wanted.items():
        for name in (f"{first}_{part}", f"down_proj_{part}"):
            dtype = None if part == "scale" else torch.uint8
            require_tensor(tensors.get(name), op, name, dtype=dtype, shape=(None,) * dims)
    for name in (f"{first}_bias", "down_proj_bias"):
        if tensors.get(name) is not None:
            require_tensor(tensors[name], op, name, shape=(None, None))

    def projection(name: str) -> WeightLike:
        if format == MXFP4:
            return MXTensor(tensors[f"{name}_blocks"].flatten(-2), tensors[f"{name}_scales"], MXFP4)
        parts = (tensors.get(f"{name}_{part}") for part in PARTS)
        qdata, scale, zero_point, row_scale = parts
        assert qdata is not None  # for the type checker: checked above
        assert scale is not None  # for the type checker: checked above
        if isinstance(format, MXFormat):
            return MXTensor(qdata, scale, format)
        return WeightTensor(qdata, scale, format, zero_point, row_scale)

    def bias(name: str) -> torch.Tensor | None:
        stored = tensors.get(f"{name}_bias")
        return None if stored is None else stored.to(torch.float32).contiguous()

    return MoEWeights(
        projection(first),
        projection("down_proj"),
        bias(first),
        bias("down_proj"),
        gate_up_order=order,
    )


def _interleaved(weights: MoEWeights) -> MoEWeights:
    """The same weights with rows in the order gate, up, gate, up."""
    if weights.gate_up_order in (GateUpOrder.INTERLEAVED, None):
        return weights
    assert weights.gate_up_order is not None  # for the type checker
    rows = interleaved_rows(weights.gate_up_order, weights.intermediate_size, weights.device)
    projection, bias = weights.gate_up_proj, weights.gate_up_bias
    return replace(
        weights,
        gate_up_proj=projection._mapped(lambda part: part[:, rows]),
        gate_up_bias=None if bias is None else bias[:, rows].contiguous(),
        gate_up_order=GateUpOrder.INTERLEAVED,
        fold_certificates=None,
    )


def mismatch(name: str, tensor: object, shape: tuple[int, ...]) -> str:
    """Torch's message for a tensor of the wrong size, or one for the wrong type; else nothing."""
    if not isinstance(tensor, torch.Tensor):
        return f"type mismatch for {name}: {type(tensor).__name__} is not a tensor."
    if tuple(tensor.shape) != shape:
        return (
            f"size mismatch for {name}: copying a param with shape {tensor.shape} from "
            f"checkpoint, the shape in current model is {torch.Size(shape)}."
        )
    fits = tensor.dtype == torch.uint8
    if name.endswith(("_bias", "_scale")):  # a scale may be a number or a byte
        fits = tensor.is_floating_point() or (fits and name.endswith("_scale"))
    return "" if fits else f"dtype mismatch for {name}: {tensor.dtype} is not the published dtype."
