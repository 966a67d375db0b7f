"""Configs of the kernels: tiles and schedules, to pin with `override` and to store in tables."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from .errors import message, require, require_dtype

__all__ = [
    "Cdna4GemmConfig",
    "Cdna4Kernel",
    "GemmConfig",
    "HopperGemmConfig",
    "HopperKernel",
    "MoEConfig",
    "ReferenceConfig",
]


def _require_integers(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int:
            raise TypeError(message(type(config).__name__, name, "an int", repr(value)))


def _require_positive(config: object, name: str) -> None:
    """Raise ValueError unless a field is an int of at least 1."""
    value = getattr(config, name)
    if type(value) is not int or value < 1:
        raise ValueError(message(type(config).__name__, name, "an int of at least 1", repr(value)))


def _set_kernel(config: HopperGemmConfig | Cdna4GemmConfig, kernels: type[enum.StrEnum]) -> None:
    """Make `config.kernel` a member of `kernels`; raise ValueError for an unknown name."""
    kernel, names = config.kernel, [each.value for each in kernels]
    known = isinstance(kernel, str) and kernel in names
    require(known, type(config).__name__, "kernel", need=f"one of {names}", got=repr(kernel))
    object.__setattr__(config, "kernel", kernels(kernel))


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of one stage on the Triton backend, to pin with `override`.

    Args:
        block_m: sorted rows of a tile.
        block_n: output columns of a tile (stage 1: features).
        block_k: elements of the contracted dimension in one step of the loop.
        num_warps: warps of a thread block.
        num_stages: buffers of its pipeline.
        group_m: row blocks that share weights in L2.
        split_k: thread blocks that share the contracted dimension of a tile.

    Raises:
        TypeError: a value that is no int.
        ValueError: `block_m` below 1. An op raises it too for a tile that its kernel cannot run.

    Example:
        >>> GemmConfig(16, 64, 128).num_stages
        3
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 1
    split_k: int = 1

    def __post_init__(self) -> None:
        _require_integers(self, tuple(vars(self)))
        _require_positive(self, "block_m")


class HopperKernel(enum.StrEnum):
    """The two GEMM kernels of an MoE stage on Hopper.

    DECODE: few rows an expert; limited by the memory that weights are read from.
    PREFILL: many rows an expert; limited by the tensor cores.

    Source:
        The kernels of the hopper backend.

    Example:
        >>> HopperKernel("decode") is HopperKernel.DECODE
        True
    """

    DECODE = "decode"
    PREFILL = "prefill"

    def __repr__(self) -> str:
        return f"HopperKernel.{self.name}"


@dataclass(frozen=True)
class HopperGemmConfig:
    """Kernel, tile and schedule of one MoE stage on Hopper, to pin with `override`.

    Args:
        kernel: the kernel that runs, or its name.
        block_m: sorted rows of a routing block.
        num_stages: stages of the pipeline, each 256 elements of the contracted dimension.
        consumers: consumer warpgroups of a CTA; each computes its own 64 weight rows of a tile.
        blocks_per_tile: most routing blocks of an expert in one tile. A weight is decoded once for
            all of them. The decode kernel has one.
        k_splits: CTAs that share the contracted dimension of a tile. The prefill kernel has one.
        hi_lo: whether rows are two e4m3 parts, hi and lo, as for bfloat16 activations (a16w4).

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

    def __post_init__(self) -> None:
        _set_kernel(self, HopperKernel)
        if type(self.hi_lo) is not bool:
            raise TypeError(message("HopperGemmConfig", "hi_lo", "a bool", repr(self.hi_lo)))
        _require_integers(
            self, ("block_m", "num_stages", "consumers", "blocks_per_tile", "k_splits")
        )
        _require_positive(self, "block_m")


