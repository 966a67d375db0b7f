"""From the parameters that an engine loaded to prepared weights, and back into the layer."""

from __future__ import annotations

import torch

from ...errors import message
from ...formats.spec import E8M0_NAN, MX_BLOCK_SIZE, MXFP4, MXFP8_E4M3
from ...formats.tensor import Layout, MXTensor
from ...formats.weight_rounding import WeightRounding
from ...formats.weight_tensor import WeightLike
from ...moe.weights import GateUpOrder, MoEWeights
from ..checkpoints.rounded import rounded
from .stored_layers import StoredLayer

_PACKED = "_packed"  # suffix of compressed-tensors' parameters
_WORD_NAN = 0x7FC0_0000
"""NaN as HOPPER_GROUPS has a scale in one word with its zero point."""


def prepare_layer(
    layer: torch.nn.Module,
    order: GateUpOrder,
    previous: MoEWeights | None,
    *,
    op: str,
    bias_suffix: str = "_bias",
    columns: int | None = None,
    stored: StoredLayer | None = None,
    weight_rounding: WeightRounding | None = None,
    keep_fp8: bool = False,
) -> MoEWeights:
    """Prepare a layer's loaded weights; the prepared tensors become its parameters.

    Weights of a reload are copied into `previous`, so that captured CUDA graphs stay valid.

    Args:
        layer: routed experts with uint8 w13_weight [E, 2F, H/2] of MXFP4 or e4m3 [E, 2F, H] of
            MXFP8, w13_weight_scale [E, 2F, H/32], w2_weight [E, H, F/2] or [E, H, F],
            w2_weight_scale [E, H, F/32], and maybe biases; or with the parameters of `stored`.
        order: the order of the rows of w13.
        previous: the weights of an earlier call, or None.
        op: what a message starts with. bias_suffix: after "w13" and "w2", the biases' names.
        columns: of F, those that a checkpoint fills; the others become zeros. None is all.
        stored: how experts in another form are read, which have no biases; their parameters go
            before others come.
        weight_rounding: as `mxpert.load_expert_weights` takes it.
        keep_fp8: as `MoEWeights.prepare` takes it.

    Returns:
        The layer's MoEWeights, prepared for the device of its parameters.

    Raises:
        ValueError: reloaded weights that do not fit the layout of the previous ones; `keep_fp8` for
            weights or a device without such a copy.
    """
    try:
        weights = _loaded(layer, order, bias_suffix, stored)
        if columns is not None and columns < weights.intermediate_size:
            clear_padding(weights, columns)
        weights = rounded(weights, weight_rounding)
        if previous is None:
            prepared = _prepared_first(weights, keep_fp8, op)
        else:  # whose layout says whether there are copies
            prepared = weights.prepare(device=weights.device, layout=previous.layout)
    except ValueError as error:
        if previous is None:
            raise
        raise does_not_fit(op, previous.layout, error) from None
    if previous is not None:
        previous.load_state_dict(prepared.state_dict())
        prepared = previous
    _install(layer, prepared, bias_suffix)
    return prepared


def _prepared_first(weights: MoEWeights, keep_fp8: bool, op: str) -> MoEWeights:
    """Prepared for their device; an error starts with `op`, which users search a log for."""
    try:
        return weights.prepare(device=weights.device, keep_fp8=keep_fp8)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def _loaded(
    layer: torch.nn.Module, order: GateUpOrder, bias_suffix: str, stored: StoredLayer | None
) -> MoEWeights:
    """The weights in a layer's parameters; those of `stored` are copied, and let go."""
    if stored is not None:
        gate_up, down = stored.read(layer)
        for name in stored.names:
            delattr(layer, name)
        return MoEWeights(gate_up, down, gate_up_order=order)
    return MoEWeights(
        _projection(layer, "w13"),
        _projection(layer, "w2"),
        gate_up_bias=_bias(layer, f"w13{bias_suffix}"),
        down_bias=_bias(layer, f"w2{bias_suffix}"),
        gate_up_order=order,
    )


def does_not_fit(op: str, layout: Layout, error: ValueError) -> ValueError:
    """The error for new weights that the layout of the loaded ones cannot hold."""
    need = f"weights that fit the layout {layout.name} of the loaded ones"
    remedy = "restart the server with them"
    return ValueError(message(op, "reloaded weights", need, f"others: {error}", remedy))


