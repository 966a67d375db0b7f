"""MoE GEMM for few tokens per expert: it reads weights once and is limited by memory bandwidth.

A persistent CTA has one producer warp (TMA) and two consumer warpgroups. Each consumer computes its
own 64 weight rows and does not wait for the other. Two CTAs share an SM. The CTA tile is 128 weight
rows × the real rows of one routing block. The depth is processed in steps of 256 codes; the sums of
each step are added to a float32 accumulator. `claims` is the tile scheduler. The producer loads the
first weights before the kernel that encodes the activations has ended.

Blocks have TOKENS rows, but the last block of an expert may have fewer real rows. A tile therefore
loads and multiplies 8, 16 or 32 rows, whichever is enough. One block size thus serves experts with
few tokens and with many.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.compat import async_load
from ...common.pdl import BEFORE_WAIT, grid_dependency_wait, launch_dependents
from ..lib.pipeline import next_slot
from ..lib.ptx import decode_tables
from ..lib.tile_scheduler import (
    LEAD,
    make_labels,
    next_tile,
    read_label,
    write_label,
    write_last_label,
)
from .epilogue import (
    finish,
    is_real,
    one_each,
    output_layout,
    output_terms,
    row_ids,
    spread,
    store_outputs,
    token_terms,
)
from .weight_fragments import accumulator_layout, decode_weights, join_halves


@gluon.constexpr_function
def _num_widths(TOKENS):
    """Number of tile widths: 8, 16, … TOKENS rows."""
    return (TOKENS // 8).bit_length()


@gluon.jit
def _describe(tile, plan, sizes, TOKENS: gl.constexpr):
    """Return (block, expert, pair of row units, split * 4 + width) of a tile.

    Within a block the split is the fastest tile index. Width w stands for 8 << w rows, enough for
    all real rows of the block. The producer calls this right after it claims a tile, to hide the
    latency of these loads of the plan.
    """
    block_expert_ids, sorted_token_ids, _, num_tokens = plan
    max_blocks, blocks_per_unit, tiles_per_block, splits = sizes
    block = tile // tiles_per_block
    pair = tile % tiles_per_block
    split = 0
    if splits > 1:
        split = pair % splits
        pair = pair // splits
    unit = block
    if blocks_per_unit > 1:
        unit = block // blocks_per_unit
    expert = gl.load(
        block_expert_ids + unit, mask=block < max_blocks, other=0, cache_modifier=BEFORE_WAIT
    )
    part = split * 4
    for width in gl.static_range(1, _num_widths(TOKENS)):
        middle = gl.load(
            sorted_token_ids + block * TOKENS + (4 << width),
            mask=block < max_blocks,
            other=-1,
            cache_modifier=BEFORE_WAIT,
        )
        part += is_real(middle, num_tokens).to(gl.int32)
    return block, expert, pair, part


@gluon.jit
def _first_tile(plan, sizes, TOKENS: gl.constexpr):
    """Load the first tile of this CTA and the number of blocks in use."""
    tile = _describe(gl.program_id(0), plan, sizes, TOKENS)
    return tile, gl.load(plan[2], cache_modifier=BEFORE_WAIT) // TOKENS


@gluon.jit
def _split_steps(split, depth_units, splits):
    """First and end step of one of `splits` nearly equal parts of the depth."""
    first = 0
    last = gl.cdiv(depth_units, 2)
    if splits > 1:
        steps = last
        first = split * steps // splits
        last = (split + 1) * steps // splits
    return first, last


@gluon.jit
def _load_weights(
    ring, descriptors, slot, step, units, part, TOKENS: gl.constexpr, SPLIT: gl.constexpr
):
    """Start the TMA loads of a step's weights; its mbarrier also expects the activations' bytes."""
    WEIGHT_BYTES: gl.constexpr = 128 * 128 + 32 * 32
    ROW_BYTES: gl.constexpr = 256 * (2 if SPLIT else 1)
    code_desc = descriptors[0]
    shift_desc = descriptors[1]
    arrived = ring[3].index(slot)
    for width in gl.static_range(_num_widths(TOKENS)):
        mbarrier.expect(arrived, WEIGHT_BYTES + (8 << width) * ROW_BYTES, pred=part % 4 == width)
    for half in gl.static_range(2):
        async_load(code_desc, [units[half], step * 64, 0], arrived, ring[0].index(2 * slot + half))
        async_load(shift_desc, [units[half], step * 16, 0], arrived, ring[1].index(2 * slot + half))


@gluon.jit
def _load_rows(rows, x_desc, arrived, first_row, depth, low_rows, SPLIT: gl.constexpr):
    """Start the TMA loads of activation rows of one width; with SPLIT also of their low parts."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    async_load(x_desc, [first_row, depth], arrived, rows.slice(0, ROWS, 0))
    if SPLIT:
        async_load(x_desc, [low_rows + first_row, depth], arrived, rows.slice(ROWS, ROWS, 0))


