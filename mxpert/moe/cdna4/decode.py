"""MoE GEMM for few tokens per expert on gfx950; it is limited by the memory that weights are in.

The problem is transposed: weights are operand A of MFMA and activation rows its N, so that a tile
has as few as 16 rows. Weights come in `Layout.CDNA4_FRAGMENT`: each wave streams its own units of
64 weight rows × 128 elements of depth with 16-byte loads straight into the registers that MFMA
reads, and a word of scales a lane for the four fragments of a unit. MXFP8 weights take twice the
loads of codes. Activation rows go to LDS by
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

Timeline of a wave: rows of the tile → first copy of activations (stage 1: after the expert) →
expert, DEPTH steps of weights → for each copy: wait for it, barrier, start the next one; for each
step: read activations from LDS, four MFMA (bf16: decode, 16 MFMA) for 16 rows, load the step DEPTH
ahead → load the epilogue's terms (stage 2), sum the slices, epilogue.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.activation import gated_activation
from ...device.cdna4 import NUM_XCDS
from ...device.cdna4_operands import elements_per_chunk
from ...device.compat import aggregate, buffer_load
from ...device.mx_codec import quantize_tile
from ...routing.plan import TOKEN_MASK
from .mainloop import (
    UNIT_WORDS,
    Shape,
    Units,
    accumulate,
    open_activations,
    open_weights,
    sum_slices,
    unit_items,
)

# ---- Epilogues of the gfx950 MoE GEMMs: bias, routing weight, activation, MX encoding, stores.
#
# Sums are float32 [weight rows, activation rows]. In stage 1 weight rows are 16 gates, 16 ups and
# so on (`GateUpOrder.INTERLEAVED_16`), so that a thread holds gate and up of its features.

_TOKEN_MASK = gl.constexpr(TOKEN_MASK)
cdna4 = gl.amd.cdna4


@aggregate
class Tile:
    """Place of a tile: its expert, its first sorted row and its first weight row."""

    expert: gl.tensor
    first_row: gl.tensor
    first_weight_row: gl.tensor


@aggregate
class Plan:
    """The routing plan; see `mxpert.routing.plan.RoutingPlan`. num_experts: local experts."""

    sorted_token_ids: gl.tensor
    block_expert_ids: gl.tensor
    num_valid: gl.tensor
    num_tokens: gl.tensor
    num_experts: gl.tensor
    routing_block_m: gl.tensor

    @gluon.jit
    def tokens(self, row):
        """Token of each sorted row; num_tokens or more for padding rows."""
        return gl.load(self.sorted_token_ids + row) & _TOKEN_MASK

    @gluon.jit
    def expert(self, first_row):
        """Expert of the row block that starts at a sorted row.

        −1 if its expert is not a local one, or if all of its rows are padding: real rows come
        first, and a row block may be a part of a routing block.
        """
        expert = gl.load(self.block_expert_ids + first_row // self.routing_block_m)
        used = (expert < self.num_experts) & (self.tokens(first_row) < self.num_tokens)
        return gl.where(used, expert, -1)


@aggregate
class MXFormat:
    """Format of stored rows: "bf16" or an element format, and the constants of its scale rule."""

    FORMAT: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr


@aggregate
class GatedActivation:
    """An activation with its parameters, as `gated_activation` takes them."""

    p0: gl.tensor
    p1: gl.tensor
    p2: gl.tensor | gl.constexpr
    NAME: gl.constexpr


@gluon.jit
def row_vector(sums):
    """0, 1, … of the activation rows of a tile, in the layout of its columns."""
    LAYOUT: gl.constexpr = sums.type.layout
    return gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))


@gluon.jit
def output_vector(values):
    """0, 1, … of the outputs of a tile, in the layout of its rows."""
    LAYOUT: gl.constexpr = values.type.layout
    return gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))


@gluon.jit
def scale_rows(sums, factors, row):
    """Multiply each row by its float32 factor; `factors` may be None."""
    if factors is None:
        return sums
    else:
        return sums * gl.load(factors + row)[None, :]


@aggregate
class DownTerms:
    """What stage 2's epilogue reads: token and weight of each row, bias of each output.

    A term that the layer lacks is 0, and not used.
    """

    token: gl.tensor
    weight: gl.tensor
    bias: gl.tensor

    @gluon.jit
    def apply(self, sums, HAS_BIAS: gl.constexpr, HAS_WEIGHTS: gl.constexpr):
        """``weight * (sum + bias)``."""
        if HAS_BIAS:
            sums = sums + self.bias[:, None]
        if HAS_WEIGHTS:
            sums = sums * self.weight[None, :]
        return sums


@gluon.jit
def load_down_terms(sums, bias, weights, tile, num_outputs, plan):
    """`DownTerms` of a tile for the result of `sum_slices` of these sums; pointers may be None.

    Called ahead of `sum_slices`, whose barriers then hide the latency of these loads.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    row = tile.first_row + gl.arange(0, sums.shape[2], gl.SliceLayout(0, LAYOUT))
    output = tile.first_weight_row + gl.arange(0, sums.shape[1], gl.SliceLayout(1, LAYOUT))
    token = plan.tokens(row)
    weight, values = gl.to_tensor(0.0), gl.to_tensor(0.0)
    if weights is not None:
        weight = gl.load(weights + row)
    if bias is not None:
        first = bias + tile.expert.to(gl.int64) * num_outputs
        values = buffer_load(first, output, output < num_outputs)
    return DownTerms(token=token, weight=weight, bias=values)


