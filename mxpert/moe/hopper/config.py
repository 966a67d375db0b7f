"""Choice of tiles for the Hopper MoE kernels, and the check of configs."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...core.problem import Combine, MoEConfig, MoEProblem, Op
from ...core.stage_configs import StageConfig, require_integers, require_positive, set_member
from ...core.toolchain import copies_register_operands
from ...errors import message, require
from ...formats.layouts import UNIT_CODES, UNIT_ROWS
from ...formats.spec import MXFP4
from . import few_tokens_limits as few_tokens
from .group_layout import group_weights
from .tile_limits import (
    FP8_FROM_ROWS,
    FP8_SHAPES,
    PrefillShape,
    fp8_tile,
    holds_float16,
    prefill_shapes,
    tile_limits,
    uses_hi_lo,
)


class HopperKernel(enum.StrEnum):
    """The kernels of MoE layers on Hopper.

    DECODE: GEMM of a stage with few rows an expert; limited by the memory that weights are read
        from.
    PREFILL: GEMM of a stage with many rows an expert; limited by the tensor cores.
    PREFILL_FP8: the same for the FP8 copy of MXFP4 weights that `prepare(keep_fp8=True)` keeps.
    FEW_TOKENS: the whole layer in one launch, for up to four tokens with bfloat16 activations and
        up to eight with MX activations; with NVFP4 weights for four, two in a launch. Both stages
        have it.

    Source:
        The kernels of the hopper backend.

    Example:
        >>> HopperKernel("decode") is HopperKernel.DECODE
        True
    """

    DECODE = "decode"
    PREFILL = "prefill"
    PREFILL_FP8 = "prefill_fp8"
    FEW_TOKENS = "few_tokens"

    def __repr__(self) -> str:
        return f"HopperKernel.{self.name}"


@dataclass(frozen=True)
class HopperGemmConfig(StageConfig):
    """Kernel, tile and schedule of one MoE stage on Hopper, to pin with `override`.

    Args:
        kernel: the kernel that runs, or its name.
        block_m: sorted rows of a routing block.
        num_stages: stages of the pipeline, each 256 elements of the contracted dimension; of
            FEW_TOKENS, PREFILL_FP8 and of rows of 16 bits 128.
        consumers: consumer warpgroups of a CTA; each computes its own 64 weight rows of a tile.
        blocks_per_tile: most routing blocks of an expert in one tile. A weight is decoded once for
            all of them. The decode kernel has one.
        k_splits: CTAs that share the contracted dimension of a tile. Prefill kernels have one.
        hi_lo: whether rows are two e4m3 parts, hi and lo, as for bfloat16 activations (a16w4).
        bfloat16_rows: whether rows are bfloat16, and bf16 tensor cores multiply them with weights
            that bfloat16 holds exactly: MXFP8. Only the prefill kernel has it.
        float16_rows: the same with float16: NVFP4, INT4 in HOPPER_GROUPS_FLOAT16, and MXFP4 with
            bfloat16 activations.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown kernel, or `block_m` below 1. An op raises it too for a tile that
            the kernel does not have.

    Example:
        >>> HopperGemmConfig("decode", block_m=8, num_stages=5).kernel
        HopperKernel.DECODE
    """

    kernel: HopperKernel
    block_m: int
    num_stages: int
    consumers: int = 2
    blocks_per_tile: int = 1
    k_splits: int = 1
    hi_lo: bool = False
    bfloat16_rows: bool = False
    float16_rows: bool = False

    def __post_init__(self) -> None:
        set_member(self, "kernel", HopperKernel)
        for name in ("hi_lo", "bfloat16_rows", "float16_rows"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise TypeError(message("HopperGemmConfig", name, "a bool", repr(value)))
        require_integers(
            self, ("block_m", "num_stages", "consumers", "blocks_per_tile", "k_splits")
        )
        require_positive(self, "block_m")

    @property
    def rows_dtype(self) -> torch.dtype:
        """In which activation rows are stored."""
        if self.float16_rows:
            return torch.float16
        return torch.bfloat16 if self.bfloat16_rows else torch.float8_e4m3fn


_FEW_TOKENS_STAGES, _MOST_FEW_TOKENS_STAGES = 5, 8
"""Stages of its ring for one or two tokens, and for more. More stages fill the queues of the
memory, so that the first ones arrive later; long streams gain from them."""
ONE_LAUNCH_TOKENS = 4
"""Tokens up to which one launch is the faster. Eight take 1.3 times as long as two stages."""

STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

BLOCKS_M = (8, 16, 32)
"""block_m of decode tiles. Prefill tiles have routing blocks of 32 or 64 rows."""

STAGE_DEPTH = 256
"""Elements of depth (K) in a pipeline stage of both kernels."""

DECODE_REGISTERS = 80
"""Registers per thread (maxnreg) of the decode kernel: the register file then holds two CTAs of
twelve warps."""

DECODE_CTAS_PER_SM = 2

DECODE_WORKER_REGISTERS = 104
"""Registers per thread of a consumer: the producer's warps release theirs (80 → 24)."""

