"""Kernel that encodes activations as sorted e4m3 rows for the FP8 GEMMs, with one scale per row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.pdl import launch_dependents, wait_and_launch_dependents
from ..lib.tile_scheduler import reset_tile_counter
from .encode_codes import encode, row_maximum, row_scale, statistic_of
from .encode_steps import load_row, load_step, step_offsets, store_step


@gluon.jit
def _step_of(row, step: gl.constexpr, CODED: gl.constexpr):
    if CODED:
        return row[2 * step], row[2 * step + 1]
    else:
        return (row[step],)


@gluon.jit
def _store_slots(
    codes, scale, factor, encoded, target, places, padded_depth, num_rows, CHUNKS: gl.constexpr
):
    """Store one encoded step to its sorted row, or to the rows of all slots of a token."""
    row, slot_rows, first_slot, num_slots = places
    for slot in range(gl.maximum(num_slots, 1)):
        if num_slots > 0:
            row = gl.load(slot_rows + first_slot + slot)
        if row >= 0:
            store_step(codes, scale, factor, encoded, target, row, padded_depth, num_rows, CHUNKS)


@gluon.jit
def _encode_row(
    codes,
    scale,
    x,
    x_scale,
    held,
    places,
    depth,
    padded_depth,
    num_rows,
    STEPS: gl.constexpr,
    WHOLE: gl.constexpr,
    FORMAT: gl.constexpr,
    CODED: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    INF_BYTE: gl.constexpr,
    CHUNKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Encode and store one row. `held` has its first STEPS steps; WHOLE: there are no others."""
    PACKED: gl.constexpr = FORMAT == "e2m1"
    steps = gl.cdiv(padded_depth, CHUNKS * 128)
    numbers = statistic_of(_step_of(held, 0, CODED), FORMAT, CODED, EMAX, THRESHOLD, INF_BYTE)
    for index in gl.static_range(1, STEPS):
        numbers = gl.maximum(
            numbers,
            statistic_of(_step_of(held, index, CODED), FORMAT, CODED, EMAX, THRESHOLD, INF_BYTE),
        )
    largest = row_maximum(numbers)
    if not WHOLE:
        for index in range(STEPS, steps):
            step = load_step(x, x_scale, index, depth, CODED, PACKED, CHUNKS, WARPS)
            largest = gl.maximum(
                largest, row_maximum(statistic_of(step, FORMAT, CODED, EMAX, THRESHOLD, INF_BYTE))
            )
    factor, encoding = row_scale(largest, FORMAT)
    for index in gl.static_range(STEPS):
        encoded = encode(
            _step_of(held, index, CODED), encoding, FORMAT, CODED, EMAX, THRESHOLD, INF_BYTE, WARPS
        )
        _source, _block, target = step_offsets(index, CHUNKS, WARPS)
        _store_slots(codes, scale, factor, encoded, target, places, padded_depth, num_rows, CHUNKS)
    if not WHOLE:
        for index in range(STEPS, steps):
            step = load_step(x, x_scale, index, depth, CODED, PACKED, CHUNKS, WARPS)
            encoded = encode(step, encoding, FORMAT, CODED, EMAX, THRESHOLD, INF_BYTE, WARPS)
            _source, _block, target = step_offsets(index, CHUNKS, WARPS)
            _store_slots(
                codes, scale, factor, encoded, target, places, padded_depth, num_rows, CHUNKS
            )


@gluon.jit
def _load_source(
    x,
    x_scale,
    row,
    depth,
    x_stride,
    x_scale_stride,
    CODED: gl.constexpr,
    PACKED: gl.constexpr,
    STEPS: gl.constexpr,
    CHUNKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load the first STEPS steps of row `row` of x; nothing is read if `row` is −1."""
    start = gl.maximum(row, 0).to(gl.int64)
    if CODED:
        x_scale += start * x_scale_stride
    return load_row(
        x + start * x_stride,
        x_scale,
        gl.where(row >= 0, depth, 0),
        CODED,
        PACKED,
        STEPS,
        CHUNKS,
        WARPS,
    )


@gluon.jit(
    do_not_specialize=[
        "num_slots",
        "top_k",
        "slots",
        "depth",
        "num_rows",
        "x_scale_stride",
        "rows",
        "release_first",
    ]
)
def _moe_encode_rows_kernel(
    codes,
    scale,
    tile_counter,
    x,
    x_scale,
    slot_rows,
    num_slots,
    top_k,
    slots,
    depth,
    padded_depth,
    num_rows,
    x_stride,
    x_scale_stride,
    rows,
    release_first,
    STEPS: gl.constexpr,
    WHOLE: gl.constexpr,
    FORMAT: gl.constexpr,
    CODED: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    INF_BYTE: gl.constexpr,
    CHUNKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Encode rows x, bfloat16 or (CODED) MX codes with x_scale, to e4m3 rows (see `rows_codes`).

    slots > 0: a program encodes one token and stores it for `slots` of its top_k slots. slots = 0:
    x is sorted; a program encodes the rows of `rows` of the num_slots slots, and prefetches the
    next row while it encodes the current one. Padding rows have no slot: they are neither read nor
    written.

    release_first: call launch_dependents at once (see `dependent`).
    """
    if release_first:
        launch_dependents()
    wait_and_launch_dependents()
    reset_tile_counter(tile_counter)
    PACKED: gl.constexpr = FORMAT == "e2m1"
    program = gl.program_id(0)
    first = program * rows
    first_slot = program * slots
    count = gl.where(slots > 0, 1, gl.minimum(num_slots - first, rows))
    row = gl.load(slot_rows + first, mask=slots == 0, other=first_slot // top_k)
    next_row = gl.load(slot_rows + first + 1, mask=count > 1, other=-1)
    following = _load_source(
        x, x_scale, row, depth, x_stride, x_scale_stride, CODED, PACKED, STEPS, CHUNKS, num_warps
    )
    for index in range(count):
        held = following
        source = row
        row = next_row
        next_row = gl.load(slot_rows + first + index + 2, mask=index + 2 < count, other=-1)
        following = _load_source(
            x,
            x_scale,
            row,
            depth,
            x_stride,
            x_scale_stride,
            CODED,
            PACKED,
            STEPS,
            CHUNKS,
            num_warps,
        )
        start = gl.maximum(source, 0).to(gl.int64)
        own_scale = x_scale
        if CODED:
            own_scale += start * x_scale_stride
        _encode_row(
            codes,
            scale,
            x + start * x_stride,
            own_scale,
            held,
            (source, slot_rows, first_slot, slots),
            depth,
            padded_depth,
            num_rows,
            STEPS,
            WHOLE,
            FORMAT,
            CODED,
            EMAX,
            THRESHOLD,
            INF_BYTE,
            CHUNKS,
            num_warps,
        )
