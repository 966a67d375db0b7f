"""MoE GEMM for few tokens per expert: it reads weights once and is limited by memory bandwidth.

The grid is persistent, two CTAs per SM. A CTA tile is 128 weight rows (a pair of row units) × the
real rows of one routing block. A block has BLOCK_M rows, but the last block of an expert may have
fewer real rows: a tile loads and multiplies 8, 16 or 32 rows, whichever is enough. One block size
thus serves experts with few tokens and with many. The depth is processed in steps of 256 codes; the
sums of each step are added to a float32 accumulator. With split-K a tile has a part of the steps.

Roles: 12 warps, 80 registers per thread at launch (maxnreg), so that two CTAs fit on an SM.
    consumer 0, consumer 1: 4 warps each, 112 and 104 registers. Each computes its own row unit of
        the tile, [64, rows], and does not wait for the other.
    producer: 1 warp, 24 registers. It claims tiles and starts all TMA loads. Three idle warps fill
        its warpgroup.

Barriers: two mbarriers a stage.
    ready: 1 arrival, by the producer with the number of bytes of the stage. It completes when the
        TMA loads have written them. Both consumers wait.
    free: 2 arrivals a stage, one by each consumer when its wgmma have read the stage. The producer
        waits before it fills the stage again.

Pipeline: STAGES stages of one step (256 codes of depth), up to 8; as many as two CTAs per SM allow.
    A stage holds 2 × 64 × 128 bytes of weight codes, 2 × 16 × 32 bytes of shifts, BLOCK_M × 256
    bytes of activation rows (with HI_LO twice as many) and the tag of its tile: 19,456 bytes with
    BLOCK_M = 8.

Timeline:
    producer: first tile's weights of `early_stages` stages → grid_dependency_wait → per step: wait
        free, publish tile, load weights, load rows → two steps before a tile's end: claim the next
        tile and load its description → ... → publish end.
    consumer: grid_dependency_wait (consumer 0 then lets the next kernel start) → per tile: load
        epilogue terms; per step: wait ready, decode weights to registers, wgmma, wait for it,
        arrive at free, add to the accumulator; epilogue, store rows → read the next tile from the
        next stage's tag.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.compat import aggregate, async_load
from ...device.hopper import (
    CLAIM_LEAD,
    claim_tile,
    consumer_start,
    producer_start,
    publish_end,
    publish_tile,
    read_tile,
)
from ...device.hopper_ptx import decode_tables
from ...device.pdl import BEFORE_WAIT, grid_dependency_wait, launch_dependents
from .epilogue import (
    ActivationParameters,
    Epilogue,
    Variant,
    finish,
    is_real,
    load_output_terms,
    load_row_ids,
    load_row_terms,
    output_layout,
    outputs_per_unit,
    row_per_thread_layout,
    row_reference,
    store_rows,
)
from .group_weights import accumulate_decode_groups
from .mainloop import (
    STAGE_CODES,
    DecodePipeline,
    accumulate_decode,
    make_decode_pipeline,
    num_columns,
)
from .weight_fragments import join_hi_lo

_MIN_ROWS = gl.constexpr(8)
"""Rows of the narrowest tile; width w of a tile means ``8 << w`` rows."""

_MAX_WIDTHS = gl.constexpr(4)
"""Widths that fit in a tile's packed number; a power of two."""

_CONSUMER_WARPS = gl.constexpr(4)
_PRODUCER_WARPS = gl.constexpr(1)
_PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class Output:
    """Where consumers store, and which rows. out: [k_splits * P, num_outputs]."""

    sorted_token_ids: gl.tensor
    out: gl.tensor
    num_tokens: gl.tensor


