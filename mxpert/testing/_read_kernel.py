"""Triton kernel that reads memory for `timing.read_bandwidth`; imported on GPU machines only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def _read_stream_kernel(sums_ptr, data_ptr, num_elements, BLOCK: tl.constexpr):
    """Read the data and sum it, so that the loads are not optimised away.

    Grid: (any,). Programs take blocks of BLOCK elements in turn; each stores one sum.
    """
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, step):
        total += tl.load(data_ptr + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def stream_calls(data: torch.Tensor) -> dict[str, list[Callable[[], object]]]:
    """One timing variant for each grid size and block size; the caller takes the fastest.

    Args:
        data: int32, contiguous, a multiple of 8192 elements.
    """
    properties = torch.cuda.get_device_properties(data.device)
    sums = torch.empty(16 * properties.multi_processor_count, dtype=torch.int32, device=data.device)

    def call(grid: int, block: int) -> Callable[[], object]:
        return lambda: _read_stream_kernel[(grid,)](
            sums_ptr=sums,
            data_ptr=data,
            num_elements=data.numel(),
            BLOCK=block,
            num_warps=8,
            enable_fp_fusion=True,
        )

    return {
        f"{blocks_per_sm} blocks of {block}": [
            call(blocks_per_sm * properties.multi_processor_count, block)
        ]
        for blocks_per_sm in (4, 8, 16)
        for block in (4096, 8192)
    }
