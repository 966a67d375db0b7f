"""The method and the runner of a layer's experts in SGLang."""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.layers.moe import MoeRunner
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import set_weight_attrs

import mxpert

from ...errors import UnsupportedError, message
from ...formats.names import SHORT_NAMES, ActivationFormat
from ...formats.spec import MX_BLOCK_SIZE
from ...formats.weight_rounding import WeightRounding
from ..checkpoints.rounded import check_rounding
from ..serving.layer import ServedLayer, warm_up_layer, warn_of_unfolded
from ..serving.layer_weights import columns_of_rank, prepare_layer
from ..serving.loads import FROM_CHECKPOINTS, Loads
from ..serving.refusals import FORMATS, refuse_copies
from ..serving.reload import model_of
from ..serving.requantize import Share
from ..serving.stored_layers import StoredLayer
from ._layer_formats import Experts, experts_of
from ._plugin import BACKENDS, KEPT, OP, ROUNDED
from ._refusals import activation_of, refuse_other_than_mxfp4, refuse_unsupported

if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("sglang.srt.mxpert")  # SGLang shows the loggers below its own name

_DEFAULT_TOKENS = 8192
"""Largest prefill where --chunked-prefill-size is off and SGLang names no other limit."""


@dataclass
class MxpertQuantInfo(MoeQuantInfo):
    """Weights and options for the runner."""

    layer: ServedLayer


class MxpertRunnerCore(DispatchMoeRunnerCore):
    """SGLang's runner core over `mxpert.fused_moe`, for standard dispatch."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        super().__init__(config)
        method = getattr(config.layer, "quant_method", None)
        if not isinstance(method, ServedMethod):
            raise UnsupportedError(
                message(
                    OP,
                    "--moe-runner-backend",
                    FORMATS,
                    type(method).__name__,
                    "choose another backend: SGLang has kernels for these experts",
                )
            )

    @property
    def runner_backend(self) -> MoeRunnerBackend:
        return get_moe_runner_backend()

    def run_from_dispatch(
        self,
        dispatch_output: StandardDispatchOutput,
        quant_info: MxpertQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: object = None,
    ) -> StandardCombineInput:
        """Return the experts' weighted sum [T, H]; ids are local, −1 for foreign ones."""
        x, routing = dispatch_output.hidden_states, dispatch_output.topk_output
        y = quant_info.layer.run(
            x,
            routing.topk_weights,
            routing.topk_ids,
            None,
            on_input=runner_config.apply_router_weight_on_input,
            out=x if runner_config.inplace and x.is_contiguous() else None,
        )
        factor = runner_config.routed_scaling_factor
        if factor not in (None, 1.0):
            y.mul_(factor)
        return StandardCombineInput(hidden_states=y)