_UNIT_STAGE_BYTES = UNIT_ROWS * STAGE_DEPTH // 2 + UNIT_ROWS * STAGE_DEPTH // 32
"""Bytes of a consumer's weights in a stage: two codes a byte, and a shift for 32 codes."""


def _unit_stage_bytes(weight_format: str) -> int:
    """The same for any format; scales of INT4 have up to four bytes."""
    weights = group_weights(weight_format)
    if weights is None:
        return _UNIT_STAGE_BYTES
    return STAGE_DEPTH // UNIT_CODES * weights.unit_bytes


_DECODE_SHARED = 113 * 1024
"""Shared memory per CTA in bytes so that two fit on an SM; the system takes one kilobyte of it."""

_PREFILL_SHARED = 227 * 1024
"""Shared memory of one CTA in bytes."""

_BARRIER_BYTES = 2048
_MIN_STEPS_PER_K_SPLIT = 2
_MAX_K_SPLIT_ROWS = 64
_MAX_STAGES = 8
_FEW_STAGES = 3
_MOST_IDLE = 1.1
"""Largest ratio of padded to real row units with three consumers. In a stage with few weight rows
the third consumer has none in the last tile: with the 1024 rows (16 units) of kimi-k2 TP4, tiles of
two consumers take 4 % less time."""


