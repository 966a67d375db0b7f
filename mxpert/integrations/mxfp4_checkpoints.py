"""MXFP4 checkpoints: experts go from stored blocks and scales to prepared weights.

Transformers lets a quantiser change a model before its weights are loaded. This one puts buffers
in the published shapes in the place of the experts, so that the loader fills them. `finish` then
prepares one layer after the other. With an ExpertParallel there are no such buffers: each rank
reads the rows of its own experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..core.problem import OwnFormat
from ..distributed import ExpertParallel
from ..errors import UnsupportedError, message, require
from ..formats.spec import ScaleRule
from ..moe.published_tensors import expert_weights_from, published_shapes
from ..moe.weights import GateUpOrder, MoEWeights
from .checkpoint_names import fitting, module_of
from .checkpoints.published_experts import check_experts, expert_modules_of
from .checkpoints.safetensors_files import CheckpointReader
from .models.convert import check_ranks, forbid_saving
from .models.expert_modules import StoredExperts
from .models.experts import find_experts
from .models.mxfp4_config import Mxfp4Config
from .models.saved_config import mark_quantized, without_expert_conversions
from .quantizer_steps import skip_on_load

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

_OP = "from_pretrained"
_METHOD = "mxpert_mxfp4"
_STORED_EXPERTS = r"experts\.(gate_up|up|down)_proj_(blocks|scales|bias)$"
_NAMED = 6
"""Missing tensors that an error names."""


@dataclass(frozen=True)
class LoadRequest:
    """What one call of ``from_pretrained`` asks for.

    Args:
        activation_format: of the layers. order: gate/up order of the checkpoint.
        scale_rule: that made the checkpoint's codes, where it states one.
        unconverted: patterns of modules that the checkpoint does not have in MXFP4.
        expert_parallel: the ranks that share the layers.
        keep_fp8: as `MoEWeights.prepare` takes it.
    """

    activation_format: OwnFormat
    order: GateUpOrder
    scale_rule: ScaleRule | None = None
    unconverted: tuple[str, ...] = ()
    expert_parallel: ExpertParallel | None = None
    keep_fp8: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> LoadRequest:
        return self  # Transformers copies configs; this is no state of a model

    def config(self) -> Mxfp4Config:
        """The argument ``quantization_config`` that makes Transformers choose `MXQuantizer`."""
        return Mxfp4Config(loading={"quant_method": _METHOD, "request": self, "dequantize": False})


@register_quantizer(_METHOD)
class MXQuantizer(HfQuantizer):
    """Leaves blocks and scales of an MXFP4 checkpoint as they are stored.

    Arguments that a release of Transformers adds are passed on.
    """

    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: Mxfp4Config, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self._request: LoadRequest = quantization_config.request
        self._folder: Path | None = None

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        """Yes: blocks and scales are the state of the experts."""
        return True

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: object,
    ) -> PreTrainedModel:
        request = self._request
        self._dtypes = _wanted_dtypes(model)
        layers, ranks = find_experts(model, _OP), request.expert_parallel
        _refuse_conversions(model)
        self._folder = None if not checkpoint_files else Path(checkpoint_files[0]).parent
        dense = _dense_layers(model, [found.name for found in layers], request, self._folder)
        if ranks is not None:
            check_ranks(_OP, layers, ranks, request.activation_format, None)
            require(
                not dense,
                _OP,
                "expert_parallel",
                need="a checkpoint with all experts in MXFP4",
                got=f"dense {dense}",
            )
            skip_on_load(model, _STORED_EXPERTS)
        for found in layers:
            dtype = next(found.module.parameters()).dtype
            if found.name in dense:
                run_as_transformers(model, found.module)
            else:
                found.replace_by(StoredExperts(found, request.order, dtype, ranks))
        self._has_dense = bool(dense)
        return model

    def finish(self, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
        """Prepare the loaded tensors of all layers.

        Args:
            model: what Transformers loaded.
            info: its ``output_loading_info``.

        Raises:
            ValueError: tensors that the checkpoint does not have.
        """
        request, ranks = self._request, self._request.expert_parallel
        stored = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, StoredExperts)
        }
        require_loaded(info, stored)
        for name, each in stored.items():  # some releases take tensors of any shape
            _refuse_missing([f"{name}.{tensor}" for tensor in each.misshapen()])
        for experts in stored.values():
            weights = None if ranks is None else self._local_weights(model, experts)
            prepared = experts.prepared(
                request.activation_format, weights, keep_fp8=request.keep_fp8
            )
            experts.source.replace_by(prepared.eval())
        mark_quantized(model, [each.source for each in stored.values()], request.scale_rule)
        self.quantization_config = model.config.quantization_config
        model.quantization_method = self.quantization_config.quant_method
        if ranks is not None:
            forbid_saving(model)
        _cast(model, self._dtypes)

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *args: object, **kwargs: object
    ) -> list[WeightTransform]:
        """Drop conversions of dense experts, whose patterns fit the published tensors too."""
        if not self._has_dense:
            weight_conversions = without_expert_conversions(weight_conversions)
        found: list[WeightTransform] = super().update_weight_conversions(
            weight_conversions, *args, **kwargs
        )
        return found

    def _local_weights(self, model: PreTrainedModel, experts: StoredExperts) -> MoEWeights:
        """The weights of this rank's experts, read from the checkpoint."""
        found, ranks = experts.source, experts.expert_parallel
        require(
            self._folder is not None,
            _OP,
            "checkpoint",
            need="safetensors files in a directory",
            got="none",
            remedy="load the model from a directory",
        )
        assert ranks is not None  # for the type checker
        assert self._folder is not None  # for the type checker
        reader = CheckpointReader(self._folder, _OP)
        module = _stored_module(model, reader, found.name)
        sizes = found.num_experts, found.hidden_size, found.intermediate_size
        check_experts(reader, module, sizes)
        tensors = {}
        has_gate = found.order is not None
        for name in published_shapes(*sizes, has_bias=found.has_bias, has_gate=has_gate):
            tensor = reader.read_rows(f"{module}.{name}", ranks.local_experts)
            dtype = experts.dtype if name.endswith("_bias") else tensor.dtype
            tensors[name] = tensor.to(ranks.device, dtype)
        return expert_weights_from(tensors, experts.order)


