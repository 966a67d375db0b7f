"""MoE GEMM of gfx950 for many rows of an expert: tiles of 256 weight rows on scaled MFMA.

A workgroup computes one tile: BLOCK_M sorted rows of one expert × 256 weight rows. With 256 or 128
sorted rows it has eight waves, two on each SIMD, in two groups; with 64 it has four.

Grid: one dimension, at least one workgroup for each tile that the plan can have; those without a
tile return at once. Workgroups are dealt out to the eight dies in turn. Each die gets a contiguous
run of tiles, in groups of GROUP_M row blocks times all weight tiles, so that the workgroups of a
die share rows and weights in its L2.

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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4 import NUM_XCDS
from ...device.compat import aggregate
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


@gluon.jit
def _tile_of_program(num_valid_ptr, tiles_n, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr):
    """Return row block and weight tile of this workgroup; the row block is −1 if it has none."""
    tiles_m = gl.cdiv(gl.load(num_valid_ptr), BLOCK_M)
    total = tiles_m * tiles_n
    program = gl.program_id(0)
    die = program % NUM_XCDS
    tile = die * (total // NUM_XCDS) + gl.minimum(die, total % NUM_XCDS) + program // NUM_XCDS
    group = tile // (GROUP_M * tiles_n)
    group_size = gl.maximum(gl.minimum(tiles_m - group * GROUP_M, GROUP_M), 1)
    place = tile % (GROUP_M * tiles_n)
    tile_m = gl.where(program < total, group * GROUP_M + place % group_size, -1)
    return tile_m, place // group_size


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


@aggregate
class Units:
    """Weights of a tile in units of 64 rows × 128 elements of depth.

    first: number of its first unit of rows, among those of all experts; tile_n: of the tile. rows,
    depth: units of an expert. blocks: MX blocks of depth.
    """

    first: gl.tensor
    tile_n: gl.tensor
    rows: gl.tensor
    depth: gl.tensor
    blocks: gl.tensor


@gluon.jit
def _source(rows, row_offset, row_scales, w, w_scale, units, variant):
    """`Source` of a tile."""
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    UNITS: gl.constexpr = copied_units(gl.num_warps())
    before, first = units.first * units.depth, units.tile_n * 4
    return Source(
        rows=rows,
        row_offset=row_offset,
        row_bytes=units.blocks * (16 if variant.FORMAT == "e2m1" else 32),
        weights=w + before * 4096,
        weight_offset=offsets_of_weights(first, units.rows, units.depth, LAYOUT),
        row_scales=row_scales,
        row_scale_offset=offsets_of_scales(UNITS, 0, variant.BLOCK_M // 64, units.depth),
        weight_scales=w_scale + before * 256,
        weight_scale_offset=offsets_of_scales(4, first, units.rows, units.depth),
        steps=units.depth,
        num_blocks=units.blocks,
    )


@gluon.jit
def _dense_source(rows, row_offset, w, w_scale, units):
    """`DenseSource` of a tile."""
    LAYOUT: gl.constexpr = half_fragment_copy_layout(gl.num_warps())
    before, first = units.first * units.depth, units.tile_n * 4
    return DenseSource(
        rows=rows,
        row_offset=row_offset,
        row_bytes=units.blocks * 64,
        weights=w + before * 4096,
        weight_offset=offsets_of_weights(first, units.rows, units.depth, LAYOUT),
        scales=w_scale + before * 256,
        scale_offset=offsets_of_unit_scales(first, units.rows, units.depth),
        num_blocks=units.blocks,
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
    ARRANGED: gl.constexpr = False,
):
    """One stage: ``x @ w[expert].T`` and its epilogue; see the module.

    x: uint8 codes or the bytes of bfloat16 values, rows 16 · x_row_chunks bytes apart: of tokens,
    or in stage 2 (ACTIVATION "") sorted. x_scale: by `arrange_scales`; None with bfloat16. w,
    w_scale: CDNA4_FRAGMENT. partial: None.
    """
    tile_m, tile_n = _tile_of_program(num_valid_ptr, gl.cdiv(row_units, 4), BLOCK_M, GROUP_M)
    first = gl.maximum(tile_m, 0) * BLOCK_M
    expert = gl.load(block_expert_ids_ptr + first // routing_block_m)
    has_rows = (gl.load(sorted_token_ids_ptr + first) & TOKEN_MASK) < num_tokens
    if (tile_m < 0) | (expert < 0) | (expert >= num_experts) | (has_rows == 0):
        return
    GATHER: gl.constexpr = ACTIVATION != ""
    stride = x_row_chunks * 16
    rows = x_ptr if GATHER else x_ptr + first.to(gl.int64) * stride
    row_offset = _row_offsets(sorted_token_ids_ptr, first, num_tokens, stride, BLOCK_M, GATHER)
    first_unit = expert.to(gl.int64) * row_units + tile_n * 4
    units = Units(first_unit, tile_n, row_units, depth_units, num_k_blocks)
    variant = Variant(BLOCK_M=BLOCK_M, FORMAT=X_FORMAT)
    if X_FORMAT == "bf16":
        source = _dense_source(rows, row_offset, w_ptr, w_scale_ptr, units)
        sums = multiply_dense_tile(source, make_dense_buffers(BLOCK_M), BLOCK_M)
    else:
        row_scales = x_scale_ptr + (first // 64).to(gl.int64) * depth_units * 256
        source = _source(rows, row_offset, row_scales, w_ptr, w_scale_ptr, units, variant)
        sums = multiply_tile(source, make_buffers(variant), variant)
    output = Output(
        out=out_ptr,
        scale=out_scale_ptr if out_scale_ptr is not None else out_ptr,
        columns=num_n_blocks * 32,
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
    bias_rows = expert.to(gl.int64) * output.columns * (2 if GATHER else 1)
    terms = _terms(
        sorted_token_ids_ptr, bias_ptr, bias_rows, x_row_scale_ptr, sorted_weights_ptr, num_tokens
    )
    _store(sums, terms, output, tile_m, tile_n, variant)
