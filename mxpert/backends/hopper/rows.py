"""Activations for the FP8 GEMMs: gathered into sorted rows, scaled per row, K permuted.

Plain Triton. Two encodings of a row, both with one power of two per row:

- `bf16` as hi + lo / 16, two e4m3 rows: 8 significant bits, exact within 9 binades of the row maximum.
- MX codes, each 32-block rebased from its own scale to the row's largest: exact as long as a code
  stays an e4m3 number, an absolute error of at most 2^-10 of the row's scale below that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...formats.layouts import UNIT_CODES
from ...formats.tensor import MXTensor
from ...routing import RoutingPlan

_CHUNKS = tl.constexpr(8)  # depth units of 128 values that one step of a program handles
_TOKEN_MASK = tl.constexpr((1 << 24) - 1)
_NUM_WARPS = 4


@dataclass(frozen=True)
class SortedRows:
    """e4m3 rows [P, K padded to 128] (twice as many for hi and lo) and float32 row scales [P]."""

    codes: torch.Tensor
    scale: torch.Tensor
    split: bool

    @property
    def low_rows(self) -> int:
        """Row where the low parts begin."""
        return self.scale.shape[0]


@triton.jit
def _source_offsets(step):
    """Offsets [chunk, q h, t, j] of one step's values in storage order; see `formats.layouts`."""
    chunk = step * _CHUNKS + tl.arange(0, _CHUNKS)[:, None, None, None]
    word = tl.arange(0, 8)[None, :, None, None]
    block = tl.arange(0, 4)[None, None, :, None]
    byte = tl.arange(0, 4)[None, None, None, :]
    source = chunk * 128 + block * 32 + word * 4 + byte
    target = chunk * 128 + word * 16 + block * 4 + byte
    return source, target, chunk * 4 + block