@aggregate
class Plan:
    """The routing plan, and how it is cut into tiles.

    tiles_per_block: pairs of row units times k_splits. depth_units: units of 128 codes. num_rows:
    rows of `out` of one k split.
    """

    block_expert_ids: gl.tensor
    sorted_token_ids: gl.tensor
    num_valid: gl.tensor
    num_tokens: gl.tensor
    max_blocks: gl.tensor
    blocks_per_unit: gl.tensor
    tiles_per_block: gl.tensor
    k_splits: gl.tensor
    depth_units: gl.tensor
    num_rows: gl.tensor


@aggregate
class Operands:
    """TMA descriptors of the operands. x_descs: of 8, 16 and 32 rows, None above BLOCK_M.

    low_rows: row of x where the low parts begin (HI_LO).
    """

    code_desc: tma.tensor_descriptor
    shift_desc: tma.tensor_descriptor
    x_descs: gl.tuple
    row_units: gl.tensor
    low_rows: gl.tensor


@aggregate
class ConsumerArgs:
    """Arguments of a consumer."""

    pipe: DecodePipeline
    epilogue: Epilogue
    output: Output
    parameters: ActivationParameters
    plan: Plan


@aggregate
class ProducerArgs:
    """Arguments of the producer. early_stages: stages of weights loaded before the wait."""

    pipe: DecodePipeline
    tile_counter: gl.tensor
    operands: Operands
    plan: Plan
    early_stages: gl.tensor


@gluon.jit
def _pack_part(k_split, width):
    """One number for k split and width, so that a tag of four numbers holds the tile."""
    return k_split * _MAX_WIDTHS + width


@gluon.jit
def _unpack_part(part):
    """Return k split and width."""
    return part // _MAX_WIDTHS, part % _MAX_WIDTHS


@aggregate
class TileInfo:
    """A tile: routing block, its expert, pair of row units; k split and width, packed in `part`."""

    block: gl.tensor
    expert: gl.tensor
    row_pair: gl.tensor
    part: gl.tensor

    @gluon.jit
    def k_split(self):
        """Part of the depth that the tile sums up."""
        k_split, _ = _unpack_part(self.part)
        return k_split

    @gluon.jit
    def width(self):
        """Width w: the tile has ``8 << w`` rows."""
        _, width = _unpack_part(self.part)
        return width

    @gluon.jit
    def numbers(self):
        """The four numbers of a stage's tag."""
        return self.block, self.expert, self.row_pair, self.part