def columns_of_rank(share: int, padded: int, tp_size: int, tp_rank: int) -> int:
    """Columns of the intermediate size that a rank's part of the checkpoint has.

    Loaders cut between MX blocks: `padded` columns on the first ranks, what is left on the next.

    Args:
        share: the size over the ranks. padded: `share`, rounded up to whole blocks.
    """
    return max(0, min(padded, share * tp_size - tp_rank * padded))


def clear_padding(weights: MoEWeights, columns: int) -> None:
    """Zero what no checkpoint fills: a rank's columns of the intermediate size from `columns` on.

    An engine may hand over uninitialised memory there, whose scales can be NaN.

    Args:
        weights: ROW_MAJOR, written in place. columns: of F, those that are the model's.
    """
    inner, interleaved = weights.intermediate_size, weights.gate_up_order is GateUpOrder.INTERLEAVED
    index = torch.arange(2 * inner, device=weights.device)
    padding = (index // 2 if interleaved else index % inner) >= columns
    for rows in (weights.gate_up_proj.qdata, weights.gate_up_proj.scale, weights.gate_up_bias):
        if rows is not None:
            rows[:, padding] = 0
    codes, scale = weights.down_proj.qdata, weights.down_proj.scale
    codes[..., columns // weights.down_proj.format.codes_per_byte :] = 0
    scale[..., -(-columns // MX_BLOCK_SIZE) :] = 0


def poison(weights: MoEWeights) -> None:
    """Make a layer compute NaN or Inf, in captured CUDA graphs too, until new weights are loaded.

    A reload that is refused half-way leaves layers of two models: no result of theirs may look
    right. HOPPER_FRAGMENT has no NaN; its largest row factors, 2^122, overflow.
    """
    for projection in (weights.gate_up_proj, weights.down_proj):
        _poison_projection(projection)
    for bias in (weights.gate_up_bias, weights.down_bias):
        if bias is not None:
            bias.fill_(float("nan"))


def _poison_projection(projection: WeightLike) -> None:
    scale = projection.scale
    if isinstance(projection, MXTensor):
        (scale if projection.reference is None else projection.reference).fill_(E8M0_NAN)
    elif projection.row_scale is not None:
        projection.row_scale.fill_(float("nan"))
    elif scale.dtype is torch.int32:
        scale.fill_(_WORD_NAN)
    else:
        scale.fill_(float("nan"))


def count_unfolded(weights: MoEWeights) -> int:
    """Number of experts with a block that does not fold into e4m3 exactly."""
    if weights.fold_certificates is None:
        return 0
    gate_up, down = (each.blocks_outside for each in weights.fold_certificates)
    return int((gate_up + down > 0).sum())


def _projection(layer: torch.nn.Module, name: str) -> MXTensor:
    codes = getattr(layer, f"{name}_weight{_PACKED}", None)
    if codes is None:
        codes = getattr(layer, f"{name}_weight")
    format = MXFP8_E4M3 if codes.dtype is torch.float8_e4m3fn else MXFP4
    return MXTensor(
        codes.data.view(torch.uint8), getattr(layer, f"{name}_weight_scale").data, format
    )


def _bias(layer: torch.nn.Module, name: str) -> torch.Tensor | None:
    bias = getattr(layer, name, None)
    return None if bias is None else bias.data.float().contiguous()


def _install(layer: torch.nn.Module, weights: MoEWeights, bias_suffix: str) -> None:
    """Replace the layer's parameters; engines read the number of experts from their first size.

    Small ones that nothing is computed with stay: an engine may load them when it has all others.
    """
    for name in ("w13_weight", "w2_weight"):
        if hasattr(layer, f"{name}{_PACKED}"):
            delattr(layer, f"{name}{_PACKED}")
    tensors = {
        "w13_weight": weights.gate_up_proj.qdata,
        "w13_weight_scale": weights.gate_up_proj.scale,
        f"w13{bias_suffix}": weights.gate_up_bias,
        "w2_weight": weights.down_proj.qdata,
        "w2_weight_scale": weights.down_proj.scale,
        f"w2{bias_suffix}": weights.down_bias,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
