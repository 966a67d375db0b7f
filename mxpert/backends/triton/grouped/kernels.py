"""Device code of the grouped GEMMs: one matrix product per group of rows, groups of any size.

`tl.dot_scaled` multiplies MX operands natively on gfx950 and Blackwell. On Hopper it converts them
to bf16 in registers before wgmma. The conversion is exact: within float32's range, an fp8 value
times a power of two is a bf16 number.

The kernels read group bounds on the device. Rows past the last group are handled as one more group,
whose programs store zeros. The output therefore needs no clearing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.groups import clamp_rows, group_extents, pick


@triton.jit
def schedule_groups(
    tile,
    group_offsets_ptr,
    num_groups,
    num_rows,
    num_tiles_n,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Tile scheduler: group, first row, end row of the group and column tile of output tile `tile`.

    GROUP_M row tiles of the same column tile run together and share its operand in L2. The end row
    is 0 if there is no such tile.
    """
    starts, stops, tiles = group_extents(group_offsets_ptr, num_groups, num_rows, BLOCK_M, BLOCK_G)
    ends = tl.cumsum(tiles, axis=0)
    num_tiles_m = tl.sum(tiles, axis=0)
    band, place = tile // (GROUP_M * num_tiles_n), tile % (GROUP_M * num_tiles_n)
    height = tl.maximum(tl.minimum(num_tiles_m - band * GROUP_M, GROUP_M), 1)
    tile_m = band * GROUP_M + place % height
    begins = ends - tiles
    in_use = tile < num_tiles_m * num_tiles_n
    chosen = (begins <= tile_m) & (tile_m < ends) & in_use
    group = pick(chosen, tl.arange(0, BLOCK_G))
    first_row = pick(chosen, starts + (tile_m - begins) * BLOCK_M)
    return group, first_row, pick(chosen, stops), place // height


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


