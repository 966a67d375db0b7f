"""The check of an engine's options, in the process that reads them, before engines start.

vLLM checks each model by its architecture, and that check sees all options of the engine. The one
of mxpert stands in front of it, for every architecture that vLLM knows. For others vLLM asks each
registered quantisation config whether a quantised checkpoint is its own, and passes the model's
config. The config of `probe` never says yes, and uses the question to add the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UnsupportedError, message
from ...formats.weight_tensor import WEIGHT_FORMATS
from ..serving.refusals import FORMATS, Refusal, one_line_in_commands, refuse_first
from ._plugin import serve, served_names
from .options import KEY, OP, is_supported, requested_options, require_supported

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import ModelConfig, VllmConfig

ALL2ALL = ("allgather_reducescatter", "deepep_high_throughput")
"""Backends of ``--all2all-backend`` whose output is in vLLM's Standard format."""

_SERVED_GROUPS = {
    *(("float", 4, 32), ("float", 8, 32), ("float", 4, 16)),
    *(("int", 4, each.group_size) for each in WEIGHT_FORMATS.values() if each.is_integer),
}
"""compressed-tensors' type, bits and size of groups of the weights that mxpert reads."""


def probe() -> type:
    """Return a config class that puts `check` in front of the checks of a model's architecture."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class MxpertProbe(QuantizationConfig):
        @classmethod
        def override_quantization_method(
            cls,
            hf_quant_cfg: dict[str, Any],
            user_quant: str | None,
            hf_config: PreTrainedConfig | None = None,
        ) -> None:
            for architecture in getattr(hf_config, "architectures", None) or ():
                _check_first(architecture)

    return MxpertProbe


def check_every_model() -> None:
    """Put `check` in front of the checks of all architectures that vLLM knows.

    A model that is not quantised asks no quantisation config, so that `probe` would not see it.
    """
    from vllm.model_executor.models import ModelRegistry

    for architecture in ModelRegistry.get_supported_archs():
        _check_first(architecture)


def _check_first(architecture: str) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    # Any: mypy takes no other variable as a base class.
    in_tree: Any = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
    if hasattr(in_tree, "checked_by_mxpert"):
        return

    class Checked(in_tree):
        checked_by_mxpert = True

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            check(vllm_config)
            in_tree.verify_and_update_config(vllm_config)

    MODELS_CONFIG_MAP[architecture] = Checked


def check(vllm_config: VllmConfig) -> None:
    """Refuse a wrong option, a version of vLLM, or a model or options that mxpert does not serve.

    What it accepts gets mxpert's configs.

    Raises:
        ValueError, UnsupportedError: one line. In the command ``vllm`` the process ends with it.
    """
    import vllm

    with one_line_in_commands("vllm"):
        asked = requested_options(vllm_config.additional_config) is not None
        serve(asked and is_supported(vllm.__version__))
        if not asked:
            return
        require_supported(vllm.__version__)
        model = vllm_config.model_config
        if model.runner_type == "draft":  # a dense draft model may speed up a served one
            return
        if model.quantization not in served_names():
            names, remedy = (
                ", ".join(map(repr, served_names())),
                f'remove "{KEY}" from --additional-config',
            )
            got = repr(model.quantization)
            if model.quantization is None:
                got = "a model that is not quantised"
                remedy = f"quantise its experts first (mxpert quantize) or {remedy}"
            raise UnsupportedError(message(OP, "the model's quantization", names, got, remedy))
        if model.is_moe:
            refuse_first(OP, refused_experts(model))
            refuse_first(OP, refused_options(vllm_config))


def refused_experts(model_config: ModelConfig) -> Iterator[Refusal]:
    """The format of a checkpoint's experts, if its config rules out all that mxpert reads.

    Which layers a config means is known once they are built, and so is the rest.
    """
    name, hf_config = model_config.quantization, model_config.hf_config
    scheme = getattr(hf_config, "quantization_config", None)
    got: object = None
    if name == "deepseek_v4_fp8" and getattr(hf_config, "expert_dtype", "fp4") != "fp4":
        got = f"expert_dtype {hf_config.expert_dtype!r}"
    elif name == "compressed-tensors" and isinstance(scheme, Mapping):
        weights = [group.get("weights") or {} for group in scheme.get("config_groups", {}).values()]
        keys = "type", "num_bits", "group_size"
        found = [tuple(each.get(key) for key in keys) for each in weights]
        if not _SERVED_GROUPS.intersection(found):
            got = f"{', '.join(keys)} = {', '.join(map(str, found))}"
    elif name == "quark" and isinstance(scheme, Mapping) and "'fp4'" not in str(scheme):
        got = f"weights {scheme.get('global_quant_config', {}).get('weight')}"
    if got is not None:
        need = FORMATS.removeprefix("experts in ")
        yield "the model's experts", need, got, f'remove "{KEY}" from --additional-config'


def refused_options(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Each option of vLLM's VllmConfig that mxpert does not serve."""
    import vllm.envs

    parallel, offload = vllm_config.parallel_config, vllm_config.offload_config
    if parallel.enable_eplb:
        yield "--enable-eplb", "experts that stay where they are", "true", "remove --enable-eplb"
    if vllm_config.lora_config is not None:
        yield "--enable-lora", "experts without LoRA", "true", "remove --enable-lora"
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        yield from refused_all2all(parallel.all2all_backend)
    if offload.uva.cpu_offload_gb > 0:
        got = offload.uva.cpu_offload_gb
        yield "--cpu-offload-gb", "0 (weights on the device)", got, "remove --cpu-offload-gb"
    if offload.prefetch.offload_group_size > 0:
        got = offload.prefetch.offload_group_size
        yield "--offload-group-size", "0 (weights on the device)", got, "remove it"
    backend = vllm_config.kernel_config.moe_backend
    if backend != "auto":
        need = "'auto', since mxpert is the backend"
        yield "--moe-backend", need, repr(backend), "remove --moe-backend"
    if vllm_config.model_config.dtype is not torch.bfloat16:
        got, remedy = vllm_config.model_config.dtype, "pass --dtype bfloat16"
        yield "--dtype", "bfloat16", got, remedy
    if vllm.envs.VLLM_BATCH_INVARIANT:
        remedy = "unset VLLM_BATCH_INVARIANT"
        yield "VLLM_BATCH_INVARIANT", "0: tiles depend on the batch", "1", remedy


def refused_all2all(backend: str) -> Iterator[Refusal]:
    """The backend of ``--all2all-backend``, if its output is in another format."""
    if backend not in ALL2ALL:
        need = f"one of {ALL2ALL}, which hand over tokens in the Standard format"
        remedy = f"pass --all2all-backend {ALL2ALL[0]}"
        yield "--all2all-backend", need, repr(backend), remedy
