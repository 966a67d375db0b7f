"""Kernel that encodes activations as sorted e4m3 rows for the FP8 GEMMs, with one scale per row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.compat import aggregate
from ...common.pdl import launch_dependents, wait_and_launch_dependents
from ..lib.tile_scheduler import reset_tile_counter
from .encode_codes import encode_step, row_maximum, row_scale, statistic_of
from .encode_steps import RowsOut, load_row, load_step, step_offsets, store_step


@aggregate
class Targets:
    """Sorted rows that get a row of the source.

    If num_slots is 0 it is `row`, nothing if `row` is −1. Otherwise these are the rows of num_slots
    slots from first_slot on; `slot_rows` points to the row of each slot, −1 for absent ones.
    """

    row: gl.tensor
    slot_rows: gl.tensor
    first_slot: gl.tensor
    num_slots: gl.tensor


@gluon.jit
def _store_slots(out, targets, scale, encoded, step, STEPS: gl.constexpr):
    """Store step number `step` of an encoded row to all its targets."""
    _source, _block, offsets = step_offsets(step, STEPS)
    row = targets.row
    for slot in range(gl.maximum(targets.num_slots, 1)):
        if targets.num_slots > 0:
            row = gl.load(targets.slot_rows + targets.first_slot + slot)
        if row >= 0:
            store_step(out, row, scale, encoded, offsets)


@gluon.jit
def _encode_row(out, targets, x, x_scale, held, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Encode and store the row at `x`. `held` has its first steps, all of them if STEPS.whole.

    Further steps are loaded twice: for the row's scale, and to be encoded.
    """
    HELD: gl.constexpr = STEPS.held
    steps = gl.cdiv(out.padded_depth, STEPS.chunks * 128)
    for index in gl.static_range(HELD):
        found = statistic_of(held[index], FORMAT)
        if index == 0:
            numbers = found
        else:
            numbers = gl.maximum(numbers, found)
    largest = row_maximum(numbers)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            largest = gl.maximum(largest, row_maximum(statistic_of(step, FORMAT)))
    scale, encoding = row_scale(largest, FORMAT)
    for index in gl.static_range(HELD):
        encoded = encode_step(held[index], encoding, FORMAT, STEPS)
        _store_slots(out, targets, scale, encoded, index, STEPS)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            encoded = encode_step(step, encoding, FORMAT, STEPS)
            _store_slots(out, targets, scale, encoded, index, STEPS)


@gluon.jit
def _load_source(
    x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT: gl.constexpr, STEPS: gl.constexpr
):
    """Load the held steps of row `row` of x; nothing is read if `row` is −1."""
    start = gl.maximum(row, 0).to(gl.int64)
    if FORMAT.coded:
        x_scale += start * x_scale_stride
    return load_row(x + start * x_stride, x_scale, gl.where(row >= 0, depth, 0), FORMAT, STEPS)


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
    FORMAT: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Encode rows x, bfloat16 or MX codes with x_scale, to e4m3 rows (see `encode_codes`).

    slots > 0: a program encodes one token and stores it for `slots` of its top_k slots. slots = 0:
    x is sorted; a program encodes the rows of `rows` of the num_slots slots, and prefetches the
    next row while it encodes the current one. Padding rows have no slot: they are neither read nor
    written.

    Grid: [num_slots / slots], or [num_slots / rows] rounded up if slots = 0.

    release_first: call launch_dependents at once (see `pdl`).
    """
    if release_first:
        launch_dependents()
    wait_and_launch_dependents()
    reset_tile_counter(tile_counter)
    out = RowsOut(codes, scale, padded_depth, num_rows)
    program = gl.program_id(0)
    first = program * rows
    first_slot = program * slots
    count = gl.where(slots > 0, 1, gl.minimum(num_slots - first, rows))
    row = gl.load(slot_rows + first, mask=slots == 0, other=first_slot // top_k)
    next_row = gl.load(slot_rows + first + 1, mask=count > 1, other=-1)
    following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
    for index in range(count):
        held = following
        source = row
        row = next_row
        next_row = gl.load(slot_rows + first + index + 2, mask=index + 2 < count, other=-1)
        following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
        start = gl.maximum(source, 0).to(gl.int64)
        own_scale = x_scale
        if FORMAT.coded:
            own_scale += start * x_scale_stride
        targets = Targets(source, slot_rows, first_slot, slots)
        _encode_row(out, targets, x + start * x_stride, own_scale, held, depth, FORMAT, STEPS)
