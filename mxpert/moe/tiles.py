"""Tiles of an MoE stage in portable Triton: schedule, rows, columns, and the sums of split-K."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..routing.plan import TOKEN_MASK

_TOKEN_MASK = tl.constexpr(TOKEN_MASK)


class Rows(NamedTuple):
    """Sorted rows of a tile, int32 [BLOCK_M] each; `mask` is false for padding rows."""

    index: tl.tensor
    token: tl.tensor
    mask: tl.tensor


class Columns(NamedTuple):
    """Output columns of a tile: the first one, all of them [BLOCK_N], their mask, their total."""

    first: tl.tensor
    index: tl.tensor
    mask: tl.tensor
    total: tl.tensor


class Partials(NamedTuple):
    """Float32 scratch [split_k, num_rows, width] for the partial sums of split-K."""

    ptr: tl.tensor
    num_rows: tl.tensor
    width: tl.tensor


@triton.jit
def schedule(
    num_valid_ptr,
    num_columns,
    split_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return row block, column tile and split of this program; the row block is −1 if it has none.

    The splits of a tile have neighbouring program ids. GROUP_M row blocks of the same column tile
    run together and share its weights in L2.
    """
    num_tiles_n = tl.cdiv(num_columns, BLOCK_N)
    split = tl.program_id(0) % split_k
    tile = tl.program_id(0) // split_k
    num_tiles_m = tl.cdiv(tl.load(num_valid_ptr), BLOCK_M)
    group = tile // (GROUP_M * num_tiles_n)
    group_size = tl.maximum(tl.minimum(num_tiles_m - group * GROUP_M, GROUP_M), 1)
    place = tile % (GROUP_M * num_tiles_n)
    tile_m = tl.where(tile < num_tiles_m * num_tiles_n, group * GROUP_M + place % group_size, -1)
    return tile_m, place // group_size, split


@triton.jit
def open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M: tl.constexpr):
    """`Rows` of a row block."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.load(sorted_token_ids_ptr + rows) & _TOKEN_MASK
    return Rows(rows, tokens, tokens < num_tokens)


@triton.jit
def open_columns(tile_n, total, BLOCK_N: tl.constexpr):
    """`Columns` of a column tile."""
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return Columns(tile_n * BLOCK_N, columns, columns < total, total)


@triton.jit
def gate_up_row(feature, gate_up_group):
    """Weight row of a feature's gate; the up row is `gate_up_group` rows later in either order."""
    return feature // gate_up_group * (2 * gate_up_group) + feature % gate_up_group


@triton.jit
def store_partial(partials, acc, split, rows, columns, first_column=0):
    """Store the float32 accumulators [BLOCK_M, BLOCK_N] of one split into `Partials`.

    first_column: distance of the columns in the scratch from those of the output.
    """
    first_row = split.to(tl.int64) * partials.num_rows
    offsets = (first_row + rows.index)[:, None] * partials.width + columns.index[None, :]
    tl.store(
        partials.ptr + first_column + offsets, acc, mask=rows.mask[:, None] & columns.mask[None, :]
    )


@triton.jit
def store_gate_and_up(partials, both, split, rows, features, num_features):
    """`store_partial` of gate, and of up `num_features` columns further right."""
    gate, up = both
    store_partial(partials, gate, split, rows, features)
    store_partial(partials, up, split, rows, features, num_features)


@triton.jit
def sum_partials(partials, split_k, rows, columns, first_column=0):
    """Sum the splits in ascending order, float32 [BLOCK_M, BLOCK_N]; see `store_partial`."""
    total = tl.zeros((rows.index.shape[0], columns.index.shape[0]), tl.float32)
    mask = rows.mask[:, None] & columns.mask[None, :]
    for split in range(split_k):
        first_row = tl.cast(split, tl.int64) * partials.num_rows
        offsets = (first_row + rows.index)[:, None] * partials.width + columns.index[None, :]
        total += tl.load(partials.ptr + first_column + offsets, mask=mask, other=0.0)
    return total
