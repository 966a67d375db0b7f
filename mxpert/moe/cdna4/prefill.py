"""MoE GEMM of gfx950 for many rows of an expert: tiles of 256 weight rows on scaled MFMA.

A workgroup computes one tile: BLOCK_M sorted rows of one expert × 256 weight rows. With 256 or 128
sorted rows it has eight waves, two on each SIMD, in two groups; with 64 it has four.

Grid: one dimension, at least one workgroup for each tile that the plan can have; those without a
tile return at once. PERSISTENT: as many as are resident; workgroup p computes places p, p + grid, …
of the order. They need no barrier between tiles: all have read their operands when the last phase
ends. No code leaves this loop (disable_licm): lane constants would need more registers than its
MFMA leave.

Order of tiles: NUM_RUNS equal runs, whose tiles workgroups take in turn. Workgroup p runs on die
p % 8, so with eight runs each die has one of its own. In the runs GROUP_M row blocks times all
weight tiles follow each other, a column of GROUP_M tiles at a time, so that neighbours share rows
and weights in L2.

Roles: every wave copies, reads and multiplies. Two groups of four waves alternate between memory
and compute phases (`lib.phases`).

Barriers: two a step, one after each phase.
    after the memory phase: operands are in registers, and the copies that the next memory phase
        reads have landed.
    after the compute phase: the LDS that its operands came from may be overwritten.

Pipeline: see `prefill_mainloop`, and `prefill_bf16` for bfloat16 rows. A step is 128 elements of
    the contracted dimension, with bfloat16 rows 64.

Timeline of a step of 256 × 256, e2m1 (e4m3 twice as long), modelled with Triton 3.6.0: 1084 cycles,
    94 % of them MFMA (e4m3: 2066 and 99 %).
    group 1:  copies, reads            | MFMA (512 cycles)        |
    group 2:  MFMA of the step before  | copies, reads            |
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4_operands import loads_per_unit
from ...device.compat import aggregate
from .decode import Plan
from .prefill_bf16 import (
    DenseSource,
    half_fragment_copy_layout,
    make_dense_buffers,
    multiply_dense_tile,
    offsets_of_unit_scales,
)
from .prefill_mainloop import (
    Source,
    Variant,
    copied_rows,
    copied_units,
    make_buffers,
    multiply_tile,
    offsets_of_scales,
    offsets_of_weights,
)
from .prefill_tiles import (
    TOKEN_MASK,
    Output,
    Quadrant,
    Terms,
    fragment_copy_layout,
    store_features,
    store_outputs,
    sums_of,
    wave_rows,
    wave_units,
)

RUN_TIME_VALUES = (
    "num_tokens",
    "num_experts",
    "num_n_blocks",
    "row_units",
    "depth_units",
    "routing_block_m",
    "num_k_blocks",
    "x_row_chunks",
    "p0",
    "p1",
    "p2",
)
"""Numbers that Triton must not specialise on: that would compile one binary a model."""


@aggregate
class Operands:
    """Sorted rows and weights with their scales; see the kernel."""

    x: gl.tensor
    x_scale: gl.tensor | gl.constexpr
    w: gl.tensor
    w_scale: gl.tensor
    x_row_chunks: gl.tensor
    num_k_blocks: gl.tensor
    row_units: gl.tensor
    depth_units: gl.tensor


@aggregate
class Epilogue:
    """What follows the sums: pointers, None where there is nothing, and the options' constants."""

    out: gl.tensor
    out_scale: gl.tensor | gl.constexpr
    bias: gl.tensor | gl.constexpr
    row_scale: gl.tensor | gl.constexpr
    weights: gl.tensor | gl.constexpr
    num_n_blocks: gl.tensor
    p0: gl.tensor
    p1: gl.tensor
    p2: gl.tensor | gl.constexpr
    FORMAT: gl.constexpr
    ACTIVATION: gl.constexpr
    ATOMIC: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr
    ARRANGED: gl.constexpr


@aggregate
class Raster:
    """Order of the tiles: weight tiles of a row block; see the kernel for the constants."""

    tiles_n: gl.tensor
    BLOCK_M: gl.constexpr
    GROUP_M: gl.constexpr
    NUM_RUNS: gl.constexpr

    @gluon.jit
    def tiles_m(self, plan):
        """Row blocks of the plan."""
        return gl.cdiv(gl.load(plan.num_valid), self.BLOCK_M)


@aggregate
class Tile:
    """Row block, weight tile, first sorted row and expert; `absent` if there is nothing to do."""

    m: gl.tensor
    n: gl.tensor
    first: gl.tensor
    expert: gl.tensor
    absent: gl.tensor


