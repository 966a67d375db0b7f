"""Checkpoints in gpt-oss's published MXFP4 format: read their MoE layers, name tensors to write.

Per layer the format holds, below ``model.layers.N.mlp.experts``, ``gate_up_proj_blocks`` uint8
[E, 2F, H/32, 16] and ``gate_up_proj_scales`` uint8 [E, 2F, H/32], the same for ``down_proj``
([E, H, F/32, 16]), and biases; gate and up rows alternate, the low nibble is the earlier code.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.files import short
from ...core.problem import Activation, SwiGLU
from ...errors import Checks, require, require_tensor
from ...formats.spec import MX_BLOCK_SIZE
from ...moe.published_tensors import (
    BLOCK_BYTES,
    expert_weights_from,
    published_expert_tensors,
    published_projections,
)
from ...moe.weights import GateUpOrder, MoEWeights
from ...moe.weights_state import PROJECTIONS
from ..module_paths import choose_modules, module_order
from .safetensors_files import CONFIG_FILE, CheckpointReader, positive_int, quantization_method

GPT_OSS_LIMIT = SwiGLU.limit
FLOAT_DTYPES = ("BF16", "F16", "F32")
_REMEDY = "download the file again, or convert the checkpoint with `mxpert quantize`"
_STORED = re.compile(r"^(?P<experts>.+)\.(?:gate_up|up|down)_proj_(?P<kind>blocks|scales|bias)$")


@dataclass(frozen=True)
class LoadedMoELayer:
    """One MoE layer of a checkpoint.

    Args:
        layer: index of the decoder layer.
        weights: expert weights as stored, biases in float32.
        router_weight: [E, H] in the checkpoint's dtype.
        router_bias: [E] in the checkpoint's dtype.
        top_k: experts per token.
        activation: what stands between the two GEMMs.
    """

    layer: int
    weights: MoEWeights
    router_weight: torch.Tensor
    router_bias: torch.Tensor
    top_k: int
    activation: Activation


@dataclass(frozen=True)
class _GptOssSizes:
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    limit: float


def load_gpt_oss_layers(
    directory: Path | str,
    layers: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    *,
    mmap: bool = False,
) -> Iterator[LoadedMoELayer]:
    """Read the MoE layers of a gpt-oss checkpoint one at a time, with the stored codes.

    Names, shapes and dtypes of every requested layer are checked against ``config.json`` before
    this function returns. The iterator then reads the tensors of one layer at a time.

    Args:
        directory: checkpoint directory with ``config.json`` and safetensors, sharded or not, or
            the id of a model on the Hugging Face Hub.
        layers: layer indices, in the wanted order; None is all of them.
        device: device of the tensors.
        mmap: as for `load_expert_weights`.

    Returns:
        Iterator of LoadedMoELayer, its weights GateUpOrder.INTERLEAVED.

    Raises:
        ValueError: not a gpt-oss MXFP4 checkpoint, a layer out of range, or a missing, truncated or
            mis-shaped tensor; the message names file and tensor.

    Source:
        The published checkpoints' ``model.safetensors.index.json`` and ``config.json``.

    Example:
        >>> load_gpt_oss_layers("/nowhere")
        Traceback (most recent call last):
        ValueError: load_gpt_oss_layers: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    op = "load_gpt_oss_layers"
    reader = CheckpointReader(directory, op)
    sizes = _gpt_oss_sizes(reader)
    chosen = range(sizes.num_layers) if layers is None else list(layers)
    for layer in chosen:
        require(
            isinstance(layer, int) and 0 <= layer < sizes.num_layers,
            op,
            "layers",
            need=f"layers 0 to {sizes.num_layers - 1}",
            got=repr(layer),
        )
        _check_layer(reader, layer, sizes)

    def read() -> Iterator[LoadedMoELayer]:
        for layer in chosen:
            prefix = f"model.layers.{layer}.mlp"
            order = GateUpOrder.INTERLEAVED
            weights = _read_experts(reader, f"{prefix}.experts", order, device, mmap)
            yield LoadedMoELayer(
                layer,
                weights,
                _read(reader, f"{prefix}.router.weight", device, mmap),
                _read(reader, f"{prefix}.router.bias", device, mmap),
                sizes.top_k,
                SwiGLU(limit=sizes.limit),
            )

    return read()


