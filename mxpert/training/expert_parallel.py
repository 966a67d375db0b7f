"""Experts that train on several ranks: the layer's exchange, and the average of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import UnionType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from ..distributed import ExpertParallel, Transport
from ..distributed.autograd import combine_tokens, dispatch_tokens
from ..errors import Checks, message, require
from ..formats.spec import MXFP8_E4M3, ScaleRule
from .permute import Experts, run_experts, sort_by_expert
from .recipe import MXFP8Recipe

TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)
"""Transports whose rows stay what they are until backward, and which carry any dtype."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_on_ranks(
    ep: ExpertParallel,
    experts: Experts,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scale_rule: ScaleRule,
) -> torch.Tensor:
    """Send tokens to their experts, run those of this rank, and bring the results back.

    Inside of the experts, gradients are those of the *mean* of the ranks' losses: the sum over the
    ranks, divided by their number. The factor goes into the float32 routing weights on the way in,
    and its inverse into the float32 sum of each token's rows on the way out, so that it rounds
    nothing. The gradients that leave, of tokens and routing weights, are of this rank's loss.

    Args:
        tokens: [T, H]. topk_weights: float32 (float64 for float64) [T, k].
        topk_ids: integers [T, k], global.

    Returns:
        [T, H].
    """
    received = dispatch_tokens(ep, tokens, topk_weights, topk_ids, scale_rule=scale_rule)
    assert isinstance(received.x, torch.Tensor)  # for the type checker
    ids, local = received.topk_ids, ep.num_local_experts  # [R, k]
    keys = ids.masked_fill(ids < 0, local)
    order, inverse, group_offsets = sort_by_expert(keys, local)
    inverse = inverse.masked_fill(keys.view(-1) == local, order.shape[0])  # names no row
    if ep.transport is Transport.ALL_TO_ALL:
        # The host has waited for the counts already; it also takes the number of local pairs, so
        # that activations have no rows for pairs that another rank computes.
        order = order[: int(group_offsets[-1])]
    pairs = order, inverse, group_offsets
    partial = run_experts(experts, received.x, received.topk_weights, pairs, float(ep.size))
    return combine_tokens(ep, partial, received)


def check_expert_parallel(
    op: str, ep: ExpertParallel, sizes: tuple[int, int, int], recipe: MXFP8Recipe
) -> tuple[int, ...]:
    """Check an ExpertParallel for a layer that trains; returns the global ids of its experts here.

    Args:
        sizes: E, top_k and H of the layer.

    Raises:
        TypeError: no ExpertParallel.
        ValueError: other sizes, a transport or wire without gradients, an expert on two ranks.
    """
    need = Checks(op)
    _require_type(op, "expert_parallel", ep, ExpertParallel, "an ExpertParallel")
    have = ep.placement.num_experts, ep.top_k, ep.hidden_size
    names = "num_experts", "top_k", "hidden_size"
    for name, size, given in zip(names, sizes, have, strict=True):
        need(given == size, f"expert_parallel: {name}", size, given)
    need(
        ep.transport in TRANSPORTS,
        "expert_parallel.transport",
        "GATHER or ALL_TO_ALL",
        ep.transport.name,
        "make it with transport=Transport.ALL_TO_ALL; SYMMETRIC is for inference",
    )
    fits = recipe.enabled and recipe.forward_format == MXFP8_E4M3.name
    need(
        ep.wire_format == "bf16" or fits,
        "expert_parallel.wire_format",
        '"bf16", or a recipe with forward_format="mxfp8_e4m3"',
        repr(ep.wire_format),
        "an MXFP8 wire rounds x as such a recipe does",
    )
    need(
        sum(ep.placement.num_local_experts) == sizes[0],
        "expert_parallel.placement",
        "each expert on one rank",
        f"{sum(ep.placement.num_local_experts)} copies of {sizes[0]} experts",
        "redundant experts are for inference",
    )
    of_ranks = [ep.placement.local_experts(rank) for rank in range(ep.size)]
    need(
        all(list(experts) == sorted(experts) for experts in of_ranks),
        "expert_parallel.placement",
        "ascending experts on every rank",
        of_ranks,
    )
    return of_ranks[ep.rank]


def _require_type(op: str, name: str, value: object, kind: type | UnionType, need: str) -> None:
    """Raise a TypeError unless `value` is of a type; a bool is no number."""
    fits = isinstance(value, kind) and not isinstance(value, bool)
    require(fits, op, name, need=need, got=type(value).__name__, error=TypeError)


