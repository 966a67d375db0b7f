"""Checkpoints with one quantised matrix per expert, in models of Transformers.

Transformers has no reader for most of these containers, and others are dequantised by it. This
quantiser takes the experts out of the model before its weights are loaded, so that the loader skips
their tensors; the dense rest is loaded as it is. Afterwards it reads one layer of experts after the
other, as `load_expert_weights` does, and prepares it: weights are never dequantised.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config, QuantizationConfigMixin

from ..core.problem import OwnFormat
from ..distributed import ExpertParallel
from ..errors import UnsupportedError, message, require
from ..formats.spec import MXFP4
from ..formats.weight_rounding import WeightRounding
from ..moe.weights import GateUpOrder
from .checkpoint_names import fitting, module_of
from .checkpoints.container_kinds import Container
from .checkpoints.containers import container_of
from .checkpoints.expert_sources import SOURCE_DTYPES
from .checkpoints.per_expert import ExpertModule, other_weights
from .checkpoints.rounded import check_rounding, rounded
from .checkpoints.safetensors_files import CheckpointReader
from .models.convert import check_ranks, forbid_saving, mx_experts
from .models.expert_modules import StoredExperts
from .models.experts import FoundExperts, find_experts
from .models.saved_config import mark_quantized
from .mxfp4_checkpoints import run_as_transformers
from .quantizer_steps import reader_of, skip_on_load, stored_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OP = "from_pretrained"
_METHOD, _FP8_METHOD = "mxpert_container", "mxpert_container_fp8"
_EXPERTS = r"(^|\.)experts\."
"""What the loader may skip without a word: tensors of experts, which this quantiser has checked."""

_NO_VALUES = {"attn_implementation", "dtype", "experts_implementation", "quantization_config"}
"""Entries of a config that ``from_pretrained`` takes itself."""

_FP8_ENTRIES = ("activation_scheme", "weight_block_size", "scale_fmt")
"""Entries of a config that say how layers in FP8 are stored."""


@dataclass(frozen=True)
class ContainerRequest:
    """What one call of ``from_pretrained`` asks for.

    Args:
        activation_format: of the layers. expert_parallel: the ranks that share them.
        weight_rounding: as `load_expert_weights` takes it.
        keep_fp8: as `MoEWeights.prepare` takes it.
    """

    activation_format: OwnFormat
    expert_parallel: ExpertParallel | None = None
    weight_rounding: WeightRounding | None = None
    keep_fp8: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> ContainerRequest:
        return self  # Transformers copies configs; this is no state of a model


@register_quantization_config(_METHOD)
class ContainerConfig(QuantizationConfigMixin):
    """Names the quantiser to Transformers while a model is loaded; it is never saved.

    Args:
        request: of the call.
    """

    def __init__(self, request: ContainerRequest) -> None:
        self.quant_method, self.request = _METHOD, request

    def to_dict(self) -> dict[str, Any]:
        """Its name alone: a config is printed and hashed as JSON."""
        return {"quant_method": self.quant_method}


@register_quantizer(_METHOD)
class ContainerQuantizer(HfQuantizer):
    """Reads quantised experts in every container with one matrix per expert."""

    is_trainable = False
    rest_dtypes: tuple[str, ...] = SOURCE_DTYPES
    """Of the weights of all other layers."""

    def __init__(
        self, quantization_config: ContainerConfig | Fp8ContainerConfig, **kwargs: object
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        self._request = quantization_config.request

    def is_serializable(self) -> bool:
        """No: what is saved afterwards is in MXFP4 or dense, without this quantiser."""
        return False

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: object,
    ) -> PreTrainedModel:
        ranks = self._request.expert_parallel
        self._reader = reader_of(checkpoint_files, _OP)
        self._container, statement = container_of(self._reader)
        check_rounding(
            self._request.weight_rounding, self._container.weight_format, self._container.name, _OP
        )
        paths = self._container.paths(self._reader, statement)
        _refuse_quantized_rest(self._reader, paths, self._container, self.rest_dtypes)
        layers = find_experts(model, _OP)
        stored = _matched(
            model, layers, self._container.check(self._reader, statement, paths), self._container
        )
        dense = [found for found in layers if found.name not in stored]
        if ranks is not None:
            check_ranks(_OP, layers, ranks, self._request.activation_format, None)
            need, got = "a checkpoint with all experts quantised", [each.name for each in dense]
            require(not dense, _OP, "expert_parallel", need=need, got=f"dense {got}")
        for found in dense:
            run_as_transformers(model, found.module)
        skip_on_load(model, _EXPERTS)
        self._stored = stored
        for found in layers:
            if found.name in stored:
                dtype = next(found.module.parameters()).dtype
                order = GateUpOrder.CONCATENATED
                found.replace_by(StoredExperts(found, order, dtype, ranks, has_tensors=False))
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        self.remove_quantization_config(model)
        ranks = self._request.expert_parallel
        stored = stored_experts(model)
        for experts in stored:
            found = experts.source
            device = _device_of(found) if ranks is None else ranks.device
            weights = self._container.read(
                self._reader,
                self._stored[found.name],
                device,
                experts=None if ranks is None else ranks.local_experts,
            )
            weights = rounded(weights, self._request.weight_rounding)
            prepared = experts.prepared(
                self._request.activation_format, weights, keep_fp8=self._request.keep_fp8
            )
            del weights  # else two layers would be held
            found.replace_by(prepared.eval())
        other = sorted({each.weights.weight_format for each in mx_experts(model)} - {MXFP4.name})
        if ranks is not None or other:
            forbid_saving(model, None if ranks is not None else " and ".join(other))
        if not other:  # whose config says MXFP4
            mark_quantized(model, [experts.source for experts in stored], None)
        return model


@register_quantization_config(_FP8_METHOD)
class Fp8ContainerConfig(FineGrainedFP8Config):
    """The same for checkpoints whose other layers are FP8, which are dequantised as they load.

    Args:
        request: of the call. entry: the checkpoint's ``quantization_config``.
    """

    def __init__(self, request: ContainerRequest, entry: Mapping[str, Any]) -> None:
        stated = {name: entry[name] for name in _FP8_ENTRIES if entry.get(name) is not None}
        super().__init__(dequantize=True, **stated)
        self.quant_method, self.request = _FP8_METHOD, request

    def to_dict(self) -> dict[str, Any]:
        """Its name alone: a config is printed and hashed as JSON."""
        return {"quant_method": self.quant_method}


@register_quantizer(_FP8_METHOD)
class Fp8ContainerQuantizer(ContainerQuantizer, FineGrainedFP8HfQuantizer):
    """Reads the experts of such a checkpoint; Transformers dequantises the other layers.

    Layers in the model's dtype need neither a GPU nor a package with FP8 kernels.
    """

    rest_dtypes = (*SOURCE_DTYPES, "F8_E4M3")

    def __init__(self, quantization_config: Fp8ContainerConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs | {"pre_quantized": True})

    def __deepcopy__(self, memo: dict[int, object]) -> Fp8ContainerQuantizer:
        return self  # Transformers copies conversions, which hold their quantiser

    def validate_environment(self, *args: object, **kwargs: object) -> None:
        """Nothing is needed: no layer stays in FP8."""

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: object,
    ) -> PreTrainedModel:
        model = ContainerQuantizer._process_model_before_weight_loading(
            self, model, checkpoint_files, **kwargs
        )
        kept = model._get_dtype_plan(model.dtype)  # what stays in float32 whatever is asked for
        self._dtypes = {
            name: next((kept[key] for key in kept if key in name), each.dtype)
            for name, each in model.named_parameters()
        }
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        # Transformers leaves dequantised layers in the dtype of their scales, or others in that of
        # the checkpoint; which of the two depends on its release.
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self._dtypes.get(name, parameter.dtype))
        # They would be applied in reverse to what is saved, which would be FP8 again.
        vars(model).pop("_weight_conversions", None)
        return ContainerQuantizer._process_model_after_weight_loading(self, model, **kwargs)


def unquantized_config(
    model_class: type[PreTrainedModel],
    place: object,
    options: dict[str, Any],
    hub: Mapping[str, Any],
) -> PreTrainedConfig:
    """The config that a call of ``from_pretrained`` loads, without what it says of quantisation.

    Args:
        model_class: whose method is called. place: the checkpoint.
        options: arguments of the call. Entries that replace values of the config are taken out.
        hub: the options for the Hub among them.
    """
    config = options.get("config")
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        config = model_class.config_class.from_pretrained(config or place, **hub)
        for name in set(config.to_dict()).intersection(options) - _NO_VALUES:
            setattr(config, name, options.pop(name))
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            vars(part).pop("quantization_config", None)
    return config


def _refuse_quantized_rest(
    reader: CheckpointReader, paths: Sequence[str], container: Container, dtypes: Sequence[str]
) -> None:
    """Refuse a checkpoint with other layers of other dtypes: nothing here would read them."""
    for info in other_weights(reader, paths, dtypes):
        need = f"dense layers in {' or '.join(dtypes)} beside the experts"
        got = f"{info.dtype} in a checkpoint of {container.name}"
        remedy = "mxpert.load_expert_weights reads its experts, vLLM serves it whole"
        raise UnsupportedError(message(_OP, info.name, need, got, remedy))


def _matched(
    model: PreTrainedModel,
    layers: list[FoundExperts],
    modules: list[ExpertModule],
    container: Container,
) -> dict[str, ExpertModule]:
    """The checkpoint's module of each of the model's layers, by the layer's name.

    Modules that the model does not have, such as those of multi-token prediction, are left out.

    Raises:
        ValueError: a layer that fits several modules, or has other sizes.
    """
    places = {module_of(model, f"{module.path}.down_proj"): module for module in modules}
    matched = {}
    for found in layers:
        fits = [places[place] for place in fitting(places, found.name)]
        if not fits:
            continue
        need, got = "one module of this name in the checkpoint", [each.path for each in fits]
        require(len(fits) == 1, _OP, found.name, need=need, got=got)
        (module,) = fits
        have = module.num_experts, module.hidden_size, module.intermediate_size
        want = found.num_experts, found.hidden_size, found.intermediate_size
        require(
            have == want, _OP, f"{module.path}: E, H, F", need=f"{want}, as the model", got=have
        )
        gates = [each.order is not None for each in (found, module)]
        require(gates[0] == gates[1], _OP, module.path, need=f"a gate: {gates[0]}", got=gates[1])
        parts = {part for stage in module.stages for part in stage} if found.has_bias else set()
        got = sorted(module.biased)
        require(
            module.biased == parts, _OP, module.path, need=f"biases of {sorted(parts)}", got=got
        )
        matched[found.name] = module
    require(
        bool(matched),
        _OP,
        type(model).__name__,
        need=f"a layer of the model among the checkpoint's ({container.name})",
        got=[module.path for module in modules[:3]],
    )
    return matched


def _device_of(found: FoundExperts) -> torch.device:
    """The device of the block that holds a layer's experts, which has a router of its own."""
    parent, _ = found.places[0]
    tensors = (*parent.parameters(), *parent.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    require(
        device.type != "meta",
        _OP,
        found.name,
        need="a layer on a device that holds data",
        got="an offloaded one",
        remedy="load the model without offloading",
    )
    return device