@gluon.jit
def _open_tile(program, raster, plan):
    """The `Tile` in a place of the order."""
    GROUP_M: gl.constexpr = raster.GROUP_M
    NUM_RUNS: gl.constexpr = raster.NUM_RUNS
    tiles_m = raster.tiles_m(plan)
    total = tiles_m * raster.tiles_n
    run = program % NUM_RUNS
    tile = run * (total // NUM_RUNS) + gl.minimum(run, total % NUM_RUNS) + program // NUM_RUNS
    group = tile // (GROUP_M * raster.tiles_n)
    group_size = gl.maximum(gl.minimum(tiles_m - group * GROUP_M, GROUP_M), 1)
    place = tile % (GROUP_M * raster.tiles_n)
    tile_m = gl.where(program < total, group * GROUP_M + place % group_size, -1)
    first = gl.maximum(tile_m, 0) * raster.BLOCK_M
    expert = gl.load(plan.block_expert_ids + first // plan.routing_block_m)
    has_rows = (gl.load(plan.sorted_token_ids + first) & TOKEN_MASK) < plan.num_tokens
    absent = (tile_m < 0) | (expert < 0) | (expert >= plan.num_experts) | (has_rows == 0)
    return Tile(m=tile_m, n=place // group_size, first=first, expert=expert, absent=absent)


@gluon.jit
def _row_offsets(ids, first, num_tokens, stride, BLOCK_M: gl.constexpr, GATHER: gl.constexpr):
    """Offsets of the tile's rows, in the order of the copies.

    With GATHER rows are tokens, and the offset counts from the first token; padding repeats the
    last token. Without it rows are sorted, and the offset counts from the tile's first row.
    """
    row = copied_rows(BLOCK_M)
    if GATHER:
        row = gl.minimum(gl.load(ids + first + row) & TOKEN_MASK, num_tokens - 1)
    return row * stride


@gluon.jit
def _source(tile, operands, plan, variant, GATHER: gl.constexpr):
    """`Source` of a tile."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    UNITS: gl.constexpr = copied_units(gl.num_warps())
    LOADS: gl.constexpr = loads_per_unit(variant.W_FORMAT)
    ids, first = plan.sorted_token_ids, tile.first
    row_units, depth_units = operands.row_units, operands.depth_units
    stride = operands.x_row_chunks * 16
    rows = operands.x if GATHER else operands.x + first.to(gl.int64) * stride
    row_offset = _row_offsets(ids, first, plan.num_tokens, stride, BLOCK_M, GATHER)
    row_bytes = operands.num_k_blocks * (16 if variant.FORMAT == "e2m1" else 32)
    row_scales = operands.x_scale + (first // 64).to(gl.int64) * depth_units * 256
    units = (tile.expert.to(gl.int64) * row_units + tile.n * 4) * depth_units
    return Source(
        rows=rows,
        row_offset=row_offset,
        row_bytes=row_bytes,
        weights=operands.w + units * (LOADS * 1024),
        weight_offset=offsets_of_weights(tile.n * 4, row_units, depth_units, LAYOUT, LOADS),
        row_scales=row_scales,
        row_scale_offset=offsets_of_scales(UNITS, 0, BLOCK_M // 64, depth_units),
        weight_scales=operands.w_scale + units * 256,
        weight_scale_offset=offsets_of_scales(4, tile.n * 4, row_units, depth_units),
        steps=depth_units,
        num_blocks=operands.num_k_blocks,
    )


@gluon.jit
def _dense_source(tile, operands, plan, variant, GATHER: gl.constexpr):
    """`DenseSource` of a tile with bfloat16 rows."""
    LAYOUT: gl.constexpr = half_fragment_copy_layout(gl.num_warps())
    ids, first = plan.sorted_token_ids, tile.first
    row_units, depth_units = operands.row_units, operands.depth_units
    stride = operands.x_row_chunks * 16
    units = (tile.expert.to(gl.int64) * row_units + tile.n * 4) * depth_units
    return DenseSource(
        rows=operands.x if GATHER else operands.x + first.to(gl.int64) * stride,
        row_offset=_row_offsets(ids, first, plan.num_tokens, stride, variant.BLOCK_M, GATHER),
        row_bytes=operands.num_k_blocks * 64,
        weights=operands.w + units * 4096,
        weight_offset=offsets_of_weights(tile.n * 4, row_units, depth_units, LAYOUT, 4),
        scales=operands.w_scale + units * 256,
        scale_offset=offsets_of_unit_scales(tile.n * 4, row_units, depth_units),
        num_blocks=operands.num_k_blocks,
        STREAM=variant.STREAM,
    )


@gluon.jit
def _terms(ids, bias, bias_rows, row_scale, weights, num_tokens):
    """`Terms` of a tile, whose expert's biases start at bias_rows. Pointers may be None."""
    return Terms(
        sorted_token_ids=ids,
        bias=ids if bias is None else bias + bias_rows,
        row_scale=ids if row_scale is None else row_scale,
        weights=ids if weights is None else weights,
        num_tokens=num_tokens,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_WEIGHTS=weights is not None,
    )


@gluon.jit
def _store(sums, terms, output, tile_m, tile_n, variant):
    """Run the epilogue of each quadrant."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    FORMAT: gl.constexpr = variant.FORMAT
    for unit in gl.static_range(wave_units(BLOCK_M, FORMAT)):
        for half in gl.static_range(wave_rows(BLOCK_M, FORMAT) // 32):
            quadrant = Quadrant(tile_m, tile_n, BLOCK_M, FORMAT, half, unit)
            total = sums_of(sums, quadrant)
            if output.ACTIVATION != "":
                store_features(total, terms, output, quadrant)
            else:
                store_outputs(total, terms, output, quadrant)


@gluon.jit
def _make_buffers(variant):
    """LDS of a tile."""
    if variant.FORMAT == "bf16":
        return make_dense_buffers(variant.BLOCK_M)
    else:
        return make_buffers(variant)


@gluon.jit
def _compute(tile, operands, plan, epilogue, buffers, variant):
    """One tile: its sums and their epilogue."""
    ACTIVATION: gl.constexpr = epilogue.ACTIVATION
    GATHER: gl.constexpr = ACTIVATION != ""
    out_scale = epilogue.out_scale
    if variant.FORMAT == "bf16":
        source = _dense_source(tile, operands, plan, variant, GATHER)
        sums = multiply_dense_tile(source, buffers, variant.BLOCK_M)
    else:
        sums = multiply_tile(_source(tile, operands, plan, variant, GATHER), buffers, variant)
    output = Output(
        out=epilogue.out,
        scale=out_scale if out_scale is not None else epilogue.out,
        columns=epilogue.num_n_blocks * 32,
        p0=epilogue.p0,
        p1=epilogue.p1,
        p2=epilogue.p2,
        FORMAT=epilogue.FORMAT,
        ACTIVATION=ACTIVATION,
        ATOMIC=epilogue.ATOMIC,
        EMAX=epilogue.EMAX,
        THRESHOLD=epilogue.THRESHOLD,
        ARRANGED=epilogue.ARRANGED,
    )
    terms = _terms(
        plan.sorted_token_ids,
        epilogue.bias,
        tile.expert.to(gl.int64) * output.columns * (2 if GATHER else 1),
        epilogue.row_scale,
        epilogue.weights,
        plan.num_tokens,
    )
    _store(sums, terms, output, tile.m, tile.n, variant)


@gluon.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_gemm_prefill_cdna4_kernel(
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
    num_n_blocks,
    row_units,
    depth_units,
    routing_block_m,
    num_k_blocks,
    x_row_chunks,
    p0,
    p1,
    p2,
    X_FORMAT: gl.constexpr,
    OUT_FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ATOMIC: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr,
    NUM_RUNS: gl.constexpr,
    STREAM: gl.constexpr,
    PERSISTENT: gl.constexpr,
    ARRANGED: gl.constexpr = False,
    W_FORMAT: gl.constexpr = "e2m1",
):
    """One stage: ``x @ w[expert].T`` and its epilogue; see the module.

    x: bytes, rows 16 · x_row_chunks apart: of tokens, in stage 2 (ACTIVATION "") sorted. x_scale:
    by `arrange_scales`; None with bf16. w, w_scale: CDNA4_FRAGMENT, STREAM: read once.
    """
    sorting = sorted_token_ids_ptr, block_expert_ids_ptr, num_valid_ptr
    plan = Plan(*sorting, num_tokens, num_experts, routing_block_m)
    operands = Operands(
        x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, x_row_chunks, num_k_blocks, row_units, depth_units
    )
    epilogue = Epilogue(
        out=out_ptr,
        out_scale=out_scale_ptr,
        bias=bias_ptr,
        row_scale=x_row_scale_ptr,
        weights=sorted_weights_ptr,
        num_n_blocks=num_n_blocks,
        p0=p0,
        p1=p1,
        p2=p2,
        FORMAT=OUT_FORMAT,
        ACTIVATION=ACTIVATION,
        ATOMIC=ATOMIC,
        EMAX=EMAX,
        THRESHOLD=THRESHOLD,
        ARRANGED=ARRANGED,
    )
    variant = Variant(BLOCK_M=BLOCK_M, FORMAT=X_FORMAT, STREAM=STREAM, W_FORMAT=W_FORMAT)
    buffers = _make_buffers(variant)
    raster = Raster(gl.cdiv(row_units, 4), BLOCK_M, GROUP_M, NUM_RUNS)
    if PERSISTENT:
        total = raster.tiles_m(plan) * raster.tiles_n
        for place in tl.range(gl.program_id(0), total, gl.num_programs(0), disable_licm=True):
            tile = _open_tile(place, raster, plan)
            if tile.absent == 0:
                _compute(tile, operands, plan, epilogue, buffers, variant)
    else:
        tile = _open_tile(gl.program_id(0), raster, plan)
        if tile.absent:
            return
        _compute(tile, operands, plan, epilogue, buffers, variant)
