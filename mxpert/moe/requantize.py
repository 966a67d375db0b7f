"""New weights in the memory of prepared ones: what a trainer sends to a model that serves."""

from __future__ import annotations

import torch

from ..errors import Checks
from ..formats.folding import FoldCertificate, fold_certificate
from ..formats.gate_up import GateUpOrder
from ..formats.layouts import WeightLayout
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, MXFP4, ScaleRule
from ..formats.tensor import TENSOR_FIELDS, Layout, MXTensor
from ..formats.weight_tensor import (
    AnyWeightFormat,
    WeightFormat,
    WeightLike,
    WeightTensor,
    parse_weight_format,
)
from ..quantize.op import quantize
from .prepared_weights import prepared_rows
from .stacked import quantize_experts
from .weights import MoEWeights
from .weights_state import PROJECTIONS

_CODES = 1 << 28
"""Weights that are quantised at once."""


def requantize_(
    weights: MoEWeights,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    gate_up_order: GateUpOrder | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
) -> None:
    """Quantise dense weights into the memory of prepared ones; CUDA graphs of these stay valid.

    The bits are those of ``quantize_weights(…, weight_format=weights.weight_format).prepare(…)``.
    Beside the dense weights it needs memory for one quantised layer. For the weights of a trainer,
    layer by layer.

    Args:
        weights: in any format and layout, written in place; INT4 without zero points.
        gate_up_proj: bfloat16, float16 or float32 [E, 2F, H], or [E, F, H] where `weights` have no
            gate, on the device of `weights`.
        down_proj: the same dtypes, [E, H, F]; of INT4 both in the dtype of the scales.
        gate_up_order: of the rows of `gate_up_proj`; None is the order before `prepare`.
        gate_up_bias: [E, 2F] in that order; needed where `weights` has one. down_bias: [E, H].
        scale_rule: how a block's scale follows from its maximum, in MXFP4 and MXFP8.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, device or order; weights that the layout
            cannot hold, such as rows that span too much; INT4 with zero points, which no quantiser
            makes. `weights` is then as it was.

    Example:
        >>> import torch, mxpert
        >>> from mxpert.modules import quantize_weights, requantize_
        >>> order = mxpert.GateUpOrder.CONCATENATED
        >>> first = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
        >>> weights = quantize_weights(*first, gate_up_order=order).prepare(device="cpu")
        >>> requantize_(weights, torch.ones(4, 64, 32), torch.ones(4, 32, 32))
        >>> weights.down_proj.dequantize().unique()
        tensor([1.])
    """
    need = Checks("requantize_")
    if not isinstance(weights, MoEWeights):
        raise need.type_error("weights", "MoEWeights", type(weights).__name__)
    if not isinstance(scale_rule, ScaleRule):
        raise need.type_error("scale_rule", "a ScaleRule", repr(scale_rule))
    experts, hidden, inner = weights.num_experts, weights.hidden_size, weights.intermediate_size
    for name, tensor, shape in (
        ("gate_up_proj", gate_up_proj, tuple(weights.gate_up_proj.shape)),
        ("down_proj", down_proj, (experts, hidden, inner)),
    ):
        need.tensor(tensor, name, dtype=FLOAT_DTYPES, shape=shape, device=weights.device)
    biases = []
    for name, bias, held, width in (
        ("gate_up_bias", gate_up_bias, weights.gate_up_bias, weights.gate_up_proj.shape[1]),
        ("down_bias", down_bias, weights.down_bias, hidden),
    ):
        wanted, got = ("None" if each is None else "a tensor" for each in (held, bias))
        need(wanted == got, name, wanted, got)
        if bias is not None:
            need.tensor(bias, name, dtype=FLOAT_DTYPES, shape=(experts, width))
            bias = bias.detach().to(weights.device, torch.float32).contiguous()
        biases.append(bias)
    order = gate_up_order or weights.source_order or weights.gate_up_order
    for name, dense in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        _require_own_kind(getattr(weights, name), name, dense, need)
    format = parse_weight_format(weights.weight_format, need.op)
    gate_up, down = (_quantized(each, format, scale_rule) for each in (gate_up_proj, down_proj))
    new = MoEWeights(gate_up, down, biases[0], biases[1], gate_up_order=order)
    replace_(weights, new, need)


