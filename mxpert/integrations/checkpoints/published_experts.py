"""Experts in gpt-oss's published form, stacked blocks and scales: found, checked, and read.

`mxpert quantize` and converted models write the same tensors for every model; see
mxpert.moe.published_tensors for their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...errors import require
from ...formats.spec import MX_BLOCK_SIZE, MXFP4
from ...formats.tensor import MXTensor
from ...moe.published_tensors import BLOCK_BYTES, expert_weights_from, published_projections
from ...moe.weights import GateUpOrder, MoEWeights
from ..module_paths import module_order
from .safetensors_files import TORCH_DTYPES, CheckpointReader, quantization_method

FLOAT_DTYPES = ("BF16", "F16", "F32")
REMEDY = "download the file again, or convert the checkpoint with `mxpert quantize`"
_STORED = re.compile(r"^(?P<experts>.+)\.(?:gate_up|up|down)_proj_(?P<kind>blocks|scales|bias)$")


def expert_modules_of(reader: CheckpointReader) -> list[str]:
    """Full paths (``….experts``) of all modules whose experts are stored in MXFP4, in order.

    One of their tensors is enough: `check_experts` says which ones are missing.
    """
    matches = [match for name in reader.names if (match := _STORED.match(name))]
    return sorted(
        {match["experts"] for match in matches if match["kind"] != "bias"}, key=module_order
    )


def stored_gate_up_order(config: dict[str, Any], where: object, op: str) -> GateUpOrder:
    """The gate/up order that a quantised checkpoint's config states; gpt-oss's is INTERLEAVED."""
    quantization = config.get("quantization_config")
    valid = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    require(
        valid,
        op,
        f"{where}: quantization_config.quant_method",
        need='"mxfp4"',
        got=quantization_method(config),
        remedy="convert the checkpoint with `mxpert quantize`",
    )
    stated = config["quantization_config"].get("mxpert")
    if stated is None and config.get("model_type") == "gpt_oss":
        return GateUpOrder.INTERLEAVED
    name = stated.get("gate_up_order") if isinstance(stated, dict) else None
    known = [order.value for order in GateUpOrder]
    require(
        name in known,
        op,
        f"{where}: quantization_config.mxpert.gate_up_order",
        need=f"one of {known}",
        got=name,
        remedy="a wrong order would give wrong answers",
    )
    return GateUpOrder(name)


def check_experts(
    reader: CheckpointReader,
    prefix: str,
    sizes: tuple[int, int, int] | None = None,
    *,
    biased: Collection[str] = (),
) -> tuple[int, int, int]:
    """Check one layer's quantised expert tensors by their headers.

    Args:
        reader: the checkpoint.
        prefix: module name, ``….experts``.
        sizes: (E, H, F) that the config states; None takes them from the tensors themselves.
        biased: projections that must have a bias; biases that are there are checked in any case.

    Returns:
        (E, H, F).
    """
    if sizes is None:
        down = reader.info(f"{prefix}.down_proj_blocks")
        require(
            len(down.shape) == 4,
            reader.op,
            f"{down.file}: {down.name}.shape",
            need=f"[E, H, F/{MX_BLOCK_SIZE}, {BLOCK_BYTES}]",
            got=list(down.shape),
        )
        sizes = (down.shape[0], down.shape[1], down.shape[2] * MX_BLOCK_SIZE)
    experts, hidden, intermediate = sizes
    gated = has_gate(reader, prefix)
    first, second = published_projections(gated)
    for projection, rows, columns in (
        (first, intermediate * (2 if gated else 1), hidden),
        (second, hidden, intermediate),
    ):
        blocks = (experts, rows, columns // MX_BLOCK_SIZE)
        reader.require(
            f"{prefix}.{projection}_blocks",
            dtypes=["U8"],
            shape=(*blocks, BLOCK_BYTES),
            remedy=REMEDY,
        )
        reader.require(f"{prefix}.{projection}_scales", dtypes=["U8"], shape=blocks, remedy=REMEDY)
        if projection in biased or f"{prefix}.{projection}_bias" in reader.names:
            reader.require(
                f"{prefix}.{projection}_bias",
                dtypes=FLOAT_DTYPES,
                shape=(experts, rows),
                remedy=REMEDY,
            )
    return sizes


def has_gate(reader: CheckpointReader, prefix: str) -> bool:
    """Whether a module's tensors are those of experts with a gate; true where they are missing."""
    return f"{prefix}.up_proj_blocks" not in reader.names


def read_tensor(
    reader: CheckpointReader, name: str, device: torch.device | str, mmap: bool
) -> torch.Tensor:
    """One tensor on `device`; on a CPU in memory of its own unless `mmap`."""
    if mmap or torch.device(device).type != "cpu":
        return reader.read(name).to(device)
    info = reader.info(name)
    tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=device)
    reader.read_into(name, tensor)
    return tensor


def read_experts(
    reader: CheckpointReader,
    prefix: str,
    order: GateUpOrder | None,
    device: torch.device | str,
    *,
    experts: Sequence[int] | None = None,
    mmap: bool = False,
) -> MoEWeights:
    """The weights of a module that `check_experts` has checked, or of some of its experts."""
    kinds = [
        f"{projection}_{kind}"
        for projection in published_projections(order is not None)
        for kind in ("blocks", "scales", "bias")
    ]
    return expert_weights_from(
        {
            kind: read_tensor(reader, f"{prefix}.{kind}", device, mmap)
            if experts is None
            else reader.read_rows(f"{prefix}.{kind}", experts).to(device)
            for kind in kinds
            if not kind.endswith("bias") or f"{prefix}.{kind}" in reader.names
        },
        order,
    )


def read_published_matrix(
    reader: CheckpointReader, path: str, projection: str, expert: int
) -> MXTensor:
    """One expert's projection [N, K] on the CPU, without reading the others."""
    blocks = reader.read_row(f"{path}.{projection}_blocks", expert)
    scales = reader.read_row(f"{path}.{projection}_scales", expert)
    return MXTensor(blocks.flatten(-2), scales, MXFP4)
