"""The method of a layer's experts: vLLM creates and loads weights, mxpert computes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import mxfp4

import mxpert

from ...core.problem import TopKOptions
from ...errors import UnsupportedError, message
from ...formats.names import SHORT_NAMES
from ...formats.spec import MX_BLOCK_SIZE
from ..checkpoints.rounded import check_rounding
from ..serving.layer import ServedLayer, warm_up_layer, warn_of_unfolded
from ..serving.layer_weights import columns_of_rank, prepare_layer
from ..serving.loads import FROM_CHECKPOINTS, Loads
from ..serving.refusals import refuse_copies
from ..serving.reload import model_of
from ..serving.requantize import Share
from ..serving.stored_layers import StoredLayer
from ._experts import ROUTING, RoutedExperts, RoutingExperts
from ._refusals import WITHOUT, activation_of, refuse_other_than_mxfp4, refuse_unsupported
from .options import OP, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig

    from ...moe.weights import MoEWeights
    from ._layer_formats import Experts

logger = init_logger("vllm.mxpert")  # vLLM shows the loggers below its own name

_FILLED = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
"""Parameters of a layer in MXFP4 or MXFP8; compressed-tensors calls the codes ``…_packed``."""


class ServedMethod(FusedMoEMethodBase):
    """Mixed into the method of vLLM that creates and loads the weights.

    Args:
        moe: vLLM's FusedMoEConfig. options: what the user asks for.
        prefix: the layer's name, for the log. vllm_config: vLLM's VllmConfig.
        experts: how vLLM holds them.
    """

    supports_pre_processed_weights = False
    moe_kernel: mk.FusedMoEKernel  # None until the weights are loaded

    def __init__(
        self,
        moe: FusedMoEConfig,
        options: Options,
        prefix: str,
        vllm_config: VllmConfig,
        experts: Experts,
    ) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # the in-tree method would choose a back end
        refuse_unsupported(moe, vllm_config)
        if experts.format != "MXFP4":
            refuse_other_than_mxfp4(moe, experts.format)
        check_rounding(options.weight_rounding, experts.format, prefix, OP)
        refuse_copies(options.keep_fp8, experts.format, prefix, OP, '"keep_fp8"')
        self.experts, stored = experts, experts.stored
        self.stored = None if stored is None else StoredLayer(stored, OP, prefix)
        self.block = MX_BLOCK_SIZE if stored is None else math.lcm(MX_BLOCK_SIZE, stored.group)
        self.options, self.prefix = options, prefix
        scheduled = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_tokens: int = scheduled * max(1, moe.moe_parallel_config.dp_size)
        self.gpt_oss = isinstance(self, mxfp4.GptOssMxfp4MoEMethod)
        for name, value in experts.state.items():
            setattr(self, name, value)
        routing = RoutingExperts.serves(moe, vllm_config)
        self.experts_cls: type[RoutingExperts | RoutedExperts]
        self.experts_cls = RoutingExperts if routing else RoutedExperts
        self.loads, self.model = Loads(), model_of(vllm_config)
        load_config = getattr(vllm_config, "load_config", None)
        self.load_format = str(getattr(load_config, "load_format", ""))
        self.columns: int | None = None  # of this rank's share, those that are the model's

    apply = mxfp4.Mxfp4MoEMethod.apply
    apply_monolithic = mxfp4.Mxfp4MoEMethod.apply_monolithic

    @property
    def is_monolithic(self) -> bool:
        monolithic: bool = self.experts_cls.is_monolithic()
        return monolithic

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[int, int]:
        """Round a rank's share of the intermediate size up to whole blocks, of MXFP4 alone."""
        hidden, intermediate = FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, *args, **kwargs
        )
        if hidden % self.block:
            need = f"a multiple of the group, {self.block}"
            raise UnsupportedError(message(OP, "hidden_size", need, hidden, WITHOUT))
        rounded = -(-intermediate // self.block) * self.block
        parallel = self.moe.moe_parallel_config
        self.columns = columns_of_rank(intermediate, rounded, parallel.tp_size, parallel.tp_rank)
        if intermediate == rounded:
            return hidden, intermediate
        cuts_between_blocks = self.gpt_oss and self.moe.activation is MoEActivation.SWIGLUOAI
        if not cuts_between_blocks:  # as the loader of gpt-oss models does
            can_pad = self.experts.format == "MXFP4" and hasattr(self.moe, "tp_shard_with_padding")
            if self.moe.has_bias or not can_pad:
                raise UnsupportedError(
                    message(
                        OP,
                        "--tensor-parallel-size",
                        f"a multiple of {self.block} columns for each rank",
                        intermediate,
                        "pass another size or --enable-expert-parallel",
                    )
                )
            self.moe.tp_shard_with_padding = True
        return hidden, rounded

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: object,
    ) -> None:
        """Create vLLM's parameters, and note which of them a checkpoint fills."""
        if self.stored is not None and self.stored.has_integers:
            params_dtype = torch.float32  # holds the scales of any checkpoint
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        super().create_weights(layer, *sizes, params_dtype, **attributes)
        self.loads.watch(layer.named_parameters(recurse=False))

    def _require_loaded(self, layer: torch.nn.Module) -> None:
        """Raise a ValueError for tensors that the checkpoint lacks."""
        if self.loads.is_empty and self.load_format not in FROM_CHECKPOINTS:
            return  # filled by other means than the loaders
        if self.stored is not None:
            names = self.stored.names
            bias = next((name for name in ("w13_bias", "w2_bias") if self.loads.saw(name)), None)
            if bias is not None:
                need = f"{self.experts.format} experts without biases"
                raise UnsupportedError(message(OP, self.prefix, need, bias, WITHOUT))
        else:
            here = dict(layer.named_parameters(recurse=False))
            names = [name for each in _FILLED for name in (each, f"{each}_packed") if name in here]
        self.loads.require_all(OP, self.prefix, names, self._experts(layer))

    def _experts(self, layer: torch.nn.Module) -> list[int]:
        """Global ids of the experts that live here, in the order of their local ids."""
        expert_map = getattr(layer, "expert_map", None)
        if expert_map is None:
            return list(range(self.moe.num_local_experts))
        here = (expert_map >= 0).nonzero().flatten()
        found: list[int] = here[expert_map[here].argsort()].tolist()
        return found

    def share(self, layer: torch.nn.Module) -> Share:
        """The part of the layer that this rank holds."""
        weights = self.moe_kernel.fused_experts.layer.weights
        padded, rank = weights.intermediate_size, self.moe.moe_parallel_config.tp_rank
        columns = padded if self.columns is None else self.columns
        return Share(weights, self._experts(layer), rank * padded, columns, rank == 0)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """Describe the activations to vLLM: not quantised outside of the experts."""
        return mxfp4_w4a16_moe_quant_config(w1_scale=None, w2_scale=None)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the weights, once after loading and again after each reload."""
        activation, order = activation_of(self.moe, layer)
        prepare = functools.partial(
            prepare_layer,
            layer,
            order,
            op=OP,
            columns=self.columns,
            stored=self.stored,
            weight_rounding=self.options.weight_rounding,
            keep_fp8=self.options.keep_fp8,
        )
        if self.moe_kernel is not None:
            loaded = self.moe_kernel.fused_experts.layer.weights
            with self.model.reloading():
                self._require_loaded(layer)
                prepare(loaded)
            self.loads.clear()
            return
        self._require_loaded(layer)
        if not RoutingExperts.serves_router_of(layer):
            self.experts_cls = RoutedExperts
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        weights = prepare(None)
        self.loads.clear()
        self.model.add(weights)
        experts.layer = ServedLayer(weights, activation, self.options.activation_format)
        prepare_finalize = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            allow_new_interface=True,
            use_monolithic=self.is_monolithic,
        )
        self.moe_kernel = mk.FusedMoEKernel(prepare_finalize, experts)
        warn_of_unfolded(weights, self.prefix, logger)
        logger.info_once(
            "mxpert %s computes the %s experts: activations %s, experts chosen by %s",
            mxpert.__version__,
            self._format_of(weights),
            SHORT_NAMES[self.options.activation_format],
            "mxpert" if self.is_monolithic else "vLLM",
        )
        self._warm_up(layer, experts.layer)

    def _format_of(self, weights: MoEWeights) -> str:
        """The format as a log says it."""
        if weights.rounding_certificates is not None:
            return "NVFP4 (rounded to e4m3)"
        is_cast = self.experts.format == "NVFP4" and weights.weight_format == "mxfp4"
        format = "MXFP4 (stored as NVFP4)" if is_cast else self.experts.format
        return f"{format} (with FP8 copies)" if self.options.keep_fp8 else format

    def _warm_up(self, layer: torch.nn.Module, prepared: ServedLayer) -> None:
        ids_dtype = None if self.is_monolithic else self.topk_indices_dtype
        warm_up_layer(
            prepared,
            self.max_tokens,
            top_k=self.moe.experts_per_token,
            logger=logger,
            expert_map=getattr(layer, "expert_map", None),
            on_input=self.is_monolithic and bool(layer.apply_router_weight_on_input),
            topk_ids_dtype=ids_dtype or torch.int32,
            router_logits_dtype=self.moe.router_logits_dtype if self.is_monolithic else None,
            routing=ROUTING if self.is_monolithic else TopKOptions(),
        )


@functools.cache
def served_method(base: type) -> type:
    """Return `base`, a method of vLLM for experts, with mxpert's kernels."""
    return type(f"Mxpert{base.__name__}", (ServedMethod, base), {"__module__": __name__})