@gluon.constexpr_function
def _num_widths(BLOCK_M):
    """Number of tile widths: 8, 16, … BLOCK_M rows."""
    return (BLOCK_M // 8).bit_length()


@gluon.jit
def _locate_tile(tile, plan, BLOCK_M: gl.constexpr):
    """Load the TileInfo of a tile index. Within a block the k split is the fastest index.

    The width is enough for all real rows of the block. The producer calls this right after it
    claims a tile, to hide the latency of these loads.
    """
    block = tile // plan.tiles_per_block
    row_pair = tile % plan.tiles_per_block
    k_split = 0
    if plan.k_splits > 1:
        k_split = row_pair % plan.k_splits
        row_pair = row_pair // plan.k_splits
    unit = block
    if plan.blocks_per_unit > 1:
        unit = block // plan.blocks_per_unit
    used = block < plan.max_blocks
    expert = gl.load(plan.block_expert_ids + unit, mask=used, other=0, cache_modifier=BEFORE_WAIT)
    part = _pack_part(k_split, width=0)
    for width in gl.static_range(1, _num_widths(BLOCK_M)):
        # Real rows come first: this width is needed if the first row past the narrower one is real.
        next_row = gl.load(
            plan.sorted_token_ids + block * BLOCK_M + (_MIN_ROWS << (width - 1)),
            mask=used,
            other=-1,
            cache_modifier=BEFORE_WAIT,
        )
        part += is_real(next_row, plan.num_tokens).to(gl.int32)  # one width more
    return TileInfo(block=block, expert=expert, row_pair=row_pair, part=part)


@gluon.jit
def _first_tile(plan, BLOCK_M: gl.constexpr):
    """Load the first tile of this CTA and the number of blocks in use."""
    tile = _locate_tile(gl.program_id(0), plan, BLOCK_M)
    return tile, gl.load(plan.num_valid, cache_modifier=BEFORE_WAIT) // BLOCK_M


@gluon.jit
def _step_range(k_split, plan):
    """First and end step of a k split, one of k_splits nearly equal parts of the depth."""
    first = 0
    last = gl.cdiv(plan.depth_units, 2)
    if plan.k_splits > 1:
        steps = last
        first = k_split * steps // plan.k_splits
        last = (k_split + 1) * steps // plan.k_splits
    return first, last


@gluon.jit
def _load_weights(pipe, operands, stage, step, units, width):
    """Start the TMA loads of a step's weights; `ready` also expects the activation rows' bytes.

    units: row units of both consumers, counted over all experts.
    """
    WEIGHT_BYTES: gl.constexpr = 2 * (
        operands.code_desc.block_type.nbytes + operands.shift_desc.block_type.nbytes
    )
    CODE_ROWS: gl.constexpr = operands.code_desc.block_type.shape[1]
    SHIFT_ROWS: gl.constexpr = operands.shift_desc.block_type.shape[1]
    PARTS: gl.constexpr = 2 if pipe.HI_LO else 1
    ready = pipe.ready.index(stage)
    for w in gl.static_range(_num_widths(pipe.BLOCK_M)):
        mbarrier.expect(
            ready, WEIGHT_BYTES + PARTS * operands.x_descs[w].block_type.nbytes, pred=width == w
        )
    for half in gl.static_range(2):
        unit = units[half]
        own = 2 * stage + half
        async_load(operands.code_desc, [unit, step * CODE_ROWS, 0], ready, pipe.codes.index(own))
        async_load(operands.shift_desc, [unit, step * SHIFT_ROWS, 0], ready, pipe.shifts.index(own))


@gluon.jit
def _load_rows(rows, x_desc, ready, first_row, depth, low_rows, HI_LO: gl.constexpr):
    """Start the TMA loads of activation rows of one width; with HI_LO also of their low parts."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    async_load(x_desc, [first_row, depth], ready, rows.slice(0, ROWS, 0))
    if HI_LO:
        async_load(x_desc, [low_rows + first_row, depth], ready, rows.slice(ROWS, ROWS, 0))


@gluon.jit
def _fill_stage(args, state, early, step, tile, units):
    """Wait for a free stage and start the TMA loads of one step; return the next state and `early`.

    early: number of following steps whose weight loads have already been started.
    """
    pipe = args.pipe
    if early > 0:
        early -= 1
    else:
        mbarrier.wait(pipe.free.index(state.stage), state.phase)
        publish_tile(pipe.tags, state.stage, tile.numbers())
        _load_weights(pipe, args.operands, state.stage, step, units, tile.width())
    for width in gl.static_range(_num_widths(pipe.BLOCK_M)):
        if tile.width() == width:
            _load_rows(
                pipe.x.index(state.stage),
                args.operands.x_descs[width],
                pipe.ready.index(state.stage),
                first_row=tile.block * pipe.BLOCK_M,
                depth=step * STAGE_CODES,
                low_rows=args.operands.low_rows,
                HI_LO=pipe.HI_LO,
            )
    return state.advance(), early


@gluon.jit
def _produce(args):
    """The producer warp: claim tiles and load their operands; see the timeline above."""
    pipe = args.pipe
    plan = args.plan
    row_units = args.operands.row_units
    state = producer_start(pipe.STAGES)
    early = 0
    is_first = True
    number = gl.program_id(0)
    following, num_blocks = _first_tile(plan, pipe.BLOCK_M)
    while following.block < num_blocks:
        tile = following
        first_step, last_step = _step_range(tile.k_split(), plan)
        # With an odd number of row units, the last pair loads the last unit twice; the epilogue
        # stores only outputs that exist.
        unit = tile.expert * row_units + tile.row_pair * 2
        units = (unit, gl.minimum(unit + 1, tile.expert * row_units + row_units - 1))
        # Start loading the first tile's weights before grid_dependency_wait. These stages get no
        # tag: consumers locate their first tile themselves.
        if is_first:
            is_first = False
            early = gl.minimum(last_step - first_step, args.early_stages)
            for ahead in range(early):
                step = first_step + ahead
                _load_weights(pipe, args.operands, ahead, step, units, tile.width())
            grid_dependency_wait()
        claim_at = gl.maximum(last_step - CLAIM_LEAD, first_step + 1)
        for step in range(first_step, claim_at):
            state, early = _fill_stage(args, state, early, step, tile, units)
        number = claim_tile(number, args.tile_counter, num_blocks * plan.tiles_per_block)
        following = _locate_tile(number, plan, pipe.BLOCK_M)
        for step in range(claim_at, last_step):
            state, early = _fill_stage(args, state, early, step, tile, units)
    publish_end(pipe.tags, state, following.numbers(), pipe.ready, pipe.free)


@gluon.jit
def _load_terms(args, expert, first_row, first_output, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Load the epilogue's terms of a row unit's outputs and of a tile's rows, and the rows' ids."""
    outputs = load_output_terms(args.epilogue, expert, first_output, LAYOUT)
    ROW_LAYOUT: gl.constexpr = _row_layout(ROWS, args.pipe.HI_LO, LAYOUT)
    rows = load_row_terms(args.epilogue, first_row, ROWS, ROW_LAYOUT)
    return outputs, rows, load_row_ids(args.output.sorted_token_ids, first_row, ROWS, ROW_LAYOUT)


@gluon.constexpr_function
def _row_layout(ROWS, HI_LO, LAYOUT):
    """Layout in which the terms of rows are loaded.

    With 32 columns the terms are held during the main loop, where registers allow only one row per
    thread.
    """
    if num_columns(ROWS, HI_LO) == 32:
        return row_per_thread_layout()
    return gl.SliceLayout(0, LAYOUT)


@gluon.jit
def _compute_tile(args, state, tile, first_row, steps, PARTITION: gl.constexpr, ROWS: gl.constexpr):
    """Compute and store one row unit of a tile of ROWS rows; return the next state."""
    epilogue = args.epilogue
    HI_LO: gl.constexpr = args.pipe.HI_LO
    COLUMNS: gl.constexpr = num_columns(ROWS, HI_LO)
    LAYOUT: gl.constexpr = output_layout(ROWS, epilogue.variant.EPILOGUE)
    # The main loop hides the latency of these loads; up to 32 columns there are registers for it.
    TERMS_FIRST: gl.constexpr = COLUMNS <= 32
    first_output = (tile.row_pair * 2 + PARTITION) * outputs_per_unit(epilogue.variant.EPILOGUE)
    first_stored = first_row + tile.k_split() * args.plan.num_rows
    tables = decode_tables()
    if TERMS_FIRST:
        outputs, rows, ids = _load_terms(args, tile.expert, first_row, first_output, LAYOUT, ROWS)
    if args.pipe.WEIGHTS is None:
        accumulator, state = accumulate_decode(args.pipe, tables, state, steps, PARTITION, COLUMNS)
    else:
        accumulator, state = accumulate_decode_groups(args.pipe, state, steps, PARTITION, COLUMNS)
    if not TERMS_FIRST:
        outputs, rows, ids = _load_terms(args, tile.expert, first_row, first_output, LAYOUT, ROWS)
    if COLUMNS == 32:
        rows = rows.to_columns(LAYOUT)
        ids = gl.convert_layout(ids, gl.SliceLayout(0, LAYOUT))
    sums = join_hi_lo(accumulator, ROWS) if HI_LO else accumulator  # [64, ROWS] float32
    value = finish(sums, outputs, rows, args.parameters, epilogue, LAYOUT)
    store_rows(
        value,
        is_real(ids, args.output.num_tokens),
        args.output.out,
        first_row=first_stored,
        first_output=first_output,
        num_outputs=epilogue.num_outputs,
    )
    return state


@gluon.jit
def _consume(args, PARTITION: gl.constexpr):
    """A consumer warpgroup: compute row unit PARTITION of each tile; see the timeline above."""
    pipe = args.pipe
    grid_dependency_wait()
    if PARTITION == 0:
        launch_dependents()
    state = consumer_start(pipe.STAGES)
    tile, num_blocks = _first_tile(args.plan, pipe.BLOCK_M)
    while tile.block < num_blocks:
        first_row = tile.block * pipe.BLOCK_M
        first_step, last_step = _step_range(tile.k_split(), args.plan)
        for width in gl.static_range(_num_widths(pipe.BLOCK_M)):
            if tile.width() == width:
                state = _compute_tile(
                    args,
                    state,
                    tile,
                    first_row=first_row,
                    steps=last_step - first_step,
                    PARTITION=PARTITION,
                    ROWS=_MIN_ROWS << width,
                )
        block, expert, row_pair, part = read_tile(
            pipe.tags, state.stage, pipe.ready.index(state.stage), state.phase
        )
        tile = TileInfo(block=block, expert=expert, row_pair=row_pair, part=part)


@gluon.jit(
    do_not_specialize=[
        "tiles_per_block",
        "row_units",
        "depth_units",
        "num_tokens",
        "low_rows",
        "blocks_per_unit",
        "k_splits",
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
    p0,
    p1,
    p2,
    num_tokens,
    low_rows,
    num_outputs,
    tiles_per_block,
    row_units,
    depth_units,
    blocks_per_unit,
    k_splits,
    num_rows,
    early_stages,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    HI_LO: gl.constexpr,
    EPILOGUE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
    WEIGHTS: gl.constexpr = None,
):
    """Compute out [k_splits * P, num_outputs] for all blocks in use; see the contract above.

    Arguments are described at the structures that hold them. HI_LO: rows of x have high and low
    parts. WEIGHTS: a `GroupWeights`, which has no `reference`; None for MXFP4.
    """
    gl.static_assert(_num_widths(BLOCK_M) <= _MAX_WIDTHS, "a width fits in a tile's packed number")
    pipe = make_decode_pipeline(code_desc, shift_desc, x8_desc, BLOCK_M, STAGES, HI_LO, WEIGHTS)
    plan = Plan(
        block_expert_ids=block_expert_ids,
        sorted_token_ids=sorted_token_ids,
        num_valid=num_valid,
        num_tokens=num_tokens,
        max_blocks=num_rows // BLOCK_M,
        blocks_per_unit=blocks_per_unit,
        tiles_per_block=tiles_per_block,
        k_splits=k_splits,
        depth_units=depth_units,
        num_rows=num_rows,
    )
    variant = Variant(EPILOGUE, HAS_BIAS, WEIGHTED, row_reference(WEIGHTS))
    epilogue = Epilogue(reference, bias, num_outputs, row_units, x_scale, routed_weights, variant)
    output = Output(sorted_token_ids=sorted_token_ids, out=out, num_tokens=num_tokens)
    parameters = ActivationParameters(p0, p1, p2)
    consumer = ConsumerArgs(pipe, epilogue, output, parameters, plan)
    x_descs = (x8_desc, x16_desc, x32_desc)
    operands = Operands(code_desc, shift_desc, x_descs, row_units, low_rows)
    producer = ProducerArgs(pipe, tile_counter, operands, plan, early_stages)
    gl.static_assert(num_warps == _CONSUMER_WARPS, "consumer 0 is the default partition")
    gl.warp_specialize(
        [(_consume, (consumer, 0)), (_consume, (consumer, 1)), (_produce, (producer,))],
        [_CONSUMER_WARPS, _PRODUCER_WARPS],
        [WORKER_REGISTERS, _PRODUCER_REGISTERS],
    )
