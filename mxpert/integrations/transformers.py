"""mxpert as an experts implementation of Transformers; importing this module registers it.

``AutoModelForCausalLM.from_pretrained(path, experts_implementation="mxpert")`` gives a converted
model (see mxpert.convert). bf16 experts are quantised layer by layer after they are loaded. MXFP4
checkpoints (gpt-oss, or written by ``mxpert quantize`` or by a converted model) go from blocks and
scales to prepared weights without being dequantised. With ``expert_parallel=`` (a
mxpert.distributed.ExpertParallel) each rank reads its own experts alone, and quantises those of a
bf16 checkpoint one by one. "mxpert" computes with bf16 activations (a16w4); "mxpert_mxfp8" or
"mxpert_a8w4", "mxpert_mxfp4" or "mxpert_a4w4", and "mxpert_fp8_token" with narrower ones.

The module extends four things of Transformers: the table of experts functions, the reader of MXFP4
checkpoints, the table of quantisers, and ``PreTrainedModel.from_pretrained``. They behave as before
for every other implementation.
"""

from __future__ import annotations

import functools
import re
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from ..distributed import ExpertParallel
from ..errors import UnsupportedError, message, require
from ..published import published_shapes
from ..weights import GateUpOrder
from .checkpoints.load import check_experts, expert_modules_of, stored_gate_up_order
from .checkpoints.safetensors_files import CONFIG_FILE, CheckpointReader, read_json
from .models.convert import check_ranks, convert, forbid_saving, mx_experts
from .models.expert_modules import MXExperts, StoredExperts
from .models.experts import find_experts
from .models.implementations import IMPLEMENTATIONS, NAME
from .models.saved_config import mark_quantized, without_expert_conversions

try:
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    from .dense_checkpoints import LocalExpertsConfig
except ImportError as error:
    raise UnsupportedError(
        message(
            "mxpert.integrations.transformers",
            "transformers",
            "transformers >= 5",
            error,
            "pip install 'mxpert[transformers]'",
        )
    ) from error

_OP = "from_pretrained"
_STORED_EXPERTS = r"experts\.(gate_up|down)_proj_(blocks|scales|bias)$"
_RANKS: ContextVar[ExpertParallel | None] = ContextVar("expert_parallel", default=None)
"""The argument of the `from_pretrained` that runs."""


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """The entry in the table of experts functions, which only unconverted experts call.

    Raises:
        UnsupportedError: always; it says how to convert them.
    """
    raise UnsupportedError(
        message(
            "experts_implementation",
            type(self).__name__,
            "converted experts",
            "dense weights",
            f'load with from_pretrained(…, experts_implementation="{NAME}"), or call '
            "mxpert.convert(model) once the weights are there",
        )
    )


class MXQuantizer(Mxfp4HfQuantizer):
    """Transformers' reader of MXFP4 checkpoints, extended by the implementations of mxpert.

    A model that asks for one of them gets blocks and scales as they are stored.
    """

    activation_format: str | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the config: what the environment needs depends on the implementation."""
        self._environment = (args, kwargs)

    def update_tp_plan(self, config: Any) -> Any:
        """Read the implementation from the config. A request to dequantise takes precedence."""
        asked = IMPLEMENTATIONS.get(getattr(config, "_experts_implementation", None) or "")
        if asked is not None and not self.quantization_config.dequantize:
            self.activation_format = asked
            return config
        args, kwargs = self._environment
        super().validate_environment(*args, **kwargs)
        return super().update_tp_plan(config)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.activation_format is None:
            return super()._process_model_before_weight_loading(model, **kwargs)
        files = kwargs.get("checkpoint_files")
        order = _stored_order(files)
        self._dtypes = _wanted_dtypes(model)
        layers, ranks = find_experts(model, _OP), _RANKS.get()
        if ranks is not None and files:
            check_ranks(_OP, layers, ranks, self.activation_format, None)
            self._folder = Path(files[0]).parent
            ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or set()
            model._keys_to_ignore_on_load_unexpected = type(ignored)([*ignored, _STORED_EXPERTS])
        for found in layers:
            dtype = next(found.module.parameters()).dtype
            found.replace_by(StoredExperts(found, order, dtype, ranks))
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.activation_format is None:
            return super()._process_model_after_weight_loading(model, **kwargs)
        stored = [module for module in model.modules() if isinstance(module, StoredExperts)]
        is_local = _RANKS.get() is not None
        reader = CheckpointReader(self._folder, _OP) if is_local else None
        for experts in stored:
            tensors = None if reader is None else _local_tensors(reader, experts)
            experts.source.replace_by(experts.prepared(self.activation_format, tensors).eval())
        mark_quantized(model, [experts.source for experts in stored], None)
        if is_local:
            forbid_saving(model)
        _cast(model, self._dtypes)
        return model

    def get_weight_conversions(self) -> list[Any]:
        return super().get_weight_conversions() if self.activation_format is None else []

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Drop conversions of dense experts, whose patterns fit the published tensors too."""
        if self.activation_format is None:
            result: list[Any] = super().update_weight_conversions(weight_conversions)
            return result
        return without_expert_conversions(weight_conversions)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        if self.activation_format is None:
            result: tuple[Any, dict[str, Any]] = super().get_state_dict_and_metadata(model)
            return result
        return None, {}

    @property
    def is_compileable(self) -> bool:
        return self.activation_format is not None or super().is_compileable


