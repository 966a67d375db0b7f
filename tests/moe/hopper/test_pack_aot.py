"""The packing kernel compiled for sm_90: wide loads and stores, no spills."""

from __future__ import annotations

import torch

from mxpert.moe.hopper.pack import _pack_hopper_fragment_kernel
from support.aot import compile_for


def test_it_moves_wide_words() -> None:
    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="meta")

    arguments = dict(
        codes=empty(torch.int32),
        scale=empty(torch.uint8),
        rows=empty(torch.int64),
        reference=empty(torch.uint8),
        packed=empty(torch.int32),
        shifts=empty(torch.uint8),
        num_rows=5760,
        num_blocks=90,
        row_units=90,
        depth_units=23,
        DEPTH=4,
    )
    metrics = compile_for(_pack_hopper_fragment_kernel, arguments, target="sm_90").metrics
    assert metrics.spills == 0
    assert metrics.global_loads[128]
    assert metrics.global_stores[128]