def _require_own_kind(held: WeightLike, name: str, dense: torch.Tensor, need: Checks) -> None:
    """Raise a ValueError for INT4 weights that no quantiser makes of `dense`."""
    if not (isinstance(held, WeightTensor) and held.format.is_integer):
        return
    zeros = held.zero_point is not None or held.scale.dtype is torch.int32  # both in a word
    remedy = "weights of mxpert.quantize_weights have none"
    need(not zeros, f"weights.{name}", "INT4 without zero points", "zero points", remedy)
    dtype, remedy = held.scale.dtype, "convert the dense weights to it"
    need(dense.dtype == dtype, f"{name}.dtype", f"{dtype}, as the scales", dense.dtype, remedy)


def _quantized(weight: torch.Tensor, format: AnyWeightFormat, rule: ScaleRule) -> WeightLike:
    """[E, N, K] in the format, some experts at a time."""
    if isinstance(format, WeightFormat):
        return quantize_experts(weight, format, weight.device)
    experts, rows, depth = weight.shape
    step = max(1, _CODES // (rows * depth))
    shape = experts, rows, depth // format.codes_per_byte
    codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scale = codes.new_empty(experts, rows, depth // MX_BLOCK_SIZE)
    for first in range(0, experts, step):
        part = slice(first, first + step)
        found = quantize(weight.detach()[part].contiguous(), format, scale_rule=rule)
        codes[part], scale[part] = found.qdata, found.scale
    return MXTensor(codes, scale, format)


def replace_(weights: MoEWeights, new: MoEWeights, need: Checks) -> None:
    """Write the values of ROW_MAJOR weights into prepared ones of any layout, or raise before it.

    Args:
        new: of the same sizes and biases, on the device of `weights`, in memory of their own.
        need: checks of the calling function.
    """
    layout, assigned = weights.layout, new.gate_up_order
    if layout is Layout.ROW_MAJOR:
        order = weights.gate_up_order
        need(assigned is order, "gate_up_order", order, assigned)
    certificates: tuple[FoldCertificate, FoldCertificate] | None = None
    if new.weight_format == MXFP4.name:
        first, second = new.mx_projections
        certificates = fold_certificate(first), fold_certificate(second)
    rows, source = None, None
    if isinstance(layout, WeightLayout):
        assert assigned is not None  # for the type checker: packed weights have a gate
        _require_held(layout, new, certificates, need)
        rows, source = prepared_rows(layout, assigned, new.intermediate_size, new.device), assigned
        folds = certificates or (None, None)
        layout.pack(new.gate_up_proj, folds[0], rows, out=weights.gate_up_proj)
        layout.pack(new.down_proj, folds[1], out=weights.down_proj)
    else:
        for name in PROJECTIONS:
            held, found = getattr(weights, name), getattr(new, name)
            for field in TENSOR_FIELDS[type(held)]:
                if getattr(held, field) is not None:
                    getattr(held, field).copy_(getattr(found, field))
    if weights.gate_up_bias is not None and new.gate_up_bias is not None:
        bias = new.gate_up_bias
        weights.gate_up_bias.copy_(bias if rows is None else bias[:, rows])
    if weights.down_bias is not None and new.down_bias is not None:
        weights.down_bias.copy_(new.down_bias)
    known = None if weights.fold_certificates is None else certificates
    facts = dict(fold_certificates=known, source_order=source, rounding_certificates=None)
    weights.__dict__.update(facts)


def _require_held(
    layout: WeightLayout,
    new: MoEWeights,
    certificates: tuple[FoldCertificate, FoldCertificate] | None,
    need: Checks,
) -> None:
    """Raise a ValueError for weights that the layout cannot hold; of MXFP4 it names experts."""
    remedy = "prepare them as new weights"
    held = f"{layout.holds}, as the prepared layout holds them"
    if certificates is None:
        for name in PROJECTIONS:
            need(layout.can_hold(getattr(new, name)), name, held, "others", remedy)
        return
    outside = sum(each.blocks_outside for each in certificates)
    assert isinstance(outside, torch.Tensor)  # for the type checker
    experts = outside.nonzero().flatten().tolist()
    need(
        all(map(layout.fits, certificates)),
        "gate_up_proj, down_proj",
        held,
        f"others in experts {experts[:8]}",
        remedy,
    )