def _local_tensors(reader: CheckpointReader, experts: StoredExperts) -> dict[str, torch.Tensor]:
    """The published tensors of this rank's experts, read from the checkpoint."""
    found, ranks = experts.source, experts.expert_parallel
    assert ranks is not None  # for the type checker
    module = _stored_module(reader, found.name)
    sizes = found.num_experts, found.hidden_size, found.intermediate_size
    check_experts(reader, module, sizes)
    tensors = {}
    for name in published_shapes(*sizes, has_bias=found.has_bias):
        tensor = reader.read_rows(f"{module}.{name}", ranks.local_experts)
        dtype = experts.dtype if name.endswith("_bias") else tensor.dtype
        tensors[name] = tensor.to(ranks.device, dtype)
    return tensors


def _stored_module(reader: CheckpointReader, name: str) -> str:
    """The checkpoint's path of an experts module; one of both may lack the base model's prefix."""
    fits = [
        stored
        for stored in expert_modules_of(reader)
        if f".{stored}".endswith(f".{name}") or f".{name}".endswith(f".{stored}")
    ]
    require(
        len(fits) == 1,
        _OP,
        name,
        need="one module of this name in the checkpoint",
        got=fits or "none",
        remedy="load the model without expert_parallel, then call mxpert.convert",
    )
    return fits[0]


def _wanted_dtypes(model: Any) -> dict[str, torch.dtype]:
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

    Transformers leaves tensors of a quantised checkpoint in their stored dtype where the model has
    another name for them, such as the routers of Mixtral, MiniMax, PhiMoE and GraniteMoE.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wanted and tensor.dtype != wanted[name]:
            tensor.data = tensor.data.to(wanted[name])


def register() -> None:
    """Add mxpert to Transformers' tables; a second call changes nothing."""
    for name in IMPLEMENTATIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    AUTO_QUANTIZER_MAPPING["mxfp4"] = MXQuantizer
    original = PreTrainedModel.from_pretrained.__func__
    if not hasattr(original, "converts_to_mxpert"):
        PreTrainedModel.from_pretrained = classmethod(_converting(original))


def _converting(original: Any) -> Any:
    """`from_pretrained`, followed by `convert` where the model asks for it."""

    @functools.wraps(original)
    def from_pretrained(
        cls: Any, *args: Any, expert_parallel: ExpertParallel | None = None, **kwargs: Any
    ) -> Any:
        require(
            isinstance(expert_parallel, ExpertParallel | None),
            _OP,
            "expert_parallel",
            need="an ExpertParallel",
            got=type(expert_parallel).__name__,
            error=TypeError,
        )
        if expert_parallel is not None and _is_dense(cls, args, kwargs):
            kwargs["quantization_config"] = LocalExpertsConfig(expert_parallel)
        ranks = _RANKS.set(expert_parallel)
        try:
            loaded = original(cls, *args, **kwargs)
        finally:
            _RANKS.reset(ranks)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        asked = getattr(model.config, "_experts_implementation", None)
        require(
            expert_parallel is None or asked in IMPLEMENTATIONS,
            _OP,
            "expert_parallel",
            need=f'experts_implementation="{NAME}" with it',
            got=repr(asked),
        )
        if asked in IMPLEMENTATIONS and not mx_experts(model):
            convert(model, IMPLEMENTATIONS[asked], expert_parallel=expert_parallel)
        return loaded

    from_pretrained.converts_to_mxpert = True  # type: ignore[attr-defined]
    return from_pretrained


_HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def _is_dense(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `from_pretrained` name an unquantised checkpoint of safetensors."""
    if any(kwargs.get(name) is not None for name in ("quantization_config", "gguf_file")):
        return False
    config = kwargs.get("config")
    if config is None or isinstance(config, (str, Path)):
        place = config or (args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        options = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
        config, _ = cls.config_class.get_config_dict(place, **options)
    else:
        config = config.to_dict()
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    return all(part.get("quantization_config") is None for part in parts)


def _stored_order(checkpoint_files: Any) -> GateUpOrder:
    """Gate/up order that the config beside the checkpoint's files states."""
    require(
        bool(checkpoint_files),
        _OP,
        "checkpoint",
        need="safetensors files in a directory",
        got="none",
        remedy="load the model from a directory",
    )
    where = Path(checkpoint_files[0]).parent / CONFIG_FILE
    return stored_gate_up_order(read_json(where, _OP), where, _OP)


register()

__all__ = ["IMPLEMENTATIONS", "NAME", "MXExperts", "MXQuantizer", "experts_forward", "register"]
