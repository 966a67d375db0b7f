"""convert and restore: a model in memory with its experts in MXFP4, and back to dense weights."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..errors import UnsupportedError, message, require, require_device
from ..formats.spec import MX_BLOCK_SIZE, MXFP4, ScaleRule
from ..formats.tensor import MXTensor
from ..ops.quantize import quantize
from ..problem import activation_mx_format
from ..training.recipe import MXFP8Recipe
from ..weights import MoEWeights
from .expert_modules import MXExperts, TrainableExperts, empty
from .experts import PROJECTIONS, FoundExperts, check_loaded, find_experts
from .saved_config import mark_quantized, unmark_quantized

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Weights quantised at a time: temporaries that stay in a CPU's cache; few launches on a GPU."""


def convert(
    model: Any, activation_format: str = "bf16", *, device: torch.device | str | None = None,
    scale_rule: ScaleRule = ScaleRule.RCEIL, recipe: MXFP8Recipe | None = None,
    progress: bool = True,
) -> Any:
    """Put mxpert under a Transformers model: its experts in MXFP4, or trained in MXFP8.

    Every experts module (gpt-oss, Qwen3-MoE, Mixtral, DeepSeek-V3 and others of transformers 5)
    is replaced in place. All layers are checked first; then each is quantised as by
    ``quantize(w, "mxfp4", axis=-1)``, prepared for its device, and its dense weights are freed
    before the next one: at most one layer is held twice. Weights that came from MXFP4 are
    recovered exactly. Saving the model writes blocks and scales as gpt-oss publishes them.

    Args:
        model: a model in memory. One that is converted already only changes its
            `activation_format`; one that was trained with a recipe is converted as it stands.
        activation_format: "bf16" (a16w4), "mxfp8" (a8w4), "mxfp4" (a4w4) or "fp8_token"; see
            fused_moe.
        device: where the whole model shall run; its experts go there layer by layer, quantised.
            None leaves each layer where it is, so that layers may lie on different devices.
        scale_rule: rule for the scales of the weights.
        recipe: train in MXFP8 instead: parameters stay as they are, the three GEMMs of each
            expert are mxpert.training.grouped_linear with this recipe.
        progress: show a progress bar on standard error.

    Returns:
        `model`, in evaluation or training mode as before.

    Raises:
        ValueError: no experts, sizes that are no multiples of 32, weights that are not there or
            not finite. TypeError: wrong types. UnsupportedError: an activation or tensors that
            mxpert does not know, or a model quantised by another library. In every case the model
            is as it was.

    Example:
        >>> import torch, transformers, mxpert
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = transformers.MixtralForCausalLM(config).eval()
        >>> model = mxpert.convert(model, "mxfp8", progress=False)
        >>> with torch.no_grad():
        ...     model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    op = "convert"
    _check_arguments(model, activation_format, scale_rule, recipe)
    target = None if device is None else require_device(device, op)
    converted = mx_experts(model)
    if converted and recipe is None:
        for module in converted:
            module.activation_format = activation_format
        return model if target is None else model.to(target)
    found = _trained(model) or find_experts(model, op)
    check_loaded(found, op)
    if recipe is not None:
        for experts in found:
            experts.replace_by(TrainableExperts(experts, recipe).train(experts.module.training))
        return model if target is None else model.to(target)
    for experts in track(found, "quantising experts", console=Console(stderr=True),
                         transient=True, disable=not progress):
        _convert_layer(experts, activation_format, scale_rule, target)
    mark_quantized(model, found, scale_rule)
    return model if target is None else model.to(target)


def restore(model: Any) -> Any:
    """Undo `convert`: put dense experts back, with the values that MXFP4 (or training) left.

    Dequantised values are exact in bfloat16. The restored model needs no mxpert: Transformers
    runs, saves and loads it like any other.

    Args:
        model: a model that `convert` returned.

    Returns:
        `model`.

    Raises:
        ValueError: nothing in it is converted.

    Example:
        >>> import torch, transformers, mxpert
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = transformers.MixtralForCausalLM(config).eval()
        >>> restored = restore(mxpert.convert(model, progress=False))
        >>> restored.model.layers[0].mlp.experts.gate_up_proj.shape
        torch.Size([4, 64, 64])
    """
    trained, converted = _trained(model), mx_experts(model)
    require(bool(trained or converted), "restore", type(model).__name__, need="a converted model",
            got="no experts of mxpert", remedy="call mxpert.convert(model) first")
    for experts in converted:
        for name, parameter in experts.restored().items():
            experts.source.module.register_parameter(name, parameter)
        _hang_back(experts.source, experts.training)
    for found in trained:
        _hang_back(found, getattr(found.parent, found.attribute).training)
    if converted:
        unmark_quantized(model)
    if str(getattr(getattr(model, "config", None), "_experts_implementation", "")).startswith(
            "mxpert"):
        model.set_experts_implementation(None)  # Transformers' default
    return model


def mx_experts(model: torch.nn.Module) -> list[MXExperts]:
    """The MXFP4 experts of a converted model, in its order.

    Example:
        >>> mx_experts(torch.nn.Linear(2, 2))
        []
    """
    return [module for module in model.modules() if isinstance(module, MXExperts)]


def quantize_experts(weight: torch.Tensor, *, transposed: bool, scale_rule: ScaleRule,
                     device: torch.device) -> MXTensor:
    """Quantise stacked weights along their reduction, a part at a time.

    Args:
        weight: [E, N, K], or [E, K, N] if `transposed`.
        device: where to quantise and leave the result.

    Returns:
        MXFP4 [E, N, K].
    """
    rows = weight.detach().transpose(1, 2) if transposed else weight.detach()
    experts, count, columns = rows.shape
    qdata = torch.empty(experts, count, columns // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(experts, count, columns // MX_BLOCK_SIZE, dtype=torch.uint8, device=device)
    limit = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    step = max(1, limit // columns)
    for expert in range(experts):
        for start in range(0, count, step):
            part = rows[expert, start:start + step].to(device).contiguous()
            quantized = quantize(part, MXFP4, scale_rule=scale_rule)
            qdata[expert, start:start + step] = quantized.qdata
            scale[expert, start:start + step] = quantized.scale
    return MXTensor(qdata, scale, MXFP4)


def _check_arguments(model: Any, activation_format: str, scale_rule: ScaleRule,
                     recipe: MXFP8Recipe | None) -> None:
    op = "convert"
    activation_mx_format(activation_format, op)
    for name, value, kind in (("model", model, torch.nn.Module),
                              ("scale_rule", scale_rule, ScaleRule)):
        require(isinstance(value, kind), op, name, need=f"a {kind.__name__}", got=repr(value),
                error=TypeError)
    require(recipe is None or isinstance(recipe, MXFP8Recipe), op, "recipe",
            need="an MXFP8Recipe", got=repr(recipe), error=TypeError)
    stated = getattr(getattr(model, "config", None), "quantization_config", None)
    if stated is not None and not mx_experts(model):
        raise UnsupportedError(message(op, "model.config.quantization_config", "none",
                                       type(stated).__name__,
                                       "load the model dequantised, in bfloat16"))


def _convert_layer(found: FoundExperts, activation_format: str, scale_rule: ScaleRule,
                   device: torch.device | None) -> None:
    module: Any = found.module
    target = module.down_proj.device if device is None else device
    dtype = module.down_proj.dtype
    projections: dict[str, Any] = {}
    for name in PROJECTIONS:
        projections[name] = quantize_experts(
            getattr(module, name), transposed=found.transposed, scale_rule=scale_rule,
            device=target)
        del module._parameters[name]
    if found.has_bias:
        for name in ("gate_up", "down"):
            bias = getattr(module, f"{name}_proj_bias").detach()
            projections[f"{name}_bias"] = bias.to(target, torch.float32).contiguous()
    empty(found)
    weights = MoEWeights(**projections, gate_up_order=found.order)
    experts = MXExperts(weights.prepare(device=target), found.activation, source=found,
                        activation_format=activation_format, dtype=dtype)
    found.replace_by(experts.train(module.training))


def _trained(model: torch.nn.Module) -> list[FoundExperts]:
    """What TrainableExperts replaced, with the parameters that they hold now."""
    found = []
    for module in model.modules():
        if isinstance(module, TrainableExperts):
            for name, parameter in module.named_parameters():
                module.source.module.register_parameter(name, parameter)
            found.append(module.source)
    return found


def _hang_back(found: FoundExperts, training: bool) -> None:
    found.replace_by(found.module.train(training))