@triton.jit
def multiply_rows(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    a_rows,
    a_mask,
    b_rows,
    b_mask,
    first,
    last,
    a_stride_row,
    a_stride_k,
    a_scale_stride_row,
    a_scale_stride_k,
    b_stride_row,
    b_stride_k,
    b_scale_stride_row,
    b_scale_stride_k,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """``a[a_rows, first:last] @ b[b_rows, first:last].T`` in float32; masked rows count as zeros.

    With MX formats `first` and `last` are multiples of 32.
    """
    acc = tl.zeros((a_rows.shape[0], b_rows.shape[0]), tl.float32)
    a_ptrs = a_ptr + a_rows.to(tl.int64) * a_stride_row
    b_ptrs = b_ptr + b_rows.to(tl.int64) * b_stride_row
    if A_FORMAT == "bf16":
        tl.static_assert(B_FORMAT == "bf16", "operands are both bf16 or both MX")
        for k in range(first, last, BLOCK_K):
            # a [a rows, BLOCK_K] bf16, b [b rows, BLOCK_K] bf16
            a = load_tile(a_ptrs, a_mask, k, last, a_stride_k, BLOCK_K)
            b = load_tile(b_ptrs, b_mask, k, last, b_stride_k, BLOCK_K)
            acc = tl.dot(a, b.T, acc)
    else:
        STEP: tl.constexpr = BLOCK_K // 32
        a_scale_ptrs = a_scale_ptr + a_rows.to(tl.int64) * a_scale_stride_row
        b_scale_ptrs = b_scale_ptr + b_rows.to(tl.int64) * b_scale_stride_row
        end = last // 32
        # On NVIDIA scales are too narrow for asynchronous copies, so the pipeliner would load them
        # in the step that uses them. They are loaded one step ahead here.
        AHEAD: tl.constexpr = STEP if PREFETCH_SCALES else 0
        a_scale = load_tile(a_scale_ptrs, a_mask, first // 32, end, a_scale_stride_k, STEP)
        b_scale = load_tile(b_scale_ptrs, b_mask, first // 32, end, b_scale_stride_k, STEP)
        for block in range(first // 32, end, STEP):
            # a [a rows, BLOCK_K], b [b rows, BLOCK_K] uint8 codes; scales [rows, STEP] uint8 E8M0
            a = load_tile(a_ptrs, a_mask, block * 32, last, a_stride_k, BLOCK_K)
            b = load_tile(b_ptrs, b_mask, block * 32, last, b_stride_k, BLOCK_K)
            next_a = load_tile(a_scale_ptrs, a_mask, block + AHEAD, end, a_scale_stride_k, STEP)
            next_b = load_tile(b_scale_ptrs, b_mask, block + AHEAD, end, b_scale_stride_k, STEP)
            acc = tl.dot_scaled(
                a,
                a_scale if PREFETCH_SCALES else next_a,
                A_FORMAT,
                b.T,
                b_scale if PREFETCH_SCALES else next_b,
                B_FORMAT,
                acc,
            )
            a_scale, b_scale = next_a, next_b
    return acc


@triton.jit(
    do_not_specialize=(
        "num_rows",
        "num_groups",
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
    """c[rows of g] = a[rows of g] @ b[g].T, c contiguous [num_rows, num_n]; zeros past the groups.

    Each program computes one tile. The strides of b are those of its logical dimensions g, n and k,
    so b may have either memory order.
    """
    group, first_row, stop, tile_n = schedule_groups(
        tl.program_id(0),
        group_offsets_ptr,
        num_groups,
        num_rows,
        tl.cdiv(num_n, BLOCK_N),
        BLOCK_M,
        GROUP_M,
        BLOCK_G,
    )
    if stop == 0:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < stop, columns < num_n
    # Rows without a group get zeros: their reduction is empty.
    last = tl.where(group == num_groups, 0, num_k)
    b_group = group.to(tl.int64)
    b_scale_ptrs = b_scale_ptr
    if b_scale_ptr is not None:
        b_scale_ptrs = b_scale_ptr + b_group * b_scale_stride_g
    acc = multiply_rows(
        a_ptr,
        a_scale_ptr,
        b_ptr + b_group * b_stride_g,
        b_scale_ptrs,
        rows,
        row_mask,
        columns,
        column_mask,
        0,
        last,
        a_stride_m,
        a_stride_k,
        a_scale_stride_m,
        a_scale_stride_k,
        b_stride_n,
        b_stride_k,
        b_scale_stride_n,
        b_scale_stride_k,
        A_FORMAT,
        B_FORMAT,
        BLOCK_K,
        PREFETCH_SCALES,
    )
    offsets = rows.to(tl.int64)[:, None] * num_n + columns[None, :]
    tl.store(
        c_ptr + offsets,
        acc.to(c_ptr.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


@triton.jit(
    do_not_specialize=("reduction", "grad_scale_stride_n", "a_scale_stride_k"),
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

    Each program computes one tile. With MX operands the offsets are padded ones, multiples of 32.
    Positions outside a group's range are not read.
    """
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_n, BLOCK_M), tl.cdiv(num_k, BLOCK_N)
    group, tile = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
    band, place = tile // (GROUP_M * tiles_n), tile % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    first = clamp_rows(tl.load(offsets_ptr + group), reduction)
    last = clamp_rows(tl.load(offsets_ptr + group + 1), reduction)
    if A_FORMAT != "bf16":  # tell the compiler that the loaded offsets are multiples of 32
        first, last = first // 32 * 32, last // 32 * 32
    rows = (band * GROUP_M + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < num_n, columns < num_k
    acc = multiply_rows(
        grad_ptr,
        grad_scale_ptr,
        a_ptr,
        a_scale_ptr,
        rows,
        row_mask,
        columns,
        column_mask,
        first,
        last,
        grad_stride_n,
        grad_stride_r,
        grad_scale_stride_n,
        grad_scale_stride_r,
        a_stride_k,
        a_stride_r,
        a_scale_stride_k,
        a_scale_stride_r,
        A_FORMAT,
        B_FORMAT,
        BLOCK_K,
        PREFETCH_SCALES,
    )
    out_ptrs = (
        out_ptr
        + group.to(tl.int64) * out_stride_g
        + rows.to(tl.int64)[:, None] * out_stride_n
        + columns.to(tl.int64)[None, :] * out_stride_k
    )
    mask = row_mask[:, None] & column_mask[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
