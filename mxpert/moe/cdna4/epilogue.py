"""Epilogues of the gfx950 MoE GEMMs: bias, routing weight, activation, MX encoding, stores.

Sums are float32 [weight rows, activation rows]. In stage 1 weight rows are 16 gates, 16 ups and so
on (`GateUpOrder.INTERLEAVED_16`), so that a thread holds gate and up of its features.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.activation import gated_activation
from ...device.compat import aggregate
from ...device.mx_codec import quantize_tile
from ...routing.plan import TOKEN_MASK

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
def store_partial(partial, sums, split, partial_rows, tile, num_rows, plan):
    """Store the sums of one split of K to float32 [k_splits, partial_rows, num_rows]."""
    row = row_vector(sums)
    output = tile.first_weight_row + output_vector(sums)
    real = plan.tokens(tile.first_row + row) < plan.num_tokens
    base = partial + (split.to(gl.int64) * partial_rows + tile.first_row) * num_rows
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
    values = gated_activation(gate, up, activation.p0, activation.p1, activation.NAME).to(
        gl.bfloat16
    )
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
def store_outputs(out, sums, tile, num_outputs, plan, ATOMIC: gl.constexpr):
    """Store outputs by sorted row to [P, H], or add them to the float32 rows of tokens (ATOMIC)."""
    token = plan.tokens(tile.first_row + row_vector(sums))
    real = token < plan.num_tokens
    if ATOMIC:
        output = tile.first_weight_row + output_vector(sums)
        offsets = token[None, :] * num_outputs + output[:, None]
        mask = real[None, :] & (output < num_outputs)[:, None]
        gl.amd.cdna4.buffer_atomic_add(out, offsets, sums, mask=mask, sem="relaxed")
    else:
        values = sums.to(out.dtype.element_ty)
        _store_columns(out, values, tile.first_weight_row, tile.first_row, num_outputs, real)
