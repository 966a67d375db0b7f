"""fp8_token activations for the portable GEMMs: e4m3 rows with one float32 scale each.

The GEMMs read them as MXFP8 rows whose block scales are all 1, and multiply the sum by the row's
scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..core.launch import CACHED_LAUNCHES, Launch
from ..device.mx_codec import encode, magnitude_bits
from ..formats.spec import E8M0_BIAS, MX_BLOCK_SIZE

_BLOCK = 2048
_NUM_WARPS = 4
_FLOAT_INFINITY = tl.constexpr(0x7F800000)
"""Bits of a float32; larger magnitudes are NaN."""
_E8M0_ONE = tl.constexpr(E8M0_BIAS)
_SMALLEST_AMAX = tl.constexpr(0x04E00000)
"""Bits of 448 * 2^-126. Smaller maxima are raised to it, so that the scale is a normal float32."""


@dataclass(frozen=True)
class CodedRows:
    """uint8 codes [M, K], float32 scales [M], and E8M0 block scales [K/32] of 1 for every row."""

    qdata: torch.Tensor
    scale: torch.Tensor
    block_scale: torch.Tensor


@triton.jit(do_not_specialize=["num_blocks"])
def _moe_quantize_tokens_kernel(
    qdata_ptr, scale_ptr, block_scale_ptr, x_ptr, num_blocks, x_stride, BLOCK: tl.constexpr
):
    """Quantise x [rows, 32 · num_blocks] bit-exact to `mxpert.formats.quantize_token_rows`.

    Grid: (rows,). A program reads its row twice, for the maximum and for the codes. The first
    program also writes the block scales.
    """
    row = tl.program_id(0).to(tl.int64)
    width = num_blocks * 32
    x_ptr += row * x_stride
    column = tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, width, BLOCK):
        values = tl.load(x_ptr + first + column, mask=first + column < width, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(values.to(tl.float32)))
    amax_bits = tl.max(bits, axis=0)
    amax = tl.maximum(amax_bits, _SMALLEST_AMAX).to(tl.float32, bitcast=True)
    largest = tl.full((), 448.0, tl.float32)  # of e4m3
    scale = tl.where(amax_bits == 0, 1.0, tl.div_rn(amax, largest))
    is_bad = amax_bits >= _FLOAT_INFINITY
    tl.store(scale_ptr + row, tl.where(is_bad, float("nan"), scale))
    inverse = tl.div_rn(largest, amax)
    for first in range(0, width, BLOCK):
        mask = first + column < width
        values = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        codes = encode(values * inverse, is_bad, "e4m3")
        tl.store(qdata_ptr + row * width + first + column, codes.to(tl.uint8), mask=mask)
        if row == 0:
            block = first // 32 + tl.arange(0, BLOCK // 32)
            tl.store(
                block_scale_ptr + block,
                tl.full((BLOCK // 32,), _E8M0_ONE, tl.uint8),
                mask=block < num_blocks,
            )


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(num_rows: int, num_blocks: int, stride: int) -> Launch:
    return Launch(
        _moe_quantize_tokens_kernel,
        (num_rows,),
        num_blocks=num_blocks,
        x_stride=stride,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def quantize_tokens(x: torch.Tensor) -> CodedRows:
    """Quantise bfloat16 rows [M, K], K a multiple of 32; launch nothing if M is 0."""
    num_rows, width = x.shape
    rows = CodedRows(
        x.new_empty((num_rows, width), dtype=torch.uint8),
        x.new_empty(num_rows, dtype=torch.float32),
        x.new_empty(width // MX_BLOCK_SIZE, dtype=torch.uint8),
    )
    if num_rows:
        _launch(num_rows, width // MX_BLOCK_SIZE, x.stride(0))(
            qdata_ptr=rows.qdata, scale_ptr=rows.scale, block_scale_ptr=rows.block_scale, x_ptr=x
        )
    return rows