def _refuse_conversions(model: PreTrainedModel) -> None:
    """Refuse a model whose dense experts Transformers transposes, before 5.8.

    These releases do the same to blocks and scales, and ask no quantiser.
    """
    if hasattr(HfQuantizer, "update_weight_conversions"):
        return
    conversions = get_model_conversion_mapping(model)
    kept = without_expert_conversions(conversions)
    patterns = [
        each for entry in conversions if entry not in kept for each in entry.source_patterns
    ]
    if any(pattern.endswith((".gate_up_proj", ".down_proj")) for pattern in patterns):
        kind, version = model.config.model_type, transformers.__version__
        need, remedy = "Transformers 5.8 or newer", "pip install -U transformers"
        raise UnsupportedError(message(_OP, f"MXFP4 experts of {kind}", need, version, remedy))


def require_loaded(info: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Refuse experts whose tensors the checkpoint lacks, or has in another shape.

    Transformers leaves such tensors uninitialised or fills them with random numbers.

    Args:
        info: ``output_loading_info`` of from_pretrained.
        modules: paths of the experts modules.

    Raises:
        ValueError: the message names the tensors.
    """
    prefixes = tuple(f"{module}." for module in modules)
    absent = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    _refuse_missing(sorted(name for name in absent if name.startswith(prefixes)))


def _refuse_missing(missing: list[str]) -> None:
    shown = ", ".join(missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    if missing:
        need, remedy = "these tensors of experts in the checkpoint", "it is incomplete"
        got = "no such tensors of these names and shapes"
        raise ValueError(message(_OP, f"{shown}{more}", need, got, f"{remedy}: download it again"))


def run_as_transformers(model: PreTrainedModel, experts: torch.nn.Module) -> None:
    """Let experts that stay dense run the implementation that Transformers would choose."""
    experts.dense_implementation = model.get_correct_experts_implementation(None)


def _dense_layers(
    model: PreTrainedModel, names: list[str], request: LoadRequest, folder: Path | None
) -> list[str]:
    """The experts that the checkpoint states as not converted, and does not have in MXFP4."""
    listed = [name for name in names if not should_convert_module(name, [*request.unconverted])]
    if not listed or folder is None:
        return listed
    stored = expert_modules_of(CheckpointReader(folder, _OP))
    places = [module_of(model, f"{each}.down_proj_blocks") for each in stored]
    return [name for name in listed if not fitting(places, name)]


def _stored_module(model: PreTrainedModel, reader: CheckpointReader, name: str) -> str:
    """The checkpoint's path of an experts module of the model."""
    places = {
        stored: module_of(model, f"{stored}.down_proj_blocks")
        for stored in expert_modules_of(reader)
    }
    fits = [stored for stored, place in places.items() if fitting([place], name)]
    require(
        len(fits) == 1,
        _OP,
        name,
        need="one module of this name in the checkpoint",
        got=fits or "none",
        remedy="load the model without expert_parallel, then call mxpert.convert",
    )
    return fits[0]


def _wanted_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtype that each float tensor of a model on the meta device shall be loaded in."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda dtype: {})(model.dtype)
    wanted = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kept = [
            dtype for pattern, dtype in plan.items() if re.search(pattern.replace("*", ".*"), name)
        ]
        if tensor.is_floating_point():
            wanted[name] = kept[-1] if kept else tensor.dtype
    return wanted


def _cast(model: torch.nn.Module, wanted: dict[str, torch.dtype]) -> None:
    """Bring loaded tensors into the dtype that was asked for.

    Releases of Transformers before 5.18 leave tensors of a quantised checkpoint in their stored
    dtype where the model has another name for them, such as the routers of Mixtral and PhiMoE.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wanted and tensor.dtype != wanted[name]:
            tensor.data = tensor.data.to(wanted[name])
