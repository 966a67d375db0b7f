"""Counting of differing values in Triton, for `races.hunt`; imported on GPU machines only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _count_differences_kernel(count_ptr, first_ptr, second_ptr, num_elements, BLOCK: tl.constexpr):
    """Add the number of differing elements to count.

    Grid: (blocks,), BLOCK elements per program; a program without differences adds nothing.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    first = tl.load(first_ptr + place, mask=inside, other=0)
    second = tl.load(second_ptr + place, mask=inside, other=0)
    count = tl.sum((first != second).to(tl.int32))
    if count > 0:
        tl.atomic_add(count_ptr, count.to(tl.int64))


def count_differences(count: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add the number of places where two contiguous integer tensors differ to `count`, int64 []."""
    _count_differences_kernel[(triton.cdiv(first.numel(), _BLOCK),)](
        count_ptr=count,
        first_ptr=first,
        second_ptr=second,
        num_elements=first.numel(),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