def load_expert_weights(
    directory: Path | str,
    layers: Iterable[int | str] | None = None,
    device: torch.device | str = "cpu",
    *,
    mmap: bool = False,
) -> Iterator[tuple[str, MoEWeights]]:
    """Read the expert weights of any MXFP4 checkpoint that `mxpert quantize` wrote, or gpt-oss.

    Args:
        directory: checkpoint directory, or the id of a model on the Hugging Face Hub;
            ``config.json`` states the gate/up order.
        layers: full module paths (``model.layers.3.mlp.experts``), or numbers of layers that have
            one experts module; None is every module with quantised experts.
        device: device of the tensors.
        mmap: on a CPU, let the tensors be the file's pages, which are read when they are used:
            faster, but whoever changes the file changes them, or ends this process.

    Returns:
        Iterator of (full module path, MoEWeights). Shapes are checked before this returns.

    Raises:
        ValueError: no such checkpoint or module, a layer number that fits several modules, no
            stated gate/up order, or missing or bad tensors; the message names them. TypeError:
            neither a path nor a number.

    Example:
        >>> load_expert_weights("/nowhere")
        Traceback (most recent call last):
        ValueError: load_expert_weights: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    op = "load_expert_weights"
    reader = CheckpointReader(directory, op)
    config = reader.config()
    order = stored_gate_up_order(config, reader.directory / CONFIG_FILE, op)
    modules = expert_modules_of(reader)
    require(
        bool(modules),
        op,
        str(reader.path),
        got="none",
        need="tensors named *.gate_up_proj_blocks or *.up_proj_blocks",
        remedy="convert the checkpoint with `mxpert quantize`",
    )
    chosen = modules if layers is None else choose_modules(modules, layers, op)
    biased = [
        projection
        for projection in (*PROJECTIONS, "up_proj")
        if config.get("model_type") == "gpt_oss"
        or any(f"{module}.{projection}_bias" in reader.names for module in modules)
    ]
    for module in chosen:
        check_experts(reader, module, biased=biased)
    return ((module, _read_experts(reader, module, order, device, mmap)) for module in chosen)


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
    has_gate = _has_gate(reader, prefix)
    first, second = published_projections(has_gate)
    for projection, rows, columns in (
        (first, intermediate * (2 if has_gate else 1), hidden),
        (second, hidden, intermediate),
    ):
        blocks = (experts, rows, columns // MX_BLOCK_SIZE)
        reader.require(
            f"{prefix}.{projection}_blocks",
            dtypes=["U8"],
            shape=(*blocks, BLOCK_BYTES),
            remedy=_REMEDY,
        )
        reader.require(f"{prefix}.{projection}_scales", dtypes=["U8"], shape=blocks, remedy=_REMEDY)
        if projection in biased or f"{prefix}.{projection}_bias" in reader.names:
            reader.require(
                f"{prefix}.{projection}_bias",
                dtypes=FLOAT_DTYPES,
                shape=(experts, rows),
                remedy=_REMEDY,
            )
    return sizes


def _has_gate(reader: CheckpointReader, prefix: str) -> bool:
    """Whether a module's tensors are those of experts with a gate; true where they are missing."""
    return f"{prefix}.up_proj_blocks" not in reader.names


