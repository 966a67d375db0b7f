"""convert and restore: a model in memory with its experts in MXFP4, and back to dense weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ...core.problem import ActivationFormat, OwnFormat, parse_activation_format
from ...distributed import ExpertParallel
from ...errors import UnsupportedError, message, require, require_device
from ...formats.spec import MX_BLOCK_SIZE, MXFP4, MXFormat, ScaleRule, ScaleRuleLike
from ...formats.weight_tensor import AnyWeightFormat, WeightFormatName, parse_weight_format
from ...moe.prepared_weights import check_keep_fp8
from ...moe.stacked import quantize_experts, quantize_stacked
from ...moe.weights import MoEWeights
from ...moe.weights_state import BIASES, PROJECTIONS
from ...training.expert_parallel import check_expert_parallel
from ...training.recipe import MXFP8Recipe
from .expert_modules import MXExperts, TrainableExperts, empty
from .experts import FoundExperts, check_loaded, find_experts, is_experts, stays_dense
from .implementations import IMPLEMENTATIONS
from .saved_config import configured_models, mark_quantized, unmark_quantized

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=torch.nn.Module)


def convert(
    model: _Model,
    activation_format: ActivationFormat = "bf16",
    *,
    device: torch.device | str | None = None,
    scale_rule: ScaleRuleLike | None = None,
    weight_format: WeightFormatName | None = None,
    recipe: MXFP8Recipe | None = None,
    expert_parallel: ExpertParallel | None = None,
    keep_fp8: bool = False,
    progress: bool = True,
) -> _Model:
    """Put mxpert under a Transformers model: its experts in MXFP4, or trained in MXFP8.

    Every experts module (gpt-oss, Qwen3-MoE, Mixtral, DeepSeek-V3 and others of transformers 5)
    is replaced in place, a shared one once. All layers are checked before the first one changes.
    The model's config, where another model has the same object, is replaced by a copy.
    Then each layer is quantised as by ``quantize(w, "mxfp4", axis=-1)`` and prepared for its
    device, and its dense weights are freed before the next layer: at most one layer is held twice.
    Weights that came from MXFP4 are recovered exactly. Saving the model writes blocks and scales as
    gpt-oss publishes them.

    With `expert_parallel` each rank keeps its own experts; the others are freed and never prepared.
    All ranks call the model equally often: give ``generate`` the same prompts on every rank, or
    ``synced_gpus=True``, which lets ranks that have ended wait. The state dict has local experts;
    `restore` and ``save_pretrained`` are refused. ``from_pretrained`` takes `expert_parallel` too,
    beside ``experts_implementation="mxpert"``, and reads the local experts of a checkpoint alone.

    Args:
        model: a model in memory, or a module that contains one. A model in MXFP4 only changes its
            `activation_format`; a model that was trained with a recipe is converted as it stands.
        activation_format: a name as `mxpert.fused_moe` takes it, such as "bf16" or "a8w4".
        device: where the whole model shall run; its experts go there layer by layer, quantised.
            None leaves each layer on its device.
        scale_rule: rule for the scales of weights in MXFP4 and MXFP8, or its name; None is RCEIL.
        weight_format: "mxfp8", "nvfp4", "int4_g32", "int4_g64" or "int4_g128" instead of MXFP4,
            which None is. ``save_pretrained`` is refused then: `mxpert quantize --to` and
            `save_quantized` write these formats.
        recipe: train in MXFP8 instead. Parameters stay as they are, and the three GEMMs of each
            expert are mxpert.training.grouped_linear with this recipe.
        expert_parallel: a mxpert.distributed.ExpertParallel with the model's sizes. With a recipe
            parameters are copies of this rank's experts; see mxpert.training.MXMoE.
        keep_fp8: keep an e4m3 copy of MXFP4 weights, as `mxpert.MoEWeights.prepare` takes it; also
            for a model in MXFP4. Name the `device` of a model that is not there yet. Saving writes
            no copies.
        progress: show a progress bar on standard error.

    Returns:
        `model`, in evaluation or training mode as before.

    Raises:
        ValueError: no experts, sizes that are not multiples of 32 or not those of
            `expert_parallel`, weights that are not loaded or not finite; options for dense weights
            where the model is in MXFP4 already; `keep_fp8` with a recipe, bfloat16 activations, or
            a device or weights without such a copy.
        TypeError: wrong types.
        UnsupportedError: an activation or tensors that mxpert does not know, or a model quantised
            by another library. In every case the model is unchanged. Where memory ends in
            between, or a later layer can have no copy, layers are converted or unchanged; call
            `convert` again for the others.

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
    activation_format = parse_activation_format(activation_format, op)
    rule = None if scale_rule is None else ScaleRule.parse(scale_rule, op, "scale_rule")
    format = MXFP4 if weight_format is None else parse_weight_format(weight_format, op)
    held = None if weight_format is None else format.name
    check_keep_fp8(keep_fp8, activation_format, op)
    need, remedy = "False with a recipe", "training keeps the parameters as they are"
    require(recipe is None or not keep_fp8, op, "keep_fp8", need=need, got=True, remedy=remedy)
    _check_arguments(model, rule, recipe, expert_parallel, held)
    target = None if device is None else _data_device(device, op)
    if recipe is not None:
        for dense in _dense_experts(model, activation_format, recipe, expert_parallel):
            dense.replace_by(TrainableExperts(dense, recipe, expert_parallel))
    else:
        is_mx = isinstance(format, MXFormat)
        need, got = f"None for {format.name}", rule and rule.value
        remedy = "rules are for scales that are powers of two, in mxfp4 and mxfp8"
        require(is_mx or rule is None, op, "scale_rule", need=need, got=got, remedy=remedy)
        rule = ScaleRule.RCEIL if rule is None else rule
        how = _Quantised(format, rule, activation_format, keep_fp8)
        _convert_layers(model, how, target, expert_parallel, progress)
    if expert_parallel is not None:
        forbid_saving(model)
    return model if target is None else model.to(device=target)


