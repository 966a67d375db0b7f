"""MoE GEMM for few tokens per expert on gfx950; it is limited by the memory that weights are in.

The problem is transposed: weights are operand A of MFMA and activation rows its N, so that a tile
has as few as 16 rows. Weights come in `Layout.CDNA4_FRAGMENT`: each wave streams its own units of
64 weight rows × 128 elements of depth with 16-byte loads straight into the registers that MFMA
reads, and a word of scales a lane for the four fragments of a unit. Activation rows go to LDS by
direct copies, in chunks of 16 bytes, and all waves read them from there.

Grid: one dimension, a workgroup for each split of each tile of [64 * WAVES weight rows, ROWS sorted
rows], as many as the plan can need; those without a tile return at once. Tiles are not persistent:
the weights of a tile take a CU tens of thousands of cycles, so that its start costs little beside
the other workgroups of the CU. Consecutive workgroups go to the XCDs in turn, so tiles are numbered
such that an XCD gets neighbouring ones: its L2 serves their activation rows.

Waves: SLICES * WAVES. The SLICES waves of the same weight rows have every SLICES-th unit of depth
and add their sums through LDS. k_splits workgroups have parts of the depth and store float32
partial sums, which a finishing kernel adds in order.

Pipeline: DEPTH steps of weights are in registers or on the way, 17 KB a step with four waves.
Activations have two buffers in LDS, a copy each; a copy lasts ITERATIONS iterations of four steps.

Timeline of a wave: description of the tile → first copy of activations, DEPTH steps of weights →
for each copy: wait for it, barrier, start the next one; for each step: read activations from LDS,
four MFMA (bf16: decode, 16 MFMA) for 16 rows, load the step DEPTH ahead → epilogue.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....routing import TOKEN_MASK
from ...common.compat import aggregate
from ..lib.fragments import elements_per_chunk
from .epilogue import (
    MXFormat,
    RowTerms,
    Tile,
    add_bias,
    row_vector,
    scale_rows,
    store_features,
    store_outputs,
    store_partial,
)
from .mainloop import Shape, accumulate, open_activations, open_weights

_TOKEN_MASK = gl.constexpr(TOKEN_MASK)
_XCDS = gl.constexpr(8)
"""Dies of the chip; the hardware deals workgroups to them in turn."""

RUN_TIME_VALUES = (
    "num_tokens",
    "num_experts",
    "num_k_blocks",
    "num_n_blocks",
    "row_units",
    "depth_units",
    "routing_block_m",
    "k_splits",
    "units_per_split",
    "partial_rows",
    "x_row_chunks",
    "x_scale_stride",
    "p0",
    "p1",
)
"""Numbers that Triton must not specialise on: they may be 1 or odd, which would compile one binary
per model."""


@aggregate
class Activations:
    """Activation rows in memory.

    x: bfloat16 values or uint8 codes, row_chunks * 16 bytes a row. x_scale: uint8 E8M0 bytes,
    scale_stride a row. first_row: of the tile.
    GATHER: rows belong to tokens, which sorted_token_ids name; else they are sorted already.
    """

    x: gl.tensor
    x_scale: gl.tensor
    row_chunks: gl.tensor
    scale_stride: gl.tensor
    sorted_token_ids: gl.tensor
    first_row: gl.tensor
    num_tokens: gl.tensor
    GATHER: gl.constexpr

    @gluon.jit
    def row_of(self, place):
        """Row in memory of each row of the tile; a padding row gets any row that exists."""
        if self.GATHER:
            token = gl.load(self.sorted_token_ids + self.first_row + place) & _TOKEN_MASK
            return gl.where(token < self.num_tokens, token, 0)
        else:
            return place


@gluon.jit
def _locate(num_valid_ptr, num_tiles_n, k_splits, ROWS: gl.constexpr):
    """Row block, tile of weight rows and split of this workgroup; the block is −1 without a tile.

    An XCD gets consecutive tiles; the splits and weight rows of a row block are neighbours.
    """
    per_block = num_tiles_n * k_splits
    total = gl.load(num_valid_ptr) // ROWS * per_block
    per_xcd = gl.cdiv(total, _XCDS)
    program = gl.program_id(0)
    place = program // _XCDS
    index = program % _XCDS * per_xcd + place
    block = index // per_block
    inside = index % per_block
    exists = (place < per_xcd) & (index < total)
    return gl.where(exists, block, -1), inside // k_splits, inside % k_splits


@gluon.jit(
    do_not_specialize=RUN_TIME_VALUES,
    do_not_specialize_on_alignment=("x_scale_ptr",),
)
def _moe_gemm_decode_cdna4_kernel(
    out_ptr,
    out_scale_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_k_blocks,
    num_n_blocks,
    row_units,
    depth_units,
    routing_block_m,
    k_splits,
    units_per_split,
    partial_rows,
    x_row_chunks,
    x_scale_stride,
    p0,
    p1,
    X_FORMAT: gl.constexpr,
    GATHER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OUT_FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    INF_BYTE: gl.constexpr,
    ATOMIC: gl.constexpr,
    ROWS: gl.constexpr,
    SLICES: gl.constexpr,
    WAVES: gl.constexpr,
    DEPTH: gl.constexpr,
    ITERATIONS: gl.constexpr,
    STREAM: gl.constexpr,
):
    """Multiply the rows of a block by its expert's weights and run the epilogue."""
    block, tile_n, split = _locate(num_valid_ptr, gl.cdiv(row_units, WAVES), k_splits, ROWS)
    if block < 0:
        return
    expert = gl.load(block_expert_ids_ptr + block * ROWS // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    first_row = block * ROWS
    # Real rows come first: a row block of a larger routing block may be all padding.
    if (gl.load(sorted_token_ids_ptr + first_row) & _TOKEN_MASK) >= num_tokens:
        return
    SCALED: gl.constexpr = x_scale_ptr is not None
    shape = Shape(
        FORMAT=X_FORMAT,
        ROWS=ROWS,
        SLICES=SLICES,
        WAVES=WAVES,
        DEPTH=DEPTH,
        ITERATIONS=ITERATIONS,
        STREAM=STREAM,
        SCALED=SCALED,
    )
    first_unit = tile_n * WAVES
    first_depth = split * units_per_split
    num_units = gl.minimum(units_per_split, depth_units - first_depth)
    unit = (expert.to(gl.int64) * row_units + first_unit) * depth_units + first_depth
    weights = open_weights(
        w_ptr + unit * 4096,
        w_scale_ptr + unit * 64,
        first_unit,
        num_units=num_units,
        row_units=row_units,
        depth_units=depth_units,
        shape=shape,
    )
    first_x_row = gl.to_tensor(0) if GATHER else first_row
    source = Activations(
        x=x_ptr + first_x_row.to(gl.int64) * (x_row_chunks * elements_per_chunk(X_FORMAT)),
        x_scale=x_scale_ptr + first_x_row.to(gl.int64) * x_scale_stride if SCALED else x_ptr,
        row_chunks=x_row_chunks,
        scale_stride=x_scale_stride,
        sorted_token_ids=sorted_token_ids_ptr,
        first_row=first_row,
        num_tokens=num_tokens,
        GATHER=GATHER,
    )
    num_blocks = num_k_blocks - first_depth * 4
    activations = open_activations(source, first_depth * 4, num_blocks, shape, SLICES * WAVES)
    sums = accumulate(weights, activations, shape)
    if SLICES > 1:
        sums = gl.sum(sums, axis=0)
    else:
        sums = sums.reshape(64 * WAVES, ROWS)
    tile = Tile(expert=expert, first_row=first_row, first_weight_row=first_unit * 64)
    rows = RowTerms(sorted_token_ids=sorted_token_ids_ptr, num_tokens=num_tokens)
    row = row_vector(sums)
    sums = scale_rows(sums, x_row_scale_ptr, source.row_of(row) + first_x_row)
    num_outputs = num_n_blocks * 32
    num_weight_rows = num_outputs if ACTIVATION == "" else 2 * num_outputs
    if partial_ptr is not None:
        store_partial(partial_ptr, sums, split, partial_rows, tile, num_weight_rows, rows)
    elif ACTIVATION == "":
        sums = add_bias(sums, bias_ptr, tile, num_weight_rows)
        sums = scale_rows(sums, sorted_weights_ptr, first_row + row)
        store_outputs(out_ptr, sums, tile, num_outputs, rows, ATOMIC)
    else:
        sums = scale_rows(sums, sorted_weights_ptr, first_row + row)
        sums = add_bias(sums, bias_ptr, tile, num_weight_rows)
        mx = MXFormat(FORMAT=OUT_FORMAT, EMAX=EMAX, THRESHOLD=THRESHOLD, INF_BYTE=INF_BYTE)
        store_features(
            out_ptr,
            out_scale_ptr,
            sums,
            tile,
            num_outputs,
            rows=rows,
            p0=p0,
            p1=p1,
            ACTIVATION=ACTIVATION,
            mx=mx,
        )
