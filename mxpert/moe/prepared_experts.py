"""PreparedExperts: the experts of one layer as a module for inference."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.gradient import without_backward
from ..core.problem import (
    ActivationFormat,
    ActivationLike,
    TopKOptions,
    parse_activation,
    parse_activation_format,
)
from ..errors import Checks, UnsupportedError, message
from ..formats.spec import MXFP4
from ..formats.tensor import Layout
from . import published_tensors as published
from .checks import check_gate, check_weight_on_input
from .from_logits import fused_moe_from_logits
from .local_weights import check_local_weights
from .op import fused_moe
from .weights import GateUpOrder, MoEWeights
from .weights_state import PROJECTIONS

if TYPE_CHECKING:
    from ..distributed import ExpertParallel


class PreparedExperts(torch.nn.Module):
    """The quantised experts of one layer, prepared for the device that they are on.

    ``state_dict`` holds the published tensors (of MXFP4 ``gate_up_proj_blocks``,
    ``gate_up_proj_scales``, …), whatever layout the kernels read. ``load_state_dict`` checks their
    sizes and prepares them in new memory: capture CUDA graphs again after it. ``.to(device)``
    prepares the weights for the new device; a dtype given to ``.to`` changes nothing. A call
    changes no state, so threads may share the module.

    Args:
        weights: MoEWeights, ROW_MAJOR or prepared.
        activation: what stands between the two GEMMs; an object or its name.
        activation_format: "bf16", "mxfp8", "mxfp4" or "fp8_token"; may be assigned later.
        dtype: dtype of the biases in the state dict.
        apply_router_weight_on_input: multiply x by the routing weight, instead of the result, as
            Llama 4 does; for one expert per token alone.
        expert_parallel: mxpert.distributed.ExpertParallel, where `weights` are the local experts of
            this rank. All ranks then call the module at the same time. ``state_dict`` has the local
            experts; ``load_state_dict`` takes these, or all experts, of which it takes its part.
        num_sms: most SMs that each GEMM occupies, as for `fused_moe`; may be assigned later.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value; `weights` that are not the
            rank's experts; a rank that has all experts, but not in the order of their ids.
    """

    if TYPE_CHECKING:

        def __call__(
            self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
        ) -> torch.Tensor: ...

    weights: MoEWeights
    no_gradient = "train with mxpert.training.MXMoE"
    """Remedy that the error for a gradient names."""

    def __init__(
        self,
        weights: MoEWeights,
        activation: ActivationLike,
        *,
        activation_format: ActivationFormat = "bf16",
        dtype: torch.dtype = torch.float32,
        apply_router_weight_on_input: bool = False,
        expert_parallel: ExpertParallel | None = None,
        num_sms: int | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        check_weight_on_input(op, apply_router_weight_on_input, 1)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.activation, self.dtype = parse_activation(activation, op), dtype
        check_gate(self.activation, weights.has_gate, Checks(op))
        self.expert_parallel, self.num_sms = expert_parallel, num_sms
        self.activation_format = parse_activation_format(activation_format, op)
        self._ranks: ExpertParallel | None = None
        if expert_parallel is not None:
            check_local_weights(op, expert_parallel, weights, self.activation_format)
            self._ranks = expert_parallel.of_next_layer()
        self._hold(weights)

    @property
    def group_ids(self) -> tuple[int, ...] | None:
        """The global ids of this rank's experts; None without `expert_parallel`."""
        return None if self.expert_parallel is None else self.expert_parallel.local_experts

    def _hold(self, weights: MoEWeights) -> None:
        """Keep `weights`, and register them as buffers so that memory footprints count them."""
        self.weights, self._width, parts = weights, weights.hidden_size, _parts_of(weights)
        for name in self._buffers.keys() - parts.keys():
            del self._buffers[name]  # of weights in another format
        for name, tensor in parts.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """X [..., H], weights and ids [T, top_k] → the shape and dtype of x.

        Weights and ids may have any dtype that `fused_moe` takes.

        Raises:
            UnsupportedError: x requires a gradient and the module is in training mode. In
                evaluation mode the error comes with the backward pass.
            ValueError: several experts per token with `apply_router_weight_on_input`.
        """
        on_input = self.apply_router_weight_on_input
        rows = self._rows(x, topk_ids.shape[-1] if on_input else 1)
        out = fused_moe(
            rows,
            self.weights,
            topk_weights,
            topk_ids,
            activation=self.activation,
            activation_format=self.activation_format,
            apply_router_weight_on_input=on_input,
            out_dtype=x.dtype,
            expert_parallel=self._ranks,
            num_sms=self.num_sms,
        )
        if x.dim() != 2:
            out = out.view(x.shape)
        return without_backward(type(self).__name__, out, x, remedy=self.no_gradient)

    def from_logits(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        top_k: int,
        *,
        routing: TopKOptions = TopKOptions(),
        correction_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Choose the experts from the router's logits and compute them, in one call.

        The result is that of a call of the module with the weights and ids of `route_topk`. Forward
        hooks of the module do not run: they get weights and ids.

        Args:
            x: [..., H], as for a call of the module.
            logits: float32, bfloat16 or float16 [T, E] over the experts of all ranks.
            top_k: experts per token.
            routing: scoring, normalisation, groups and scaling, as for `route_topk`.
            correction_bias: float32 [E], added to the scores for the choice only, or None.

        Returns:
            The shape and dtype of x.

        Raises:
            TypeError, ValueError, UnsupportedError: as a call of the module and `route_topk` do.
        """
        on_input = self.apply_router_weight_on_input
        rows = self._rows(x, top_k if on_input else 1)
        out = fused_moe_from_logits(
            rows,
            self.weights,
            logits,
            top_k,
            activation=self.activation,
            activation_format=self.activation_format,
            routing=routing,
            correction_bias=correction_bias,
            apply_router_weight_on_input=on_input,
            out_dtype=x.dtype,
            expert_parallel=self._ranks,
            num_sms=self.num_sms,
        )
        if x.dim() != 2:
            out = out.view(x.shape)
        return without_backward(type(self).__name__, out, x, remedy=self.no_gradient)

    def _rows(self, x: torch.Tensor, top_k: int) -> torch.Tensor:
        """Check a call, and return x as bfloat16 rows [T, H] whose values are adjacent.

        top_k: experts per token; any number without `apply_router_weight_on_input`.
        """
        if self.training and x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                message(
                    type(self).__name__,
                    "training",
                    "evaluation mode",
                    "training mode: MXFP4 weights have no gradient",
                    self.no_gradient,
                )
            )
        if not torch.compiler.is_compiling():
            self._refuse_exchanged_buffers()
        width = self._width
        if top_k != 1:
            check_weight_on_input(type(self).__name__, self.apply_router_weight_on_input, top_k)
        if x.dim() != 2 and x.shape[-1:] != (width,):
            need = f"[..., {width}]"
            raise ValueError(message(type(self).__name__, "x.shape", need, list(x.shape)))
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        if rows.stride(-1) != 1:  # the kernels read rows whose values are adjacent
            rows = rows.contiguous()
        return rows if rows.dtype == torch.bfloat16 else rows.to(torch.bfloat16)

    def _refuse_exchanged_buffers(self) -> None:
        """Raise for buffers that were assigned, or that `functional_call` exchanged."""
        weights, buffers = self.weights, self._buffers.values()
        gate_up, down = weights.gate_up_proj, weights.down_proj
        own = [gate_up.qdata, gate_up.scale, down.qdata, down.scale]
        if len(buffers) > len(own):  # zero points, factors of rows
            own = [*_parts_of(weights).values()]
        if len(buffers) != len(own) or not all(map(operator.is_, own, buffers)):
            need = "the prepared weights, whose layout only the kernels know"
            got = "other tensors: they were assigned, or passed to functional_call"
            remedy = "load_state_dict takes the published tensors"
            raise UnsupportedError(message(type(self).__name__, "buffers", need, got, remedy))

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> PreparedExperts:
        """`to`, `cuda` and `cpu` prepare the weights for the new device and keep their dtypes."""
        moved = fn(torch.empty(0, dtype=torch.uint8, device=self.weights.device)).device
        if moved != self.weights.device:
            keep_fp8 = self.weights.layout.has_fp8_codes and moved.type != "cpu"
            self._hold(self.weights.unprepare().prepare(device=moved, keep_fp8=keep_fp8))
        return self

    def _published(self) -> dict[str, torch.Tensor]:
        return published.published_expert_tensors(self.weights.unprepare(), dtype=self.dtype)

    def _published_shapes(self) -> Mapping[str, tuple[int, ...]]:
        weights = self.weights
        if weights.weight_format != MXFP4.name:  # on meta no data is copied
            tensors = published.published_expert_tensors(weights.to("meta").unprepare())
            return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = weights.num_experts, weights.hidden_size, weights.intermediate_size
        has_bias, has_gate = weights.gate_up_bias is not None, weights.has_gate
        return published.published_shapes(*sizes, has_bias=has_bias, has_gate=has_gate)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """The published tensors; those of a packed layout are on the CPU, to save GPU memory."""
        packed = self.weights.layout is not Layout.ROW_MAJOR
        for name, tensor in self._published().items():
            destination[prefix + name] = tensor.cpu() if packed else tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weights = self.weights
        wanted = self._published_shapes()
        given = {
            name.removeprefix(prefix): self._local(tensor)
            for name, tensor in state_dict.items()
            if name.startswith(prefix)
        }
        missing_keys += [prefix + name for name in wanted if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in wanted]
        given = {name: tensor for name, tensor in given.items() if name in wanted}
        errors = [
            error
            for name, tensor in given.items()
            if (error := published.mismatch(prefix + name, tensor, wanted[name]))
        ]
        error_msgs += errors
        if errors or not given:
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        kept = {} if given.keys() == wanted.keys() else self._published()
        loaded = published.expert_weights_from(
            kept
            | {name: tensor.to(weights.device, copy=not assign) for name, tensor in given.items()},
            GateUpOrder.INTERLEAVED if weights.has_gate else None,
            weights.weight_format,
        )
        keep_fp8 = weights.layout.has_fp8_codes
        self._hold(loaded.prepare(device=weights.device, keep_fp8=keep_fp8))

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The local experts of a tensor of all experts; any other tensor as it is."""
        ranks = self.expert_parallel
        if ranks is None or not torch.is_tensor(tensor):
            return tensor
        is_whole = tensor.shape[:1] == (ranks.placement.num_experts,)
        return tensor[list(ranks.local_experts)] if is_whole else tensor

    def extra_repr(self) -> str:
        weights = self.weights
        return (
            f"num_experts={weights.num_experts}, hidden_size={weights.hidden_size}, "
            f"intermediate_size={weights.intermediate_size}, activation={self.activation}, "
            f"activation_format={self.activation_format!r}, layout={weights.layout.name}"
            + (", apply_router_weight_on_input=True" if self.apply_router_weight_on_input else "")
            + ("" if self.expert_parallel is None else f", {self.expert_parallel}")
        )


def _parts_of(weights: MoEWeights) -> dict[str, torch.Tensor]:
    """The tensors of both projections that are not None, by their name as buffers."""
    parts = {
        f"{name}_{part}": getattr(getattr(weights, name), part, None)
        for name in PROJECTIONS
        for part in (*published.PARTS, "fp8_codes")
    }
    return {name: tensor for name, tensor in parts.items() if tensor is not None}
