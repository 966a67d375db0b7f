"""The glue that peers' GEMMs need for a stage, one launch each, as serving stacks have it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _swiglu_rows_kernel(out_ptr, rows_ptr, num_features, alpha, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < num_features
    pair = rows_ptr + row * 2 * num_features + 2 * feature
    gate = tl.minimum(tl.load(pair, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate * tl.sigmoid(alpha * gate) * (up + 1)
    tl.store(out_ptr + row * num_features + feature, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _sum_slots_kernel(
    out_ptr, rows_ptr, slot_weights_ptr, width, top_k, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(top_k):
        row = token * top_k + slot
        value = tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(slot_weights_ptr + row)
        total += value
    tl.store(out_ptr + token * width + column, total.to(tl.bfloat16), mask=inside)


def swiglu_rows(out: torch.Tensor, rows: torch.Tensor, *, alpha: float, limit: float) -> None:
    """SwiGLU of interleaved gate and up, bfloat16 [R, 2F] → [R, F]."""
    count, features = out.shape
    _swiglu_rows_kernel[(count, triton.cdiv(features, _BLOCK))](
        out_ptr=out,
        rows_ptr=rows,
        num_features=features,
        alpha=alpha,
        limit=limit,
        BLOCK=_BLOCK,
        enable_fp_fusion=True,
    )


def sum_slots(out: torch.Tensor, rows: torch.Tensor, slot_weights: torch.Tensor | None) -> None:
    """Sum of a token's rows, bfloat16 [T · k, H] → [T, H], with float32 weights [T, k] or none."""
    tokens, width = out.shape
    _sum_slots_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        out_ptr=out,
        rows_ptr=rows,
        slot_weights_ptr=slot_weights,
        width=width,
        top_k=rows.shape[0] // tokens,
        WEIGHTED=slot_weights is not None,
        BLOCK=_BLOCK,
        enable_fp_fusion=True,
    )
