"""The modules that take the place of a model's experts: MXFP4 for inference, MXFP8 for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedError, message
from ..formats.tensor import Layout
from ..ops.moe import fused_moe
from ..ops.quantize import dequantize
from ..problem import Activation
from ..training.activation import gated_activation
from ..training.autograd import grouped_linear
from ..training.moe import CombineRows, PermuteRows, sort_by_expert
from ..training.recipe import MXFP8Recipe
from ..weights import GateUpOrder, MoEWeights, gate_up_rows
from .checkpoints import BLOCK_BYTES, expert_weights_from, published_expert_tensors
from .experts import PROJECTIONS, FoundExperts

_NO_GRADIENT = ("restore(model) for bfloat16 experts, or convert(model, "
                "recipe=mxpert.training.MXFP8Recipe()) to train in MXFP8")


class MXExperts(torch.nn.Module):
    """The experts of one layer in MXFP4, prepared for the device that they are on.

    Called as the module that it replaces: ``experts(hidden_states, topk_ids, topk_weights)``.
    ``state_dict`` holds the published tensors (``gate_up_proj_blocks``, …), whatever layout the
    kernels read, and loads them. ``.to(device)`` prepares the weights anew. Holds no state that a
    call changes, so that threads may share it.

    Args:
        weights: prepared MoEWeights.
        activation: what stage 1 applies.
        activation_format: "bf16", "mxfp8", "mxfp4" or "fp8_token"; may be assigned later.
        source: the module that was replaced, without its weights; `restore` hangs it back.
        dtype: dtype of the biases on disk, and of restored weights.
    """

    weights: MoEWeights

    def __init__(self, weights: MoEWeights, activation: Activation, *, activation_format: str,
                 source: FoundExperts, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation, self.activation_format, self.dtype = activation, activation_format, dtype
        self._source = source
        self._hold(weights)

    def _hold(self, weights: MoEWeights) -> None:
        """Keep `weights`; as buffers too, so that memory footprints count them."""
        self.weights = weights
        for name, projection in zip(PROJECTIONS, (weights.gate_up_proj, weights.down_proj),
                                    strict=True):
            self.register_buffer(f"{name}_qdata", projection.qdata, persistent=False)
            self.register_buffer(f"{name}_scale", projection.scale, persistent=False)

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor,
                topk_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., H], ids and weights [T, top_k] → the shape and dtype of the first."""
        needs_grad = torch.is_grad_enabled() and hidden_states.requires_grad
        if needs_grad and self.training:
            raise UnsupportedError(message("MXExperts", "training", "evaluation mode",
                                           "training mode: MXFP4 weights have no gradient",
                                           _NO_GRADIENT))
        rows = (hidden_states if hidden_states.dim() == 2
                else hidden_states.reshape(-1, self.weights.hidden_size))
        out = fused_moe(
            _as(rows, torch.bfloat16), self.weights, _as(topk_weights, torch.float32),
            _as(topk_ids, torch.int32), activation=self.activation,
            activation_format=self.activation_format, out_dtype=hidden_states.dtype)
        if hidden_states.dim() != 2:
            out = out.view(hidden_states.shape)
        if needs_grad and not torch.compiler.is_compiling():
            return _WithoutBackward.apply(out, hidden_states)
        return out

    def restored(self) -> dict[str, torch.nn.Parameter]:
        """Dequantised parameters in the names, shapes and order of the module that was replaced."""
        weights, found = self.weights.unprepare(), self._source
        parameters = {}
        for name, projection, bias in (
                ("gate_up_proj", weights.gate_up_proj, weights.gate_up_bias),
                ("down_proj", weights.down_proj, weights.down_bias)):
            dense = dequantize(projection, dtype=self.dtype)
            if name == "gate_up_proj":
                rows = _reordered_rows(weights, found.order)
                dense = dense[:, rows]
                bias = None if bias is None else bias[:, rows]
            dense = dense.transpose(1, 2).contiguous() if found.transposed else dense
            parameters[name] = torch.nn.Parameter(dense)
            if bias is not None:
                parameters[f"{name}_bias"] = torch.nn.Parameter(bias.to(self.dtype))
        return parameters

    @property
    def source(self) -> FoundExperts:
        """Where this module hangs and what it replaced."""
        return self._source

    def _apply(self, fn: Any, recurse: bool = True) -> MXExperts:
        """`to`, `cuda` and `cpu` prepare the weights for the new device; dtypes are left alone."""
        moved = fn(torch.empty(0, dtype=torch.uint8, device=self.weights.device)).device
        if moved != self.weights.device:
            self._hold(self.weights.unprepare().prepare(device=moved))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str,
                            keep_vars: bool) -> None:
        """The published tensors. Unpacking a layout goes to the CPU: it would double GPU memory."""
        weights = self.weights
        tensors = published_expert_tensors(weights.unprepare(), dtype=self.dtype)
        packed = weights.layout is not Layout.ROW_MAJOR
        for name, tensor in tensors.items():
            destination[prefix + name] = tensor.cpu() if packed else tensor

    def _load_from_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], prefix: str, local_metadata: object,
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:
        wanted = published_shapes(self._source)
        given = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()
                 if name.startswith(prefix)}
        missing_keys += [prefix + name for name in wanted if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in wanted]
        if wanted.keys() <= given.keys():
            weights = expert_weights_from(given, GateUpOrder.INTERLEAVED)
            self._hold(weights.prepare(device=self.weights.device))

    def extra_repr(self) -> str:
        weights = self.weights
        return (f"num_experts={weights.num_experts}, hidden_size={weights.hidden_size}, "
                f"intermediate_size={weights.intermediate_size}, activation={self.activation}, "
                f"activation_format={self.activation_format!r}, layout={weights.layout.name}")


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`; a call of `to` that changes nothing takes as long as an allocation."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class _WithoutBackward(torch.autograd.Function):
    """Pass a result on; a gradient that is asked of it is an error, not a silent zero."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        raise UnsupportedError(message("MXExperts", "backward", "an inference pass", "a gradient",
                                       _NO_GRADIENT))


class StoredExperts(torch.nn.Module):
    """Empty places, on the meta device, for the published tensors of one layer: what a loader
    fills before `prepared` makes MXExperts of them."""

    def __init__(self, found: FoundExperts, order: GateUpOrder, dtype: torch.dtype) -> None:
        super().__init__()
        self.order, self.dtype, self._source = order, dtype, found
        for name, shape in published_shapes(found).items():
            stored = dtype if name.endswith("_bias") else torch.uint8
            self.register_buffer(name, torch.empty(shape, dtype=stored, device="meta"))

    def prepared(self, activation_format: str) -> MXExperts:
        """Prepare what was loaded on the device that it was loaded to, without dequantising."""
        tensors = dict(self.named_buffers())
        weights = expert_weights_from(tensors, self.order)
        return MXExperts(weights.prepare(device=weights.device), self._source.activation,
                         activation_format=activation_format, source=self._source,
                         dtype=self.dtype)

    @property
    def source(self) -> FoundExperts:
        return self._source


class TrainableExperts(torch.nn.Module):
    """The experts of one layer with the same parameters, their three GEMMs in MXFP8.

    Parameters keep names, shapes and identity: optimisers and checkpoints see no difference.
    """

    def __init__(self, found: FoundExperts, recipe: MXFP8Recipe) -> None:
        super().__init__()
        self.recipe, self._source = recipe, found
        for name, parameter in found.module.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor,
                topk_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., H], ids and weights [T, top_k] → the shape and dtype of the first."""
        tokens = hidden_states.reshape(-1, self._source.hidden_size)
        order, inverse, offsets = sort_by_expert(topk_ids, self._source.num_experts)
        rows = PermuteRows.apply(tokens, order, inverse, topk_ids.shape[-1])        # [R, H]
        gate_up = self._linear("gate_up_proj", rows, offsets)
        if self._source.order is GateUpOrder.INTERLEAVED:
            gate_up = gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        hidden = gated_activation(gate_up, self._source.activation)                 # [R, F]
        rows = self._linear("down_proj", hidden, offsets)                           # [R, H]
        combined = CombineRows.apply(rows, inverse.view(topk_ids.shape), topk_weights.float())
        return combined.view(hidden_states.shape)

    def _linear(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        if self._source.transposed:
            weight = weight.transpose(1, 2).contiguous()
        return grouped_linear(rows, weight, offsets, bias=getattr(self, f"{name}_bias", None),
                              recipe=self.recipe)

    @property
    def source(self) -> FoundExperts:
        return self._source

    def extra_repr(self) -> str:
        return (f"num_experts={self._source.num_experts}, activation={self._source.activation}, "
                f"recipe={self.recipe}")


def published_shapes(found: FoundExperts) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's published tensors, by names below ``experts.``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
            ("gate_up_proj", 2 * found.intermediate_size, found.hidden_size),
            ("down_proj", found.hidden_size, found.intermediate_size)):
        blocks = (found.num_experts, rows, columns // (2 * BLOCK_BYTES))
        shapes |= {f"{name}_blocks": (*blocks, BLOCK_BYTES), f"{name}_scales": blocks}
        if found.has_bias:
            shapes[f"{name}_bias"] = (found.num_experts, rows)
    return shapes


def empty(found: FoundExperts) -> None:
    """Take the weights out of the module that is replaced, so that they can be freed."""
    for name in list(found.module._parameters):
        del found.module._parameters[name]


def _reordered_rows(weights: MoEWeights, order: GateUpOrder) -> torch.Tensor:
    """Row indices [2F] that bring gate and up of `weights` into `order`."""
    assert weights.gate_up_order is not None  # for the type checker; MoEWeights has refused None
    features = weights.intermediate_size
    have = torch.cat(gate_up_rows(weights.gate_up_order, features, weights.device))
    want = torch.cat(gate_up_rows(order, features, weights.device))
    rows = torch.empty_like(have)
    rows[want] = have
    return rows