def _data_device(device: torch.device | str, op: str) -> torch.device:
    """A device of this machine that holds data."""
    target = require_device(device, op)
    remedy = "name the device that shall run the model"
    need = "a device that holds data"
    require(target.type != "meta", op, "device", need=need, got=repr(str(target)), remedy=remedy)
    return target


@dataclass(frozen=True)
class _Quantised:
    """What layers become: format and scale rule of weights, format of activations, FP8 copies."""

    format: AnyWeightFormat
    scale_rule: ScaleRule
    activation_format: OwnFormat
    keep_fp8: bool


def _convert_layers(
    model: torch.nn.Module,
    how: _Quantised,
    device: torch.device | None,
    ranks: ExpertParallel | None,
    progress: bool,
) -> None:
    """Quantise all experts that are not quantised yet, and bring all layers into the format."""
    converted = mx_experts(model)
    if not converted or _has_dense_experts(model):
        found = _dense_experts(model, how.activation_format, None, ranks)
        _check_groups(found, how.format)
        done = [module.source for module in converted]
        try:
            for dense in with_progress(found, progress=progress):
                _convert_layer(dense, how, device, ranks)
                done.append(dense)
        finally:  # where memory ends in between, the model can be saved, and converted to its end
            if how.format == MXFP4:
                mark_quantized(model, done, how.scale_rule)
            elif done:
                forbid_saving(model, how.format.name)
    for module in converted:
        if how.keep_fp8:
            module.keep_fp8(device)
        module.activation_format = how.activation_format


def _check_groups(found: list[FoundExperts], format: AnyWeightFormat) -> None:
    """Raise ValueError for layers that are no whole groups of INT4."""
    group = MX_BLOCK_SIZE if isinstance(format, MXFormat) else format.group_size
    for experts in found:
        got = [experts.hidden_size, experts.intermediate_size]
        need = f"H and F in multiples of {group}, the group of {format.name}"
        fits = all(size % group == 0 for size in got)
        require(fits, "convert", experts.name, need=need, got=got, remedy="take smaller groups")


def with_progress(layers: Sequence[_T], *, progress: bool) -> Iterable[_T]:
    """The layers, with a progress bar on standard error if it is wanted."""
    if not progress:
        return layers
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(layers, "quantising experts", console=console, transient=True)


def _dense_experts(
    model: torch.nn.Module,
    activation_format: str,
    recipe: MXFP8Recipe | None,
    ranks: ExpertParallel | None,
) -> list[FoundExperts]:
    """Find and check the experts of a model; those that were trained with a recipe are put back."""
    op = "convert"
    trained = [module for module in model.modules() if isinstance(module, TrainableExperts)]
    _refuse_local_experts(trained, op)
    found = [experts.source for experts in trained]
    if not trained or _has_dense_experts(model):
        found += [dense for dense in find_experts(model, op) if not stays_dense(dense.module)]
    check_loaded(found, op)
    if ranks is not None:
        check_ranks(op, found, ranks, activation_format, recipe)
    for experts in trained:
        experts.give_back()
    return found