@gluon.jit
def _load_activations(
    ring,
    descriptors,
    slot,
    step,
    first_row,
    part,
    low_rows,
    TOKENS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    for width in gl.static_range(_num_widths(TOKENS)):
        if part % 4 == width:
            _load_rows(
                ring[2].index(slot),
                descriptors[2 + width],
                ring[3].index(slot),
                first_row,
                step * 256,
                low_rows,
                SPLIT,
            )


@gluon.jit
def _fill_stage(
    ring,
    descriptors,
    state,
    step,
    tile,
    units,
    low_rows,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Wait for a free stage and start the TMA loads of one step; return the next state.

    state: stage, phase, and the number of steps whose weight loads have already been started.
    """
    slot, phase, early = state
    if early > 0:
        early -= 1
    else:
        mbarrier.wait(ring[4].index(slot), phase)
        write_label(ring[5], slot, tile)
        _load_weights(ring, descriptors, slot, step, units, tile[3], TOKENS, SPLIT)
    _load_activations(
        ring, descriptors, slot, step, tile[0] * TOKENS, tile[3], low_rows, TOKENS, SPLIT
    )
    slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase, early


@gluon.jit
def _produce(
    ring,
    tile_counter,
    descriptors,
    plan,
    sizes,
    row_units,
    depth_units,
    low_rows,
    early_stages,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    _, _, _, ready, free, labels = ring
    _, _, tiles_per_block, splits = sizes
    slot = 0
    phase = 1
    early = 0
    first_tile = True
    number = gl.program_id(0)
    following, num_blocks = _first_tile(plan, sizes, TOKENS)
    while following[0] < num_blocks:
        tile = following
        _, expert, pair, part = tile
        first_step, last_step = _split_steps(part // 4, depth_units, splits)
        unit = expert * row_units + pair * 2
        units = (unit, gl.minimum(unit + 1, expert * row_units + row_units - 1))
        if first_tile:  # start loading its weights before grid_dependency_wait
            first_tile = False
            early = gl.minimum(last_step - first_step, early_stages)
            for ahead in range(early):
                _load_weights(
                    ring, descriptors, ahead, first_step + ahead, units, part, TOKENS, SPLIT
                )
            grid_dependency_wait()
        claim_at = gl.maximum(last_step - LEAD, first_step + 1)
        for step in range(first_step, claim_at):
            slot, phase, early = _fill_stage(
                ring,
                descriptors,
                (slot, phase, early),
                step,
                tile,
                units,
                low_rows,
                TOKENS,
                STAGES,
                SPLIT,
            )
        number = next_tile(number, tile_counter, num_blocks * tiles_per_block)
        following = _describe(number, plan, sizes, TOKENS)
        for step in range(claim_at, last_step):
            slot, phase, early = _fill_stage(
                ring,
                descriptors,
                (slot, phase, early),
                step,
                tile,
                units,
                low_rows,
                TOKENS,
                STAGES,
                SPLIT,
            )
    write_last_label(labels, slot, phase, following, ready, free, 1)


@gluon.jit
def _terms(
    factors,
    rows,
    expert,
    first_row,
    first_output,
    OUTPUTS: gl.constexpr,
    TOKENS: gl.constexpr,
    TOKEN_LAYOUT: gl.constexpr,
    LAYOUT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    """Load the epilogue's terms of a tile's outputs and rows, and the ids of the rows."""
    reference, bias, num_outputs, row_units = factors
    x_scale, routed_weights, sorted_token_ids = rows
    outputs = output_terms(
        reference,
        bias,
        expert,
        first_output,
        num_outputs,
        row_units * 64,
        OUTPUTS,
        LAYOUT,
        KIND,
        HAS_BIAS,
    )
    tokens = token_terms(x_scale, routed_weights, first_row, TOKENS, TOKEN_LAYOUT, WEIGHTED)
    return outputs, tokens, row_ids(sorted_token_ids, first_row, TOKENS, TOKEN_LAYOUT)


@gluon.jit
def _tile(
    ring,
    operands,
    state,
    steps,
    expert,
    first_row,
    first_output,
    first_sum,
    PARTITION: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    """Compute one tile of TOKENS rows and store it to `out` from row `first_sum` on.

    Returns the next state: stage and phase.
    """
    codes, shifts, x, ready, free, _ = ring
    factors, rows, target = operands
    out, num_outputs, num_tokens, param_first, param_second = target
    slot, phase = state
    COLUMNS: gl.constexpr = TOKENS * 2 if SPLIT else TOKENS
    ACCUMULATOR: gl.constexpr = accumulator_layout(4, COLUMNS)
    OUTPUTS: gl.constexpr = 64 if KIND == "rows" else 32
    LAYOUT: gl.constexpr = output_layout(4, TOKENS, KIND)
    # Up to 32 columns there are registers to load the terms before the main loop. With exactly 32
    # columns each thread must hold the terms of one row only.
    TERMS_FIRST: gl.constexpr = COLUMNS <= 32
    SPREAD: gl.constexpr = COLUMNS == 32
    TOKEN_LAYOUT: gl.constexpr = one_each() if SPREAD else gl.SliceLayout(0, LAYOUT)
    tables = decode_tables()
    if TERMS_FIRST:  # the main loop hides the latency of these loads
        outputs, tokens, ids = _terms(
            factors,
            rows,
            expert,
            first_row,
            first_output,
            OUTPUTS,
            TOKENS,
            TOKEN_LAYOUT,
            LAYOUT,
            KIND,
            HAS_BIAS,
            WEIGHTED,
        )
    accumulator = gl.zeros((64, COLUMNS), gl.float32, ACCUMULATOR)
    for _ in range(steps):
        mbarrier.wait(ready.index(slot), phase)
        place = 2 * slot + PARTITION
        weights = decode_weights(
            codes.index(place).reshape([64, 128]),
            shifts.index(place).reshape([16, 32]),
            tables,
            ACCUMULATOR,
            1,
            2,
        )
        partial = warpgroup_mma(
            weights,
            x.index(slot).slice(0, COLUMNS, 0).permute((1, 0)),
            gl.zeros((64, COLUMNS), gl.float32, ACCUMULATOR),
            use_acc=False,
            is_async=True,
        )
        partial = warpgroup_mma_wait(0, deps=(partial,))
        mbarrier.arrive(free.index(slot), count=1)
        accumulator += partial
        slot, phase = next_slot(slot, phase, STAGES)
    if not TERMS_FIRST:
        outputs, tokens, ids = _terms(
            factors,
            rows,
            expert,
            first_row,
            first_output,
            OUTPUTS,
            TOKENS,
            TOKEN_LAYOUT,
            LAYOUT,
            KIND,
            HAS_BIAS,
            WEIGHTED,
        )
    if SPREAD:
        tokens = spread(tokens, LAYOUT)
        ids = gl.convert_layout(ids, gl.SliceLayout(0, LAYOUT))
    value = finish(
        join_halves(accumulator, SPLIT),
        outputs,
        tokens,
        param_first,
        param_second,
        LAYOUT,
        KIND,
        WEIGHTED,
    )
    store_outputs(value, is_real(ids, num_tokens), out, first_sum, first_output, num_outputs)
    return slot, phase


@gluon.jit
def _consume(
    ring,
    operands,
    plan,
    sizes,
    depth_units,
    num_rows,
    PARTITION: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    ready = ring[3]
    labels = ring[5]
    OUTPUTS: gl.constexpr = 64 if KIND == "rows" else 32
    grid_dependency_wait()
    if PARTITION == 0:
        launch_dependents()
    state = (0, 0)
    first_tile, num_blocks = _first_tile(plan, sizes, TOKENS)
    block, expert, pair, part = first_tile
    splits = sizes[3]
    while block < num_blocks:
        first_row = block * TOKENS
        first_step, last_step = _split_steps(part // 4, depth_units, splits)
        for width in gl.static_range(_num_widths(TOKENS)):
            if part % 4 == width:
                state = _tile(
                    ring,
                    operands,
                    state,
                    last_step - first_step,
                    expert,
                    first_row,
                    (pair * 2 + PARTITION) * OUTPUTS,
                    first_row + part // 4 * num_rows,
                    PARTITION,
                    8 << width,
                    STAGES,
                    SPLIT,
                    KIND,
                    HAS_BIAS,
                    WEIGHTED,
                )
        slot, phase = state
        block, expert, pair, part = read_label(labels, slot, ready.index(slot), phase)


@gluon.jit(
    do_not_specialize=[
        "tiles_per_block",
        "row_units",
        "depth_units",
        "num_tokens",
        "low_rows",
        "blocks_per_unit",
        "splits",
        "num_rows",
        "early_stages",
    ]
)
def _moe_gemm_decode_kernel(
    out,
    code_desc,
    shift_desc,
    x8_desc,
    x16_desc,
    x32_desc,
    reference,
    bias,
    x_scale,
    routed_weights,
    sorted_token_ids,
    block_expert_ids,
    num_valid,
    tile_counter,
    param_first,
    param_second,
    num_tokens,
    low_rows,
    num_outputs,
    tiles_per_block,
    row_units,
    depth_units,
    blocks_per_unit,
    splits,
    num_rows,
    early_stages,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out [P, num_outputs] for all blocks in use; the module docstring has the schedule.

    x8_desc, x16_desc, x32_desc: TMA descriptors of 8, 16 and 32 rows of x; None above TOKENS.
    KIND: "rows" in stage 2; in stage 1 the name of the activation (two weight rows a feature).
    low_rows: row of x where the low parts begin (SPLIT).
    splits: parts of the depth; each has its own num_rows rows of out. tiles_per_block counts them.
    early_stages: stages whose weights the producer loads before it waits for the activations.
    """
    COLUMNS: gl.constexpr = TOKENS * 2 if SPLIT else TOKENS
    # Per stage: two row units of weights (64 rows × 256 codes, two a byte) and their shifts, and
    # 256 codes of TOKENS activation rows (with SPLIT: hi rows, then lo rows).
    codes = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 1, 64, 128], code_desc.layout)
    shifts = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 1, 16, 32], shift_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, 256], x8_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    ring = (codes, shifts, x, ready, free, make_labels(STAGES))
    descriptors = (code_desc, shift_desc, x8_desc, x16_desc, x32_desc)
    plan = (block_expert_ids, sorted_token_ids, num_valid, num_tokens)
    operands = (
        (reference, bias, num_outputs, row_units),
        (x_scale, routed_weights, sorted_token_ids),
        (out, num_outputs, num_tokens, param_first, param_second),
    )
    sizes = (num_rows // TOKENS, blocks_per_unit, tiles_per_block, splits)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ring,
                    operands,
                    plan,
                    sizes,
                    depth_units,
                    num_rows,
                    0,
                    TOKENS,
                    STAGES,
                    SPLIT,
                    KIND,
                    HAS_BIAS,
                    WEIGHTED,
                ),
            ),
            (
                _consume,
                (
                    ring,
                    operands,
                    plan,
                    sizes,
                    depth_units,
                    num_rows,
                    1,
                    TOKENS,
                    STAGES,
                    SPLIT,
                    KIND,
                    HAS_BIAS,
                    WEIGHTED,
                ),
            ),
            (
                _produce,
                (
                    ring,
                    tile_counter,
                    descriptors,
                    plan,
                    sizes,
                    row_units,
                    depth_units,
                    low_rows,
                    early_stages,
                    TOKENS,
                    STAGES,
                    SPLIT,
                ),
            ),
        ],
        [4, 1],
        [WORKER_REGISTERS, 24],
    )
