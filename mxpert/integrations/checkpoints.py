"""Checkpoints in gpt-oss's published MXFP4 format: read their MoE layers, name tensors for writing.

Per layer the format holds, below ``model.layers.N.mlp.experts``, ``gate_up_proj_blocks`` uint8
[E, 2F, H/32, 16] and ``gate_up_proj_scales`` uint8 [E, 2F, H/32], the same for ``down_proj``
([E, H, F/32, 16]), and biases; gate and up rows alternate, the low nibble is the earlier code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import message, require, require_tensor
from ..formats.spec import MX_BLOCK_SIZE, MXFP4
from ..formats.tensor import Layout, MXTensor
from ..problem import Activation, SwiGLU
from ..weights import GateUpOrder, MoEWeights, gate_up_rows
from .safetensors_files import (
    CONFIG_FILE,
    CheckpointReader,
    layer_number,
    positive_int,
    quantization_method,
)

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0
BLOCK_BYTES = MX_BLOCK_SIZE // MXFP4.codes_per_byte
"""Bytes of one block's codes: the last dimension of ``*_blocks``."""

FLOAT_DTYPES = ("BF16", "F16", "F32")
_REMEDY = "download the file again, or convert the checkpoint with `mxpert quantize`"
_BLOCKS = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.gate_up_proj_blocks$")


@dataclass(frozen=True)
class LoadedMoELayer:
    """One MoE layer of a checkpoint.

    Args:
        layer: index of the decoder layer.
        weights: expert weights as stored, biases in float32.
        router_weight: [E, H] in the checkpoint's dtype.
        router_bias: [E] in the checkpoint's dtype.
        top_k: experts per token.
        activation: what stage 1 applies.
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
    directory: Path | str, layers: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[LoadedMoELayer]:
    """Read MoE layers of a gpt-oss checkpoint, codes as they are, one layer at a time.

    Names, shapes and dtypes of every requested layer are checked against ``config.json`` before
    this returns; the tensors of a layer are read when the iterator comes to it, and no others.

    Args:
        directory: checkpoint directory with ``config.json`` and safetensors, sharded or not.
        layers: layer indices, in the wanted order; None is all of them.
        device: where the tensors shall live.

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
    chosen = list(range(sizes.num_layers)) if layers is None else list(layers)
    for layer in chosen:
        require(0 <= layer < sizes.num_layers, op, "layers",
                need=f"layers 0 to {sizes.num_layers - 1}", got=layer)
        _check_layer(reader, layer, sizes)

    def read() -> Iterator[LoadedMoELayer]:
        for layer in chosen:
            prefix = f"model.layers.{layer}.mlp"
            weights = _read_experts(reader, f"{prefix}.experts", GateUpOrder.INTERLEAVED, device)
            yield LoadedMoELayer(
                layer, weights, reader.read(f"{prefix}.router.weight").to(device),
                reader.read(f"{prefix}.router.bias").to(device), sizes.top_k,
                SwiGLU(GPT_OSS_ALPHA, sizes.limit))

    return read()