def save_gpt_oss_layer_tensors(
    layer: int,
    weights: MoEWeights,
    router_weight: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Name and shape one layer's tensors as gpt-oss publishes them; the inverse of loading.

    Args:
        layer: decoder layer index.
        weights: expert weights in any gate/up order, ROW_MAJOR; rows (and bias) are interleaved.
        router_weight: [E, H], or None to leave the router out.
        router_bias: [E], or None.
        dtype: dtype of the biases on disk, bfloat16 in published checkpoints.

    Returns:
        Tensors for ``safetensors.torch.save_file``, contiguous, on the device of `weights`.

    Raises:
        TypeError, ValueError: weights in a backend's layout, or a router that does not fit.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> weights = MoEWeights(quantize_blocks(torch.ones(2, 64, 64), "mxfp4"),
        ...                      quantize_blocks(torch.ones(2, 64, 32), "mxfp4"),
        ...                      gate_up_order=GateUpOrder.CONCATENATED)
        >>> tensors = save_gpt_oss_layer_tensors(3, weights)
        >>> list(tensors)[0], tensors["model.layers.3.mlp.experts.down_proj_blocks"].shape
        ('model.layers.3.mlp.experts.gate_up_proj_blocks', torch.Size([2, 64, 1, 16]))
    """
    op = "save_gpt_oss_layer_tensors"
    prefix = f"model.layers.{layer}.mlp"
    tensors = {
        f"{prefix}.experts.{name}": tensor
        for name, tensor in published_expert_tensors(weights, dtype=dtype, op=op).items()
    }
    for name, router, shape in (
        ("weight", router_weight, (weights.num_experts, weights.hidden_size)),
        ("bias", router_bias, (weights.num_experts,)),
    ):
        if router is not None:
            require_tensor(router, op, f"router_{name}", shape=shape)
            tensors[f"{prefix}.router.{name}"] = router.contiguous()
    return tensors


def _gpt_oss_sizes(reader: CheckpointReader) -> _GptOssSizes:
    """Sizes from a gpt-oss config; a ValueError if it is another model's or not MXFP4."""
    config, op = reader.config(), reader.op
    need = Checks(op)
    where = reader.directory / CONFIG_FILE
    need(
        config.get("model_type") == "gpt_oss",
        f"{where}: model_type",
        '"gpt_oss"',
        config.get("model_type"),
        "other models' quantised experts load with load_expert_weights",
    )
    order = stored_gate_up_order(config, where, op)
    need(
        order is GateUpOrder.INTERLEAVED,
        f"{where}: gate_up_order",
        GateUpOrder.INTERLEAVED,
        order,
        "gpt-oss alternates gate and up rows",
    )
    sizes = _GptOssSizes(
        num_layers=positive_int(config, ["num_hidden_layers"], where, op),
        num_experts=positive_int(config, ["num_local_experts", "num_experts"], where, op),
        hidden_size=positive_int(config, ["hidden_size"], where, op),
        intermediate_size=positive_int(config, ["intermediate_size"], where, op),
        top_k=positive_int(config, ["num_experts_per_tok", "experts_per_token"], where, op),
        limit=_swiglu_limit(config, where, op),
    )
    for name in ("hidden_size", "intermediate_size"):
        need(
            getattr(sizes, name) % MX_BLOCK_SIZE == 0,
            f"{where}: {name}",
            f"a multiple of {MX_BLOCK_SIZE}",
            getattr(sizes, name),
        )
    need(
        sizes.top_k <= sizes.num_experts,
        f"{where}: num_experts_per_tok",
        f"at most {sizes.num_experts} experts",
        sizes.top_k,
    )
    return sizes


def _swiglu_limit(config: dict[str, Any], where: object, op: str) -> float:
    limit = config.get("swiglu_limit", GPT_OSS_LIMIT)
    valid = (
        isinstance(limit, int | float)
        and not isinstance(limit, bool)
        and (0 < limit <= sys.float_info.max or limit == math.inf)
    )
    require(valid, op, f"{where}: swiglu_limit", need="a positive number", got=short(limit))
    return float(limit)


def _check_layer(reader: CheckpointReader, layer: int, sizes: _GptOssSizes) -> None:
    prefix = f"model.layers.{layer}.mlp"
    expected = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    check_experts(reader, f"{prefix}.experts", expected, biased=PROJECTIONS)
    reader.require(
        f"{prefix}.router.weight",
        dtypes=FLOAT_DTYPES,
        shape=(sizes.num_experts, sizes.hidden_size),
        remedy=_REMEDY,
    )
    reader.require(
        f"{prefix}.router.bias", dtypes=FLOAT_DTYPES, shape=(sizes.num_experts,), remedy=_REMEDY
    )


def _read(
    reader: CheckpointReader, name: str, device: torch.device | str, mmap: bool
) -> torch.Tensor:
    """One tensor on `device`; on a CPU in memory of its own unless `mmap`."""
    pages = reader.read(name)
    tensor = pages.to(device)
    return tensor.clone() if tensor is pages and not mmap else tensor


def _read_experts(
    reader: CheckpointReader,
    prefix: str,
    order: GateUpOrder,
    device: torch.device | str,
    mmap: bool,
) -> MoEWeights:
    has_gate = _has_gate(reader, prefix)
    kinds = [
        f"{projection}_{kind}"
        for projection in published_projections(has_gate)
        for kind in ("blocks", "scales", "bias")
    ]
    return expert_weights_from(
        {
            kind: _read(reader, f"{prefix}.{kind}", device, mmap)
            for kind in kinds
            if not kind.endswith("bias") or f"{prefix}.{kind}" in reader.names
        },
        order if has_gate else None,
    )