def local_expert_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model of which each rank of expert parallelism has its own part.

    They are the parameters of modules with ``group_ids``: `MXGroupedLinear`, and the experts that
    ``mxpert.convert(model, recipe=…, expert_parallel=…)`` makes. All others are the same on every
    rank.

    Args:
        model: any module.

    Returns:
        Parameters by their names in `model`.

    Example:
        >>> from mxpert.training import MXGroupedLinear, local_expert_parameters
        >>> half = MXGroupedLinear(4, 32, 32, group_ids=[0, 1])
        >>> list(local_expert_parameters(torch.nn.Sequential(torch.nn.Linear(2, 2), half)))
        ['1.weight']
    """
    _require_type("local_expert_parameters", "model", model, torch.nn.Module, "a Module")
    return {
        f"{path}.{name}".removeprefix("."): parameter
        for path, module in model.named_modules()
        if getattr(module, "group_ids", None) is not None
        for name, parameter in module.named_parameters(recurse=False)
    }


def prepare_for_ddp(model: torch.nn.Module, data_parallel_group: dist.ProcessGroup) -> None:
    """Make DistributedDataParallel average each gradient over the ranks that share its parameter.

    Call it before wrapping the model. DistributedDataParallel over all ranks then leaves the local
    experts alone, and each of their gradients is averaged over `data_parallel_group` as soon as
    backward has it.

    Args:
        model: with layers that have an ExpertParallel.
        data_parallel_group: the ranks that hold the same experts as this one,
            ``mesh["dp"].get_group()``.

    Example:
        >>> model = torch.nn.Linear(2, 2)  # without local experts nothing changes
        >>> prepare_for_ddp(model, None)
    """
    op = "prepare_for_ddp"
    _require_type(op, "model", model, torch.nn.Module, "a Module")
    local = local_expert_parameters(model)
    if local or data_parallel_group is not None:
        group = data_parallel_group
        _require_type(op, "data_parallel_group", group, dist.ProcessGroup, "a ProcessGroup")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(local))

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size(data_parallel_group)
            dist.all_reduce(parameter.grad, group=data_parallel_group)

    for parameter in local.values():
        parameter.register_post_accumulate_grad_hook(average)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    expert_parallel_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm, with every rank's experts, is at most `max_norm`.

    ``torch.nn.utils.clip_grad_norm_``, whose arguments these are, would take the local experts
    alone, and scale parameters that all ranks share by another factor on each. Norms are computed
    in float32 or wider: those of float16 gradients do not overflow.

    Args:
        parameters: a model after backward and its averages, in DistributedDataParallel, FSDP2 or
            neither; or parameters, where there is no `expert_parallel_group`. Gradients may be
            None.
        max_norm: above 0. norm_type: p of the p-norm; may be infinite.
        error_if_nonfinite: raise a RuntimeError, on every rank, for a norm that is NaN or infinite.
        foreach: as torch's, for the scaling.
        expert_parallel_group: the ranks that hold different experts, ``ep.group``; None for one
            rank.

    Returns:
        The norm before, a float32 scalar (float64 where a gradient is).

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[5.0]])
        >>> clip_grad_norm_(layer, 1.0), round(layer.weight.grad.item(), 3)
        (tensor(5.), 1.0)
    """
    op, group = "clip_grad_norm_", expert_parallel_group
    _require_type(op, "max_norm", max_norm, int | float, "a number")
    require(0 < max_norm < math.inf, op, "max_norm", need="a finite number above 0", got=max_norm)
    need = "a number; pass expert_parallel_group=… by its name"
    _require_type(op, "norm_type", norm_type, int | float, need)
    require(norm_type > 0, op, "norm_type", need="above 0", got=norm_type)
    if group is not None:
        _require_type(op, "expert_parallel_group", group, dist.ProcessGroup, "a ProcessGroup")
        _require_type(op, "parameters", parameters, torch.nn.Module, "a Module")
    local: set[int] = set()
    if isinstance(parameters, torch.nn.Module):
        local = {id(parameter) for parameter in local_expert_parameters(parameters).values()}
        parameters = parameters.parameters()
    _require_type(op, "parameters", parameters, Iterable, "a Module or its parameters")
    every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for each in every:
        _require_type(op, "parameters", each, torch.Tensor, "tensors")
    owned = [each for each in every if id(each) in local]
    shared = [each for each in every if id(each) not in local]
    total = _whole_norm(owned, shared, float(norm_type), group)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(message(op, "the norm", "a finite one", total.item()))
    for part in (owned, shared):
        clip_grads_with_norm_(part, max_norm, total, foreach)
    return total


