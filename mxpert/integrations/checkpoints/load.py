"""Checkpoints in gpt-oss's published MXFP4 format: read their MoE layers, name tensors to write.

Per layer the format holds, below ``model.layers.N.mlp.experts``, ``gate_up_proj_blocks`` uint8
[E, 2F, H/32, 16] and ``gate_up_proj_scales`` uint8 [E, 2F, H/32], the same for ``down_proj``
([E, H, F/32, 16]), and biases; gate and up rows alternate, the low nibble is the earlier code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.files import short
from ...core.problem import Activation, SwiGLU
from ...errors import Checks, require, require_tensor
from ...formats.spec import MX_BLOCK_SIZE, MXFP4
from ...formats.weight_rounding import WeightRounding
from ...moe.published_tensors import published_expert_tensors
from ...moe.weights import GateUpOrder, MoEWeights
from ...moe.weights_state import PROJECTIONS
from ..module_paths import choose_modules
from .containers import container_of
from .per_expert import ExpertModule
from .published_experts import (
    FLOAT_DTYPES,
    REMEDY,
    check_experts,
    read_experts,
    read_tensor,
    stored_gate_up_order,
)
from .rounded import check_rounding, rounded
from .safetensors_files import CONFIG_FILE, CheckpointReader, positive_int

GPT_OSS_LIMIT = SwiGLU.limit


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
            weights = read_experts(reader, f"{prefix}.experts", order, device, mmap=mmap)
            yield LoadedMoELayer(
                layer,
                weights,
                read_tensor(reader, f"{prefix}.router.weight", device, mmap),
                read_tensor(reader, f"{prefix}.router.bias", device, mmap),
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
    weight_rounding: WeightRounding | None = None,
) -> Iterator[tuple[str, MoEWeights]]:
    """Read the expert weights of a checkpoint with quantised experts, in any known container.

    The config says which container it is, the names of the tensors confirm it:

    - gpt-oss, and what `mxpert quantize` and converted models write: stacked ``*_blocks`` and
      ``*_scales``;
    - compressed-tensors ``mxfp4-pack-quantized``; Quark OCP MX; DeepSeek-V4 (``expert_dtype``
      "fp4"); MiMo (``store_dtype`` "mxfp4"): one matrix per expert, ``gate_proj``, ``up_proj`` and
      ``down_proj`` or ``w1``, ``w3`` and ``w2``;
    - NVFP4 of ModelOpt and of compressed-tensors (``nvfp4-pack-quantized``): MXFP4, bit for bit,
      in layers that were cast from it; NVFP4 in the others;
    - MXFP8 of MiniMax, ModelOpt and compressed-tensors (``mxfp8-quantized``);
    - INT4 in groups of 32, 64 or 128: compressed-tensors ``pack-quantized``, AWQ and GPTQ.

    Codes and scales are the stored ones; a global scale that divides becomes its float32
    reciprocal. Dense layers and shared experts are not read. One layer is held at a time.

    Args:
        directory: checkpoint directory, or the id of a model on the Hugging Face Hub.
        layers: full module paths (``model.layers.3.mlp.experts``), or numbers of layers that have
            one experts module; None is every module with quantised experts.
        device: device of the tensors.
        mmap: on a CPU, let the tensors be the file's pages, which are read when they are used:
            faster, but whoever changes the file changes them, or ends this process. For stacked
            tensors alone.
        weight_rounding: "e4m3" rounds NVFP4 layers to MXFP8 (`MoEWeights.round_weights`); casts of
            MXFP4 stay exact. None, the default, rounds nothing.

    Returns:
        Iterator of (full module path, MoEWeights). Experts with one matrix each are CONCATENATED.
        Their format is `MoEWeights.weight_format`. Names, dtypes and shapes are checked before
        this returns, content as a layer is read.

    Raises:
        ValueError: no such checkpoint or module, a layer number that fits several modules, no
            stated container or gate/up order, or missing, foreign or bad tensors; the message names
            them.
        UnsupportedError: another format, or a form of one of these that is not served; the
            message names it.
        TypeError: neither a path nor a number.

    Example:
        >>> load_expert_weights("/nowhere")
        Traceback (most recent call last):
        ValueError: load_expert_weights: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    op = "load_expert_weights"
    reader = CheckpointReader(directory, op)
    container, statement = container_of(reader)
    paths = container.paths(reader, statement)
    chosen = paths if layers is None else choose_modules(paths, layers, op)
    modules = container.check(reader, statement, chosen, mmap=mmap)
    check_rounding(weight_rounding, container.weight_format, container.name, op)

    def read(module: ExpertModule) -> MoEWeights:
        return rounded(container.read(reader, module, device, mmap=mmap), weight_rounding)

    # No name outlives a step: else a layer would be held while the next one is read.
    return ((module.path, read(module)) for module in modules)


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
        TypeError, ValueError: weights in a backend's layout or in another format than MXFP4, or a
            router that does not fit.

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
    need, got = MXFP4.name, weights.weight_format
    remedy = "quantise dense weights with mxpert.quantize_weights"
    require(got == need, op, "weights.weight_format", need=need, got=got, remedy=remedy)
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
        remedy=REMEDY,
    )
    reader.require(
        f"{prefix}.router.bias", dtypes=FLOAT_DTYPES, shape=(sizes.num_experts,), remedy=REMEDY
    )
