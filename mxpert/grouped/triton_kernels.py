"""Device code of the grouped GEMMs: one matrix product per group of rows, groups of any size.

`tl.dot_scaled` multiplies MX operands natively on gfx950 and Blackwell. On Hopper it converts them
to bf16 in registers before wgmma. The conversion is exact: within float32's range, an fp8 value
times a power of two is a bf16 number.

The kernels read group bounds on the device. Rows before the first and past the last group are
handled as one more group, whose programs store zeros. The output therefore needs no clearing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.fp8 import decode_fp8, has_fp8_instructions
from ..device.groups import clamp_rows, group_extents, pick


class GroupTile(NamedTuple):
    """An output tile: its group, first row, end row of the group (0: no tile), column tile.

    Rows of no group are numbered without the gap between them: rows below `gap` are `shift` less.
    """

    group: tl.tensor
    first_row: tl.tensor
    stop: tl.tensor
    tile_n: tl.tensor
    gap: tl.tensor
    shift: tl.tensor


class Sizes(NamedTuple):
    """Groups, rows of all groups, columns of the output, depth of the reduction."""

    num_groups: tl.tensor | tl.constexpr
    num_rows: tl.tensor | tl.constexpr
    num_n: tl.tensor | tl.constexpr
    num_k: tl.tensor | tl.constexpr


@triton.jit
def schedule_groups(
    tile,
    group_offsets_ptr,
    sizes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`GroupTile` number `tile`.

    GROUP_M row tiles of the same column tile run together and share its operand in L2.
    """
    num_groups, num_tiles_n = sizes.num_groups, tl.cdiv(sizes.num_n, BLOCK_N)
    starts, stops, _ = group_extents(
        group_offsets_ptr, num_groups, sizes.num_rows, BLOCK_M, BLOCK_G
    )
    index = tl.arange(0, BLOCK_G)
    before = pick(index == 0, starts)  # rows ahead of the first group
    shift = tl.where(index == num_groups, starts - before, 0)
    gap = tl.where(index == num_groups, starts, 0)
    starts = tl.where(index == num_groups, shift, starts)
    tiles = tl.cdiv(tl.maximum(stops - starts, 0), BLOCK_M)
    ends = tl.cumsum(tiles, axis=0)
    num_tiles_m = tl.sum(tiles, axis=0)
    band, place = tile // (GROUP_M * num_tiles_n), tile % (GROUP_M * num_tiles_n)
    height = tl.maximum(tl.minimum(num_tiles_m - band * GROUP_M, GROUP_M), 1)
    tile_m = band * GROUP_M + place % height
    begins = ends - tiles
    in_use = tile < num_tiles_m * num_tiles_n
    chosen = (begins <= tile_m) & (tile_m < ends) & in_use  # [BLOCK_G], at most one is true
    first_row = pick(chosen, starts + (tile_m - begins) * BLOCK_M)
    return GroupTile(
        group=pick(chosen, index),
        first_row=first_row,
        stop=pick(chosen, stops),
        tile_n=place // height,
        gap=pick(chosen, gap),
        shift=pick(chosen, shift),
    )


@triton.jit
def load_tile(row_ptrs, row_mask, k, last, stride_k, BLOCK_K: tl.constexpr):
    """Load [rows, BLOCK_K] from position k of the reduction; 0 from position `last` on."""
    steps = tl.arange(0, BLOCK_K)
    ptrs = row_ptrs + tl.cast(k, tl.int64) * stride_k
    return tl.load(
        ptrs[:, None] + (steps * stride_k)[None, :],
        other=0,
        mask=row_mask[:, None] & (k + steps < last)[None, :],
    )


class Rows(NamedTuple):
    """Values of rows and their E8M0 scales, None for bf16; strides in elements."""

    ptr: tl.tensor
    scale_ptr: tl.tensor | None
    stride_row: tl.tensor | tl.constexpr
    stride_k: tl.tensor | tl.constexpr
    scale_stride_row: tl.tensor | tl.constexpr
    scale_stride_k: tl.tensor | tl.constexpr


class Operand(NamedTuple):
    """Those rows of a matrix to multiply; masked ones are not read and count as zeros."""

    data: Rows
    rows: tl.tensor
    mask: tl.tensor