def _has_dense_experts(model: torch.nn.Module) -> bool:
    """Whether there are experts left to convert."""
    return any(is_experts(module) and not stays_dense(module) for module in model.modules())


def restore(model: _Model) -> _Model:
    """Undo `convert`: put dense experts back, with the values they have now.

    Dequantised values of MXFP4 are exact in bfloat16, others are rounded to the model's dtype. The
    restored model needs no mxpert: Transformers runs, saves and loads it like any other.

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
    trained = [module for module in model.modules() if isinstance(module, TrainableExperts)]
    converted = mx_experts(model)
    require(
        bool(trained or converted),
        "restore",
        type(model).__name__,
        need="a converted model",
        got="no experts of mxpert",
        remedy="call mxpert.convert(model) first",
    )
    _refuse_local_experts([*trained, *converted], "restore")
    for experts in converted:
        module = experts.source.module
        for name, parameter in experts.restored().items():
            module.register_parameter(name, parameter)
        experts.source.replace_by(module.train(experts.training))
    for trainable in trained:
        trainable.give_back()
    if converted:
        unmark_quantized(model)
    for module in model.modules():
        vars(module).pop("dense_implementation", None)
    for holder in configured_models(model):
        if getattr(holder.config, "_experts_implementation", None) in IMPLEMENTATIONS:
            default = holder.get_correct_experts_implementation(None)
            holder.config._experts_implementation = default
    return model


def mx_experts(model: torch.nn.Module) -> list[MXExperts]:
    """The MXFP4 experts of a converted model, in its order.

    Example:
        >>> mx_experts(torch.nn.Linear(2, 2))
        []
    """
    return [module for module in model.modules() if isinstance(module, MXExperts)]


def _check_arguments(
    model: object,
    scale_rule: ScaleRule | None,
    recipe: MXFP8Recipe | None,
    ranks: ExpertParallel | None,
    weight_format: str | None,
) -> None:
    op = "convert"
    need, remedy = "None with a recipe", "training keeps the parameters as they are"
    fits = recipe is None or weight_format is None
    require(fits, op, "weight_format", need=need, got=weight_format, remedy=remedy)
    if not isinstance(model, torch.nn.Module):
        remedy = "load it first: AutoModelForCausalLM.from_pretrained(…)"
        if isinstance(model, str):
            remedy += ', which with experts_implementation="mxpert" reads its experts as MXFP4'
        got = repr(model) if isinstance(model, str) else type(model).__name__
        raise TypeError(message(op, "model", "a Module, a model in memory", got, remedy))
    for name, value, fits, need in (
        ("recipe", recipe, isinstance(recipe, MXFP8Recipe | None), "an MXFP8Recipe"),
        ("expert_parallel", ranks, isinstance(ranks, ExpertParallel | None), "an ExpertParallel"),
    ):
        require(fits, op, name, need=need, got=repr(value), error=TypeError)
    if converted := mx_experts(model):
        own = converted[0].weights.weight_format
        shown = "MXFP4" if own == MXFP4.name else own
        need, got = "a model with dense experts", f"one that is in {shown} already"
        remedy = "call mxpert.integrations.models.convert.restore(model) first"
        options: dict[str, object] = {"recipe": recipe, "scale_rule": scale_rule}
        options |= {"expert_parallel": ranks, "weight_format": weight_format}
        if _has_dense_experts(model):  # an earlier call ended in between
            options = {"recipe": recipe}
            asked = weight_format or MXFP4.name
            need_format = f"{own}, as the call before"
            require(own == asked, op, "weight_format", need=need_format, got=asked, remedy=remedy)
            other = [each for each in converted if each.expert_parallel is not ranks]
            got = f"{len(other)} layers that were converted with another one, or without"
            need = "the one of the call before"
            require(not other, op, "expert_parallel", need=need, got=got, remedy=remedy)
        for name, given in options.items():
            require(given is None, op, name, need=need, got=got, remedy=remedy)
        return
    for holder in configured_models(model):
        stated = getattr(holder.config, "quantization_config", None)
        if stated is not None:
            place, got = "model.config.quantization_config", type(stated).__name__
            remedy = "load the model dequantised, in bfloat16"
            raise UnsupportedError(message(op, place, "none", got, remedy))


def check_ranks(
    op: str,
    found: list[FoundExperts],
    ranks: ExpertParallel,
    activation_format: str,
    recipe: MXFP8Recipe | None,
) -> None:
    """Check an ExpertParallel against every layer."""
    if recipe is None:
        require(
            ranks.wire_format == "bf16" or activation_format == "mxfp8",
            op,
            "activation_format",
            need='"mxfp8" with an ExpertParallel of wire_format="mxfp8"',
            got=repr(activation_format),
        )
    given = ranks.placement.num_experts, ranks.hidden_size
    for experts in found:
        num_experts, hidden_size = experts.num_experts, experts.hidden_size
        if recipe is not None:
            check_expert_parallel(op, ranks, (num_experts, ranks.top_k, hidden_size), recipe)
            continue
        require(
            given == (num_experts, hidden_size),
            op,
            "expert_parallel",
            need=f"num_experts={num_experts} and hidden_size={hidden_size}, as {experts.name} has",
            got="num_experts={} and hidden_size={}".format(*given),
        )


def forbid_saving(model: torch.nn.Module, other_format: str | None = None) -> None:
    """Make ``save_pretrained`` raise, until `restore`.

    A checkpoint has all experts, and each rank has some. With `other_format`, the name of a format
    of weights: what is written has experts in MXFP4.
    """
    need, got = "a model with all of them", "the local experts of one rank"
    remedy = (
        "save the model before it is converted with expert_parallel, or "
        "mxpert.training.full_state_dict"
    )
    if other_format is not None:
        need, got = "experts in MXFP4", other_format
        remedy = (
            "keep the checkpoint that they came from, or make them dense with "
            "mxpert.integrations.models.convert.restore(model)"
        )
    text = message("save_pretrained", "experts", need, got, remedy)
    for holder in configured_models(model):
        holder.save_pretrained = partial(_refuse_to_save, text)


def _refuse_to_save(text: str, *arguments: object, **options: object) -> None:
    raise UnsupportedError(text)


def _refuse_local_experts(modules: Sequence[MXExperts | TrainableExperts], op: str) -> None:
    """Refuse modules that hold a part of their layer's experts."""
    for module in modules:
        if module.expert_parallel is not None:
            raise UnsupportedError(
                message(
                    op,
                    module.source.name,
                    "all experts of the layer",
                    f"{len(module.expert_parallel.local_experts)} of {module.source.num_experts}",
                    "load the model again, or the state of mxpert.training.full_state_dict, "
                    "without expert_parallel",
                )
            )