@gluon.jit
def add_bias(sums, bias, tile, num_rows):
    """Add the float32 biases [E, num_rows] of the tile's weight rows; `bias` may be None."""
    if bias is None:
        return sums
    else:
        row = tile.first_weight_row + output_vector(sums)
        values = gl.load(
            bias + tile.expert.to(gl.int64) * num_rows + row, mask=row < num_rows, other=0.0
        )
        return sums + values[:, None]


@gluon.jit
def store_partial(stores, sums, tile, num_rows, real):
    """Store the sums of one split of K to float32 [k_splits, partial_rows, num_rows].

    real: whether each row is no padding.
    """
    row = row_vector(sums)
    output = tile.first_weight_row + output_vector(sums)
    before = stores.split.to(gl.int64) * stores.partial_rows + tile.first_row
    base = stores.partial + before * num_rows
    offsets = row[None, :] * num_rows + output[:, None]
    cdna4.buffer_store(sums, base, offsets, mask=real[None, :] & (output < num_rows)[:, None])


@gluon.jit
def gate_and_up(sums):
    """Split sums [64 n, rows] in INTERLEAVED_16 order into gates and ups [32 n, rows]."""
    PAIRS: gl.constexpr = sums.shape[0] // 32
    ROWS: gl.constexpr = sums.shape[1]
    gate, up = gl.split(sums.reshape(PAIRS, 2, 16, ROWS).permute(0, 2, 3, 1))
    return gate.reshape(PAIRS * 16, ROWS), up.reshape(PAIRS * 16, ROWS)


@gluon.jit
def _store_columns(out, values, first_output, first_row, num_outputs, real):
    """Store values [outputs, rows] to rows of `out` [P, num_outputs]; `real` masks rows."""
    LAYOUT: gl.constexpr = values.type.layout
    output = first_output + output_vector(values)
    offsets = row_vector(values)[None, :] * num_outputs + output[:, None]
    mask = gl.convert_layout(real, gl.SliceLayout(0, LAYOUT))[None, :]
    base = out + first_row.to(gl.int64) * num_outputs
    cdna4.buffer_store(values, base, offsets, mask=mask & (output < num_outputs)[:, None])