def load_expert_weights(
    directory: Path | str, layers: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, MoEWeights]]:
    """Read the expert weights of any MXFP4 checkpoint that `mxpert quantize` wrote, or gpt-oss.

    Args:
        directory: checkpoint directory; ``config.json`` states the gate/up order.
        layers: layer indices; None is every layer with quantised experts.
        device: where the tensors shall live.

    Returns:
        Iterator of (layer index, MoEWeights). Shapes are checked before this returns.

    Raises:
        ValueError: no such checkpoint or layer, no stated gate/up order, or bad tensors.

    Example:
        >>> load_expert_weights("/nowhere")
        Traceback (most recent call last):
        ValueError: load_expert_weights: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    op = "load_expert_weights"
    reader = CheckpointReader(directory, op)
    order = stored_gate_up_order(reader.config(), reader.directory / CONFIG_FILE, op)
    prefixes = {layer_number(prefix): prefix for prefix in expert_prefixes(reader)}
    require(bool(prefixes), op, str(reader.path), got="none",
            need="tensors named *.experts.gate_up_proj_blocks",
            remedy="convert the checkpoint with `mxpert quantize`")
    chosen = sorted(prefixes) if layers is None else list(layers)
    for layer in chosen:
        require(layer in prefixes, op, "layers", need=f"layers among {sorted(prefixes)}", got=layer)
        check_experts(reader, prefixes[layer])
    return ((layer, _read_experts(reader, prefixes[layer], order, device)) for layer in chosen)


def expert_prefixes(reader: CheckpointReader) -> list[str]:
    """Module names (``….experts``) of all layers whose experts are stored in MXFP4, in order."""
    found = [match["experts"] for name in reader.names if (match := _BLOCKS.match(name))]
    return sorted(found, key=lambda prefix: (layer_number(prefix), prefix))


def stored_gate_up_order(config: dict[str, Any], where: object, op: str) -> GateUpOrder:
    """The gate/up order that a quantised checkpoint's config states; gpt-oss's is INTERLEAVED."""
    method = quantization_method(config)
    require(method == "mxfp4", op, f"{where}: quantization_config.quant_method", need='"mxfp4"',
            got=method, remedy="convert the checkpoint with `mxpert quantize`")
    stated = config["quantization_config"].get("mxpert")
    if stated is None and config.get("model_type") == "gpt_oss":
        return GateUpOrder.INTERLEAVED
    name = stated.get("gate_up_order") if isinstance(stated, dict) else None
    known = [order.value for order in GateUpOrder]
    require(name in known, op, f"{where}: quantization_config.mxpert.gate_up_order",
            need=f"one of {known}", got=name, remedy="a wrong order would give wrong answers")
    return GateUpOrder(name)


def check_experts(
    reader: CheckpointReader, prefix: str, sizes: tuple[int, int, int] | None = None,
) -> tuple[int, int, int]:
    """Check one layer's quantised expert tensors by their headers.

    Args:
        reader: the checkpoint.
        prefix: module name, ``….experts``.
        sizes: (E, H, F) that the config states; None takes them from the tensors themselves.

    Returns:
        (E, H, F).
    """
    if sizes is None:
        down = reader.info(f"{prefix}.down_proj_blocks")
        require(len(down.shape) == 4, reader.op, f"{down.file}: {down.name}.shape",
                need=f"[E, H, F/{MX_BLOCK_SIZE}, {BLOCK_BYTES}]", got=list(down.shape))
        sizes = (down.shape[0], down.shape[1], down.shape[2] * MX_BLOCK_SIZE)
    experts, hidden, intermediate = sizes
    for projection, rows, columns in (("gate_up_proj", 2 * intermediate, hidden),
                                      ("down_proj", hidden, intermediate)):
        blocks = (experts, rows, columns // MX_BLOCK_SIZE)
        reader.require(f"{prefix}.{projection}_blocks", dtypes=["U8"],
                       shape=(*blocks, BLOCK_BYTES), remedy=_REMEDY)
        reader.require(f"{prefix}.{projection}_scales", dtypes=["U8"], shape=blocks,
                       remedy=_REMEDY)
        if f"{prefix}.{projection}_bias" in reader.names:
            reader.require(f"{prefix}.{projection}_bias", dtypes=FLOAT_DTYPES,
                           shape=(experts, rows), remedy=_REMEDY)
    return sizes


def save_gpt_oss_layer_tensors(
    layer: int, weights: MoEWeights, router_weight: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16,
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
    if not isinstance(weights, MoEWeights):
        raise TypeError(message(op, "weights", "MoEWeights", type(weights).__name__))
    require(weights.layout is Layout.ROW_MAJOR, op, "weights.layout", need=Layout.ROW_MAJOR,
            got=weights.layout, remedy="save the weights before preparing them")
    prefix = f"model.layers.{layer}.mlp"
    tensors = {f"{prefix}.experts.{name}": tensor
               for name, tensor in published_expert_tensors(weights, dtype=dtype).items()}
    for name, router, shape in (
            ("weight", router_weight, (weights.num_experts, weights.hidden_size)),
            ("bias", router_bias, (weights.num_experts,))):
        if router is not None:
            require_tensor(router, op, f"router_{name}", shape=shape)
            tensors[f"{prefix}.router.{name}"] = router.contiguous()
    return tensors


def published_expert_tensors(
    weights: MoEWeights, *, dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """The tensors of one experts module as gpt-oss publishes them, names below ``experts.``.

    Args:
        weights: ROW_MAJOR, in any gate/up order; rows (and bias) come out interleaved.
        dtype: dtype of the biases.

    Returns:
        ``gate_up_proj_blocks`` uint8 [E, 2F, H/32, 16], ``gate_up_proj_scales`` uint8 [E, 2F,
        H/32], the same for ``down_proj``, and ``*_bias`` where there are biases; contiguous.
    """
    op = "published_expert_tensors"
    if not isinstance(weights, MoEWeights):
        raise TypeError(message(op, "weights", "MoEWeights", type(weights).__name__))
    require(isinstance(dtype, torch.dtype) and dtype.is_floating_point, op, "dtype",
            need="a float dtype", got=repr(dtype), error=TypeError)
    weights = _interleaved(weights)
    tensors: dict[str, torch.Tensor] = {}
    for name, projection, bias in (
            ("gate_up_proj", weights.gate_up_proj, weights.gate_up_bias),
            ("down_proj", weights.down_proj, weights.down_bias)):
        scale = projection.scale.contiguous()
        tensors[f"{name}_blocks"] = projection.qdata.contiguous().view(*scale.shape, BLOCK_BYTES)
        tensors[f"{name}_scales"] = scale
        if bias is not None:
            tensors[f"{name}_bias"] = bias.to(dtype).contiguous()
    return tensors


def expert_weights_from(tensors: Mapping[str, torch.Tensor], order: GateUpOrder) -> MoEWeights:
    """The inverse of `published_expert_tensors`: codes as they are, biases in float32.

    Args:
        tensors: by names below ``experts.``; biases may be absent.
        order: order of gate and up rows as stored; published checkpoints are INTERLEAVED.
    """
    op = "expert_weights_from"
    if not isinstance(tensors, Mapping):
        raise TypeError(message(op, "tensors", "tensors by name", type(tensors).__name__))
    for part in ("blocks", "scales"):
        for name in (f"gate_up_proj_{part}", f"down_proj_{part}"):
            require_tensor(tensors.get(name), op, name, dtype=torch.uint8,
                           shape=(None,) * (4 if part == "blocks" else 3))

    def projection(name: str) -> MXTensor:
        return MXTensor(tensors[f"{name}_blocks"].flatten(-2), tensors[f"{name}_scales"], MXFP4)

    def bias(name: str) -> torch.Tensor | None:
        stored = tensors.get(f"{name}_bias")
        return None if stored is None else stored.to(torch.float32).contiguous()

    return MoEWeights(projection("gate_up_proj"), projection("down_proj"), bias("gate_up_proj"),
                      bias("down_proj"), gate_up_order=order)


def _gpt_oss_sizes(reader: CheckpointReader) -> _GptOssSizes:
    """Sizes from a gpt-oss config; a ValueError where it is another model's or not MXFP4."""
    config, op = reader.config(), reader.op
    where = reader.directory / CONFIG_FILE
    require(config.get("model_type") == "gpt_oss", op, f"{where}: model_type", need='"gpt_oss"',
            got=config.get("model_type"),
            remedy="other models' quantised experts load with load_expert_weights")
    order = stored_gate_up_order(config, where, op)
    require(order is GateUpOrder.INTERLEAVED, op, f"{where}: gate_up_order",
            need=GateUpOrder.INTERLEAVED, got=order, remedy="gpt-oss alternates gate and up rows")
    sizes = _GptOssSizes(
        num_layers=positive_int(config, ["num_hidden_layers"], where, op),
        num_experts=positive_int(config, ["num_local_experts", "num_experts"], where, op),
        hidden_size=positive_int(config, ["hidden_size"], where, op),
        intermediate_size=positive_int(config, ["intermediate_size"], where, op),
        top_k=positive_int(config, ["num_experts_per_tok", "experts_per_token"], where, op),
        limit=_swiglu_limit(config, where, op))
    for name in ("hidden_size", "intermediate_size"):
        require(getattr(sizes, name) % MX_BLOCK_SIZE == 0, op, f"{where}: {name}",
                need=f"a multiple of {MX_BLOCK_SIZE}", got=getattr(sizes, name))
    require(sizes.top_k <= sizes.num_experts, op, f"{where}: num_experts_per_tok",
            need=f"at most {sizes.num_experts} experts", got=sizes.top_k)
    return sizes