def _convert_layer(
    found: FoundExperts, how: _Quantised, device: torch.device | None, ranks: ExpertParallel | None
) -> None:
    """Replace one layer's experts; an error in between leaves them as they are."""
    module: Any = found.module  # experts modules of Transformers have no common class
    local = None if ranks is None else ranks.local_experts
    target = module.down_proj.device if device is None else device
    projections: dict[str, Any] = {}
    for name, own in zip(PROJECTIONS, found.projections, strict=True):
        weight, transposed = getattr(module, own), found.transposed
        if isinstance(how.format, MXFormat):
            projections[name] = quantize_stacked(
                weight,
                transposed=transposed,
                scale_rule=how.scale_rule,
                device=target,
                experts=local,
                format=how.format,
            )
        else:
            projections[name] = quantize_experts(
                weight, how.format, target, transposed=transposed, experts=local
            )
    if found.has_bias:
        for name, own in zip(BIASES, found.projections, strict=True):
            bias = getattr(module, f"{own}_bias").detach()
            bias = bias if local is None else bias[list(local)]
            projections[name] = bias.to(target, torch.float32).contiguous()
    weights = MoEWeights(**projections, gate_up_order=found.order)
    experts = MXExperts(
        weights.prepare(device=target, keep_fp8=how.keep_fp8),
        found.activation,
        source=found,
        activation_format=how.activation_format,
        dtype=module.down_proj.dtype,
        expert_parallel=ranks,
        frozen=frozenset(n for n, value in module.named_parameters() if not value.requires_grad),
    )
    found.replace_by(experts.train(module.training))
    empty(module)
