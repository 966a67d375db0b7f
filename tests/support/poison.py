"""Poisoned memory that kernels must not read, and planted errors that comparators must catch.

Poisoned storage: weights are views into larger storage whose other bytes decode to 6 · 2^127 or
NaN. Uninitialised memory is filled with NaN. Planted errors: transforms of a problem that imitate
real kernel bugs. A comparison with such a problem must fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mxpert.errors import message, require
from mxpert.formats import pack_codes
from mxpert.formats.layouts import UNIT_CODES, UNIT_ROWS, WeightLayout
from mxpert.formats.spec import E8M0_MAX, E8M0_NAN, MX_BLOCK_SIZE
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.formats.weight_tensor import WeightLike
from mxpert.moe.cdna4.layout import CDNA4_FRAGMENT
from mxpert.moe.hopper import layout as layouts
from mxpert.moe.hopper.group_layout import HOPPER_GROUPS, HOPPER_GROUPS_FLOAT16
from mxpert.moe.weights import MoEWeights, gate_up_rows
from mxpert.testing.problems import MoEInputs

E4M3_NAN = 0x7F
POISON_CODES = 0x77
"""Two e2m1 codes of 6: with scale byte 254 about 1e39, beyond the range of float32."""
POISONED_ROWS, POISONED_COLUMNS = 16, 128
"""After the last row of each matrix, and after each row."""


def poison_tensor(tensor: WeightLike, *, scale: int = E8M0_NAN) -> WeightLike:
    """Copy a tensor into larger storage that is poisoned outside the logical shape.

    Args:
        tensor: quantised along its last axis, at least two dimensions.
        scale: byte of the poisoned blocks: 255 (NaN) or 254 (2^127).
    """
    require(scale in (E8M0_NAN, E8M0_MAX), "poison_tensor", "scale", need="254 or 255", got=scale)
    is_mx = isinstance(tensor, MXTensor)
    group = tensor.shape[-1] // tensor.scale.shape[-1]
    poison = scale if is_mx else E4M3_NAN if tensor.scale.dtype == torch.uint8 else torch.nan
    codes = _poison_byte(tensor) if isinstance(tensor, MXTensor) else POISON_CODES
    parts = {
        "qdata": (POISONED_COLUMNS // tensor.format.codes_per_byte, codes),
        "scale": (POISONED_COLUMNS // group, poison),
        "zero_point": (POISONED_COLUMNS // group, POISON_CODES),
    }
    views = {}
    for name, (columns, value) in parts.items():
        data = getattr(tensor, name, None)
        if data is None:
            continue
        *leading, rows, width = data.shape
        storage = data.new_full((*leading, rows + POISONED_ROWS, width + columns), value)
        views[name] = storage[..., :rows, :width]
        views[name].copy_(data)
    return replace(tensor, **views)


def poison_weights(weights: MoEWeights) -> MoEWeights:
    """Both projections as views into poisoned storage (see `poison_tensor`)."""
    gate_up, down = map(poison_tensor, (weights.gate_up_proj, weights.down_proj))
    return replace(weights, gate_up_proj=gate_up, down_proj=down)


def _poison_byte(tensor: MXTensor) -> int:
    """Codes of NaN, or the largest e2m1 codes: those have no NaN."""
    return POISON_CODES if tensor.format.codes_per_byte == 2 else 0x7F


def poison_gaps(tensor: MXTensor) -> MXTensor:
    """Copy a tensor into memory of the same strides that is NaN where no element lies."""
    views = []
    for data, byte in ((tensor.qdata, _poison_byte(tensor)), (tensor.scale, E8M0_NAN)):
        memory = data.new_full((data.untyped_storage().nbytes(),), byte)
        view = memory.as_strided(data.shape, data.stride(), data.storage_offset())
        views.append(view.copy_(data))
    return replace(tensor, qdata=views[0], scale=views[1])


def poison_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, filled with NaN (integers: the largest value)."""
    if tensor.dtype.is_floating_point:
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def poison_prepared(tensor: WeightLike) -> None:
    """Fill what pads a prepared tensor, in place; its values stay as they are.

    `Layout.CDNA4_FRAGMENT`: the largest codes, or NaN, with NaN scales; kernels read none of them.
    `Layout.HOPPER_FRAGMENT`: rows get NaN scales and codes that decode to anything. Depth gets the
    largest weights there are: activations are zero there, so that finite weights add nothing. So
    does an FP8 copy; its rows get NaN.
    `Layout.HOPPER_GROUPS`: the same; E8M0 scales have no NaN there. In depth
    `HOPPER_GROUPS_FLOAT16` has the largest scales that it holds.
    """
    if isinstance(tensor.layout, type(HOPPER_GROUPS)):
        _poison_groups(tensor)
        return
    assert isinstance(tensor, MXTensor)  # for the type checker: WeightTensors have no other layout
    if tensor.layout is Layout.CDNA4_FRAGMENT:
        _poison_cdna4(tensor)
        return
    if not isinstance(tensor.layout, type(Layout.HOPPER_FRAGMENT)) or tensor.reference is None:
        layouts = f"{Layout.CDNA4_FRAGMENT} or {Layout.HOPPER_FRAGMENT}"
        raise ValueError(message("poison_prepared", "tensor.layout", layouts, tensor.layout))
    _, num_rows, depth = tensor.shape
    rows, codes = num_rows % UNIT_ROWS, depth % UNIT_CODES
    tensor.reference[:, num_rows:] = E8M0_NAN
    if codes:
        _fill_units(tensor, (slice(None), slice(None), slice(-1, None)), (0, codes), shift=0)
    if rows:
        _fill_units(tensor, (slice(None), slice(-1, None)), (rows, 0), shift=E8M0_NAN)
    if tensor.fp8_codes is not None:
        _poison_fp8(tensor, tensor.fp8_codes)