def _swiglu_limit(config: dict[str, Any], where: object, op: str) -> float:
    limit = config.get("swiglu_limit", GPT_OSS_LIMIT)
    valid = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
    require(valid, op, f"{where}: swiglu_limit", need="a positive number", got=limit)
    return float(limit)


def _check_layer(reader: CheckpointReader, layer: int, sizes: _GptOssSizes) -> None:
    prefix = f"model.layers.{layer}.mlp"
    check_experts(reader, f"{prefix}.experts",
                  (sizes.num_experts, sizes.hidden_size, sizes.intermediate_size))
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        reader.info(f"{prefix}.experts.{name}")  # gpt-oss always has both
    reader.require(f"{prefix}.router.weight", dtypes=FLOAT_DTYPES,
                   shape=(sizes.num_experts, sizes.hidden_size), remedy=_REMEDY)
    reader.require(f"{prefix}.router.bias", dtypes=FLOAT_DTYPES, shape=(sizes.num_experts,),
                   remedy=_REMEDY)


def _read_experts(
    reader: CheckpointReader, prefix: str, order: GateUpOrder, device: torch.device | str,
) -> MoEWeights:
    kinds = [f"{projection}_{kind}" for projection in ("gate_up_proj", "down_proj")
             for kind in ("blocks", "scales", "bias")]
    return expert_weights_from(
        {kind: reader.read(f"{prefix}.{kind}").to(device) for kind in kinds
         if not kind.endswith("bias") or f"{prefix}.{kind}" in reader.names}, order)


def _interleaved(weights: MoEWeights) -> MoEWeights:
    """The same weights with rows in the order gate, up, gate, up, …"""
    if weights.gate_up_order is GateUpOrder.INTERLEAVED:
        return weights
    assert weights.gate_up_order is not None  # checked by MoEWeights
    gate, up = gate_up_rows(weights.gate_up_order, weights.intermediate_size, weights.device)
    rows = torch.stack((gate, up), dim=1).flatten()
    projection, bias = weights.gate_up_proj, weights.gate_up_bias
    return replace(
        weights,
        gate_up_proj=replace(projection, qdata=projection.qdata[:, rows],
                             scale=projection.scale[:, rows]),
        gate_up_bias=None if bias is None else bias[:, rows].contiguous(),
        gate_up_order=GateUpOrder.INTERLEAVED, fold_certificates=None)
