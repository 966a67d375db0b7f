"""Configs of both stages of an MoE layer, by a name that every backend understands."""

from __future__ import annotations

from mxpert.configs import Cdna4GemmConfig, GemmConfig, MoEConfig
from mxpert.moe.cdna4.config import prefill_config


def decode(
    block_m: int = 16, k_slices: int = 1, k_splits: int = 1, stages: int = 4, warps: int = 4
) -> Cdna4GemmConfig:
    block_n = 64 * warps // k_slices
    return Cdna4GemmConfig("decode", block_m, block_n, warps, stages, k_splits, k_slices)


def both(stage: Cdna4GemmConfig, unit: int = 0) -> MoEConfig:
    return MoEConfig(unit or stage.block_m, stage, stage)


def tile(unit: int, gate_up: GemmConfig, down: GemmConfig) -> MoEConfig:
    return MoEConfig(unit, gate_up, down)


DEEP = tile(32, GemmConfig(32, 64, 256, 4, 2), GemmConfig(32, 256, 64))
DEEP_SPLIT = tile(32, GemmConfig(32, 64, 256, 4, 2, split_k=2), GemmConfig(32, 256, 64, split_k=2))
"""Long steps: the interpreter's time is that of the steps."""
TILES: dict[str, dict[str, MoEConfig]] = {
    "chosen": {},
    "small": {
        "triton": tile(16, GemmConfig(16, 64, 128), GemmConfig(16, 128, 128)),
        "cdna4": both(decode()),
    },
    "wide": {
        "triton": tile(32, GemmConfig(32, 64, 128), GemmConfig(32, 128, 64)),
        "cdna4": both(decode(warps=8)),
    },
    "small_in_units": {
        "triton": tile(64, GemmConfig(16, 32, 128), GemmConfig(32, 64, 64)),
        "cdna4": both(decode(), 32),
    },
    "grouped": {
        "triton": tile(16, GemmConfig(16, 64, 256, group_m=2), GemmConfig(16, 128, 128, group_m=2)),
        "cdna4": both(decode(stages=2)),
    },
    "split": {
        "triton": tile(
            32,
            GemmConfig(32, 128, 64, split_k=2, group_m=4),
            GemmConfig(32, 256, 64, split_k=2, group_m=2),
        ),
        "cdna4": both(decode(32, k_splits=3)),
    },
    "more_splits_than_steps": {
        "triton": tile(64, GemmConfig(64, 64, 128, split_k=4), GemmConfig(64, 128, 128, split_k=4)),
        "cdna4": both(decode(k_splits=2, warps=1)),
    },
    "sliced": {"triton": DEEP, "cdna4": both(decode(32, k_slices=4))},
    "sliced_and_split": {"triton": DEEP_SPLIT, "cdna4": both(decode(32, 2, 2, stages=2))},
    "deep": {"triton": DEEP, "cdna4": both(decode())},
    "deep_split": {"triton": DEEP_SPLIT, "cdna4": both(decode(32, k_splits=3))},
    **{
        name: {
            "triton": MoEConfig.of(
                GemmConfig(64, 64, 256, 4, 2), GemmConfig(32 if "then" in name else 64, 128, 64)
            ),
            "cdna4": own,
        }
        for name, own in {
            "high_64": both(prefill_config(64)),
            "high_128": both(prefill_config(128)),
            "high_128_in_units": both(prefill_config(128), 256),
            "high_256": both(prefill_config(256)),
            "high_128_then_64": MoEConfig.of(prefill_config(128), prefill_config(64)),
            "high_64_then_decode": MoEConfig.of(prefill_config(64), decode(32)),
        }.items()
    },
}
"""Configs of both stages by backend. A backend that is not named chooses its own."""