@gluon.jit
def store_features(out, out_scale, sums, tile, num_features, plan, activation, mx):
    """Apply the activation to gates and ups; store bfloat16 rows [P, F] or an MX format.

    MX values are rounded to bfloat16 first: stage 1 with MX output equals bfloat16 stage 1 followed
    by `quantize`.
    """
    real = plan.tokens(tile.first_row + row_vector(sums)) < plan.num_tokens
    gate, up = gate_and_up(sums)
    values = gated_activation(
        gate, up, activation.p0, activation.p1, activation.p2, activation.NAME
    ).to(gl.bfloat16)
    first = tile.first_weight_row // 2
    if mx.FORMAT == "bf16":
        _store_columns(out, values, first, tile.first_row, num_features, real)
    else:
        PACK: gl.constexpr = 2 if mx.FORMAT == "e2m1" else 1
        codes, scale = quantize_tile(
            values.to(gl.float32), mx.FORMAT, mx.EMAX, mx.THRESHOLD, AXIS=0
        )
        _store_columns(out, codes, first // PACK, tile.first_row, num_features // PACK, real)
        _store_columns(out_scale, scale, first // 32, tile.first_row, num_features // 32, real)


@gluon.jit
def store_outputs(out, sums, tile, num_outputs, token, real, ATOMIC: gl.constexpr):
    """Store outputs by sorted row to [P, H], or add them to the float32 rows of tokens (ATOMIC).

    token, real: of each row; whether it is no padding.
    """
    if ATOMIC:
        output = tile.first_weight_row + output_vector(sums)
        offsets = token[None, :] * num_outputs + output[:, None]
        mask = real[None, :] & (output < num_outputs)[:, None]
        gl.amd.cdna4.buffer_atomic_add(out, offsets, sums, mask=mask, sem="relaxed")
    else:
        values = sums.to(out.dtype.element_ty)
        _store_columns(out, values, tile.first_weight_row, tile.first_row, num_outputs, real)


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
    "p2",
)
"""Numbers that Triton must not specialise on: they may be 1 or odd, which would compile one binary
per model."""


@aggregate
class Activations:
    """Activation rows in memory.

    x: bfloat16 values or uint8 codes, row_width elements a row. x_scale: uint32 words of E8M0
    bytes, scale_stride words a row, or bytes if rows do not begin at words. first_row: sorted row
    of the tile. GATHER: rows belong to tokens, which `plan` names; else they are sorted already and
    x is the tile's first one.
    """

    x: gl.tensor
    x_scale: gl.tensor
    row_width: gl.tensor
    scale_stride: gl.tensor
    first_row: gl.tensor
    plan: Plan
    GATHER: gl.constexpr

    @gluon.jit
    def row_of(self, place):
        """Row in memory of each row of the tile; a padding row gets any row that exists."""
        if self.GATHER:
            token = self.plan.tokens(self.first_row + place)
            return gl.where(token < self.plan.num_tokens, token, 0)
        else:
            return place

    @gluon.jit
    def scale_row_of(self, place):
        """Row of each row of the tile in a vector with a value a row of the whole matrix."""
        if self.GATHER:
            return self.row_of(place)
        else:
            return self.first_row + place


@gluon.jit
def _locate(plan, row_units, k_splits, WAVES: gl.constexpr, ROWS: gl.constexpr):
    """First row, first weight row and split of this workgroup's tile, and whether it has one.

    An XCD gets consecutive tiles; the splits and weight rows of a row block are neighbours. Without
    a tile the rows are those of the first one.
    """
    per_block = gl.cdiv(row_units, WAVES) * k_splits
    total = gl.load(plan.num_valid) // ROWS * per_block
    per_xcd = gl.cdiv(total, NUM_XCDS)
    place = gl.program_id(0) // NUM_XCDS
    index = gl.program_id(0) % NUM_XCDS * per_xcd + place
    exists = (place < per_xcd) & (index < total)
    first_row = gl.where(exists, index // per_block * ROWS, 0)
    inside = index % per_block
    return first_row, inside // k_splits * (WAVES * 64), inside % k_splits, exists


@gluon.jit
def _tile_at(plan, first_row, first_weight_row, exists):
    """`Tile` of `_locate`'s rows; the expert is −1 if it does not exist or has no real rows."""
    expert = gl.to_tensor(-1)
    if exists:
        expert = plan.expert(first_row)
    return Tile(expert=expert, first_row=first_row, first_weight_row=first_weight_row)


@gluon.jit
def _open_tile_weights(codes, scales, tile, first_depth, units, shape):
    """`WeightStream` of a tile from a unit of depth on; codes and scales of all experts."""
    first_unit = tile.first_weight_row // 64
    unit = (tile.expert.to(gl.int64) * units.rows + first_unit) * units.depth + first_depth
    codes += unit * unit_items(shape.FORMAT, shape.W_FORMAT)
    return open_weights(codes, scales + unit * UNIT_WORDS, first_unit, units, shape)


@gluon.jit
def _open_source(
    x, x_scale, row_chunks, scale_stride, first_row, plan, shape, GATHER: gl.constexpr
):
    """`Activations` of a tile. Sorted rows of a tile are neighbours; tokens may be anywhere."""
    row_width = row_chunks * elements_per_chunk(shape.FORMAT)
    if not GATHER:
        x += first_row.to(gl.int64) * row_width
    if x_scale is None:
        scales = x
    elif GATHER:
        scales = x_scale
    else:
        before = first_row.to(gl.int64) * scale_stride
        scales = x_scale + (before if shape.ALIGNED else before // 4)
    return Activations(
        x=x,
        x_scale=scales,
        row_width=row_width,
        scale_stride=scale_stride,
        first_row=first_row,
        plan=plan,
        GATHER=GATHER,
    )


class Stores(NamedTuple):
    """Where a tile's results go: outputs with their scales, or partial sums of its split."""

    out: gl.tensor
    out_scale: gl.tensor | None
    partial: gl.tensor | None
    partial_rows: gl.tensor
    split: gl.tensor


class Reads(NamedTuple):
    """What an epilogue reads: scales of the activation rows, biases, routing weights."""

    row_scale: gl.tensor | None
    bias: gl.tensor | None
    weights: gl.tensor | None


@gluon.jit
def _finish_down(parts, tile, source, stores, reads, num_outputs, ATOMIC: gl.constexpr):
    """Stage 2's epilogue. parts: of `accumulate`."""
    plan = source.plan
    terms = load_down_terms(parts, reads.bias, reads.weights, tile, num_outputs, plan)
    sums = sum_slices(parts)
    sums = scale_rows(sums, reads.row_scale, source.scale_row_of(row_vector(sums)))
    real = terms.token < plan.num_tokens
    if stores.partial is not None:
        store_partial(stores, sums, tile, num_outputs, real)
    else:
        sums = terms.apply(sums, reads.bias is not None, reads.weights is not None)
        store_outputs(stores.out, sums, tile, num_outputs, terms.token, real, ATOMIC)


@gluon.jit
def _finish_gate_up(parts, tile, source, stores, reads, num_features, activation, mx):
    """Stage 1's epilogue. parts: of `accumulate`."""
    plan = source.plan
    sums = sum_slices(parts)
    row = tile.first_row + row_vector(sums)
    sums = scale_rows(sums, reads.row_scale, source.scale_row_of(row_vector(sums)))
    if stores.partial is not None:
        real = plan.tokens(row) < plan.num_tokens
        store_partial(stores, sums, tile, 2 * num_features, real)
    else:
        sums = scale_rows(sums, reads.weights, row)
        sums = add_bias(sums, reads.bias, tile, 2 * num_features)
        store_features(stores.out, stores.out_scale, sums, tile, num_features, plan, activation, mx)


@gluon.jit(do_not_specialize=RUN_TIME_VALUES, do_not_specialize_on_alignment=("x_scale_ptr",))
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
    p2,
    X_FORMAT: gl.constexpr,
    GATHER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OUT_FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    ATOMIC: gl.constexpr,
    ROWS: gl.constexpr,
    SLICES: gl.constexpr,
    WAVES: gl.constexpr,
    DEPTH: gl.constexpr,
    ITERATIONS: gl.constexpr,
    STREAM: gl.constexpr,
    ALIGNED: gl.constexpr = True,
    W_FORMAT: gl.constexpr = "e2m1",
):
    """Multiply the rows of a block by its expert's weights and run the epilogue.

    ALIGNED: x_scale_stride counts words; else bytes of a dense matrix of scales, given as words.
    """
    sorting = sorted_token_ids_ptr, block_expert_ids_ptr, num_valid_ptr
    plan = Plan(*sorting, num_tokens, num_experts, routing_block_m)
    SCALED: gl.constexpr = x_scale_ptr is not None
    shape = Shape(
        *(X_FORMAT, ROWS, SLICES, WAVES, DEPTH, ITERATIONS, STREAM),
        SCALED=SCALED,
        ALIGNED=ALIGNED,
        W_FORMAT=W_FORMAT,
    )
    first_row, first_weight_row, split, exists = _locate(plan, row_units, k_splits, WAVES, ROWS)
    first_depth = split * units_per_split
    blocks = num_k_blocks - first_depth * 4
    source = _open_source(
        x_ptr, x_scale_ptr, x_row_chunks, x_scale_stride, first_row, plan, shape, GATHER
    )
    if not GATHER:  # Sorted rows need no expert. The end of a program waits for its copies.
        activations = open_activations(source, first_depth * 4, blocks, shape, SLICES * WAVES)
    tile = _tile_at(plan, first_row, first_weight_row, exists)
    if tile.expert < 0:
        return
    if GATHER:
        activations = open_activations(source, first_depth * 4, blocks, shape, SLICES * WAVES)
    units = Units(row_units, depth_units, gl.minimum(units_per_split * 4, blocks))
    weights = _open_tile_weights(w_ptr, w_scale_ptr, tile, first_depth, units, shape)
    parts = accumulate(weights, activations, shape)
    stores = Stores(out_ptr, out_scale_ptr, partial_ptr, partial_rows, split)
    reads = Reads(x_row_scale_ptr, bias_ptr, sorted_weights_ptr)
    if ACTIVATION == "":
        _finish_down(parts, tile, source, stores, reads, num_n_blocks * 32, ATOMIC)
    else:
        activation = GatedActivation(p0, p1, p2, ACTIVATION)
        mx = MXFormat(OUT_FORMAT, EMAX, THRESHOLD)
        _finish_gate_up(parts, tile, source, stores, reads, num_n_blocks * 32, activation, mx)
