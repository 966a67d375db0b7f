"""The modules that take the place of a model's experts: quantised for inference, or in training."""

from __future__ import annotations

from typing import Any

import torch

from ...core.problem import Activation, ActivationFormat, parse_activation_format
from ...distributed import ExpertParallel
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import WeightLike
from ...modules import PreparedExperts
from ...moe.published_tensors import expert_weights_from, published_shapes
from ...moe.weights import GateUpOrder, MoEWeights, gate_up_rows
from ...quantize.op import dequantize
from ...training.activation import gated_activation
from ...training.autograd import grouped_linear
from ...training.expert_parallel import run_on_ranks
from ...training.module import take_groups
from ...training.permute import run_experts, sort_by_expert
from ...training.recipe import MXFP8Recipe
from .experts import FoundExperts


class MXExperts(PreparedExperts):
    """The experts of one layer of a Transformers model in MXFP4, or as a checkpoint has them.

    Called as the module that it replaces: ``experts(hidden_states, topk_ids, topk_weights)``.

    Args:
        weights: prepared MoEWeights.
        activation: what stands between the two GEMMs.
        activation_format: "bf16", "mxfp8", "mxfp4" or "fp8_token"; may be assigned later.
        source: the module that was replaced, without its weights; `restore` puts it back.
        dtype: dtype of the biases in the state dict, and of restored weights.
        expert_parallel: the ranks that share the layer, where `weights` are this rank's experts.
        frozen: names of parameters of the replaced module that did not require a gradient.
    """

    no_gradient = (
        "restore(model) for bfloat16 experts, or restore(model) and then "
        "convert(model, recipe=mxpert.training.MXFP8Recipe()) to train in MXFP8"
    )

    def __init__(
        self,
        weights: MoEWeights,
        activation: Activation,
        *,
        activation_format: ActivationFormat,
        source: FoundExperts,
        dtype: torch.dtype,
        expert_parallel: ExpertParallel | None = None,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(
            weights,
            activation,
            activation_format=activation_format,
            dtype=dtype,
            apply_router_weight_on_input=source.weight_on_input,
            expert_parallel=expert_parallel,
        )
        self._source, self._frozen = source, frozen

    def forward(  # type: ignore[override]  # in Transformers' order
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., H], ids and weights [T, top_k] → the shape and dtype of the first."""
        return super().forward(hidden_states, topk_weights, topk_ids)

    def keep_fp8(self, device: torch.device | None) -> None:
        """Make an e4m3 copy of the weights, unless they have one; see `MoEWeights.prepare`.

        device: where the weights go; None leaves them on their device.
        """
        weights = self.weights
        if not weights.layout.has_fp8_codes:
            target = weights.device if device is None else device
            self._hold(weights.unprepare().prepare(device=target, keep_fp8=True))

    def restored(self) -> dict[str, torch.nn.Parameter]:
        """Dequantised parameters in the names, shapes and order of the module that was replaced."""
        weights, found = self.weights.unprepare(), self._source
        tensors: dict[str, torch.Tensor] = {}
        first, second = found.projections
        for name, projection, bias in (
            (first, weights.gate_up_proj, weights.gate_up_bias),
            (second, weights.down_proj, weights.down_bias),
        ):
            dense = _dense(projection, self.dtype)
            if name == first and found.order is not None:
                rows = _reordered_rows(weights, found.order)
                dense = dense[:, rows]
                bias = None if bias is None else bias[:, rows]
            dense = dense.transpose(1, 2).contiguous() if found.transposed else dense
            tensors[name] = dense
            if bias is not None:
                tensors[f"{name}_bias"] = bias.to(self.dtype)
        return {
            name: torch.nn.Parameter(tensor, requires_grad=name not in self._frozen)
            for name, tensor in tensors.items()
        }

    @property
    def source(self) -> FoundExperts:
        """The module that this one replaced, and its place."""
        return self._source


def _dense(projection: WeightLike, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K] in `dtype`; WeightTensor by expert, since it decodes in float64."""
    if isinstance(projection, MXTensor):
        return dequantize(projection, dtype=dtype)
    return torch.stack(
        [projection[each].dequantize(dtype) for each in range(len(projection.qdata))]
    )


class StoredExperts(torch.nn.Module):
    """Meta tensors in the published shapes: a loader fills them, `prepared` makes MXExperts.

    With `expert_parallel`, and without `has_tensors`, there are none, so that a loader skips them;
    `prepared` gets the weights.
    """

    def __init__(
        self,
        found: FoundExperts,
        order: GateUpOrder | None,
        dtype: torch.dtype,
        expert_parallel: ExpertParallel | None = None,
        *,
        has_tensors: bool = True,
    ) -> None:
        super().__init__()
        self.order = None if found.order is None else order
        self.dtype, self._source = dtype, found
        self.expert_parallel = expert_parallel
        if expert_parallel is not None or not has_tensors:
            return
        for name, shape in self._shapes().items():
            stored = dtype if name.endswith("_bias") else torch.uint8
            self.register_buffer(name, torch.empty(shape, dtype=stored, device="meta"))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        found = self._source
        sizes = found.num_experts, found.hidden_size, found.intermediate_size
        return published_shapes(*sizes, has_bias=found.has_bias, has_gate=found.order is not None)

    def misshapen(self) -> list[str]:
        """Names of loaded tensors of another shape than the model's experts have."""
        shapes = self._shapes()
        return [name for name, each in self.named_buffers() if tuple(each.shape) != shapes[name]]

    def prepared(
        self,
        activation_format: ActivationFormat,
        weights: MoEWeights | None = None,
        *,
        keep_fp8: bool,
    ) -> MXExperts:
        """The loaded tensors, or given weights, prepared for the device that they are on.

        keep_fp8: as `MoEWeights.prepare` takes it.
        """
        if weights is None:
            weights = expert_weights_from(dict(self.named_buffers()), self.order)
        return MXExperts(
            weights.prepare(device=weights.device, keep_fp8=keep_fp8),
            self._source.activation,
            activation_format=parse_activation_format(activation_format, "MXExperts"),
            source=self._source,
            dtype=self.dtype,
            expert_parallel=self.expert_parallel,
        )

    @property
    def source(self) -> FoundExperts:
        return self._source


class TrainableExperts(torch.nn.Module):
    """The experts of one layer with the same parameters, their three GEMMs in MXFP8.

    Parameters keep names, shapes and identity, so optimisers and checkpoints see no difference.
    The replaced module gives its parameters away: this module is their only owner.

    With `expert_parallel` the parameters are copies of this rank's experts, the rest is freed, and
    ``load_state_dict`` takes its part of tensors of all experts. Gradients are those of `MXMoE`.
    """

    def __init__(
        self,
        found: FoundExperts,
        recipe: MXFP8Recipe,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self._source = recipe, found
        self.expert_parallel = expert_parallel
        self._ranks = None if expert_parallel is None else expert_parallel.of_next_layer()
        self.group_ids = None if expert_parallel is None else expert_parallel.local_experts
        for name, parameter in found.module.named_parameters():
            if self.group_ids is not None:
                local = parameter.detach()[list(self.group_ids)]
                parameter = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
            self.register_parameter(name, parameter)
        empty(found.module)
        self.train(found.module.training)

    def give_back(self) -> None:
        """Put the replaced module back, with the parameters and the mode that this one has now."""
        module = self._source.module
        for name, parameter in self.named_parameters():
            module.register_parameter(name, parameter)
        empty(self)
        self._source.replace_by(module.train(self.training))

    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., H], ids and weights [T, top_k] → the shape and dtype of the first."""
        tokens, weights = hidden_states.reshape(-1, self._source.hidden_size), topk_weights.float()
        if self._source.weight_on_input:  # as the model: x is rounded once more, before the GEMM
            tokens, weights = tokens * topk_weights.to(tokens.dtype), torch.ones_like(weights)
        if self._ranks is None:
            pairs = sort_by_expert(topk_ids, self._source.num_experts)
            combined = run_experts(self._experts, tokens, weights, pairs)
        else:
            ranks, rule = self._ranks, self.recipe.scale_rule
            combined = run_on_ranks(ranks, self._experts, tokens, weights, topk_ids, rule)
        return combined.view(hidden_states.shape)

    def _experts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] sorted by expert → the experts' outputs [R, H]."""
        first, second = self._source.projections
        gate_up = self._linear(first, rows, offsets)
        if self._source.order is None:
            return self._linear(second, gate_up.relu().square(), offsets)
        if self._source.order is GateUpOrder.INTERLEAVED:
            gate_up = gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        hidden = gated_activation(gate_up, self._source.activation)  # [R, F]
        return self._linear(second, hidden, offsets)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        if self.group_ids is not None:
            names = [prefix + name for name, _ in self.named_parameters()]
            state_dict = take_groups(state_dict, names, self._source.num_experts, self.group_ids)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _linear(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        if self._source.transposed:
            weight = weight.transpose(1, 2).contiguous()
        return grouped_linear(
            rows, weight, offsets, bias=getattr(self, f"{name}_bias", None), recipe=self.recipe
        )

    @property
    def source(self) -> FoundExperts:
        return self._source

    def extra_repr(self) -> str:
        return (
            f"num_experts={self._source.num_experts}, activation={self._source.activation}, "
            f"recipe={self.recipe}"
        )


def empty(module: torch.nn.Module) -> None:
    """Drop the parameters of a module, so that they can be freed."""
    module._parameters.clear()


def _reordered_rows(weights: MoEWeights, order: GateUpOrder) -> torch.Tensor:
    """Row indices [2F] that bring gate and up of `weights` into `order`."""
    assert weights.gate_up_order is not None  # for the type checker; MoEWeights has refused None
    features = weights.intermediate_size
    have = torch.cat(gate_up_rows(weights.gate_up_order, features, weights.device))
    want = torch.cat(gate_up_rows(order, features, weights.device))
    rows = torch.empty_like(have)
    rows[want] = have
    return rows