def stage_bytes(config: HopperGemmConfig, weight_format: str = MXFP4.name) -> int:
    """Bytes of a pipeline stage: weight codes, shifts, and activation rows (hi and lo)."""
    rows = config.block_m * config.blocks_per_tile * (2 if config.hi_lo else 1)
    if config.kernel is HopperKernel.PREFILL_FP8:
        return (config.consumers * UNIT_ROWS + rows) * UNIT_CODES
    units = config.consumers * _unit_stage_bytes(weight_format)
    # A stage with rows of 16 bits has half the depth.
    return (units // 2 if config.rows_dtype.itemsize == 2 else units) + rows * STAGE_DEPTH


def _decode_config(block_m: int, hi_lo: bool, weight_format: str) -> HopperGemmConfig:
    """Decode config with as many stages as two CTAs per SM allow."""
    config = HopperGemmConfig(HopperKernel.DECODE, block_m, 1, hi_lo=hi_lo)
    stages = (_DECODE_SHARED - _BARRIER_BYTES) // stage_bytes(config, weight_format)
    return replace(config, num_stages=min(_MAX_STAGES, stages))


def _prefill_config(
    shape: PrefillShape,
    *,
    hi_lo: bool,
    weight_format: str,
    kernel: HopperKernel = HopperKernel.PREFILL,
) -> HopperGemmConfig:
    """Prefill config for tiles of a shape, with as many stages as fit.

    Shared memory must also hold the output buffers. More stages hide more memory latency: with one
    stage more, the "short" tile was up to 11 % faster than "triple" on the same rows.
    """
    config = HopperGemmConfig(
        kernel,
        shape.block_m,
        1,
        shape.consumers,
        blocks_per_tile=shape.blocks,
        hi_lo=hi_lo and shape.rows is None,
        bfloat16_rows=shape.rows is torch.bfloat16,
        float16_rows=shape.rows is torch.float16,
    )
    # A buffer of bfloat16 outputs, or of float32 ones for a quarter of the left columns.
    left = 1 << min(128, shape.block_m * shape.blocks).bit_length() - 1
    outputs = shape.consumers * max(shape.block_m, left // 2) * UNIT_ROWS * torch.bfloat16.itemsize
    room = _PREFILL_SHARED - _BARRIER_BYTES - outputs
    return replace(config, num_stages=room // stage_bytes(config, weight_format))


def output_buffers(
    config: HopperGemmConfig, row_bytes: int, weight_format: str = MXFP4.name
) -> tuple[int, int]:
    """Output buffers per consumer of a prefill tile (TMA stores in flight), and rows of each.

    row_bytes: bytes of a consumer's outputs per row.
    """
    ring = config.num_stages * stage_bytes(config, weight_format)
    room = _PREFILL_SHARED - _BARRIER_BYTES - ring
    return next(
        (buffers, rows)
        for buffers, rows in ((2, config.block_m), (1, config.block_m), (1, 32), (1, 16))
        if config.consumers * buffers * rows * row_bytes <= room
    )


@functools.cache
def tiles(
    hi_lo: bool, weight_format: str = MXFP4.name, float16: bool = False
) -> dict[str, HopperGemmConfig]:
    """All tiles by name, ordered by activation rows; float16: whether float16 holds the weights."""
    decode = {f"decode{size}": _decode_config(size, hi_lo, weight_format) for size in BLOCKS_M}
    return decode | {
        name: _prefill_config(shape, hi_lo=hi_lo, weight_format=weight_format)
        for name, shape in prefill_shapes(hi_lo, weight_format, float16).items()
    }


@functools.cache
def fp8_tiles() -> dict[str, HopperGemmConfig]:
    """Tiles that read the FP8 copy of MXFP4 weights, by name, ordered by activation rows."""
    return {
        name: _prefill_config(
            shape, hi_lo=False, weight_format=MXFP4.name, kernel=HopperKernel.PREFILL_FP8
        )
        for name, shape in FP8_SHAPES.items()
    }


def tiles_of(problem: MoEProblem) -> dict[str, HopperGemmConfig]:
    """All tiles for the formats and the weights of a problem, by name."""
    known = _own_tiles(problem)
    return {**known, **fp8_tiles()} if reads_fp8(problem) else known


def _own_tiles(problem: MoEProblem) -> dict[str, HopperGemmConfig]:
    return tiles(uses_hi_lo(problem), problem.weight_format, holds_float16(problem))


def reads_fp8(problem: MoEProblem) -> bool:
    """Whether the weights have an FP8 copy that kernels read: with rows of one e4m3 part."""
    return problem.weight_layout.has_fp8_codes and not uses_hi_lo(problem)


def mode_of(problem: MoEProblem) -> str:
    """For `explain`: what ATOMIC, which allows any order, does, and who reads an FP8 copy."""
    atomic = problem.options.combine is Combine.ATOMIC
    modes = ["sums in slot order, as REDUCE does; no atomic additions"] if atomic else []
    if problem.weight_layout.has_fp8_codes:
        when = f"from {FP8_FROM_ROWS} rows an expert on, not with bfloat16 activations"
        modes.append(f"the weights' FP8 copy is read {when}")
    return "; ".join(modes)


def decode_ctas(problem: MoEProblem) -> int:
    """Number of CTAs of the decode kernel; all are resident."""
    return DECODE_CTAS_PER_SM * problem.target.num_sms


def _preferred(problem: MoEProblem, op: Op) -> HopperGemmConfig:
    """Choose the tile of a stage by the rows per hit expert, assuming that tokens spread evenly.

    Both stages get the same block_m.
    """
    units = _row_units(problem, op)
    idle = -(-units // 3) * 3 > _MOST_IDLE * units
    if reads_fp8(problem) and (name := fp8_tile(problem)):
        return fp8_tiles()["fp8_middle" if name == "fp8_triple" and idle else name]
    hi_lo, known = uses_hi_lo(problem), _own_tiles(problem)
    bytes_per_weight = _unit_stage_bytes(problem.weight_format) / (UNIT_ROWS * STAGE_DEPTH)
    limits = tile_limits(problem, hi_lo, bytes_per_weight)
    fitting = (name for name, limit in limits if problem.rows_per_expert <= limit)
    name = next((name for name in fitting if name in known), [*known][-1])
    if name == "triple" and "narrow" in known and (idle or copies_register_operands()):
        name = "narrow"  # its two consumers have registers for copies
    return known[name]


def _row_units(problem: MoEProblem, op: Op) -> int:
    rows = 2 * problem.intermediate_size if op is Op.MOE_GATE_UP else problem.hidden_size
    return -(-rows // UNIT_ROWS)


def _tiles_and_steps(problem: MoEProblem, op: Op) -> tuple[int, int]:
    """Number of decode tiles per block, and of steps of depth, of a stage."""
    depth = problem.hidden_size if op is Op.MOE_GATE_UP else problem.intermediate_size
    return -(-_row_units(problem, op) // 2), -(-depth // STAGE_DEPTH)


def _with_k_splits(config: HopperGemmConfig, problem: MoEProblem, op: Op) -> HopperGemmConfig:
    """Set k_splits > 1 if the tiles of the routed rows leave more than half of the CTAs idle.

    FLAT has none: nothing behind the GEMM sums the parts.
    """
    if config.kernel is not HopperKernel.DECODE or problem.options.combine is Combine.FLAT:
        return config
    num_tiles, steps = _tiles_and_steps(problem, op)
    idle_factor = decode_ctas(problem) // (problem.hit_experts * num_tiles)
    return replace(config, k_splits=max(1, min(idle_factor, steps // _MIN_STEPS_PER_K_SPLIT)))


def early_stages(config: HopperGemmConfig, problem: MoEProblem, num_tiles: int) -> int:
    """Stages of weights that a CTA of stage 1 loads before it waits for the activation rows.

    num_tiles: tiles per block. Loads complete in the order in which they are issued. If every tile
    has its own CTA, the activation rows are ready before all stages of weights have arrived. With
    three stages instead of all, T = 1 takes 1 to 4 % less time, T = 2 and more up to 5 % more.
    """
    if problem.hit_experts * num_tiles <= decode_ctas(problem):
        return min(_FEW_STAGES, config.num_stages)
    return config.num_stages


def _layer(problem: MoEProblem, gate_up: HopperGemmConfig, down: HopperGemmConfig) -> MoEConfig:
    """Config of a layer with these tiles, with split-K if CTAs would be idle."""
    gate_up, down = (
        _with_k_splits(tile, problem, op)
        for tile, op in zip((gate_up, down), STAGE_OPS, strict=True)
    )
    return MoEConfig.of(gate_up, down)


def _preferred_tiles(problem: MoEProblem) -> tuple[HopperGemmConfig, HopperGemmConfig]:
    return _preferred(problem, Op.MOE_GATE_UP), _preferred(problem, Op.MOE_DOWN)


def one_launch(hi_lo: bool, num_stages: int = _FEW_TOKENS_STAGES) -> MoEConfig:
    """Config of a layer in one launch, with rows of two e4m3 parts (`hi_lo`) or of one."""
    tile = HopperGemmConfig(
        HopperKernel.FEW_TOKENS, min(BLOCKS_M), num_stages, consumers=1, hi_lo=hi_lo
    )
    return MoEConfig.of(tile, tile)


def few_tokens_config(problem: MoEProblem, num_stages: int | None = None) -> MoEConfig:
    """`one_launch` for the rows of a problem; by default with the stages that it prefers."""
    if num_stages is None:
        most = _FEW_TOKENS_STAGES if problem.num_tokens <= 2 else _MOST_FEW_TOKENS_STAGES
        num_stages = min(most, few_tokens.most_stages(problem))
    return one_launch(uses_hi_lo(problem), num_stages)


def _prefers_one_launch(problem: MoEProblem) -> bool:
    """Whether a layer takes less time in one launch."""
    if few_tokens.unsupported(problem) or problem.num_sms is not None:  # it has no persistent grid
        return False
    return problem.num_tokens <= ONE_LAUNCH_TOKENS


def two_stage_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a layer in two stages: the preferred tile for each."""
    return _layer(problem, *_preferred_tiles(problem))


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a layer: one launch for a few tokens, or two stages."""
    if _prefers_one_launch(problem):
        return few_tokens_config(problem)
    return two_stage_heuristic(problem)


def require_few_tokens(config: MoEConfig, problem: MoEProblem) -> int:
    """Stages of a valid config of a layer in one launch; ValueError for others."""
    reason = few_tokens.unsupported(problem)
    tile = config.gate_up
    most = 0 if reason else few_tokens.most_stages(problem)
    valid = (
        isinstance(tile, HopperGemmConfig)
        and 2 <= tile.num_stages <= most
        and config == few_tokens_config(problem, tile.num_stages)
    )
    require(
        valid,
        problem.op.value,
        "config",
        got=config,
        need=f"a kernel of two stages: FEW_TOKENS {reason}"
        if reason
        else f"{few_tokens_config(problem)}, or other num_stages from 2 to {most}",
        remedy="pin that one, or none",
    )
    assert isinstance(tile, HopperGemmConfig)  # for the type checker: checked above
    return tile.num_stages


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """Configs of a layer: the heuristic's first, then other tiles, other k_splits, pairs of tiles.

    A pair has the preferred tile in one stage and any other in the other. For a few tokens one
    launch, too.
    """
    preferred = _preferred_tiles(problem)
    first = _layer(problem, *preferred)
    others = [_layer(problem, tile, tile) for tile in tiles_of(problem).values()]
    if preferred[0].kernel is HopperKernel.DECODE:
        others += [
            MoEConfig(
                first.routing_block_m,
                *(replace(t, k_splits=n) for t, n in zip(preferred, splits, strict=True)),
            )
            for splits in _k_split_choices(problem)
        ]
    own = tiles_of(problem).values()
    others += [_layer(problem, preferred[0], tile) for tile in own]
    others += [_layer(problem, tile, preferred[1]) for tile in own]
    others += _few_tokens_choices(problem)
    yield from dict.fromkeys([layer_heuristic(problem), first, *others])


def _few_tokens_choices(problem: MoEProblem) -> list[MoEConfig]:
    """Configs of a layer in one launch that the tuner tries."""
    if few_tokens.unsupported(problem):
        return []
    most = min(_MOST_FEW_TOKENS_STAGES, few_tokens.most_stages(problem))
    return [few_tokens_config(problem, stages) for stages in range(2, most + 1)]


def _k_split_choices(problem: MoEProblem) -> Iterator[tuple[int, int]]:
    """Pairs of k_splits for both stages that the tuner tries; none if there are many rows."""
    if problem.routed_rows > _MAX_K_SPLIT_ROWS:
        return
    for splits in itertools.product((1, 2, 3, 4, 6), (1, 2, 3)):
        if all(
            number == 1 or number <= _tiles_and_steps(problem, op)[1]
            for number, op in zip(splits, STAGE_OPS, strict=True)
        ):
            yield splits


def stage_configs(problem: MoEProblem) -> Iterator[HopperGemmConfig]:
    """Every tile whose block_m divides the plan's routing_block_m."""
    yield from (
        _with_k_splits(tile, problem, problem.op)
        for tile in tiles_of(problem).values()
        if problem.routing_block_m % tile.block_m == 0
    )


def stage_heuristic(problem: MoEProblem) -> HopperGemmConfig:
    """The preferred tile, or the largest decode tile whose block_m divides routing_block_m."""
    preferred = _preferred(problem, problem.op)
    if problem.routing_block_m % preferred.block_m:
        rows = max(rows for rows in BLOCKS_M if problem.routing_block_m % rows == 0)
        preferred = tiles_of(problem)[f"decode{rows}"]
    return _with_k_splits(preferred, problem, problem.op)


def require_valid(config: HopperGemmConfig, problem: MoEProblem) -> None:
    """Raise ValueError for a pinned or tuned config that no kernel of this backend implements."""
    known_tiles = list(tiles_of(problem).values())
    decodes = config.kernel is HopperKernel.DECODE
    fewest = 1 if config.kernel is HopperKernel.PREFILL else 2  # that a consumer holds at once
    valid = (
        config.num_stages >= fewest
        and config.k_splits >= 1
        and (config.k_splits == 1 or (decodes and problem.options.combine is not Combine.FLAT))
        and any(
            config.num_stages <= known.num_stages
            and config == replace(known, num_stages=config.num_stages, k_splits=config.k_splits)
            for known in known_tiles
        )
    )
    require(
        valid,
        problem.op.value,
        "config",
        got=config,
        need=f"one of {known_tiles}, with k_splits in decode tiles (not for FLAT), or fewer stages",
        remedy="take one from the kernel's configs()",
    )
