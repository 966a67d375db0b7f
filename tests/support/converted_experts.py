"""Checkpoints that are converted to compressed-tensors' containers, and what they hold."""

from __future__ import annotations

from pathlib import Path

from support.expert_containers import KINDS, Experts, Kind, awq, gptq, write

SOURCES: dict[str, tuple[str, str | Kind]] = {
    # name: --container, the source
    "mxfp4": ("mxfp4-pack-quantized", "Quark OCP MX"),
    "mxfp8": ("mxfp8-quantized", "MiniMax MXFP8"),
    "int4": ("pack-quantized", gptq(32, sym=True)),
    "int4 with zero points": ("pack-quantized", awq(32)),
    "mxfp4 as mxfp8": ("mxfp8-quantized", "Quark OCP MX"),
    "mxfp4 as nvfp4": ("nvfp4-pack-quantized", "Quark OCP MX"),
}
SIZES = (32, 64)
EXPERTS = "model.layers.0.mlp.experts"
MATRICES = [f"{EXPERTS}.1.{part}_proj" for part in ("up", "down")]


def write_source(path: Path, name: str) -> tuple[str, Experts]:
    """Write a checkpoint of `SOURCES`.

    Returns:
        What it is converted to, and its experts.
    """
    target, source = SOURCES[name]
    kind = source if isinstance(source, Kind) else KINDS[source]
    (module,) = write(path, kind, layers=(0,), sizes=SIZES)
    return target, module
