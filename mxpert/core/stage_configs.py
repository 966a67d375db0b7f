"""Configs of the kernels: tiles and schedules, to pin with `override` and to store in tables."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch

from ..errors import message, require, require_dtype


def require_integers(config: StageConfig, names: tuple[str, ...]) -> None:
    """Raise TypeError unless these fields are ints."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int:
            raise TypeError(message(type(config).__name__, name, "an int", repr(value)))


def require_positive(config: StageConfig | MoEConfig | ReferenceConfig, name: str) -> None:
    """Raise ValueError unless a field is an int of at least 1."""
    value = getattr(config, name)
    if type(value) is not int or value < 1:
        raise ValueError(message(type(config).__name__, name, "an int of at least 1", repr(value)))


def set_member(config: StageConfig, name: str, members: type[enum.StrEnum]) -> None:
    """Make a field a member of an enum; raise ValueError for an unknown name."""
    value, names = getattr(config, name), [each.value for each in members]
    known = isinstance(value, str) and value in names
    require(known, type(config).__name__, name, need=f"one of {names}", got=repr(value))
    object.__setattr__(config, name, members(value))


class WeightCache(enum.StrEnum):
    """Whether a GEMM's weights stay in the caches after they are read.

    KEEP: they are cached like other data, for row blocks of the same expert that read them again.
    STREAM: loads carry the hint that lines leave the caches first. It pays where an expert has at
        most one row block, so that its weights are read once.

    Source:
        The non-temporal weight loads of FlyDSL's MoE kernels (pull request 753).

    Example:
        >>> WeightCache("stream") is WeightCache.STREAM
        True
    """

    KEEP = "keep"
    STREAM = "stream"

    def __repr__(self) -> str:
        return f"WeightCache.{self.name}"

    @property
    def other(self) -> WeightCache:
        """The other member."""
        return WeightCache.KEEP if self is WeightCache.STREAM else WeightCache.STREAM


class StageConfig:
    """Base of the frozen dataclasses that configure one stage of an MoE layer, one a backend.

    A row of a tuned table becomes the subclass that shares most fields with it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    block_m: int


def name_kinds(*others: type) -> str:
    """The types of configs as errors name them: "a GemmConfig, AnotherConfig or MoEConfig"."""
    *names, last = [kind.__name__ for kind in (*StageConfig.__subclasses__(), *others)]
    return f"a {', '.join(names)} or {last}"


@dataclass(frozen=True)
class GemmConfig(StageConfig):
    """Tile and schedule of one stage on the Triton backend, to pin with `override`.

    Args:
        block_m: sorted rows of a tile.
        block_n: output columns of a tile (stage 1: features).
        block_k: elements of the contracted dimension in one step of the loop.
        num_warps: warps of a thread block.
        num_stages: buffers of its pipeline.
        group_m: row blocks that share weights in L2.
        split_k: thread blocks that share the contracted dimension of a tile.
        weight_cache: whether weights stay in the caches, or its name. NVIDIA GPUs and grouped GEMMs
            have KEEP.

    Raises:
        TypeError: a size that is no int.
        ValueError: `block_m` below 1, or an unknown name. An op raises it too for a tile that its
            kernel cannot run.

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
    weight_cache: WeightCache = WeightCache.KEEP

    def __post_init__(self) -> None:
        set_member(self, "weight_cache", WeightCache)
        require_integers(self, tuple(name for name in vars(self) if name != "weight_cache"))
        require_positive(self, "block_m")


@dataclass(frozen=True)
class MoEConfig:
    """Configs of both stages of a layer, to pin with `override`.

    Args:
        routing_block_m: rows per block of the plan, a multiple of each stage's `block_m`.
        gate_up: config of stage 1, of the type that the backend takes: a GemmConfig, or its own.
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

    @classmethod
    def of(cls, gate_up: StageConfig, down: StageConfig) -> MoEConfig:
        """The config with the smallest `routing_block_m` that serves two stages.

        Example:
            >>> MoEConfig.of(GemmConfig(16, 64, 128), GemmConfig(32, 64, 128)).routing_block_m
            32
        """
        return cls(math.lcm(gate_up.block_m, down.block_m), gate_up, down)

    def __post_init__(self) -> None:
        require_positive(self, "routing_block_m")
        for name, stage in (("gate_up", self.gate_up), ("down", self.down)):
            if not isinstance(stage, StageConfig):
                raise TypeError(message("MoEConfig", name, name_kinds(), repr(stage)))
            require(
                self.routing_block_m % stage.block_m == 0,
                "MoEConfig",
                "routing_block_m",
                need=f"a multiple of block_m = {stage.block_m}",
                got=self.routing_block_m,
            )


def other_weight_caches(layer: MoEConfig) -> Iterator[MoEConfig]:
    """The layer with the other `weight_cache` in stage 1, in stage 2, and in both."""
    gate_up, down = (
        replace(stage, weight_cache=stage.weight_cache.other)
        for stage in cast("tuple[Any, Any]", (layer.gate_up, layer.down))
    )
    yield replace(layer, gate_up=gate_up)
    yield replace(layer, down=down)
    yield replace(layer, gate_up=gate_up, down=down)


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
        require_positive(self, "routing_block_m")


Config = StageConfig | MoEConfig | ReferenceConfig | None
