"""TMA descriptors of the operands of the Hopper MoE GEMMs."""

from __future__ import annotations

import functools

import torch

from ...core.launch import DescriptorSpec
from ...device.hopper import matrix_descriptor, rows_descriptor
from ...formats.layouts import UNIT_CODES, UNIT_ROWS
from .config import BLOCKS_M, STAGE_DEPTH, HopperGemmConfig
from .group_layout import GroupWeights

_X_COPY_BYTES = 128
"""Bytes of a row in the prefill kernel's copies of activation rows."""

X_DESCRIPTORS = {rows: f"x{rows}_desc" for rows in BLOCKS_M}
"""The decode kernel's descriptor parameters by rows of x; None above a config's block_m."""

FP8_DESCRIPTOR = rows_descriptor(UNIT_ROWS, UNIT_CODES, torch.float8_e4m3fn, width=UNIT_CODES)
"""A unit of the FP8 copy of MXFP4 weights."""

Descriptors = dict[str, DescriptorSpec]


@functools.cache
def x_descriptors(block_m: int) -> Descriptors:
    """Those of the decode kernel's activation rows."""
    return {
        name: rows_descriptor(rows, STAGE_DEPTH, torch.float8_e4m3fn)
        for rows, name in X_DESCRIPTORS.items()
        if rows <= block_m
    }


def prefill_rows_descriptor(config: HopperGemmConfig) -> DescriptorSpec:
    """A block of activation rows, as the prefill kernels copy it."""
    dtype = config.rows_dtype
    return rows_descriptor(config.block_m, _X_COPY_BYTES // dtype.itemsize, dtype)


def decode_weight_descriptors(
    weights: GroupWeights | None, scale_dtype: torch.dtype
) -> Descriptors:
    """Codes and scales of a row unit and two depth units; weights: None for MXFP4."""
    # The last step of an odd depth must not read the next unit: decode is limited by bandwidth.
    if weights is not None:
        return _of_groups(weights, scale_dtype, 2)
    return {
        "code_desc": matrix_descriptor(64, 128, torch.uint8),
        "shift_desc": matrix_descriptor(16, 32, torch.uint8),
    }


def prefill_weight_descriptors(
    config: HopperGemmConfig, weights: GroupWeights | None, scale_dtype: torch.dtype
) -> Descriptors:
    """Codes and scales of a row unit as the prefill kernel copies them; weights: as above."""
    if weights is not None:
        return _of_groups(weights, scale_dtype, 1)
    code_rows = 32 if config.rows_dtype.itemsize == 2 else 64  # 128 or 256 codes of depth
    return {
        "code_desc": rows_descriptor(code_rows, 128, torch.uint8, width=128),
        "shift_desc": rows_descriptor(code_rows // 4, 32, torch.uint8, width=32),
    }


def _of_groups(weights: GroupWeights, scale_dtype: torch.dtype, depth_units: int) -> Descriptors:
    return {
        "code_desc": matrix_descriptor(depth_units * weights.code_rows, 128, torch.uint8),
        "shift_desc": matrix_descriptor(depth_units * weights.groups, UNIT_ROWS, scale_dtype),
    }