@triton.jit
def _power_of_two(exponent_byte):
    """2^(byte - 127) for bytes 1..254."""
    return (exponent_byte << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens", "depth", "num_rows"])
def _moe_split_rows_kernel(codes_ptr, scale_ptr, x_ptr, sorted_token_ids_ptr, num_valid_ptr,
                           num_tokens, depth, padded_depth, num_rows, x_stride,
                           GATHER: tl.constexpr):
    """bf16 row → hi and lo e4m3 rows with ``x = 2^s (hi + lo / 16)``, 448 the largest hi."""
    row = tl.program_id(0)
    if row >= tl.load(num_valid_ptr):
        return
    token = tl.load(sorted_token_ids_ptr + row) & _TOKEN_MASK
    if token >= num_tokens:
        return
    source_row = token if GATHER else row
    x_ptr += source_row.to(tl.int64) * x_stride
    steps = tl.cdiv(padded_depth, _CHUNKS * 128)
    largest = tl.zeros([_CHUNKS, 8, 4, 4], tl.float32)
    for step in range(steps):
        source, _, _ = _source_offsets(step)
        values = tl.load(x_ptr + source, mask=source < depth, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    bits = tl.max(tl.reshape(largest, [_CHUNKS * 128]).to(tl.int32, bitcast=True), 0)
    # Largest magnitude at most 448 = 1.75 * 2^8 after scaling; NaN and infinity give a NaN row.
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = tl.where(bits >= 0x7F800000, float("nan"), _power_of_two(exponent))
    inverse = _power_of_two(254 - exponent)
    tl.store(scale_ptr + row, scale)
    hi_ptr = codes_ptr + row.to(tl.int64) * padded_depth
    lo_ptr = hi_ptr + num_rows.to(tl.int64) * padded_depth
    for step in range(steps):
        source, target, _ = _source_offsets(step)
        values = tl.load(x_ptr + source, mask=source < depth, other=0.0).to(tl.float32) * inverse
        hi = values.to(tl.float8e4nv)
        lo = ((values - hi.to(tl.float32)) * 16.0).to(tl.float8e4nv)
        tl.store(hi_ptr + target, hi, mask=target < padded_depth)
        tl.store(lo_ptr + target, lo, mask=target < padded_depth)


@triton.jit
def _decode_codes(x_ptr, source, depth, PACKED: tl.constexpr):
    """float32 values of e4m3 codes, or of e2m1 codes packed two a byte."""
    mask = source < depth
    if PACKED:
        byte = tl.load(x_ptr + source // 2, mask=mask, other=0).to(tl.int32)
        code = (byte >> ((source % 2) * 4)) & 0xF
        magnitude = code & 7
        exponent = magnitude >> 1
        normal = ((exponent + 126) << 23) | ((magnitude & 1) << 22)
        bits = tl.where(exponent > 0, normal, (magnitude & 1) * 0x3F000000)
        return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    else:
        return tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "depth", "x_scale_stride"])
def _moe_rebase_rows_kernel(codes_ptr, scale_ptr, x_ptr, x_scale_ptr, sorted_token_ids_ptr,
                            num_valid_ptr, num_tokens, depth, padded_depth, x_stride,
                            x_scale_stride, GATHER: tl.constexpr, PACKED: tl.constexpr):
    """MX row → e4m3 row with one power of two: codes shift by their block's scale deficit."""
    row = tl.program_id(0)
    if row >= tl.load(num_valid_ptr):
        return
    token = tl.load(sorted_token_ids_ptr + row) & _TOKEN_MASK
    if token >= num_tokens:
        return
    source_row = token if GATHER else row
    x_ptr += source_row.to(tl.int64) * x_stride
    x_scale_ptr += source_row.to(tl.int64) * x_scale_stride
    steps = tl.cdiv(padded_depth, _CHUNKS * 128)
    HEADROOM: tl.constexpr = 6 if PACKED else 0  # e2m1 reaches 6: 6 * 2^6 uses e4m3's range
    largest = tl.zeros([_CHUNKS, 8, 4, 4], tl.int32)
    for step in range(steps):
        source, _, block = _source_offsets(step)
        values = _decode_codes(x_ptr, source, depth, PACKED)
        scales = tl.load(x_scale_ptr + block, mask=block * 32 < depth, other=0).to(tl.int32)
        counts = (values != 0.0) | (scales == 255)  # blocks of zeros have no say
        largest = tl.maximum(largest, tl.where(counts, scales, 0))
    reference = tl.max(tl.reshape(largest, [_CHUNKS * 128]), 0)
    factor = _power_of_two(tl.maximum(reference - HEADROOM, 1))
    tl.store(scale_ptr + row, tl.where(reference == 255, float("nan"), factor))
    codes_ptr += row.to(tl.int64) * padded_depth
    for step in range(steps):
        source, target, block = _source_offsets(step)
        values = _decode_codes(x_ptr, source, depth, PACKED)
        scales = tl.load(x_scale_ptr + block, mask=block * 32 < depth, other=0).to(tl.int32)
        # Below 2^-126 every code is zero; above, a block of zeros whose own scale is larger.
        exponent = 127 + scales - tl.maximum(reference, 1 + HEADROOM) + HEADROOM
        shift = _power_of_two(tl.minimum(tl.maximum(exponent, 1), 254))
        tl.store(codes_ptr + target, (values * shift).to(tl.float8e4nv),
                 mask=target < padded_depth)


def sorted_rows(x: torch.Tensor | MXTensor, plan: RoutingPlan, num_rows: int, *,
                gather: bool) -> SortedRows:
    """Encode the plan's rows for the FP8 GEMMs.

    Args:
        x: bfloat16 or MXTensor, [T, K] (gather) or [P, K] in sorted order.
        plan: the routing plan. num_rows: rows to allocate, at least the rows in use.
        gather: take row ``token`` of x for each sorted row.

    Returns:
        SortedRows; padding rows are left as allocated, their outputs are dropped.
    """
    depth = x.shape[1]
    padded = -(-depth // UNIT_CODES) * UNIT_CODES
    split = isinstance(x, torch.Tensor)
    codes = torch.empty((num_rows * (2 if split else 1), padded), dtype=torch.float8_e4m3fn,
                        device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    shared = dict(codes_ptr=codes, scale_ptr=scale, sorted_token_ids_ptr=plan.sorted_token_ids,
                  num_valid_ptr=plan.num_valid, num_tokens=plan.num_tokens, depth=depth,
                  padded_depth=padded, GATHER=gather, num_warps=_NUM_WARPS)
    if isinstance(x, MXTensor):
        packed = x.format.codes_per_byte == 2
        data = x.qdata if packed else x.qdata.view(torch.float8_e4m3fn)
        _moe_rebase_rows_kernel[(num_rows,)](
            x_ptr=data, x_scale_ptr=x.scale, x_stride=data.stride(0),
            x_scale_stride=x.scale.stride(0), PACKED=packed, **shared)
    else:
        _moe_split_rows_kernel[(num_rows,)](x_ptr=x, num_rows=num_rows, x_stride=x.stride(0),
                                            **shared)
    return SortedRows(codes, scale, split)