def _poison_fp8(tensor: MXTensor, copy: torch.Tensor) -> None:
    """Fill what pads an FP8 copy: 448 after the depth, NaN in the rows after the last."""
    row_units, depth_units = copy.shape[1:3]
    *_, num_rows, depth = tensor.shape
    codes = torch.zeros(row_units * UNIT_ROWS, depth_units * UNIT_CODES, dtype=torch.uint8)
    codes[:, depth:] = 0x7E
    codes[num_rows:] = E4M3_NAN
    poison = layouts._fp8_units(codes.to(copy.device))
    copy.copy_(torch.where(poison != 0, poison, copy))


def _poison_groups(tensor: WeightLike) -> None:
    experts, num_rows, depth = tensor.shape
    units, is_mx = tensor.qdata.shape[1:3], isinstance(tensor, MXTensor)
    whole = (experts, units[0] * UNIT_ROWS, units[1] * UNIT_CODES)
    assert isinstance(tensor.layout, WeightLayout)  # for the type checker
    plain = tensor.layout.unpack(replace(tensor, logical_shape=whole))
    width = depth // tensor.format.codes_per_byte
    group = whole[2] // plain.scale.shape[2]
    is_byte = plain.scale.dtype == torch.uint8
    largest, of_rows = (E8M0_MAX, E8M0_MAX) if is_mx else (1e3, torch.nan)
    if tensor.layout is HOPPER_GROUPS_FLOAT16:
        largest = 1.9921875  # the largest bfloat16 number below 2
    if is_byte and not is_mx:  # NVFP4
        largest, of_rows = 0x7E, E4M3_NAN
    plain.qdata[:, num_rows:] = 0x7E if is_mx else 0x77
    plain.qdata[:, :, width:] = 0x7E if is_mx else 0x77
    plain.scale[:, :, depth // group :] = largest
    plain.scale[:, num_rows:] = of_rows
    found = HOPPER_GROUPS.pack(plain)
    tensor.qdata.copy_(found.qdata)
    tensor.scale.copy_(found.scale)


def _poison_cdna4(tensor: MXTensor) -> None:
    experts, num_rows, depth = tensor.shape
    units = tensor.qdata.shape[1:3]
    whole = (experts, units[0] * UNIT_ROWS, units[1] * UNIT_CODES)
    plain = CDNA4_FRAGMENT.unpack(replace(tensor, logical_shape=whole))
    for part, width, byte in (
        (plain.qdata, depth // tensor.format.codes_per_byte, _poison_byte(tensor)),
        (plain.scale, depth // MX_BLOCK_SIZE, E8M0_NAN),
    ):
        part[:, num_rows:] = byte
        part[:, :, width:] = byte
    CDNA4_FRAGMENT.pack(plain, out=replace(tensor, logical_shape=whole))


def _fill_units(
    tensor: MXTensor, units: tuple[slice, ...], first: tuple[int, int], shift: int
) -> None:
    """Give units the code 6 with `shift`, from the first (row, code) on in each."""
    qdata, scale = tensor.qdata[units], tensor.scale[units]
    for packed, place, fill, unpack, pack in (
        (qdata, first[1], POISON_CODES & 0xF, layouts._unpack_codes, _packed_codes),
        (scale, first[1] // MX_BLOCK_SIZE, shift, layouts._unpack_shifts, layouts._pack_shifts),
    ):
        flat = unpack(packed.flatten(0, 1)).contiguous()
        flat.view(-1, UNIT_ROWS, flat.shape[1])[:, first[0] :, place:] = fill
        packed.copy_(pack(flat[None]).view_as(packed))


def _packed_codes(codes: torch.Tensor) -> torch.Tensor:
    return layouts._pack_codes(pack_codes(codes), layouts._sign_tables(codes.device))


@contextlib.contextmanager
def nan_filled_scratch() -> Iterator[None]:
    """Fill every `torch.empty` inside the block with NaN (integers: their largest value).

    Torch's deterministic mode does this; it is switched on inside the block, and operations without
    a deterministic form warn. A kernel that reads an output or scratch before writing it then
    returns NaN instead of old memory.
    """
    deterministic: Any = torch.utils.deterministic  # its one property is set on the module's class
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill


def swap_nibbles(tensor: MXTensor) -> MXTensor:
    """Swap the two MXFP4 codes of every byte."""
    return replace(tensor, qdata=tensor.qdata << 4 | tensor.qdata >> 4)


def shift_scales(tensor: MXTensor) -> MXTensor:
    """Give every block the scale of its left neighbour; the first gets that of the last."""
    return replace(tensor, scale=tensor.scale.roll(1, dims=-1))


def plant_swapped_nibbles(inputs: MoEInputs) -> MoEInputs:
    """Swap the nibbles of both projections."""
    return _with_projections(inputs, swap_nibbles)


def plant_shifted_scales(inputs: MoEInputs) -> MoEInputs:
    """Shift the scales of both projections by one block."""
    return _with_projections(inputs, shift_scales)


def plant_exchanged_gate_up(inputs: MoEInputs) -> MoEInputs:
    """Exchange gate rows and up rows, and their biases."""
    weights = inputs.weights
    assert weights.gate_up_order is not None  # for the type checker; MoEWeights has refused None
    gate, up = gate_up_rows(weights.gate_up_order, weights.intermediate_size, weights.device)
    order = torch.empty(2 * weights.intermediate_size, dtype=torch.int64, device=weights.device)
    order[gate], order[up] = up, gate
    gate_up, bias = weights.gate_up_proj, weights.gate_up_bias
    exchanged = replace(gate_up, qdata=gate_up.qdata[:, order], scale=gate_up.scale[:, order])
    return replace(
        inputs,
        weights=replace(
            weights,
            gate_up_proj=exchanged,
            gate_up_bias=None if bias is None else bias[:, order].contiguous(),
        ),
    )


def plant_dropped_expert(inputs: MoEInputs) -> MoEInputs:
    """Drop the rows of the most used expert: its ids become −1."""
    ids = inputs.topk_ids.clone()
    ids[ids == ids.flatten().mode().values] = -1
    return replace(inputs, topk_ids=ids)


def plant_double_weight(inputs: MoEInputs) -> MoEInputs:
    """Square the routing weights, as if they were applied twice."""
    return replace(inputs, topk_weights=inputs.topk_weights**2)


def plant_ignored_bias(inputs: MoEInputs) -> MoEInputs:
    """Remove both biases."""
    return replace(inputs, weights=replace(inputs.weights, gate_up_bias=None, down_bias=None))


PLANTED_ERRORS: dict[str, Callable[[MoEInputs], MoEInputs]] = {
    "swapped_nibbles": plant_swapped_nibbles,
    "shifted_scales": plant_shifted_scales,
    "exchanged_gate_up": plant_exchanged_gate_up,
    "dropped_expert": plant_dropped_expert,
    "double_weight": plant_double_weight,
    "ignored_bias": plant_ignored_bias,
}
"""Planted errors by name. `ignored_bias` needs a problem with biases, and `double_weight` needs
weights other than 1; without them these change nothing."""


def _with_projections(inputs: MoEInputs, transform: Callable[[MXTensor], MXTensor]) -> MoEInputs:
    gate_up, down = map(transform, inputs.weights.mx_projections)
    return replace(inputs, weights=replace(inputs.weights, gate_up_proj=gate_up, down_proj=down))