class Cdna4Kernel(enum.StrEnum):
    """The two GEMM kernels of an MoE stage on gfx950.

    DECODE: few rows an expert; limited by the memory that weights are read from.
    PREFILL: many rows an expert; limited by the matrix cores.

    Source:
        The kernels of the cdna4 backend.

    Example:
        >>> Cdna4Kernel("prefill") is Cdna4Kernel.PREFILL
        True
    """

    DECODE = "decode"
    PREFILL = "prefill"

    def __repr__(self) -> str:
        return f"Cdna4Kernel.{self.name}"


@dataclass(frozen=True)
class Cdna4GemmConfig:
    """Kernel, tile and schedule of one MoE stage on gfx950, to pin with `override`.

    Args:
        kernel: the kernel that runs, or its name.
        block_m: sorted rows of a tile.
        block_n: weight rows of a tile: outputs, or in stage 1 gate and up rows.
        num_warps: waves of a workgroup.
        num_stages: decode: units of 64 x 128 weights that a wave holds or loads at a time.
            Prefill: buffers of 128 elements of the contracted dimension in LDS.
        k_splits: workgroups that share the contracted dimension of a tile.
        k_slices: waves of a workgroup that share the contracted dimension of a tile. The prefill
            kernel has one.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown kernel, or a size below 1. An op raises it too for a tile that the
            kernel does not have.

    Example:
        >>> Cdna4GemmConfig("decode", block_m=16, block_n=256).kernel
        Cdna4Kernel.DECODE
    """

    kernel: Cdna4Kernel
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    k_splits: int = 1
    k_slices: int = 1

    def __post_init__(self) -> None:
        _set_kernel(self, Cdna4Kernel)
        sizes = ("block_m", "block_n", "num_warps", "num_stages", "k_splits", "k_slices")
        _require_integers(self, sizes)
        for name in sizes:
            _require_positive(self, name)


StageConfig = GemmConfig | HopperGemmConfig | Cdna4GemmConfig
"""Config of one stage of an MoE layer."""


@dataclass(frozen=True)
class MoEConfig:
    """Configs of both stages of a layer, to pin with `override`.

    Args:
        routing_block_m: rows per block of the plan, a multiple of each stage's `block_m`.
        gate_up: config of stage 1: a HopperGemmConfig for the hopper backend, a Cdna4GemmConfig for
            the cdna4 backend, else a GemmConfig.
        down: config of stage 2, of the same kind.

    Raises:
        TypeError: a stage of another type.
        ValueError: a `routing_block_m` that is no multiple of each stage's `block_m`.

    Example:
        >>> MoEConfig(32, GemmConfig(16, 64, 128), GemmConfig(32, 64, 128)).routing_block_m
        32
    """

    routing_block_m: int
    gate_up: StageConfig
    down: StageConfig

    def __post_init__(self) -> None:
        _require_positive(self, "routing_block_m")
        for name, stage in (("gate_up", self.gate_up), ("down", self.down)):
            if not isinstance(stage, StageConfig):
                need = "a GemmConfig, HopperGemmConfig or Cdna4GemmConfig"
                raise TypeError(message("MoEConfig", name, need, repr(stage)))
            require(
                self.routing_block_m % stage.block_m == 0,
                "MoEConfig",
                "routing_block_m",
                need=f"a multiple of block_m = {stage.block_m}",
                got=self.routing_block_m,
            )


@dataclass(frozen=True)
class ReferenceConfig:
    """Config of the reference backend.

    Args:
        accumulate: dtype of sums: float32, or float64 for comparisons.
        routing_block_m: rows per block of the plan that `fused_moe` makes.

    Raises:
        TypeError: another dtype.
        ValueError: `routing_block_m` is no positive int.

    Example:
        >>> ReferenceConfig(torch.float64).routing_block_m
        16
    """

    accumulate: torch.dtype = torch.float32
    routing_block_m: int = 16

    def __post_init__(self) -> None:
        require_dtype(
            self.accumulate, (torch.float32, torch.float64), "ReferenceConfig", "accumulate"
        )
        _require_positive(self, "routing_block_m")


Config = StageConfig | MoEConfig | ReferenceConfig | None
