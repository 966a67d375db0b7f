"""MXMoE: a Mixture-of-Experts feed-forward block that trains, its expert GEMMs in MXFP8."""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from ..core.ambient import Context, isolated, refuse_transforms
from ..core.gradient import apply, differentiable_once, keep_graph
from ..core.problem import ActivationFormat, ActivationLike, SiLU, parse_gated_activation
from ..distributed import ExpertParallel
from ..errors import Checks
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, ScaleRule, ScaleRuleLike
from ..modules import MoE, quantize_weights
from .activation import gated_activation
from .expert_parallel import check_expert_parallel, run_on_ranks
from .module import MXGroupedLinear, check_options, float_dtypes, require_size
from .permute import run_experts, sort_by_expert
from .recipe import MXFP8Recipe

_NEED = Checks("MXMoE")


class MXMoE(torch.nn.Module):
    """Route each token to `top_k` experts, run their gated MLPs, add up the weighted results.

    ``y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`` over the chosen e, with w the
    softmax over all experts in float32, divided by its sum over the chosen ones.

    Rows are sorted by expert on the device (stable, tokens ascending within an expert). Gate and
    up are one grouped linear layer with CONCATENATED rows (gate first). Nothing is read back to the
    host, no token is dropped, and repeated runs give the same bits.

    With `expert_parallel` the experts lie on several ranks. Each rank passes its own tokens and
    gets their results. ``gate_up_proj`` and ``down_proj`` hold the rank's experts alone, as
    `MXGroupedLinear` with ``group_ids``; the router is whole on every rank.

    - *Every rank makes the same calls*: forward and backward equally often, in the same order, a
      rank without tokens too.
    - *First weights*: ranks that construct the module in the same random state hold the parts of
      the module that one rank would construct. Each draws all experts, one at a time, and keeps its
      own.
    - *State*: ``state_dict`` has the local experts. ``load_state_dict`` takes that, or the state of
      the whole layer, of which each rank takes its part.
    - *Gradients*: those of the experts are of the mean of the ranks' losses. Average them over the
      ranks that hold the same experts (``dp``); average router and dense parameters over all ranks
      (``ep`` and ``dp``), as DistributedDataParallel and FSDP2 do. `prepare_for_ddp` tells
      DistributedDataParallel. With FSDP2 shard the two grouped layers over ``mesh["dp"]``, then the
      model over the mesh of both.
    - *Wire*: rows travel in the dtype of x, results in the wider of that and the object's
      `combine_dtype`, gradients likewise. With wire_format="mxfp8" x alone travels as MXFP8, and
      wgrad quantises it twice.
    - *Host*: ALL_TO_ALL waits for the device. GATHER does not; its activations have rows for
      N · max_tokens · top_k pairs.

    The two grouped layers keep for backward what `grouped_linear` says. The module also keeps the
    gate/up product [R, 2 F] and the down product [R, H] in the dtype of x, with R = T·top_k; x
    itself, for the router; and a few numbers for each token, expert and slot.

    Args:
        hidden_size: H. intermediate_size: F. Multiples of 32 with MXFP8.
        num_experts: E. top_k: experts per token.
        activation: SiLU(), SwiGLU(), ClampedSiLU(), SiTUv2() or GELU(), or a name as `fused_moe`
            takes it. ReLU2() is refused.
        recipe: of both grouped layers.
        aux_loss_coef: factor of the load-balancing loss, at least 0.
        bias: whether the experts have biases.
        expert_parallel: a mxpert.distributed.ExpertParallel with these sizes and transport GATHER
            or ALL_TO_ALL; None for all experts in this process.
        device: of the parameters. dtype: bfloat16, float16 or float32; without MXFP8 float64 too.
        num_sms: most SMs that each GEMM of the experts occupies, as for `grouped_linear`.

    Attributes:
        aux_loss: the scalar ``aux_loss_coef · E · Σ_e f_e p_e`` of the last forward pass, float32
            and differentiable; add it to the loss. f_e is the fraction of (token, slot) pairs that
            went to expert e, p_e its mean probability, both over the tokens of this rank. In
            perfect balance it is `aux_loss_coef`. It is None before the first pass, and 0 without
            tokens.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value.
        UnsupportedError: an activation without a gate.
        PeerLostError: a rank of `expert_parallel` died or did not arrive in time.

    Source:
        Switch Transformers (arXiv 2101.03961, section 2.2), GShard (arXiv 2006.16668, section 2.2).

    Example:
        >>> import torch
        >>> from mxpert.training import MXMoE
        >>> moe = MXMoE(64, 32, num_experts=4, top_k=2)
        >>> y = moe(torch.randn(2, 3, 64, dtype=torch.bfloat16))
        >>> (y.float().sum() + moe.aux_loss).backward()
        >>> y.shape, moe.gate_up_proj.weight.grad.shape
        (torch.Size([2, 3, 64]), torch.Size([4, 64, 64]))
    """

    aux_loss: torch.Tensor | None

    if TYPE_CHECKING:

        def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: ActivationLike = SiLU(),
        recipe: MXFP8Recipe = MXFP8Recipe(),
        aux_loss_coef: float = 0.01,
        bias: bool = False,
        expert_parallel: ExpertParallel | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        num_sms: int | None = None,
    ) -> None:
        super().__init__()
        op = _NEED.op
        device = check_options(op, recipe, bias, device, dtype)
        unit = MX_BLOCK_SIZE if recipe.enabled else 1
        for name, size, multiple in (
            ("hidden_size", hidden_size, unit),
            ("intermediate_size", intermediate_size, unit),
            ("num_experts", num_experts, 1),
            ("top_k", top_k, 1),
        ):
            require_size(op, name, size, multiple)
        _NEED(top_k <= num_experts, "top_k", f"at most num_experts = {num_experts}", top_k)
        activation = parse_gated_activation(activation, op)
        if not isinstance(aux_loss_coef, (int, float)) or isinstance(aux_loss_coef, bool):
            raise _NEED.type_error("aux_loss_coef", "a number", repr(aux_loss_coef))
        is_finite = 0 <= aux_loss_coef <= sys.float_info.max
        _NEED(is_finite, "aux_loss_coef", "a finite number of at least 0", aux_loss_coef)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.activation, self.aux_loss_coef = activation, float(aux_loss_coef)
        self.router = torch.nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.expert_parallel, group_ids = expert_parallel, None
        self._ranks: ExpertParallel | None = None
        if expert_parallel is not None:
            sizes = num_experts, top_k, hidden_size
            group_ids = check_expert_parallel(op, expert_parallel, sizes, recipe)
            self._ranks = expert_parallel.of_next_layer()
        linear = functools.partial(
            MXGroupedLinear,
            num_experts,
            bias=bias,
            group_ids=group_ids,
            recipe=recipe,
            device=device,
            dtype=dtype,
            num_sms=num_sms,
        )
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)
        self.aux_loss = None
        self._reset_router()

    def reset_parameters(self) -> None:
        """Router and experts uniform in ±1/√fan_in, as torch.nn.Linear."""
        self._reset_router()
        self.gate_up_proj.reset_parameters()
        self.down_proj.reset_parameters()

    def _reset_router(self) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        torch.nn.init.uniform_(self.router, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., H], bfloat16, float16 or float32 (float64 without MXFP8) → the same shape."""
        dtypes = float_dtypes(self.gate_up_proj.recipe)
        _NEED.tensor(x, "x", dtype=dtypes, device=self.router.device)
        fits = x.dim() > 0 and x.shape[-1] == self.hidden_size
        _NEED(fits, "x.shape", f"[..., {self.hidden_size}]", list(x.shape))
        refuse_transforms("MXMoE", (x, self.router))
        tokens = x.reshape(-1, self.hidden_size)
        probabilities = apply(_WideLinear, tokens, self.router).softmax(dim=-1)  # [T, E]
        chosen, topk_ids = probabilities.topk(self.top_k, dim=-1)
        topk_weights = chosen / chosen.sum(dim=-1, keepdim=True)  # [T, k]
        pairs = sort_by_expert(topk_ids, self.num_experts)
        self.aux_loss = self._balance(probabilities, pairs[2])
        if self._ranks is None:
            y = run_experts(self._experts, tokens, topk_weights, pairs)
        else:
            rule = self.gate_up_proj.recipe.scale_rule
            routed = tokens, topk_weights, topk_ids
            y = run_on_ranks(self._ranks, self._experts, *routed, rule)
        return y.view(x.shape)

    @torch.no_grad()
    def to_inference(
        self,
        *,
        activation_format: ActivationFormat = "bf16",
        scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    ) -> MoE:
        """A copy of this layer for inference, its experts in MXFP4.

        The experts are those of `mxpert.quantize_weights`. The router keeps its float32 values and
        chooses experts as this layer does. Later training does not change the copy.

        Args:
            activation_format: a name as `mxpert.fused_moe` takes it, such as "bf16" or "a8w4".
            scale_rule: how a weight block's scale follows from its maximum.

        Returns:
            A mxpert.MoE on the device of the parameters, in evaluation mode; with
            `expert_parallel` it has this rank's experts.

        Raises:
            TypeError: float64 parameters.
            ValueError: an unknown format or rule, or one that `expert_parallel` does not send.

        Example:
            >>> layer = MXMoE(64, 32, num_experts=4, top_k=2)
            >>> serving = layer.to_inference(activation_format="a8w4")
            >>> serving(torch.randn(2, 3, 64, dtype=torch.bfloat16)).shape
            torch.Size([2, 3, 64])
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        _NEED.tensor(self.router, "router", dtype=FLOAT_DTYPES)
        weights = quantize_weights(
            gate_up.weight,
            down.weight,
            gate_up_order="concatenated",
            gate_up_bias=gate_up.bias,
            down_bias=down.bias,
            scale_rule=scale_rule,
        )
        return MoE(
            weights,
            self.router.detach().to(torch.float32, copy=True),
            top_k=self.top_k,
            activation=self.activation,
            activation_format=activation_format,
            expert_parallel=self.expert_parallel,
        ).eval()

    def _experts(self, rows: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] sorted by expert → the experts' outputs [R, H]."""
        hidden = gated_activation(self.gate_up_proj(rows, group_offsets), self.activation)
        result: torch.Tensor = self.down_proj(hidden, group_offsets)
        return result

    def _balance(self, probabilities: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
        """``aux_loss_coef · E · Σ_e f_e p_e``; 0 without tokens."""
        num_tokens = max(1, probabilities.shape[0])
        counts = group_offsets.diff().to(probabilities.dtype)
        fraction = counts / (num_tokens * self.top_k)  # f_e
        mean = probabilities.sum(dim=0) / num_tokens  # p_e
        return self.aux_loss_coef * self.num_experts * (fraction * mean).sum()

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, "
            f"activation={self.activation}, aux_loss_coef={self.aux_loss_coef}"
            + ("" if self.expert_parallel is None else f", {self.expert_parallel}")
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loss of the last pass: its graph cannot be copied or pickled."""
        return self.__dict__ | {"aux_loss": None}


class _WideLinear(torch.autograd.Function):
    """``x @ weight.T`` in float32 (float64 for float64), under autocast too.

    Backward keeps x in its own dtype, not a wide copy.
    """

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        keep_graph(ctx, x, weight)
        ctx.save_for_backward(x, weight)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with isolated(x.device.type):
            return x.to(wide) @ weight.to(wide).T

    @staticmethod
    @differentiable_once("MXMoE")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with isolated(x.device.type):
            return (
                (grad @ weight.to(grad.dtype)).to(x.dtype),
                (grad.T @ x.to(grad.dtype)).to(weight.dtype),
            )
