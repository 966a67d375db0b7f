"""Units of HOPPER_FRAGMENT on a GPU, and their e4m3 copy; `layout` has the orders."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.launch import Launch
from ...formats.layouts import UNIT_BLOCKS, UNIT_CODE_BYTES, UNIT_ROWS, UNIT_SCALE_BYTES
from ...formats.tensor import MXTensor

_ROWS = tl.constexpr(UNIT_ROWS)
_WORDS = tl.constexpr(UNIT_CODE_BYTES // UNIT_ROWS // 4)
"""32-bit words of eight codes in a unit's row."""
_BLOCKS = tl.constexpr(UNIT_BLOCKS)
_CODE_WORDS = tl.constexpr(UNIT_CODE_BYTES // 4)
_SHIFTS = tl.constexpr(UNIT_SCALE_BYTES)
_DEPTH = 4
"""Units side by side that a program packs: it reads 256 bytes of each row."""


@triton.jit
def _spread_signs(word):
    """Move the signs of eight codes to where `layout._sign_tables` has them."""
    moved = word & 0x77777777
    for code in tl.static_range(4):
        low, high = word >> (4 * code + 3) & 1, word >> (4 * code + 19) & 1
        moved |= low << (8 * code + 7) | high << (8 * code + 3)
    return moved


@triton.jit
def _pack_hopper_fragment_kernel(
    codes,
    scale,
    rows,
    reference,
    packed,
    shifts,
    num_rows,
    num_blocks,
    row_units,
    depth_units,
    DEPTH: tl.constexpr,
):
    """Pack 64 rows of one expert, DEPTH units of 128 codes; what lies outside is zero.

    Grid: (E · row_units, ⌈depth_units / DEPTH⌉).

    Args:
        codes: int32 [E, num_rows, 4 · num_blocks], eight e2m1 codes a word. scale: uint8 [E,
            num_rows, num_blocks].
        rows: int64 [num_rows], the row of the source for each row of the result; None keeps them.
        reference: uint8 [E, 64 · row_units], of the result's rows.
        packed: int32 [E, row_units, depth_units, 1024]. shifts: uint8 [E, row_units, depth_units,
            256].
    """
    unit = tl.program_id(0)
    expert = (unit // row_units).to(tl.int64)
    row = tl.arange(0, _ROWS)
    warp, lane_row, pair = row // 16, row // 2 % 8, row % 2
    target = unit % row_units * _ROWS + row
    exists = target < num_rows
    source = target if rows is None else tl.load(rows + target, mask=exists, other=0)
    source = expert * num_rows + source
    num_words = num_blocks * 4  # so the compiler knows that four words lie within a row
    first = unit.to(tl.int64) * depth_units  # the unit's place in `packed` and `shifts`

    column = tl.program_id(1) * (DEPTH * _WORDS) + tl.arange(0, DEPTH * _WORDS)
    inside = exists[:, None] & (column < num_words)[None, :]
    words = tl.load(codes + source[:, None] * num_words + column[None, :], mask=inside, other=0)
    place = (first + column // _WORDS) * _CODE_WORDS + column % _WORDS
    place = place[None, :] + (((pair * 4 + warp) * 8 + lane_row) * _WORDS)[:, None]
    held = (column < depth_units * _WORDS)[None, :]
    tl.store(packed + place, _spread_signs(words), mask=held)

    column = tl.program_id(1) * (DEPTH * _BLOCKS) + tl.arange(0, DEPTH * _BLOCKS)
    inside = exists[:, None] & (column < num_blocks)[None, :]
    found = tl.load(scale + source[:, None] * num_blocks + column[None, :], mask=inside, other=0)
    largest = tl.load(reference + expert * row_units * _ROWS + target)
    shift = tl.where(inside, largest[:, None].to(tl.int32) - found.to(tl.int32), 0)
    place = (first + column // _BLOCKS) * _SHIFTS + column % _BLOCKS * 2
    place = place[None, :] + ((warp * 8 + lane_row) * (_BLOCKS * 2) + pair)[:, None]
    held = (column < depth_units * _BLOCKS)[None, :]
    tl.store(shifts + place, shift.to(tl.uint8), mask=held)


def pack_units(t: MXTensor, rows: torch.Tensor | None, out: MXTensor) -> None:
    """Write codes and shifts of ROW_MAJOR weights [E, N, K] to `out`, which has its references."""
    experts, row_units, depth_units = out.qdata.shape[:3]
    codes = t.qdata.contiguous()
    if codes.data_ptr() % 4:
        codes = codes.clone()
    Launch(
        _pack_hopper_fragment_kernel,
        (experts * row_units, triton.cdiv(depth_units, _DEPTH)),
        num_rows=t.qdata.shape[1],
        num_blocks=t.scale.shape[2],
        row_units=row_units,
        depth_units=depth_units,
        DEPTH=_DEPTH,
    )(
        codes=codes.view(torch.int32),
        scale=t.scale.contiguous(),
        rows=None if rows is None else rows.contiguous(),
        reference=out.reference,
        packed=out.qdata.view(torch.int32),
        shifts=out.scale,
    )


@triton.jit
def _fp8_bytes(codes, shift):
    """Four e4m3 bytes of the magnitudes in the low nibbles of `codes`, times 2^(6 - shift).

    The nibbles' top bits are ignored. All four have the same shift.
    """
    result = codes * 0
    for place in tl.static_range(4):
        magnitude = codes >> (4 * place) & 7
        exponent = (magnitude >> 1) + 12 - shift  # of an e4m3 number, with its bias
        mantissa = tl.where(magnitude > 1, (magnitude & 1) * 4, 0)
        subnormal = (8 + mantissa) >> tl.minimum(tl.maximum(1 - exponent, 0), 31)
        value = tl.where(exponent > 0, exponent * 8 + mantissa, subnormal)
        result |= tl.where(magnitude > 0, value, 0) << (8 * place)
    return result


@triton.jit
def _decode_hopper_fragment_kernel(fp8, packed, shifts):
    """Write the e4m3 values of a unit. Grid: (number of units,).

    Args:
        fp8: int32 [units, 2048], four bytes a word. packed: int32 [units, 1024]. shifts: uint8
            [units, 256].
    """
    unit = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, _CODE_WORDS)  # r w g t q
    pair, lane, block, step = word // (32 * _WORDS), word // _WORDS % 32, word // 4 % 4, word % 4
    codes = tl.load(packed + unit * _CODE_WORDS + word)
    shift = tl.load(shifts + unit * _SHIFTS + lane * 8 + block * 2 + pair).to(tl.int32)
    row = lane // 8 * 16 + pair * 8 + lane % 8
    place = fp8 + unit * (2 * _CODE_WORDS) + row * 32 + step * 8 + block
    first = _fp8_bytes(codes & 0xFFFF, shift) | codes & -0x7F7F7F80
    tl.store(place, first)
    second = _fp8_bytes(codes >> 16 & 0xFFFF, shift) | codes << 4 & -0x7F7F7F80
    tl.store(place + 4, second)


def decode_units(packed: MXTensor, out: torch.Tensor) -> None:
    """Write the e4m3 values of packed weights to `out`; see `layout.decode_units`."""
    experts, row_units, depth_units = packed.qdata.shape[:3]
    Launch(_decode_hopper_fragment_kernel, (experts * row_units * depth_units,))(
        fp8=out.view(torch.int32), packed=packed.qdata.view(torch.int32), shifts=packed.scale
    )