class Tiling(NamedTuple):
    """Element formats of both operands, "bf16" twice or MX, and the tile of a program.

    PREFETCH_SCALES: load scales one step before their use. On NVIDIA scales are too narrow for
    asynchronous copies, so the pipeliner would load them in the step that uses them.
    """

    A_FORMAT: tl.constexpr
    B_FORMAT: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP_M: tl.constexpr
    PREFETCH_SCALES: tl.constexpr


@triton.jit
def multiply_rows(a, b, first, last, tiling):
    """``a[rows, first:last] @ b[rows, first:last].T``, float32 [a rows, b rows].

    Args:
        a, b: Operand. first, last: range of K, multiples of 32 with MX formats.
    """
    BLOCK_K: tl.constexpr = tiling.BLOCK_K
    x, y = a.data, b.data
    acc = tl.zeros((a.rows.shape[0], b.rows.shape[0]), tl.float32)
    a_ptrs = x.ptr + a.rows.to(tl.int64) * x.stride_row
    b_ptrs = y.ptr + b.rows.to(tl.int64) * y.stride_row
    if tiling.A_FORMAT == "bf16":
        tl.static_assert(tiling.B_FORMAT == "bf16", "operands are both bf16 or both MX")
        for k in range(first, last, BLOCK_K):
            # [a rows, BLOCK_K] and [b rows, BLOCK_K] bf16
            a_tile = load_tile(a_ptrs, a.mask, k, last, x.stride_k, BLOCK_K)
            b_tile = load_tile(b_ptrs, b.mask, k, last, y.stride_k, BLOCK_K)
            acc = tl.dot(a_tile, b_tile.T, acc)
    else:
        A_FORMAT: tl.constexpr = tiling.A_FORMAT
        B_FORMAT: tl.constexpr = tiling.B_FORMAT
        STEP: tl.constexpr = BLOCK_K // 32
        AHEAD: tl.constexpr = STEP if tiling.PREFETCH_SCALES else 0
        a_scale_ptrs = x.scale_ptr + a.rows.to(tl.int64) * x.scale_stride_row
        b_scale_ptrs = y.scale_ptr + b.rows.to(tl.int64) * y.scale_stride_row
        end = last // 32
        a_scale = load_tile(a_scale_ptrs, a.mask, first // 32, end, x.scale_stride_k, STEP)
        b_scale = load_tile(b_scale_ptrs, b.mask, first // 32, end, y.scale_stride_k, STEP)
        for block in range(first // 32, end, STEP):
            # [a rows, BLOCK_K] and [b rows, BLOCK_K] uint8 codes
            a_tile = load_tile(a_ptrs, a.mask, block * 32, last, x.stride_k, BLOCK_K)
            b_tile = load_tile(b_ptrs, b.mask, block * 32, last, y.stride_k, BLOCK_K)
            # [a rows, STEP] and [b rows, STEP] uint8 E8M0
            next_a = load_tile(a_scale_ptrs, a.mask, block + AHEAD, end, x.scale_stride_k, STEP)
            next_b = load_tile(b_scale_ptrs, b.mask, block + AHEAD, end, y.scale_stride_k, STEP)
            a_scale = a_scale if tiling.PREFETCH_SCALES else next_a
            b_scale = b_scale if tiling.PREFETCH_SCALES else next_b
            if has_fp8_instructions():
                acc = tl.dot_scaled(a_tile, a_scale, A_FORMAT, b_tile.T, b_scale, B_FORMAT, acc)
            else:
                a_tile, b_tile = decode_fp8(a_tile, A_FORMAT), decode_fp8(b_tile, B_FORMAT)
                acc = tl.dot_scaled(a_tile, a_scale, "bf16", b_tile.T, b_scale, "bf16", acc)
            a_scale, b_scale = next_a, next_b
    return acc


class Batch(NamedTuple):
    """Rows of the first group; elements between the values of two groups, and between scales."""

    first: Rows
    stride: tl.tensor | tl.constexpr
    scale_stride: tl.tensor | tl.constexpr


@triton.jit
def _multiply_tile(c_ptr, tile, a, batch, sizes, tiling):
    """Multiply and store a `GroupTile` that exists; a: `Rows`, batch: `Batch`."""
    m = tile.first_row + tl.arange(0, tiling.BLOCK_M)
    n = tile.tile_n * tiling.BLOCK_N + tl.arange(0, tiling.BLOCK_N)
    m_mask, n_mask = m < tile.stop, n < sizes.num_n
    # Rows without a group get zeros: their reduction is empty.
    last = tl.where(tile.group == sizes.num_groups, 0, sizes.num_k)
    group = tile.group.to(tl.int64)
    b = batch.first
    scale_ptr = b.scale_ptr
    if scale_ptr is not None:
        scale_ptr += group * batch.scale_stride
    ptr = b.ptr + group * batch.stride
    b = Rows(ptr, scale_ptr, b.stride_row, b.stride_k, b.scale_stride_row, b.scale_stride_k)
    acc = multiply_rows(Operand(a, m, m_mask), Operand(b, n, n_mask), 0, last, tiling)
    m = tl.where(m < tile.gap, m - tile.shift, m)
    offsets = m.to(tl.int64)[:, None] * sizes.num_n + n[None, :]
    tl.store(
        c_ptr + offsets, acc.to(c_ptr.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :]
    )


@triton.jit(
    do_not_specialize=(
        "num_rows",
        "num_groups",
        "num_tiles",
        "a_scale_stride_m",
        "b_scale_stride_g",
        "b_scale_stride_n",
    ),
    do_not_specialize_on_alignment=("a_scale_ptr", "b_scale_ptr", "group_offsets_ptr"),
)
def _grouped_gemm_kernel(
    c_ptr,
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    group_offsets_ptr,
    num_rows,
    num_groups,
    num_n,
    num_k,
    num_tiles,
    a_stride_m,
    a_stride_k,
    a_scale_stride_m,
    a_scale_stride_k,
    b_stride_g,
    b_stride_n,
    b_stride_k,
    b_scale_stride_g,
    b_scale_stride_n,
    b_scale_stride_k,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """c[rows of g] = a[rows of g] @ b[g].T, c contiguous [num_rows, num_n]; zeros elsewhere.

    Grid: (bound of the number of tiles,), one [BLOCK_M, BLOCK_N] tile per program, in the order of
    `schedule_groups`; of any size if the kernel gets the bound as `num_tiles`. The strides of b are
    those of its logical dimensions g, n and k, so b may have either memory order.
    """
    a = Rows(a_ptr, a_scale_ptr, a_stride_m, a_stride_k, a_scale_stride_m, a_scale_stride_k)
    b = Rows(b_ptr, b_scale_ptr, b_stride_n, b_stride_k, b_scale_stride_n, b_scale_stride_k)
    batch = Batch(b, b_stride_g, b_scale_stride_g)
    sizes = Sizes(num_groups, num_rows, num_n, num_k)
    if num_tiles is None:
        tile = schedule_groups(
            tl.program_id(0), group_offsets_ptr, sizes, BLOCK_M, BLOCK_N, GROUP_M, BLOCK_G
        )
        if tile.stop == 0:
            return
        _multiply_tile(
            c_ptr,
            tile,
            a,
            batch,
            sizes,
            Tiling(A_FORMAT, B_FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PREFETCH_SCALES),
        )
    else:
        for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            tile = schedule_groups(
                number, group_offsets_ptr, sizes, BLOCK_M, BLOCK_N, GROUP_M, BLOCK_G
            )
            if tile.stop > 0:
                _multiply_tile(
                    c_ptr,
                    tile,
                    a,
                    batch,
                    sizes,
                    Tiling(A_FORMAT, B_FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PREFETCH_SCALES),
                )


class Matrices(NamedTuple):
    """One matrix for each group, with strides in elements."""

    ptr: tl.tensor
    stride_g: tl.tensor | tl.constexpr
    stride_row: tl.tensor | tl.constexpr
    stride_column: tl.tensor | tl.constexpr


class WeightSizes(NamedTuple):
    """Positions of the reduction, rows and columns of each group's matrix."""

    reduction: tl.tensor | tl.constexpr
    num_n: tl.tensor | tl.constexpr
    num_k: tl.tensor | tl.constexpr


@triton.jit
def _multiply_weight_tile(tile, out, grad, a, offsets_ptr, sizes, tiling, ACCUMULATE: tl.constexpr):
    """Multiply and store tile number `tile` of all groups' `Matrices`; grad, a: `Rows`."""
    BLOCK_M: tl.constexpr = tiling.BLOCK_M
    BLOCK_N: tl.constexpr = tiling.BLOCK_N
    GROUP_M: tl.constexpr = tiling.GROUP_M
    num_n, num_k = sizes.num_n, sizes.num_k
    tiles_m, tiles_n = tl.cdiv(num_n, BLOCK_M), tl.cdiv(num_k, BLOCK_N)
    group, tile = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
    band, place = tile // (GROUP_M * tiles_n), tile % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    first = clamp_rows(tl.load(offsets_ptr + group), sizes.reduction)
    last = clamp_rows(tl.load(offsets_ptr + group + 1), sizes.reduction)
    if tiling.A_FORMAT != "bf16":  # tell the compiler that the loaded offsets are multiples of 32
        first, last = first // 32 * 32, last // 32 * 32
    n = (band * GROUP_M + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask, k_mask = n < num_n, k < num_k
    acc = multiply_rows(Operand(grad, n, n_mask), Operand(a, k, k_mask), first, last, tiling)
    out_ptrs = (
        out.ptr
        + group.to(tl.int64) * out.stride_g
        + n.to(tl.int64)[:, None] * out.stride_row
        + k.to(tl.int64)[None, :] * out.stride_column
    )
    mask = n_mask[:, None] & k_mask[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, acc.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _multiply_weight_tiles(
    out, grad, a, offsets_ptr, num_tiles, sizes, tiling, ACCUMULATE: tl.constexpr
):
    """The tiles of a program: its own one, or every one of `num_tiles` that falls to it."""
    if num_tiles is None:
        tile = tl.program_id(0)
        _multiply_weight_tile(tile, out, grad, a, offsets_ptr, sizes, tiling, ACCUMULATE)
    else:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _multiply_weight_tile(tile, out, grad, a, offsets_ptr, sizes, tiling, ACCUMULATE)


@triton.jit(
    do_not_specialize=("reduction", "num_tiles", "grad_scale_stride_n", "a_scale_stride_k"),
    do_not_specialize_on_alignment=("grad_scale_ptr", "a_scale_ptr", "offsets_ptr"),
)
def _grouped_wgrad_kernel(
    out_ptr,
    grad_ptr,
    grad_scale_ptr,
    a_ptr,
    a_scale_ptr,
    offsets_ptr,
    reduction,
    num_n,
    num_k,
    num_tiles,
    out_stride_g,
    out_stride_n,
    out_stride_k,
    grad_stride_n,
    grad_stride_r,
    grad_scale_stride_n,
    grad_scale_stride_r,
    a_stride_k,
    a_stride_r,
    a_scale_stride_k,
    a_scale_stride_r,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """out[g] (+)= grad_g.T @ a_g, summed over positions offsets[g] … offsets[g + 1] of `reduction`.

    Grid: (groups · tiles of [num_n, num_k],), one [BLOCK_M, BLOCK_N] tile per program, or of any
    size if the kernel gets their number as `num_tiles`; GROUP_M row tiles of a column tile run
    together. With MX operands the offsets are padded ones, multiples of 32. Positions outside a
    group's range are not read.
    """
    grad = Rows(
        grad_ptr,
        grad_scale_ptr,
        grad_stride_n,
        grad_stride_r,
        grad_scale_stride_n,
        grad_scale_stride_r,
    )
    a = Rows(a_ptr, a_scale_ptr, a_stride_k, a_stride_r, a_scale_stride_k, a_scale_stride_r)
    out = Matrices(out_ptr, out_stride_g, out_stride_n, out_stride_k)
    _multiply_weight_tiles(
        out,
        grad,
        a,
        offsets_ptr,
        num_tiles,
        WeightSizes(reduction, num_n, num_k),
        Tiling(A_FORMAT, B_FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PREFETCH_SCALES),
        ACCUMULATE=ACCUMULATE,
    )
