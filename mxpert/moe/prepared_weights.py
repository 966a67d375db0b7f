"""Weights in the layout that a device's fastest kernels read: there and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core.backend import layouts_for
from ..core.target import detect_target
from ..errors import message, require
from ..formats.folding import FoldCertificate, fold_certificate
from ..formats.gate_up import GateUpOrder, interleaved_rows
from ..formats.layouts import WeightLayout
from ..formats.spec import MXFP4
from ..formats.tensor import Layout, LayoutLike
from .weights_state import PROJECTIONS

if TYPE_CHECKING:
    from .weights import MoEWeights


def prepare(
    weights: MoEWeights, device: torch.device, layout: LayoutLike | None, keep_fp8: bool
) -> MoEWeights:
    """`MoEWeights.prepare`."""
    op = "prepare"
    _require_bool(keep_fp8, op, "keep_fp8")
    check_holds_data(device, op, "device", "load the weights first")
    if layout is not None:
        layout = Layout.parse(layout, op, "layout", "None chooses")
    plain, remedy = Layout.ROW_MAJOR, "call unprepare() first"
    held = weights.layout
    require(held is plain, op, "weights.layout", need=plain, got=held, remedy=remedy)
    dense = {name: getattr(weights, name)._mapped(torch.Tensor.contiguous) for name in PROJECTIONS}
    moved = replace(weights, **dense).to(device)
    if weights.weight_format != MXFP4.name:
        need, got, remedy = "False for other formats than MXFP4", weights.weight_format, "omit it"
        require(not keep_fp8, op, "keep_fp8", need=need, got=got, remedy=remedy)
        return _prepare_other(moved, layout, op)
    gate_up, down = moved.mx_projections
    certificates = fold_certificate(gate_up), fold_certificate(down)
    if layout is None:
        arch = detect_target(moved.device).arch
        layout = fastest_layout(arch, certificates) if weights.has_gate else plain
    need, got = "ROW_MAJOR for experts without a gate", layout.name
    require(weights.has_gate or layout is plain, op, "layout", need=need, got=got)
    if keep_fp8:
        layout = _with_fp8(layout, moved.device, certificates)
    moved = replace(moved, fold_certificates=certificates)
    return _pack(moved, layout, certificates) if isinstance(layout, WeightLayout) else moved


def check_keep_fp8(
    keep_fp8: object, activation_format: str, op: str, argument: str = "keep_fp8"
) -> None:
    """Refuse an FP8 copy that no kernel would read; `prepare` refuses weights and devices.

    Args:
        keep_fp8: as `prepare` takes it. activation_format: its own name.
        op, argument: what the message starts with.

    Raises:
        TypeError: `keep_fp8` is no bool.
        ValueError: a copy beside bfloat16 activations.
    """
    _require_bool(keep_fp8, op, argument)
    need, got = "activations in 8 or 4 bits, whose GEMMs read the copy", repr(activation_format)
    remedy = "choose a8w4, a4w4 or a8w4-token, or omit it"
    fits = not keep_fp8 or activation_format != "bf16"
    require(fits, op, argument, need=need, got=got, remedy=remedy)


def _require_bool(keep_fp8: object, op: str, argument: str) -> None:
    if type(keep_fp8) is not bool:
        raise TypeError(message(op, argument, "a bool", repr(keep_fp8)))


def _with_fp8(
    layout: Layout, device: torch.device, certificates: Iterable[FoldCertificate]
) -> Layout:
    """The layout that keeps an FP8 copy beside what `layout` holds; ValueError if there is none."""
    if layout.has_fp8_codes:
        return layout
    found = layout.with_fp8 if isinstance(layout, WeightLayout) else None
    if found is None:
        outside = sum(certificate.total_outside for certificate in certificates)
        got = f"{layout.name} on {detect_target(device).arch}; {outside} blocks do not fold"
        need = "weights and a device with such a layout"
        raise ValueError(message("prepare", "keep_fp8", need, got, "prepare without it"))
    return found


def _prepare_other(weights: MoEWeights, layout: Layout | None, op: str) -> MoEWeights:
    """`prepare` of dense weights in another format than MXFP4, which no layout folds."""
    arch, format = detect_target(weights.device).arch, weights.weight_format

    def holds(candidate: Layout) -> bool:
        if not isinstance(candidate, WeightLayout):
            return True
        known = weights.has_gate and format in candidate.formats
        return known and all(candidate.can_hold(getattr(weights, name)) for name in PROJECTIONS)

    if layout is None:
        layout = next(each for each in layouts_for(arch, format) if holds(each))
    gate = "" if weights.has_gate else " without a gate"
    got, remedy = f"{format}{gate}", f"{layout.name} cannot hold these weights"
    require(holds(layout), op, "layout", need=f"ROW_MAJOR for {got}", got=layout, remedy=remedy)
    return _pack(weights, layout, (None, None)) if isinstance(layout, WeightLayout) else weights


def _pack(
    weights: MoEWeights,
    layout: WeightLayout,
    certificates: tuple[FoldCertificate | None, FoldCertificate | None],
) -> MoEWeights:
    order, gate_up, down = weights.gate_up_order, weights.gate_up_proj, weights.down_proj
    assert order is not None  # checked by `prepare`
    rows = prepared_rows(layout, order, weights.intermediate_size, weights.device)
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias[:, rows].contiguous()
    return replace(
        weights,
        gate_up_proj=layout.pack(gate_up, certificates[0], rows),
        down_proj=layout.pack(down, certificates[1]),
        gate_up_bias=bias,
        gate_up_order=layout.gate_up_order,
        source_order=order,
    )


def unprepare(weights: MoEWeights) -> MoEWeights:
    """`MoEWeights.unprepare`."""
    layout = weights.layout
    if not isinstance(layout, WeightLayout):
        return replace(weights, fold_certificates=None)
    gate_up, down = weights.gate_up_proj, weights.down_proj
    order = weights.source_order or layout.gate_up_order
    rows = prepared_rows(layout, order, weights.intermediate_size, weights.device)
    bias = weights.gate_up_bias
    if bias is not None:
        bias = torch.empty_like(bias).index_copy_(1, rows, bias)
    return replace(
        weights,
        gate_up_proj=layout.unpack(gate_up, rows),
        down_proj=layout.unpack(down),
        gate_up_bias=bias,
        gate_up_order=order,
        source_order=None,
        fold_certificates=None,
    )


def prepared_rows(
    layout: WeightLayout, order: GateUpOrder, intermediate_size: int, device: torch.device
) -> torch.Tensor:
    """Row indices [2F] that bring rows in `order` to the order of a prepared layout."""
    group = layout.gate_up_order.group(intermediate_size)
    return interleaved_rows(order, intermediate_size, device, group)


def fastest_layout(arch: str, certificates: Iterable[FoldCertificate]) -> Layout:
    """The layout that the fastest kernels of an architecture read, if it holds these weights."""
    return next(
        layout
        for layout in layouts_for(arch)
        if not isinstance(layout, WeightLayout) or all(map(layout.fits, certificates))
    )


def check_holds_data(device: torch.device, op: str, name: str, remedy: str) -> None:
    """Raise ValueError for the meta device."""
    need = "a device that holds data"
    require(device.type != "meta", op, name, need=need, got="'meta'", remedy=remedy)