class ServedMethod(FusedMoEMethodBase):
    """Creates the parameters that SGLang loads, prepares them, and runs the layer.

    Args:
        activation_format: as `mxpert.fused_moe` takes it. prefix: the layer's name, for the log.
        experts: how SGLang's parameters hold them; None as MXFP4 of ``"quant_method": "mxfp4"``.
        weight_rounding: as `mxpert.load_expert_weights` takes it.
        keep_fp8: as `mxpert.MoEWeights.prepare` takes it.
    """

    def __init__(
        self,
        activation_format: ActivationFormat,
        prefix: str,
        experts: Experts | None = None,
        weight_rounding: WeightRounding | None = None,
        *,
        keep_fp8: bool = False,
    ) -> None:
        super().__init__()
        self.weight_rounding, self.keep_fp8 = weight_rounding, keep_fp8
        self.activation_format, self.prefix = activation_format, prefix
        self.experts = experts or Experts("MXFP4")
        stored = self.experts.stored
        self.stored = None if stored is None else StoredLayer(stored, OP, prefix)
        self.info: MxpertQuantInfo | None = None
        self.loads, self.model = Loads(), model_of(get_server_args())
        self._open: Callable[[FusedMoE], None] = lambda layer: None
        self._lock, self._is_open = threading.Lock(), True

    def create_weights(
        self,
        layer: FusedMoE,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: object,
    ) -> None:
        """Create the parameters that SGLang loads into."""
        config = layer.moe_runner_config
        refuse_unsupported(config, get_server_args())
        activation_of(config)  # refused here, before weights are loaded
        share = intermediate_size_per_partition
        if self.stored is not None:
            refuse_other_than_mxfp4(config, share, self.experts, with_bias=with_bias)
        columns = -(-share // MX_BLOCK_SIZE) * MX_BLOCK_SIZE
        ranks = getattr(layer, "moe_tp_size", 1), getattr(layer, "moe_tp_rank", 0)
        self.columns = columns_of_rank(share, columns, *ranks)
        sizes = {"w13": (2 * columns, hidden_size), "w2": (hidden_size, columns)}

        def open_layer(layer: FusedMoE) -> None:
            kinds: dict[str, dict[str, object]]
            if self.stored is None:
                made = _loadable(num_experts, sizes, with_bias, layer)
                kinds = {f"{name}_weight_scale": {"quant_method": "group"} for name in sizes}
            else:
                made = _loadable_parts(num_experts, sizes, self.experts, layer)
                kinds = {name: _asked_of(name, self.experts) for name in made}
            for name, tensor in made.items():
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                setattr(layer, name, parameter)
                set_weight_attrs(parameter, {**attributes, **kinds.get(name, {})})
            self._loaded_names = list(made)
            self.loads.clear()
            self.loads.watch(layer.named_parameters(recurse=False))

        open_layer(layer)
        self._open = open_layer

    def _opens(self, layer: FusedMoE, name: str) -> Callable[..., object]:
        """The loader of a prepared parameter: the first one called opens the layer for loading."""
        of_layer = weakref.ref(layer)

        def weight_loader(
            param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: object, **kwargs: object
        ) -> object:
            layer = of_layer()
            assert layer is not None  # for the type checker: its model calls this
            with self._lock:
                if not self._is_open:
                    self._open(layer)
                    self._is_open = True
            fresh = getattr(layer, name)
            return fresh.weight_loader(fresh, loaded_weight, *args, **kwargs)

        return weight_loader

    def create_moe_runner(self, layer: FusedMoE, moe_runner_config: MoeRunnerConfig) -> None:
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)

    def restore_weights_before_loading(self, layer: FusedMoE) -> None:
        """Forget an update that failed; the first loader that is called opens the layer."""
        self.loads.clear()

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Prepare the weights, once after loading and again after each update of this layer."""
        if not self._is_open:
            return  # an update that left this layer out
        config = self.runner.config
        activation, order = activation_of(config)
        prepare = functools.partial(
            prepare_layer,
            layer,
            order,
            op=OP,
            bias_suffix="_weight_bias",
            columns=self.columns,
            stored=self.stored,
            weight_rounding=self.weight_rounding,
            keep_fp8=self.keep_fp8,
        )
        if self.info is None:
            self._require_loaded(layer, config)
            weights = prepare(None)
            self.model.add(weights)
        else:
            with self.model.reloading():
                self._require_loaded(layer, config)
                weights = prepare(self.info.layer.weights)
        self._is_open = False
        for name in self._loaded_names:  # an update looks for the parameters by these names
            if not hasattr(layer, name):
                setattr(layer, name, torch.nn.Parameter(torch.empty(0), requires_grad=False))
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.weight_loader = self._opens(layer, name)
        if self.info is not None:
            return
        prepared = ServedLayer(weights, activation, self.activation_format)
        self.info = MxpertQuantInfo(prepared)
        warn_of_unfolded(weights, self.prefix, logger)
        warm_up_layer(
            prepared,
            max_tokens(get_server_args()),
            top_k=config.top_k,
            logger=logger,
            on_input=config.apply_router_weight_on_input,
        )

    def _require_loaded(self, layer: FusedMoE, config: MoeRunnerConfig) -> None:
        """Raise a ValueError for tensors that the checkpoint lacks."""
        load_format = str(getattr(get_server_args(), "load_format", ""))
        if self.loads.is_empty and load_format not in FROM_CHECKPOINTS:
            return  # filled by other means than the loaders
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        names = names if self.stored is None else self.stored.names
        self.loads.require_all(OP, self.prefix, names, _experts(layer, config))

    def share(self, layer: FusedMoE) -> Share:
        """The part of the layer that this rank holds."""
        assert self.info is not None  # for the type checker: it is loaded
        weights, rank = self.info.layer.weights, getattr(layer, "moe_tp_rank", 0)
        experts, first = _experts(layer, self.runner.config), rank * weights.intermediate_size
        return Share(weights, experts, first, self.columns, rank == 0)

    def apply(
        self, layer: FusedMoE, dispatch_output: StandardDispatchOutput
    ) -> StandardCombineInput:
        if not TopKOutputChecker.format_is_standard(dispatch_output.topk_output):
            raise UnsupportedError(message(OP, "top-k", "SGLang's standard output", "another"))
        return self.runner.run(dispatch_output, self.info)


def _experts(layer: FusedMoE, config: MoeRunnerConfig) -> list[int]:
    """Global ids of the experts that live here: routed ones, then shared ones that are fused."""
    shared = getattr(layer, "num_fused_shared_experts", 0)
    routed = config.num_local_experts - shared
    first = getattr(layer, "moe_ep_rank", 0) * routed
    return [*range(first, first + routed), *range(config.num_experts - shared, config.num_experts)]


def _loadable(
    num_experts: int, sizes: dict[str, tuple[int, int]], with_bias: bool, layer: FusedMoE
) -> dict[str, torch.Tensor]:
    """Memory for SGLang's parameters; that of a prepared layer lies in its prepared tensors.

    An update thus needs no memory for a second model. It overwrites the weights before they can be
    checked; what fails afterwards poisons the model.

    Args:
        sizes: rows and depth of "w13" and "w2".
    """
    made = {}
    for name, (rows, depth) in sizes.items():
        for suffix, width in (("weight", depth // 2), ("weight_scale", depth // MX_BLOCK_SIZE)):
            shape = num_experts, rows, width
            prepared = getattr(layer, f"{name}_{suffix}", None)
            if prepared is None:
                tensor = torch.zeros(shape, dtype=torch.uint8)
            else:
                tensor = prepared.data.view(-1)[: math.prod(shape)].view(shape)
            made[f"{name}_{suffix}"] = tensor
        if with_bias:
            device = made[f"{name}_weight"].device
            bias = torch.zeros(num_experts, rows, dtype=torch.bfloat16, device=device)
            made[f"{name}_weight_bias"] = bias
    return made


_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
"""torch's for safetensors' names; floats of any width are held in float32."""


def _loadable_parts(
    num_experts: int, sizes: dict[str, tuple[int, int]], experts: Experts, layer: FusedMoE
) -> dict[str, torch.Tensor]:
    """The same for experts in another form; tensors that nothing is computed with are small.

    Codes of a prepared layer lie in its prepared codes, and so need no second memory. Scales are
    new, which is a few percent.
    """
    stored, made = experts.stored, {}
    assert stored is not None  # for the type checker: of another form
    for stem, (rows, depth) in sizes.items():
        shards = 2 if stem == "w13" else 1
        prepared = getattr(layer, f"{stem}_weight", None)
        device = None if prepared is None else prepared.device
        for part in (*stored.parts, *experts.unread):
            shape = (num_experts, *part.shapes(rows, depth)[0])
            if not part.shape:
                shape = (num_experts, shards) if shards > 1 else (num_experts,)
            dtype = _DTYPES.get(part.dtypes[0], torch.float32)
            needed = math.prod(shape) * dtype.itemsize
            if part is stored.parts[0] and prepared is not None and prepared.nbytes >= needed:
                tensor = prepared.data.view(-1).view(torch.uint8)[:needed].view(dtype).view(shape)
            else:
                tensor = torch.zeros(shape, dtype=dtype, device=device)
            made[f"{stem}_{part.suffix}"] = tensor
    return made


def _asked_of(name: str, experts: Experts) -> dict[str, object]:
    """What SGLang's loader asks of a parameter: the kind of a scale, and the axis of its shards."""
    assert experts.stored is not None  # for the type checker: of another form
    parts = {part.suffix: part for part in (*experts.stored.parts, *experts.unread)}
    part = parts[name.partition("_")[2]]
    kind = "group" if part.shape else "tensor"
    is_transposed = len(part.shape) > 1 and part.shape[1].startswith("N")
    return {"quant_method": kind, "is_transposed": is_transposed}