def _whole_norm(
    owned: list[torch.Tensor], shared: list[torch.Tensor], p: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The p-norm of the gradients, those of `owned` parameters of all ranks of `group`.

    Norms of tensors are float32 or wider; their powers are summed in float64, which holds the
    squares of all float32 numbers.
    """
    device = next((each.device for each in (*owned, *shared)), torch.device("cpu"))
    norms, dtype = [], torch.float32
    for parameters in (owned, shared):
        parts = [torch.zeros((), dtype=torch.float64, device=device)]
        for grad in (each.grad for each in parameters if each.grad is not None):
            if not grad.numel():
                continue
            wide = torch.promote_types(grad.dtype, torch.float32)
            dtype = torch.promote_types(dtype, wide)
            norm = torch.linalg.vector_norm(grad, p, dtype=wide)
            if hasattr(norm, "full_tensor"):  # a DTensor, of FSDP2's shards
                norm = norm.full_tensor()
            parts.append(norm.to(device, torch.float64))
        norms.append(torch.stack(parts))
    if math.isinf(p):
        total = norms[0].amax()
        if group is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return torch.maximum(total, norms[1].amax()).to(dtype)
    powers = [norm.pow(p).sum() for norm in norms]
    if group is not None:
        dist.all_reduce(powers[0], group=group)
    return (powers[0] + powers[1]).pow(1 / p).to(dtype)


@torch.no_grad()
def full_state_dict(
    model: torch.nn.Module, ep: ExpertParallel, *, cpu_offload: bool = False
) -> dict[str, torch.Tensor]:
    """The state of a model with all of its experts, which one process without `ep` can load.

    Every process of every group calls it. Local experts are gathered over the ranks of `ep`, and
    the shards of FSDP2 over their own mesh, one tensor at a time. To load it, give it to
    ``load_state_dict`` of a model on one rank or on any number of ranks; each rank takes its part.
    A model that FSDP2 has sharded takes it through
    ``torch.distributed.checkpoint.state_dict.set_model_state_dict`` with
    ``StateDictOptions(full_state_dict=True)``.

    Args:
        model: with or without FSDP2 or DistributedDataParallel; its local experts are those of
            `ep`. Modules for inference (mxpert.MoE, converted models) are gathered too.
        ep: the ExpertParallel of all of its layers.
        cpu_offload: return the state on the CPU, and only in process 0 of the default group; the
            others return {}. Otherwise every process returns all of it, on the model's device.

    Returns:
        What ``model.state_dict()`` has, as plain tensors, with all experts.

    Raises:
        TypeError: a wrong type.
        ValueError: local experts that are not those of `ep`, or a wrapper that renames them.

    Source:
        torch.distributed.checkpoint.state_dict.get_model_state_dict, whose `cpu_offload` this is.

    Example:
        >>> import torch
        >>> from mxpert.distributed import ExpertParallel
        >>> from mxpert.training import MXGroupedLinear
        >>> ep = ExpertParallel(num_experts=4, top_k=1, hidden_size=32, max_tokens=8)
        >>> half = MXGroupedLinear(4, 32, 32, group_ids=ep.local_experts)
        >>> full_state_dict(half, ep)["weight"].shape
        torch.Size([4, 32, 32])
    """
    op = "full_state_dict"
    _require_type(op, "model", model, torch.nn.Module, "a Module")
    _require_type(op, "ep", ep, ExpertParallel, "an ExpertParallel")
    if not isinstance(cpu_offload, bool):
        raise TypeError(message(op, "cpu_offload", "True or False", repr(cpu_offload)))
    own = model.state_dict()
    owners = {name: name.rpartition(".")[0] for name in own}
    local = _local_modules(op, model, ep, set(owners.values()))
    is_first = ep.group is None or dist.get_rank() == 0
    state = {}
    for name, value in own.items():
        if hasattr(value, "full_tensor"):  # a DTensor, of FSDP2's shards
            value = value.full_tensor()
        if owners[name] in local:
            value = _of_all_ranks(value, ep)
        if is_first or not cpu_offload:
            state[name] = value.cpu() if cpu_offload else value
    return state


def _local_modules(
    op: str, model: torch.nn.Module, ep: ExpertParallel, known: set[str]
) -> set[str]:
    """Paths of the modules whose tensors are of this rank's experts; `known` paths have tensors."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        held = getattr(module, "group_ids", None)
        if held is None:
            continue
        require(
            tuple(held) == ep.local_experts,
            op,
            f"ep: {path}",
            need=f"an ExpertParallel with experts {list(held)} on this rank",
            got=list(ep.local_experts),
        )
        require(
            path in known,
            op,
            f"model: {path}",
            need="the state dict to name its tensors so",
            got="other names",
            remedy="pass the model without its wrapper",
        )
        found.add(path)
    return found


def _of_all_ranks(own: torch.Tensor, ep: ExpertParallel) -> torch.Tensor:
    """The rows [L, …] of each rank's experts → [E, …], on the device of `own`."""
    whole = own.new_empty((ep.placement.num_experts, *own.shape[1:]), device=ep.device)
    for rank in range(ep.size):
        experts = list(ep.placement.local_experts(rank))
        if rank == ep.rank:
            part = own.to(ep.device).contiguous()
        else:
            part = whole.new_empty((len(experts), *own.shape[1:]))
        if ep.group is not None:
            dist.broadcast(part, group=ep.group, group_src=rank)
        whole[experts] = part
    return whole.to(own.device)
