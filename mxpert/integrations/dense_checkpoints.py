"""bf16 checkpoints under expert parallelism: each rank reads and quantises its own experts alone.

Transformers lets a quantiser change a model before and after its weights are loaded. This one takes
the experts out before, so that the loader skips their tensors. Afterwards it reads the matrices of
the local experts, one at a time, and quantises each on the rank's device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..distributed import ExpertParallel
from ..errors import UnsupportedError, require
from ..formats.spec import ScaleRule
from ..moe.published_tensors import expert_weights_from, published_shapes
from ..moe.stacked import quantize_stacked
from ..moe.weights import GateUpOrder
from .checkpoint_names import fitting, module_of
from .checkpoints.convertible import stacked_order
from .checkpoints.expert_sources import ExpertSource, find_expert_sources
from .checkpoints.safetensors_files import CheckpointReader
from .models.convert import check_ranks, forbid_saving, with_progress
from .models.expert_modules import StoredExperts
from .models.experts import FoundExperts, find_experts, require_finite
from .models.implementations import IMPLEMENTATIONS
from .models.saved_config import mark_quantized
from .quantizer_steps import reader_of, skip_on_load, stored_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OP = "from_pretrained"
_METHOD = "mxpert_local_experts"
_DENSE_EXPERTS = r"experts\.(gate_up|up|down)_proj(_bias)?$"
_SCALE_RULE = ScaleRule.RCEIL

_logger = logging.getLogger("mxpert")


@register_quantization_config(_METHOD)
class LocalExpertsConfig(QuantizationConfigMixin):
    """Names the quantiser to Transformers while a model is loaded; it is never saved.

    Args:
        ranks: whose experts to read. keep_fp8: as `MoEWeights.prepare` takes it.
    """

    def __init__(self, ranks: ExpertParallel, *, keep_fp8: bool) -> None:
        self.quant_method, self.ranks, self.keep_fp8 = _METHOD, ranks, keep_fp8

    def to_dict(self) -> dict[str, Any]:
        """Its name alone: a config is printed and hashed as JSON."""
        return {"quant_method": self.quant_method}


@register_quantizer(_METHOD)
class LocalExpertsQuantizer(HfQuantizer):
    """Reads this rank's experts of an unquantised checkpoint.

    A checkpoint whose experts it cannot name is loaded as a whole, with a warning; the caller then
    converts the model.
    """

    is_trainable = False

    def __init__(self, quantization_config: LocalExpertsConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self._ranks, self._keep_fp8 = quantization_config.ranks, quantization_config.keep_fp8
        self._sources: dict[str, ExpertSource] = {}

    def is_serializable(self) -> bool:
        """No: a rank has some of the experts."""
        return False

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: object,
    ) -> PreTrainedModel:
        asked = str(getattr(model.config, "_experts_implementation", None))
        self._format = IMPLEMENTATIONS.get(asked)
        if self._format is None:
            return model
        layers = find_experts(model, _OP)
        check_ranks(_OP, layers, self._ranks, self._format, None)
        try:
            self._reader = reader_of(checkpoint_files, _OP)
            self._sources = _sources_of(model, layers, self._reader)
        except (ValueError, UnsupportedError) as error:
            text = "mxpert: all experts are loaded, and foreign ones dropped afterwards: %s"
            _logger.warning(text, error)
            return model
        skip_on_load(model, _DENSE_EXPERTS)
        for found in layers:
            dtype = next(found.module.parameters()).dtype
            found.replace_by(StoredExperts(found, GateUpOrder.INTERLEAVED, dtype, self._ranks))
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        self.remove_quantization_config(model)
        if self._format is None or not self._sources:
            return model
        stored = stored_experts(model)
        for experts in with_progress(stored, progress=True):
            weights = expert_weights_from(self._local_tensors(experts), experts.order)
            prepared = experts.prepared(self._format, weights, keep_fp8=self._keep_fp8)
            experts.source.replace_by(prepared.eval())
        mark_quantized(model, [experts.source for experts in stored], _SCALE_RULE)
        forbid_saving(model)
        return model

    def _local_tensors(self, experts: StoredExperts) -> dict[str, torch.Tensor]:
        """The published tensors of this rank's experts of one layer."""
        found, local, device = experts.source, self._ranks.local_experts, self._ranks.device
        source = self._sources[found.name]
        sizes = len(local), found.hidden_size, found.intermediate_size
        tensors = {
            name: torch.empty(shape, dtype=torch.uint8, device=device)
            for name, shape in published_shapes(
                *sizes, has_bias=False, has_gate=found.order is not None
            ).items()
        }
        for projection in source.projections:
            blocks, scales = (tensors[f"{projection}_{part}"] for part in ("blocks", "scales"))
            for place, expert in enumerate(local):
                dense = source.read(self._reader, projection, expert).to(device, experts.dtype)
                stacked = dense[None]
                require_finite(_OP, f"{found.name}.{projection}[{expert}]", stacked)
                quantized = quantize_stacked(
                    stacked, transposed=False, scale_rule=_SCALE_RULE, device=device
                )
                blocks[place] = quantized.qdata[0].view(blocks.shape[1:])
                scales[place] = quantized.scale[0]
        for name in source.biases:
            bias = source.read_bias(self._reader, name)[list(local)].to(device, experts.dtype)
            require_finite(_OP, name, bias)
            tensors[name.rpartition(".")[2]] = bias
        return tensors


def _sources_of(
    model: PreTrainedModel, layers: list[FoundExperts], reader: CheckpointReader
) -> dict[str, ExpertSource]:
    """Where the checkpoint has each layer's experts, by the layer's name.

    Raises:
        ValueError, UnsupportedError: a layer that the checkpoint does not have once, or has in
            other sizes; tensors of an unknown kind.
    """
    found_sources = find_expert_sources(reader, reader.config(), lambda: stacked_order(layers))
    renamed = {module_of(model, source.tensors[0]): source for source in found_sources}
    sources = {}
    for found in layers:
        fits = [renamed[name] for name in fitting(renamed, found.name)]
        need = "one module of this name in the checkpoint"
        require(len(fits) == 1, _OP, found.name, need=need, got=f"{len(fits)} of {list(renamed)}")
        sources[found.name] = fits[0]
        have, want = (
            (each.num_experts, each.hidden_size, each.intermediate_size, each.projections)
            for each in (fits[0], found)
        )
        require(have == want, _OP, f"{found.name}: E, H, F", need=want, got=have)
        biased = len(fits[0].biases) == (len(found.projections) if found.has_bias else 0)
        require(biased, _OP, found.name, need=f"biases: {found.has_bias}", got=fits[0].biases)
    return sources