def max_tokens(server_args: ServerArgs) -> int:
    """The largest number of tokens of one forward pass, as far as SGLang limits it."""
    resolved = resolved_view(server_args)
    names = "chunked_prefill_size", "max_prefill_tokens"
    limits = (getattr(resolved, name, None) for name in names)
    most = next((limit for limit in limits if limit is not None and limit > 0), _DEFAULT_TOKENS)
    ranks = (getattr(resolved, name, None) or 1 for name in ("dp_size", "attn_dp_size"))
    return int(most) * math.prod(ranks)


def method_of(
    config: QuantizationConfig, layer: torch.nn.Module, prefix: str
) -> ServedMethod | None:
    """Return mxpert's method for a layer of experts; None for every other layer.

    Args:
        config: SGLang's. prefix: the layer's name.

    Returns:
        None for experts that the checkpoint leaves unquantised, too.

    Raises:
        UnsupportedError: experts that the checkpoint does not hold as mxpert reads them.
    """
    experts = experts_of(config, layer, prefix) if isinstance(layer, FusedMoE) else None
    if experts is None:
        return None
    backend = get_moe_runner_backend().value
    rounding: WeightRounding | None = "e4m3" if backend.endswith(ROUNDED) else None
    check_rounding(rounding, experts.format, prefix, OP)
    held = experts.format
    if rounding is not None:
        held += " (rounded to e4m3, but for casts of MXFP4)"
    keep_fp8 = backend.endswith(KEPT)
    refuse_copies(keep_fp8, experts.format, prefix, OP, "--moe-runner-backend")
    if keep_fp8:
        held += " (with FP8 copies)"
    text = "mxpert %s computes the %s experts: activations %s"
    _log_once(text, mxpert.__version__, held, SHORT_NAMES[BACKENDS[backend]])
    return ServedMethod(BACKENDS[backend], prefix, experts, rounding, keep_fp8=keep_fp8)


_logged: set[tuple[object, ...]] = set()


def _log_once(*arguments: object) -> None:
    if arguments not in _logged:
        _logged.add(arguments)
        logger.info(*arguments)
